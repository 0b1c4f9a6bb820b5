"""OUT_CVT: the last stage, which brings results to the precision that is written.

Integers: sat(round(x * scale / 2**shift) + offset), halves to even or up as a bit says; with cvt_type the offset is
added first. 32-bit results pass as they are (executed: programs with scale 0 give right sums). fp16: one rounding of
(x + offset) * 2**-minus_exp (executed for the offset of 1 and exponent of 15 of a captured exp).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator.rounding import shift_round
from ork.emulator.stages import Converter, Stages
from ork.npu.isa import Precision

Array = npt.NDArray[Any]

_INTEGERS: Final = {Precision.INT8: np.int8, Precision.INT16: np.int16, Precision.INT32: np.int32}


def narrow(exact: npt.NDArray[np.int64], out: Converter, out_precision: int) -> tuple[Array, str]:
    """Integers of at most 33 bits in the output precision, and the rule that a value broke, or ""."""
    if out_precision == Precision.INT32:
        return saturate(exact, np.int32, "int32-overflow")
    # int8 saturates (executed); that int16 does is a guess
    dtype = _INTEGERS[Precision(out_precision)]
    return saturate(converted(exact, out), dtype, "int16-overflow" if dtype is np.int16 else "")


def converted(x: npt.NDArray[np.int64], how: Converter) -> npt.NDArray[np.int64]:
    """What a converter makes of integers; nothing is clipped."""
    if how.add_first:
        return shift_round((x + how.offset) * how.scale, how.shift, half_up=how.half_up)
    return shift_round(x * how.scale, how.shift, half_up=how.half_up) + how.offset


def floats(x: npt.NDArray[np.float32], stages: Stages) -> Array:
    """float32 in the output precision."""
    if stages.out_precision == Precision.FP32:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        moved = x + np.float32(stages.out.offset) if stages.out.offset else x
        scaled: Array = np.ldexp(moved, -stages.minus_exp).astype(np.float16)
        return scaled


def saturate(x: npt.NDArray[np.int64], dtype: type[Any], rule: str) -> tuple[Array, str]:
    """`x` clipped into an integer type, and the rule if anything was clipped."""
    limits = np.iinfo(dtype)
    broken = bool(rule) and bool(x.size) and bool(x.min() < limits.min or x.max() > limits.max)
    return x.clip(limits.min, limits.max).astype(dtype), rule if broken else ""
