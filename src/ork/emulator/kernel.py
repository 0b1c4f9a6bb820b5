"""A board's operating system as far as an NPU driver sees it: `EmulatedKernel` answers the same calls as Linux there.

Nodes, descriptors, mappings, and what DRM, dma-heap and dma-buf do for every driver; the vendor's own calls are in
`rknpu`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ork.emulator.core import Core
from ork.emulator.faults import Faults
from ork.emulator.files import DmaBuf, DrmFile, File, HeapFile, OtherNode
from ork.emulator.iova import PAGE
from ork.emulator.job import RunsTasks
from ork.emulator.memory import Buffer
from ork.emulator.pages import Pages
from ork.emulator.record import Recorder
from ork.emulator.report import Report
from ork.emulator.rknpu import Rknpu, Stats, oserror
from ork.emulator.trace import Trace
from ork.errors import UsageError
from ork.npu import uabi
from ork.npu.kernel import DRIVER_NAME, Mapped, release
from ork.npu.soc import RK3588, Soc

# On a board the NPU is seldom card0: that is the display's.
NODES = {
    "/dev/dri/card0": "rockchip",
    "/dev/dri/card1": "rknpu",
    "/dev/dri/renderD128": "rockchip",
    "/dev/dri/renderD129": "rknpu",
}
# The dma-heaps of Rockchip's kernels, and whether the CPU caches what they give.
HEAPS = {uabi.DMA_HEAP: True} | {
    f"/dev/dma_heap/{name}": "uncached" not in name
    for name in ("system-uncached", "system-dma32", "system-uncached-dma32", "cma", "cma-uncached")
}
HEAP_LIMIT = 32 << 30  # the largest memory of a board


Call = tuple[Callable[[Any, Any], None], type[ctypes.Structure]]


class EmulatedKernel:
    """One board: its NPU, its kernel driver, its memory. Implements `ork.npu.kernel.Kernel`; safe for threads.

    strict: `report` says what that means. views: `full` keeps the CPU's and the device's memory apart, `sampled` is
    one memory with spot checks. faults: what goes wrong on purpose. recorder, trace: told of every job; the caller
    closes and saves them. cores: for tests, instead of the emulator's own.
    """

    def __init__(
        self,
        soc: Soc = RK3588,
        *,
        strict: bool = True,
        profile: str = "stock",
        views: str = "full",
        engine: str = "fast",
        nodes: dict[str, str] | None = None,
        cores: Sequence[RunsTasks] | None = None,
        faults: Faults | None = None,
        recorder: Recorder | None = None,
        trace: Trace | None = None,
    ) -> None:
        for name, value, known in (
            ("profile", profile, ("stock", "patched")),
            ("views", views, ("full", "sampled")),
            ("engine", engine, ("fast", "literal")),
        ):
            if value not in known:
                raise UsageError(f"emulator: {name} {value!r} is not known: use {' or '.join(known)}")
        self.soc = soc
        self.report = Report(strict)
        self.faults = faults
        if cores is None:
            cores = [Core(index, soc, self.report, engine) for index in range(soc.cores)]
        self.driver = Rknpu(soc, self.report, cores, views=views, patched=profile == "patched", faults=faults)
        self.memory = self.driver.memory
        self._observed(recorder, trace, profile)
        self._lock = self.driver.device.lock
        self._nodes = NODES if nodes is None else nodes
        self._files: dict[int, File] = {}
        self._views: dict[int, tuple[memoryview, Mapped, Buffer | None]] = {}
        self._calls: dict[type, dict[int, Call]] = {
            DrmFile: {
                uabi.ACTION: (self.driver.action, uabi.Action),
                uabi.SUBMIT: (self.driver.submit, uabi.Submit),
                uabi.MEM_CREATE: (self.driver.mem_create, uabi.MemCreate),
                uabi.MEM_MAP: (self.driver.mem_map, uabi.MemMap),
                uabi.MEM_DESTROY: (self.driver.mem_destroy, uabi.MemDestroy),
                uabi.MEM_SYNC: (self.driver.mem_sync, uabi.MemSync),
                uabi.DRM_VERSION: (self._version, uabi.DrmVersion),
                uabi.GEM_CLOSE: (self._gem_close, uabi.GemClose),
                uabi.PRIME_HANDLE_TO_FD: (self._handle_to_fd, uabi.PrimeHandle),
                uabi.PRIME_FD_TO_HANDLE: (self._fd_to_handle, uabi.PrimeHandle),
            },
            OtherNode: {uabi.DRM_VERSION: (self._version, uabi.DrmVersion)},
            HeapFile: {uabi.DMA_HEAP_ALLOC: (self._heap_alloc, uabi.DmaHeapAllocation)},
            DmaBuf: {uabi.DMA_BUF_SYNC: (self._dma_buf_sync, uabi.DmaBufSync)},
        }

    # --- Kernel ---

    def nodes(self) -> list[str]:
        return sorted(self._nodes)

    def open(self, path: str) -> int:
        with self._lock:
            if path in self._nodes:
                driver = self._nodes[path]
                return self._install(DrmFile(path) if driver == DRIVER_NAME else OtherNode(path, driver))
            if path in HEAPS:
                return self._install(HeapFile(HEAPS[path]))
        raise oserror(errno.ENOENT)

    def ioctl(self, fd: int, request: int, arg: ctypes.Structure) -> None:
        file = self.file(fd)
        known = self._calls[type(file)].get(request)
        if known is not None and type(arg) is known[1]:
            known[0](file, arg)
        else:
            self._odd_call(file, request, arg)

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        with self._lock:
            pages, offset, origin = self.mapping(fd, length, offset)
            mapped = (ctypes.c_uint8 * length).from_buffer(pages.memory, offset)
            view = memoryview(mapped).cast("B")
            self._views[id(view)] = (view, weakref.ref(mapped), origin)
            if origin is not None:
                origin.refs += 1
            self.driver.counts.maps += 1
            return view

    def mapping(self, fd: int, length: int, offset: int) -> tuple[Pages, int, Buffer | None]:
        """What a mapping of `length` bytes shows: pages, the offset in them, and the object to count it on. Lock held.

        OSError with the errno of a board.
        """
        file = self.file(fd)
        if length <= 0 or offset % PAGE:
            raise oserror(errno.EINVAL)
        if isinstance(file, DmaBuf):
            if offset < 0 or offset + length > file.pages.size:
                raise oserror(errno.EINVAL)
            return file.pages, offset, file.origin
        if isinstance(file, DrmFile):
            found = self.driver.mapped_object(file, length, offset)
            return found.pages, 0, found
        raise oserror(errno.ENODEV)

    def munmap(self, view: memoryview) -> None:
        key = id(view)
        if key not in self._views:
            raise oserror(errno.EINVAL, "not a mapping")
        _, mapped, origin = self._views[key]
        release(view, mapped)
        with self._lock:
            del self._views[key]
            self.driver.counts.unmaps += 1
            if origin is not None:
                self.driver.drop(origin)

    def close(self, fd: int) -> None:
        with self._lock:
            if fd not in self._files:
                raise oserror(errno.EBADF)
            file = self._files.pop(fd)
            if isinstance(file, DrmFile):
                for handle in sorted(file.handles):
                    self.driver.drop(file.leave(handle))
            elif isinstance(file, DmaBuf) and file.origin is not None:
                self.driver.drop(file.origin)
            idle = not any(isinstance(other, DrmFile) for other in self._files.values())
        if idle:
            self.driver.jobs.stop()

    def _observed(self, recorder: Recorder | None, trace: Trace | None, profile: str) -> None:
        jobs = self.driver.jobs
        jobs.recorder, jobs.trace = recorder, trace
        if recorder is not None:
            recorder.attach(self.soc.name, self.report, profile)
        if trace is not None:
            for slot in jobs.slots:
                if isinstance(slot.core, Core):
                    slot.core.ended = trace.programs_of(slot.core.index)

    # --- what tests and tools ask ---

    @property
    def clock_ns(self) -> int:
        """Simulated time."""
        return self.driver.clock.ns

    @property
    def switch_references(self) -> int:
        """How many need the attached domain right now: 0 when nothing runs and nothing leaked."""
        return self.driver.switch.refs

    @property
    def stats(self) -> Stats:
        """A copy of the counters as they are now."""
        with self._lock:
            return replace(self.driver.stats(), live_files=len(self._files), live_maps=len(self._views))

    # --- handles ---

    def _gem_close(self, file: DrmFile, arg: uabi.GemClose) -> None:
        with self._lock:
            if arg.handle not in file.handles:
                raise oserror(errno.EINVAL)
            self.driver.drop(file.leave(arg.handle))

    # --- imports and exports ---

    def _heap_alloc(self, file: HeapFile, arg: uabi.DmaHeapAllocation) -> None:
        if not arg.len or arg.heap_flags or arg.fd_flags & ~(os.O_CLOEXEC | os.O_ACCMODE):
            raise oserror(errno.EINVAL)
        if arg.len > HEAP_LIMIT:
            raise oserror(errno.ENOMEM)
        try:
            make = self.memory.cached if file.cached else self.memory.uncached
            pages = make(-(-arg.len // PAGE) * PAGE)
        except MemoryError as error:
            raise oserror(errno.ENOMEM) from error
        with self._lock:
            arg.fd = self._install(DmaBuf(pages))

    def _dma_buf_sync(self, file: DmaBuf, arg: uabi.DmaBufSync) -> None:
        flags = arg.flags
        if not flags & 3 or flags & ~7:
            raise oserror(errno.EINVAL)
        if flags & uabi.DMA_BUF_SYNC_END:
            if flags & uabi.DMA_BUF_SYNC_WRITE:
                file.pages.to_device(0, file.pages.size)
        elif flags & uabi.DMA_BUF_SYNC_READ:
            file.pages.from_device(0, file.pages.size)

    def _handle_to_fd(self, file: DrmFile, arg: uabi.PrimeHandle) -> None:
        with self._lock:
            buffer = file.handles.get(arg.handle)
            if buffer is None:
                raise oserror(errno.ENOENT)
            if arg.flags & ~(os.O_CLOEXEC | os.O_RDWR):
                raise oserror(errno.EINVAL)
            buffer.refs += 1
            self.driver.counts.exports += 1
            arg.fd = self._install(DmaBuf(buffer.pages, buffer))

    def _fd_to_handle(self, file: DrmFile, arg: uabi.PrimeHandle) -> None:
        with self._lock:
            source = self._files.get(arg.fd)
            if source is None:
                raise oserror(errno.EBADF)
            if not isinstance(source, DmaBuf):
                raise oserror(errno.EINVAL)
            if source in file.imports:
                arg.handle = file.imports[source]
            elif source.origin is not None:  # our own object comes back as itself
                known = file.by_object.get(source.origin.obj_addr)
                arg.handle = known or file.enter(source.origin)
            else:
                arg.handle = file.imports[source] = file.enter(self.driver.adopt(file, source))
                self.driver.counts.imports += 1

    # --- DRM ---

    def _version(self, file: DrmFile | OtherNode, arg: uabi.DrmVersion) -> None:
        version = self.soc.drv_version
        if isinstance(file, DrmFile):
            texts = (b"rknpu", b"20240828", b"RKNPU driver")
            arg.version_major, arg.version_minor, arg.version_patchlevel = (
                version // 10000,
                version // 100 % 100,
                version % 100,
            )
        else:
            texts = (file.driver.encode(), b"20140818", b"RockChip Soc DRM")
            arg.version_major, arg.version_minor, arg.version_patchlevel = 3, 0, 0
        for name, text in zip(("name", "date", "desc"), texts):
            self.copy_out(getattr(arg, name), text[: getattr(arg, f"{name}_len")])
            setattr(arg, f"{name}_len", len(text))

    def copy_out(self, address: int, data: bytes) -> None:
        """Write to the caller's memory; a caller in another process replaces this."""
        if address and data:
            ctypes.memmove(address, data, len(data))

    def _odd_call(self, file: File, request: int, arg: ctypes.Structure) -> None:
        """A request that is not in the table, or whose structure is not ours.

        DRM takes shorter and longer structures than its own: the missing end is zero on the way in and dropped on the
        way out. Everything else must fit.
        """
        calls = self._calls[type(file)]
        drm = isinstance(file, DrmFile | OtherNode)
        _, kind, number, size = uabi.split_request(request)
        for known in calls:
            _, known_kind, known_number, known_size = uabi.split_request(known)
            if (kind, number) == (known_kind, known_number) and (drm or size == known_size):
                break
        else:
            raise oserror(errno.EINVAL if drm and kind == uabi.DRM_TYPE else errno.ENOTTY)
        call, struct = calls[known]
        whole = struct()
        shared = min(size, known_size, ctypes.sizeof(arg))
        ctypes.memmove(ctypes.addressof(whole), ctypes.addressof(arg), shared)
        try:
            call(file, whole)
        finally:
            ctypes.memmove(ctypes.addressof(arg), ctypes.addressof(whole), shared)

    # --- descriptors ---

    def _install(self, file: File) -> int:
        """The lowest free number from 3 on. Lock held."""
        fd = 3
        while fd in self._files:
            fd += 1
        self._files[fd] = file
        return fd

    def file(self, fd: int) -> File:
        """What a descriptor names. OSError EBADF."""
        file = self._files.get(fd)
        if file is None:
            raise oserror(errno.EBADF)
        return file
