"""Every architecture computes what Hugging Face `transformers` computes (tests/goldens/README.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ork

GOLDENS = Path(__file__).parent.parent / "goldens"
MOE = ["mixtral-gguf", "qwen2moe-gguf", "qwen3moe-gguf", "olmoe-gguf", "granitemoe-gguf", "lfm2moe-gguf"]
NAMES = ["llama3", "llama3-gguf", "llama-linear", "qwen2", "qwen3", "gemma3", "gemma3-softcap", *MOE]
CLOSE = 1e-4  # of the largest logit; what is measured is about 1e-6

F32 = npt.NDArray[np.float32]
Case = tuple[ork.LoadedModel, list[int], F32]


def test_every_golden_is_listed() -> None:
    assert sorted(NAMES) == sorted(file.parent.name for file in GOLDENS.glob("*/golden.npz"))


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A golden loaded with f32 weights and an f32 KV cache, its tokens and its logits."""
    folder = GOLDENS / request.param
    with np.load(folder / "golden.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["logits"]
    source = folder / "model.gguf" if request.param.endswith("-gguf") else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORK_HOME", str(tmp_path_factory.mktemp("home")))
        model = ork.load(source, codec="f32", kv="f32")
    with model:
        yield model, tokens, logits


def test_logits_are_those_of_transformers(case: Case) -> None:
    model, tokens, want = case
    got = model.logits(tokens)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got.astype(np.float64) - want).max() < CLOSE * np.abs(want).max()
    assert np.array_equal(got.argmax(axis=1), want.argmax(axis=1))


@pytest.mark.parametrize("pieces", [7, 80])
def test_pieces_give_the_same_bits(case: Case, pieces: int) -> None:
    model, tokens, _ = case
    assert np.array_equal(model.logits(tokens, chunk=-(-len(tokens) // pieces)), model.logits(tokens))


def test_a_prefix_has_the_same_bits(case: Case) -> None:
    model, tokens, _ = case
    whole = model.logits(tokens)
    for length in (1, 17, len(tokens) - 1):
        assert np.array_equal(model.logits(tokens[:length]), whole[:length])
