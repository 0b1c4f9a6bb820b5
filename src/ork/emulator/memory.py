"""Device memory: buffers, the IOMMU domains they are mapped in, on-chip SRAM.

`Memory` is the whole device's. A `Buffer` is mapped into one `Domain`, whose `locate`, `read`, `write` and address
functions are what the cores see: addresses are 32-bit device addresses, an access outside every buffer raises
`IommuFault`, and a read of bytes that the CPU wrote and did not sync is reported as `missing-sync`.
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
from dataclasses import dataclass, field

import numpy as np

from ork.emulator.iova import PAGE, IovaSpace
from ork.emulator.pages import VIEWS, Allocate, Bytes, CoherentPages, Pages, anonymous
from ork.emulator.report import Report
from ork.npu import uabi
from ork.npu.soc import Soc


class IommuFault(Exception):
    """An access to an address that no buffer of the domain is mapped at."""

    def __init__(self, iova: int, nbytes: int, domain: int) -> None:
        super().__init__(f"no buffer at {iova:#010x} (access of {nbytes} bytes, domain {domain})")
        self.iova, self.nbytes, self.domain = iova, nbytes, domain


@dataclass(eq=False)
class Buffer:
    """One kernel object. `domain` is what the driver recorded, `mapped_in` where its pages really are."""

    handle: int  # of the file that made it; for messages
    size: int
    flags: int
    domain: int
    mapped_in: int
    iova: int
    obj_addr: int
    pages: Pages
    imported: bool = False
    sram_bytes: int = 0
    refs: int = 0  # handles, mappings, exports
    map_offset: int = 0  # what mmap is given, once asked for
    mapped: bool = True
    cpu: Bytes = field(init=False)
    dev: Bytes = field(init=False)
    dev_address: int = field(init=False)  # host address of `dev[0]`

    def __post_init__(self) -> None:
        self.cpu, self.dev, self.dev_address = self.pages.cpu, self.pages.dev, self.pages.dev_address

    def __str__(self) -> str:
        kind = "import" if self.imported else f"flags {self.flags:#x}"
        return f"buffer {self.handle} ({kind}, {self.size} bytes at {self.iova:#010x}, domain {self.mapped_in})"


@dataclass
class Access:
    """What one job touched, kept for the thread that runs it."""

    imports: set[int] = field(default_factory=set)
    stale: int = 0


class Domain:
    """The address space of one IOMMU domain."""

    def __init__(self, number: int, soc: Soc, memory: Memory) -> None:
        self.number = number
        self._pages = (soc.iova_bytes // PAGE, soc.iova_reserved // PAGE)
        self._memory = memory
        self.forget()
        # Replaced as one object, never changed: cores look addresses up while other threads map and unmap.
        self._table: tuple[list[int], list[Buffer]] = ([], [])

    def forget(self) -> None:
        """Start with an empty page table, leaks and peak forgotten; nothing may be mapped."""
        self.space = IovaSpace(*self._pages)
        self.leaked = 0  # bytes of address space that are taken for good

    @property
    def buffers(self) -> list[Buffer]:
        """Mapped buffers by ascending address."""
        return list(self._table[1])

    @property
    def natives(self) -> int:
        """Buffers made by MEM_CREATE, not imported."""
        return sum(not buffer.imported for buffer in self._table[1])

    # --- mapping (under the kernel's lock) ---

    def map(self, size: int, *, exact: bool) -> int:
        """Take address space for `size` bytes; 0 when there is none. `exact`: no alignment beyond a page."""
        pages = -(-size // PAGE)
        return self.space.allocate(pages, 1 if exact else 1 << (pages - 1).bit_length()) * PAGE

    def attach(self, buffer: Buffer) -> None:
        """Make the buffer visible at its address."""
        starts, buffers = self._table
        at = bisect.bisect_left(starts, buffer.iova)
        self._table = (
            [*starts[:at], buffer.iova, *starts[at:]],
            [*buffers[:at], buffer, *buffers[at:]],
        )

    def detach(self, buffer: Buffer, *, release: bool = True) -> None:
        """Take the buffer's pages away; with `release=False` its address space leaks, as in the stock driver."""
        starts, buffers = self._table
        at = bisect.bisect_left(starts, buffer.iova)
        self._table = (starts[:at] + starts[at + 1 :], buffers[:at] + buffers[at + 1 :])
        if release:
            self.space.free(buffer.iova // PAGE, buffer.size // PAGE)
        else:
            self.leaked += buffer.size

    # --- the device's accesses ---

    def locate(self, iova: int, nbytes: int) -> tuple[Buffer, int]:
        """The buffer at `iova` and the offset in it.

        Every byte of the range is mapped, or IommuFault is raised; the range may go on into the buffers above
        (`offset + nbytes > buffer.size`).
        """
        starts, buffers = self._table
        at = bisect.bisect_right(starts, iova) - 1
        if at < 0 or nbytes < 0:
            raise IommuFault(iova, nbytes, self.number)
        buffer = buffers[at]
        offset = iova - starts[at]
        end = offset + nbytes
        if offset >= buffer.size:
            raise IommuFault(iova, nbytes, self.number)
        reach = buffer.size
        while end > reach:  # neighbours without a gap
            at += 1
            if at == len(starts) or starts[at] != buffer.iova + reach:
                raise IommuFault(buffer.iova + reach, end - reach, self.number)
            reach += buffers[at].size
        if buffer.imported:
            self._memory.touched(buffer)
        return buffer, offset

    def read(self, iova: int, nbytes: int) -> Bytes:
        """uint8[nbytes] as the device sees them: a view where one buffer holds all, else a copy. Don't write to it."""
        buffer, offset = self.locate(iova, nbytes)
        if offset + nbytes <= buffer.size:
            if buffer.pages.stale(offset, nbytes):
                self._memory.report_stale(buffer, offset, nbytes)
            view: Bytes = buffer.dev[offset : offset + nbytes]
            return view
        joined: Bytes = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            buffer, offset = self.locate(iova + done, 1)
            part = min(nbytes - done, buffer.size - offset)
            joined[done : done + part] = self.read(iova + done, part)
            done += part
        return joined

    def read_rows(self, iova: int, rows: int, row_bytes: int, pitch: int) -> Bytes:
        """uint8[rows, row_bytes]: row i starts at `iova + i * pitch`. A view where one buffer holds all."""
        span = (rows - 1) * pitch + row_bytes
        buffer, offset = self.locate(iova, span)
        if offset + span <= buffer.size:
            if buffer.pages.stale(offset, row_bytes, rows, pitch):
                self._memory.report_stale(buffer, offset, span)
            view: Bytes = np.ndarray((rows, row_bytes), np.uint8, buffer.dev, offset, (pitch, 1))
            return view
        return np.array([self.read(iova + row * pitch, row_bytes) for row in range(rows)], np.uint8)

    def read_address(self, iova: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> int:
        """Host address of the device's bytes at `iova`, for kernels that take pointers; 0 if they span buffers.

        Checked as `read_rows`. The memory stays valid until the job that asked has ended.
        """
        span = (rows - 1) * pitch + row_bytes
        buffer, offset = self.locate(iova, span)
        if offset + span > buffer.size:
            return 0
        if buffer.pages.stale(offset, row_bytes, rows, pitch):
            self._memory.report_stale(buffer, offset, span)
        return buffer.dev_address + offset

    def write_address(self, iova: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> int:
        """Host address where the device may write these rows; 0 if they span buffers (use `write`)."""
        span = (rows - 1) * pitch + row_bytes
        buffer, offset = self.locate(iova, span)
        if offset + span > buffer.size:
            return 0
        if buffer.pages.overwrites(offset, row_bytes, rows, pitch):
            self._memory.report_overwrite(buffer, offset, span)
        return buffer.dev_address + offset

    def write_view(self, iova: int, nbytes: int) -> Bytes:
        """uint8[nbytes] of the device's memory, to be written. ValueError if the range spans buffers: use `write`."""
        buffer, offset = self.locate(iova, nbytes)
        if offset + nbytes > buffer.size:
            raise ValueError(f"{nbytes} bytes at {iova:#010x} span buffers")
        if buffer.pages.overwrites(offset, nbytes):
            self._memory.report_overwrite(buffer, offset, nbytes)
        return buffer.dev[offset : offset + nbytes]

    def write(self, iova: int, data: Bytes) -> None:
        """Write uint8 data, over several buffers if they touch."""
        self.locate(iova, len(data))  # all or nothing
        done = 0
        while done < len(data):
            buffer, offset = self.locate(iova + done, 1)
            part = min(len(data) - done, buffer.size - offset)
            self.write_view(iova + done, part)[:] = data[done : done + part]
            done += part


class Memory:
    """Every domain and buffer of the device."""

    def __init__(self, soc: Soc, report: Report, views: str = "full") -> None:
        self.soc = soc
        self.report = report
        self.views = views
        self.allocate: Allocate = anonymous  # of the CPU's view; replaced where that is another process
        self.domains = [Domain(number, soc, self) for number in range(soc.domains)]
        self.sram_free = soc.sram_bytes
        self.by_cookie: dict[int, Buffer] = {}
        self._made = 0
        self._access: dict[int, Access] = {}
        self._epoch = 0
        self._running: list[int] = []  # epochs of jobs under way
        self._limbo: list[tuple[int, Pages]] = []

    def cached(self, size: int) -> Pages:
        """Fresh memory that the CPU caches. MemoryError when the host has none."""
        return VIEWS[self.views](size, self.allocate)

    def uncached(self, size: int) -> Pages:
        """Fresh memory that it does not. MemoryError likewise."""
        return CoherentPages(size, self.allocate)

    # --- making and freeing (under the kernel's lock) ---

    def create(self, handle: int, size: int, flags: int, domain: int, sram_size: int = 0) -> Buffer:
        """A new buffer of `size` bytes, rounded up to pages, mapped into `domain`.

        OSError EINVAL for size 0, EFAULT when the domain has no address space, ENOMEM when the host has no memory.
        """
        if size == 0:
            raise OSError(errno.EINVAL, "a buffer of 0 bytes")
        size = -(-size // PAGE) * PAGE
        if size >= self.soc.iova_bytes:
            raise OSError(errno.EFAULT, "no address space")
        space = self.domains[domain]
        iova = space.map(size, exact=bool(flags & uabi.MEM_EXACT_IOVA))
        if not iova:
            raise OSError(errno.EFAULT, "no address space")
        try:
            pages = (self.cached if flags & uabi.MEM_CACHEABLE else self.uncached)(size)
        except MemoryError as error:
            space.space.free(iova // PAGE, size // PAGE)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
        sram = 0
        if flags & uabi.MEM_TRY_ALLOC_SRAM:
            sram = min(size, self.sram_free, -(-sram_size // PAGE) * PAGE)
            self.sram_free -= sram
        buffer = Buffer(handle, size, flags, domain, domain, iova, self._cookie(), pages, sram_bytes=sram)
        self._enter(buffer)
        return buffer

    def adopt(self, handle: int, pages: Pages, mapped_in: int, recorded: int) -> Buffer:
        """Map foreign pages (an import). OSError ENOMEM when the domain has no address space."""
        iova = self.domains[mapped_in].map(pages.size, exact=True)
        if not iova:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        buffer = Buffer(handle, pages.size, 0, recorded, mapped_in, iova, self._cookie(), pages, imported=True)
        self._enter(buffer)
        return buffer

    def remove(self, buffer: Buffer, *, leak: bool = False) -> None:
        """Forget a buffer; with `leak` its address space stays taken, as after an unmap from the wrong domain."""
        self.unmap(buffer, leak=leak)
        del self.by_cookie[buffer.obj_addr]
        self.sram_free += buffer.sram_bytes
        if self._running:
            self._limbo.append((self._epoch, buffer.pages))

    def unmap(self, buffer: Buffer, *, leak: bool = False) -> None:
        """Take the buffer out of its domain, once."""
        if buffer.mapped:
            buffer.mapped = False
            self.domains[buffer.mapped_in].detach(buffer, release=not leak)

    def _enter(self, buffer: Buffer) -> None:
        self.by_cookie[buffer.obj_addr] = buffer
        self.domains[buffer.mapped_in].attach(buffer)

    def _cookie(self) -> int:
        # Looks like the kernel pointer it is on a board, and means nothing.
        self._made += 1
        return 0xFFFF_FF80_0000_0000 + 0x400 * self._made

    # --- freed pages outlive the jobs that were running: a core may hold their address (under the lock) ---

    def start_epoch(self) -> int:
        """A job begins; give the number to `end_epoch`."""
        self._epoch += 1
        self._running.append(self._epoch)
        return self._epoch

    def end_epoch(self, epoch: int) -> None:
        self._running.remove(epoch)
        if self._limbo:
            oldest = min(self._running, default=self._epoch + 1)
            self._limbo = [entry for entry in self._limbo if entry[0] >= oldest]

    @property
    def limbo(self) -> int:
        """Freed buffers that wait for jobs to end."""
        return len(self._limbo)

    # --- what a job touched ---

    def begin_access(self) -> Access:
        """Start a record of this thread's device accesses."""
        access = self._access[threading.get_ident()] = Access()
        return access

    def end_access(self) -> None:
        self._access.pop(threading.get_ident(), None)

    def touched(self, buffer: Buffer) -> None:
        access = self._access.get(threading.get_ident())
        if access is not None:
            access.imports.add(buffer.obj_addr)

    def report_stale(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        access = self._access.get(threading.get_ident())
        if access is not None:
            access.stale += 1
        self.report.add(
            "missing-sync",
            values={"handle": buffer.handle, "offset": offset, "bytes": nbytes},
            text=f"the device reads bytes {offset}..{offset + nbytes} of {buffer}, in which the CPU wrote "
            "without MEM_SYNC to the device since",
        )

    def report_overwrite(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        self.report.add(
            "dirty-output",
            values={"handle": buffer.handle, "offset": offset, "bytes": nbytes},
            text=f"the device writes bytes {offset}..{offset + nbytes} of {buffer} under dirty CPU lines, "
            "which may be evicted on top of the result; MEM_SYNC to the device first",
        )
