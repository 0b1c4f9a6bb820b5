"""A program for Rockchip's NPU in plain Python: `fcntl.ioctl`, `mmap` and `struct`, nothing of ork.

client.py TEST [OFFSET=VALUE]: prints "ok TEST" and ends with 0 if the chip's results are what Python computes.
"""

import fcntl
import glob
import mmap
import os
import random
import stat
import struct
import sys

ACTION, SUBMIT, MEM_CREATE, MEM_MAP, MEM_DESTROY, MEM_SYNC = (
    0xC0000000 | size << 16 | 0x6440 | number for number, size in enumerate((8, 104, 48, 16, 16, 32))
)
CACHED, TASKS = 0x403, 0x40B
TARGETS = {0: 0x0101, 1: 0x0201, 3: 0x0801, 4: 0x1001, 5: 0x2001, 6: 0x4001, 7: 0x8001}
BROKEN: dict[int, int] = {}


class Buffer:
    def __init__(self, npu: int, size: int, flags: int = CACHED) -> None:
        self.npu = npu
        made = fcntl.ioctl(npu, MEM_CREATE, struct.pack("<IIQQQQiI", 0, flags, size, 0, 0, 0, 0, 0))
        self.handle, _, self.size, self.object, self.address, *_ = struct.unpack("<IIQQQQiI", made)
        _, _, offset = struct.unpack("<IIQ", fcntl.ioctl(npu, MEM_MAP, struct.pack("<IIQ", self.handle, 0, 0)))
        self.data = mmap.mmap(npu, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)

    def sync(self, direction: int) -> None:
        fcntl.ioctl(self.npu, MEM_SYNC, struct.pack("<IIQQQ", direction, 0, self.object, 0, self.size))

    def free(self) -> None:
        self.data.close()
        fcntl.ioctl(self.npu, MEM_DESTROY, struct.pack("<IIQ", self.handle, 0, 0))


def run(npu: int, registers: dict[int, int], timeout: int = 500) -> None:
    registers = {**registers, **BROKEN}
    body = [TARGETS[offset >> 12] << 48 | value << 16 | offset for offset, value in registers.items()]
    words = [*body, 0, 0x0101 << 48 | 0x14, 0x0041 << 48, 0x0081 << 48 | 0xD << 16 | 8]
    program, tasks = Buffer(npu, 8 * len(words)), Buffer(npu, 40, TASKS)
    program.data[: 8 * len(words)] = struct.pack(f"<{len(words)}Q", *words)
    tasks.data[:40] = struct.pack("<8IQ", 0, 0, 0xD, 0x300, 0x1FFFF, 0, len(body), 0, program.address)
    program.sync(1)
    tasks.sync(1)
    cores = [0, 1] * 3 + [0] * 4
    fcntl.ioctl(
        npu,
        SUBMIT,
        struct.pack("<5IiQIIQqIi10I", 5, timeout, 0, 1, 0, 0, tasks.object, 0, 0, 0, 0, 1, -1, *cores),
    )
    program.free()
    tasks.free()


