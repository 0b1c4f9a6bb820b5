"""One convolution task, run by the book: fetch, sum tap by tap, convert, write. This is the definition.

out(n, y, x) = sum over c, ky, kx of in(c, y * sy + ky * dy - pad_top, x * sx + kx * dx - pad_left) * w(n, c, ky, kx)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import dpu, fetch, windows
from ork.emulator.mac import Sums
from ork.emulator.memory import Domain
from ork.emulator.pipeline import NOTHING, Side
from ork.emulator.reader import CPEND, Sources
from ork.emulator.rules import RULES, Effect
from ork.emulator.task import Task

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_CHUNK: Final = 1 << 21  # results, or kernel elements, handled at once


@dataclass(frozen=True, slots=True)
class Places:
    """Device addresses of a task, task base included, low four bits dropped."""

    features: int
    weights: int
    output: int
    sources: Sources | None = None  # of DPU_RDMA, where it runs too

    @classmethod
    def at(cls, features: int, weights: int, output: int, base: int, *, image: bool = False) -> Places:
        """From register values: multiples of 16 (an image may begin at any byte), moved by the task base, 32 bits."""
        mask = fetch.WINDOW & ~15
        return cls(base + features & (fetch.WINDOW if image else mask), base + weights & mask, base + output & mask)


def output(
    task: Task,
    features: Array,
    weights: Bytes,
    groups: tuple[int, int],
    height: int,
    side: Side = NOTHING,
) -> tuple[Array, str]:
    """Results [height * width, kernels] of the first `height` lines and kernel groups [first, last), and the rule
    that a value broke, or "". `side` holds what the output stages need for all kernels."""
    first, last = (min(g * task.group, task.results) for g in groups)
    side = side.part(task.core_out[0] * height, first, last)
    sums = Sums(
        task.precision,
        task.core_out[0] * height,
        last - first,
        depthwise=task.depthwise,
        windows=task.window_sums,
    )
    if last > first:
        taps = fetch.kernels(weights, task, first, last)
        read = features[..., first:last] if task.depthwise else features
        for ky, kx, pixels in _taps(task, read, height):
            sums.add(pixels, np.ascontiguousarray(taps[:, ky, kx]))
    if task.window_sums:
        sums.weigh(side.bs[CPEND] if task.ow_memory else task.ow_operand)
    return dpu.convert(sums, task, side)


def _taps(task: Task, features: Array, height: int) -> Iterator[tuple[int, int, Array]]:
    """(ky, kx, [pixels, channels] under that kernel tap), the padding around the image included."""
    width = task.core_out[0]
    padded = windows.pad(task, features)
    for ky in range(task.kernel_height):
        for kx in range(task.kernel_width):
            window = padded[ky * task.dilation_y :: task.stride_y, kx * task.dilation_x :: task.stride_x]
            yield ky, kx, window[:height, :width].reshape(-1, features.shape[2])


def good_lines(task: Task, lines: int) -> int:
    """Output lines whose windows lie in the first `lines` feature lines; the others need features that did not fit."""
    if lines >= task.height:
        return task.core_out[1]
    below = lines + task.pad_top - (task.kernel_height - 1) * task.dilation_y  # the next window row that does not fit
    return min(max(-(-below // task.stride_y), 0), task.core_out[1])


def chunks(task: Task) -> Iterator[tuple[int, int]]:
    """Runs of kernel groups that are handled at once."""
    group = task.group
    step = max(_CHUNK // (group * max(task.pixels, task.kernel_elements)), 1)
    return ((g, min(g + step, task.groups)) for g in range(0, task.groups, step))


def run(domain: Domain, task: Task, base: int, operands: tuple[Array, Bytes] | None, side: Side = NOTHING) -> str:
    """Compute and write a task's output; the rule a value broke, or "".

    `operands` are the features [lines, width, channels] of the lines that fit and all kernels as stored; without them
    everything is poisoned. Raises IommuFault before anything is written.
    """
    for first, last in chunks(task):
        fetch.mapped(domain, dpu.output_addresses(task, base, first, last))
    height = good_lines(task, len(operands[0])) if operands else 0
    good = height * task.core_out[0]
    broken = ""
    for first, last in chunks(task):
        atoms = np.full((last - first, task.pixels, task.atoms, fetch.ATOM), dpu.POISON, np.uint8)
        if operands and good:
            results, rule = output(task, *operands, (first, last), height, side)
            if not rule or RULES[rule].effect is not Effect.POISON:
                atoms[:, :good] = dpu.atoms_of(results, task, last - first)
            broken = broken or rule
        fetch.scatter(domain, dpu.output_addresses(task, base, first, last), atoms)
    return broken
