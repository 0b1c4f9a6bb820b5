"""Standalone operations of the DPU against numpy: captured programs, every stage, every way an operand is spread."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.elementwise import CAPTURES, Array, Operation, capture, from_cube

captured = pytest.mark.skipif(not CAPTURES, reason="no captured programs: ORK_CAPTURES names their folder")
LIMITS = {np.int8: (-128, 127), np.int16: (-32768, 32767)}


def random_pair(dtype: type, shape: tuple[int, int] = (8, 64)) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    if dtype is np.float16:
        return rng.normal(size=shape).astype(dtype), rng.normal(size=shape).astype(dtype)
    low, high = LIMITS[dtype]
    return tuple(rng.integers(low, high + 1, shape).astype(dtype) for _ in range(2))  # type: ignore[return-value]


# --- captured programs: the constants of their registers, as the affine formulas that they stand for ---

AFFINE = {
    "add_i8": (np.int8, lambda a, b: ((a - 9) * 0x4000 + (b + 15) * 0x766D / 2) * 0x57A7 / 2**29 - 4),
    "mul_i8": (np.int8, lambda a, b: (a + 12) * (b + 10) * 0x7AA9 / 2**21 + 21),
    "add_i16": (np.int16, lambda a, b: ((a - 2677) * 0x7A75 / 2 + (b - 2548) * 0x4000) * 0x5B2C / 2**29 - 1137),
    "mul_i16": (np.int16, lambda a, b: (a - 5057) * (b + 3589) * 0x4190 / 2**28 + 3178),
}


@captured
@pytest.mark.parametrize("name", AFFINE)
def test_captured_integer_operations(name: str) -> None:
    dtype, formula = AFFINE[name]
    a, b = random_pair(dtype)
    op = Operation(capture(f"sdp_{name}_m8_n64"), a, b)
    got = from_cube(op.run()[: a.nbytes], 8, 64, a.dtype.str)
    assert np.array_equal(got, np.rint(formula(a.astype(float), b.astype(float))).clip(*LIMITS[dtype]))
    assert set(op.board.report.counts) <= {"int16-overflow"}


@captured
@pytest.mark.parametrize("name", ["add", "mul"])
def test_captured_fp16_operations(name: str) -> None:
    a, b = random_pair(np.float16)
    op = Operation(capture(f"sdp_{name}_f16_m8_n64"), a, b)
    got = from_cube(op.run()[: a.nbytes], 8, 64, "<f2")
    assert np.array_equal(got, a + b if name == "add" else a * b)
    assert not op.board.report.violations
