"""Products with slices: exact integers, floats as specified, every instruction set the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native, tiles
from ork.devices.cpu import CpuDevice
from tests.native.oracles import Weight, quantised

ISAS = native.isa_names()
DEVICE = CpuDevice.__new__(CpuDevice)  # its products need no thread count of their own


def padded(codes: np.ndarray) -> np.ndarray:
    out = np.zeros((len(codes), tiles.pad_k(codes.shape[1])), np.int8)
    out[:, : codes.shape[1]] = codes
    return out


def accumulators(w: Weight, codes: np.ndarray) -> np.ndarray:
    parts = [DEVICE.accumulators(s, padded(codes)) for s in w.slices]
    return np.concatenate(parts, axis=1)


def exact(w: Weight, codes: np.ndarray) -> np.ndarray:
    sums = codes.astype(np.float64) @ w.dense.T.astype(np.float64)  # below 2^53: exact
    return np.pad(sums.astype(np.int32), ((0, 0), (0, tiles.pad_n(w.N) - w.N)))


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 200), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=40)
def test_accumulators_are_exact(M: int, K: int, N: int, seed: int, extreme: bool) -> None:
    rng = np.random.default_rng(seed)
    pool = np.array([-128, -127, 127, 0] if extreme else range(-128, 128), np.int8)
    w = Weight(rng.choice(pool, (N, K)), ones(N))
    codes = rng.choice(pool, (M, K))
    want = exact(w, codes)
    for name in ISAS:
        native.choose_isa(name)
        assert np.array_equal(accumulators(w, codes), want), name
    native.choose_isa("best")


@pytest.mark.parametrize(("K", "ks"), [(4096, 4096), (4128, 1376), (8192, 4096), (11008, 2752), (20480, 4096)])
def test_k_slices(isa: str, K: int, ks: int) -> None:
    rng = np.random.default_rng(K)
    w = Weight(rng.integers(-128, 128, (70, K)).astype(np.int8), ones(70))
    w.dense[3] = -128
    w = Weight(w.dense, ones(70))
    assert tiles.ks_of(K) == ks
    codes = rng.integers(-128, 128, (3, K)).astype(np.int8)
    codes[1] = -128  # 128 * 128 * K: the largest sum there is
    assert np.array_equal(accumulators(w, codes), exact(w, codes))


def test_a_tensor_of_several_slices(isa: str) -> None:
    rng = np.random.default_rng(1)
    w = Weight(rng.integers(-127, 128, (1200, 4096)).astype(np.int8), rng.random(1200, np.float32))
    assert len(w.slices) == 3
    x = rng.standard_normal((5, 4096), np.float32)
    codes, scales = quantised(x)
    sums = (codes.astype(np.float64) @ w.dense.T).astype(np.float32)
    want = sums * (scales[:, None] * w.scales[None])
    assert np.array_equal(w.times(x, native.quantise(native.Array.of(x), None, 0)), want)


@given(st.integers(1, 20), st.integers(1, 150), st.integers(1, 150), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=30)
def test_floats_of_i8_are_as_specified(M: int, K: int, N: int, seed: int, with_bias: bool) -> None:
    """float(sum) * (row scale * channel scale) + bias, each step rounded to f32."""
    rng = np.random.default_rng(seed)
    w = Weight(rng.integers(-127, 128, (N, K)).astype(np.int8), rng.standard_normal(N).astype(np.float32))
    bias = rng.standard_normal(N).astype(np.float32) if with_bias else None
    x = rng.standard_normal((M, K)).astype(np.float32)
    codes, scales = quantised(x)
    want = (codes.astype(np.int32) @ w.dense.T.astype(np.int32)).astype(np.float32) * (scales[:, None] * w.scales)
    if bias is not None:
        want = want + bias
    for name in ISAS:
        native.choose_isa(name)
        rows = native.quantise(native.Array.of(x), None, 0)
        assert np.array_equal(w.times(x, rows, bias), want), name
    native.choose_isa("best")


@given(st.integers(1, 20), st.integers(1, 300), st.integers(1, 150), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=30)
def test_f32(M: int, K: int, N: int, seed: int, with_bias: bool) -> None:
    rng = np.random.default_rng(seed)
    w = Weight(rng.standard_normal((N, K)).astype(np.float32))
    bias = rng.standard_normal(N).astype(np.float32) if with_bias else None
    x = rng.standard_normal((M, K)).astype(np.float32)
    exact64 = x.astype(np.float64) @ w.dense.T.astype(np.float64) + (0 if bias is None else bias)
    bound = (np.abs(x).astype(np.float64) @ np.abs(w.dense.T).astype(np.float64) + 3) * (K + 2) * 2.0**-24
    first = None
    for name in ISAS:
        native.choose_isa(name)
        got = w.times(x, bias=bias)
        assert (np.abs(got - exact64) <= bound).all()
        first = got if first is None else first
        assert np.array_equal(got, first), name
    native.choose_isa("best")


@pytest.mark.parametrize("codec", ["i8", "f32"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_batch(codec: str, threads: int) -> None:
    native.set_threads(threads)
    rng = np.random.default_rng(2)
    dense = rng.integers(-127, 128, (300, 600))
    w = Weight(dense.astype(np.int8), ones(300)) if codec == "i8" else Weight(dense.astype(np.float32))
    x = rng.standard_normal((37, 600)).astype(np.float32)

    def product(part: np.ndarray) -> np.ndarray:
        return w.times(part, native.quantise(native.Array.of(part), None, 0) if codec == "i8" else None)

    whole = product(x)
    for rows in (slice(0, 1), slice(3, 10), slice(11, 36)):
        assert np.array_equal(product(np.ascontiguousarray(x[rows])), whole[rows])


def test_padding_is_zero() -> None:
    """Columns behind N hold zeros, which the next operation reads along."""
    rng = np.random.default_rng(3)
    w = Weight(rng.integers(-127, 128, (70, 40)).astype(np.int8), ones(70))
    x = rng.standard_normal((4, 40)).astype(np.float32)
    out = native.Array(4, 128)
    native.linear(native.Array.of(x), native.quantise(native.Array.of(x), None, 0), w.slices, [out], [None])
    assert out.numpy()[:, :70].any()
    assert not out.numpy()[:, 70:].any()
