"""Slices in NPU memory: the buffers they share, and how each lies there.

The chip wants the inputs of one program contiguous, and codes as wide as it multiplies them. So a slice that is stored
otherwise is tiled anew on its way into its slot: 4-bit codes become the int8 codes that they stand for, and where
activations are scaled by group, or int4 sums must fit int16, K slices become as short as that asks for. The slot then
holds a blob of another codec with other K slices, which the host's kernels read like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.devices.base import SliceSpec
from ork.devices.cpu import CODEC_IDS, page_room
from ork.errors import NpuError
from ork.npu.buffers import DmaBuffer
from ork.npu.driver import Npu
from ork.npu.plan import INT4_LEAST, int4_slice
from ork.pack.format import align

REGION_BYTES = 16 << 20  # slices that stay share buffers: fewer calls, and huge pages; the size imports work with

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Lay:
    """How a slice lies in its slot: as a blob of `codec` (i8 or i4) with K slices of `ks`, for rows scaled by `group`
    (0: one scale a row)."""

    codec: str
    ks: int
    group: int

    @property
    def kind(self) -> str:
        """Of the programs that multiply it."""
        return "int8" if self.codec == "i8" else "int4"


def lay_of(spec: SliceSpec, int4_k: int = 0, least: int = INT4_LEAST) -> Lay | None:
    """How the NPU keeps a slice; None for codecs that it does not compute.

    `int4_k` > 0: i4 is multiplied as int4, in K slices up to that length; `least` is then the least code in it.
    """
    if not tiles.CODECS[spec.codec].scaled:
        return None
    group = spec.group or spec.act_group
    if spec.codec == "i4" and int4_k:
        return Lay("i4", int4_slice(group or spec.Kp, int4_k, least), group)
    return Lay("i8", group or min(spec.ks, spec.Kp), group)


def columns_of(spec: SliceSpec) -> int:
    return tiles.pad_n(spec.n1 - spec.n0)


def slot_layout(spec: SliceSpec, lay: Lay) -> tiles.SliceLayout:
    """Where the parts of the slice lie in its slot."""
    return tiles.slice_layout(lay.codec, spec.K, columns_of(spec), spec.group)


def as_stored(spec: SliceSpec, lay: Lay) -> bool:
    """Whether the blob can be read straight into the slot."""
    return lay.codec == spec.codec == "i8" and lay.ks == min(spec.ks, spec.Kp)


def lay_out(spec: SliceSpec, lay: Lay, blob: Bytes, memory: Bytes) -> None:
    """Writes the slice whose blob is `blob` into `memory` as `lay` says."""
    n, ks = columns_of(spec), min(spec.ks, spec.Kp)
    stored, target = tiles.slice_layout(spec.codec, spec.K, n, spec.group), slot_layout(spec, lay)
    codes, channel, groups = tiles.split_blob(stored, blob[: stored.nbytes])
    number = CODEC_IDS[spec.codec]
    native.retile(number, codes, n, spec.Kp, ks, lay.ks, memory[: target.codes.nbytes])
    end = target.channel.offset + target.channel.nbytes
    memory[target.channel.offset : end].view("<f4")[...] = channel
    if groups is not None:
        G = target.codec.G
        split = groups.reshape(len(groups), -1, stored.codec.G // G, G).transpose(0, 2, 1, 3)
        memory[target.groups.offset : target.nbytes].view("<f2").reshape(split.shape)[...] = split


def host_slice(spec: SliceSpec, lay: Lay, memory: Bytes) -> native.Slice:
    """The slice in its slot as the host's kernels see it: the same values, so the same bits."""
    layout, at = slot_layout(spec, lay), memory.ctypes.data
    scales, groups = at + layout.channel.offset, at + layout.groups.offset if spec.group else 0
    number = CODEC_IDS[lay.codec]
    return native.Slice(number, at, scales, spec.Kp, lay.ks, spec.n0, layout.n, spec.group, groups)


class Region:
    """A buffer of the device and how many slots of it are in use."""

    __slots__ = ("buffer", "slots")

    def __init__(self, buffer: DmaBuffer, slots: int):
        self.buffer = buffer
        self.slots = slots


class NpuSlot:
    """A part of a buffer that slices pass through, or that one stays in. `stored`: the blob as the pack has it, for
    the host, where that is kept beside."""

    __slots__ = ("nbytes", "offset", "region", "stored")

    def __init__(self, region: Region, offset: int, nbytes: int):
        self.region = region
        self.offset = offset
        self.nbytes = nbytes
        self.stored: Bytes | None = None

    @property
    def memory(self) -> Bytes:
        """Made anew each time: an array that is kept would keep the buffer from being freed."""
        return self.region.buffer.array[self.offset : self.offset + self.nbytes]


