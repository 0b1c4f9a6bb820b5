"""The vendor driver's own calls in software, with the errnos of a board, each checked in the order the driver checks.

What a board does not survive is refused here and reported under the rule's name. Profiles: `stock` is the vendor's
driver, whose imports are recorded in domain 0 wherever they are mapped; `patched` records the right domain and knows
three more actions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ork.emulator.domains import Clock, Device, DomainSwitch
from ork.emulator.faults import Faults, held_back
from ork.emulator.files import DmaBuf, DrmFile
from ork.emulator.iova import PAGE
from ork.emulator.job import Job, Part, RunsTasks
from ork.emulator.jobs import Jobs
from ork.emulator.memory import Buffer, Memory
from ork.emulator.pages import WrongPages
from ork.emulator.report import Report
from ork.npu import uabi
from ork.npu.soc import Soc
from ork.npu.uabi import ActionCode

MAP_OFFSETS = 1 << 32  # DRM's fake offsets start above every file offset
DESTROY_ATTEMPTS = 3  # switches to the buffer's domain before the driver gives up
# Simulated cost of a call in ns (measured on RK3588, middle of the published range).
COST = {"create": 100_000, "destroy": 1_000_000, "sync": 2_000, "submit": 5_000, "blocking": 132_000}

_SUBMIT = struct.Struct("<6IQ2IQqIi10I")
_TASK = struct.Struct("<8IQ")


@dataclass
class Stats:
    """Counts since the kernel was made, and what is alive now."""

    creates: int = 0
    destroys: int = 0  # objects that are gone, however their last reference ended
    imports: int = 0
    exports: int = 0
    maps: int = 0
    unmaps: int = 0
    syncs: int = 0
    synced_bytes: int = 0
    submits: int = 0
    created_bytes: int = 0
    leaked_bytes: int = 0  # address space that only a reboot gives back
    programs: int = 0
    switches: int = 0
    resets: int = 0
    timeouts: int = 0
    live_buffers: int = 0
    live_bytes: int = 0
    live_files: int = 0
    live_maps: int = 0
    sram_free: int = 0
    peak_iova: tuple[int, ...] = ()  # bytes, by domain


def oserror(code: int, text: str = "") -> OSError:
    return OSError(code, text or os.strerror(code))


class Rknpu:
    """The driver of one NPU. Calls come with the file they were made on; safe for threads."""

    def __init__(
        self,
        soc: Soc,
        report: Report,
        cores: Sequence[RunsTasks],
        *,
        views: str,
        patched: bool,
        faults: Faults | None = None,
    ) -> None:
        self.soc, self.report, self.patched, self.faults = soc, report, patched, faults
        self.memory = Memory(soc, report, views)
        self.clock = Clock()
        self.device = Device()
        self.switch = DomainSwitch(soc, self.clock, report, self.device)
        self.jobs = Jobs(soc, self.memory, cores, report, self.clock, self.device, self.switch)
        self.counts = Stats()
        self._nice = 0
        self._creates = 0  # asked for, refused ones too
        self._offsets: dict[int, Buffer] = {}  # by what MEM_MAP gave out
        self._next_offset = MAP_OFFSETS

    def stats(self) -> Stats:
        """The counters as they are now. Lock held."""
        live = self.memory.by_cookie.values()
        return replace(
            self.counts,
            programs=self.jobs.programs,
            resets=self.jobs.resets,
            timeouts=self.jobs.timeouts,
            switches=self.switch.switches,
            leaked_bytes=sum(domain.leaked for domain in self.memory.domains),
            live_buffers=len(live),
            live_bytes=sum(buffer.size for buffer in live),
            sram_free=self.memory.sram_free,
            peak_iova=tuple(domain.space.peak * PAGE for domain in self.memory.domains),
        )

    # --- ACTION ---

    def action(self, file: DrmFile, arg: uabi.Action) -> None:
        code, soc = arg.flags, self.soc
        if code in (ActionCode.SET_IOMMU_DOMAIN_ID, ActionCode.SET_DOMAIN) and (self.patched or code < 0x100):
            with self.device.lock:
                self._enter_domain(arg.value)
                self.switch.put()
        elif code == ActionCode.RESET:
            self.jobs.reset()
        elif code == ActionCode.SET_PROC_NICE:
            self._nice = ctypes.c_int32(arg.value).value
        elif code == ActionCode.RESET_CORE and self.patched and arg.value < soc.cores:
            self.jobs.reset_core(arg.value)
        elif code == ActionCode.REINIT and self.patched:
            self._reinit()
        else:
            answers: dict[int, int] = {
                ActionCode.GET_HW_VERSION: soc.hw_version,
                ActionCode.GET_DRV_VERSION: soc.drv_version,
                ActionCode.GET_FREQ: 1_000_000_000,
                ActionCode.GET_VOLT: 800_000,
                ActionCode.GET_IOMMU_EN: 1,
                ActionCode.GET_TOTAL_SRAM_SIZE: soc.sram_bytes,
                ActionCode.GET_FREE_SRAM_SIZE: self.memory.sram_free,
                ActionCode.GET_IOMMU_DOMAIN_ID: self.switch.current,
            }
            if ActionCode.CLR_TOTAL_RW_AMOUNT <= code <= ActionCode.GET_TOTAL_RW_AMOUNT:
                return  # no counters on this chip: the value stays as it was
            if code not in answers:
                raise oserror(errno.EINVAL)
            arg.value = answers[code]

    def _reinit(self) -> None:
        """Patched kernels: abort jobs, free every domain but 0, forget the references. EBUSY while a job runs."""
        if not self.jobs.drop_all():
            raise oserror(errno.EBUSY)
        with self.device.lock:
            for domain in self.memory.domains[1:]:
                for buffer in domain.buffers:
                    self.memory.unmap(buffer)
                domain.forget()
            self.switch.current = 0

    # --- memory ---

    def _enter_domain(self, number: int) -> None:
        """Attach a domain, or EINVAL for one that does not exist or stays busy. `switch.put` ends it. Lock held."""
        if not 0 <= number < self.soc.domains:
            self.report.add("domain-range", values={"domain": number})
            raise oserror(errno.EINVAL, f"domain {number} of {self.soc.domains}")
        if not self.switch.get(number):
            raise oserror(errno.EINVAL, f"domain {number}: another one is busy")

    def mem_create(self, file: DrmFile, arg: uabi.MemCreate) -> None:
        with self.device.lock:
            if arg.handle:  # look up what an import made; everything else in the request is ignored
                buffer = file.handles.get(arg.handle)
                if buffer is None:
                    raise oserror(errno.EINVAL, f"no handle {arg.handle}")
            else:
                if not arg.size:
                    raise oserror(errno.EINVAL)
                wants_sram = arg.flags & uabi.MEM_TRY_ALLOC_SRAM and arg.sram_size and self.memory.sram_free
                if wants_sram and arg.flags & uabi.MEM_KERNEL_MAPPING:
                    self.report.add("sram-kernel-mapping", values={"flags": arg.flags, "sram_size": arg.sram_size})
                    raise oserror(errno.EINVAL, "on-chip SRAM under a kernel mapping hangs the board")
                self._creates += 1
                for kind, code in (("create-enomem", errno.ENOMEM), ("create-efault", errno.EFAULT)):
                    if self._struck(kind, self._creates):
                        raise oserror(code)
                self._enter_domain(arg.iommu_domain_id)
                try:
                    buffer = self.memory.create(
                        file.next_handle(), arg.size, arg.flags, arg.iommu_domain_id, arg.sram_size
                    )
                finally:
                    self.switch.put()
                file.enter(buffer)
                self.counts.creates += 1
                self.counts.created_bytes += buffer.size
                self.clock.advance(COST["create"])
                arg.sram_size = buffer.sram_bytes
            arg.handle = file.by_object[buffer.obj_addr]
            arg.size = buffer.size
            arg.obj_addr = buffer.obj_addr
            arg.dma_addr = buffer.iova

    def mem_map(self, file: DrmFile, arg: uabi.MemMap) -> None:
        with self.device.lock:
            buffer = file.handles.get(arg.handle)
            if buffer is None:
                raise oserror(errno.ENOENT)
            if buffer.imported:
                raise oserror(errno.EINVAL, "an import is mapped through its own descriptor")
            if not buffer.map_offset:
                buffer.map_offset = self._next_offset
                self._offsets[buffer.map_offset] = buffer
                self._next_offset += buffer.size
            arg.offset = buffer.map_offset

    def mapped_object(self, file: DrmFile, length: int, offset: int) -> Buffer:
        """The object whose fake offset this is. Lock held."""
        buffer = self._offsets.get(offset)
        if buffer is None:
            inside = MAP_OFFSETS <= offset < self._next_offset
            raise oserror(errno.ENXIO if inside else errno.EINVAL)
        if buffer.obj_addr not in file.by_object:
            raise oserror(errno.EACCES)
        if length > buffer.size:
            raise oserror(errno.EINVAL)
        return buffer

    def mem_destroy(self, file: DrmFile, arg: uabi.MemDestroy) -> None:
        with self.device.lock:
            buffer = file.handles.get(arg.handle)
            if buffer is None:
                raise oserror(errno.EINVAL)
            if not any(self.switch.get(buffer.domain) for _ in range(DESTROY_ATTEMPTS)):
                raise oserror(errno.EINVAL, f"domain {buffer.domain}: another one is busy")
            self.drop(file.leave(arg.handle))
            self.switch.put()
            self.clock.advance(COST["destroy"])

    def drop(self, buffer: Buffer) -> None:
        """One reference less; the last one frees the object in the domain it is recorded in. Lock held."""
        buffer.refs -= 1
        if buffer.refs:
            return
        attached = any(self.switch.get(buffer.domain) for _ in range(DESTROY_ATTEMPTS))
        astray = buffer.domain != buffer.mapped_in
        if astray:
            values = {"handle": buffer.handle, "recorded": buffer.domain, "mapped": buffer.mapped_in}
            self.report.add("import-leak", values=values)
        self.memory.remove(buffer, leak=astray or not attached)
        self._offsets.pop(buffer.map_offset, None)
        self.counts.destroys += 1
        if attached:
            self.switch.put()

    def mem_sync(self, file: DrmFile, arg: uabi.MemSync) -> None:
        flags, offset, size = arg.flags, arg.offset, arg.size
        buffer = self.memory.by_cookie.get(arg.obj_addr)
        if buffer is None or not buffer.flags & uabi.MEM_CACHEABLE:
            raise oserror(errno.EINVAL)
        if offset + size > buffer.size:
            self.report.add("sync-range", values={"handle": buffer.handle, "offset": offset, "bytes": size})
            raise oserror(errno.EINVAL, f"{size} bytes at {offset} of a buffer of {buffer.size}")
        switch, pages, stats = self.switch, buffer.pages, self.counts
        with self.device.lock:
            if not switch.get(buffer.domain):
                raise oserror(errno.EINVAL, f"domain {buffer.domain}: another one is busy")
            stats.syncs += 1
            stats.synced_bytes += size
            self.clock.ns += COST["sync"]
            lost = flags == uabi.SYNC_TO_DEVICE and self._struck("stale", stats.submits + 1)
            if lost:
                buffer.pages = held_back(pages, offset, size)
        try:
            if flags & uabi.SYNC_TO_DEVICE and not lost:
                pages.to_device(offset, size)
            if flags & uabi.SYNC_FROM_DEVICE:
                pages.from_device(offset, size)
        finally:
            with self.device.lock:
                switch.put()

    # --- imports ---

    def adopt(self, file: DrmFile, source: DmaBuf) -> Buffer:
        """Map foreign pages into the attached domain, whichever that is. Lock held."""
        size, soc, pages = source.pages.size, self.soc, source.pages
        if size >= soc.import_fail_bytes:
            self.report.add("import-size", values={"bytes": size})
            raise oserror(errno.ENOMEM)
        if size > soc.import_ok_bytes:
            self.report.add("import-size-unproven", values={"bytes": size})
            if self.report.strict:
                raise oserror(errno.ENOMEM, "nobody has shown where between 16 and 64 MiB imports begin to fail")
        domain = self.memory.domains[self.switch.current]
        if domain.number and not domain.natives:
            self.report.add("import-first", values={"domain": domain.number, "bytes": size})
            pages = WrongPages(source.pages)
        recorded = domain.number if self.patched else 0
        return self.memory.adopt(file.next_handle(), pages, domain.number, recorded)

    # --- SUBMIT ---

    def submit(self, file: DrmFile, arg: uabi.Submit) -> None:
        fields = _SUBMIT.unpack_from(arg)
        flags, timeout, _, number, _, _, cookie, domain, _, base, _, mask, _ = fields[:13]
        with self.device.lock:
            self.counts.submits += 1
            if (
                not number
                or mask > self.soc.core_mask
                or not flags & uabi.JOB_PC
                or flags & (uabi.JOB_FENCE_IN | uabi.JOB_FENCE_OUT)
            ):
                raise oserror(errno.EINVAL)
            array = self.memory.by_cookie.get(cookie)
            if array is None:
                raise oserror(errno.EINVAL, "task_obj_addr names no buffer")
            if self._struck("enomem", self.counts.submits):
                raise oserror(errno.ENOMEM)
            if domain >= self.soc.domains:
                self.report.add("domain-range", values={"domain": domain})
                raise oserror(errno.EINVAL)
            blocking = not flags & uabi.JOB_NONBLOCK
            job = self._job(array, fields[13:], mask, blocking)
            job.domain, job.timeout_ms, job.task_base = domain, timeout, base & 0xFFFF_FFF0
            job.number, job.ping_pong = self.counts.submits, bool(flags & uabi.JOB_PINGPONG)
            if self._struck("timeout", job.number):
                job.wedge = errno.ETIMEDOUT
            job.irq_lost = self._struck("irq-lost", job.number)
            self.clock.ns += COST["blocking"] if blocking else COST["submit"]
            if file.render:
                self.report.add("render-node", values={"core_mask": mask})
        try:
            self.jobs.submit(job)
        finally:
            if blocking:
                arg.task_counter = job.tasks
                arg.hw_elapse_time = job.hw_ns

    def _job(self, array: Buffer, ranges: tuple[int, ...], mask: int, blocking: bool) -> Job:
        """The job as the task array describes it: what the driver takes from it at commit. Lock held."""
        cores = [index for index in range(self.soc.cores) if mask >> index & 1] or [self.jobs.least_loaded()]
        shift = 2 if len(cores) == 3 else 0
        wedge, parts = self._mask_rule(mask), []
        if array.imported:
            self.report.add("task-array-import", values={"handle": array.handle})
            wedge = errno.ETIMEDOUT
        elif not array.flags & uabi.MEM_KERNEL_MAPPING:
            self.report.add("task-array-mapping", values={"handle": array.handle, "flags": array.flags})
            raise oserror(errno.EINVAL, "the task array has no kernel mapping")
        limit, memory = self.soc.task_limit, array.pages.memory
        for core in cores:
            start, count = ranges[2 * (core + shift) : 2 * (core + shift) + 2]
            end = start + max(count, 1)
            if end * _TASK.size > array.size:
                self.report.add("task-array-range", values={"start": start, "tasks": count, "bytes": array.size})
                raise oserror(errno.EINVAL)
            if not count:
                self.report.add("subcore-task", values={"core": core, "core_mask": mask})
                wedge = wedge or errno.ETIMEDOUT
            pieces = []
            for first in range(start, end, limit):
                task = _TASK.unpack_from(memory, first * _TASK.size)
                pieces.append((task[8] & 0xFFFF_FFFF, task[6], min(limit, end - first)))
            last = (end - 1) * _TASK.size
            int_mask = _TASK.unpack_from(memory, last)[3]
            parts.append(Part(core, pieces, int_mask, last + uabi.Task.int_status.offset))
        return Job(0, parts, blocking, 0, tasks_in=array, wedge=wedge)

    def _struck(self, kind: str, number: int) -> bool:
        return self.faults is not None and self.faults.strikes(kind, number)

    def _mask_rule(self, mask: int) -> int:
        """Errno with which a job of more than one core ends, 0 if it may run. Lock held."""
        if mask in (0, 1, 2, 4):
            return 0
        if mask == 3:
            self.report.add("core-mask-pair", values={"core_mask": mask})
            return 0
        if mask == 7:
            self.report.add("core-mask", values={"core_mask": mask})
            return errno.ETIMEDOUT if self.report.strict else 0
        self.report.add("core-mask-stuck", values={"core_mask": mask})
        return errno.EINVAL
