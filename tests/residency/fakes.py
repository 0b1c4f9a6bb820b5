"""A source and a device that only move bytes, and say when something is done to a slot that an op still reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ork.devices.base import Capacity, SliceSpec
from ork.devices.cpu import CpuSlot
from ork.residency.cache import Key
from ork.residency.stream import ExpertLayer, TensorSpec

K = 64
SLICE = 64  # columns
BLOB = K * SLICE + 4 * SLICE  # codes and scales: two pages
ROOM = 8192  # what such a slice takes
EXPERT = 4  # slices


def tensor(name: str, slices: int) -> TensorSpec:
    """A tensor of equal slices."""
    specs = tuple(SliceSpec(name, "i8", K, K, K, i * SLICE, (i + 1) * SLICE) for i in range(slices))
    return TensorSpec(name, "i8", slices * SLICE, K, 0, 0, specs)


def expert_layer(layer: int, experts: int = 6) -> ExpertLayer:
    """Experts of EXPERT slices: gate 1, up 1, down 2."""
    at = f"blk.{layer}.ffn_"
    parts = [
        tuple(tensor(f"{at}{part}_exps.weight#{e}", n) for e in range(experts))
        for part, n in (("gate", 1), ("up", 1), ("down", 2))
    ]
    return ExpertLayer(layer, *parts)


def tag(key: Key) -> int:
    """What the first eight bytes of a slice say."""
    return hash(key) & (1 << 62) - 1


class FakeSource:
    """Slices that begin with their tag. `fail` raises before a slice is read; `delay` seconds a read; `cached`: all are
    in memory."""

    metadata: Mapping[str, object] = {}

    def __init__(
        self,
        tensors: list[TensorSpec],
        fail: Callable[[Key], None] | None = None,
        delay: float = 0.0,
        cached: bool = False,
    ):
        self.tensors = {t.name: t for t in tensors}
        self.fail, self.delay, self.in_memory = fail, delay, cached
        self.copied = 0
        self.reads: list[Key] = []
        self.allowed = threading.Event()
        self.allowed.set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def spec(self, name: str) -> TensorSpec:
        return self.tensors[name]

    def blob(self, name: str, index: int) -> npt.NDArray[np.uint8]:
        memory = np.zeros(BLOB, np.uint8)
        self.read_into(name, index, memory)
        return memory

    def read_into(self, name: str, index: int, memory: npt.NDArray[np.uint8]) -> int:
        key = (name, index)
        self.reads.append(key)
        memory[:8].view(np.uint64)[0] = 0  # torn while it is read
        held = memory[:8]  # as a reader that fails half-way holds it
        if self.fail:
            self.fail(key)
        self.allowed.wait()
        if self.delay:
            time.sleep(self.delay)
        held.view(np.uint64)[0] = tag(key)
        return BLOB

    def read_run(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        return [self.read_into(*item) for item in items]

    def cached(self, name: str, index: int) -> bool:
        return self.in_memory

    def copy(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        self.copied += len(items)
        return self.read_run(items)

    def expect(self, name: str, index: int, start: int, nbytes: int) -> None:
        raise NotImplementedError

    def read_part(self, name: str, index: int, start: int, memory: npt.NDArray[np.uint8]) -> None:
        raise NotImplementedError

    def raw(self, name: str) -> npt.NDArray[np.generic]:
        raise NotImplementedError


class FakeDevice:
    """Handles are (key, slot); `live` are the bytes of its slots."""

    name = "fake"
    threads = 1
    isa = "none"

    def __init__(self, cores: int = 1):
        self.cores = cores
        self.live = 0
        self.peak = 0
        self.made = 0

    def copies(self, spec: SliceSpec) -> bool:
        return False

    def mapped_bytes(self, spec: SliceSpec) -> int:
        return BLOB

    def room(self, spec: SliceSpec, slot: Any) -> npt.NDArray[np.uint8]:
        memory: npt.NDArray[np.uint8] = slot.memory
        return memory

    def make_slots(self, sizes: Sequence[int], domain: int = 0) -> list[CpuSlot]:
        return [self.make_slot(nbytes, domain) for nbytes in sizes]

    def make_slot(self, nbytes: int, domain: int = 0) -> CpuSlot:
        self.made += 1
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return CpuSlot(np.zeros(nbytes, np.uint8))

    def free_slot(self, slot: Any) -> None:
        self.live -= slot.memory.nbytes

    def fill(self, spec: SliceSpec, slot: Any, nbytes: int) -> Any:
        return (spec.tensor, spec.n0 // SLICE), slot

    def place(self, spec: SliceSpec, blob: npt.NDArray[np.uint8], domain: int = 0) -> Any:
        self.live += blob.nbytes
        return (spec.tensor, spec.n0 // SLICE), blob

    def free(self, handle: Any) -> None:
        self.live -= handle[1].nbytes

    def capacity(self) -> Capacity:
        return Capacity(domains=1, bytes_per_domain=0)


def right(handle: Any) -> bool:
    """Whether the slot holds the slice of the handle, whole."""
    key, slot = handle
    return int(slot.memory[:8].view(np.uint64)[0]) == tag(key)
