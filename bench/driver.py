"""What the driver itself costs per call, in microseconds: against a kernel that does nothing, and on the emulator.

    python bench/driver.py [--json FILE]

"null" is the time inside the driver, with a kernel whose ioctls return at once. "emulated" adds the emulated ioctl and
the product (M = 1, K = N = 576 unless said). Medians of rounds of many calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ork.emulator.kernel import EmulatedKernel
from ork.npu import uabi
from ork.npu.driver import Npu
from ork.npu.jobs import Int8Job
from ork.npu.kernel import Kernel

ROUNDS, CALLS = 15, 200
M, K, N = 1, 576, 576


class NullKernel:
    """Hands out memory and addresses; syncs and submits return at once. Jobs that are polled for are done at once."""

    def __init__(self) -> None:
        self.made: list[bytearray] = []
        self.iova = 1 << 20
        self.landed: memoryview | None = None

    def nodes(self) -> list[str]:
        return ["/dev/dri/card0"]

    def open(self, path: str) -> int:
        return 3

    def close(self, fd: int) -> None:
        pass

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        return memoryview(self.made[offset >> 12])

    def munmap(self, view: memoryview) -> None:
        view.release()

    def ioctl(self, fd: int, request: int, arg: Any) -> None:
        if request in (uabi.SUBMIT, uabi.MEM_SYNC):
            if self.landed is not None and request == uabi.SUBMIT:
                self.landed[:] = b"\0\0\0\0"
            return
        if request == uabi.MEM_CREATE:
            self.made.append(bytearray(arg.size))
            arg.handle, arg.dma_addr, arg.obj_addr = len(self.made), self.iova, len(self.made)
            self.iova += arg.size
        elif request == uabi.MEM_MAP:
            arg.offset = arg.handle - 1 << 12
        elif request == uabi.DRM_VERSION:
            ctypes.memmove(arg.name, b"rknpu", 5)
            arg.name_len, arg.desc_len = 5, 0


def job(npu: Npu, K: int = K, N: int = N) -> Int8Job:
    return Int8Job(npu.buffer(M * K), npu.buffer(K * N), npu.buffer(M * N * 4), M, K, N)


def cases(npu: Npu, kernel: Kernel) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (what is timed, how many of its kind it does)."""
    one = job(npu)
    single, chain8 = npu.prepare([one]), npu.prepare([one] * 8)
    three = [npu.prepare([job(npu)]).chain for _ in range(3)]
    twelve = [npu.prepare([job(npu)]).chain for _ in range(12)]
    spots = [(one.weights, 0), (npu.buffer(K * N), 0)]

    def move() -> None:
        spots.reverse()
        single.move(0, weights=spots[0])
        npu.submit(single.chain)

    def whole() -> None:
        one.a.sync_to_device(0, K)
        npu.submit(single.chain)
        one.out.sync_from_device(0, 4 * N)

    def polled() -> None:
        if isinstance(kernel, NullKernel):
            buffer, offset, size = single.chain.last
            kernel.landed = buffer.view[offset : offset + size]
        npu.run([single.chain], blocking=False)
        if isinstance(kernel, NullKernel):
            kernel.landed = None

    def prepare() -> None:
        npu.prepare([one]).free()

    return {
        "submit of a prepared chain": (lambda: npu.submit(single.chain), 1),
        "sync rows, submit, sync results": (whole, 1),
        "submit of 8 programs": (lambda: npu.submit(chain8.chain), 1),
        "move a weight, sync it, submit": (move, 1),
        "prepare and free a chain": (prepare, 1),
        "submit without waiting, poll": (polled, 1),
        "3 chains on 3 cores": (lambda: npu.run(three), 3),
        "12 chains on 3 cores, each": (lambda: npu.run(twelve), 12),
        "sync of a buffer": (lambda: one.a.sync_to_device(0, K), 1),
    }


def measure(kernel: Kernel) -> dict[str, float]:
    found = {}
    with Npu.open(kernel) as npu:
        for name, (work, count) in cases(npu, kernel).items():
            work()
            rounds = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for _ in range(CALLS // count):
                    work()
                rounds.append((time.perf_counter() - start) / (CALLS // count * count))
            found[name] = statistics.median(rounds) * 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {"null": measure(NullKernel()), "emulated": measure(EmulatedKernel(views="sampled"))}
    print(f"{'µs per call':36}{'null':>10}{'emulated':>12}")
    for name in found["null"]:
        print(f"{name:36}{found['null'][name]:10.1f}{found['emulated'][name]:12.1f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
