"""Qwen3: Qwen2 without biases, with an RMSNorm on each query and key head."""

from __future__ import annotations

from ork.models.llama import Llama


class Qwen3(Llama):
    halves = True
    qk_norm = "heads"
    moe = None
