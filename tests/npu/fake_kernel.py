"""A kernel for tests of the driver alone: memory that is real, jobs that compute nothing and end as a script says.

It follows the chain of a submit through memory as the chip would, so that tests see which programs would have run.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ork.npu import isa, uabi

Outcome = int | Callable[["Ran"], int]  # an errno, 0 for success, or what decides it


@dataclass
class Ran:
    """A submit as the chip would see it."""

    core_mask: int
    domain: int
    nonblock: bool
    programs: list[dict[int, int]]  # register values of each


@dataclass
class Memory:
    handle: int
    iova: int
    data: bytearray
    domain: int
    flags: int
    imported: bool = False


def raise_errno(code: int) -> None:
    raise OSError(code, os.strerror(code))


@dataclass
class FakeKernel:
    """`script` holds the outcomes of the coming submits; when it is empty they succeed."""

    script: list[Outcome] = field(default_factory=list)
    room: int = 1 << 32
    ran: list[Ran] = field(default_factory=list)
    buffers: dict[int, Memory] = field(default_factory=dict)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    fds: set[int] = field(default_factory=set)
    resets: int = 0
    live_domain: int = 0
    mapped: int = 0
    refuse: dict[int, int] = field(default_factory=dict)  # request -> errno
    _next: int = 1
    _heap: dict[int, bytearray] = field(default_factory=dict)

    def nodes(self) -> list[str]:
        return ["/dev/dri/card0"]

    def open(self, path: str) -> int:
        self._next += 1
        self.fds.add(self._next)
        self.events.append(("open", path))
        return self._next

    def close(self, fd: int) -> None:
        self.fds.remove(fd)

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        self.mapped += 1
        data = self._heap[fd] if fd in self._heap else self.buffers[offset >> 12].data
        return memoryview(data)[:length]

    def munmap(self, view: memoryview) -> None:
        view.release()
        self.mapped -= 1

    def ioctl(self, fd: int, request: int, arg: Any) -> None:
        assert fd in self.fds
        if code := self.refuse.get(request):
            raise_errno(code)
        {
            uabi.DRM_VERSION: self._version,
            uabi.ACTION: self._action,
            uabi.MEM_CREATE: self._create,
            uabi.MEM_MAP: self._map,
            uabi.MEM_DESTROY: self._destroy,
            uabi.MEM_SYNC: self._sync,
            uabi.SUBMIT: self._submit,
            uabi.DMA_HEAP_ALLOC: self._heap_alloc,
            uabi.DMA_BUF_SYNC: lambda arg: self.events.append(("dma-buf-sync", arg.flags)),
            uabi.PRIME_FD_TO_HANDLE: self._prime,
        }[request](arg)

    def _version(self, arg: Any) -> None:
        ctypes.memmove(arg.name, b"rknpu", 5)
        arg.name_len, arg.desc_len = 5, 0

    def _action(self, arg: Any) -> None:
        self.events.append(("action", arg.flags, arg.value))
        self.resets += arg.flags == uabi.ActionCode.RESET
        if arg.flags == uabi.ActionCode.SET_IOMMU_DOMAIN_ID:
            self.live_domain = arg.value

    def _add(self, size: int, domain: int, flags: int, data: bytearray | None = None) -> Memory:
        if sum(len(b.data) for b in self.buffers.values() if b.domain == domain) + size > self.room:
            raise_errno(errno.EFAULT)
        self._next += 1
        taken = [(b.iova, len(b.data)) for b in self.buffers.values() if b.domain == domain]
        iova = 0x1000
        while any(a < iova + size and iova < a + n for a, n in taken):
            iova = min(a + n for a, n in taken if a + n > iova)
        memory = Memory(self._next, iova, data or bytearray(size), domain, flags, data is not None)
        self.buffers[self._next] = memory
        self.events.append(("create", size, domain, flags, memory.imported))
        return memory

    def _create(self, arg: Any) -> None:
        if arg.handle:
            made = self.buffers[arg.handle]
        else:
            made = self._add(arg.size, arg.iommu_domain_id, arg.flags)
        arg.handle, arg.obj_addr, arg.dma_addr = made.handle, 0xFFFF_0000_0000 + made.handle, made.iova

    def _map(self, arg: Any) -> None:
        arg.offset = arg.handle << 12

    def _destroy(self, arg: Any) -> None:
        self.buffers.pop(arg.handle)

    def _sync(self, arg: Any) -> None:
        memory = self.buffers[arg.obj_addr - 0xFFFF_0000_0000]
        assert not memory.imported
        assert 0 < arg.size <= len(memory.data) - arg.offset
        self.events.append(("sync", arg.flags, memory.handle, arg.offset, arg.size))

    def _heap_alloc(self, arg: Any) -> None:
        arg.fd = self.open("dma-buf")
        self._heap[arg.fd] = bytearray(arg.len)

    def _prime(self, arg: Any) -> None:
        data = self._heap[arg.fd]
        arg.handle = self._add(len(data), self.live_domain, 0, data).handle

    def at(self, domain: int, iova: int, nbytes: int) -> memoryview:
        for b in self.buffers.values():
            if b.domain == domain and b.iova <= iova and iova + nbytes <= b.iova + len(b.data):
                return memoryview(b.data)[iova - b.iova : iova - b.iova + nbytes]
        raise AssertionError(f"{nbytes} bytes at {iova:#x} of domain {domain} are not mapped")

    def _submit(self, arg: Any) -> None:
        core = {1: 0, 2: 1, 4: 2}[arg.core_mask]
        entry = arg.subcore_task[core]
        assert arg.task_number == entry.task_number > 0
        tasks = self.buffers[arg.task_obj_addr - 0xFFFF_0000_0000]
        assert tasks.flags & uabi.MEM_KERNEL_MAPPING
        size = ctypes.sizeof(uabi.Task)
        array = [
            uabi.Task.from_buffer_copy(tasks.data, (entry.task_start + i) * size) for i in range(entry.task_number)
        ]
        run = Ran(arg.core_mask, arg.iommu_domain_id, bool(arg.flags & uabi.JOB_NONBLOCK), [])
        address, amount = array[0].regcmd_addr, isa.fetch_amount(array[0].regcfg_amount)
        for task in array:
            assert task.regcmd_addr == address, "the task list and the chain disagree"
            raw = self.at(run.domain, address, 8 * isa.fetched_words(amount))
            writes = [isa.split(w) for w in np.frombuffer(raw, np.uint64).tolist()]
            values = {offset: value for target, value, offset in writes if target & 1 and target != 0x81}
            assert any(target == isa.ENABLE_TARGET for target, _, _ in writes)
            run.programs.append(values)
            address, amount = values.get(0x10, 0), values.get(0x14, 0)
        assert (address, amount) == (0, 0), "the chain goes on after its last task"
        self.ran.append(run)
        outcome = self.script.pop(0) if self.script else 0
        code = outcome(run) if callable(outcome) else outcome
        if code > 0:
            arg.task_counter = len(array) - 1
            raise_errno(code)
        arg.task_counter = len(array)
        if code == 0:
            self.finish(run)

    def finish(self, run: Ran) -> None:
        """Write zeros to the last element of the last program's rows (int32 or fp32), as if it had run."""
        values = run.programs[-1]
        height, pitch = (values[0x4034] & 0x1FFF), 16 * ((values[0x4038] & 0x1FFF) + 1)
        end = values[0x4020] + height * pitch + 4 * (values[0x3018] + 1)
        self.at(run.domain, end - 4, 4)[:] = bytes(4)


def dropped(run: Ran) -> int:
    """A script entry: a submit without waiting that is accepted and never completes."""
    assert run.nonblock
    return -1