def matmul(npu: int) -> None:
    """int8[M, K] x int8[K, N] in row mode, every register that matters written."""
    M, K, N = 5, 64, 32
    rng = random.Random(1)
    A = [[rng.randint(-128, 127) for _ in range(K)] for _ in range(M)]
    B = [[rng.randint(-128, 127) for _ in range(N)] for _ in range(K)]
    a, b, c = Buffer(npu, M * K), Buffer(npu, K * N), Buffer(npu, 4 * M * N)
    a.data[: M * K] = struct.pack(f"{M * K}b", *(x for row in A for x in row))
    tiles = [B[k][n] for block in range(0, K, 32) for n in range(N) for k in range(block, block + 32)]
    b.data[: K * N] = struct.pack(f"{K * N}b", *tiles)
    for buffer in (a, b, c):
        buffer.sync(1)
    run(
        npu,
        {
            0x4004: 0xE, 0x100C: 1 << 29, 0x1010: 0x60, 0x1014: 9, 0x1020: 1 << 16 | M, 0x1024: (K - 1) << 16 | K,
            0x1028: 1, 0x102C: M, 0x1030: K * N, 0x1034: K, 0x1038: 0x01010000 | N, 0x1040: 0xB1, 0x1044: 1,
            0x104C: 0xB, 0x1060: 0, 0x1068: 0, 0x1070: a.address, 0x1078: 0xF000F, 0x107C: K // 16, 0x1080: 0,
            0x1084: 1 << 16 | M, 0x1088: K, 0x1100: 0, 0x1110: b.address, 0x1184: 0, 0x3010: 1, 0x3014: (M - 1) << 16,
            0x3018: N - 1, 0x400C: 0x1E4, 0x4010: 0x80000000, 0x4020: c.address, 0x4024: 0x10, 0x4030: 0,
            0x4034: M - 1, 0x4038: (N // 4 - 1) * 0x10001, 0x403C: (N - 1) * 0x10001, 0x4040: 0x53, 0x4050: 0x7FC,
            0x4054: 0, 0x4058: N - 1, 0x405C: (M - 1) << 16, 0x4060: 0x53, 0x4070: 0x383, 0x4080: 0, 0x4084: 1,
            0x4088: 0, 0x40C0: 0x80,
        },
    )  # fmt: skip
    c.sync(2)
    got = struct.unpack_from(f"<{M * N}i", c.data)
    want = [sum(A[m][k] * B[k][n] for k in range(K)) for m in range(M) for n in range(N)]
    assert list(got) == want, "wrong product"


def files(npu: int) -> None:
    """What a program finds out about the board before it opens anything."""
    nodes = sorted(glob.glob("/dev/dri/*"))
    assert "/dev/dri/card1" in nodes
    assert "/dev/dri/renderD129" in nodes
    with os.scandir("/dev/dri") as entries:
        assert sorted(entry.path for entry in entries) == nodes
    found = os.stat("/dev/dri/renderD129")
    assert stat.S_ISCHR(found.st_mode)
    assert os.major(found.st_rdev) == 226
    assert os.minor(found.st_rdev) == 129
    assert os.fstat(npu).st_rdev == os.makedev(226, 1)
    assert os.access("/dev/dri/card0", os.R_OK | os.W_OK)
    assert not os.path.exists("/dev/dri/card7")
    assert os.readlink(f"/proc/self/fd/{npu}") == "/dev/dri/card1"
    assert os.path.realpath("/sys/class/drm/card1/device").endswith("fdab0000.npu")
    assert os.path.realpath("/sys/dev/char/226:129").endswith("/drm/renderD129")
    with open("/sys/class/drm/card1/device/uevent") as file:
        assert "OF_COMPATIBLE_0=rockchip,rk3588-rknpu" in file.read()
    with open("/proc/device-tree/compatible", "rb") as file:
        assert b"rockchip,rk3588" in file.read().split(b"\0")
    folder = os.open("/dev/dri", os.O_RDONLY | os.O_DIRECTORY)
    for fd in (os.open("card1", os.O_RDWR, dir_fd=folder), os.open("/dev//dri/../dri/./card2", os.O_RDWR)):
        assert len(fcntl.ioctl(fd, ACTION, struct.pack("<II", 1, 0))) == 8
    os.chdir("/dev/dri")
    assert stat.S_ISCHR(os.stat("card0").st_mode)
    assert os.path.exists("/etc/passwd")
    with open("card1", "r+b", buffering=0) as file:
        assert struct.unpack("<II", fcntl.ioctl(file, ACTION, struct.pack("<II", 1, 0)))[1] == 908
        assert struct.unpack("<II", fcntl.ioctl(os.dup(file.fileno()), ACTION, struct.pack("<II", 18, 0)))[1] == 1


def main() -> None:
    test = sys.argv[1]
    BROKEN.update((int(o, 0), int(v, 0)) for o, v in (word.split("=") for word in sys.argv[2:]))
    npu = os.open("/dev/dri/card1", os.O_RDWR)
    {"matmul": matmul, "files": files}[test](npu)
    print(f"ok {test}")


if __name__ == "__main__":
    main()
