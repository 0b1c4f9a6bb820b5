"""Operations on weights of every codec: what they compute, what they share, and who may listen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork import native, tiles
from ork.devices.cpu import CpuDevice
from ork.errors import SourceError
from ork.ops import Array, Ops, Weight
from ork.pack import Pack, PackPlan, PackWriter, RawPlan, TensorPlan
from ork.quant import codecs, rotation
from ork.residency.source import PackSource
from ork.residency.stream import Stream

N, K = 130, 576
# name: codec, rotation, group, act_group
WEIGHTS = {
    "i8": ("i8", "block", 0, 0),
    "i8 by rows of groups": ("i8", "block", 0, 64),
    "i8 plain": ("i8", "none", 0, 0),
    "i4": ("i4", "block", 0, 0),
    "i4 mixed": ("i4", "mix", 0, 0),
    "nf4 of 64": ("nf4", "block", 64, 64),
    "nf4 mixed": ("nf4", "mix", 0, 0),
    "i8 of 64": ("i8", "block", 64, 64),
    "i4 of 32": ("i4", "mix", 32, 32),
    "f16": ("f16", "none", 0, 0),
    "f32": ("f32", "none", 0, 0),
}
ROWS = np.random.default_rng(0).standard_normal((len(WEIGHTS), N, K)).astype(np.float32) * 0.1


def make_pack(path: Path, changes: dict[str, Any] | None = None) -> None:
    tensors, parts = [], {}
    for (name, (codec, mode, group, act_group)), rows in zip(WEIGHTS.items(), ROWS):
        block, mix = rotation.fields_of(K, mode)
        tensors.append(TensorPlan(name, codec, (N, K), block, group, act_group, mix=mix))
        parts[name] = codecs.quantise(codec, rotation.rotate_rows(rows, K, mode), group)
    raws = {
        rotation.signs_name(K): rotation.signs_of(K),
        rotation.mix_name(9): rotation.mix_of(9),
        "bias": np.arange(N, dtype=np.float32),
        **(changes or {}),
    }
    kinds = {"int8": "i8", "float32": "f32"}
    plan = PackPlan(tensors, [RawPlan(n, kinds[str(a.dtype)], a.shape) for n, a in raws.items()])
    with PackWriter.open(path, plan) as writer:
        for entry in writer.missing():
            item, n0, n1 = plan.item(entry)
            if isinstance(item, RawPlan):
                writer.write(entry, np.ascontiguousarray(raws[item.name]).reshape(-1).view(np.uint8))
                continue
            q = parts[item.name]
            held = [a if a is None else _columns(a, n0, n1) for a in (q.codes, q.channel, q.groups)]
            writer.write(entry, tiles.build_blob(plan.layout(entry), *held))
        writer.finish()


def _columns(a: np.ndarray, n0: int, n1: int) -> np.ndarray:
    out = np.zeros((n1 - n0, *a.shape[1:]), a.dtype)
    out[: max(0, min(n1, len(a)) - n0)] = a[n0:n1]
    return out


@pytest.fixture
def ops(tmp_path: Path) -> Ops:
    make_pack(tmp_path / "x.orkpack")
    device = CpuDevice(2)
    return Ops(Stream(PackSource(Pack.open(tmp_path / "x.orkpack")), device), device)


def all_of(ops: Ops) -> dict[str, Weight]:
    return {name: ops.weight(name, N, K, "bias" if name == "i4" else None) for name in WEIGHTS}


def inputs(M: int) -> np.ndarray:
    return np.random.default_rng(M).standard_normal((M, K)).astype(np.float32)


@pytest.mark.parametrize("M", [1, 9])
def test_every_codec_multiplies(ops: Ops, M: int) -> None:
    """One call for weights that differ in everything: each product as near the exact one as its codec can be."""
    x, weights = inputs(M), all_of(ops)
    for (name, w), rows, out in zip(weights.items(), ROWS, ops.linear(Array.of(x), *weights.values())):
        want = x.astype(np.float64) @ rows.astype(np.float64).T + (np.arange(N) if w.bias is not None else 0)
        error = np.linalg.norm(out.numpy() - want) / np.linalg.norm(want - (np.arange(N) if w.bias is not None else 0))
        limit = {"i8": 0.02, "i4": 0.25, "nf4": 0.2, "f16": 1e-3, "f32": 1e-6}[w.codec]
        assert error < limit, name
        (alone,) = ops.linear(Array.of(x), w)
        assert np.array_equal(alone.numpy(), out.numpy()), name


@pytest.mark.parametrize("M", [1, 9])
def test_products_are_those_of_the_stored_numbers(ops: Ops, M: int) -> None:
    """What is left beside the rounding of weights and rows is float rounding alone."""
    x = inputs(M)
    for name, w in all_of(ops).items():
        codec, mode, group, act_group = WEIGHTS[name]
        turned = rotation.rotate_rows(x, K, mode)
        if w.rows is not None:
            q = native.quantise(Array.of(turned), None, 0, act_group)
            turned = q.codes() * np.repeat(q.scales().reshape(M, -1), act_group or K, axis=1)
        made = codecs.quantise(codec, rotation.rotate_rows(ROWS[list(WEIGHTS).index(name)], K, mode), group)
        stored = codecs.dequantise(codec, made, K).astype(np.float64)
        want = turned.astype(np.float64) @ stored.T + (np.arange(N) if w.bias is not None else 0)
        got = ops.linear(Array.of(x), w)[0].numpy()
        # rotating in f32 moves a row's code by one here and there
        assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want), name


def test_rows_are_quantised_once_for_all_that_agree(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = all_of(ops)
    calls: list[tuple[Any, ...]] = []
    quantise = native.quantise
    monkeypatch.setattr(native, "quantise", lambda *a: (calls.append(a), quantise(*a))[1])
    x = Array.of(inputs(3))
    ops.linear(x, *weights.values())
    ways = [(block, group, mix is not None) for _, _, block, group, mix, _ in calls]
    assert sorted(ways) == [(0, 0, False), (64, 0, False), (64, 0, True), (64, 32, True), (64, 64, False)]
    calls.clear()
    ops.linear(x, weights["f16"], weights["f32"])
    assert not calls
    ops.linear(x, weights["i8"], weights["i4"])
    assert len(calls) == 1


def test_an_observer_sees_what_weights_read(ops: Ops) -> None:
    weights = all_of(ops)
    seen: list[tuple[tuple[Weight, ...], np.ndarray]] = []
    ops.observer = lambda ws, rows: seen.append((tuple(ws), rows.numpy().copy()))
    x = inputs(4)
    ops.linear(Array.of(x), weights["i8"], weights["f32"])
    ops.observer = None
    ops.linear(Array.of(x), weights["i8"])
    assert [ws for ws, _ in seen] == [(weights["i8"], weights["f32"])]
    assert np.array_equal(seen[0][1], x)


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_rows_of_every_codec_are_looked_up(ops: Ops, name: str) -> None:
    """An embedding's row: within the rounding of its codec, rotated back."""
    ids = np.array([0, N - 1, 64, 3, 0], np.int32)
    got = ops.embed(ops.weight(name, N, K), ids).numpy()
    want = ROWS[list(WEIGHTS).index(name)][ids]
    limit = {"i8": 0.01, "i4": 0.25, "nf4": 0.2, "f16": 1e-3, "f32": 0}[WEIGHTS[name][0]]
    assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


def test_half_precision_weights_are_exact(ops: Ops) -> None:
    x = inputs(2)
    half = ROWS[list(WEIGHTS).index("f16")].astype(np.float16).astype(np.float64)
    got = ops.linear(Array.of(x), ops.weight("f16", N, K))[0].numpy()
    assert np.allclose(got, x.astype(np.float64) @ half.T, rtol=0, atol=1e-5)


def test_a_mixing_matrix_of_another_size_is_refused(tmp_path: Path) -> None:
    make_pack(tmp_path / "y.orkpack", {rotation.mix_name(9): np.ones((9, 8), np.float32)})
    device = CpuDevice(1)
    ops = Ops(Stream(PackSource(Pack.open(tmp_path / "y.orkpack")), device), device)
    with pytest.raises(SourceError, match=r"rotation.mix.9: 72 values where the metadata asks for 81"):
        ops.weight("i4 mixed", N, K)
