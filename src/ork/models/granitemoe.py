"""Granite MoE: Llama with routed experts (and in some a shared one), and four constants: embeddings are multiplied by
one, what each half block adds by another, scores of attention by a third; logits are divided by the last."""

from __future__ import annotations

from dataclasses import replace

from ork.models.config import MoeDefaults
from ork.models.layers import Rows, State
from ork.models.llama import Llama
from ork.ops import Array


class GraniteMoe(Llama):
    moe = MoeDefaults(ffn="whole")

    def begin(self, rows: Rows) -> State:
        state = super().begin(rows)
        return replace(state, x=self.ops.scale(state.x, self.config.embedding_scale))

    def end(self, state: State) -> Array:
        return self.ops.scale(super().end(state), 1 / self.config.logit_scale)
