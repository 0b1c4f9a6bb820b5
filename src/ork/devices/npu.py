"""The NPU: slices in its memory, products as programs, sums scaled on the host so that the bits equal the CPU's.

Weights of four bits are multiplied as the int8 codes that they stand for, or, with `int4_k`, by rows of four bits.
Where rows are scaled by group of inputs, each group is a program. f16 and f32 tensors are computed on the CPU whatever
the device. `hybrid` leaves ops with few rows and tensors with groups to the CPU too. A submit that fails for good is
answered by the CPU device, with a warning, and counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ork import native
from ork.devices import npu_experts as experts
from ork.devices.base import Capacity, SliceSpec, Slot, blob_bytes, is_expert
from ork.devices.cpu import CpuDevice, CpuSlot
from ork.devices.npu_plan import INPUT_BYTES, OUTPUT_BYTES, Piece, Plans, rounds
from ork.devices.npu_slots import Lay, NpuHandle, NpuSlot, Slots, as_stored, host_slice, lay_of, lay_out, slot_layout
from ork.errors import SubmitFailed
from ork.npu.driver import Npu
from ork.npu.plan import INT4_LEAST

MIN_ROWS = 32  # below, a submit costs more than the CPU's product (published: M = 16 loses, 32 wins)
PROGRAM_BYTES = 32 << 20  # left for programs and tasks, and for slots that are alone in their buffer


class NpuDevice:
    """Products of integers on the NPU behind `npu`, all else on `cpu`, and ops with fewer than `min_rows` rows too.

    `grouped`: tensors whose rows are scaled by group as well; a program a group was measured to cost 13 to 283 times
    one program. `int4_k` > 0: i4 weights by 4-bit rows, in K slices up to that length; `cpu` must be W4A4 as well.
    """

    def __init__(
        self, npu: Npu, cpu: CpuDevice, *, name: str, min_rows: int = 1, grouped: bool = True, int4_k: int = 0
    ):
        self.npu = npu
        self.cpu = cpu
        self.name = name
        self.min_rows = min_rows
        self.grouped = grouped
        self.int4_k = int4_k
        self.threads = cpu.threads
        self.cores = npu.soc.cores
        self.isa = cpu.isa
        self.failed_ops = 0
        self.cpu_ops = 0
        self.npu_ops = 0
        # rows of an expert, on average, from which on the NPU computes a mixture's; None: never, and its memory holds
        # none of them
        self.expert_rows: float | None = 0 if min_rows == 1 else None
        self._plans = Plans(npu)
        self._slots = Slots(npu, prepare=self._plans.scratch, forget=self._plans.forget)

    # --- slices ------------------------------------------------------------------------------------------------

    def _lay(self, spec: SliceSpec) -> Lay | None:
        """How a slice lies in NPU memory; None: the CPU computes it."""
        if self.expert_rows is None and is_expert(spec):
            return None
        lay = lay_of(spec, self.int4_k)
        return None if lay and lay.group and not self.grouped else lay

    def copies(self, spec: SliceSpec) -> bool:
        return self._lay(spec) is not None

    def mapped_bytes(self, spec: SliceSpec) -> int:
        lay = self._lay(spec)
        return slot_layout(spec, lay).nbytes if lay else blob_bytes(spec)

    def room(self, spec: SliceSpec, slot: Slot) -> npt.NDArray[np.uint8]:
        if isinstance(slot, CpuSlot):
            return slot.memory
        assert isinstance(slot, NpuSlot)
        lay = self._lay(spec)
        if lay is None or as_stored(spec, lay):
            return slot.memory
        return self._slots.staging(slot, blob_bytes(spec), keep=self._keeps(spec, lay))

    def _keeps(self, spec: SliceSpec, lay: Lay) -> bool:
        """Whether the blob stays in host memory: ops with few rows then read half the bytes on the CPU."""
        often = bool(self.expert_rows) if is_expert(spec) else self.min_rows > 1
        return often and lay.codec != spec.codec

    def place(self, spec: SliceSpec, blob: npt.NDArray[np.uint8], domain: int = 0) -> NpuHandle:
        """Copies a slice into a buffer of `domain`; the host's slice stays in the blob, which the caller keeps alive.

        Raises NpuError when the domain has no room.
        """
        host = self.cpu.place(spec, blob)
        if not self.copies(spec):
            return NpuHandle(spec, host)
        slot = self.make_slot(self.mapped_bytes(spec), domain)
        return NpuHandle(spec, host, slot, self._put(spec, slot, blob))

    def fill(self, spec: SliceSpec, slot: Slot, nbytes: int) -> NpuHandle:
        """Tiled anew unless it is used as it is read, and one cache clean; scales are read by the host alone."""
        if isinstance(slot, CpuSlot):
            return NpuHandle(spec, self.cpu.fill(spec, slot, nbytes))
        assert isinstance(slot, NpuSlot)
        room = self.room(spec, slot)
        lay = self._lay(spec)
        if lay is None:
            return NpuHandle(spec, self.cpu.host_slice(spec, room))
        lay = self._put(spec, slot, room)
        host = self.cpu.host_slice(spec, room) if self._keeps(spec, lay) else host_slice(spec, lay, slot.memory)
        return NpuHandle(spec, host, slot, lay)

    def _put(self, spec: SliceSpec, slot: NpuSlot, blob: npt.NDArray[np.uint8]) -> Lay:
        """The slice into its slot, if it is not there, and visible to the device: how it lies there."""
        lay = self._lay(spec)
        assert lay is not None
        layout = slot_layout(spec, lay)
        memory = slot.memory
        if not as_stored(spec, lay):
            if lay.kind == "int4":  # a pack of others may hold -8, which asks for shorter K slices
                least = native.least_int4(blob[: layout.codes.nbytes])
                lay = lay_of(spec, self.int4_k, min(least, INT4_LEAST)) or lay
            lay_out(spec, lay, blob, memory)
        elif blob.ctypes.data != memory.ctypes.data:
            memory[: layout.nbytes] = blob[: layout.nbytes]
        slot.region.buffer.sync_to_device(slot.offset, layout.codes.nbytes)
        return lay

    def free(self, handle: NpuHandle) -> None:
        """Gives the slice's memory back, with every plan that reads it."""
        if handle.slot is not None:
            self.free_slot(handle.slot)
            handle.slot = None

    def make_slot(self, nbytes: int, domain: int = 0) -> NpuSlot:
        """Raises NpuError when the domain has no room."""
        return self._slots.one(nbytes, domain)

    def make_slots(self, sizes: Sequence[int], domain: int | None = 0) -> Sequence[Slot]:
        """In buffers of 16 MiB, each given back with its last slot. Raises NpuError when the domain has no room."""
        return self.cpu.make_slots(sizes) if domain is None else self._slots.many(sizes, domain)

    def free_slot(self, slot: Slot) -> None:
        if isinstance(slot, CpuSlot):
            return
        assert isinstance(slot, NpuSlot)
        self._slots.free(slot)

    def host_slice(self, spec: SliceSpec, memory: npt.NDArray[np.uint8]) -> native.Slice:
        return self.cpu.host_slice(spec, memory)

    def host(self, handle: NpuHandle) -> native.Slice:
        return handle.host

    # --- products ----------------------------------------------------------------------------------------------

    def activation_limit(self, codec: str) -> int:
        return self.cpu.activation_limit(codec)

    def linear(
        self,
        handles: Sequence[NpuHandle],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        if rows is None or x.rows < self.min_rows or any(h.slot is None for h in handles):
            self._on_cpu(handles, x, rows, outs, biases)
            return
        for pieces in rounds(handles, rows.rows):
            try:
                self._on_npu(handles, pieces, rows, outs, biases)
                self.npu_ops += 1
            except SubmitFailed as error:
                # what the chains' programs are may never have reached the chip
                self._plans.forget_round(handles, pieces, rows.rows)
                self._failed(error)
                whole = sorted({i for i, _, _ in pieces})
                self._on_cpu([handles[i] for i in whole], x, rows, [outs[i] for i in whole], [biases[i] for i in whole])

    def linear_experts(
        self,
        handles: Sequence[NpuHandle],
        ranges: npt.NDArray[np.int32],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
    ) -> None:
        least = self.expert_rows
        if rows is None or least is None or len(ranges) * least > _rows(ranges) or not experts.possible(handles):
            self._experts_on_cpu(handles, ranges, x, rows, outs)
            return
        for todo in experts.rounds(handles, ranges, self.cores):
            try:
                experts.run_round(self.npu, self._plans, todo, handles, rows, outs)
                self.npu_ops += 1
            except SubmitFailed as error:
                self._failed(error)
                # what is right already is computed again to the same bits
                which = sorted({part.handle for part in todo.parts})
                self._experts_on_cpu([handles[i] for i in which], ranges[which], x, rows, [outs[i] for i in which])

    def accumulators(self, handle: NpuHandle, a8: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
        """The NPU's own sums. Raises SubmitFailed rather than fall back, ValueError for rows that four bits do not hold
        where the slice is multiplied as int4."""
        if handle.way.kind == "int4" and np.abs(a8.astype(np.int16)).max(initial=0) > -INT4_LEAST:
            raise ValueError(f"codes outside of +-{-INT4_LEAST}")
        rows = native.QuantisedRows.of(np.ascontiguousarray(a8))
        total = np.zeros((rows.rows, handle.columns), np.int32)
        for pieces in rounds([handle], rows.rows):
            plan = self._plans.run([handle], pieces, rows)
            scratch = self._plans.scratch(plan.domain)
            memory = scratch.sums.array
            for part in plan.parts:
                dtype: type[np.signedinteger] = np.int16 if part.half else np.int32
                for s in part.sums:
                    shape, strides = (s.m1 - s.m0, part.n // 64, 64), (s.row, s.block, 1)
                    for address in s.parts:
                        size = np.dtype(dtype).itemsize
                        block = np.ndarray(
                            shape, dtype, memory, address - scratch.sums_at, tuple(size * stride for stride in strides)
                        )
                        total[s.m0 : s.m1, part.n0 : part.n0 + part.n] += block.reshape(s.m1 - s.m0, part.n)
                        del block
        return total

    def fence(self) -> None:
        """Every call returns when it is done."""

    def capacity(self) -> Capacity:
        """What slices may take of a domain beside scratch and programs. Buffers are aligned to their size rounded up to
        a power of two: of a 16 MiB buffer that is full of 2 MiB slices an eighth at most is lost that way."""
        room = self.npu.memory.ceiling - INPUT_BYTES - OUTPUT_BYTES - PROGRAM_BYTES
        return Capacity(domains=self.npu.soc.domains, bytes_per_domain=room // 8 * 7)

    @property
    def scratch_bytes(self) -> dict[int, int]:
        """What is mapped beside slices: rows, sums, programs and tasks, by domain."""
        return {d: n - self._slots.bytes.get(d, 0) for d, n in self.npu.memory.mapped.items()}

    @property
    def kept_bytes(self) -> int:
        """Host memory beside that of the slots: blobs of which ops with few rows read half the bytes on the CPU."""
        return self._slots.kept

    def close(self) -> None:
        """Frees what the device allocated and closes the node."""
        self._plans.close()
        self.npu.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _failed(self, error: SubmitFailed) -> None:
        self.failed_ops += 1
        warnings.warn(f"the NPU did not answer ({error}); the CPU computes instead", RuntimeWarning, stacklevel=3)

    def _experts_on_cpu(
        self,
        handles: Sequence[NpuHandle],
        ranges: npt.NDArray[np.int32],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
    ) -> None:
        self.cpu_ops += 1
        native.linear_experts(x, rows, [h.host for h in handles], ranges, outs)

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

    def _on_npu(
        self,
        handles: Sequence[NpuHandle],
        pieces: Sequence[Piece],
        rows: native.QuantisedRows,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        plan = self._plans.run(handles, pieces, rows)
        for part in plan.parts:
            i = pieces[part.piece][0]
            scaled = handles[i].part(part.n0, part.n)
            for s in part.sums:
                native.scale_partial_sums(
                    s.parts, part.half, s.row, s.block, s.m0, s.m1, rows, scaled, outs[i], biases[i]
                )


def _rows(ranges: npt.NDArray[np.int32]) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())
