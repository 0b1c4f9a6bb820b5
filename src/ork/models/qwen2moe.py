"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts, whose weights are not normalised, beside a gated shared one."""

from __future__ import annotations

from ork.models.config import MoeDefaults
from ork.models.llama import Llama


class Qwen2Moe(Llama):
    halves = True
    moe = MoeDefaults(normalise=False, ffn="parts", shared=True)
