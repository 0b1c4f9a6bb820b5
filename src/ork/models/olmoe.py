"""OLMoE: routed experts whose weights are not normalised, an RMSNorm over the whole width of queries and of keys."""

from __future__ import annotations

from ork.models.config import MoeDefaults
from ork.models.llama import Llama


class Olmoe(Llama):
    halves = True
    qk_norm = "whole"
    moe = MoeDefaults(normalise=False, ffn="whole")
