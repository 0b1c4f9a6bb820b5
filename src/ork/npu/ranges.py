"""Which parts of a fixed run of units are free: first fit, neighbours joined again when given back."""

from __future__ import annotations

from bisect import insort


class Ranges:
    """Hands out runs of `total` units. Starts are multiples of what is asked for alone: there is no alignment."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [(0, total)]  # (start, length), sorted, never touching

    def take(self, length: int) -> int | None:
        """The start of a free run of `length` units, or None if there is none."""
        for i, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[i : i + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Return a run that `take` handed out."""
        insort(self._free, (start, length))
        joined: list[tuple[int, int]] = []
        for at, room in self._free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((at, room))
        self._free = joined

    @property
    def used(self) -> int:
        return self.total - sum(room for _, room in self._free)
