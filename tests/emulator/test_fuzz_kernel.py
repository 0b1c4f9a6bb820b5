"""Any call with any argument ends in a result or an errno, and closing everything frees everything."""

from __future__ import annotations

import random

import pytest

from ork.npu import uabi
from tests.emulator.board import HANG, Board

STRUCTS = {name: struct for name, _, struct in uabi.VENDOR_CALLS} | {
    "GEM_CLOSE": uabi.GemClose,
    "PRIME_HANDLE_TO_FD": uabi.PrimeHandle,
    "PRIME_FD_TO_HANDLE": uabi.PrimeHandle,
    "DMA_HEAP_ALLOC": uabi.DmaHeapAllocation,
    "DMA_BUF_SYNC": uabi.DmaBufSync,
}
REQUESTS = [request for request, name in uabi.NAMES.items() if name in STRUCTS]
ODD = (0, 1, 2, 3, 5, 7, 16, 63, 64, 4095, 4096, 5000, 65536, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1)
FLAGS = (uabi.BUFFER, uabi.TASK_ARRAY, 0x401, 0x503, 0x50B, 0)


@pytest.mark.parametrize("profile", ["stock", "patched"])
@pytest.mark.parametrize("seed", range(4))
def test_any_call_with_any_argument(seed: int, profile: str) -> None:
    rng = random.Random(seed)
    board = Board(views=rng.choice(["full", "sampled"]), profile=profile)
    kernel = board.kernel
    for core in board.cores:
        core.act = lambda *_: HANG if rng.random() < 0.2 else None
    fds, cookies, views = [board.fd], [0], []
    done = refused = 0
    for _ in range(3000):
        request = rng.choice(REQUESTS)
        struct = STRUCTS[uabi.NAMES[request]]
        arg = struct()
        for name, kind, *_ in struct._fields_:
            if not hasattr(kind, "_type_") or not isinstance(kind._type_, str):
                for part in getattr(arg, name):
                    part.task_start, part.task_number = rng.choice((0, 1, 200)), rng.choice((0, 1, 3))
            else:
                setattr(arg, name, argument(rng, uabi.NAMES[request], name, cookies, fds))
        try:
            kernel.ioctl(board.fd if rng.random() < 0.8 else rng.choice(fds), request, arg)
            done += 1
        except OSError as failure:
            refused += bool(failure.errno)
            continue
        if isinstance(arg, uabi.MemCreate):
            cookies.append(arg.obj_addr)
        elif isinstance(arg, uabi.MemMap):
            views.append(kernel.mmap(board.fd, 4096, arg.offset))
        elif isinstance(arg, uabi.DmaHeapAllocation) or request == uabi.PRIME_HANDLE_TO_FD:
            fds.append(arg.fd)
        if len(fds) < 4:
            fds.append(kernel.open(uabi.DMA_HEAP))
        if rng.random() < 0.05 and views:
            kernel.munmap(views.pop(rng.randrange(len(views))))
        if rng.random() < 0.02 and len(fds) > 1:
            kernel.close(fds.pop(rng.randrange(1, len(fds))))
    assert done > 300
    assert refused > 300
    assert done + refused == 3000
    for view in views:
        kernel.munmap(view)
    for fd in fds:
        kernel.close(fd)
    stats = kernel.stats
    assert (stats.live_buffers, stats.live_maps, stats.live_files) == (0, 0, 0)
    assert stats.creates + stats.imports == stats.destroys
    taken = sum(domain.space.used for domain in kernel.memory.domains) * 4096
    assert taken == stats.leaked_bytes


def argument(rng: random.Random, call: str, field: str, cookies: list[int], fds: list[int]) -> int:
    """A likely value most of the time, an odd one else."""
    if rng.random() < 0.1:
        return rng.choice(ODD) if field not in ("size", "len") else rng.choice(ODD[:14])
    if field in ("obj_addr", "task_obj_addr"):
        return rng.choice(cookies)
    if field == "fd":
        return rng.choice(fds)
    if field == "flags":
        choices: tuple[int, ...] = {"MEM_CREATE": FLAGS, "ACTION": (*range(26), 256, 257, 258)}.get(
            call, (0, 1, 2, 3, 5)
        )
        return rng.choice(choices)
    if field == "core_mask":
        return rng.randrange(9)
    if field == "handle":
        return 0 if call == "MEM_CREATE" else rng.randrange(12)
    if field == "iommu_domain_id":
        return rng.randrange(3)
    if field in ("size", "len", "sram_size"):
        return rng.choice((1, 4096, 12288, 1 << 20))
    return rng.choice((0, 0, 1))
