"""Memory that the NPU sees: buffers of the driver, buffers imported from a dma-heap, cache syncs, freeing.

Device addresses are 32 bit per IOMMU domain. A domain that is filled to its end makes the kernel reset the NPU, which
spoils the next one too (measured), so the address space in use is counted here and an allocation that would come near
the end is refused before the kernel is asked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ork.errors import NpuError
from ork.npu import uabi
from ork.npu.kernel import Kernel
from ork.npu.soc import Soc

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

IOVA_CEILING = 3900 << 20  # bytes per domain, of the 4160 MiB or so that fit (measured)
ANCHOR_BYTES = 64 << 10


class AllocationFailed(NpuError):
    """No buffer of that size; `errno` is the kernel's answer, or ENOSPC if the driver refused before asking."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.errno = code


class DmaBuffer:
    """Bytes at device address `iova` of `domain`, seen by the CPU through `view` and `array`.

    The CPU's view is cached: what it wrote reaches the device with `sync_to_device`, what the device wrote is read
    after `sync_from_device`. A buffer that the device writes must hold no lines the CPU has written and not synced.
    """

    __slots__ = (
        "_array",
        "_memory",
        "_sync",
        "domain",
        "fd",
        "flags",
        "fresh",
        "handle",
        "iova",
        "obj_addr",
        "size",
        "sram_bytes",
        "view",
    )

    def __init__(self, memory: DmaMemory, made: uabi.MemCreate, size: int, domain: int, view: memoryview, fd: int):
        self._memory = memory
        self._array: npt.NDArray[np.uint8] | None = None
        self._sync = uabi.MemSync(obj_addr=made.obj_addr)
        self.handle: int = made.handle
        self.flags: int = made.flags
        self.iova: int = made.dma_addr
        self.obj_addr: int = made.obj_addr
        self.sram_bytes: int = made.sram_size
        self.size = size
        self.domain = domain
        self.view = view
        self.fd = fd  # of the dma-buf, or -1
        self.fresh = True  # the device has written nothing here yet

    @property
    def imported(self) -> bool:
        return self.fd >= 0

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The CPU's view as u8[size]. No array made of it may outlive the buffer."""
        import numpy as np

        if self._array is None:
            self._array = np.frombuffer(self.view, np.uint8)
        return self._array

    @property
    def in_use(self) -> bool:
        """Whether an array made of `array` is alive: each keeps a reference to it, whatever it was sliced from."""
        return self._array is not None and sys.getrefcount(self._array) > 2

    def sync_to_device(self, offset: int = 0, size: int | None = None) -> None:
        """Everything the CPU wrote to the range (default: to the end) is visible to the device afterwards."""
        self.sync(uabi.SYNC_TO_DEVICE, offset, size)

    def sync_from_device(self, offset: int = 0, size: int | None = None) -> None:
        """The CPU reads what the device wrote to the range (default: to the end) afterwards."""
        self.sync(uabi.SYNC_FROM_DEVICE, offset, size)

    def sync(self, flags: int, offset: int = 0, size: int | None = None) -> None:
        """`sync_to_device`, `sync_from_device` or, with both flags, both. NpuError for a range outside the buffer."""
        size = self.size - offset if size is None else size
        if offset < 0 or size <= 0 or offset + size > self.size:
            raise NpuError(f"sync of {size} bytes at {offset} of a buffer of {self.size} bytes: outside")
        if self.fd >= 0:  # an import accepts no MEM_SYNC; its dma-buf is synced whole
            self._memory.sync_import(self.fd, flags)
            return
        arg = self._sync
        arg.flags, arg.offset, arg.size = flags, offset, size
        self._memory.sync(arg)

    @contextmanager
    def fill(self, offset: int = 0, size: int | None = None) -> Iterator[memoryview]:
        """The bytes to write, which are visible to the device when the block ends."""
        size = self.size - offset if size is None else size
        if self.fd >= 0:
            self._memory.begin_import(self.fd, uabi.SYNC_TO_DEVICE)
        with self.view[offset : offset + size] as part:
            yield part
        if self.fd >= 0:
            self._memory.end_import(self.fd, uabi.SYNC_TO_DEVICE)
        else:
            self.sync_to_device(offset, size)

    def free(self) -> None:
        """Give the memory back. NpuError while an array made of it is alive; nothing happens the second time."""
        self._memory.free(self)

    def __repr__(self) -> str:
        kind = "import" if self.imported else "buffer"
        return f"<{kind} of {self.size} bytes at {self.iova:#x} in domain {self.domain}>"


