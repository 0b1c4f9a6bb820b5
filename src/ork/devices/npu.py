"""The NPU: int8 slices in its memory, products as programs, sums scaled on the host so that the bits equal the CPU's.

f16 and f32 tensors are computed on the CPU whatever the device. `hybrid` leaves ops with few rows to the CPU too, from
the same mapped slices. A submit that fails for good is answered by the CPU device, with a warning, and counted.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ork import native
from ork.devices.base import Capacity, SliceSpec, Slot
from ork.devices.cpu import CpuDevice
from ork.errors import NpuError, SubmitFailed
from ork.npu.buffers import DmaBuffer
from ork.npu.driver import Npu, Prepared
from ork.npu.jobs import Int8Job
from ork.pack.format import align

MIN_ROWS = 32  # below, a submit costs more than the CPU's product (published: M = 16 loses, 32 wins)
INPUT_BYTES = 16 << 20  # scratch per domain: quantised rows
OUTPUT_BYTES = 64 << 20  # and int32 sums
PROGRAM_BYTES = 32 << 20  # left for programs and tasks, and for slots that are alone in their buffer
REGION_BYTES = 16 << 20  # slices that stay share buffers: fewer calls, and huge pages; the size imports work with
LINE = 64  # outputs of programs that run at once share no cache line
SPREAD_MACS = 64 << 20  # from here on an op is cut up for all cores; smaller ones are one chain on one core
PLANS = 1024  # prepared ops that are kept; each row count of each op is one


class _Region:
    """A buffer of the device and how many slots of it are in use."""

    __slots__ = ("buffer", "slots")

    def __init__(self, buffer: DmaBuffer, slots: int):
        self.buffer = buffer
        self.slots = slots


class NpuSlot:
    """A part of a buffer that slices pass through, or that one stays in."""

    __slots__ = ("nbytes", "offset", "region")

    def __init__(self, region: _Region, offset: int, nbytes: int):
        self.region = region
        self.offset = offset
        self.nbytes = nbytes

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """Made anew each time: an array that is kept would keep the buffer from being freed."""
        return self.region.buffer.array[self.offset : self.offset + self.nbytes]


@dataclass(slots=True, eq=False)
class NpuHandle:
    """A slice in NPU memory, and the same slice as the host sees it."""

    spec: SliceSpec
    host: native.Slice
    slot: NpuSlot | None  # None: a codec that only the CPU computes
    _parts: dict[tuple[int, int], native.Slice] = field(default_factory=dict)

    @property
    def weights(self) -> DmaBuffer:
        """The buffer that the codes are in, from `slot.offset` on."""
        assert self.slot is not None
        return self.slot.region.buffer

    @property
    def columns(self) -> int:
        return self.host.n

    @property
    def ks(self) -> int:
        return min(self.spec.ks, self.spec.Kp)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """What a prepared program depends on: the place, not the slice that is in it now."""
        assert self.slot is not None
        return (id(self.weights), self.slot.offset, self.columns, self.spec.Kp, self.ks)

    def part(self, n0: int, n: int) -> native.Slice:
        """Columns [n0, n0 + n): their scales, and where they go in the output."""
        held = self._parts.get((n0, n))
        if held is None:
            scales = self.host.scales_address + 4 * n0
            held = native.Slice(1, self.host.scales_address, scales, self.spec.Kp, self.ks, self.host.n0 + n0, n)
            self._parts[n0, n] = held
        return held


@dataclass(slots=True)
class _Part:
    """Columns of a slice whose sums lie together: for each K slice one block [M][n]."""

    handle: int  # index into the op's handles
    n0: int
    n: int
    sums: list[int] = field(default_factory=list)  # addresses of the blocks


@dataclass(slots=True)
class _Plan:
    """An op prepared for one row count: chains ready to run, and where their sums will be."""

    buffers: list[DmaBuffer]  # kept: a plan dies with the buffers it reads
    domain: int
    chains: list[Prepared]
    parts: list[_Part]
    out_bytes: int


class _Scratch:
    """Rows and sums of one domain."""

    def __init__(self, npu: Npu, domain: int):
        self.rows = npu.buffer(INPUT_BYTES, domain=domain)
        self.sums = npu.buffer(OUTPUT_BYTES, domain=domain)
        self.rows_at = self.rows.array.ctypes.data
        self.sums_at = self.sums.array.ctypes.data


class NpuDevice:
    """int8 products on the NPU behind `npu`, all else on `cpu`, and ops with fewer than `min_rows` rows too."""

    def __init__(self, npu: Npu, cpu: CpuDevice, *, name: str, min_rows: int = 1):
        self.npu = npu
        self.cpu = cpu
        self.name = name
        self.min_rows = min_rows
        self.threads = cpu.threads
        self.cores = npu.soc.cores
        self.isa = cpu.isa
        self.failed_ops = 0
        self.cpu_ops = 0
        self.npu_ops = 0
        self._scratch: dict[int, _Scratch] = {}
        self._slot_bytes: dict[int, int] = {}
        self._plans: OrderedDict[tuple[int, ...], _Plan] = OrderedDict()

    # --- slices ------------------------------------------------------------------------------------------------

    def place(self, spec: SliceSpec, blob: npt.NDArray[np.uint8], domain: int = 0) -> NpuHandle:
        """Copies the codes into a buffer of `domain`; scales stay in the blob, which the caller keeps alive.

        Raises NpuError when the domain has no room.
        """
        host = self.cpu.place(spec, blob)
        if not self.copies(spec):
            return NpuHandle(spec, host, None)
        nbytes = host.n * spec.Kp
        slot = self.make_slot(nbytes, domain)
        slot.memory[:nbytes] = blob[:nbytes]
        slot.region.buffer.sync_to_device(0, nbytes)
        return NpuHandle(spec, host, slot)

    def copies(self, spec: SliceSpec) -> bool:
        return spec.codec == "i8"

    def free(self, handle: NpuHandle) -> None:
        """Gives the slice's memory back, with every plan that reads it."""
        if handle.slot is not None:
            self.free_slot(handle.slot)
            handle.slot = None

    def make_slot(self, nbytes: int, domain: int = 0) -> NpuSlot:
        """Raises NpuError when the domain has no room."""
        return NpuSlot(self._region(nbytes, 1, domain), 0, nbytes)

    def make_slots(self, sizes: Sequence[int], domain: int = 0) -> list[NpuSlot]:
        """In buffers of 16 MiB, each given back with its last slot. Raises NpuError when the domain has no room."""
        slots: list[NpuSlot] = []
        try:
            for group in _packed([align(nbytes) for nbytes in sizes], REGION_BYTES):
                region = self._region(sum(group), len(group), domain)
                starts = accumulate(group, initial=0)
                slots += [NpuSlot(region, start, nbytes) for start, nbytes in zip(starts, group)]
        except NpuError:
            for slot in slots:
                self.free_slot(slot)
            raise
        return slots

    def free_slot(self, slot: Slot) -> None:
        assert isinstance(slot, NpuSlot)
        region = slot.region
        region.slots -= 1
        if not region.slots:
            self._forget(region.buffer)
            region.buffer.free()
            self._slot_bytes[region.buffer.domain] -= region.buffer.size

    def _region(self, nbytes: int, slots: int, domain: int) -> _Region:
        self._scratch_of(domain)
        region = _Region(self.npu.buffer(nbytes, domain=domain), slots)
        self._slot_bytes[domain] = self._slot_bytes.get(domain, 0) + region.buffer.size
        return region

    def fill(self, spec: SliceSpec, slot: Slot, nbytes: int) -> NpuHandle:
        """One cache clean; the scales behind the codes are read by the host alone."""
        assert isinstance(slot, NpuSlot)
        host = self.cpu.host_slice(spec, slot.memory)
        if not self.copies(spec):
            return NpuHandle(spec, host, None)
        slot.region.buffer.sync_to_device(slot.offset, host.n * spec.Kp)
        return NpuHandle(spec, host, slot)

    def host_slice(self, spec: SliceSpec, memory: npt.NDArray[np.uint8]) -> native.Slice:
        return self.cpu.host_slice(spec, memory)

    def host(self, handle: NpuHandle) -> native.Slice:
        return handle.host

    # --- products ----------------------------------------------------------------------------------------------

    def linear(
        self,
        handles: Sequence[NpuHandle],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        if rows is None or x.rows < self.min_rows or handles[0].slot is None:
            self._on_cpu(handles, x, rows, outs, biases)
            return
        for first, last in self._groups(handles, rows.rows):
            part = slice(first, last)
            try:
                self._on_npu(handles[part], rows, outs[part], biases[part])
                self.npu_ops += 1
            except SubmitFailed as error:
                self.failed_ops += 1
                self._forget_op(handles[part], rows.rows)  # what it wrote may never have reached the chip
                warnings.warn(
                    f"the NPU did not answer ({error}); the CPU computes instead", RuntimeWarning, stacklevel=2
                )
                self._on_cpu(handles[part], x, rows, outs[part], biases[part])

    def accumulators(self, handle: NpuHandle, a8: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
        """The NPU's own sums. Raises SubmitFailed rather than fall back."""
        rows = native.QuantisedRows.of(np.ascontiguousarray(a8))
        plan = self._run([handle], rows)
        sums = np.zeros((rows.rows, handle.columns), np.int32)
        base = self._scratch[plan.domain].sums_at
        memory = self._scratch[plan.domain].sums.array
        for part in plan.parts:
            for address in part.sums:
                count = rows.rows * part.n * 4
                block = memory[address - base : address - base + count].view(np.int32)
                sums[:, part.n0 : part.n0 + part.n] += block.reshape(rows.rows, -1)
        return sums

    def fence(self) -> None:
        """Every call returns when it is done."""

    def capacity(self) -> Capacity:
        """What slices may take of a domain beside scratch and programs. Buffers are aligned to their size rounded up to
        a power of two: of a 16 MiB buffer that is full of 2 MiB slices an eighth at most is lost that way."""
        room = self.npu.memory.ceiling - INPUT_BYTES - OUTPUT_BYTES - PROGRAM_BYTES
        return Capacity(domains=self.npu.soc.domains, bytes_per_domain=room // 8 * 7)

    def close(self) -> None:
        """Frees what the device allocated and closes the node."""
        for plan in self._plans.values():
            self._drop(plan)
        self._plans.clear()
        self._scratch.clear()
        self.npu.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _on_cpu(
        self,
        handles: Sequence[NpuHandle],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        self.cpu_ops += 1
        native.linear(x, rows, [h.host for h in handles], list(outs), list(biases))

    def _groups(self, handles: Sequence[NpuHandle], M: int) -> list[tuple[int, int]]:
        """Runs of handles of one domain whose sums fit the scratch together."""
        groups, first, used = [], 0, 0
        for i, h in enumerate(handles):
            need = _out_bytes(h, M)
            if need > OUTPUT_BYTES:
                raise NpuError(f"{h.spec.tensor}: sums of {M} rows exceed the scratch of {OUTPUT_BYTES >> 20} MiB")
            if i > first and (used + need > OUTPUT_BYTES or _domain(h) != _domain(handles[first])):
                groups.append((first, i))
                first, used = i, 0
            used += need
        groups.append((first, len(handles)))
        return groups

    def _on_npu(
        self,
        handles: Sequence[NpuHandle],
        rows: native.QuantisedRows,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        plan = self._run(handles, rows)
        for part in plan.parts:
            scaled = handles[part.handle].part(part.n0, part.n)
            native.scale_sums(part.sums, part.n, rows, scaled, outs[part.handle], biases[part.handle])

    def _run(self, handles: Sequence[NpuHandle], rows: native.QuantisedRows) -> _Plan:
        """Copies the rows in, runs the op's chains, and makes their sums visible to the host."""
        plan = self._plan(handles, rows.rows)
        scratch = self._scratch[plan.domain]
        nbytes = rows.rows * rows.width
        native.copy_codes(rows, scratch.rows_at)
        scratch.rows.sync_to_device(0, nbytes)
        if len(plan.chains) == 1:
            self.npu.submit(plan.chains[0].chain)
        else:
            self.npu.run([c.chain for c in plan.chains])
        scratch.sums.sync_from_device(0, plan.out_bytes)
        return plan

    def _plan(self, handles: Sequence[NpuHandle], M: int) -> _Plan:
        key = _key(handles, M)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._prepare(list(handles), M)
            self._plans[key] = plan
            if len(self._plans) > PLANS:
                self._drop(self._plans.popitem(last=False)[1])
        else:
            self._plans.move_to_end(key)
        return plan

    def _scratch_of(self, domain: int) -> _Scratch:
        """Made with the domain's first slice, so that an op allocates nothing."""
        scratch = self._scratch.get(domain)
        if scratch is None:
            scratch = self._scratch[domain] = _Scratch(self.npu, domain)
        return scratch

    @property
    def scratch_bytes(self) -> dict[int, int]:
        """What is mapped beside slices: rows, sums, programs and tasks, by domain."""
        return {d: n - self._slot_bytes.get(d, 0) for d, n in self.npu.memory.mapped.items()}

    def _forget_op(self, handles: Sequence[NpuHandle], M: int) -> None:
        if plan := self._plans.pop(_key(handles, M), None):
            self._drop(plan)

    def _prepare(self, handles: list[NpuHandle], M: int) -> _Plan:
        domain, Kp = _domain(handles[0]), handles[0].spec.Kp
        scratch = self._scratch_of(domain)
        if M * Kp > INPUT_BYTES:
            raise NpuError(f"{M} rows of {Kp} bytes exceed the scratch of {INPUT_BYTES >> 20} MiB: use a smaller chunk")
        spread = M * Kp * sum(h.columns for h in handles) >= SPREAD_MACS
        pieces = -(-self.npu.soc.cores // len(handles)) if spread else 1
        jobs: list[Int8Job] = []
        parts: list[_Part] = []
        at = 0
        for index, h in enumerate(handles):
            assert h.slot is not None
            ks = h.ks
            for n0, n1 in _cut(h.columns, pieces):
                n = n1 - n0
                part = _Part(index, n0, n)
                for k0 in range(0, Kp, ks):
                    # within a K slice the tiles of 32 columns follow each other
                    weights_offset = h.slot.offset + k0 * h.columns + n0 * ks
                    jobs.append(
                        Int8Job(
                            scratch.rows,
                            h.weights,
                            scratch.sums,
                            M,
                            ks,
                            n,
                            a_offset=k0,
                            a_pitch=Kp,
                            weights_offset=weights_offset,
                            out_offset=at,
                        )
                    )
                    part.sums.append(scratch.sums_at + at)
                    at += -(-M * n * 4 // LINE) * LINE
                parts.append(part)
        chains = [self.npu.prepare([job]) for job in jobs] if spread else [self.npu.prepare(jobs)]
        return _Plan([h.weights for h in handles], domain, chains, parts, at)

    def _forget(self, buffer: DmaBuffer) -> None:
        """Drops the plans that read a buffer which is about to go."""
        for key in [k for k, plan in self._plans.items() if any(b is buffer for b in plan.buffers)]:
            self._drop(self._plans.pop(key))

    def _drop(self, plan: _Plan) -> None:
        for prepared in plan.chains:
            prepared.free()


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


def _key(handles: Sequence[NpuHandle], M: int) -> tuple[int, ...]:
    return (M, *(value for h in handles for value in h.shape))


def _domain(handle: NpuHandle) -> int:
    return handle.weights.domain


def _out_bytes(handle: NpuHandle, M: int) -> int:
    slices = handle.spec.Kp // min(handle.spec.ks, handle.spec.Kp)
    return slices * (M * handle.columns * 4 + LINE * 4)


def _cut(columns: int, pieces: int) -> list[tuple[int, int]]:
    """[0, columns) in at most `pieces` runs of whole 64s."""
    units = columns // 64
    edges = sorted({64 * (units * i // pieces) for i in range(pieces + 1)})
    return list(pairwise(edges))
