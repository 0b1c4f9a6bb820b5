"""What a Hugging Face folder says about its model, in GGUF's keys and names.

The keys and names are those of llama.cpp's convert_hf_to_gguf.py (conversion/{base,llama,qwen,gemma}.py), the defaults
those of the configuration classes of transformers. Two keys go beyond what llama.cpp writes for Gemma 3, because it
guesses them from the number of layers: `attention.scale` and `attention.sliding_window_pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ork.errors import SourceError
from ork.sources.base import F32, MetaValue

MAX_LAYERS = 1 << 12

# --- architectures, as data ---

TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
UNUSED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")  # buffers of older checkpoints


@dataclass(frozen=True)
class Architecture:
    name: str  # general.architecture
    layer: Mapping[str, str]  # module below model.layers.N. -> below blk.N.
    activation: str
    defaults: Mapping[str, Any]  # what the configuration class of transformers assumes where config.json is silent
    interleaved: frozenset[str] = frozenset()  # whose rows go from halves to pairs
    norm_shift: float = 0.0


COMMON: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
LLAMA = Architecture("llama", LAYER, "silu", COMMON, interleaved=frozenset({"attn_q", "attn_k"}))
QWEN2 = Architecture("qwen2", LAYER, "silu", COMMON | {"max_position_embeddings": 32768})
QWEN3 = Architecture("qwen3", LAYER, "silu", COMMON | {"max_position_embeddings": 32768, "head_dim": 128})
GEMMA3_DEFAULTS = COMMON | {
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = Architecture("gemma3", GEMMA_LAYER, "gelu_pytorch_tanh", GEMMA3_DEFAULTS, norm_shift=1.0)
EMBEDDING_GEMMA = Architecture("gemma-embedding", GEMMA_LAYER, "gelu_pytorch_tanh", GEMMA3_DEFAULTS, norm_shift=1.0)

BY_MODEL_TYPE = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3_text": GEMMA3}


class Config:
    """config.json with the defaults of its architecture; every value is checked for its type when asked for."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self.path = path
        self.values = values
        model_type = values.get("model_type")
        if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
            known = ", ".join(BY_MODEL_TYPE)
            raise SourceError(f"{path}: model_type {str(model_type)[:80]!r} is not supported; supported are {known}")
        self.arch = BY_MODEL_TYPE[model_type]
        if self.arch is GEMMA3 and self.flag("use_bidirectional_attention"):
            self.arch = EMBEDDING_GEMMA
        if "quantization_config" in values:
            raise self.error("quantization_config", "a quantised checkpoint; take the original one, or a GGUF")

    def error(self, key: str, problem: str) -> SourceError:
        return SourceError(f"{self.path}: {key!r}: {problem}")

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.arch.defaults.get(key) if value is None else value

    def size(self, key: str, least: int = 1, most: int = 1 << 31) -> int:
        n = self.get(key)
        if type(n) is not int or not least <= n <= most:
            raise self.error(key, f"{str(n)[:40]} is not a whole number from {least} to {most}")
        return n

    def real(self, key: str, value: Any = None) -> float:
        x = self.get(key) if value is None else value
        if type(x) not in (int, float) or not 0 < x < 1e30:
            raise self.error(key, f"{str(x)[:40]} is not a positive number")
        return float(x)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"{str(value)[:40]} is not true or false")
        return bool(value)

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads") if self.get("num_key_value_heads") is not None else self.heads

    @property
    def head_dim(self) -> int:
        return self.size("head_dim") if self.get("head_dim") is not None else self.size("hidden_size") // self.heads

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def rope(self, kind: str) -> dict[str, Any]:
        """{rope_theta, rope_type, ...} of the layers of this kind, in the spelling of transformers 5.

        Older configs have `rope_theta` and `rope_scaling` (with `type`) for full layers and `rope_local_base_freq`
        for sliding ones.
        """
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(given, dict):
            raise self.error("rope_parameters", "not an object")
        nested = [given[k] for k in ("full_attention", "sliding_attention") if k in given]
        if not all(isinstance(p, dict) for p in nested):
            raise self.error("rope_parameters", "not an object for each kind of layer")
        if nested:
            rope = dict(given.get(kind, {}))
        else:
            rope = dict(given) if kind == "full_attention" else {}
        theta = "rope_theta" if kind == "full_attention" else "rope_local_base_freq"
        rope["rope_theta"] = self.real(theta, rope.get("rope_theta"))
        rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
        return rope

    def full_layers(self) -> list[bool]:
        """For each layer of a model with a sliding window, whether it sees everything."""
        n, kinds = self.layers, self.values.get("layer_types")
        if kinds is None:
            every = self.size("sliding_window_pattern")
            return [(i + 1) % every == 0 for i in range(n)]
        names = {"full_attention": True, "sliding_attention": False}
        if not isinstance(kinds, list) or len(kinds) != n or not all(isinstance(k, str) and k in names for k in kinds):
            raise self.error("layer_types", f"not a list of full_attention or sliding_attention for {n} layers")
        return [names[k] for k in kinds]


