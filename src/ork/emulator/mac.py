"""The sums of the MAC array: features x kernels, per precision, over as many kernel taps as are added.

Integers: exact sums, int64 here; the caller narrows. fp16: **the exact sum of the exact products, rounded once to fp32,
half to even**. How the chip orders and rounds its partial sums is not known; this definition depends on no order, and
agrees with every order wherever all partial sums are exact, such as small integers. Zero sums are +0. Infinities and
NaN follow IEEE; NaN is always 0x7fc00000.

Depthwise, every channel is summed for itself. Integers may carry the sum of each window's features along, which a
weight zero point multiplies (executed): sum(x * (w + z)) = sum(x * w) + z * sum(x).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.npu.isa import Precision

Array = npt.NDArray[Any]

_SCALE: Final = 24  # the smallest fp16 step is 2**-24: every finite fp16 number times 2**24 is an integer below 2**40
_LIMB: Final = 20  # bits: products of two limbs stay below 2**40
_MANTISSA: Final = 53  # bits that a double holds
_K_STEP: Final = 1 << 13  # so many products of limbs sum up exactly in a double


class Sums:
    """Sums of `pixels` x `kernels`. `add` once per kernel tap (or part of the channels), then read one result.

    `depthwise`: instead of kernels there are channels, each with its own sum. `windows`: keep the sums of features.
    """

    def __init__(
        self, precision: int, pixels: int, kernels: int, *, depthwise: bool = False, windows: bool = False
    ) -> None:
        self._float = precision == Precision.FP16
        self._product = _each if depthwise else _product
        self._depthwise = depthwise
        self._windows = np.zeros((pixels, kernels if depthwise else 1), np.int64) if windows else None
        limbs = 3 if self._float else 1
        self._limbs = [np.zeros((pixels, kernels), np.int64) for _ in range(limbs)]
        self._special: Array | None = None  # what infinities and NaN make of the sums, where there are any
        self._is_special = np.zeros((pixels, kernels), bool)

    @classmethod
    def of(cls, integers: Array) -> Sums:
        """Integer sums [pixels, kernels] that somebody else made."""
        sums = cls(Precision.INT8, 0, 0)
        sums._limbs = [integers.astype(np.int64)]
        return sums

    def add(self, features: Array, kernels: Array) -> None:
        """Adds features [pixels, C] x kernels [kernels, C] (depthwise: [1, C]), both int8, int16 or float16."""
        if self._windows is not None:
            self._windows += features if self._depthwise else features.sum(axis=1, keepdims=True, dtype=np.int64)
        step = features.shape[1] if self._depthwise else _K_STEP
        for k in range(0, features.shape[1], step):
            part = slice(k, k + step)
            if self._float:
                self._add_float(features[:, part], kernels[:, part])
            else:
                self._limbs[0] += self._product(features[:, part], kernels[:, part])

    def weigh(self, operand: int | Array) -> None:
        """Adds operand (one, or int[kernels]) x the sum of each window's features, which were kept."""
        if self._windows is None:
            raise ValueError("the sums of the windows were not kept")
        self._limbs[0] += self._windows * operand

    def _add_float(self, features: Array, kernels: Array) -> None:
        if not (np.isfinite(features).all() and np.isfinite(kernels).all()):
            if self._depthwise:
                special = ~(np.isfinite(features) & np.isfinite(kernels))
            else:
                rows = ~np.all(np.isfinite(features), axis=1, keepdims=True)
                special = rows | ~np.all(np.isfinite(kernels), axis=1, keepdims=True).T
            if self._special is None:
                self._special = np.zeros(self._is_special.shape)
            a, b = features.astype(np.float64), kernels.astype(np.float64)
            with np.errstate(invalid="ignore"):
                self._special += a * b if self._depthwise else a @ b.T
            self._is_special |= special
            features = np.where(np.isfinite(features), features, np.float16(0))
            kernels = np.where(np.isfinite(kernels), kernels, np.float16(0))
        a, b = np.ldexp(features.astype(np.float64), _SCALE), np.ldexp(kernels.astype(np.float64), _SCALE)
        if _exact(a, b):
            whole = a * b if self._depthwise else a @ b.T
            high = np.floor(np.ldexp(whole, -2 * _LIMB))
            self._limbs[2] += high.astype(np.int64)
            self._limbs[0] += (whole - np.ldexp(high, 2 * _LIMB)).astype(np.int64)
            return
        (a1, a0), (b1, b0) = _split(a), _split(b)
        self._limbs[2] += self._product(a1, b1)
        self._limbs[1] += self._product(a1, b0) + self._product(a0, b1)
        self._limbs[0] += self._product(a0, b0)

    def integers(self) -> npt.NDArray[np.int64]:
        """Exact integer sums [pixels, kernels]."""
        return self._limbs[0]

    def floats(self) -> npt.NDArray[np.float32]:
        """The sums of fp16 [pixels, kernels], rounded once."""
        result = _round(*self._limbs)
        if self._special is not None:
            # A double cannot overflow here, so what is not finite was made by operands that are not.
            special = np.where(np.isnan(self._special), np.float32(np.nan), self._special.astype(np.float32))
            result = np.where(self._is_special, special, result).astype(np.float32)
        return result


