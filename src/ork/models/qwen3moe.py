"""Qwen3-MoE: Qwen3 with routed experts, whose weights add up to one."""

from __future__ import annotations

from ork.models.config import MoeDefaults
from ork.models.llama import Llama


class Qwen3Moe(Llama):
    halves = True
    qk_norm = "heads"
    moe = MoeDefaults(ffn="parts")