class DmaMemory:
    """All buffers of one open node. `mapped[d]` is the address space in use in domain d, in bytes."""

    def __init__(self, kernel: Kernel, fd: int, soc: Soc, iova_ceiling: int = IOVA_CEILING) -> None:
        self._kernel, self._fd, self._soc = kernel, fd, soc
        self.ceiling = iova_ceiling  # bytes that are mapped in a domain at most
        self._anchors: dict[int, DmaBuffer] = {}
        self._buf_sync = uabi.DmaBufSync()
        self.buffers: dict[int, DmaBuffer] = {}  # by handle
        self.mapped: dict[int, int] = {}

    def allocate(self, nbytes: int, *, domain: int, flags: int, sram: bool) -> DmaBuffer:
        """A buffer of at least `nbytes` (whole pages). AllocationFailed, or NpuError for what must not be asked."""
        size = self._reserve(nbytes, domain)
        if sram:
            if flags & uabi.MEM_KERNEL_MAPPING:
                raise NpuError("on-chip SRAM for a buffer with a kernel mapping hangs the board: ask for one of both")
            flags |= uabi.MEM_TRY_ALLOC_SRAM
        made = uabi.MemCreate(flags=flags, size=size, iommu_domain_id=domain, sram_size=size if sram else 0)
        with self._explained(size, domain):
            self._kernel.ioctl(self._fd, uabi.MEM_CREATE, made)
        try:
            place = uabi.MemMap(handle=made.handle)
            with self._explained(size, domain):
                self._kernel.ioctl(self._fd, uabi.MEM_MAP, place)
                view = self._kernel.mmap(self._fd, size, place.offset)
        except BaseException:
            self._destroy(made.handle)
            raise
        made.flags = flags
        buffer = self._keep(DmaBuffer(self, made, size, domain, view, -1))
        if flags & uabi.MEM_CACHEABLE:
            buffer.sync(uabi.SYNC_TO_DEVICE | uabi.SYNC_FROM_DEVICE)  # fresh pages may have lines in the cache
        return buffer

    def import_buffer(self, nbytes: int, *, domain: int, unproven: bool = False) -> DmaBuffer:
        """A buffer of at least `nbytes` from a dma-heap. Larger than 16 MiB is known to fail somewhere below 64 MiB.

        On a stock kernel an import in another domain than 0 leaks its address space when it is freed, until reboot.
        """
        if nbytes > self._soc.import_ok_bytes and not unproven:
            limit = self._soc.import_ok_bytes >> 20
            raise NpuError(f"an import of {nbytes} bytes: more than {limit} MiB may fail, import chunks of {limit} MiB")
        size = self._reserve(nbytes, domain)
        self._renew_anchor(domain)
        path = os.environ.get("ORK_DMA_HEAP", uabi.DMA_HEAP)
        got = uabi.DmaHeapAllocation(len=size, fd_flags=os.O_RDWR | os.O_CLOEXEC)
        with self._explained(size, domain):
            heap = self._kernel.open(path)
            try:
                self._kernel.ioctl(heap, uabi.DMA_HEAP_ALLOC, got)
            finally:
                self._kernel.close(heap)
        view: memoryview | None = None
        try:
            with self._explained(size, domain):
                view = self._kernel.mmap(got.fd, size, 0)
                # the import is mapped into whatever domain is live
                live = uabi.Action(flags=uabi.ActionCode.SET_IOMMU_DOMAIN_ID, value=domain)
                self._kernel.ioctl(self._fd, uabi.ACTION, live)
                prime = uabi.PrimeHandle(fd=got.fd)
                self._kernel.ioctl(self._fd, uabi.PRIME_FD_TO_HANDLE, prime)
                made = uabi.MemCreate(handle=prime.handle)
                try:
                    self._kernel.ioctl(self._fd, uabi.MEM_CREATE, made)
                except OSError:
                    self._destroy(prime.handle)
                    raise
        except BaseException:
            if view is not None:
                self._kernel.munmap(view)
            self._kernel.close(got.fd)
            raise
        return self._keep(DmaBuffer(self, made, size, domain, view, got.fd))

    def free(self, buffer: DmaBuffer) -> None:
        if self.buffers.get(buffer.handle) is not buffer:
            return
        if buffer.in_use:
            raise NpuError(f"{buffer!r} cannot be freed: an array made of it is still in use")
        buffer._array = None
        self._kernel.munmap(buffer.view)
        self._forget(buffer)

    def free_all(self) -> None:
        """Free every buffer, domain by domain. Memory that arrays still use stays mapped: it is lost, not dangerous."""
        for buffer in sorted(self.buffers.values(), key=lambda b: b.domain):
            if not buffer.in_use:
                buffer._array = None
                self._kernel.munmap(buffer.view)
            self._forget(buffer)
        self._anchors.clear()

    def sync(self, arg: uabi.MemSync) -> None:
        self._kernel.ioctl(self._fd, uabi.MEM_SYNC, arg)

    def sync_import(self, fd: int, flags: int) -> None:
        self.begin_import(fd, flags)
        self.end_import(fd, flags)

    def begin_import(self, fd: int, flags: int) -> None:
        self._access(fd, uabi.DMA_BUF_SYNC_START, flags)

    def end_import(self, fd: int, flags: int) -> None:
        self._access(fd, uabi.DMA_BUF_SYNC_END, flags)

    def _access(self, fd: int, edge: int, flags: int) -> None:
        write = uabi.DMA_BUF_SYNC_WRITE if flags & uabi.SYNC_TO_DEVICE else 0
        read = uabi.DMA_BUF_SYNC_READ if flags & uabi.SYNC_FROM_DEVICE else 0
        self._buf_sync.flags = edge | write | read
        self._kernel.ioctl(fd, uabi.DMA_BUF_SYNC, self._buf_sync)

    def _renew_anchor(self, domain: int) -> None:
        """The first buffer of a domain must not be an import, or products are silently wrong; where weights were int4
        even a second import was, without a native buffer made just before it (measured)."""
        if not domain:
            return
        if old := self._anchors.pop(domain, None):
            self.free(old)
        self._anchors[domain] = self.allocate(ANCHOR_BYTES, domain=domain, flags=uabi.BUFFER, sram=False)

    def _reserve(self, nbytes: int, domain: int) -> int:
        soc = self._soc
        if not 0 <= domain < soc.domains:
            raise NpuError(f"IOMMU domain {domain}: {soc.name} has 0 to {soc.domains - 1}")
        if nbytes <= 0:
            raise NpuError(f"a buffer of {nbytes} bytes: give a positive size")
        size = -(-nbytes // soc.page) * soc.page
        used = self.mapped.get(domain, 0)
        if used + size > self.ceiling:
            raise AllocationFailed(
                f"{size} bytes do not fit domain {domain}: {used} of {self.ceiling} bytes are in use", errno.ENOSPC
            )
        return size

    def _keep(self, buffer: DmaBuffer) -> DmaBuffer:
        self.buffers[buffer.handle] = buffer
        self.mapped[buffer.domain] = self.mapped.get(buffer.domain, 0) + buffer.size
        return buffer

    def _forget(self, buffer: DmaBuffer) -> None:
        del self.buffers[buffer.handle]
        self.mapped[buffer.domain] -= buffer.size
        self._destroy(buffer.handle)
        if buffer.fd >= 0:
            self._kernel.close(buffer.fd)

    def _destroy(self, handle: int) -> None:
        with contextlib.suppress(OSError):  # EINVAL after a failed domain switch: closing the node frees it
            self._kernel.ioctl(self._fd, uabi.MEM_DESTROY, uabi.MemDestroy(handle=handle))

    @contextmanager
    def _explained(self, size: int, domain: int) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            code = e.errno or 0
            why = {
                errno.EFAULT: "the address space of the domain is full",
                errno.ENOMEM: "no memory, or no room in the domain's address space for an import",
                errno.EINVAL: "refused: the domain is in use by a job that does not end, or full of imports",
                errno.ENOENT: f"no dma-heap at {e.filename}: set ORK_DMA_HEAP",
            }.get(code, e.strerror)
            used = self.mapped.get(domain, 0)
            raise AllocationFailed(
                f"{size} bytes in domain {domain}, where {used} are in use: {why} (errno {code})", code
            ) from e
