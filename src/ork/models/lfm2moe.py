"""LFM2-MoE: most layers are short convolutions, the others attention; sigmoid routing, with a bias for the choice
alone, behind a few layers with an ordinary feed-forward.

A convolution's rows are projected to [b | c | x]; c * conv(b * x) is projected back.
"""

from __future__ import annotations

from typing import Protocol

from ork.models.config import Config, MoeDefaults
from ork.models.layers import Attention, Ends, Rows, make_rope
from ork.models.llama import Layer, Llama
from ork.models.moe import feed_forward
from ork.ops import Array, Batch, Ops


class Mixer(Protocol):
    """What lets a layer's rows see each other."""

    def __call__(self, x: Array, batch: Batch, table: Array, halves: bool) -> Array: ...


class ShortConv:
    def __init__(self, ops: Ops, c: Config, layer: int):
        at = f"blk.{layer}.shortconv."
        self.ops, self.place = ops, c.place(layer)
        self.inward = ops.weight(f"{at}in_proj.weight", 3 * c.width, c.width)
        self.taps = ops.taps(f"{at}conv.weight", c.width, c.taps)
        self.outward = ops.weight(f"{at}out_proj.weight", c.width, c.width)

    def __call__(self, x: Array, batch: Batch, table: Array, halves: bool) -> Array:
        ops = self.ops
        y = ops.short_conv(self.place, batch, ops.linear(x, self.inward)[0], self.taps)
        return ops.linear(y, self.outward)[0]


class Block:
    def __init__(self, ops: Ops, c: Config, i: int):
        self.ops, self.eps = ops, c.eps
        self.attn_norm = ops.vector(f"blk.{i}.attn_norm.weight", c.width)
        self.mixer: Mixer = Attention(ops, c, i, qk_norm="heads") if c.kv_heads_of[i] else ShortConv(ops, c, i)
        self.ffn_norm = ops.vector(f"blk.{i}.ffn_norm.weight", c.width)
        self.ffn = feed_forward(ops, c, i, "silu", biased=True)

    def __call__(self, x: Array, rows: Rows, table: Array, halves: bool) -> Array:
        ops = self.ops
        x = ops.add(x, self.mixer(ops.norm(x, self.attn_norm, self.eps), rows.batch, table, halves))
        return ops.add(x, self.ffn(ops.norm(x, self.ffn_norm, self.eps)))


class Lfm2Moe(Llama):
    halves = True
    moe = MoeDefaults(gating="sigmoid")
    mixed = True

    def __init__(self, ops: Ops, config: Config):
        self.ops, self.config = ops, config
        self.rope = make_rope(ops, config, halves=self.halves)
        self.ends = Ends(ops, config, norm="token_embd_norm.weight")
        self.blocks: list[Layer] = [Block(ops, config, i) for i in range(config.layers)]
