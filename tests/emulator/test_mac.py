"""Sums of the MAC array against exact arithmetic with fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.emulator.mac import Sums
from ork.npu.isa import Precision


def to_f32(exact: Fraction) -> np.float32:
    """The nearest fp32, halves to even, of an exact value in fp32's normal range (or 0)."""
    if not exact:
        return np.float32(0)
    exponent = 0
    scaled = abs(exact)
    while scaled >= 1 << 24:
        scaled, exponent = scaled / 2, exponent + 1
    while scaled < 1 << 23:
        scaled, exponent = scaled * 2, exponent - 1
    mantissa = round(scaled)  # Python rounds a Fraction's halves to even
    return np.float32(np.ldexp(float(mantissa if exact > 0 else -mantissa), exponent))


@given(st.lists(st.tuples(*2 * [st.integers(0, 0xFFFF)]), min_size=1, max_size=40))
def test_fp16_sums_are_the_exact_sum_rounded_once(pairs: list[tuple[int, int]]) -> None:
    bits = np.array(pairs, np.uint16).view(np.float16)
    bits = np.where(np.isfinite(bits), bits, np.float16(0.333))
    sums = Sums(Precision.FP16, 1, 1)
    sums.add(np.ascontiguousarray(bits[:, 0])[None], np.ascontiguousarray(bits[:, 1])[None])
    exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in bits.tolist())
    assert sums.floats()[0, 0] == to_f32(Fraction(exact))


@pytest.mark.parametrize(
    ("products", "want"),
    [
        ([(1.0, 1.0), (2.0**-12, 2.0**-12)], 1.0),  # half a step of fp32: to the even neighbour
        ([(1.0, 1.0), (2.0**-12, 2.0**-12), (2.0**-24, 2.0**-24)], 1.0 + 2.0**-23),  # anything above half: up
        ([(1.0, 1.0 + 2.0**-10), (2.0**-12, 2.0**-12), (-1.0, 2.0**-10)], 1.0),
        ([(60000.0, 60000.0), (2.0**-24, 2.0**-24), (-60000.0, 60000.0)], 2.0**-48),  # nothing is lost on the way
        ([(1.0, 1.0), (-1.0, 1.0)], 0.0),
    ],
)
def test_fp16_rounding_at_its_edges(products: list[tuple[float, float]], want: float) -> None:
    a, b = (np.array([column], np.float16) for column in zip(*products))
    sums = Sums(Precision.FP16, 1, 1)
    sums.add(a, b)
    got = sums.floats()
    assert got.dtype == np.float32
    assert got[0, 0] == want
    assert not np.signbit(got[0, 0])


def test_fp16_order_and_pieces_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 9000)).astype(np.float16), rng.standard_normal((5, 9000)).astype(np.float16)
    whole, pieces = Sums(Precision.FP16, 3, 5), Sums(Precision.FP16, 3, 5)
    whole.add(a, b)
    order = rng.permutation(9000)
    for part in np.array_split(order, 7):
        pieces.add(a[:, part], b[:, part])
    assert whole.floats().tobytes() == pieces.floats().tobytes()


def test_fp16_infinities_and_nan_follow_ieee() -> None:
    inf, nan = np.inf, np.nan
    a = np.array([[inf, 1], [inf, -inf], [inf, 0], [nan, 1], [1, 2]], np.float16)
    b = np.array([[1, 1], [0, 1]], np.float16)
    sums = Sums(Precision.FP16, 5, 2)
    sums.add(a, b)
    got = sums.floats()
    want = np.array([[inf, nan], [nan, nan], [inf, nan], [nan, nan], [3, 2]], np.float32)
    assert np.array_equal(got, want, equal_nan=True)
    assert set(got.view(np.uint32)[np.isnan(got)].tolist()) == {0x7FC00000}


@pytest.mark.parametrize(
    ("precision", "dtype", "low"), [(Precision.INT8, np.int8, -128), (Precision.INT16, np.int16, -32768)]
)
def test_integers_are_exact_at_their_extremes(precision: Precision, dtype: type, low: int) -> None:
    a, b = np.full((2, 16000), low, dtype), np.full((3, 16000), low, dtype)
    b[1], b[2] = -low - 1, 1
    sums = Sums(precision, 2, 3)
    sums.add(a, b)
    assert sums.integers().tolist() == 2 * [[16000 * low * low, 16000 * low * (-low - 1), 16000 * low]]
