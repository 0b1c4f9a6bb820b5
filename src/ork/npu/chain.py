"""Programs laid out in device memory, linked to a chain, and submitted again and again with patched addresses.

An arena is one domain's memory for programs (which the NPU reads) and task descriptors (which the kernel reads). A
chain owns a run of each from the moment it is made until it is freed, so that submitting it again writes nothing, and
moving an operand writes one word per occurrence of its register.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ork.errors import NpuError
from ork.npu import isa, uabi
from ork.npu.buffers import DmaBuffer, DmaMemory
from ork.npu.program import Program
from ork.npu.ranges import Ranges
from ork.npu.soc import Soc

BLOCK = 64  # alignment of a program that another one links to, in bytes
CHAIN_LIMIT = 1024  # programs of one chain: the longest in use elsewhere
REGCMD_BYTES = 1 << 20  # of an arena: 1170 matmul programs
_TASK = struct.Struct("<8IQ")  # uabi.Task
_VALUE = 0xFFFFFFFF << 16

Span = tuple[DmaBuffer, int]  # a buffer and an offset in bytes


@dataclass(frozen=True)
class Step:
    """One program and where its operands are."""

    program: Program
    operands: Mapping[str, Span]


class Arena:
    """Room for programs and tasks in one domain."""

    def __init__(self, memory: DmaMemory, domain: int, soc: Soc) -> None:
        self.soc = soc
        self.domain = domain
        self.regcmd = memory.allocate(REGCMD_BYTES, domain=domain, flags=uabi.BUFFER, sram=False)
        # The kernel reads tasks through a mapping of its own, which an import would not have.
        size = CHAIN_LIMIT * _TASK.size
        self.tasks = memory.allocate(size, domain=domain, flags=uabi.TASK_ARRAY, sram=False)
        self.words = self.regcmd.view.cast("Q")
        self.blocks = Ranges(REGCMD_BYTES // BLOCK)
        self.entries = Ranges(CHAIN_LIMIT)

    def take(self, blocks: int, tasks: int) -> tuple[int, int] | None:
        """Room for so many blocks of programs and so many tasks: the first of each, or None."""
        block = self.blocks.take(blocks)
        if block is None:
            return None
        entry = self.entries.take(tasks)
        if entry is None:
            self.blocks.give(block, blocks)
            return None
        return block, entry

    def release(self) -> None:
        """Drop the cast view, so that the buffers can be unmapped."""
        self.words.release()


class Chain:
    """Linked programs in device memory. Made by `Npu.chain` and `Npu.prepare`; one submit of it at a time.

    Raises NpuError where an operand lies outside its buffer, in another domain, or off a 16-byte boundary.
    """

    def __init__(self, arena: Arena, steps: Sequence[Step], blocks: int, entry: int, *, unproven: bool = False) -> None:
        self._arena = arena
        self._unproven = unproven
        self._blocks, self._entry = blocks, entry
        self._size = regcmd_bytes(steps)
        self.steps = tuple(steps)
        self.operands = [dict(step.operands) for step in steps]
        self.domain = arena.domain
        self.kind = steps[0].program.kind
        self.flags = uabi.JOB_PC | (uabi.JOB_PINGPONG if all(s.program.ping_pong for s in steps) else 0)
        self.pending = False  # submitted without waiting, and not seen to be done
        self.freed = False
        self.submit = uabi.Submit(
            flags=self.flags,
            timeout=arena.soc.timeout_ms,
            task_number=len(steps),
            task_obj_addr=arena.tasks.obj_addr,
            iommu_domain_id=arena.domain,
            fence_fd=-1,
        )
        for core in range(3):  # the kernel takes the entry of the core in the mask
            self.submit.subcore_task[core].task_start = entry
            self.submit.subcore_task[core].task_number = len(steps)
        self.submit.task_start = entry
        self._starts: list[int] = []  # of each program, in words of the arena
        self._write()
        self._operands_changed()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def cold(self) -> bool:
        """Whether an output buffer has never been written by the device."""
        return any(buffer.fresh for buffer in self.outputs)

    @property
    def last(self) -> tuple[DmaBuffer, int, int]:
        """(buffer, offset, bytes) of the last element that the last program writes."""
        program = self.steps[-1].program
        buffer, offset = self.operands[-1]["output"]
        return buffer, offset + program.operands["output"].nbytes - program.out_element, program.out_element

    def patch(self, step: int, role: str, buffer: DmaBuffer, offset: int = 0) -> None:
        """Move one operand of one program; every word that holds its address is rewritten."""
        self._check_idle("patched")
        check_operand(self.steps[step].program, role, buffer, offset, self.domain, self._arena.soc)
        operands = self.operands[step]
        before, operands[role] = operands[role], (buffer, offset)
        if before[0] is not buffer:
            try:
                self._operands_changed()
            except NpuError:
                operands[role] = before
                raise
        self._point(step, role, buffer.iova + offset)
        self._dirty = True

    def flush(self) -> None:
        """Make the words visible to the device, if any were written since the last time."""
        if self._dirty:
            self._arena.regcmd.sync_to_device(self._starts[0] * 8, self._size)
            self._dirty = False

    def free(self) -> None:
        """Give the room in the arena back; the second time nothing happens."""
        if self.freed:
            return
        self._check_idle("freed")
        self.freed = True
        self._arena.blocks.give(self._blocks, self._size // BLOCK)
        self._arena.entries.give(self._entry, len(self.steps))

    def _check_idle(self, what: str) -> None:
        if self.freed:
            raise NpuError("the chain was freed: make a new one")
        if self.pending:
            raise NpuError(f"a chain that was submitted cannot be {what} before it is done")

    def _write(self) -> None:
        base = self._blocks * BLOCK
        starts = [base + at for at in offsets(self.steps)]
        view, iova = self._arena.regcmd.view, self._arena.regcmd.iova
        tasks = bytearray()
        for i, (step, start) in enumerate(zip(self.steps, starts)):
            program = step.program
            link = trailer(program, iova + starts[i + 1], self.steps[i + 1].program) if i + 1 < len(starts) else None
            body = program.words[: program.body].tobytes() if link else program.words.tobytes()
            view[start : start + len(body)] = body
            if link:
                view[start + len(body) : start + program.nbytes] = link
            # The kernel uses address and amount of the first and int_mask of the last; the others are for readers.
            tasks += _TASK.pack(
                0, 0, program.enable, program.interrupt, uabi.INT_CLEAR_ALL, 0, program.body, 0, iova + start
            )
        at = self._entry * _TASK.size
        self._arena.tasks.view[at : at + len(tasks)] = tasks
        self._arena.tasks.sync_to_device(at, len(tasks))
        self._starts = [start // 8 for start in starts]
        for i, step in enumerate(self.steps):
            for role, (buffer, offset) in step.operands.items():
                self._point(i, role, buffer.iova + offset)
        self._dirty = True

    def _point(self, step: int, role: str, address: int) -> None:
        words, start = self._arena.words, self._starts[step]
        for position in self.steps[step].program.operands[role].positions:
            words[start + position] = words[start + position] & ~_VALUE | address << 16

    def _operands_changed(self) -> None:
        written: dict[int, DmaBuffer] = {}
        imports: set[int] = set()
        for step, operands in zip(self.steps, self.operands):
            for role, (buffer, _) in operands.items():
                if step.program.operands[role].written:
                    written[buffer.handle] = buffer
                if buffer.imported:
                    imports.add(buffer.handle)
        if not self._unproven:
            check_imports(len(imports), self._arena.soc)
        self.outputs = tuple(written.values())


def offsets(steps: Sequence[Step]) -> Iterator[int]:
    """Where each program starts, in bytes from the first."""
    at = 0
    for step in steps:
        yield at
        at += -(-step.program.nbytes // BLOCK) * BLOCK


def regcmd_bytes(steps: Sequence[Step]) -> int:
    return sum(-(-step.program.nbytes // BLOCK) * BLOCK for step in steps)


def trailer(program: Program, next_address: int, following: Program) -> bytes:
    """The four words that end `program` and lead to `following`."""
    return isa.assemble(
        [], next_address=next_address, next_amount=isa.fetch_amount(following.body), enable=program.enable
    ).tobytes()


def check_operand(program: Program, role: str, buffer: DmaBuffer, offset: int, domain: int, soc: Soc) -> None:
    """Raise NpuError unless the operand lies in the buffer, in the chain's domain, on an atom."""
    nbytes = program.operands[role].nbytes
    if buffer.domain != domain:
        raise NpuError(f"{role} in {buffer!r}: the chain runs in domain {domain}")
    if offset < 0 or offset + nbytes > buffer.size:
        raise NpuError(f"{role} of {nbytes} bytes at {offset}: outside {buffer!r}")
    if (buffer.iova + offset) % soc.atom_bytes:
        raise NpuError(f"{role} at {buffer.iova + offset:#x}: not a multiple of {soc.atom_bytes}")


def check_imports(count: int, soc: Soc) -> None:
    if count > soc.chain_imports_ok:
        raise NpuError(
            f"a chain over {count} imported buffers: more than {soc.chain_imports_ok} are known to time out, "
            "split it or use buffers of the driver"
        )


def check_steps(steps: Sequence[Step], domain: int, soc: Soc) -> None:
    """Raise NpuError for a chain that the chip would not run, before anything is written."""
    if not 1 <= len(steps) <= CHAIN_LIMIT:
        raise NpuError(f"a chain of {len(steps)} programs: 1 to {CHAIN_LIMIT} are possible")
    if len(kinds := {step.program.kind for step in steps}) > 1:
        raise NpuError(f"a chain of {' and '.join(sorted(kinds))} programs: one precision a chain")
    for step in steps:
        if step.operands.keys() != step.program.operands.keys():
            raise NpuError(f"operands {', '.join(step.operands)}: the program has {', '.join(step.program.operands)}")
        for role, (buffer, offset) in step.operands.items():
            check_operand(step.program, role, buffer, offset, domain, soc)
