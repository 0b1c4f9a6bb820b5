"""Programs and layouts for tests, written from the register tables by hand and not with `ork.npu.matmul`.

A program is a dict offset -> value, so that a test can break one register. Layouts are loops over indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ork.emulator.core import Core, Outcome
from ork.emulator.memory import Buffer, Domain, Memory
from ork.emulator.report import Report
from ork.npu import isa
from ork.npu.soc import RK3588

Array = npt.NDArray[Any]
UNCACHED = 0x401


@dataclass(frozen=True)
class Kind:
    bits: int
    group: int
    out_bytes: int
    precision: int
    data_format: int
    size_e: int  # DPU.BS_OW_CFG


INT8 = Kind(8, 32, 4, 0, 0x80000000, 0x7FC)
FP16 = Kind(16, 16, 4, 2, 0xA8000002, 0x36E)
INT4 = Kind(4, 64, 2, 6, 0x38000006, 0x7FE)
INT16 = Kind(16, 16, 4, 1, 0x84000001, 0x36E)
FP16_FP16 = Kind(16, 16, 2, 2, 0x48000002, 0x126)
INT8_INT8 = Kind(8, 32, 1, 0, 0x00000000, 0x124)
INT8_INT16 = Kind(8, 32, 2, 0, 0x20000000, 0x36C)


def matmul(kind: Kind, M: int, K: int, N: int, form: str = "row", total: int = 0) -> dict[int, int]:
    """Registers (without addresses) of C[M, N] = A[M, K] x B[K, N].

    Forms: "row" (row-major), "wide" (cube, rows along the width), "tall" (cube, rows along the height), "tile" (rows
    of a cube of `total` rows), "batch" (int4: each row is every fourth line).
    """
    lines = 4 * M if form == "batch" else M
    width, height = (M, 1) if form in ("wide", "tile") else (1, lines)
    off = form in ("row", "tile")
    row = K * kind.bits // 8
    atoms = kind.group * kind.out_bytes // 16
    entries = -(-width * row // 64)
    data = min(max(-(-height * entries // 512), 1), 11)
    mask28 = (1 << 28) - 1
    line, surface = {
        "row": (row // 16, 0),
        "wide": (4 * width, -3 * width),
        "tall": (4, height - 4),
        "tile": (total, total - M),
        "batch": (K // 16, -3),
    }[form]
    pitch = {"row": 0x10, "batch": 0x10, "wide": 16 * M, "tall": 16 * M, "tile": 16 * total}[form]
    notch = N * kind.out_bytes // 16 - 1 if form == "row" else 0
    fp16_out = kind.data_format == FP16_FP16.data_format
    return {
        0x4004: 0xE,
        0x100C: off << 29 | kind.precision << 7 | kind.precision << 4,
        0x1010: 0x50,
        0x1014: 9,
        0x1020: width << 16 | height,
        0x1024: (K - 1) << 16 | K,
        0x1028: width,
        0x102C: width * height,
        0x1030: row * N,
        0x1034: row,
        0x1038: 0x01010000 | N,
        0x1040: (12 - data) << 4 | data,
        0x1044: entries,
        0x104C: 0xB,
        0x1060: 0,
        0x1068: 0,
        0x1070: 0,
        0x107C: line,
        0x1080: surface & mask28,
        0x1100: 0,
        0x1110: 0,
        0x1184: 0,
        0x3010: kind.precision << 8 | 1,
        0x3014: (height - 1) << 16 | (width - 1),
        0x3018: N - 1,
        0x400C: 0x1E4,
        0x4010: kind.data_format,
        0x4020: 0,
        0x4024: pitch,
        0x4030: width - 1,
        0x4034: height - 1,
        0x4038: notch << 16 | notch,
        0x403C: (N - 1) << 16 | (N - 1),
        0x4040: 0x53,
        0x4050: kind.size_e,
        0x4054: 0,
        0x4058: N - 1,
        0x405C: 0 if form == "batch" else (height - 1) << 16 | (width - 1),
        0x4060: 0x53,
        0x4070: 0x383,
        0x4080: 0,
        0x4084: 0x10001 if fp16_out else 1,
        0x4088: 0,
        0x40C0: pitch * atoms,
    }


def words(registers: dict[int, int], following: int = 0, amount: int = 0, enable: int = 0xD) -> isa.Words:
    """Body and trailer; `following` is the address of the next program, `amount` its fetch amount."""
    return isa.assemble(registers, next_address=following, next_amount=amount, enable=enable)


# --- layouts, from their definitions ---


def nibbles(values: Array) -> npt.NDArray[np.uint8]:
    """int4 values as bytes, the even element in the low nibble."""
    flat = values.astype(np.int8).reshape(-1)
    return ((flat[0::2] & 15) | (flat[1::2] << 4)).astype(np.uint8)


def stored_kernels(B: Array, kind: Kind) -> npt.NDArray[np.uint8]:
    """B[K, N] as the chip reads it: groups of G kernels, blocks of 32 channels, kernel, channel; the last are short."""
    K, N = B.shape
    parts = [B[k : k + 32, n : n + kind.group].T.reshape(-1) for n in range(0, N, kind.group) for k in range(0, K, 32)]
    flat = np.concatenate(parts)
    return nibbles(flat) if kind.bits == 4 else np.ascontiguousarray(flat).view(np.uint8)


def cube(A: Array, kind: Kind) -> npt.NDArray[np.uint8]:
    """A[M, K] by surfaces of 16 bytes: [K / atom][M][atom]."""
    raw = nibbles(A) if kind.bits == 4 else np.ascontiguousarray(A).view(np.uint8).reshape(-1)
    M = A.shape[0]
    return np.ascontiguousarray(raw.reshape(M, -1, 16).transpose(1, 0, 2)).reshape(-1)


def from_cube(raw: npt.NDArray[np.uint8], M: int, dtype: str) -> Array:
    """[M, N] out of surfaces [.][M][16 bytes]."""
    return np.ascontiguousarray(raw.reshape(-1, M, 16).transpose(1, 0, 2)).reshape(-1).view(dtype).reshape(M, -1)


# --- a board without a kernel ---


@dataclass
class Board:
    """Device memory and one core."""

    engine: str = "literal"
    strict: bool = True
    views: str = "full"
    report: Report = field(init=False)
    memory: Memory = field(init=False)
    core: Core = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self.strict)
        self.memory = Memory(RK3588, self.report, self.views)
        self.core = Core(0, RK3588, self.report, self.engine)

    @property
    def domain(self) -> Domain:
        return self.memory.domains[0]

    def buffer(self, data: Array | int, fill: int = 0) -> Buffer:
        """An uncached buffer of that many bytes, or holding that data."""
        raw = np.full(data, fill, np.uint8) if isinstance(data, int) else np.ascontiguousarray(data).view(np.uint8)
        buffer = self.memory.create(1, max(raw.size, 1), UNCACHED, 0)
        buffer.cpu[:] = fill
        buffer.cpu[: raw.size] = raw.reshape(-1)
        return buffer

    def place(self, registers: dict[int, int], a: Buffer | int, w: Buffer | int, c: Buffer | int) -> dict[int, int]:
        """The registers with addresses."""
        at = [x if isinstance(x, int) else x.iova for x in (a, w, c)]
        return {**registers, 0x1070: at[0], 0x1110: at[1], 0x4020: at[2]}

    def chain(self, programs: list[dict[int, int]], enable: int = 0xD) -> int:
        """Put programs into memory, each leading to the next; the address of the first."""
        size = max(len(p) for p in programs) * 8 + 64
        pitch = -(-size // 64) * 64
        buffer = self.memory.create(1, pitch * len(programs) + 4096, UNCACHED, 0)
        for i, registers in enumerate(programs):
            last = i + 1 == len(programs)
            following = 0 if last else buffer.iova + (i + 1) * pitch
            raw = words(registers, following, 0 if last else isa.fetch_amount(len(programs[i + 1])), enable)
            buffer.cpu[i * pitch : i * pitch + raw.nbytes] = raw.view(np.uint8)
        return buffer.iova

    def run(self, programs: list[dict[int, int]], tasks: int | None = None, enable: int = 0xD) -> Outcome:
        address = self.chain(programs, enable)
        return self.core.run(self.domain, address, len(programs[0]), tasks or len(programs))


def random_operands(rng: np.random.Generator, kind: Kind, M: int, K: int, N: int) -> tuple[Array, Array]:
    """A[M, K] and B[K, N] over the whole range of the precision; small integers in fp16, so that sums are exact."""
    if kind.bits == 16 and kind.precision == 2:
        return (rng.integers(-8, 9, shape).astype(np.float16) for shape in ((M, K), (K, N)))  # type: ignore[return-value]
    dtype = np.int16 if kind.bits == 16 else np.int8
    low = -(1 << kind.bits - 1)
    return tuple(rng.integers(low, -low, shape).astype(dtype) for shape in ((M, K), (K, N)))  # type: ignore[return-value]
