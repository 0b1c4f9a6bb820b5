"""The host CPU: slices are used where they lie, in the mapped pack."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.devices.base import Capacity, SliceSpec, Slot, blob_bytes
from ork.errors import UsageError
from ork.pack.format import align

CODEC_IDS = {"f32": 0, "i8": 1, "i4": 2, "nf4": 3, "f16": 4}
INT4_LIMIT = 7  # of activations of four bits; -8 would be without a counterpart
SYS_CPU = Path("/sys/devices/system/cpu")


def default_threads(sys_cpu: Path = SYS_CPU) -> int:
    """Physical cores this process may run on; on big.LITTLE those of the highest capacity only.

    A slow core in a team of equal shares sets the pace of all: on an RK3588 the four A76 alone beat all eight.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[str, str], int] = {}
    for cpu in allowed:
        folder = sys_cpu / f"cpu{cpu}"
        place = tuple(_read(folder / "topology" / f) or str(cpu) for f in ("physical_package_id", "core_id"))
        cores[place[0], place[1]] = int(_read(folder / "cpu_capacity") or 0)
    top = max(cores.values(), default=0)
    return max(1, sum(1 for c in cores.values() if c == top))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class CpuSlot:
    """Anonymous memory; it goes with its last view. The last slice's handle serves the next one of the same shape."""

    __slots__ = ("handle", "memory", "shape")

    def __init__(self, memory: npt.NDArray[np.uint8]):
        self.memory = memory
        self.shape: tuple[object, ...] = ()
        self.handle: native.Slice | None = None


def page_room(nbytes: int) -> npt.NDArray[np.uint8]:
    """Whole pages, in huge ones where the system gives them: a product walks a slot from end to end."""
    # private: shared memory has small pages, and takes more of the system's time when the disk writes into it
    room = mmap.mmap(-1, align(max(1, nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


class CpuDevice:
    """Computes on the host's cores with the instruction set chosen at run time. `w4a4`: the rows that meet i4 weights
    have four bits as well, as the NPU's int4 programs want them."""

    name = "cpu"
    cores: int  # slices computed at a time; all threads share each

    def __init__(self, threads: int | None = None, *, w4a4: bool = False):
        self.w4a4 = w4a4
        count = default_threads() if threads is None else threads
        if not 1 <= count <= 256:
            raise UsageError(f"--threads {count}: give a number from 1 to 256")
        asked = os.environ.get("ORK_ISA", "best")
        if asked not in ("best", *native.isa_names()):
            raise UsageError(f"ORK_ISA={asked}: this processor runs {', '.join(native.isa_names())}")
        native.set_threads(count)
        self.threads = count
        # two in hand and one on its way: half as many joins of the team, and the disk has more than one read to do
        self.cores = min(count, 2)
        self.isa = native.isa()

    def copies(self, spec: SliceSpec) -> bool:
        return False

    def mapped_bytes(self, spec: SliceSpec) -> int:
        return blob_bytes(spec)

    def room(self, spec: SliceSpec, slot: Slot) -> npt.NDArray[np.uint8]:
        return slot.memory

    def place(self, spec: SliceSpec, blob: npt.NDArray[np.uint8], domain: int = 0) -> native.Slice:
        """A handle on the blob where it lies; the caller keeps the memory alive."""
        return self.host_slice(spec, blob)

    def make_slot(self, nbytes: int, domain: int = 0) -> CpuSlot:
        return CpuSlot(page_room(nbytes))

    def make_slots(self, sizes: Sequence[int], domain: int | None = 0) -> list[CpuSlot]:
        starts = list(accumulate(map(align, sizes), initial=0))
        room = page_room(starts[-1])  # one: a slot alone is often too small for a huge page
        return [CpuSlot(room[start:end]) for start, end in pairwise(starts)]

    def free_slot(self, slot: Slot) -> None:
        """The memory goes with its last view."""

    def fill(self, spec: SliceSpec, slot: Slot, nbytes: int) -> native.Slice:
        assert isinstance(slot, CpuSlot)
        shape = spec.codec, spec.K, spec.Kp, spec.ks, spec.n0, spec.n1, spec.group
        if slot.handle is None or slot.shape != shape:
            slot.handle, slot.shape = self.host_slice(spec, slot.memory), shape
        return slot.handle

    @staticmethod
    def host_slice(spec: SliceSpec, blob: npt.NDArray[np.uint8]) -> native.Slice:
        n = tiles.pad_n(spec.n1 - spec.n0)
        layout = tiles.slice_layout(spec.codec, spec.K, n, spec.group)
        at = blob.ctypes.data
        return native.Slice(
            CODEC_IDS[spec.codec],
            at,
            at + layout.channel.offset if layout.channel.nbytes else 0,
            spec.Kp,
            min(spec.ks, spec.Kp),
            spec.n0,
            n,
            spec.group,
            at + layout.groups.offset if spec.group else 0,
        )

    def free(self, handle: native.Slice) -> None:
        """Nothing to give back: the slice lies in the mapped pack."""

    def host(self, handle: native.Slice) -> native.Slice:
        return handle

    def activation_limit(self, codec: str) -> int:
        return INT4_LIMIT if self.w4a4 and codec == "i4" else 127

    def linear(
        self,
        handles: Sequence[native.Slice],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        native.linear(x, rows, handles, outs, biases)

    def linear_experts(
        self,
        handles: Sequence[native.Slice],
        ranges: npt.NDArray[np.int32],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
    ) -> None:
        native.linear_experts(x, rows, handles, ranges, outs)

    def accumulators(self, handle: native.Slice, a8: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
        rows = native.QuantisedRows.of(np.ascontiguousarray(a8))
        out = np.zeros((a8.shape[0], handle.n0 + handle.n), np.int32)
        native.accumulate(rows, handle, out)
        return out[:, handle.n0 :]

    def fence(self) -> None:
        """Every call returns when it is done."""

    def capacity(self) -> Capacity:
        return Capacity(domains=1, bytes_per_domain=0)

    def close(self) -> None:
        """Nothing was allocated."""
