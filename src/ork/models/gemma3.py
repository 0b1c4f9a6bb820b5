"""Gemma 3: norms before and after each half block, query/key norms, GELU gates, five local layers to one global.

Local layers see a sliding window and have a rotary base of their own; the embedding is scaled by sqrt(width).
Norm weights are stored as 1 + w, as GGUF has them.
"""

from __future__ import annotations

from dataclasses import replace

from ork.models.config import Config
from ork.models.layers import Attention, Ends, FeedForward, Model, Rows, State, make_rope
from ork.ops import Array, Ops

LAYERS_27B = 62  # the 27B scales attention by width / heads, and GGUF has no key for it


class Block:
    def __init__(self, ops: Ops, c: Config, i: int):
        self.ops, self.eps = ops, c.eps
        self.local = c.window_pattern[i]
        self.attn_norm = ops.vector(f"blk.{i}.attn_norm.weight", c.width)
        self.attn = Attention(ops, c, i, window=c.window if self.local else 0, qk_norm="heads")
        self.attn_post_norm = ops.vector(f"blk.{i}.post_attention_norm.weight", c.width)
        self.ffn_norm = ops.vector(f"blk.{i}.ffn_norm.weight", c.width)
        self.ffn = FeedForward(ops, c, i, "gelu_tanh")
        self.ffn_post_norm = ops.vector(f"blk.{i}.post_ffw_norm.weight", c.width)

    def __call__(self, x: Array, rows: Rows, table: Array, halves: bool) -> Array:
        ops, eps = self.ops, self.eps
        y = self.attn(ops.norm(x, self.attn_norm, eps), rows.batch, table, halves)
        x = ops.add(x, ops.norm(y, self.attn_post_norm, eps))
        y = self.ffn(ops.norm(x, self.ffn_norm, eps))
        return ops.add(x, ops.norm(y, self.ffn_post_norm, eps))


class Gemma3(Model):
    default_pattern = 6  # every sixth layer is global
    local_base = 10000.0

    def __init__(self, ops: Ops, config: Config):
        if config.layers == LAYERS_27B and "gemma3.attention.scale" not in ops.source.metadata:
            config = replace(config, attention_scale=(config.width / config.heads) ** -0.5)
        self.ops, self.config = ops, config
        self.global_rope = make_rope(ops, config, halves=True)
        self.local_rope = make_rope(ops, config, halves=True, base=config.local_rope_base, factor=1.0)
        self.ends = Ends(ops, config)
        self.blocks = [Block(ops, config, i) for i in range(config.layers)]

    def begin(self, rows: Rows) -> State:
        ops = self.ops
        x = ops.scale(self.ends.embed(rows), self.config.width**0.5)
        local = ops.rope_table(rows.batch, self.local_rope.inv_freq)
        wide = ops.rope_table(rows.batch, self.global_rope.inv_freq)
        return State(x, rows, (local, wide))

    def layer(self, i: int, state: State) -> State:
        block = self.blocks[i]
        local, wide = state.tables
        return replace(state, x=block(state.x, state.rows, local if block.local else wide, halves=True))

    def end(self, state: State) -> Array:
        return self.ends.logits(state.x, state.rows)
