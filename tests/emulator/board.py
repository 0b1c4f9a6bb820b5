"""A bare client of the ioctls on the emulated kernel, and cores that do what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ork.emulator.kernel import EmulatedKernel
from ork.npu import uabi
from ork.npu.kernel import find_node


@dataclass
class Ended:
    """An outcome as a core gives it."""

    tasks: int = 1
    int_status: int = 0x100
    hang: str | None = None
    hw_ns: int = 1000
    refused: bool = False


@dataclass
class ScriptedCore:
    """Runs `act(domain, address, count)` if there is one, else completes every task."""

    act: Callable[[Any, int, int], Ended | None] | None = None
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)  # domain, address, amount, tasks
    resets: int = 0

    def run(self, domain, address, amount, task_number, task_base=0, limit_ns=None, *, ping_pong=False):  # type: ignore[no-untyped-def]
        self.runs.append((domain.number, address, amount, task_number))
        outcome = self.act(domain, address, task_number) if self.act else None
        return outcome or Ended(tasks=task_number)

    def reset(self) -> None:
        self.resets += 1


HANG = Ended(tasks=0, int_status=0, hang="the test says so")


@dataclass
class Made:
    """A buffer of the board."""

    handle: int
    size: int
    obj_addr: int
    iova: int
    sram: int
    view: memoryview | None = None

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.view, np.uint8)


class Board:
    """One process's use of the NPU. `error(...)` gives the errno of a call that should fail, 0 if it does not."""

    def __init__(self, kernel: EmulatedKernel | None = None, **options: Any) -> None:
        self.cores = [ScriptedCore() for _ in range(3)]
        options.setdefault("cores", self.cores)
        self.kernel = kernel or EmulatedKernel(**options)
        self.path, self.fd = find_node(self.kernel)

    def call(self, request: int, fd: int | None = None, **fields: Any) -> Any:
        name = uabi.NAMES[request]
        structs = {name: struct for name, _, struct in uabi.VENDOR_CALLS} | {
            "DRM_VERSION": uabi.DrmVersion,
            "GEM_CLOSE": uabi.GemClose,
            "PRIME_HANDLE_TO_FD": uabi.PrimeHandle,
            "PRIME_FD_TO_HANDLE": uabi.PrimeHandle,
            "DMA_HEAP_ALLOC": uabi.DmaHeapAllocation,
            "DMA_BUF_SYNC": uabi.DmaBufSync,
        }
        arg = structs[name](**fields)
        self.kernel.ioctl(self.fd if fd is None else fd, request, arg)
        return arg

    def action(self, code: int, value: int = 0) -> int:
        return int(self.call(uabi.ACTION, flags=code, value=value).value)

    def create(self, size: int, flags: int = uabi.BUFFER, domain: int = 0, sram: int = 0, mapped: bool = False) -> Made:
        arg = self.call(uabi.MEM_CREATE, size=size, flags=flags, iommu_domain_id=domain, sram_size=sram)
        made = Made(arg.handle, arg.size, arg.obj_addr, arg.dma_addr, arg.sram_size)
        if mapped:
            self.map(made)
        return made

    def map(self, made: Made) -> np.ndarray:
        offset = self.call(uabi.MEM_MAP, handle=made.handle).offset
        made.view = self.kernel.mmap(self.fd, made.size, offset)
        return made.array

    def unmap(self, made: Made) -> None:
        assert made.view is not None
        self.kernel.munmap(made.view)
        made.view = None

    def destroy(self, made: Made) -> None:
        self.call(uabi.MEM_DESTROY, handle=made.handle)

    def sync(self, made: Made, flags: int, offset: int = 0, size: int | None = None) -> None:
        size = made.size - offset if size is None else size
        self.call(uabi.MEM_SYNC, flags=flags, obj_addr=made.obj_addr, offset=offset, size=size)

    def heap(self, size: int) -> int:
        """A dma-buf descriptor."""
        fd = self.kernel.open(uabi.DMA_HEAP)
        try:
            return int(self.call(uabi.DMA_HEAP_ALLOC, fd, len=size).fd)
        finally:
            self.kernel.close(fd)

    def adopt(self, dma_buf: int) -> Made:
        """Import a dma-buf into the attached domain."""
        arg = uabi.PrimeHandle(fd=dma_buf)  # its field has the name of `call`'s parameter
        self.kernel.ioctl(self.fd, uabi.PRIME_FD_TO_HANDLE, arg)
        handle = arg.handle
        made = self.call(uabi.MEM_CREATE, handle=handle)
        return Made(handle, made.size, made.obj_addr, made.dma_addr, 0)

    def tasks(self, count: int = 1, domain: int = 0, int_mask: int = uabi.INT_DPU, **flags: int) -> Made:
        """A mapped task array of `count` tasks, number i at address 0x1000 * (i + 1), amount 100 + i."""
        made = self.create(max(4096, count * 40), flags.get("flags", uabi.TASK_ARRAY), domain, mapped=True)
        array = (uabi.Task * count).from_buffer(made.view)
        for number in range(count):
            array[number].int_mask = int_mask
            array[number].regcmd_addr = 0x1000 * (number + 1)
            array[number].regcfg_amount = 100 + number
        del array
        return made

    def submit(self, made: Made, tasks: int = 1, core: int = 0, **fields: Any) -> uabi.Submit:
        fields = {
            "flags": uabi.JOB_PC,
            "timeout": 6000,
            "task_number": tasks,
            "task_obj_addr": made.obj_addr,
            "core_mask": 1 << core,
            "fence_fd": -1,
        } | fields
        arg = uabi.Submit(**fields)
        for index in range(5):
            arg.subcore_task[index].task_number = tasks
        self.kernel.ioctl(self.fd, uabi.SUBMIT, arg)
        return arg

    def close(self) -> None:
        self.kernel.close(self.fd)


def error(call: Callable[[], Any]) -> int:
    """Errno of a call, 0 if it succeeds."""
    try:
        call()
    except OSError as failure:
        return failure.errno or -1
    return 0


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start `call` in a thread; its result or exception ends up in the list."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as failure:
            result.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