def _product(features: Array, kernels: Array) -> npt.NDArray[np.int64]:
    """Integers below 2**20 in double precision, at most 2**13 of them a sum: exact in any order."""
    product: npt.NDArray[np.float64] = features.astype(np.float64) @ kernels.astype(np.float64).T
    return product.astype(np.int64)


def _each(features: Array, kernel: Array) -> npt.NDArray[np.int64]:
    """The products of every channel with its own kernel: of integers below 2**20, exact."""
    product: npt.NDArray[np.int64] = (features.astype(np.float64) * kernel.astype(np.float64)).astype(np.int64)
    return product


def _exact(a: Array, b: Array) -> bool:
    """Whether every sum of products of these integers, in any order, is exact in a double: multiples of one power of
    two, too few and too small for a bit to be lost. So it is with small integers."""
    bits = 0
    for x in (a, b):
        if not x.size:
            return True
        used = int(np.bitwise_or.reduce(np.abs(x).astype(np.int64), axis=None))  # no number has other bits
        bits += used.bit_length() - ((used & -used).bit_length() - 1 if used else 0)
    terms: int = a.shape[1]
    return bits + terms.bit_length() <= _MANTISSA


def _split(whole: Array) -> tuple[Array, Array]:
    """Integers below 2**40 as (high, low) of high * 2**20 + low, 0 <= low < 2**20, in doubles."""
    high = np.floor(np.ldexp(whole, -_LIMB))
    return high, whole - np.ldexp(high, _LIMB)


def _round(low: Array, middle: Array, high: Array) -> npt.NDArray[np.float32]:
    """fp32 of (high * 2**40 + middle * 2**20 + low) * 2**-48, rounded once to even."""
    one = np.int64(1)
    middle = middle + (low >> _LIMB)
    high = high + (middle >> _LIMB)
    rest = (middle & ((one << _LIMB) - 1)) << _LIMB | (low & ((one << _LIMB) - 1))  # 0 <= rest < 2**40
    # Small sums fit int64. Large ones have 22 bits and more above `rest`: of that 6 bits are kept, and one bit that
    # says whether anything is left. Either way one conversion from int64 rounds.
    small = np.abs(high) < one << 22
    fits = np.where(small, high, 0) << 40 | rest
    sticky = (rest & ((one << 34) - 1) != 0).astype(np.int64)
    large = ((high << 6 | rest >> 34) << 1) | sticky
    result: npt.NDArray[np.float32] = np.where(
        small,
        np.ldexp(fits.astype(np.float32), -2 * _SCALE),
        np.ldexp(large.astype(np.float32), 33 - 2 * _SCALE),
    )
    return result
