"""Importance of inputs: mean squares of what a text puts there, whichever way the model's weights are held."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ork.build import importance
from ork.build.convert import convert
from ork.build.imatrix import read_imatrix
from ork.build.importance import calibration_text, collect
from ork.build.layerwise import PackLayers, SourceLayers
from ork.errors import UsageError
from ork.pack.reader import Pack
from ork.quant.imatrix import Imatrix
from ork.quant.recipe import builtin
from ork.sources.base import open_source
from tests import tiny

TOKENS = np.random.default_rng(3).integers(3, tiny.VOCAB, (3, 40)).astype(np.int32)
EPS = 1e-5


def of_source(path: Path, tokens: np.ndarray = TOKENS, **options: int) -> Imatrix:
    with contextlib.closing(open_source(path)) as source:
        return collect(SourceLayers(source), tokens, dataset="tiny", **options)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * weight


def test_mean_squares_of_the_first_layers_inputs(tmp_path: Path) -> None:
    """Against float64: q, k and v of layer 0 read the normed embedding."""
    tensors = tiny.random_tensors()
    path = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    found = of_source(path)
    rows = tensors["token_embd.weight"].astype(np.float64)[TOKENS.reshape(-1)]
    want = np.square(normed(rows, tensors["blk.0.attn_norm.weight"])).mean(axis=0)
    for role in "qkv":
        assert np.allclose(found.importance(f"blk.0.attn_{role}.weight", 64), want, rtol=1e-4)
    assert (found.datasets, found.chunk_count, found.chunk_size) == (("tiny",), 3, 40)


def test_a_tensor_that_reads_only_zeros(tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_up.weight"][5] = 0
    found = of_source(tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors))
    squares = found.importance("blk.1.ffn_down.weight", 96)
    assert squares[5] == 0
    assert (np.delete(squares, 5) > 0).all()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_weight_is_listed(tmp_path: Path, arch: str) -> None:
    path = tiny.random_gguf(tmp_path / "x.gguf", arch)
    found = of_source(path)
    with contextlib.closing(open_source(path)) as source:
        weights = {t.name: t.shape[1] for t in source.tensors.values() if len(t.shape) == 2}
    if "output.weight" in weights:
        del weights["token_embd.weight"]  # only looked up
    assert set(found.sums) == set(weights)
    assert all(found.sums[name].shape == (1, K) for name, K in weights.items())
    assert all(count == TOKENS.size for count in found.counts.values())


def test_of_a_pack_and_of_its_source(tmp_path: Path) -> None:
    path = tiny.random_gguf(tmp_path / "x.gguf")
    of_packs = {}
    for codec in ("f32", "i8"):
        with contextlib.closing(open_source(path)) as source:
            convert(source, tmp_path / f"{codec}.orkpack", builtin(codec))
        with contextlib.closing(Pack.open(tmp_path / f"{codec}.orkpack")) as pack:
            layers = PackLayers(pack)
            of_packs[codec] = collect(layers, TOKENS)
            layers.stream.close()
    want = of_source(path)
    for name, sums in want.sums.items():
        assert np.array_equal(of_packs["f32"].sums[name], sums)
        assert np.allclose(of_packs["i8"].sums[name], sums, rtol=0.1, atol=0.02 * sums.max())


def test_a_text_in_turns_is_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.random_gguf(tmp_path / "x.gguf")
    want = of_source(path)
    monkeypatch.setattr(importance, "STATE_BYTES", 2 * 40 * 64 * 4)
    assert of_source(path).digest == want.digest


def test_memory_changes_nothing_but_the_turns(tmp_path: Path) -> None:
    """Of dense models and mixtures: what is too little is refused with what would do, and that does."""
    for source in (tiny.random_gguf(tmp_path / "x.gguf"), tiny.moe_gguf(tmp_path / "moe.gguf", experts=16, inner=64)):
        want = of_source(source)
        with pytest.raises(UsageError, match=r"--max-ram 90 MiB is too little: chunks of 40 tokens of this") as told:
            of_source(source, max_ram=90 << 20)
        need = int(str(told.value).split()[-2])
        assert of_source(source, max_ram=need << 20).digest == want.digest
    with pytest.raises(UsageError, match="chunks of 100000 tokens"):
        of_source(source, np.zeros((1, 100_000), np.int32), max_ram=256 << 20)


def test_progress_and_head_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "HEAD_ROWS", 7)
    seen: list[tuple[int, int]] = []
    with contextlib.closing(open_source(tiny.random_gguf(tmp_path / "x.gguf"))) as source:
        found = collect(SourceLayers(source), TOKENS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(1, 7)]
    assert found.counts["output.weight"] == 3 * 7
    assert found.counts["blk.0.attn_q.weight"] == TOKENS.size


def test_the_file_that_the_command_writes(tmp_path: Path) -> None:
    found = of_source(tiny.random_gguf(tmp_path / "x.gguf"))
    found.write(tmp_path / "x.imatrix.gguf")
    assert read_imatrix(tmp_path / "x.imatrix.gguf").digest == found.digest


def test_the_text_that_comes_with_ork_is_prose_alone() -> None:
    text = calibration_text()
    assert 90_000 < len(text) < 120_000
    assert not any(word in text for word in ("Gutenberg", "CHAPTER", "***", "http"))
