"""Tiny models as GGUF files: a byte-level vocabulary of 300 tokens, every architecture, random or speaking weights.

A *speaking* model has weights that do nothing but its embedding and head: after a token always comes its successor, so
that the text it writes is known. A *random* model has a say of every weight in every logit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.gguf_writer import write_gguf
from tests.text.reference import LETTERS

F32 = npt.NDArray[np.float32]

END, START, STOP = "<|end|>", "<|im_start|>", "<|im_end|>"
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]
TOKENS = [END, START, STOP, *LETTERS, *(a + b for a, b in MERGES)]
VOCAB = len(TOKENS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (VOCAB - 3)],
    "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
# What each architecture has beyond Llama's tensors.
QK_NORM, BIASES, POST_NORMS = {"qwen3", "gemma3", "qwen3moe", "lfm2moe"}, {"qwen2", "qwen2moe"}, {"gemma3"}
MOE = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "lfm2moe")  # mixtral: GGUF's llama, with experts
EXPERTS, USED, INNER = 8, 3, 40  # of each layer but lfm2moe's first, which is dense and a short convolution
EXPERT_KEYS: dict[str, dict[str, Any]] = {
    "mixtral": {"feed_forward_length": INNER},
    "qwen2moe": {"expert_feed_forward_length": INNER, "expert_shared_feed_forward_length": 56},
    "qwen3moe": {"expert_feed_forward_length": INNER},
    "olmoe": {"feed_forward_length": INNER},
    "granitemoe": {
        "feed_forward_length": INNER,
        "attention.scale": 0.2,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
    },
    "lfm2moe": {
        "expert_feed_forward_length": INNER,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "shortconv.l_cache": 3,
        "attention.head_count_kv": np.array([0, 2], np.uint32),
    },
}


def architecture(arch: str) -> str:
    """GGUF's name of it."""
    return "llama" if arch == "mixtral" else arch


def token(byte: int | str) -> int:
    """The token of one byte."""
    return 3 + (byte if isinstance(byte, int) else ord(byte))


def metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Two layers of width 64 with 4 heads over 2; `changes` are keys without the architecture's name, "_" for "."."""
    sizes = {
        "block_count": 2,
        "context_length": 2048,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if arch == "gemma3":
        sizes |= {"attention.sliding_window": 100, "final_logit_softcapping": 20.0}
    if arch in MOE:
        sizes |= {"expert_count": EXPERTS, "expert_used_count": USED} | EXPERT_KEYS[arch]
    name = architecture(arch)
    return {
        "general.architecture": name,
        "general.name": "tiny",
        **{f"{name}.{key}": value for key, value in sizes.items()},
        **TOKENIZER,
        **changes,
    }


def random_tensors(
    arch: str = "llama", seed: int = 0, *, tied: bool | None = None, rows: int = VOCAB
) -> dict[str, F32]:
    """Weights that fit `metadata(arch)`, each of a size that matters; `tied` as the architecture's models are."""
    rng = np.random.default_rng(seed)
    width, ffn, q, kv = 64, 96, 64, 32

    def matrix(n: int, k: int) -> F32:
        return (rng.standard_normal((n, k)) / np.sqrt(k) * 1.5).astype(np.float32)

    def norm(n: int) -> F32:
        return (1 + 0.3 * rng.standard_normal(n)).astype(np.float32)

    out = {"token_embd.weight": matrix(rows, width), "output_norm.weight": norm(width)}
    if arch == "lfm2moe":
        out["token_embd_norm.weight"] = out.pop("output_norm.weight")
    if not (arch in {"gemma3", "qwen2", "lfm2moe"} if tied is None else tied):
        out["output.weight"] = matrix(rows, width)
    for i in range(2):
        block = {
            "attn_norm.weight": norm(width),
            "attn_q.weight": matrix(q, width),
            "attn_k.weight": matrix(kv, width),
            "attn_v.weight": matrix(kv, width),
            "attn_output.weight": matrix(width, q),
            "ffn_norm.weight": norm(width),
            "ffn_gate.weight": matrix(ffn, width),
            "ffn_up.weight": matrix(ffn, width),
            "ffn_down.weight": matrix(width, ffn),
        }
        if arch in QK_NORM:
            block |= {"attn_q_norm.weight": norm(16), "attn_k_norm.weight": norm(16)}
        if arch in POST_NORMS:
            block |= {"post_attention_norm.weight": norm(width), "post_ffw_norm.weight": norm(width)}
        if arch in BIASES:
            block |= {f"attn_{p}.bias": norm(n) for p, n in (("q", q), ("k", kv), ("v", kv))}
        if arch in MOE:
            block = _sparse(arch, i, block, matrix, norm)
        out |= {f"blk.{i}.{name}": value for name, value in block.items()}
    return out


def _sparse(arch: str, i: int, block: dict[str, F32], matrix: Any, norm: Any) -> dict[str, F32]:
    """A block of a mixture of experts, from the dense one."""
    width = 64
    if arch == "olmoe":
        block |= {"attn_q_norm.weight": norm(64), "attn_k_norm.weight": norm(32)}
    if arch == "lfm2moe" and i == 0:
        kept = {name: value for name, value in block.items() if name.startswith(("ffn_", "attn_norm"))}
        taps = norm(3 * width).reshape(width, 3)
        conv = {"in_proj": matrix(3 * width, width), "conv": taps, "out_proj": matrix(width, width)}
        return kept | {f"shortconv.{name}.weight": value for name, value in conv.items()}
    for part in ("gate", "up", "down"):
        del block[f"ffn_{part}.weight"]
        n, k = (width, INNER) if part == "down" else (INNER, width)
        block[f"ffn_{part}_exps.weight"] = np.stack([matrix(n, k) for _ in range(EXPERTS)])
        if arch == "qwen2moe":
            block[f"ffn_{part}_shexp.weight"] = matrix(*((width, 56) if part == "down" else (56, width)))
    block["ffn_gate_inp.weight"] = matrix(EXPERTS, width)
    if arch == "qwen2moe":
        block["ffn_gate_inp_shexp.weight"] = matrix(1, width)[0]
    if arch == "lfm2moe":
        block["exp_probs_b.bias"] = 0.2 * norm(EXPERTS)
    return block


def speaking_tensors(text: str, *, tail: str = END) -> dict[str, F32]:
    """Weights of a llama that says `text` after its first character and `tail` (a marker or a byte) after its last.

    No byte of `text` may repeat; every token that `text` does not hold is followed by its first byte.
    """
    said = [token(byte) for byte in text.encode()]
    assert len(set(said)) == len(said) < 64
    out = random_tensors("llama", 1, tied=False)
    for name, value in out.items():
        if name.startswith("blk.") and "norm" not in name:
            out[name] = np.zeros_like(value)
    own = np.linalg.qr(np.random.default_rng(2).standard_normal((64, 64)))[0].astype(np.float32)
    embedding, head = np.tile(own[-1], (VOCAB, 1)), np.zeros((VOCAB, 64), np.float32)
    head[said[0]] = own[-1]
    for i, (a, b) in enumerate(zip(said, [*said[1:], TOKENS.index(tail) if tail in TOKENS else token(tail)])):
        embedding[a] = own[i]
        head[b] += own[i]
    return out | {"token_embd.weight": embedding, "output.weight": head, "output_norm.weight": np.ones(64, np.float32)}


def write(path: Path, values: dict[str, Any], tensors: dict[str, F32], kind: str = "F32") -> Path:
    """A GGUF with matrices of type `kind` (rows of other widths than its blocks as F32) and f32 vectors."""
    block = 32 if kind.startswith("Q") else 1
    typed = {
        name: (kind if a.ndim > 1 and a.shape[-1] % block == 0 else "F32", a, a.shape) for name, a in tensors.items()
    }
    return write_gguf(path, values, typed)


def random_gguf(path: Path, arch: str = "llama", seed: int = 0, kind: str = "F32", **changes: Any) -> Path:
    return write(path, metadata(arch, **changes), random_tensors(arch, seed), kind)


def speaking_gguf(path: Path, text: str, *, tail: str = END, **changes: Any) -> Path:
    return write(path, metadata(**changes), speaking_tensors(text, tail=tail))


def moe_gguf(path: Path, *, experts: int = 8, top_k: int = 2, inner: int = 32, seed: int = 0) -> Path:
    """A random qwen3moe of two layers; its routers prefer some experts, those of the second layer more so."""
    arch, rng = "qwen3moe", np.random.default_rng(seed)
    sizes = {"expert_count": experts, "expert_used_count": top_k, "expert_feed_forward_length": inner}
    tensors = random_tensors("qwen3", seed, tied=False)
    for i in range(2):
        at = f"blk.{i}.ffn_"
        for part, n, k in (("gate", inner, 64), ("up", inner, 64), ("down", 64, inner)):
            del tensors[f"{at}{part}.weight"]
            stack = rng.standard_normal((experts, n, k)) / np.sqrt(k) * 1.5
            tensors[f"{at}{part}_exps.weight"] = stack.astype(np.float32)
        # rows of one sign add up where the norm in front of them does: a bias that the router has not
        liking = rng.permutation(experts)[:, None] * (0.02 + 0.02 * i) * np.sign(tensors[f"blk.{i}.ffn_norm.weight"])
        tensors[f"{at}gate_inp.weight"] = (rng.standard_normal((experts, 64)) * 0.15 + liking).astype(np.float32)
    return write(path, metadata(arch, **{f"{arch}.{key}": value for key, value in sizes.items()}), tensors)
