"""The emulated kernel's memory calls: errnos, references, imports, SRAM, domains. Jobs are in test_jobs."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import pytest

from ork.emulator.kernel import EmulatedKernel
from ork.errors import UsageError
from ork.npu import uabi
from ork.npu.kernel import Kernel, driver_version
from ork.npu.soc import RK3576, RK3588
from ork.npu.uabi import ActionCode
from tests.emulator.board import Board, error

MIB = 1 << 20


@pytest.fixture
def board() -> Board:
    return Board()


def live(board: Board) -> tuple[int, int, int]:
    stats = board.kernel.stats
    return stats.live_buffers, stats.live_maps, stats.live_files


# --- nodes, descriptors, requests ---


def test_it_is_a_kernel_with_the_npu_beside_a_display() -> None:
    kernel: Kernel = EmulatedKernel(cores=[])
    board = Board(kernel)  # type: ignore[arg-type]
    assert (board.path, kernel.nodes()[0]) == ("/dev/dri/card1", "/dev/dri/card0")
    found = driver_version(kernel, board.fd)
    assert (found.name, found.version, found.description) == ("rknpu", (0, 9, 8), "RKNPU driver")
    display = kernel.open("/dev/dri/card0")
    assert driver_version(kernel, display).name == "rockchip"
    assert error(lambda: board.call(uabi.ACTION, display)) == errno.EINVAL


def test_options_are_checked() -> None:
    for options in ({"profile": "new"}, {"views": "none"}, {"engine": "slow"}):
        with pytest.raises(UsageError, match="is not known: use"):
            EmulatedKernel(**options)  # type: ignore[arg-type]


def test_descriptors(board: Board) -> None:
    assert error(lambda: board.kernel.open("/dev/dri/card7")) == errno.ENOENT
    assert error(lambda: board.call(uabi.ACTION, 99)) == errno.EBADF
    assert error(lambda: board.kernel.close(99)) == errno.EBADF
    heap = board.kernel.open(uabi.DMA_HEAP)
    assert error(lambda: board.call(uabi.ACTION, heap)) == errno.ENOTTY
    assert error(lambda: board.kernel.mmap(heap, 4096, 0)) == errno.ENODEV
    assert error(lambda: board.kernel.ioctl(board.fd, 0xC0086479, uabi.Action())) == errno.EINVAL
    assert error(lambda: board.kernel.ioctl(board.fd, uabi.misc_request("ACTION"), uabi.Action())) == errno.ENOTTY
    assert error(lambda: board.kernel.ioctl(board.fd, uabi.DMA_HEAP_ALLOC, uabi.DmaHeapAllocation())) == errno.ENOTTY
    board.close()
    assert error(lambda: board.action(ActionCode.GET_DRV_VERSION)) == errno.EBADF


def test_drm_takes_structures_of_other_sizes(board: Board) -> None:
    """A program of an older driver has 40 bytes of MEM_CREATE, without the domain."""

    class Old(ctypes.LittleEndianStructure):
        _fields_ = uabi.MemCreate._fields_[:6]

    arg = Old(size=5000, flags=uabi.BUFFER)
    board.kernel.ioctl(board.fd, 0xC0286442, arg)
    assert (arg.handle, arg.size, arg.dma_addr) == (1, 8192, 0xFFFFE000)
    assert arg.obj_addr in board.kernel.memory.by_cookie

    class New(ctypes.LittleEndianStructure):
        _fields_ = [*uabi.MemCreate._fields_, ("more", ctypes.c_uint64)]

    arg = New(size=4096, flags=uabi.BUFFER, iommu_domain_id=2, more=7)
    board.kernel.ioctl(board.fd, 0xC0386442, arg)
    assert (arg.handle, arg.dma_addr, arg.more) == (2, 0xFFFFF000, 7)


# --- actions ---


def test_what_the_device_says(board: Board) -> None:
    assert board.action(ActionCode.GET_HW_VERSION) == 0x46495245
    assert board.action(ActionCode.GET_DRV_VERSION) == 908
    assert board.action(ActionCode.GET_IOMMU_EN) == 1
    assert board.action(ActionCode.GET_FREQ) > 0
    assert board.action(ActionCode.GET_VOLT) > 0
    assert board.action(ActionCode.GET_TOTAL_SRAM_SIZE) == 956 * 1024
    assert board.action(ActionCode.SET_PROC_NICE, 2**32 - 19) == 2**32 - 19
    for code in range(ActionCode.CLR_TOTAL_RW_AMOUNT, ActionCode.GET_TOTAL_RW_AMOUNT + 1):
        assert board.action(code, 5) == 5  # no counters


@pytest.mark.parametrize("code", [3, 5, 7, 8, 9, 10, 11, 12, 20, 21, 26, 99, 0x100, 0x101, 0x102, 0x103])
def test_actions_the_stock_driver_does_not_have(board: Board, code: int) -> None:
    assert error(lambda: board.action(code)) == errno.EINVAL


def test_domains_become_live(board: Board) -> None:
    assert board.action(ActionCode.GET_IOMMU_DOMAIN_ID) == 0
    board.action(ActionCode.SET_IOMMU_DOMAIN_ID, 15)
    assert board.action(ActionCode.GET_IOMMU_DOMAIN_ID) == 15
    assert error(lambda: board.action(ActionCode.SET_IOMMU_DOMAIN_ID, 16)) == errno.EINVAL
    assert board.kernel.report.counts["domain-range"] == 1
    assert board.action(ActionCode.GET_IOMMU_DOMAIN_ID) == 15
    assert board.kernel.stats.switches == 1


def test_the_patched_driver_has_three_more() -> None:
    board = Board(profile="patched")
    board.action(ActionCode.SET_DOMAIN, 3)
    assert board.action(ActionCode.GET_IOMMU_DOMAIN_ID) == 3
    board.action(ActionCode.RESET_CORE, 1)
    assert [core.resets for core in board.cores] == [0, 1, 0]
    assert error(lambda: board.action(ActionCode.RESET_CORE, 3)) == errno.EINVAL
    stays, goes = board.create(4096), board.create(4096, domain=3)
    board.action(ActionCode.REINIT)
    assert board.action(ActionCode.GET_IOMMU_DOMAIN_ID) == 0
    domains = board.kernel.memory.domains
    assert [len(domains[n].buffers) for n in (0, 3)] == [1, 0]
    board.destroy(goes)
    board.destroy(stays)
    assert live(board)[0] == 0
    assert all(domain.space.used == 0 for domain in domains)


# --- MEM_CREATE, MEM_MAP, mmap, MEM_DESTROY ---


def test_create(board: Board) -> None:
    made = board.create(100, domain=7)
    assert (made.handle, made.size, made.iova) == (1, 4096, 0xFFFFF000)
    assert made.obj_addr >> 63
    assert board.create(4096).handle == 2
    board.destroy(made)
    assert board.create(4096).handle == 1  # the lowest free one


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"size": 0}, errno.EINVAL),
        ({"size": 4096, "iommu_domain_id": 16}, errno.EINVAL),
        ({"size": 4096, "iommu_domain_id": -1}, errno.EINVAL),
        ({"handle": 5}, errno.EINVAL),
        ({"size": 1 << 32}, errno.EFAULT),
        ({"size": (1 << 64) - 1}, errno.EFAULT),
    ],
)
def test_create_refused(board: Board, fields: dict[str, int], code: int) -> None:
    assert error(lambda: board.call(uabi.MEM_CREATE, flags=uabi.BUFFER, **fields)) == code
    assert live(board)[0] == 0


def test_63_buffers_of_64_mib_in_each_of_16_domains() -> None:
    board = Board(views="sampled")
    for domain in (0, 15):
        for _ in range(63):
            board.create(64 * MIB, domain=domain)
        assert error(lambda: board.create(64 * MIB, domain=domain)) == errno.EFAULT  # noqa: B023
    assert board.kernel.stats.peak_iova[15] == 63 * 64 * MIB
    board.close()
    assert live(board) == (0, 0, 0)
    assert board.kernel.stats.destroys == 126


def test_a_mapping_is_the_buffers_memory(board: Board) -> None:
    made = board.create(8192)
    array = board.map(made)
    array[5000] = 7
    assert board.kernel.memory.by_cookie[made.obj_addr].cpu[5000] == 7
    offset = board.call(uabi.MEM_MAP, handle=made.handle).offset
    assert offset == board.call(uabi.MEM_MAP, handle=made.handle).offset >= 1 << 32
    second = board.kernel.mmap(board.fd, 100, offset)
    assert len(second) == 100


def test_mapping_refused(board: Board) -> None:
    made, other = board.create(8192), board.create(4096)
    offset = board.call(uabi.MEM_MAP, handle=made.handle).offset
    assert error(lambda: board.call(uabi.MEM_MAP, handle=9)) == errno.ENOENT
    kernel, fd = board.kernel, board.fd
    assert error(lambda: kernel.mmap(fd, 8193, offset)) == errno.EINVAL
    assert error(lambda: kernel.mmap(fd, 4096, offset + 4096)) == errno.ENXIO
    assert error(lambda: kernel.mmap(fd, 4096, offset + 100)) == errno.EINVAL
    assert error(lambda: kernel.mmap(fd, 0, offset)) == errno.EINVAL
    assert error(lambda: kernel.mmap(fd, 4096, 0)) == errno.EINVAL
    stranger = Board(kernel)
    assert error(lambda: kernel.mmap(stranger.fd, 4096, offset)) == errno.EACCES
    assert error(lambda: kernel.munmap(memoryview(b""))) == errno.EINVAL
    assert error(lambda: board.destroy(other)) == 0
    assert error(lambda: board.destroy(other)) == errno.EINVAL
    assert error(lambda: board.call(uabi.GEM_CLOSE, handle=9)) == errno.EINVAL


def test_a_mapping_in_use_does_not_end(board: Board) -> None:
    made = board.create(4096)
    array = board.map(made)
    assert made.view is not None
    with pytest.raises(BufferError):
        board.kernel.munmap(made.view)
    array[:] = 3
    del array
    board.unmap(made)
    assert live(board)[1] == 0


def test_a_buffer_lives_until_its_last_reference(board: Board) -> None:
    made = board.create(4096, mapped=True)
    fd = board.call(uabi.PRIME_HANDLE_TO_FD, handle=made.handle, flags=os.O_CLOEXEC | os.O_RDWR).fd
    domain = board.kernel.memory.domains[0]
    board.destroy(made)
    assert error(lambda: board.destroy(made)) == errno.EINVAL
    assert domain.read(made.iova, 1)[0] == 0  # mapped and exported
    board.unmap(made)
    assert live(board)[0] == 1
    view = board.kernel.mmap(fd, 4096, 0)
    board.kernel.close(fd)
    assert live(board)[0] == 1
    board.kernel.munmap(view)
    assert live(board)[0] == 0
    assert domain.space.used == 0


def test_closing_frees_all(board: Board) -> None:
    before = board.kernel.stats
    for domain in range(4):
        board.create(MIB, domain=domain)
        board.adopt(board.heap(MIB))
    kept = board.create(MIB, mapped=True)
    board.close()
    assert live(board) == (1, 1, 4)  # the mapped one, and four descriptors of dma-bufs
    board.unmap(kept)
    stats = board.kernel.stats
    assert (stats.live_buffers, stats.live_bytes) == (0, 0)
    assert stats.creates + stats.imports == stats.destroys == 9
    assert before.creates == 0


# --- MEM_SYNC ---


def test_sync_moves_bytes_between_the_views(board: Board) -> None:
    made = board.create(8192)
    array = board.map(made)
    device = board.kernel.memory.by_cookie[made.obj_addr].dev
    array[:] = 5
    board.sync(made, uabi.SYNC_TO_DEVICE, 4096, 64)
    assert (device[4096], device[4160]) == (5, 0)
    device[:] = 9
    board.sync(made, uabi.SYNC_TO_DEVICE | uabi.SYNC_FROM_DEVICE, 4160, 64)
    assert (array[4160], device[4160]) == (5, 5)  # the CPU's dirty line won
    board.sync(made, uabi.SYNC_FROM_DEVICE, 4096, 64)
    assert array[4096] == 9
    assert board.kernel.stats.synced_bytes == 192


def test_sync_refused(board: Board) -> None:
    made, plain = board.create(8192), board.create(4096, uabi.BUFFER & ~uabi.MEM_CACHEABLE)
    imported = board.adopt(board.heap(4096))
    assert error(lambda: board.sync(plain, 1)) == errno.EINVAL
    assert error(lambda: board.sync(imported, 1)) == errno.EINVAL
    assert error(lambda: board.call(uabi.MEM_SYNC, flags=1, obj_addr=0, size=64)) == errno.EINVAL
    assert error(lambda: board.call(uabi.MEM_SYNC, flags=1, obj_addr=12345, size=64)) == errno.EINVAL
    assert error(lambda: board.sync(made, 1, 8192, 1)) == errno.EINVAL
    assert error(lambda: board.sync(made, 1, (1 << 64) - 1, 1)) == errno.EINVAL
    assert board.kernel.report.counts["sync-range"] == 2
    board.destroy(made)
    assert error(lambda: board.sync(made, 1)) == errno.EINVAL


# --- SRAM ---


def test_sram_is_given_until_it_is_gone(board: Board) -> None:
    flags = uabi.BUFFER | uabi.MEM_TRY_ALLOC_SRAM
    assert board.create(MIB, sram=MIB).sram == 0  # not asked for
    first = board.create(512 * 1024, flags, sram=300 * 1024)
    assert first.sram == 300 * 1024
    second = board.create(2 * MIB, flags, sram=2 * MIB)
    assert (second.sram, second.size) == (656 * 1024, 2 * MIB)  # the rest is DRAM, in one range
    assert board.create(4096, flags, sram=4096).sram == 0
    assert board.action(ActionCode.GET_FREE_SRAM_SIZE) == 0
    board.kernel.memory.domains[0].read(second.iova, 2 * MIB)
    board.destroy(first)
    assert board.action(ActionCode.GET_FREE_SRAM_SIZE) == 300 * 1024
    board.close()
    assert board.kernel.stats.sram_free == RK3588.sram_bytes


def test_sram_under_a_kernel_mapping_is_named(board: Board) -> None:
    flags = uabi.TASK_ARRAY | uabi.MEM_TRY_ALLOC_SRAM
    assert error(lambda: board.create(4096, flags, sram=4096)) == errno.EINVAL
    assert board.kernel.report.counts == {"sram-kernel-mapping": 1}
    assert board.kernel.stats.sram_free == RK3588.sram_bytes


# --- dma-heap, imports ---


def test_heap(board: Board) -> None:
    heap = board.kernel.open(uabi.DMA_HEAP)
    made = board.call(uabi.DMA_HEAP_ALLOC, heap, len=5000)
    view = board.kernel.mmap(made.fd, 8192, 0)
    assert not np.frombuffer(view, np.uint8).any()
    assert error(lambda: board.kernel.mmap(made.fd, 8193, 0)) == errno.EINVAL
    assert error(lambda: board.kernel.mmap(made.fd, 8192, 4096)) == errno.EINVAL
    assert error(lambda: board.call(uabi.DMA_HEAP_ALLOC, heap, len=0)) == errno.EINVAL
    assert error(lambda: board.call(uabi.DMA_HEAP_ALLOC, heap, len=4096, heap_flags=1)) == errno.EINVAL
    assert error(lambda: board.call(uabi.DMA_HEAP_ALLOC, heap, len=1 << 60)) == errno.ENOMEM
    assert error(lambda: board.call(uabi.DMA_BUF_SYNC, made.fd, flags=0)) == errno.EINVAL
    assert error(lambda: board.call(uabi.DMA_BUF_SYNC, made.fd, flags=8 | uabi.DMA_BUF_SYNC_WRITE)) == errno.EINVAL
    assert error(lambda: board.call(uabi.DMA_BUF_SYNC, heap, flags=2)) == errno.ENOTTY


def test_an_import_is_its_dma_buf(board: Board) -> None:
    fd = board.heap(MIB)
    view = board.kernel.mmap(fd, MIB, 0)
    made = board.adopt(fd)
    assert (made.size, made.iova) == (MIB, 0xFFF00000)
    assert board.adopt(fd).handle == made.handle  # once per file
    array = np.frombuffer(view, np.uint8)
    array[:] = 7
    domain = board.kernel.memory.domains[0]
    assert domain.read(made.iova, 1)[0] == 0
    assert board.kernel.report.counts["missing-sync"] == 1
    board.call(uabi.DMA_BUF_SYNC, fd, flags=uabi.DMA_BUF_SYNC_END | uabi.DMA_BUF_SYNC_WRITE)
    assert domain.read(made.iova, MIB).min() == 7
    domain.write(made.iova, np.full(64, 9, np.uint8))
    assert array[0] == 7
    board.call(uabi.DMA_BUF_SYNC, fd, flags=uabi.DMA_BUF_SYNC_START | uabi.DMA_BUF_SYNC_READ)
    assert array[0] == 9
    assert error(lambda: board.call(uabi.MEM_MAP, handle=made.handle)) == errno.EINVAL
    board.destroy(made)
    assert live(board)[0] == 0
    assert array[0] == 9


def test_our_own_export_comes_back_as_itself(board: Board) -> None:
    made = board.create(4096)
    fd = board.call(uabi.PRIME_HANDLE_TO_FD, handle=made.handle).fd
    assert board.adopt(fd).obj_addr == made.obj_addr
    other = Board(board.kernel)
    adopted = other.adopt(fd)
    assert adopted.obj_addr == made.obj_addr
    board.close()
    other.kernel.close(fd)
    assert other.kernel.stats.live_buffers == 1
    other.close()
    assert other.kernel.stats.live_buffers == 0


def test_import_refused(board: Board) -> None:
    heap = board.kernel.open(uabi.DMA_HEAP)
    for fd, code in ((99, errno.EBADF), (heap, errno.EINVAL), (board.fd, errno.EINVAL)):
        with pytest.raises(OSError) as failure:
            board.adopt(fd)
        assert failure.value.errno == code
    assert error(lambda: board.call(uabi.PRIME_HANDLE_TO_FD, handle=9)) == errno.ENOENT
    made = board.create(4096)
    assert error(lambda: board.call(uabi.PRIME_HANDLE_TO_FD, handle=made.handle, flags=4)) == errno.EINVAL


@pytest.mark.parametrize(
    ("size", "strict", "code", "rule"),
    [
        (16 * MIB, True, 0, None),
        (16 * MIB + 1, True, errno.ENOMEM, "import-size-unproven"),
        (16 * MIB + 1, False, 0, "import-size-unproven"),
        (64 * MIB - 1, True, errno.ENOMEM, "import-size"),  # rounded up to pages
        (64 * MIB, False, errno.ENOMEM, "import-size"),
    ],
)
def test_import_sizes(size: int, strict: bool, code: int, rule: str | None) -> None:
    board = Board(strict=strict)
    fd = board.heap(size)
    assert error(lambda: board.adopt(fd)) == code
    assert list(board.kernel.report.counts) == ([rule] if rule else [])


def imported_into(board: Board, domain: int) -> int:
    """Create an anchor, import, destroy all; address space still taken afterwards."""
    anchor = board.create(65536, domain=domain)
    made = board.adopt(board.heap(MIB))
    assert board.kernel.memory.by_cookie[made.obj_addr].mapped_in == domain
    board.destroy(made)
    board.destroy(anchor)
    return board.kernel.memory.domains[domain].space.used * 4096


def test_the_stock_driver_leaks_imports_outside_domain_0() -> None:
    board = Board()
    assert imported_into(board, 0) == 0
    assert imported_into(board, 5) == MIB
    assert board.kernel.stats.leaked_bytes == MIB
    assert board.kernel.report.counts == {"import-leak": 1}
    assert live(board)[0] == 0


def test_the_patched_driver_does_not() -> None:
    board = Board(profile="patched")
    assert imported_into(board, 5) == 0
    assert board.kernel.stats.leaked_bytes == 0
    assert not board.kernel.report.violations


@pytest.mark.parametrize("views", ["full", "sampled"])
def test_an_import_as_the_first_buffer_of_a_domain_is_wrong(views: str) -> None:
    board = Board(views=views)
    board.action(ActionCode.SET_IOMMU_DOMAIN_ID, 2)
    fd = board.heap(8192)
    view = board.kernel.mmap(fd, 8192, 0)
    made = board.adopt(fd)
    np.frombuffer(view, np.uint8)[:] = 1
    board.call(uabi.DMA_BUF_SYNC, fd, flags=uabi.DMA_BUF_SYNC_END | uabi.DMA_BUF_SYNC_WRITE)
    seen = board.kernel.memory.domains[2].read(made.iova, 8192)
    assert (seen[0], seen[8191]) == (1, 0)
    assert board.kernel.report.counts == {"import-first": 1}


def test_other_chips() -> None:
    board = Board(EmulatedKernel(RK3576, cores=[]))
    assert board.kernel.soc.cores == 2
