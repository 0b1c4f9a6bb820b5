"""The output stage: from sums to bytes, and where the writer puts them.

The stages between (BS, BN, EW, LUT) are bypassed in every task that gets here; `task.not_modelled` names the others.
Per kernel group the core emits the pixels in order, each of SIZE_E + 1 atoms. The writer counts them by its own width
and height; when those run out before the pixels do, it goes on as if a new group had begun (executed):

    address = base + (t div (w' * h')) * SURFACE_ADD + e * SURF_STRIDE + 16 * (line * (w' + notch) + column)

with t the number of the pixel over all groups, line and column from t modulo w' * h', e the atom of the pixel.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator.fetch import ATOM, WINDOW, Addresses, Bytes
from ork.emulator.mac import Sums
from ork.emulator.rounding import shift_round
from ork.emulator.task import Task
from ork.npu.isa import Precision

Array = npt.NDArray[Any]

POISON: Final = 0xA5  # every byte of a result that the chip would get wrong
_INTEGERS: Final = {Precision.INT8: np.int8, Precision.INT16: np.int16, Precision.INT32: np.int32}


def convert(sums: Sums, task: Task) -> tuple[Array, str]:
    """Results [pixels, kernels] in the output precision, and the rule that a value broke, or ""."""
    if task.precision == Precision.FP16:
        wide = sums.floats()
        if task.out_precision == Precision.FP32:
            return wide, ""
        with np.errstate(over="ignore"):
            return wide.astype(np.float16), ""
    return narrow(sums.integers(), task)


def narrow(exact: npt.NDArray[np.int64], task: Task) -> tuple[Array, str]:
    """Integer sums, scaled by OUT_CVT unless the output has 32 bits, and the rule that a value broke, or ""."""
    if task.out_precision == Precision.INT32:
        return saturate(exact, np.int32, "int32-overflow")
    scaled = shift_round(exact * task.scale, task.shift, half_up=task.half_up) + task.offset
    # int8 saturates (executed); that int16 does is a guess
    dtype = _INTEGERS[Precision(task.out_precision)]
    return saturate(scaled, dtype, "int16-overflow" if dtype is np.int16 else "")


def saturate(x: npt.NDArray[np.int64], dtype: type[Any], rule: str) -> tuple[Array, str]:
    """`x` clipped into an integer type, and the rule if anything was clipped."""
    limits = np.iinfo(dtype)
    broken = bool(rule) and bool(x.size) and bool(x.min() < limits.min or x.max() > limits.max)
    return x.clip(limits.min, limits.max).astype(dtype), rule if broken else ""


def atoms_of(results: Array, task: Task, groups: int) -> Bytes:
    """Results [pixels, kernels] as the atoms of whole kernel groups: uint8 [groups, pixels, atoms, 16].

    Channels beyond the kernels are written too; what they hold on the chip is not known, here it is 0.
    """
    padded = np.zeros((results.shape[0], groups * task.group), results.dtype)
    padded[:, : results.shape[1]] = results
    raw: Bytes = padded.view(np.uint8)
    atoms: Bytes = raw.reshape(results.shape[0], groups, task.atoms, ATOM).transpose(1, 0, 2, 3)
    return atoms


def output_addresses(task: Task, base: int, first: int, last: int) -> Addresses:
    """Device addresses of kernel groups [first, last): int64 [groups, pixels, atoms]."""
    width, height = task.wdma
    t = np.arange(first * task.pixels, last * task.pixels, dtype=np.int64)
    group, within = np.divmod(t, width * height)
    line, column = np.divmod(within, width)
    pixel = base + group * task.group_stride + line * (ATOM * width + task.notch) + column * ATOM
    atom = np.arange(task.atoms, dtype=np.int64) * task.atom_stride
    addresses: Addresses = (pixel[:, None] + atom) & WINDOW
    return addresses.reshape(last - first, task.pixels, task.atoms)
