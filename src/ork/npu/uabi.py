"""The byte layout of the kernel interface: the six `rknpu` ioctls, and the DRM, dma-heap and dma-buf ones around them.

Structures, computed request numbers, flag bits; no behaviour. Layouts are those of the vendor driver 0.9.8 (natural
alignment, little endian, no implicit padding). Directions: *in* is read by the kernel, *out* is written back.
"""

from __future__ import annotations

import ctypes
from ctypes import LittleEndianStructure, c_int32, c_int64, c_uint32, c_uint64
from enum import IntEnum

# --- request numbers --------------------------------------------------------------------------------------------------

IOC_WRITE, IOC_READ = 1, 2
DRM_TYPE = ord("d")  # DRM nodes; driver calls start at 0x40
MISC_TYPE = ord("r")  # /dev/rknpu, the node of a kernel built with the dma-heap option; calls start at 0
DRM_COMMAND_BASE = 0x40


def request(direction: int, kind: int, number: int, size: int) -> int:
    """The ioctl request: direction, bytes of the argument, type byte, number (same on aarch64 and x86-64)."""
    return direction << 30 | size << 16 | kind << 8 | number


def split_request(value: int) -> tuple[int, int, int, int]:
    """Inverse of `request`: (direction, type byte, number, size)."""
    return value >> 30 & 3, value >> 8 & 0xFF, value & 0xFF, value >> 16 & 0x3FFF


# --- the six vendor calls ---------------------------------------------------------------------------------------------


class Action(LittleEndianStructure):
    """Ask or set one thing of the device: `flags` is an `ActionCode`, `value` goes in or comes out."""

    _fields_ = [("flags", c_uint32), ("value", c_uint32)]


class SubcoreTask(LittleEndianStructure):
    """The range of the task array that one core runs."""

    _fields_ = [("task_start", c_uint32), ("task_number", c_uint32)]


class Submit(LittleEndianStructure):
    """Run tasks. Out: `task_counter`, `hw_elapse_time` (ns, blocking only).

    With 1 or 2 cores in the mask core i takes `subcore_task[i]`, with 3 `subcore_task[i + 2]`. `timeout` is in ms.
    """

    _fields_ = [
        ("flags", c_uint32),
        ("timeout", c_uint32),
        ("task_start", c_uint32),
        ("task_number", c_uint32),
        ("task_counter", c_uint32),
        ("priority", c_int32),
        ("task_obj_addr", c_uint64),
        ("iommu_domain_id", c_uint32),
        ("reserved", c_uint32),
        ("task_base_addr", c_uint64),
        ("hw_elapse_time", c_int64),
        ("core_mask", c_uint32),
        ("fence_fd", c_int32),
        ("subcore_task", SubcoreTask * 5),
    ]


class MemCreate(LittleEndianStructure):
    """Allocate, or look up what a PRIME import made (`handle` not 0: everything else is ignored on the way in).

    Out: `handle`, `size` (page-rounded), `obj_addr` (opaque), `dma_addr` (device address), `sram_size` (achieved).
    """

    _fields_ = [
        ("handle", c_uint32),
        ("flags", c_uint32),
        ("size", c_uint64),
        ("obj_addr", c_uint64),
        ("dma_addr", c_uint64),
        ("sram_size", c_uint64),
        ("iommu_domain_id", c_int32),
        ("core_mask", c_uint32),
    ]


class MemMap(LittleEndianStructure):
    """Out: `offset`, what to give to mmap on the node's descriptor."""

    _fields_ = [("handle", c_uint32), ("reserved", c_uint32), ("offset", c_uint64)]


class MemDestroy(LittleEndianStructure):
    """Drop a handle; `obj_addr` is ignored."""

    _fields_ = [("handle", c_uint32), ("reserved", c_uint32), ("obj_addr", c_uint64)]


class MemSync(LittleEndianStructure):
    """Clean (to the device) or invalidate (from it) the CPU's cache lines of a range; by obj_addr, no handle."""

    _fields_ = [
        ("flags", c_uint32),
        ("reserved", c_uint32),
        ("obj_addr", c_uint64),
        ("offset", c_uint64),
        ("size", c_uint64),
    ]