def to_metadata(config: Config) -> dict[str, MetaValue]:
    """GGUF's keys from a config."""
    c, arch = config, config.arch.name
    for key in ("hidden_act", "hidden_activation"):
        if c.get(key) not in (None, c.arch.activation):
            raise c.error(key, f"{str(c.get(key))[:40]!r} is not supported for {arch}, {c.arch.activation!r} is")
    if c.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise c.error("partial_rotary_factor", "rotating a part of each head is not supported")

    rope = c.rope("full_attention")
    meta: dict[str, MetaValue] = {
        "block_count": c.layers,
        "context_length": c.size("max_position_embeddings"),
        "embedding_length": c.size("hidden_size"),
        "feed_forward_length": c.size("intermediate_size"),
        "vocab_size": c.size("vocab_size"),
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.real("rms_norm_eps"),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": rope["rope_theta"],
    }
    if rope["rope_type"] == "linear":
        meta["rope.scaling.type"] = "linear"
        meta["rope.scaling.factor"] = c.real("factor", rope.get("factor", 0))
    elif rope["rope_type"] not in ("default", "llama3"):
        raise c.error("rope_type", f"{str(rope['rope_type'])[:40]!r} is not supported (linear and llama3 are)")
    if c.arch in (GEMMA3, EMBEDDING_GEMMA):
        meta |= _gemma(c)
    elif c.flag("use_sliding_window"):
        raise c.error("use_sliding_window", f"a sliding window is not supported for {arch}")
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in meta.items()}


def _gemma(c: Config) -> dict[str, MetaValue]:
    meta: dict[str, MetaValue] = {"attention.scale": c.real("query_pre_attn_scalar") ** -0.5}
    if c.get("attn_logit_softcapping") is not None:
        raise c.error("attn_logit_softcapping", "not a property of Gemma 3")
    if c.get("final_logit_softcapping") is not None:
        meta["final_logit_softcapping"] = c.real("final_logit_softcapping")
    if c.flag("use_bidirectional_attention"):
        meta["attention.causal"] = False
    local = c.rope("sliding_attention")
    if local["rope_type"] != "default":
        raise c.error("rope_type", f"{str(local['rope_type'])[:40]!r} is not supported for sliding layers")
    full = c.full_layers()
    if not all(full):
        meta["rope.freq_base_swa"] = local["rope_theta"]
        meta["attention.sliding_window"] = c.size("sliding_window")
        n = len(full)
        regular = (p for p in range(1, n + 2) if full == [(i + 1) % p == 0 for i in range(n)])
        pattern = next(regular, None)  # p: every p-th layer is full; else a bool for each layer: it slides
        meta["attention.sliding_window_pattern"] = ~np.array(full) if pattern is None else pattern
    return meta


