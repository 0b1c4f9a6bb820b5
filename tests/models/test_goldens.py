"""Every architecture computes what Hugging Face `transformers` computes (tests/goldens/README.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ork

GOLDENS = Path(__file__).parent.parent / "goldens"
NAMES = ["llama3", "llama3-gguf", "llama-linear", "qwen2", "qwen3", "gemma3", "gemma3-softcap"]
CLOSE = 1e-4  # of the largest logit

F32 = npt.NDArray[np.float32]


def source(name: str) -> Path:
    folder = GOLDENS / name
    return folder / "model.gguf" if name.endswith("-gguf") else folder


def golden(name: str) -> tuple[list[int], F32]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        return file["tokens"].tolist(), file["logits"]


def test_every_golden_is_listed() -> None:
    assert sorted(NAMES) == sorted(file.parent.name for file in GOLDENS.glob("*/golden.npz"))


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[ork.Model, list[int], F32]:
    tokens, logits = golden(request.param)
    return ork.load(source(request.param), codec="f32", kv="f32"), tokens, logits


def relative_error(got: F32, want: F32) -> float:
    assert got.shape == want.shape
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def test_logits_are_those_of_transformers(case: tuple[ork.Model, list[int], F32]) -> None:
    model, tokens, want = case
    got = model.logits(tokens)
    assert got.dtype == np.float32
    assert relative_error(got, want) < CLOSE
    assert np.array_equal(got.argmax(axis=1), want.argmax(axis=1))


def test_a_prefix_has_the_same_bits(case: tuple[ork.Model, list[int], F32]) -> None:
    model, tokens, _ = case
    whole = model.logits(tokens)
    for length in (1, 17, len(tokens) - 1):
        assert np.array_equal(model.logits(tokens[:length]), whole[:length])
