"""The bytes of a buffer as the CPU and as the device see them.

A CPU write to cacheable memory is not in memory before it is cleaned (MEM_SYNC to the device), and a device write is
not seen by a CPU that holds the old line. Three models of that:

- `CoherentPages`: non-cacheable memory, one view.
- `TwoViews`: two memories that only a sync brings together, so that forgetting one gives stale bytes, as on the chip.
- `SampledView`: one memory, for speed; some lines are remembered at each sync and compared when the device reads.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LINE = 64  # bytes of a cache line
HUGE_PAGE = 2 << 20
_LINE_TYPE = np.dtype(f"V{LINE}")  # a line as one opaque element: numpy moves those fastest
Bytes = NDArray[np.uint8]
# Makes so many zero bytes with the buffer protocol; MemoryError when it can't.
Allocate = Callable[[int], Any]

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def anonymous(size: int) -> mmap.mmap:
    """Zero bytes that cost nothing until they are touched. MemoryError when the system refuses."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size} bytes of buffer: {error}") from error
    if size >= HUGE_PAGE:
        # Weights are streamed through these buffers: in small pages filling and reading them is several times slower.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Pages:
    """`size` bytes (a multiple of 4096); `cpu` is what a mapping shows, `dev` what the device reads and writes.

    `allocate` makes the memory of the CPU's view.
    """

    def __init__(self, size: int, allocate: Allocate = anonymous, device_size: int = 0) -> None:
        self.size = size
        self.memory = allocate(size)
        self.cpu: Bytes = np.frombuffer(self.memory, np.uint8)
        self.dev: Bytes = np.frombuffer(anonymous(device_size), np.uint8) if device_size else self.cpu
        self.dev_address: int = self.dev.__array_interface__["data"][0]

    def to_device(self, offset: int, size: int) -> None:
        """Clean the CPU's lines of a range."""

    def from_device(self, offset: int, size: int) -> None:
        """Drop the CPU's lines of a range."""

    def stale(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        """Whether a device read of these rows would miss what the CPU wrote."""
        return False

    def overwrites(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        """The device is about to write these rows: whether dirty CPU lines may later fall on top of them."""
        return False


class CoherentPages(Pages):
    """Memory that no cache holds back: one view, nothing to sync."""


class TwoViews(Pages):
    """Two memories. A line is dirty where the CPU's view differs from `clean`, what memory held when last in step."""

    def __init__(self, size: int, allocate: Allocate = anonymous) -> None:
        super().__init__(size, allocate, size)
        self.clean: Bytes = np.frombuffer(anonymous(size), np.uint8)

    def to_device(self, offset: int, size: int) -> None:
        self._clean(offset // LINE * LINE, min(self.size, -(-(offset + size) // LINE) * LINE))

    def from_device(self, offset: int, size: int) -> None:
        low, high = offset // LINE * LINE, min(self.size, -(-(offset + size) // LINE) * LINE)
        # Lines of which only a part was named are cleaned first, as the caches of the chip's CPU do.
        if low < offset:
            self._clean(low, low + LINE)
        if high > offset + size:
            self._clean(high - LINE, high)
        self.cpu[low:high] = self.dev[low:high]
        self.clean[low:high] = self.dev[low:high]

    def stale(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        if rows == 1 or pitch == row_bytes:
            end = offset + row_bytes * rows
            return not np.array_equal(self.cpu[offset:end], self.clean[offset:end])
        shape, strides = (rows, row_bytes), (pitch, 1)
        cpu = np.ndarray(shape, np.uint8, self.cpu, offset, strides)
        return not np.array_equal(cpu, np.ndarray(shape, np.uint8, self.clean, offset, strides))

    def overwrites(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        return self.stale(offset, row_bytes, rows, pitch)

    def _clean(self, low: int, high: int) -> None:
        """Write back whole lines, but only dirty ones: a clean line over fresh device data does no harm."""
        step = 1 << 20  # bounds the temporary arrays
        for at in range(low, high, step):
            piece = slice(at, min(high, at + step))
            cpu, clean, dev = self.cpu[piece], self.clean[piece], self.dev[piece]
            differs = cpu.view(np.uint64) != clean.view(np.uint64)
            dirty = np.flatnonzero(differs.view(np.uint64))  # a line's eight flags, read as one word
            if len(dirty) == len(cpu) // LINE:
                dev[:] = clean[:] = cpu
            elif len(dirty):
                lines = cpu.view(_LINE_TYPE)[dirty]
                dev.view(_LINE_TYPE)[dirty] = clean.view(_LINE_TYPE)[dirty] = lines


class SampledView(Pages):
    """One memory, watched at one line in every `step` bytes.

    `kept` holds those lines as they were at the last sync and `known` whether they still mean anything: after a device
    write they don't, until the line is next read or synced. A rewrite of a whole buffer without a sync changes watched
    lines; a rewrite of a few bytes may be missed.
    """

    CHECKED = 8  # lines compared in one read

    def __init__(self, size: int, allocate: Allocate = anonymous) -> None:
        super().__init__(size, allocate)
        self.step = min(32768, max(LINE, size // 64 // LINE * LINE))
        count = size // self.step
        numbers = np.arange(count, dtype=np.int64)
        # One line of each step, scattered so that no column of a tile is always or never watched.
        within = (numbers * 2654435761 >> 7) % (self.step // LINE)
        self._index = numbers * (self.step // LINE) + within
        self._offsets: list[int] = (self._index * LINE).tolist()
        self._lines = self.cpu.view(_LINE_TYPE)
        self._kept = np.zeros(count, _LINE_TYPE)  # fresh pages are zero
        self._known = bytearray(b"\1" * count)

    def to_device(self, offset: int, size: int) -> None:
        first, last = self._span(offset // LINE * LINE, -(-(offset + size) // LINE) * LINE)
        if first < last:
            self._keep(first, last)

    def from_device(self, offset: int, size: int) -> None:
        first, last = self._span(offset, offset + size)
        if self._known.find(0, first, last) >= 0:
            self._keep(first, last)

    def stale(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        first, last = self._span(offset, offset + row_bytes + (rows - 1) * pitch)
        if first >= last:
            return False
        chosen = slice(first, last, -(-(last - first) // self.CHECKED))
        now = self._lines[self._index[chosen]]
        kept = self._kept[chosen]
        if now.tobytes() == kept.tobytes():
            return False
        found = False
        for sample, line in zip(range(first, last)[chosen], now):
            if not self._known[sample]:
                self._kept[sample] = line
                self._known[sample] = 1
            elif line.tobytes() != self._kept[sample].tobytes():
                within = self._offsets[sample] - offset
                found |= rows == 1 or within % pitch + LINE <= row_bytes  # between the rows nothing is read
        return found

    def overwrites(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        low, high = offset // LINE * LINE, -(-(offset + row_bytes + (rows - 1) * pitch) // LINE) * LINE
        first, last = self._span(low, high)
        if first < last:
            self._known[first:last] = bytes(last - first)
        return False

    def _span(self, low: int, high: int) -> tuple[int, int]:
        """Samples whose whole line lies in [low, high)."""
        offsets = self._offsets
        first, last = low // self.step, min(len(offsets), -(-high // self.step))
        if first < last and offsets[first] < low:
            first += 1
        if first < last and offsets[last - 1] + LINE > high:
            last -= 1
        return first, last

    def _keep(self, first: int, last: int) -> None:
        self._kept[first:last] = self._lines[self._index[first:last]]
        self._known[first:last] = b"\1" * (last - first)


class WrongPages(Pages):
    """Pages that the IOMMU translates wrongly: the device sees the first half, then zeros, and its writes are lost."""

    def __init__(self, inner: Pages) -> None:
        super().__init__(inner.size, device_size=inner.size)
        self.memory, self.cpu, self._inner = inner.memory, inner.cpu, inner

    def stale(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        half = self.size // 2
        self.dev[:half] = self._inner.dev[:half]
        self.dev[half:] = 0
        return self._inner.stale(offset, row_bytes, rows, pitch)


VIEWS: dict[str, type[Pages]] = {"full": TwoViews, "sampled": SampledView}
