"""Recording on any kernel, a board's too: every blocking submit with the memory of its domain, before and after.

What a board wrote can so be replayed on the emulated chip and compared byte by byte. Nothing is known of what a job
touches, so all mapped buffers are kept; equal pages are stored once. All buffers are cleaned and invalidated around a
submit, which hides a missing MEM_SYNC.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from dataclasses import dataclass
from pathlib import Path

from ork.emulator.iova import PAGE
from ork.emulator.orktrace import Head, Part, Piece, Recorded, Reset, Writer
from ork.npu import uabi
from ork.npu.kernel import Kernel
from ork.npu.soc import RK3588, Soc
from ork.npu.uabi import ActionCode


@dataclass
class _Mapped:
    """A kernel object that the program made; `view` once it is mapped."""

    iova: int
    size: int
    domain: int
    cookie: int
    cached: bool
    view: memoryview | None = None
    dma_buf: int = -1  # its descriptor, for an import


class CapturingKernel:
    """Passes every call on to `inner` and writes submits to `path`; `close_recording` ends the file.

    NONBLOCK submits, whose end the kernel does not tell, are passed on and counted in `skipped`. One thread.
    """

    def __init__(self, inner: Kernel, path: Path, soc: Soc = RK3588) -> None:
        self.inner, self.soc = inner, soc
        self.submits = self.skipped = 0
        self._writer = Writer(path, Head(soc=soc.name, strict=True, profile="captured"))
        self._objects: dict[tuple[int, int], _Mapped] = {}  # by descriptor and handle
        self._offsets: dict[tuple[int, int], _Mapped] = {}  # by descriptor and what MEM_MAP gave out
        self._imports: dict[tuple[int, int], int] = {}  # descriptor and handle -> dma-buf
        self._dma_bufs: dict[int, memoryview] = {}
        self._domain = 0  # the attached one, into which imports go

    # --- Kernel ---

    def nodes(self) -> list[str]:
        return self.inner.nodes()

    def open(self, path: str) -> int:
        return self.inner.open(path)

    def ioctl(self, fd: int, request: int, arg: ctypes.Structure) -> None:
        if isinstance(arg, uabi.Submit):
            self._submit(fd, request, arg)
            return
        self.inner.ioctl(fd, request, arg)
        if isinstance(arg, uabi.MemCreate):
            self._created(fd, arg)
        elif isinstance(arg, uabi.MemMap):
            self._offsets[fd, arg.offset] = self._objects[fd, arg.handle]
        elif isinstance(arg, uabi.MemDestroy | uabi.GemClose):
            self._forget(fd, arg.handle)
        elif isinstance(arg, uabi.PrimeHandle) and request == uabi.PRIME_FD_TO_HANDLE:
            self._imports[fd, arg.handle] = arg.fd
        elif isinstance(arg, uabi.Action):
            if arg.flags in (ActionCode.SET_IOMMU_DOMAIN_ID, ActionCode.SET_DOMAIN):
                self._domain = arg.value
            elif arg.flags == ActionCode.RESET:
                self._reset()

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        view = self.inner.mmap(fd, length, offset)
        if (fd, offset) in self._offsets:
            self._offsets[fd, offset].view = view
        else:
            self._dma_bufs[fd] = view
        return view

    def munmap(self, view: memoryview) -> None:
        for made in self._objects.values():
            if made.view is view:
                made.view = None
        self._dma_bufs = {fd: kept for fd, kept in self._dma_bufs.items() if kept is not view}
        self.inner.munmap(view)

    def close(self, fd: int) -> None:
        self.inner.close(fd)
        for key in [key for key in self._objects if key[0] == fd]:
            self._forget(*key)

    def close_recording(self) -> None:
        self._writer.close()

    # --- what the program has ---

    def _created(self, fd: int, arg: uabi.MemCreate) -> None:
        dma_buf = self._imports.get((fd, arg.handle), -1)
        domain = arg.iommu_domain_id if dma_buf < 0 else self._domain
        self._objects[fd, arg.handle] = _Mapped(
            arg.dma_addr,
            -(-arg.size // PAGE) * PAGE,
            domain,
            arg.obj_addr,
            bool(arg.flags & uabi.MEM_CACHEABLE),
            self._dma_bufs.get(dma_buf),
            dma_buf,
        )

    def _forget(self, fd: int, handle: int) -> None:
        gone = self._objects.pop((fd, handle), None)
        self._imports.pop((fd, handle), None)
        self._offsets = {key: made for key, made in self._offsets.items() if made is not gone}

    def _pages(self, fd: int, domain: int) -> dict[int, bytes]:
        """All pages of a domain that the program has mapped, as the device has them."""
        pages: dict[int, bytes] = {}
        for made in self._objects.values():
            if made.domain != domain or made.view is None:
                continue
            self._settle(fd, made)
            first = made.iova // PAGE
            for i in range(len(made.view) // PAGE):
                pages[first + i] = bytes(made.view[i * PAGE : (i + 1) * PAGE])
        return pages

    def _settle(self, fd: int, made: _Mapped) -> None:
        """Nothing in the caches that memory does not have, nor the other way round."""
        both = uabi.SYNC_TO_DEVICE | uabi.SYNC_FROM_DEVICE
        if made.dma_buf >= 0:
            for edge in (uabi.DMA_BUF_SYNC_START, uabi.DMA_BUF_SYNC_END):
                flags = edge | uabi.DMA_BUF_SYNC_READ | uabi.DMA_BUF_SYNC_WRITE
                self.inner.ioctl(made.dma_buf, uabi.DMA_BUF_SYNC, uabi.DmaBufSync(flags=flags))
        elif made.cached:
            sync = uabi.MemSync(flags=both, obj_addr=made.cookie, offset=0, size=made.size)
            self.inner.ioctl(fd, uabi.MEM_SYNC, sync)

    # --- submits ---

    def _submit(self, fd: int, request: int, arg: uabi.Submit) -> None:
        if arg.flags & uabi.JOB_NONBLOCK:
            self.skipped += 1
            self.inner.ioctl(fd, request, arg)
            return
        self.submits += 1
        number, domain = self.submits, arg.iommu_domain_id
        parts = self._parts(arg)
        before = self._pages(fd, domain)
        error = 0
        try:
            self.inner.ioctl(fd, request, arg)
        except OSError as failure:
            error = failure.errno or errno.EIO
            raise
        finally:
            if parts:
                after = self._pages(fd, domain)
                self._write(number, arg, parts, error, before, after)
            if error == errno.ETIMEDOUT:
                self._reset()

    def _write(
        self,
        number: int,
        arg: uabi.Submit,
        parts: list[Part],
        error: int,
        before: dict[int, bytes],
        after: dict[int, bytes],
    ) -> None:
        buffers = sorted(
            {(m.iova, m.size) for m in self._objects.values() if m.domain == arg.iommu_domain_id and m.view is not None}
        )
        changed = {page: data for page, data in after.items() if before.get(page) != data}
        for page in self._written_by_kernel(arg):
            changed.pop(page, None)
        self._writer.add(
            Recorded(
                number=number,
                domain=arg.iommu_domain_id,
                timeout_ms=arg.timeout,
                blocking=True,
                task_base=arg.task_base_addr & 0xFFFF_FFF0,
                parts=parts,
                ran=True,
                tasks=arg.task_counter,
                hw_ns=max(arg.hw_elapse_time, 0),
                error=error,
                rules=None,
                buffers=buffers,
                before=self._writer.runs(before),
                after=self._writer.runs(changed),
                ping_pong=bool(arg.flags & uabi.JOB_PINGPONG),
            )
        )

    def _array(self, arg: uabi.Submit) -> _Mapped | None:
        return next((m for m in self._objects.values() if m.cookie == arg.task_obj_addr and m.view is not None), None)

    def _written_by_kernel(self, arg: uabi.Submit) -> range:
        """Pages of the task array: the driver writes int_status there, no core does."""
        array = self._array(arg)
        return range(array.iova // PAGE, (array.iova + array.size) // PAGE) if array else range(0)

    def _parts(self, arg: uabi.Submit) -> list[Part]:
        """The shares of the cores, as the driver will take them from the task array; empty if it will refuse them."""
        array = self._array(arg)
        cores = [core for core in range(self.soc.cores) if (arg.core_mask or 1) >> core & 1]
        shift = 2 if len(cores) == 3 else 0
        if array is None or array.view is None or any(core + shift >= 5 for core in cores):
            return []
        size = ctypes.sizeof(uabi.Task)
        parts: list[Part] = []
        for core in cores:
            entry = arg.subcore_task[core + shift]
            start, end = entry.task_start, entry.task_start + entry.task_number
            if not entry.task_number or end * size > len(array.view):
                return []
            tasks = [uabi.Task.from_buffer_copy(array.view, i * size) for i in range(start, end)]
            pieces = [
                Piece(
                    tasks[i].regcmd_addr & 0xFFFF_FFFF, tasks[i].regcfg_amount, min(self.soc.task_limit, len(tasks) - i)
                )
                for i in range(0, len(tasks), self.soc.task_limit)
            ]
            parts.append(Part(core, pieces, tasks[-1].int_mask, tasks[-1].int_mask))
        return parts

    def _reset(self) -> None:
        with contextlib.suppress(ValueError):  # the recording is closed
            for core in range(self.soc.cores):
                self._writer.add(Reset(core))
