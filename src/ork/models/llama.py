"""Llama: pre-norm blocks, rotary pairs (2i, 2i + 1), SiLU gates. SmolLM2, TinyLlama, Llama 2 and 3, Mistral; Mixtral,
whose feed-forward length is that of an expert. The block of many other architectures."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from ork.models.config import Config, MoeDefaults
from ork.models.layers import Attention, Ends, Model, Rows, State, make_rope
from ork.models.moe import feed_forward
from ork.ops import Array, Ops


class Block:
    def __init__(self, ops: Ops, c: Config, i: int, *, qk_norm: str = ""):
        self.ops, self.eps, self.residual = ops, c.eps, c.residual_scale
        self.attn_norm = ops.vector(f"blk.{i}.attn_norm.weight", c.width)
        self.attn = Attention(ops, c, i, window=c.window if c.window_pattern[i] else 0, qk_norm=qk_norm)
        self.ffn_norm = ops.vector(f"blk.{i}.ffn_norm.weight", c.width)
        self.ffn = feed_forward(ops, c, i, "silu")

    def __call__(self, x: Array, rows: Rows, table: Array, halves: bool) -> Array:
        ops = self.ops
        y = self.attn(ops.norm(x, self.attn_norm, self.eps), rows.batch, table, halves)
        x = ops.add(x, self.scaled(y))
        return ops.add(x, self.scaled(self.ffn(ops.norm(x, self.ffn_norm, self.eps))))

    def scaled(self, y: Array) -> Array:
        return y if self.residual == 1 else self.ops.scale(y, self.residual)


class Layer(Protocol):
    """One block of a pass."""

    def __call__(self, x: Array, rows: Rows, table: Array, halves: bool) -> Array: ...


class Llama(Model):
    halves = False
    qk_norm = ""
    moe: MoeDefaults | None = MoeDefaults(ffn="whole", always=False)

    def __init__(self, ops: Ops, config: Config):
        self.ops, self.config = ops, config
        self.rope = make_rope(ops, config, halves=self.halves)
        self.ends = Ends(ops, config)
        self.blocks: list[Layer] = [Block(ops, config, i, qk_norm=self.qk_norm) for i in range(config.layers)]

    def begin(self, rows: Rows) -> State:
        return State(self.ends.embed(rows), rows, (self.ops.rope_table(rows.batch, self.rope.inv_freq),))

    def layer(self, i: int, state: State) -> State:
        (table,) = state.tables
        return replace(state, x=self.blocks[i](state.x, state.rows, table, self.rope.halves))

    def end(self, state: State) -> Array:
        return self.ends.logits(state.x, state.rows)
