"""What is in the window: a pinned prefix of the model's order, and slots that the rest passes through.

A dense pass uses its slices in one order, over and over; on such a cycle LRU hits nothing, so the longest prefix that
fits is kept for good and the rest is streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ork.devices.base import SliceSpec
from ork.errors import UsageError
from ork.pack.format import align
from ork.residency.stream import TensorSpec

Key = tuple[str, int]  # tensor, index of the slice


@dataclass(frozen=True)
class WindowPlan:
    """Which slices stay and how many bytes each slot has. All sizes are whole pages."""

    window: int
    pinned: tuple[Key, ...]
    streamed: tuple[Key, ...]  # in the order of a pass
    pinned_bytes: int
    slots: int
    slot_bytes: int

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
    tensors: Sequence[TensorSpec], window: int, cores: int, mapped: Callable[[SliceSpec], int]
) -> WindowPlan:
    """Divides `window` bytes between the longest prefix of the order that fits and `cores` + 1 slots for the rest.

    `mapped` gives the bytes that a slice takes on the device. Raises UsageError with the smallest window if this one is
    too small.
    """
    order = [((t.name, i), align(mapped(s))) for t in tensors for i, s in enumerate(t.slices)]
    total = sum(size for _, size in order)
    if total <= window:
        return WindowPlan(window, tuple(k for k, _ in order), (), total, 0, 0)
    slots = cores + 1
    least = slots * max(size for _, size in order)
    if window < least:
        raise UsageError(
            f"a window of {window:,} bytes is too small: {slots} slices ({cores} being computed, one being filled) "
            f"take {least:,} bytes: give --window {-(-least // (1 << 20))}M or more"
        )
    # what each prefix leaves: the slots must hold the largest slice behind it
    rest = list(accumulate((size for _, size in reversed(order)), max))[::-1]
    used = list(accumulate((size for _, size in order), initial=0))
    kept = max(k for k in range(len(order)) if used[k] + slots * rest[k] <= window)
    keys = [k for k, _ in order]
    return WindowPlan(window, tuple(keys[:kept]), tuple(keys[kept:]), used[kept], slots, rest[kept])
