"""Standalone programs of the DPU for tests, written from the register tables by hand, and their layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ork.npu import isa
from tests.emulator.programs import Board

Array = npt.NDArray[Any]

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("ORK_CAPTURES", ROOT / "../shared/captures"))
CAPTURES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}

BYPASSED, EW_BYPASSED = 0x53, 0x383
INT8, INT16, FP16, INT32, FP32 = 0, 1, 2, 4, 5
BYTES = {INT8: 1, INT16: 2, FP16: 2, INT32: 4, FP32: 4}
DTYPES = {INT8: "<i1", INT16: "<i2", FP16: "<f2", INT32: "<i4", FP32: "<f4"}


def capture(name: str) -> isa.Words:
    """The words of a captured program."""
    return np.array([int(w, 16) for w in json.loads(CAPTURES[name].read_text())["words"]], np.uint64)


def standalone(precision: int, width: int, channels: int, height: int = 1, out: int | None = None) -> dict[int, int]:
    """Registers (without addresses) that copy a cube: every stage bypassed, no second operand."""
    out = precision if out is None else out
    surface = 16 * width * height
    return {
        0x4004: 0xE,
        0x5004: 0xE,
        0x400C: 0x1E5,
        0x4010: out << 29 | precision << 26 | precision,
        0x4014: 0,
        0x4020: 0,
        0x4024: surface,
        0x4030: width - 1,
        0x4034: height - 1,
        0x4038: 0,
        0x403C: (channels - 1) * 0x10001,
        0x4040: BYPASSED,
        0x4044: 0,
        0x4048: 0,
        0x404C: 0,
        0x4050: 2,
        0x4058: channels - 1,
        0x405C: (height - 1) << 16 | (width - 1),
        0x4060: BYPASSED,
        0x4064: 0,
        0x4068: 0,
        0x406C: 0,
        0x4070: EW_BYPASSED,
        0x4074: 0,
        0x4078: 1,
        0x407C: 0,
        0x4080: 0,
        0x4084: 1,
        0x4088: 0,
        0x40C0: surface,
        0x500C: width - 1,
        0x5010: height - 1,
        0x5014: channels - 1,
        0x5018: 0,
        0x501C: 0,
        0x5020: 0,
        0x5028: 0,
        0x502C: 0,
        0x5034: 1,
        0x5038: 0,
        0x5040: surface,
        0x5044: precision << 15 | 0x7800 | precision << 5 | (8 if precision == FP16 else 0) | 1,
        0x5048: 0,
        0x504C: 0,
        0x5064: 0,
        0x5068: 0x01010101,
        0x506C: 0,
    }


def two_inputs(precision: int, ew: int, width: int, channels: int, height: int = 1) -> dict[int, int]:
    """Registers with the second operand read pixel by pixel; `ew` are the operation's bits of EW_CFG."""
    size = 1 if precision == INT8 else 2
    return standalone(precision, width, channels, height) | {
        0x4070: 1 << 28 | size << 22 | ew | 0x3C0,
        0x5034: 0x40000000 | size << 2,
    }


def cube(values: Array) -> Array:
    """[pixels, channels] by surfaces of 16 bytes, the last one filled up with zeros: uint8."""
    per_atom = 16 // values.itemsize
    pixels, channels = values.shape
    padded = np.zeros((pixels, -(-channels // per_atom) * per_atom), values.dtype)
    padded[:, :channels] = values
    raw = np.ascontiguousarray(padded).view(np.uint8).reshape(pixels, -1, 16)
    return np.ascontiguousarray(raw.transpose(1, 0, 2)).reshape(-1)


def from_cube(raw: Array, pixels: int, channels: int, dtype: str) -> Array:
    """[pixels, channels] out of surfaces."""
    rows = np.ascontiguousarray(raw.reshape(-1, pixels, 16).transpose(1, 0, 2)).reshape(pixels, -1)
    return rows.view(dtype)[:, :channels]


class Operation:
    """A board with one standalone program and its buffers."""

    def __init__(self, registers: dict[int, int] | isa.Words, a: Array, b: Array | None = None, out_bytes: int = 0):
        self.board = Board()
        self.a = self.board.buffer(cube(a))
        self.b = self.board.buffer(16 if b is None else (cube(b) if b.ndim == 2 else b))
        self.c = self.board.buffer(out_bytes or self.a.size, 0x5A)
        self.registers = registers

    def run(self) -> Array:
        """Runs it; the output buffer's bytes."""
        outcome = self.outcome()
        assert (outcome.hang, outcome.tasks) == (None, 1)
        return self.c.cpu

    def outcome(self) -> Any:
        at = {0x5018: self.a.iova, 0x5020: self.b.iova, 0x502C: self.b.iova, 0x5038: self.b.iova, 0x4020: self.c.iova}
        if isinstance(self.registers, dict):
            words = isa.assemble(self.registers | at, enable=0x18)
        else:
            words = self.registers.copy()
            for offset, address in at.items():
                isa.patch(words, offset, address)
        program = self.board.buffer(words)
        return self.board.core.run(self.board.domain, program.iova, len(words) - 4, 1)


def load_tables(
    registers: dict[int, int],
    function: Callable[[float], float],
    following: tuple[int, int] = (0, 0),
    select: int = 5,
) -> isa.Words:
    """A program that fills both tables with a function of the index, LE up to 0 and LO from 0 on, and does what the
    registers say besides. `following`: address and fetch amount of the next program."""
    pairs = list(registers.items())
    for table, start in ((0, -512 << select), (1, 0)):
        points = [int(np.clip(function(float(start + (i << select))), -32768, 32767)) for i in range(513)]
        pairs += [(0x4100, (2 | table) << 16), *((0x4104, point & 0xFFFFFFFF) for point in points)]
    return isa.assemble(pairs, next_address=following[0], next_amount=following[1], enable=0x18)
