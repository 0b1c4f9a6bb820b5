"""GPTQ: plain rounding where inputs are independent, far less error where they are not, the same codes every time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.errors import SourceError
from ork.quant import codecs, gptq

F32 = npt.NDArray[np.float32]
SHAPES = [("i4", 32), ("i4", 64), ("i4", 128), ("i4", 0), ("nf4", 32), ("nf4", 128), ("nf4", 0), ("i8", 0), ("i8", 128)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with gptq.one_blas_thread():
        yield


def correlated(K: int, rows: int, seed: int) -> F32:
    """Inputs whose neighbours resemble each other, of unequal size."""
    rng = np.random.default_rng(seed)
    mixing = 0.95 ** np.abs(np.subtract.outer(np.arange(K), np.arange(K)))
    x = rng.standard_normal((rows, K)) @ np.linalg.cholesky(mixing).T * np.exp(rng.standard_normal(K))
    return x.astype(np.float32)


def loss(w: F32, q: F32, x: F32) -> float:
    """trace((W - Q) X'X (W - Q)') in double precision."""
    return float(np.square((w.astype(np.float64) - q) @ x.T.astype(np.float64)).sum())


def equal(a: codecs.Quantised, b: codecs.Quantised) -> bool:
    pairs = ((a.codes, b.codes), (a.channel, b.channel), (a.groups, b.groups))
    return all(p is q is None or np.array_equal(p, q) for p, q in pairs)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    search=st.sampled_from(codecs.SEARCHES),
    n=st.integers(1, 70),
    K=st.sampled_from([128, 160, 384, 1024]),
    spread=st.sampled_from([0.0, 3.0, 8.0]),
    damping=st.sampled_from([0.0, 0.01]),
    seed=st.integers(0, 1 << 20),
)
def test_independent_inputs_are_rounded_plainly(
    shape: tuple[str, int], search: str, n: int, K: int, spread: float, damping: float, seed: int
) -> None:
    codec, asked = shape
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, K)) * np.exp(spread * rng.standard_normal((n, K // 32))).repeat(32, axis=1)
    rows[rng.random(n) < 0.1] = 0
    w = rows.astype(np.float32)
    group = codecs.effective_group(K, asked)
    made = gptq.factor(gptq.Hessian.of(np.eye(K), K), damping=damping)
    importance = rng.random(K).astype(np.float32) if search == "importance" else None
    plain = codecs.quantise(codec, w, group, search=search, importance=importance)
    assert equal(gptq.gptq(codec, w, made, group, search=search, importance=importance), plain)


@pytest.mark.parametrize(("codec", "group"), SHAPES)
def test_correlated_inputs_cost_far_less(codec: str, group: int) -> None:
    K = 768
    x = correlated(K, 2000, 1)
    w = np.random.default_rng(2).standard_normal((96, K)).astype(np.float32)
    hessian = gptq.Hessian(K)
    hessian.add(x)
    quantised = gptq.gptq(codec, w, gptq.factor(hessian), group)
    plain = codecs.dequantise(codec, codecs.quantise(codec, w, group), K)
    assert loss(w, codecs.dequantise(codec, quantised, K), x) <= 0.60 * loss(w, plain, x)


def test_the_scales_are_searched_too() -> None:
    K = 512
    x = correlated(K, 1500, 3)
    w = np.random.default_rng(4).standard_normal((64, K)).astype(np.float32)
    hessian = gptq.Hessian(K)
    hessian.add(x)
    made = gptq.factor(hessian)
    error = [loss(w, codecs.dequantise("i4", gptq.gptq("i4", w, made, 64, search=s), K), x) for s in ("mse", "absmax")]
    assert error[0] < error[1]


def test_codes_follow_the_definition() -> None:
    """Column by column in double precision, each error spread over all columns behind at once."""
    K, n = 320, 40
    x = correlated(K, 900, 5)
    w = np.random.default_rng(6).standard_normal((n, K)).astype(np.float32)
    hessian = gptq.Hessian(K)
    hessian.add(x)
    found = gptq.gptq("i8", w, gptq.factor(hessian))
    assert found.channel is not None
    h = x.T.astype(np.float64) @ x
    h += np.eye(K) * gptq.DAMPING * np.diag(h).mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    work, expected = w.astype(np.float64), np.zeros((n, K))
    for j in range(K):
        expected[:, j] = np.clip(np.rint(work[:, j] / found.channel), -127, 127)
        error = (work[:, j] - expected[:, j] * found.channel) / upper[j, j]
        work[:, j:] -= np.outer(error, upper[j, j:])
    assert np.mean(found.codes[:, :K] != expected) < 0.01  # a rounding that was close may fall the other way
    assert np.abs(found.codes[:, :K] - expected).max() <= 1


def test_the_factor_is_that_of_the_inverse() -> None:
    """Tiles, parts and the way back to the inputs' order: U H U' = 1 for K beyond two tiles."""
    K = 2 * gptq.TILE + 70
    x = correlated(K, 3000, 7)
    hessian = gptq.Hessian(K)
    for part in np.array_split(x, 3):
        hessian.add(part)
    assert hessian.rows == 3000
    upper = np.triu(gptq.factor(hessian).upper).astype(np.float64)
    h = x.T.astype(np.float64) @ x
    h += np.eye(K) * gptq.DAMPING * np.diag(h).mean()
    assert np.abs(upper @ h @ upper.T - np.eye(K)).max() < 1e-3


def test_threads_and_the_cut_into_slices_do_not_change_codes() -> None:
    K = gptq.TILE + 128
    x = correlated(K, 1500, 8)
    w = np.random.default_rng(9).standard_normal((256, K)).astype(np.float32)
    results = []
    for threads in (0, 2, 3):
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            hessian = gptq.Hessian(K)
            for part in (x[:700], x[700:]):
                hessian.add(part, pool if threads else None)
            made = gptq.factor(hessian, pool if threads else None)
            slices = list(
                pool.map(lambda at, made=made: gptq.gptq("nf4", w[at : at + 64], made, 64), range(0, 256, 64))
            )
        results.append(np.concatenate([s.codes for s in slices]))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_an_input_that_was_always_zero_costs_nothing() -> None:
    K = 256
    x = correlated(K, 1000, 10)
    x[:, [3, 200]] = 0
    w = np.random.default_rng(11).standard_normal((32, K)).astype(np.float32)
    w[:, 200] = 1000  # would spoil its group's scale
    hessian = gptq.Hessian(K)
    hessian.add(x)
    made = gptq.factor(hessian)
    assert list(made.dead) == [3, 200]
    q = codecs.dequantise("i4", gptq.gptq("i4", w, made, 32), K)
    assert not q[:, [3, 200]].any()
    w[:, [3, 200]] = 0
    assert loss(w, q, x) <= 0.60 * loss(w, codecs.dequantise("i4", codecs.quantise("i4", w, 32), K), x)


def test_what_cannot_be_factored_is_refused() -> None:
    for bad in (np.diag([1.0, -5.0, 1.0, 1.0]), np.full((4, 4), np.inf), np.full((4, 4), np.nan)):
        with pytest.raises(FloatingPointError, match="second moments"):
            gptq.factor(gptq.Hessian.of(bad, 4))
    rows = np.ones((2, 32), np.float32)
    rows[1, 4] = np.nan
    with pytest.raises(SourceError, match="row 1"):
        gptq.gptq("i4", rows, gptq.factor(gptq.Hessian.of(np.eye(32), 32)), 32)
    rows = np.random.default_rng(12).uniform(-3e38, 3e38, (3, 256)).astype(np.float32)
    rows[:2] = 1
    pairs = np.kron(
        np.eye(128), [[1, 1e-4], [1e-4, 2e-8]]
    )  # what the first input loses, 10,000 of the second give back
    with pytest.raises(SourceError, match="row 2 holds values too large"):
        gptq.gptq("i4", rows, gptq.factor(gptq.Hessian.of(pairs, 256), damping=0), 32)
    with pytest.raises(ValueError, match="does not round"):
        gptq.gptq("f16", rows[:1], gptq.factor(gptq.Hessian.of(np.eye(32), 32)))
