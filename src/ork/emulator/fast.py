"""Matmuls and convolutions of known geometry on native kernels.

A `Plan` runs one shape: features that are rows, or atoms in rows of constant pitch, or the windows of such; kernels as
native kernels take them; outputs likewise. It declines (None) whatever it is not sure to do exactly as `convolve` does:
outputs across buffers or over operands, addresses that wrap or are not mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork import native
from ork.emulator import dpu, fetch, pipeline, windows
from ork.emulator.checks import Verdict
from ork.emulator.convolve import Places
from ork.emulator.fetch import ATOM, WINDOW
from ork.emulator.mac import Sums
from ork.emulator.memory import Domain, IommuFault
from ork.emulator.task import BLOCK, Task
from ork.npu.isa import Precision

Array = npt.NDArray[Any]
_ATOM: Final = np.dtype((np.void, ATOM))
_TILE: Final = 32  # channels of the native kernels' tiles
_LONGEST: Final = 1 << 16  # elements of a window whose int8 sums fit int32


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the atoms of an operand lie: `count` rows of `size` bytes, `pitch` apart, from address + `start`.

    `order[i]` is the place in these rows of the i-th atom of a dense [pixels, channels] array; None: they are that
    array, with a pitch.
    """

    start: int
    count: int
    size: int
    pitch: int
    order: npt.NDArray[np.intp] | None

    @property
    def span(self) -> int:
        return (self.count - 1) * self.pitch + self.size


def rows_of(offsets: npt.NDArray[np.int64], *, distinct: bool) -> Rows | None:
    """The rows that atoms at `offsets` [pixels, atoms] (bytes) form; None if they form none, or if `distinct` atoms
    share an address."""
    pixels, atoms = offsets.shape
    pitch = int(offsets[1, 0] - offsets[0, 0]) if pixels > 1 else atoms * ATOM
    dense = np.arange(pixels)[:, None] * pitch + np.arange(atoms) * ATOM + offsets[0, 0]
    if pitch >= atoms * ATOM and np.array_equal(offsets, dense):
        return Rows(int(offsets[0, 0]), pixels, atoms * ATOM, pitch, None)
    unique, order = np.unique(offsets, return_inverse=True)
    if distinct and len(unique) < offsets.size:
        return None
    starts, sizes = fetch.runs(unique)
    pitch = int(starts[1] - starts[0]) if len(starts) > 1 else int(sizes[0])
    if not (sizes == sizes[0]).all() or not (np.diff(starts) == pitch).all():
        return None
    return Rows(int(starts[0]), len(starts), int(sizes[0]), pitch, order.reshape(-1))


