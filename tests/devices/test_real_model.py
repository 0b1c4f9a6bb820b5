"""A real model on every device: the same tokens, the same logits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ork
from ork.sources import hub

pytestmark = pytest.mark.slow

PROMPTS = (
    "The capital of France is",
    "The three most important inventions of the twentieth century are",
    "def fibonacci(n):\n",
    "Once upon a time, in a land of snow and very small dragons, there lived a baker who",
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    cache = Path(os.environ.get("ORK_MODELS") or Path.home() / ".cache" / "ork")
    return hub.pull("smollm2-135m", cache=cache)


@pytest.mark.parametrize("device", ["emu", "hybrid"])
def test_smollm2_says_the_same_on_every_device(smollm2: Path, device: str) -> None:
    with ork.load(smollm2, device="cpu") as cpu, ork.load(smollm2, device=device) as npu:
        for prompt in PROMPTS:
            want = "".join(cpu.generate(prompt, max_tokens=64))
            assert "".join(npu.generate(prompt, max_tokens=64)) == want
        ids = cpu.tokenizer.encode(" ".join(PROMPTS) * 4)
        assert (cpu.logits(ids).view(np.uint32) == npu.logits(ids).view(np.uint32)).all()
        assert npu.device.failed_ops == 0
