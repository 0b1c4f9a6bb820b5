"""What llama.cpp's `Q4_K_M` gives each tensor: the yardstick of a pack's size.

The rule is public (llama.cpp, src/llama-quant.cpp, `llama_tensor_get_type_impl` and `tensor_type_fallback`): Q4_K, but
Q6_K for the head (the embedding, if it is the head too) and, in the layers that get more bits, for `attn_v` (counting
the layers that have one) and `ffn_down`; with 8 experts, `attn_k` and `attn_v` are Q8_0 and `attn_output` is Q5_K. A
tensor whose rows do not divide into a type's blocks falls back to one of smaller blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BLOCKS: Final = {
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "F16": (1, 2),
    "F32": (1, 4),
}
"""ggml's types: (elements, bytes) of a block."""

FALLBACK: Final = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q5_0": "F16", "Q5_1": "F16", "Q8_0": "F16"}
DOWN: Final = ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
VALUE: Final = "attn_v.weight"
EIGHT_EXPERTS: Final = {"attn_k.weight": "Q8_0", VALUE: "Q8_0", "attn_output.weight": "Q5_K"}
ROUTER: Final = "ffn_gate_inp.weight"  # is not quantised
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def types(shapes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The type of each matrix, by name; `shapes` are (N rows, K columns) of all matrices of a model."""
    layers = 1 + max((_layer(name) for name in shapes), default=0)
    attending = sorted(_layer(name) for name in shapes if name.endswith(f".{VALUE}"))
    eight = any(N == 8 for name, (N, _) in shapes.items() if name.endswith(ROUTER))
    head = HEAD if HEAD in shapes else EMBEDDING
    out = {}
    for name, (_, K) in shapes.items():
        role, layer = name.split(".", 2)[-1], _layer(name)
        six = name == head or (role in DOWN and more_bits(layer, layers))
        six = six or (role == VALUE and more_bits(attending.index(layer), len(attending)))
        kind = "F32" if role == ROUTER else "Q6_K" if six else "Q4_K"
        kind = EIGHT_EXPERTS.get(role, kind) if eight else kind
        while K % BLOCKS[kind][0]:
            kind = FALLBACK[kind]
        out[name] = kind
    return out


def total_bytes(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of all matrices together."""
    return sum(
        N * K // BLOCKS[kind][0] * BLOCKS[kind][1] for (N, K), kind in zip(shapes.values(), types(shapes).values())
    )


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1
