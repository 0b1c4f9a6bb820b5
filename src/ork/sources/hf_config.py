"""What a Hugging Face folder says about its model, in GGUF's keys and names.

The keys and names are those of llama.cpp's convert_hf_to_gguf.py (conversion/*.py), the defaults
those of the configuration classes of transformers. Two keys go beyond what llama.cpp writes for Gemma 3, because it
guesses them from the number of layers: `attention.scale` and `attention.sliding_window_pattern`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ork.errors import SourceError
from ork.sources.base import F32, MetaValue
from ork.sources.hf_names import GEMMA_LAYER, GRANITE_LAYER, LAYER, LFM2_LAYER, routed

MAX_LAYERS = 1 << 12

# --- architectures, as data ---


@dataclass(frozen=True)
class Architecture:
    name: str  # general.architecture
    layer: Mapping[str, str]  # module below model.layers.N. -> below blk.N.
    activation: str
    defaults: Mapping[str, Any]  # what the configuration class of transformers assumes where config.json is silent
    interleaved: frozenset[str] = frozenset()  # whose rows go from halves to pairs
    norm_shift: float = 0.0
    moe: Callable[[Config], dict[str, MetaValue]] | None = None  # keys of a mixture of experts
    eps: str = "rms_norm_eps"
    norm: str = "output_norm.weight"  # the last one


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

    def refuse(self, key: str, *good: Any) -> None:
        """Raises SourceError for a value that changes the model and is not supported."""
        value = self.get(key)
        if value is not None and value not in good:
            raise self.error(key, f"{str(value)[:40]} is not supported for {self.arch.name}")

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
        "attention.layer_norm_rms_epsilon": c.real(c.arch.eps),
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
    if c.arch.moe is not None:
        meta |= c.arch.moe(c)
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


def _experts(c: Config, count: str = "num_experts") -> dict[str, MetaValue]:
    return {"expert_count": c.size(count), "expert_used_count": c.size("num_experts_per_tok")}


def _mixtral(c: Config) -> dict[str, MetaValue]:
    c.refuse("sliding_window")
    return _experts(c, "num_local_experts")


def _qwen_moe(c: Config) -> dict[str, MetaValue]:
    c.refuse("decoder_sparse_step", 1)
    c.refuse("mlp_only_layers", [])
    meta = _experts(c) | {
        "expert_feed_forward_length": c.size("moe_intermediate_size"),
        "expert_weights_norm": c.flag("norm_topk_prob"),
    }
    if c.get("shared_expert_intermediate_size") is not None:
        meta["expert_shared_feed_forward_length"] = c.size("shared_expert_intermediate_size")
    return meta


def _olmoe(c: Config) -> dict[str, MetaValue]:
    c.refuse("clip_qkv")
    return _experts(c) | {"expert_weights_norm": c.flag("norm_topk_prob")}


def _granite_moe(c: Config) -> dict[str, MetaValue]:
    meta = _experts(c, "num_local_experts") | {
        "attention.scale": c.real("attention_multiplier"),
        "embedding_scale": c.real("embedding_multiplier"),
        "residual_scale": c.real("residual_multiplier"),
        "logit_scale": c.real("logits_scaling"),
    }
    if c.get("shared_intermediate_size"):
        meta["expert_shared_feed_forward_length"] = c.size("shared_intermediate_size")
    return meta


def _lfm2_moe(c: Config) -> dict[str, MetaValue]:
    c.refuse("conv_bias", False)
    c.refuse("use_expert_bias", True)
    kinds, n = c.values.get("layer_types"), c.layers
    if not isinstance(kinds, list) or len(kinds) != n or any(k not in ("conv", "full_attention") for k in kinds):
        raise c.error("layer_types", f"not a list of conv or full_attention for {n} layers")
    return _experts(c) | {
        "attention.head_count_kv": np.array([c.kv_heads if kind != "conv" else 0 for kind in kinds], np.uint32),
        "expert_feed_forward_length": c.size("moe_intermediate_size"),
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_norm": c.flag("norm_topk_prob"),
        "expert_weights_scale": c.real("routed_scaling_factor"),
        "leading_dense_block_count": c.size("num_dense_layers", least=0),
        "shortconv.l_cache": c.size("conv_L_cache", least=2),
    }


MOE = COMMON | {"num_experts_per_tok": 2, "num_local_experts": 8}
QWEN_MOE = COMMON | {"max_position_embeddings": 32768, "norm_topk_prob": False}
GRANITE = MOE | dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
LFM2 = COMMON | {
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True,
    "num_attention_heads": 32, "num_key_value_heads": 8, "moe_intermediate_size": 1792, "num_experts": 32,
    "num_experts_per_tok": 4, "num_dense_layers": 2, "conv_L_cache": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
MIXTRAL_DEFAULTS = MOE | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
MIXTRAL = Architecture(
    "llama", routed("block_sparse_moe", "mlp"), "silu", MIXTRAL_DEFAULTS, LLAMA.interleaved, moe=_mixtral
)
QWEN2_MOE = Architecture(
    "qwen2moe",
    routed("mlp"),
    "silu",
    QWEN_MOE | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632, "num_key_value_heads": 16},
    moe=_qwen_moe,
)  # fmt: skip
QWEN3_MOE = Architecture(
    "qwen3moe",
    routed("mlp"),
    "silu",
    QWEN_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4},
    moe=_qwen_moe,
)
OLMOE_DEFAULTS = COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False} | {
    "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
OLMOE = Architecture("olmoe", routed("mlp"), "silu", OLMOE_DEFAULTS, moe=_olmoe)
GRANITE_MOE = Architecture("granitemoe", GRANITE_LAYER, "silu", GRANITE, LLAMA.interleaved, moe=_granite_moe)
LFM2_MOE = Architecture(
    "lfm2moe", LFM2_LAYER, "silu", LFM2, moe=_lfm2_moe, eps="norm_eps", norm="token_embd_norm.weight"
)

BY_MODEL_TYPE = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
    "lfm2_moe": LFM2_MOE,
}


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
