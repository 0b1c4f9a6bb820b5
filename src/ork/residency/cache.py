"""What is in the window: slices that stay, and slots that the rest passes through.

A dense pass uses its slices in one order, over and over; on such a cycle LRU hits nothing, so what fits is kept for
good and the rest is streamed. Of two ways to choose as many bytes the even one is better: with every third slice in
place the disk has work all through a pass, while behind a prefix that stays it must bring the rest in the time that is
left. The first tensor of the order, a model's head, stays before all others: a prefill computes it for one row, in no
time that could hide its transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ork.devices.base import SliceSpec
from ork.errors import UsageError
from ork.pack.format import align
from ork.residency.stream import TensorSpec

Key = tuple[str, int]  # tensor, index of the slice
SLOTS = 12  # in a window that has room for them: batches of half of them, while the disk fills the others
SLOTS_SHARE = 8  # of the window: no more than this part of it goes to slots beyond one a core and one


@dataclass(frozen=True)
class WindowPlan:
    """Which slices stay and how many bytes each slot has. All sizes are whole pages."""

    window: int
    pinned: tuple[Key, ...]
    streamed: tuple[Key, ...]  # in the order of a pass
    pinned_bytes: int
    slots: int
    slot_bytes: int
    batch: int = 0  # streamed slices that an op holds at a time

    @property
    def mapped_bytes(self) -> int:
        """What the plan keeps mapped at most."""
        return self.pinned_bytes + self.slots * self.slot_bytes

    @property
    def reason(self) -> str:
        """One line for the report."""
        if not self.streamed:
            return f"all {len(self.pinned)} slices fit"
        return (
            f"{len(self.pinned)} slices ({self.pinned_bytes >> 20} MiB) stay, {len(self.streamed)} pass through "
            f"{self.slots} slots of {self.slot_bytes / 2**20:.1f} MiB each pass"
        )


def plan_window(
    tensors: Sequence[TensorSpec],
    window: int,
    cores: int,
    mapped: Callable[[SliceSpec], int],
    *,
    even: bool = True,
) -> WindowPlan:
    """Divides `window` bytes between slices that stay and slots, at least `cores` + 1, that the others pass through.

    `mapped` gives the bytes that a slice takes on the device. What stays of all but the first tensor is spread evenly
    over the order, or is its beginning where not `even`. Raises UsageError with the smallest window if this one is too
    small.
    """
    order = [((t.name, i), align(mapped(s))) for t in tensors for i, s in enumerate(t.slices)]
    total = sum(size for _, size in order)
    if total <= window:
        return WindowPlan(window, tuple(k for k, _ in order), (), total, 0, 0)
    largest = max(size for _, size in order)
    least = (cores + 1) * largest
    if window < least:
        raise UsageError(
            f"a window of {window:,} bytes is too small: {cores + 1} slices ({cores} being computed, one being filled) "
            f"take {least:,} bytes: give --window {-(-least // (1 << 20))}M or more"
        )
    slots = max(cores + 1, min(SLOTS, window // SLOTS_SHARE // largest))
    room = window - slots * largest
    head = sum(size for (name, _), size in order if name == tensors[0].name)
    rest = total - head
    pinned: list[Key] = []
    streamed: list[Key] = []
    used = seen = 0
    for key, size in order:
        seen += size
        due = room  # of what has been seen, so many bytes may stay
        if even and key[0] != tensors[0].name:
            due = min(head, room) + max(0, room - head) * (seen - head) // rest
        if used + size <= due:
            pinned.append(key)
            used += size
        else:
            streamed.append(key)
    return WindowPlan(window, tuple(pinned), tuple(streamed), used, slots, largest, max(cores, slots // 2))
