"""Scores of rows of logits: float64 definitions, every instruction set and thread count the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]


def log_softmax(x: F32) -> F64:
    y = x.astype(np.float64)
    y -= y.max(axis=1, keepdims=True)
    return y - np.log(np.exp(y).sum(axis=1, keepdims=True))


def compared(p: F32, q: F32, targets: npt.NDArray[np.int32]) -> tuple[F64, npt.NDArray[np.int32], F64]:
    M = len(p)
    nll, top, kl = np.empty((M, 2)), np.empty((M, 2), np.int32), np.empty(M)
    native.compare(native.Array.of(p), native.Array.of(q), targets, nll, top, kl)
    return nll, top, kl


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 700), st.floats(0.01, 30), st.floats(0, 5), st.integers(0, 2**32 - 1))
def test_likelihoods_tops_and_divergence(M: int, V: int, size: float, apart: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = (size * rng.standard_normal((M, V))).astype(np.float32)
    q = (p + apart * rng.standard_normal((M, V))).astype(np.float32)
    targets = rng.integers(0, V, M).astype(np.int32)
    nll, top, kl = compared(p, q, targets)
    for i, x in enumerate((p, q)):
        np.testing.assert_allclose(nll[:, i], -log_softmax(x)[np.arange(M), targets], atol=2e-6)
        np.testing.assert_array_equal(top[:, i], x.argmax(axis=1))
    want = (np.exp(log_softmax(p)) * (log_softmax(p) - log_softmax(q))).sum(axis=1)
    np.testing.assert_allclose(kl, want, atol=2e-6 * (1 + apart))
    alone, first = np.empty(M), np.empty(M, np.int32)
    native.score(native.Array.of(p), targets, alone, first)
    assert (alone == nll[:, 0]).all()
    assert (first == top[:, 0]).all()


def test_a_model_does_not_diverge_from_itself() -> None:
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    assert (compared(x, x, np.zeros(3, np.int32))[2] == 0).all()


def test_paths_and_threads_change_no_bit() -> None:
    rng = np.random.default_rng(1)
    p, q = (rng.standard_normal((9, 5003)).astype(np.float32) * 4 for _ in range(2))
    targets = rng.integers(0, 5003, 9).astype(np.int32)
    found = []
    try:
        for isa in native.isa_names():
            native.choose_isa(isa)
            for threads in (1, 3):
                native.set_threads(threads)
                found.append([x.tobytes() for x in compared(p, q, targets)])
    finally:
        native.choose_isa("best")
    assert all(x == found[0] for x in found)


def test_what_does_not_fit_is_refused() -> None:
    x, targets = native.Array.of(np.ones((2, 8), np.float32)), np.zeros(2, np.int32)
    nll, top, kl = np.empty((2, 2)), np.empty((2, 2), np.int32), np.empty(2)
    for other, t, n in (
        (native.Array(3, 8), targets, nll),
        (native.Array(2, 9), targets, nll),
        (x, np.zeros(3, np.int32), nll),
        (x, np.array([0, 8], np.int32), nll),
        (x, np.array([0, -1], np.int32), nll),
        (x, targets, np.empty((3, 2))),
    ):
        with pytest.raises(ValueError):
            native.compare(x, other, t, n, top, kl)
    with pytest.raises(ValueError):
        native.score(x, targets, np.empty(1), np.empty(2, np.int32))
    with pytest.raises(TypeError):
        native.score(x, targets, np.empty(2, np.float32), np.empty(2, np.int32))  # type: ignore[arg-type]
