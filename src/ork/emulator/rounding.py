"""How the chip rounds, one function a way, so that silicon can prove one of them wrong and only it changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def shift_round(x: npt.NDArray[np.int64], shift: int, *, half_up: bool) -> npt.NDArray[np.int64]:
    """x / 2**shift rounded: halves to even, or up. Integers below 2**62."""
    if shift == 0:
        return x
    if shift > 62:
        return np.zeros_like(x)
    floor = x >> shift
    rest = x - (floor << shift)
    half = np.int64(1) << (shift - 1)
    up = (rest > half) | ((rest == half) & (half_up | (floor & 1 == 1)))
    rounded: npt.NDArray[np.int64] = floor + up
    return rounded
