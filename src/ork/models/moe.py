"""Mixture of experts: a router, the experts that it sends each row to, and the one that all rows share.

Names and shapes are GGUF's: `ffn_gate_inp` [experts, width] is the router, `ffn_{gate,up,down}_exps` are the stacked
experts, `ffn_{gate,up,down}_shexp` the shared one, `ffn_gate_inp_shexp` [width] its gate.
"""

from __future__ import annotations

from typing import Protocol

from ork.models.config import Config, Experts
from ork.models.layers import FeedForward
from ork.ops import Array, Ops


class Half(Protocol):
    """A feed-forward half block of any kind."""

    def __call__(self, x: Array) -> Array: ...


class SharedExpert:
    """A feed-forward that every row takes; what it adds may have a gate of one number a row."""

    def __init__(self, ops: Ops, c: Config, e: Experts, layer: int, act: str):
        self.ops = ops
        self.ffn = FeedForward(ops, c, layer, act, part="_shexp", inner=e.shared_ffn)
        self.open = ops.vector(f"blk.{layer}.ffn_gate_inp_shexp.weight", c.width) if e.gated else None

    def __call__(self, x: Array) -> Array:
        y = self.ffn(x)
        return y if self.open is None else self.ops.gate_rows(x, self.open, y)


class MoeFeedForward:
    """The sum over a row's experts of weight * down(act(gate(x)) * up(x)), and the shared expert's."""

    def __init__(self, ops: Ops, c: Config, e: Experts, layer: int, act: str, *, biased: bool = False):
        self.ops, self.layer, self.e, self.act = ops, layer, e, act
        self.router = ops.weight(f"blk.{layer}.ffn_gate_inp.weight", e.count, c.width)
        self.bias = ops.vector(f"blk.{layer}.exp_probs_b.bias", e.count) if biased else None
        self.shared = SharedExpert(ops, c, e, layer, act) if e.shared_ffn else None
        self.experts = ops.experts_of(layer, e.count, c.width, e.ffn)

    def __call__(self, x: Array) -> Array:
        ops, e = self.ops, self.e
        logits = ops.linear(x, self.router)[0]
        routes = ops.route(
            self.layer,
            logits,
            e.used,
            kind=e.gating,
            normalise=e.normalise,
            scale=e.scale,
            bias=self.bias,
            groups=(e.groups, e.used_groups),
        )
        y = ops.experts(x, routes, self.experts, self.act)
        return y if self.shared is None else ops.add(y, self.shared(x))


def feed_forward(ops: Ops, c: Config, layer: int, act: str, *, biased: bool = False) -> Half:
    """The half block of this layer: with experts, or the ordinary one."""
    if c.experts is None or not c.has_experts(layer):
        return FeedForward(ops, c, layer, act)
    return MoeFeedForward(ops, c, c.experts, layer, act, biased=biased)
