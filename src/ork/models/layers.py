"""Blocks that architectures share: attention with grouped heads, the gated feed-forward, the model's frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ork.errors import SourceError
from ork.models.config import Config
from ork.ops import Array, Batch, Ops, Weight, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Rows:
    """A flat batch: token, position and sequence of each row, and the rows whose logits are wanted."""

    tokens: npt.NDArray[np.int32]
    batch: Batch
    wanted: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class State:
    """A pass between two layers: hidden rows `x` [M, width], the batch and its tables of rotary angles."""

    x: Array
    rows: Rows
    tables: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """Inverse frequencies of one rotary embedding and how it pairs dimensions."""

    inv_freq: list[float]
    halves: bool


class Model(Protocol):
    """An architecture: built once from ops and a config, then called with rows.

    A pass comes in parts, so that whoever calibrates can stop between two layers.
    """

    config: Config

    def __init__(self, ops: Ops, config: Config) -> None: ...

    def begin(self, rows: Rows) -> State:
        """The embedded rows, before the first layer."""

    def layer(self, i: int, state: State) -> State:
        """What layer `i` makes of them."""

    def end(self, state: State) -> Array:
        """Logits [len(rows.wanted), vocab] of the rows behind the last layer."""

    def forward(self, rows: Rows) -> Array:
        """The three in order: logits [len(rows.wanted), vocab]."""
        state = self.begin(rows)
        for i in range(self.config.layers):
            state = self.layer(i, state)
        return self.end(state)


def make_rope(
    ops: Ops, config: Config, *, halves: bool, base: float | None = None, factor: float | None = None
) -> Rope:
    """The rotary embedding: linear scaling divides all frequencies, `rope_freqs.weight` (llama3) each by its own."""
    stretch = config.rope_scaling.factor if factor is None else factor
    freqs = [f / stretch for f in inverse_frequencies(base or config.rope_base, config.rope_dim)]
    if "rope_freqs.weight" in ops.source:
        divisors = ops.vector("rope_freqs.weight", len(freqs)).numpy()[0].tolist()
        if min(divisors) <= 0:
            raise SourceError("rope_freqs.weight: a divisor is not positive: the model's source is damaged")
        freqs = [f / d for f, d in zip(freqs, divisors)]
    return Rope(freqs, halves)


class Attention:
    """Grouped-query attention with optional biases and query/key norms: over each head, or over the whole width."""

    def __init__(self, ops: Ops, c: Config, layer: int, *, window: int = 0, qk_norm: str = ""):
        at = f"blk.{layer}."
        self.ops, self.config, self.place, self.window = ops, c, c.place(layer), window
        q_width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q = ops.weight(f"{at}attn_q.weight", q_width, c.width, f"{at}attn_q.bias")
        self.k = ops.weight(f"{at}attn_k.weight", kv_width, c.width, f"{at}attn_k.bias")
        self.v = ops.weight(f"{at}attn_v.weight", kv_width, c.width, f"{at}attn_v.bias")
        self.o = ops.weight(f"{at}attn_output.weight", c.width, q_width, f"{at}attn_output.bias")
        whole = qk_norm == "whole"
        self.q_norm = ops.vector(f"{at}attn_q_norm.weight", q_width if whole else c.head_dim) if qk_norm else None
        self.k_norm = ops.vector(f"{at}attn_k_norm.weight", kv_width if whole else c.head_dim) if qk_norm else None

    def __call__(self, x: Array, batch: Batch, table: Array, halves: bool) -> Array:
        ops, c = self.ops, self.config
        q, k, v = ops.linear(x, self.q, self.k, self.v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = ops.head_norm(q, self.q_norm, c.eps), ops.head_norm(k, self.k_norm, c.eps)
        q = ops.rope(q, c.head_dim, table, halves=halves)
        k = ops.rope(k, c.head_dim, table, halves=halves)
        y = ops.attention(
            self.place,
            batch,
            q,
            k,
            v,
            c.heads,
            scale=c.attention_scale,
            window=self.window,
            softcap=c.attention_softcap,
        )
        return ops.linear(y, self.o)[0]


class FeedForward:
    """down(act(gate(x)) * up(x)). `part` ends the names of another one than the layer's own, of `inner` width."""

    def __init__(self, ops: Ops, c: Config, layer: int, act: str, *, part: str = "", inner: int = 0):
        at, ffn = f"blk.{layer}.ffn_", inner or c.ffn
        self.ops, self.act = ops, act
        self.gate = ops.weight(f"{at}gate{part}.weight", ffn, c.width, f"{at}gate{part}.bias")
        self.up = ops.weight(f"{at}up{part}.weight", ffn, c.width, f"{at}up{part}.bias")
        self.down = ops.weight(f"{at}down{part}.weight", c.width, ffn, f"{at}down{part}.bias")

    def __call__(self, x: Array) -> Array:
        g, u = self.ops.linear(x, self.gate, self.up)
        return self.ops.linear(self.ops.gate(self.act, g, u), self.down)[0]


class Ends:
    """The embedding in front and the norm and head behind; a tied head is the embedding's own tensor."""

    def __init__(self, ops: Ops, c: Config, *, norm: str = "output_norm.weight"):
        self.ops, self.config = ops, c
        self.embedding: Weight = ops.weight("token_embd.weight", c.vocab, c.width)
        self.norm = ops.vector(norm, c.width)
        self.head = self.embedding if c.tied else ops.weight("output.weight", c.vocab, c.width, "output.bias")

    def embed(self, rows: Rows) -> Array:
        return self.ops.embed(self.embedding, rows.tokens)

    def logits(self, x: Array, rows: Rows) -> Array:
        ops, c = self.ops, self.config
        y = ops.linear(ops.norm(ops.take(x, rows.wanted), self.norm, c.eps), self.head)[0]
        return ops.softcap(y, c.final_softcap) if c.final_softcap else y