class Plan:
    """How a task's matmul is run natively."""

    __slots__ = ("_direct", "_windows", "features", "kernels_bytes", "output", "pixels", "task")

    def __init__(self, task: Task, features: Rows, output: Rows) -> None:
        self.task, self.features, self.output = task, features, output
        self.pixels, self.kernels_bytes = task.pixels, task.weights_size
        plain = task.out_precision == Precision.INT32 and not task.stages.active
        self._windows = not _one_tap(task)
        self._direct = not self._windows and task.precision == Precision.INT8 and plain

    def run(self, domain: Domain, places: Places) -> str | None:
        """Do the task; the rule a value broke, "" if none, None if nothing was done (take the literal way)."""
        a, w, c = self.features, self.kernels_bytes, self.output
        a0, c0 = places.features + a.start, places.output + c.start
        a1, w1, c1 = a0 + a.span, places.weights + w, c0 + c.span
        if a0 < 0 or c0 < 0 or max(a1, w1, c1) > WINDOW + 1:
            return None
        if (a0 < c1 and c0 < a1) or (places.weights < c1 and c0 < w1):
            return None
        try:
            if self._direct and a.order is None and c.order is None:
                return self._directly(domain, a0, places.weights, c0)
            buffer, offset = domain.locate(c0, c.span)
            if offset + c.span > buffer.size:
                return None
            results, rule = self._results(self._dense(domain, a0), domain.read(places.weights, w))
        except IommuFault:
            return None
        self._write(domain, c0, results)
        return rule

    def _directly(self, domain: Domain, features: int, weights: int, output: int) -> str | None:
        """Rows in, rows out, nothing copied."""
        a, c = self.features, self.output
        a_at = domain.read_address(features, a.size, a.count, a.pitch)
        w_at = domain.read_address(weights, self.kernels_bytes)
        c_at = domain.write_address(output, c.size, c.count, c.pitch)
        if not (a_at and w_at and c_at):
            return None
        native.accumulate_at(a_at, a.pitch, self.pixels, a.size, w_at, self.task.kernels, c_at, c.pitch // 4)
        return ""

    def _dense(self, domain: Domain, address: int) -> fetch.Bytes:
        """The features as uint8 [pixels of the image, bytes of a pixel]."""
        a = self.features
        raw = np.ascontiguousarray(domain.read_rows(address, a.count, a.size, a.pitch))
        if a.order is not None:
            raw = raw.reshape(-1).view(_ATOM).take(a.order).view(np.uint8)
        return raw.reshape(self.task.width * self.task.height, -1)

    def _results(self, rows: fetch.Bytes, raw: fetch.Bytes) -> tuple[Array, str]:
        """[pixels, kernels] in the output precision, and the rule that a value broke, or ""."""
        task = self.task
        if task.precision == Precision.FP16 or self._windows:
            features = fetch.elements(rows, task.precision).reshape(task.height, task.width, -1)[..., : task.channels]
            sums_of = _floats if task.precision == Precision.FP16 else _integers
            parts = [dpu.convert(sums, task) for sums in sums_of(task, features, raw)]
            return np.concatenate([x for x, _ in parts]), next((rule for _, rule in parts if rule), "")
        if task.precision == Precision.INT4:
            rows, raw = fetch.elements(rows, Precision.INT4).view(np.uint8), _inflate(raw, task)
        sums = np.empty((self.pixels, task.kernels), np.int32)
        native.accumulate_at(
            rows.ctypes.data, task.channels, self.pixels, task.channels, raw.ctypes.data, task.kernels,
            sums.ctypes.data, task.kernels,
        )  # fmt: skip
        if self._direct:
            return sums, ""
        results, broken = pipeline.run(sums.astype(np.int64), task.stages)
        return results, next(iter(broken), "")

    def _write(self, domain: Domain, address: int, results: Array) -> None:
        c = self.output
        domain.write_address(address, c.size, c.count, c.pitch)  # says what is about to be written
        buffer, offset = domain.locate(address, c.span)
        target = np.ndarray((c.count, c.size), np.uint8, buffer.dev, offset, (c.pitch, 1))
        written = self.task.groups * self.task.group
        if results.shape[1] < written:  # channels beyond the kernels are 0
            results = np.pad(results, ((0, 0), (0, written - results.shape[1])))
        atoms = np.ascontiguousarray(results).view(np.uint8)
        if c.order is not None:
            places = np.empty(c.order.shape, _ATOM)
            places[c.order] = atoms.reshape(-1).view(_ATOM)
            atoms = places.view(np.uint8)
        target[:] = atoms.reshape(c.count, c.size)


def _floats(task: Task, features: Array, raw: fetch.Bytes) -> Iterator[Sums]:
    """Sums of fp16, some output lines at a time."""
    kernels = windows.matrix(task, raw)
    for part in windows.rows(task, features):
        sums = Sums(task.precision, len(part), task.kernels)
        sums.add(part, kernels)
        yield sums


def _integers(task: Task, features: Array, raw: fetch.Bytes) -> Iterator[Sums]:
    """Sums of int8, some output lines at a time, by the native kernel."""
    tiles, K, N = windows.tiles(task, raw), windows.columns(task), -(-task.kernels // _TILE) * _TILE
    for part in windows.rows(task, features):
        out = np.empty((len(part), N), np.int32)
        native.accumulate_at(part.ctypes.data, K, len(part), K, tiles.ctypes.data, N, out.ctypes.data, N)
        yield Sums.of(out[:, : task.kernels])


def _inflate(raw: fetch.Bytes, task: Task) -> fetch.Bytes:
    """int4 kernels [N/64][K/32][64][16 bytes] as int8 kernels [N/32][K/32][32][32]."""
    nibbles = fetch.elements(raw, Precision.INT4).view(np.uint8)
    blocks, half = task.channels // BLOCK, task.kind.group // _TILE
    tiles = nibbles.reshape(-1, blocks, half, _TILE, BLOCK).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles).reshape(-1)


def _one_tap(task: Task) -> bool:
    """Whether a row of the matmul is a pixel as it lies in memory."""
    one = task.kernel_elements == task.channels and (task.stride_x, task.stride_y) == (1, 1)
    whole = task.channels % BLOCK == 0 and task.kernels % task.kind.group == 0 and task.kernels == task.dpu_channels
    return one and whole and not (task.pad_left or task.pad_top) and (task.width, task.height) == task.core_out


def plan(task: Task, verdict: Verdict) -> Plan | None:
    """A plan for matmuls and convolutions whose rows all fit; None for anything else."""
    if verdict.hang or verdict.refuse or verdict.poison or verdict.lines < task.height or task.data_reuse:
        return None
    if task.image or task.conversion or task.depthwise or (task.window_sums and task.ow_operand):
        return None
    if task.reader is not None or task.stages.lookup is not None:
        return None  # operands and tables of the output stages
    spatial = task.precision in (Precision.INT8, Precision.FP16) and task.kernel_elements <= _LONGEST
    if not (spatial or _one_tap(task)) or task.precision == Precision.INT16:
        return None
    # Addresses relative to a base in the middle of the window, so that none wraps here; `run` checks the real ones.
    middle = 1 << 31
    read_at = fetch.feature_addresses(task, middle, task.height) - middle
    written_at = dpu.output_addresses(task, middle, 0, task.groups) - middle
    features = rows_of(read_at.reshape(task.surfaces, -1).T, distinct=False)
    output = rows_of(written_at.transpose(1, 0, 2).reshape(task.pixels, -1), distinct=True)
    return Plan(task, features, output) if features and output else None
