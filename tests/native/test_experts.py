"""Routing, products of gathered rows and short convolutions against plain numpy; and what the bindings refuse."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from ork.engine.kvcache import BLOCK, KvPool, Sequence
from ork.native import Array, QuantisedRows
from tests.native.oracles import Weight

ISAS = native.isa_names()
LONG = 1100  # positions of a text
CODECS = [("f32", 0, 0), ("f16", 0, 0), ("i8", 0, 0), ("i8", 0, 32), ("i4", 0, 0), ("nf4", 32, 32)]


def scores_of(logits: np.ndarray, sigmoid: bool) -> np.ndarray:
    x = logits.astype(np.float64)
    if sigmoid:
        return 1 / (1 + np.exp(-x))
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def chosen(score: np.ndarray, top: int, groups: int, used: int) -> list[int]:
    """Experts of one row, by the definition: the best groups, then the best experts, the lower number of equal ones."""
    score = score.copy()
    parts = score.reshape(groups, -1)
    if groups > 1:
        sums = np.sort(parts, axis=1)[:, -2:].sum(axis=1)
        kept = sorted(range(groups), key=lambda g: (-sums[g], g))[:used]
        parts[[g for g in range(groups) if g not in kept]] = -np.inf
    return sorted(sorted(range(len(score)), key=lambda e: (-score[e], e))[:top])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_routes_are_those_of_the_definition(data: Any) -> None:
    groups = data.draw(st.sampled_from([1, 1, 2, 4]))
    size = data.draw(st.integers(1, 40))
    used = data.draw(st.integers(1, groups))
    top = data.draw(st.integers(1, min(used * size, 12)))
    M, E = data.draw(st.integers(1, 9)), groups * size
    sigmoid, normalise, biased = (data.draw(st.booleans()) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    # few values, so that scores are often equal; far enough apart that f32 orders them as float64 does
    logits = (rng.integers(-3, 4, (M, E)) * 0.5).astype(np.float32)
    bias = (rng.integers(0, 3, E) * 0.25).astype(np.float32)
    routes = native.route(
        Array.of(logits), top, sigmoid, normalise, 1.5, Array.of(bias[None]) if biased else None, groups, used
    )
    assert not isinstance(routes, int)
    probs = scores_of(logits, sigmoid)
    gathered = []
    for m in range(M):
        # ties are decided on the scores as the kernel has them: equal logits have equal scores, whatever they are
        exact = probs[m].astype(np.float32) + (bias if biased else np.float32(0))
        ids = routes.ids()[m].tolist()
        assert ids == sorted(set(ids))
        want = chosen(exact.astype(np.float64).round(6), top, groups, used)
        if groups == 1:
            assert ids == want
        else:  # sums of two scores may be equal but for their last bits
            assert len({e // size for e in ids}) <= used
        weights = probs[m][ids] / (probs[m][ids].sum() if normalise else 1) * 1.5
        assert np.allclose(routes.weights()[m], weights, rtol=1e-5)
        gathered += [(e, m) for e in ids]
    assert [m for _, m in sorted(gathered)] == routes.sources().tolist()
    counts = np.bincount([e for e, _ in gathered], minlength=E)
    assert np.diff(routes.offsets()).tolist() == counts.tolist()
    assert routes.active() == np.flatnonzero(counts).tolist()


def test_groups_limit_the_choice() -> None:
    """Group 1 has the best expert, group 0 the best two together: with one group used the best expert is not chosen."""
    logits = np.array([[2.0, 2.0, -3.0, -3.0, 3.0, -3.0, -3.0, -3.0]], np.float32)
    wide = native.route(Array.of(logits), 2, True, False, 1.0, None, 1, 1)
    narrow = native.route(Array.of(logits), 2, True, False, 1.0, None, 2, 1)
    assert not isinstance(wide, int)
    assert not isinstance(narrow, int)
    assert wide.ids().tolist() == [[0, 4]]
    assert narrow.ids().tolist() == [[0, 1]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = np.zeros((1, 4), np.float32), np.array([[0, 0, 0.5, 0]], np.float32)
    routes = native.route(Array.of(logits), 1, True, False, 1.0, Array.of(bias), 1, 1)
    assert not isinstance(routes, int)
    assert routes.ids().tolist() == [[2]]
    assert routes.weights().tolist() == [[0.5]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_name_their_row(bad: float) -> None:
    logits = np.zeros((5, 8), np.float32)
    logits[3, 7] = logits[4, 0] = bad
    assert native.route(Array.of(logits), 2, False, True, 1.0, None, 1, 1) == 3


def test_scores_of_nothing_make_weights_of_nothing() -> None:
    """Sigmoids that all are next to 0 are not blown up."""
    routes = native.route(Array.of(np.full((1, 4), -300, np.float32)), 2, True, True, 1.0, None, 1, 1)
    assert not isinstance(routes, int)
    assert np.all(routes.weights() < 1e-30)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("codec", "group", "act_group"), CODECS)
def test_experts_at_once_equal_each_alone(codec: str, group: int, act_group: int, isa: str) -> None:
    rng = np.random.default_rng(1)
    M, E, K, N, top = 41, 5, 128, 192, 2
    x = Array.of(rng.standard_normal((M, K)).astype(np.float32))
    routes = native.route(Array.of(rng.standard_normal((M, E)).astype(np.float32)), top, False, True, 1.0, None, 1, 1)
    assert not isinstance(routes, int)
    weights = [Weight.random(codec, N, K, group, seed=e) for e in range(E)]
    floats = codec in ("f32", "f16")
    native.choose_isa(isa)
    rows = None if floats else native.quantise(x, None, 0, act_group)
    gathered = None if rows is None else native.gather_rows(rows, routes)
    some = native.gather_floats(x, routes)
    assert np.array_equal(some.numpy(), x.numpy()[routes.sources()])
    for threads in (1, 3):
        native.set_threads(threads)
        out = Array(M * top, N)
        ranges = [(routes.offsets()[e], routes.offsets()[e + 1]) for e in range(E) for _ in weights[e].slices]
        slices = [s for w in weights for s in w.slices]
        native.linear_experts(some, gathered, slices, np.array(ranges, np.int32), [out] * len(slices))
        got = out.numpy()
        for e, w in enumerate(weights):
            at = slice(routes.offsets()[e], routes.offsets()[e + 1])
            alone = Array(M, N)
            native.linear(x, rows, w.slices, [alone] * len(w.slices), [None] * len(w.slices))
            assert np.array_equal(got[at], alone.numpy()[routes.sources()[at]])
    native.set_threads(1)
    native.choose_isa("best")


@pytest.mark.parametrize("rotated", [False, True])
def test_gate_and_quantise_in_ranges(rotated: bool) -> None:
    rng = np.random.default_rng(2)
    g, u = (Array.of(rng.standard_normal((9, 96)).astype(np.float32)) for _ in range(2))
    signs = Array.of(np.where(rng.integers(0, 2, (1, 96)), 1, -1).astype(np.float32)) if rotated else None
    whole = native.gate(0, g, u)
    want = native.quantise(whole, signs, 32)
    before, rows = g.numpy().copy(), native.empty_rows(9, 96, 0)
    native.gate_experts(0, g, u, np.array([[1, 3], [3, 4], [7, 9]], np.int32), rows, signs, 32, None, 127)
    for m in range(9):
        if m in (1, 2, 3, 7, 8):
            assert np.array_equal(g.numpy()[m], whole.numpy()[m])
            assert np.array_equal(rows.codes()[m], want.codes()[m])
            assert rows.scales()[m] == want.scales()[m]
        else:
            assert np.array_equal(g.numpy()[m], before[m])


def test_weighted_sum_adds_by_expert_ascending() -> None:
    rng = np.random.default_rng(3)
    M, E, N, top = 7, 6, 70, 3
    routes = native.route(Array.of(rng.standard_normal((M, E)).astype(np.float32)), top, False, True, 2.0, None, 1, 1)
    assert not isinstance(routes, int)
    y = rng.standard_normal((M * top, N)).astype(np.float32)
    got = native.weighted_sum(Array.of(y), routes).numpy()
    of = {(e, int(m)): at for e in range(E) for at, m in enumerate(routes.sources()) if inside(routes, e, at)}
    for m in range(M):
        parts = [w * y[of[e, m]].astype(np.float64) for e, w in zip(routes.ids()[m].tolist(), routes.weights()[m])]
        assert np.allclose(got[m], sum(parts), atol=1e-6)


def inside(routes: native.Routes, expert: int, at: int) -> bool:
    return routes.offsets()[expert] <= at < routes.offsets()[expert + 1]


def test_gate_rows() -> None:
    rng = np.random.default_rng(4)
    x, w, y = (rng.standard_normal(s).astype(np.float32) for s in ((5, 50), (1, 50), (5, 33)))
    held = Array.of(y)
    native.gate_rows(Array.of(x), Array.of(w), held)
    want = y / (1 + np.exp(-(x.astype(np.float64) @ w[0].astype(np.float64))))[:, None]
    assert np.allclose(held.numpy(), want, rtol=1e-5)


# --- short convolutions


def convolve(bcx: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """[T, 3 W] of one text from its beginning -> [T, W], in float64."""
    b, c, x = np.split(bcx.astype(np.float64), 3, axis=1)
    kept = np.concatenate([np.zeros((len(taps) - 1, b.shape[1])), b * x])
    return c * sum(taps[i] * kept[i : i + len(b)] for i in range(len(taps)))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_short_convolutions_over_batches_chunks_and_cuts(data: Any) -> None:
    width, taps_count = data.draw(st.sampled_from([5, 16, 33])), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    taps = rng.standard_normal((taps_count, width)).astype(np.float32)
    texts = [rng.standard_normal((LONG, 3 * width)).astype(np.float32) for _ in range(2)]
    pool = KvPool(1, 1, 16, 2 * LONG, half=False, conv=(2, width, taps_count))
    assert pool.conv is not None
    seqs = [Sequence(), Sequence()]
    held = Array.of(taps)
    for _ in range(data.draw(st.integers(1, 6))):
        for seq in seqs:
            if data.draw(st.booleans()):
                asked, before = data.draw(st.integers(0, seq.length)), seq.length
                pool.truncate(seq, asked)
                assert asked - BLOCK < seq.length <= asked
                assert seq.length == asked or asked < before - BLOCK
        counts = [data.draw(st.sampled_from([0, 1, 2, 60, 255, 256, 700])) for _ in seqs]
        parts = [(i, min(n, LONG - s.length)) for i, (s, n) in enumerate(zip(seqs, counts)) if min(n, LONG - s.length)]
        if not parts:
            continue
        starts = {i: seqs[i].length for i, _ in parts}
        rows = pool.rows([(seqs[i], [0] * n) for i, n in parts], every=True)
        bcx = np.concatenate([texts[i][starts[i] : starts[i] + n] for i, n in parts])
        got = native.short_conv(pool.conv, 1, rows.batch, Array.of(bcx), held).numpy()
        want = [convolve(texts[i][: starts[i] + n], taps)[starts[i] :] for i, n in parts]
        assert np.allclose(got, np.concatenate(want), atol=1e-4)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_long_context_keeps_what_its_next_position_needs() -> None:
    """Of 4096 positions of two layers of width 2048 all inputs would take 32 MiB, as many as keys and values of 16."""
    layers, width, positions = 2, 2048, 4096
    pool = KvPool(1, 1, 16, 2 * positions, half=True, conv=(layers, width, 3))
    assert pool.conv is not None
    bcx, taps = Array.of(np.ones((512, 3 * width), np.float32)), Array.of(np.ones((3, width), np.float32))
    seq, before = Sequence(), 0
    for start in range(0, 2 * positions, 512):
        batch = pool.rows([(seq, [0] * 512)], every=True).batch
        for layer in range(layers):
            native.short_conv(pool.conv, layer, batch, bcx, taps)
        before = resident() if start == 512 else before
    assert resident() - before < 4 << 20
    assert pool.nbytes(2 * positions) - pool.cache.block_bytes() * 32 < 10 << 20
    pool.truncate(seq, 0)
    assert resident() < before - (3 << 20)


def test_kept_inputs_are_halves_where_keys_are() -> None:
    rng = np.random.default_rng(5)
    bcx = rng.standard_normal((40, 3 * 16)).astype(np.float32)
    taps = rng.standard_normal((3, 16)).astype(np.float32)
    results = []
    for half in (False, True):
        pool = KvPool(1, 1, 16, 256, half=half, conv=(1, 16, 3))
        assert pool.conv is not None
        rows = pool.rows([(Sequence(), [0] * 40)], every=True)
        results.append(native.short_conv(pool.conv, 0, rows.batch, Array.of(bcx), Array.of(taps)).numpy())
        assert pool.nbytes(BLOCK) == (2 if half else 4) * BLOCK * (16 + 16 + 16)
    assert np.allclose(results[0], results[1], atol=1e-2)
    assert not np.array_equal(*results)


# --- refusals


def refused(call: Any, *args: Any) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        call(*args)


def test_arguments_that_do_not_fit() -> None:
    logits, x = Array.of(np.zeros((3, 8), np.float32)), Array.of(np.zeros((3, 64), np.float32))
    for top, groups, used in ((0, 1, 1), (9, 1, 1), (2, 3, 1), (2, 2, 3), (5, 2, 1), (2, 0, 1)):
        refused(native.route, logits, top, False, True, 1.0, None, groups, used)
    refused(native.route, logits, 2, False, True, 1.0, Array(1, 7), 1, 1)
    refused(native.route, Array(1, native.EXPERTS_MAX + 1), 2, False, True, 1.0, None, 1, 1)
    routes = native.route(logits, 2, False, True, 1.0, None, 1, 1)
    assert not isinstance(routes, int)
    refused(native.gather_floats, Array(4, 64), routes)
    refused(native.gather_rows, QuantisedRows.of(np.zeros((4, 64), np.int8)), routes)
    refused(native.weighted_sum, Array(5, 64), routes)
    refused(native.gate_rows, x, Array(1, 63), Array(3, 8))
    refused(native.gate_rows, x, Array(1, 64), Array(2, 8))
    w = Weight.random("i8", 64, 64)
    rows, out = QuantisedRows.of(np.zeros((6, 64), np.int8)), Array(6, 64)
    for ranges in ([[0, 7]], [[3, 2]], [[-1, 2]], [[0, 1], [1, 2]]):
        refused(native.linear_experts, x, rows, w.slices, np.array(ranges, np.int32), [out])
    one = np.array([[0, 6]], np.int32)
    refused(native.linear_experts, x, None, w.slices, one, [out])
    refused(native.linear_experts, x, rows, w.slices, one, [Array(5, 64)])
    refused(native.linear_experts, x, rows, w.slices, one, [Array(6, 0)])
    refused(native.gate_experts, 0, out, Array(6, 65), one, None, None, 0, None, 127)
    refused(native.gate_experts, 0, out, Array(6, 64), one, native.empty_rows(6, 32, 0), None, 0, None, 127)
    refused(native.gate_experts, 0, out, Array(6, 64), one, native.empty_rows(6, 64, 0), None, 0, None, 128)
    pool = KvPool(1, 1, 16, 256, half=False, conv=(1, 16, 3))
    batch = pool.rows([(Sequence(), [0] * 3)], every=True).batch
    for layer, bcx, taps in (
        (1, Array(3, 48), Array(3, 16)),
        (0, Array(2, 48), Array(3, 16)),
        (0, Array(3, 47), Array(3, 16)),
        (0, Array(3, 48), Array(native.TAPS_MAX + 1, 16)),
        (0, Array(3, 48), Array(3, 15)),
    ):
        refused(native.short_conv, pool.conv, layer, batch, bcx, taps)
    with pytest.raises(MemoryError):
        native.ConvCache(1 << 16, 1 << 20, 1 << 20, False)