@dataclass(slots=True, eq=False)
class NpuHandle:
    """A slice in NPU memory, and the same slice as the host sees it."""

    spec: SliceSpec
    host: native.Slice
    slot: NpuSlot | None = None  # None: the CPU computes it
    lay: Lay | None = None  # how it lies there
    _parts: dict[tuple[int, int], native.Slice] = field(default_factory=dict)

    @property
    def weights(self) -> DmaBuffer:
        """The buffer that the codes are in, from `slot.offset` on."""
        assert self.slot is not None
        return self.slot.region.buffer

    @property
    def way(self) -> Lay:
        assert self.lay is not None
        return self.lay

    @property
    def offset(self) -> int:
        """Of the codes in their buffer."""
        assert self.slot is not None
        return self.slot.offset

    @property
    def columns(self) -> int:
        return self.host.n

    @property
    def shape(self) -> tuple[int | str, ...]:
        """What a prepared program depends on: the place, not the slice that is in it now."""
        return (id(self.weights), self.offset, self.columns, self.spec.Kp, self.way.ks, self.way.codec)

    def part(self, n0: int, n: int) -> native.Slice:
        """Columns [n0, n0 + n): their scales, and where they go in the output."""
        held = self._parts.get((n0, n))
        if held is None:
            spec, lay, layout = self.spec, self.way, slot_layout(self.spec, self.way)
            at = self.weights.array.ctypes.data + self.offset
            scales = at + layout.channel.offset + 4 * n0
            groups = at + layout.groups.offset + 2 * n0 * (spec.Kp // spec.group) if spec.group else 0
            number = CODEC_IDS[lay.codec]
            held = native.Slice(number, at, scales, spec.Kp, lay.ks, spec.n0 + n0, n, spec.group, groups)
            self._parts[n0, n] = held
        return held


class Slots:
    """The buffers that slots are parts of. `forget` is told of a buffer that is about to be freed, `prepare` of a
    domain that is about to hold its first."""

    def __init__(self, npu: Npu, *, prepare: Callable[[int], object], forget: Callable[[DmaBuffer], None]):
        self.npu = npu
        self.bytes: dict[int, int] = {}  # by domain
        self.kept = 0  # bytes of host memory: blobs that slots keep beside
        self._lock = threading.Lock()
        self._prepare, self._forget = prepare, forget
        self._local = threading.local()

    def one(self, nbytes: int, domain: int) -> NpuSlot:
        """Raises NpuError when the domain has no room."""
        return NpuSlot(self._region(nbytes, 1, domain), 0, nbytes)

    def many(self, sizes: Sequence[int], domain: int) -> list[NpuSlot]:
        """In buffers of 16 MiB, each given back with its last slot. Raises NpuError when the domain has no room."""
        slots: list[NpuSlot] = []
        try:
            for group in _packed([align(nbytes) for nbytes in sizes], REGION_BYTES):
                region = self._region(sum(group), len(group), domain)
                starts = accumulate(group, initial=0)
                slots += [NpuSlot(region, start, nbytes) for start, nbytes in zip(starts, group)]
        except NpuError:
            for slot in slots:
                self.free(slot)
            raise
        return slots

    def free(self, slot: NpuSlot) -> None:
        self._keep(slot, None)
        region = slot.region
        region.slots -= 1
        if not region.slots:
            self._forget(region.buffer)
            region.buffer.free()
            self.bytes[region.buffer.domain] -= region.buffer.size

    def staging(self, slot: NpuSlot, nbytes: int, *, keep: bool) -> Bytes:
        """Host memory for a blob that goes into `slot` in another form: the slot's own if it is to be kept."""
        held = slot.stored if keep else getattr(self._local, "memory", None)
        if held is None or held.nbytes < nbytes:
            held = page_room(nbytes)
            if keep:
                self._keep(slot, held)
            else:
                self._local.memory = held
        return held

    def _keep(self, slot: NpuSlot, blob: Bytes | None) -> None:
        with self._lock:  # slots are filled by several threads
            self.kept += (0 if blob is None else blob.nbytes) - (0 if slot.stored is None else slot.stored.nbytes)
        slot.stored = blob

    def _region(self, nbytes: int, slots: int, domain: int) -> Region:
        self._prepare(domain)
        region = Region(self.npu.buffer(nbytes, domain=domain), slots)
        self.bytes[domain] = self.bytes.get(domain, 0) + region.buffer.size
        return region


def _packed(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Runs of sizes that come to `most` at most each, or are one that is larger."""
    groups: list[list[int]] = []
    used = most
    for size in sizes:
        if used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(size)
        used += size
    return groups
