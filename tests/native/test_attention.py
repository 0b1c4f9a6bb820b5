"""Attention over the block KV cache against a dense float64 reference, however the tokens arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from ork.engine.kvcache import KvPool, Sequence
from tests.native.oracles import attention

ISAS = native.isa_names()


@dataclass
class Case:
    """Random queries, keys and values of some sequences, and what attention has to make of them."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    half: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.2
    size: float = 1.0
    seed: int = 0
    inputs: list[tuple[np.ndarray, ...]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        widths = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim)
        self.inputs = [
            tuple((rng.standard_normal((T, w)) * self.size).astype(np.float32) for w in widths) for T in self.lengths
        ]

    def want(self) -> list[np.ndarray]:
        out = []
        for q, k, v in self.inputs:
            if self.half:
                k, v = k.astype(np.float16), v.astype(np.float16)  # noqa: PLW2901
            options = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
            out.append(attention(q, k, v, self.heads, self.kv_heads, **options))
        return out

    def run(self, steps: list[list[int]] | None = None, layer: int = 0, layers: int = 1) -> list[np.ndarray]:
        """Feeds steps[i][s] tokens of sequence s in the i-th pass (default: all at once)."""
        blocks = sum(-(-T // native.KV_BLOCK) for T in self.lengths)
        pool = KvPool(layers, self.kv_heads, self.dim, blocks * native.KV_BLOCK, half=self.half)
        seqs = [Sequence() for _ in self.lengths]
        out: list[list[np.ndarray]] = [[] for _ in seqs]
        for step in steps or [self.lengths]:
            chosen = [s for s, n in enumerate(step) if n]
            starts = [seqs[s].length for s in chosen]
            rows = pool.rows([(seqs[s], [0] * step[s]) for s in chosen], every=True)
            q, k, v = (
                native.Array.of(np.concatenate([self.inputs[s][i][a : a + step[s]] for s, a in zip(chosen, starts)]))
                for i in range(3)
            )
            y = native.attention(
                pool.cache, layer, rows.batch, q, k, v, self.heads, self.scale, self.window, self.softcap
            ).numpy()
            at = 0
            for s in chosen:
                out[s].append(y[at : at + step[s]].copy())
                at += step[s]
        return [np.concatenate(parts) for parts in out]


def check(got: list[np.ndarray], want: list[np.ndarray], close: float = 3e-6) -> None:
    for g, w in zip(got, want):
        assert np.allclose(g, w, rtol=0, atol=close * max(1.0, np.abs(w).max()))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (32, 1)])
@pytest.mark.parametrize("dim", [16, 40, 64])
def test_grouped_heads(half: bool, heads: int, kv_heads: int, dim: int) -> None:
    case = Case([300], heads, kv_heads, dim, half)
    check(case.run(), case.want())


@pytest.mark.parametrize("window", [1, 2, 16, 100, 256, 257, 400, 5000])
def test_sliding_window(isa: str, window: int) -> None:
    case = Case([600], 2, 1, 16, window=window)
    check(case.run(), case.want())
    check(case.run([[599], [1]]), case.want())


@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_soft_cap(softcap: float) -> None:
    case = Case([280], softcap=softcap, scale=1.0, size=2.0)
    check(case.run(), case.want())


def test_scores_far_apart() -> None:
    """Weights of 0 and 1, and maxima that move from block to block."""
    case = Case([700], 2, 2, 16, scale=10.0, size=3.0)  # scores of some hundreds, each right to f32
    check(case.run(), case.want(), close=1e-3)


def test_the_layer_matters_and_layers_do_not_meet() -> None:
    case = Case([300])
    first = case.run(layer=0, layers=3)
    for layer in (1, 2):
        assert np.array_equal(case.run(layer=layer, layers=3)[0], first[0])


@st.composite
def compositions(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths of up to four sequences, and passes that feed them piece by piece."""
    lengths = draw(st.lists(st.integers(1, 540), min_size=1, max_size=4))
    left, steps = list(lengths), []
    while any(left):
        step = [min(n, draw(st.sampled_from([0, 1, 7, 255, 256, 300]))) for n in left]
        if not any(step):
            step = left[:]
        left = [n - m for n, m in zip(left, step)]
        steps.append(step)
    return lengths, steps


@given(compositions(), st.sampled_from([0, 1, 37, 300]), st.booleans(), st.sampled_from(ISAS), st.integers(1, 3))
@settings(max_examples=25)
def test_chunks_batches_threads_and_isas_give_the_same_bits(
    composition: tuple[list[int], list[list[int]]], window: int, half: bool, isa: str, threads: int
) -> None:
    lengths, steps = composition
    case = Case(lengths, 4, 2, 16, half, window)
    try:
        native.choose_isa(isa)
        native.set_threads(threads)
        got = case.run(steps)
    finally:
        native.choose_isa("best")
        native.set_threads(1)
    alone = [Case(lengths, 4, 2, 16, half, window) for _ in lengths]
    for s, single in enumerate(alone):
        single.inputs, single.lengths = [case.inputs[s]], [lengths[s]]
        assert np.array_equal(got[s], single.run()[0])
    check(got, case.want())


def test_what_was_cut_off_leaves_no_trace() -> None:
    """Positions that are written again give what they would have given the first time."""
    case = Case([40], 2, 2, 16)
    fresh = case.run()[0]
    pool = KvPool(1, 2, 16, 256, half=False)
    seq = Sequence()
    old = native.Array.of(np.full((40, 32), 1e30, np.float32))
    rows = pool.rows([(seq, [0] * 40)], every=True)
    native.attention(pool.cache, 0, rows.batch, old, old, old, 2, case.scale, 0, 0.0)
    pool.truncate(seq, 0)
    q, k, v = case.inputs[0]
    out = []
    for start, stop in ((0, 5), (5, 6), (6, 40)):
        rows = pool.rows([(seq, [0] * (stop - start))], every=True)
        arrays = [native.Array.of(np.ascontiguousarray(a[start:stop])) for a in (q, k, v)]
        out.append(native.attention(pool.cache, 0, rows.batch, *arrays, 2, case.scale, 0, 0.0).numpy().copy())
    assert np.array_equal(np.concatenate(out), fresh)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_future_does_not_reach_back(bad: float) -> None:
    """A position whose value overflowed spoils itself and those after it, not those before, in any chunking."""
    case = Case([40], 2, 2, 16)
    fresh = case.run()[0]
    case.inputs[0][2][21] = bad
    for steps in ([[40]], [[1]] * 40, [[20], [20]]):
        got = case.run(steps)[0]
        assert np.array_equal(got[:21], fresh[:21])
        assert not np.isfinite(got[21:]).any()