def rope_divisors(config: Config) -> F32 | None:
    """What llama3's scaling divides each frequency by, [head_dim / 2], or None; in f32 as llama.cpp computes it."""
    rope = config.rope("full_attention")
    if rope["rope_type"] != "llama3":
        return None
    dim = config.head_dim
    factor = config.real("factor", rope.get("factor", 8.0))
    low = config.real("low_freq_factor", rope.get("low_freq_factor", 1.0))
    high = config.real("high_freq_factor", rope.get("high_freq_factor", 4.0))
    length = "original_max_position_embeddings"
    old = config.real(length, rope.get(length) or config.values.get(length) or 8192)
    if high == low:
        raise config.error("high_freq_factor", "equal to low_freq_factor")
    frequencies = 1 / np.float32(rope["rope_theta"]) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    waves = np.float32(2 * np.pi) / frequencies
    smooth = (old / waves - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < old / high, 1.0, np.where(waves > old / low, factor, blended)).astype(np.float32)


def gguf_name(arch: Architecture, layers: int, name: str) -> str | None:
    """The GGUF name of a tensor of a checkpoint, or None if there is none."""
    module, _, part = name.removeprefix("model.").rpartition(".")
    if part not in ("weight", "bias"):
        return None
    if module in TOP:
        return f"{TOP[module]}.{part}"
    m = re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(.+)", module)
    if m and int(m[1]) < layers and m[2] in arch.layer:
        return f"blk.{m[1]}.{arch.layer[m[2]]}.{part}"
    return None


# --- tokenizer ---


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def tokenizer_metadata(
    config: Config, tokenizer: bytes | None, template: bytes | None, own: dict[str, Any], generation: dict[str, Any]
) -> dict[str, MetaValue]:
    """GGUF's tokenizer keys, and `tokenizer.huggingface.json`: the whole tokenizer.json.

    `own` is tokenizer_config.json, whose special tokens go before the numbers of config.json and
    generation_config.json (`generation`). If several tokens may end a text, `tokenizer.huggingface.eos_token_ids` has
    them all (i32 array).
    """
    meta: dict[str, MetaValue] = {}
    ids: dict[str, int] = {}
    if tokenizer is not None:
        try:
            meta["tokenizer.huggingface.json"] = tokenizer.decode()
            ids = {t.content: t.id for t in msgspec.json.decode(tokenizer, type=_AddedTokens).added_tokens}
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as e:
            where = config.path.parent / "tokenizer.json"
            raise SourceError(f"{where}: not a tokenizer ({str(e).splitlines()[0]}): download it again") from None
    if template is not None:
        meta["tokenizer.chat_template"] = template.decode("utf-8", "replace")
    elif (found := _template(own.get("chat_template"))) is not None:
        meta["tokenizer.chat_template"] = found

    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        entry = own.get(f"{name}_token")
        content = entry.get("content") if isinstance(entry, dict) else entry
        first = ids.get(content) if isinstance(content, str) else None
        listed = [_ids(c.get(f"{name}_token_id")) for c in (config.values, generation)]
        candidates = [first] if first is not None else [*listed[0], *listed[1]]
        if candidates:
            meta[f"tokenizer.ggml.{key}_token_id"] = candidates[0]
        if name == "eos":
            ends = sorted({*candidates[:1], *listed[0], *listed[1]})
            if len(ends) > 1:
                meta["tokenizer.huggingface.eos_token_ids"] = np.array(ends, np.int32)
        if isinstance(own.get(f"add_{name}_token"), bool):
            meta[f"tokenizer.ggml.add_{name}_token"] = own[f"add_{name}_token"]
    return meta


def _template(value: Any) -> str | None:
    """A chat template, or the default one of a list of named ones."""
    if isinstance(value, list):
        named = {
            t.get("name"): t.get("template") for t in value if isinstance(t, dict) and isinstance(t.get("name"), str)
        }
        value = named.get("default")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and 0 <= v < 1 << 31]