class Task(LittleEndianStructure):
    """One entry of a task array, in device memory with a kernel mapping. 40 bytes.

    The kernel reads `regcmd_addr` and `regcfg_amount` of the first task, `int_mask` of the last, and writes
    `int_status`; the tasks between are reached by the programs' own chain.
    """

    _pack_ = 1
    _fields_ = [
        ("flags", c_uint32),
        ("op_idx", c_uint32),
        ("enable_mask", c_uint32),
        ("int_mask", c_uint32),
        ("int_clear", c_uint32),
        ("int_status", c_uint32),
        ("regcfg_amount", c_uint32),
        ("regcfg_offset", c_uint32),
        ("regcmd_addr", c_uint64),
    ]


VENDOR_CALLS: tuple[tuple[str, int, type[LittleEndianStructure]], ...] = (
    ("ACTION", 0, Action),
    ("SUBMIT", 1, Submit),
    ("MEM_CREATE", 2, MemCreate),
    ("MEM_MAP", 3, MemMap),
    ("MEM_DESTROY", 4, MemDestroy),
    ("MEM_SYNC", 5, MemSync),
)


def drm_request(name: str) -> int:
    """Request number of a vendor call on a DRM node."""
    return _vendor_request(name, DRM_TYPE, DRM_COMMAND_BASE)


def misc_request(name: str) -> int:
    """Request number of a vendor call on the misc node `/dev/rknpu`."""
    return _vendor_request(name, MISC_TYPE, 0)


def _vendor_request(name: str, kind: int, base: int) -> int:
    number, struct = {n: (i, s) for n, i, s in VENDOR_CALLS}[name]
    return request(IOC_READ | IOC_WRITE, kind, base + number, ctypes.sizeof(struct))


ACTION = drm_request("ACTION")
SUBMIT = drm_request("SUBMIT")
MEM_CREATE = drm_request("MEM_CREATE")
MEM_MAP = drm_request("MEM_MAP")
MEM_DESTROY = drm_request("MEM_DESTROY")
MEM_SYNC = drm_request("MEM_SYNC")

# --- DRM core, dma-heap, dma-buf --------------------------------------------------------------------------------------


class DrmVersion(LittleEndianStructure):
    """Driver version and name. The lengths go in as room and come out as lengths; the pointers are user addresses."""

    _fields_ = [
        ("version_major", c_int32),
        ("version_minor", c_int32),
        ("version_patchlevel", c_int32),
        ("reserved", c_uint32),
        ("name_len", c_uint64),
        ("name", c_uint64),
        ("date_len", c_uint64),
        ("date", c_uint64),
        ("desc_len", c_uint64),
        ("desc", c_uint64),
    ]


class GemClose(LittleEndianStructure):
    _fields_ = [("handle", c_uint32), ("pad", c_uint32)]


class PrimeHandle(LittleEndianStructure):
    """Handle to dma-buf descriptor, or back."""

    _fields_ = [("handle", c_uint32), ("flags", c_uint32), ("fd", c_int32)]


class DmaHeapAllocation(LittleEndianStructure):
    """Out: `fd`, a dma-buf of `len` bytes."""

    _fields_ = [("len", c_uint64), ("fd", c_uint32), ("fd_flags", c_uint32), ("heap_flags", c_uint64)]


class DmaBufSync(LittleEndianStructure):
    """Begin or end CPU access to a dma-buf."""

    _fields_ = [("flags", c_uint64)]


DRM_VERSION = request(IOC_READ | IOC_WRITE, DRM_TYPE, 0x00, ctypes.sizeof(DrmVersion))
GEM_CLOSE = request(IOC_WRITE, DRM_TYPE, 0x09, ctypes.sizeof(GemClose))
PRIME_HANDLE_TO_FD = request(IOC_READ | IOC_WRITE, DRM_TYPE, 0x2D, ctypes.sizeof(PrimeHandle))
PRIME_FD_TO_HANDLE = request(IOC_READ | IOC_WRITE, DRM_TYPE, 0x2E, ctypes.sizeof(PrimeHandle))
DMA_HEAP_ALLOC = request(IOC_READ | IOC_WRITE, ord("H"), 0x00, ctypes.sizeof(DmaHeapAllocation))
DMA_BUF_SYNC = request(IOC_WRITE, ord("b"), 0x00, ctypes.sizeof(DmaBufSync))

DMA_HEAP = "/dev/dma_heap/system"

