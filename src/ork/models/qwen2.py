"""Qwen2 and Qwen2.5: Llama's block with rotary pairs (i, i + dim/2) and biases on query, key and value."""

from __future__ import annotations

from ork.models.llama import Llama


class Qwen2(Llama):
    halves = True
    moe = None
