"""Mixtures of experts with random weights and the true shapes of known models, a few layers deep, for memory and speed.

    python bench/moe_shapes.py lfm2-8b-a1b|qwen3-30b-a3b OUT.gguf [--layers 2] [--type Q4_0]

Weights are random blocks of ggml's types with a scale that keeps the rows' size, so that a file is written as fast as
the disk takes it. The vocabulary is that of bytes, and the head as small: what is measured is layers. Shapes are from
the models' config.json on Hugging Face (LiquidAI/LFM2-8B-A1B, Qwen/Qwen3-30B-A3B).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from requantise import Pieces, Tensor, write_tensors

BLOCKS = {"F16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18)}  # values and bytes of a block
DEVIATIONS = {"Q8_0": 73.9, "Q4_0": 4.61}  # of a block's codes when all are as likely
POOL = 4 << 20  # bytes of random codes, of which every tensor takes its own stretch
CONTEXT = 2048


@dataclass(frozen=True)
class Shape:
    """Sizes in elements; `attention`: layers with attention, all others are short convolutions (None: all have it)."""

    arch: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_ffn: int
    experts: int
    top_k: int
    layers: int
    rope_base: float
    dense_ffn: int = 0  # of the leading dense layers
    dense_layers: int = 0
    attention: tuple[int, ...] | None = None
    taps: int = 0  # of short convolutions


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 32, 4, 128, 768, 128, 8, 48, 1e6),
    "lfm2-8b-a1b": Shape(
        "lfm2moe", 2048, 32, 8, 64, 1792, 32, 4, 24, 1e6, 7168, 2, attention=(2, 6, 10, 14, 18, 21), taps=3
    ),
}


def byte_tokens() -> list[str]:
    """The letters that GPT-2's byte-level vocabularies write the 256 bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def metadata(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> int:
    """Everything but the tensors; the size of the vocabulary."""
    tokens = ["<|end|>", *byte_tokens(), "Ġt", *(f"<|spare{i}|>" for i in range(62))]
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.dense_ffn or shape.expert_ffn * shape.top_k)
    writer.add_head_count(shape.heads)
    has_attention = [shape.attention is None or i in shape.attention for i in range(layers)]
    writer.add_head_count_kv([shape.kv_heads * yes for yes in has_attention] if shape.taps else shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.expert_ffn)
    if shape.taps:
        writer.add_shortconv_l_cache(shape.taps)
        writer.add_leading_dense_block_count(min(shape.dense_layers, layers))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * 257, *[3] * 62])
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    return len(tokens)


def tensors(shape: Shape, layers: int, vocab: int, kind: str, seed: int = 0) -> Iterator[Tensor]:
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, POOL, np.uint8)

    def matrix(name: str, *sizes: int) -> Tensor:
        return f"{name}.weight", sizes, kind, random_pieces(pool, int(rng.integers(POOL)), sizes, kind)

    def values(name: str, of: Any) -> Tensor:
        kept = np.asarray(of, np.float32)
        return name, kept.shape, "F32", lambda: iter([kept])

    def ones(name: str, n: int) -> Tensor:
        return values(f"{name}.weight", np.ones(n))

    width, head = shape.width, shape.head_dim
    yield matrix("token_embd", vocab, width)
    yield ones("token_embd_norm" if shape.taps else "output_norm", width)
    for i in range(layers):
        at = f"blk.{i}."
        yield ones(f"{at}attn_norm", width)
        yield ones(f"{at}ffn_norm", width)
        if shape.attention is None or i in shape.attention:
            yield matrix(f"{at}attn_q", shape.heads * head, width)
            yield matrix(f"{at}attn_k", shape.kv_heads * head, width)
            yield matrix(f"{at}attn_v", shape.kv_heads * head, width)
            yield matrix(f"{at}attn_output", width, shape.heads * head)
            yield ones(f"{at}attn_q_norm", head)
            yield ones(f"{at}attn_k_norm", head)
        else:
            yield values(f"{at}shortconv.conv.weight", rng.standard_normal((width, shape.taps)) / shape.taps)
            yield matrix(f"{at}shortconv.in_proj", 3 * width, width)
            yield matrix(f"{at}shortconv.out_proj", width, width)
        if i < shape.dense_layers:
            yield matrix(f"{at}ffn_gate", shape.dense_ffn, width)
            yield matrix(f"{at}ffn_up", shape.dense_ffn, width)
            yield matrix(f"{at}ffn_down", width, shape.dense_ffn)
            continue
        yield values(f"{at}ffn_gate_inp.weight", rng.standard_normal((shape.experts, width)) / np.sqrt(width))
        if shape.taps:
            yield values(f"{at}exp_probs_b.bias", 0.1 * rng.standard_normal(shape.experts))
        yield matrix(f"{at}ffn_gate_exps", shape.experts, shape.expert_ffn, width)
        yield matrix(f"{at}ffn_up_exps", shape.experts, shape.expert_ffn, width)
        yield matrix(f"{at}ffn_down_exps", shape.experts, width, shape.expert_ffn)


def random_pieces(pool: npt.NDArray[np.uint8], start: int, sizes: tuple[int, ...], kind: str) -> Pieces:
    """Blocks of a matrix [..., N, K] whose values have a standard deviation of 1 / sqrt(K), a matrix at a time."""
    values, nbytes = BLOCKS[kind]
    N, K = sizes[-2:]
    count = N * K // values

    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        at = start
        for _ in range(sizes[0] if len(sizes) == 3 else 1):
            if kind == "F16":
                codes = np.resize(np.roll(pool, -at), count)
                halves = ((codes.astype(np.float32) - 127.5) / (73.9 * np.sqrt(K))).astype(np.float16)
                yield halves.view(np.uint8)
            else:
                blocks = np.empty((count, nbytes), np.uint8)
                blocks[:, 2:] = np.resize(np.roll(pool, -at), (count, nbytes - 2))
                blocks[:, :2] = np.float16(1 / (DEVIATIONS[kind] * np.sqrt(K))).reshape(1).view(np.uint8)
                yield blocks
            at += 7919

    return pieces


def write(out: Path, shape: Shape, layers: int, kind: str) -> None:
    """The model's first `layers` layers."""
    partial = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(partial, arch=shape.arch)
    vocab = metadata(writer, shape, layers)
    write_tensors(writer, list(tensors(shape, layers, vocab, kind)))
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--type", default="Q4_0", choices=BLOCKS)
    args = parser.parse_args()
    shape = SHAPES[args.model]
    if not 1 <= args.layers <= shape.layers:
        parser.error(f"--layers {args.layers}: the model has {shape.layers}")
    write(args.out, shape, args.layers, args.type)


if __name__ == "__main__":
    main()
