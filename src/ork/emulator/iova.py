"""One domain's device addresses: which pages of the 32-bit window are taken."""

from __future__ import annotations

import bisect

PAGE = 4096


class IovaSpace:
    """A top-down allocator of page ranges: the highest gap that fits, at its upper end. Units are pages.

    That is the kernel's order; page 0 is never given out.
    """

    def __init__(self, pages: int, first: int = 1) -> None:
        self._starts = [first]  # of the gaps, ascending
        self._ends = [pages]
        self.used = 0
        self.peak = 0

    def allocate(self, pages: int, align: int = 1) -> int:
        """First page of a new range whose start is a multiple of `align` (a power of two); 0 if none fits."""
        starts, ends = self._starts, self._ends
        for gap in range(len(starts) - 1, -1, -1):
            start = (ends[gap] - pages) & -align
            if start < starts[gap]:
                continue
            end = start + pages
            low, high = (starts[gap], start), (end, ends[gap])
            left = [piece for piece in (low, high) if piece[0] < piece[1]]
            starts[gap : gap + 1] = [piece[0] for piece in left]
            ends[gap : gap + 1] = [piece[1] for piece in left]
            self.used += pages
            self.peak = max(self.peak, self.used)
            return start
        return 0

    def free(self, start: int, pages: int) -> None:
        """Give a range back; gaps that touch become one."""
        starts, ends = self._starts, self._ends
        end = start + pages
        at = bisect.bisect_left(starts, start)
        first, last = at, at
        if at > 0 and ends[at - 1] == start:
            first, start = at - 1, starts[at - 1]
        if at < len(starts) and starts[at] == end:
            last, end = at + 1, ends[at]
        starts[first:last] = [start]
        ends[first:last] = [end]
        self.used -= pages

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Free ranges [start, end), ascending."""
        return list(zip(self._starts, self._ends))