NAMES: dict[int, str] = {drm_request(name): name for name, _, _ in VENDOR_CALLS} | {
    DRM_VERSION: "DRM_VERSION",
    GEM_CLOSE: "GEM_CLOSE",
    PRIME_HANDLE_TO_FD: "PRIME_HANDLE_TO_FD",
    PRIME_FD_TO_HANDLE: "PRIME_FD_TO_HANDLE",
    DMA_HEAP_ALLOC: "DMA_HEAP_ALLOC",
    DMA_BUF_SYNC: "DMA_BUF_SYNC",
}

# --- flag bits --------------------------------------------------------------------------------------------------------

# MEM_CREATE
MEM_NON_CONTIGUOUS = 0x001  # scattered pages; without it contiguous ones, which falls back to scattered behind an IOMMU
MEM_CACHEABLE = 0x002  # cached CPU mapping; only these accept MEM_SYNC
MEM_WRITE_COMBINE = 0x004  # ignored when cacheable
MEM_KERNEL_MAPPING = 0x008  # the kernel reads it too: task arrays
MEM_IOMMU = 0x010  # declared, not consulted
MEM_ZEROING = 0x020
MEM_SECURE = 0x040
MEM_DMA32 = 0x080  # physical pages below 4 GiB
MEM_TRY_ALLOC_SRAM = 0x100  # as much on-chip SRAM as there is, the rest DRAM; never on a kernel-mapped buffer
MEM_TRY_ALLOC_NBUF = 0x200  # no such pool on RK3588
MEM_EXACT_IOVA = 0x400  # exactly the page-rounded size of address space, no power-of-two alignment

BUFFER = MEM_NON_CONTIGUOUS | MEM_CACHEABLE | MEM_EXACT_IOVA  # 0x403: programs, weights, rows, results
TASK_ARRAY = BUFFER | MEM_KERNEL_MAPPING  # 0x40b

# MEM_SYNC
SYNC_TO_DEVICE = 1
SYNC_FROM_DEVICE = 2

# DMA_BUF_SYNC
DMA_BUF_SYNC_READ = 1
DMA_BUF_SYNC_WRITE = 2
DMA_BUF_SYNC_START = 0
DMA_BUF_SYNC_END = 4

# SUBMIT
JOB_PC = 0x01  # programs come from memory; without it EINVAL
JOB_NONBLOCK = 0x02
JOB_PINGPONG = 0x04
JOB_FENCE_IN = 0x08  # fences are not built into the vendor's kernels: EINVAL
JOB_FENCE_OUT = 0x10

# interrupt bits as the last task's int_mask names them
INT_DPU = 0x300
INT_PPU = 0xC00
INT_CLEAR_ALL = 0x1FFFF


class ActionCode(IntEnum):
    GET_HW_VERSION = 0
    GET_DRV_VERSION = 1  # major * 10000 + minor * 100 + patch
    GET_FREQ = 2  # Hz
    SET_FREQ = 3  # EINVAL
    GET_VOLT = 4
    SET_VOLT = 5  # EINVAL
    RESET = 6  # of the whole device
    GET_BW_PRIORITY = 7  # 7..12: EINVAL on RK3588, which has no priority block
    SET_BW_PRIORITY = 8
    GET_BW_EXPECT = 9
    SET_BW_EXPECT = 10
    GET_BW_TW = 11
    SET_BW_TW = 12
    CLR_TOTAL_RW_AMOUNT = 13  # 13..17: RK3588 has no counters, they read 0
    GET_DT_WR_AMOUNT = 14
    GET_DT_RD_AMOUNT = 15
    GET_WT_RD_AMOUNT = 16
    GET_TOTAL_RW_AMOUNT = 17
    GET_IOMMU_EN = 18
    SET_PROC_NICE = 19
    POWER_ON = 20  # EINVAL in 0.9.8 and harmless: every call takes its own power reference
    POWER_OFF = 21
    GET_TOTAL_SRAM_SIZE = 22
    GET_FREE_SRAM_SIZE = 23
    GET_IOMMU_DOMAIN_ID = 24
    SET_IOMMU_DOMAIN_ID = 25  # makes a domain live without allocating in it
    RESET_CORE = 0x100  # 0x100..0x102 exist only in patched kernels
    REINIT = 0x101
    SET_DOMAIN = 0x102
