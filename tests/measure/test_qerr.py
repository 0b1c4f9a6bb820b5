"""Errors of weights against plain arithmetic, and two models walked through in step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import ork
from ork.errors import SourceError, UsageError
from ork.measure.perplexity import cut
from ork.measure.qerr import PackWeights, SourceWeights, by_layer, difference, relative, tensor_errors, walk
from ork.sources.base import open_source
from tests import tiny
from tests.measure.conftest import LETTERS, Load


def pack_of(model: ork.LoadedModel) -> PackWeights:
    return PackWeights(model.pack)  # type: ignore[arg-type]


def test_weights_against_their_source(load: Load, gguf: Path) -> None:
    source = open_source(gguf)
    errors = {e.name: e for e in tensor_errors(pack_of(load()), SourceWeights(source))}
    assert errors.keys() == {n for n, t in source.tensors.items() if len(t.shape) == 2}
    for name, e in errors.items():
        rows = source.rows(name, 0, e.N)
        again = pack_of(load()).rows(name, 0, e.N).astype(np.float64)
        want = np.linalg.norm(again - rows) / np.linalg.norm(rows)
        by_row = np.linalg.norm(again - rows, axis=1) / np.linalg.norm(rows, axis=1)
        assert e.error == pytest.approx(want)
        assert (e.worst, e.worst_row) == (pytest.approx(by_row.max()), by_row.argmax())
        assert 0.001 < e.error < 0.02  # int8, rotated
        assert e.codec == "i8"
        assert 8 < e.bits < 18  # of few weights: padding counts
    layers = by_layer(list(errors.values()))
    assert list(layers) == [*dict.fromkeys(n if n[0] != "b" else n[:5] for n in errors)]
    squares = np.array([errors[n].squares for n in errors if n.startswith("blk.1.")]).sum(axis=0)
    assert layers["blk.1"] == pytest.approx(math.sqrt(squares[0] / squares[1]))


def test_an_f32_pack_is_its_source(load: Load, gguf: Path) -> None:
    exact = list(tensor_errors(pack_of(load(codec="f32")), SourceWeights(open_source(gguf))))
    assert all(e.error == 0 for e in exact)
    done: list[tuple[int, int]] = []
    against = list(tensor_errors(pack_of(load()), pack_of(load(codec="f32")), lambda *x: done.append(x)))
    plain = list(tensor_errors(pack_of(load()), SourceWeights(open_source(gguf))))
    assert [e.error for e in against] == [e.error for e in plain]
    assert done[-1][0] == done[-1][1] == sum(4 * e.N * e.K for e in plain)


def test_a_reference_that_is_damaged_is_named(load: Load, tmp_path: Path) -> None:
    """Its row would have no error to show."""
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_up.weight"][3, 5] = np.nan
    other = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    with pytest.raises(SourceError, match=r"x\.gguf: tensor blk\.1\.ffn_up\.weight holds a value that is not finite"):
        list(tensor_errors(pack_of(load()), SourceWeights(open_source(other))))


def test_a_row_that_should_be_zeros_is_the_worst(load: Load, gguf: Path, tmp_path: Path) -> None:
    source = open_source(gguf)
    tensors = {name: source.rows(name, 0, t.rows).reshape(t.shape) for name, t in source.tensors.items()}
    tensors["output.weight"] = tensors["output.weight"].copy()
    tensors["output.weight"][7] = 0
    other = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    errors = {e.name: e for e in tensor_errors(pack_of(load()), SourceWeights(open_source(other)))}
    assert (errors["output.weight"].worst, errors["output.weight"].worst_row) == (math.inf, 7)
    assert 0 < errors["output.weight"].error < 1
    assert all(e.worst < 1 for name, e in errors.items() if name != "output.weight")


def test_another_models_weights_are_refused(load: Load, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "wider.gguf", tiny.metadata(), tiny.random_tensors(rows=tiny.VOCAB + 64))
    with pytest.raises(UsageError, match=f"of shape {tiny.VOCAB + 64} x 64, {tiny.VOCAB} x 64 is expected"):
        list(tensor_errors(pack_of(load()), SourceWeights(open_source(other))))
    tied = tiny.write(tmp_path / "tied.gguf", tiny.metadata(), tiny.random_tensors(tied=True))
    with pytest.raises(UsageError, match=r"output\.weight is not there"):
        list(tensor_errors(pack_of(load()), SourceWeights(open_source(tied))))


def test_relative_errors_of_nothing() -> None:
    assert relative(0, 0) == 0
    assert relative(1, 0) == math.inf
    assert relative(1, 4) == 0.5


def test_differences_are_of_bits() -> None:
    a = np.array([[1, 2], [np.nan, 0]], np.float32)
    assert difference("x", a, a.copy()).row == -1
    b = np.array([[1, 2], [np.nan, -0.0]], np.float32)
    assert difference("x", a, b).row == 1
    d = difference("x", np.array([[3, 4], [0, 1]], np.float32), np.array([[3, 4], [0, 0]], np.float32))
    assert (d.row, d.error, d.largest) == (1, 0.2, 1)


def test_a_walk_names_the_first_difference(load: Load, tmp_path: Path) -> None:
    """One weight of the second layer changed: everything that is read up to there is equal."""
    tensors = tiny.random_tensors()
    tensors["blk.1.attn_output.weight"][5, 7] += 1
    changed = load(tiny.write(tmp_path / "changed.gguf", tiny.metadata(), tensors), codec="f32")
    model = load(codec="f32")
    tokens = cut(model.tokenizer, LETTERS, 16, 1).tokens[0].tolist()
    found = walk(model.engine, changed.engine, tokens)
    first, before = found.first
    assert first is not None
    assert first.place == "blk.1.ffn_gate, blk.1.ffn_up"
    assert before == "blk.1.attn_output"
    assert [d.place for d in found.layers] == ["embedding", "blk.0", "blk.1", "logits"]
    assert [d.row >= 0 for d in found.layers] == [False, False, True, True]
    assert found.layers[2].error > 0
    assert len(found.inputs) == 9
    for m in (model, changed):
        assert m.engine.pool.used_blocks == 0
        assert m.ops.observer is None


def test_only_the_head_differs(load: Load, tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["output.weight"][3] *= 2
    changed = load(tiny.write(tmp_path / "head.gguf", tiny.metadata(), tensors), codec="f32")
    first, before = walk(load(codec="f32").engine, changed.engine, [5, 6, 7, 8]).first
    assert first is not None
    assert (first.place, before) == ("logits", "output")


def test_devices_do_not_differ(load: Load) -> None:
    found = walk(load().engine, load(device="emu").engine, [9, 8, 7, 6, 5])
    assert found.first == (None, "output")
    assert all(d.row < 0 and d.error == 0 for d in found.layers)


def test_models_that_cannot_be_walked_through(load: Load, tmp_path: Path) -> None:
    deep = tiny.write(tmp_path / "wider.gguf", tiny.metadata(), tiny.random_tensors(rows=tiny.VOCAB + 4))
    with pytest.raises(UsageError, match="vocab"):
        walk(load().engine, load(deep).engine, [5])
    for tokens in ([], [tiny.VOCAB], [5] * 513):
        with pytest.raises(UsageError, match="1 to 512 tokens"):
            walk(load().engine, load().engine, tokens)


@pytest.mark.parametrize(("codec", "least", "most"), [("f16", 1e-5, 4e-4), ("nf4", 0.04, 0.13), ("i4", 0.06, 0.18)])
def test_every_codec_is_read_back(load: Load, gguf: Path, codec: str, least: float, most: float) -> None:
    errors = list(tensor_errors(pack_of(load(codec=codec)), SourceWeights(open_source(gguf))))
    assert {e.codec for e in errors} == {codec}
    assert all(least < e.error < most for e in errors)
