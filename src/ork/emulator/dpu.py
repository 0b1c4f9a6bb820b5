"""The output stage: from sums to bytes, and where the writer puts them.

The stages between are `pipeline`'s. Per kernel group the core emits the pixels in order, each of SIZE_E + 1 atoms. The
writer counts them by its own width and height; when those run out before the pixels do, it goes on as if a new group
had begun (executed):

    address = base + (t div (w' * h')) * SURFACE_ADD + e * SURF_STRIDE + 16 * (line * (w' + notch) + column)

with t the number of the pixel over all groups, line and column from t modulo w' * h', e the atom of the pixel.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ork.emulator import pipeline
from ork.emulator.fetch import ATOM, WINDOW, Addresses, Bytes
from ork.emulator.mac import Sums
from ork.emulator.pipeline import NOTHING, Side
from ork.emulator.task import Task

Array = npt.NDArray[Any]

POISON: Final = 0xA5  # every byte of a result that the chip would get wrong


class Written(Protocol):
    """How a task's output is counted and placed."""

    @property
    def pixels(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def wdma(self) -> tuple[int, int]: ...
    @property
    def atoms(self) -> int: ...
    @property
    def atom_stride(self) -> int: ...
    @property
    def group_stride(self) -> int: ...
    @property
    def notch(self) -> int: ...


def convert(sums: Sums, task: Task, side: Side = NOTHING) -> tuple[Array, str]:
    """Results [pixels, kernels] in the output precision, and the rule that a value broke, or ""."""
    wide = sums.floats() if task.stages.floating else sums.integers()
    results, broken = pipeline.run(wide, task.stages, side)
    return results, next(iter(broken), "")


def atoms_of(results: Array, task: Written, groups: int) -> Bytes:
    """Results [pixels, kernels] as the atoms of whole kernel groups: uint8 [groups, pixels, atoms, 16].

    Channels beyond the kernels are written too; what they hold on the chip is not known, here it is 0.
    """
    padded = np.zeros((results.shape[0], groups * task.group), results.dtype)
    padded[:, : results.shape[1]] = results
    raw: Bytes = padded.view(np.uint8)
    atoms: Bytes = raw.reshape(results.shape[0], groups, task.atoms, ATOM).transpose(1, 0, 2, 3)
    return atoms


def output_addresses(task: Written, base: int, first: int, last: int) -> Addresses:
    """Device addresses of kernel groups [first, last): int64 [groups, pixels, atoms]."""
    width, height = task.wdma
    t = np.arange(first * task.pixels, last * task.pixels, dtype=np.int64)
    group, within = np.divmod(t, width * height)
    line, column = np.divmod(within, width)
    pixel = base + group * task.group_stride + line * (ATOM * width + task.notch) + column * ATOM
    atom = np.arange(task.atoms, dtype=np.int64) * task.atom_stride
    addresses: Addresses = (pixel[:, None] + atom) & WINDOW
    return addresses.reshape(last - first, task.pixels, task.atoms)
