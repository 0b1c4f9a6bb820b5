"""The output stages against a scalar reference that follows the facts number by number, in exact arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.elementwise import FP16, FP32, INT8, INT16, INT32, Operation, from_cube, standalone
from tests.emulator.programs import FP16_FP16, INT8_INT8, Board, matmul, stored_kernels
from tests.emulator.programs import INT8 as INT8_MATMUL

W, C = 4, 16
MAX, MIN, ADD, DIV, MINUS, ABS, NEG, FLOOR, CEIL = range(9)
DTYPES: dict[int, Any] = {INT8: np.int8, INT16: np.int16, FP16: np.float16, INT32: np.int32, FP32: np.float32}


def half_even(x: Fraction) -> int:
    return round(x)  # Python rounds fractions half to even


def clip(x: int, bits: int = 32) -> int:
    return max(-(1 << bits - 1), min((1 << bits - 1) - 1, x))


@dataclass(frozen=True)
class Unit:
    """BS or BN as a program writes it."""

    algo: int | None
    alu: int
    mul: int | None
    shift: int
    shift_negative: int
    prelu: bool
    relu: bool
    relux: int | None

    def registers(self, cfg: int) -> dict[int, int]:
        bits = (self.algo or 0) << 16 | (self.relux is not None) << 7 | (not self.relu) << 6 | self.prelu << 5
        bits |= (self.mul is None) << 4 | (self.algo is None) << 1
        values = (bits, self.alu, (self.mul or 0) << 16 | self.shift << 8, self.relux or 0)
        return {cfg + 4 * i: value & 0xFFFFFFFF for i, value in enumerate(values)}

    def of(self, x: int, *, mul_first: bool) -> int:
        def add(y: int) -> int:
            if self.algo is None:
                return y
            return {ADD: y + self.alu, MINUS: y - self.alu}[self.algo]

        scaled = add(x * self.mul) if mul_first and self.mul is not None else add(x)
        if self.mul is not None:
            positive = x >= 0 if mul_first else scaled >= 0
            plain = add(x)
            product = scaled if mul_first else scaled * self.mul
            shift = self.shift if product >= 0 else self.shift_negative
            scaled = plain if self.prelu and positive else half_even(Fraction(product, 1 << shift))
        y = clip(scaled)
        if self.relu:
            y = max(y, 0)
            y = y if self.relux is None else min(y, self.relux)
        return y


def units() -> st.SearchStrategy[Unit | None]:
    word = st.integers(-(1 << 20), 1 << 20)
    clamps = st.sampled_from([(False, None)]) | st.tuples(st.just(True), st.none() | st.integers(0, 1 << 16))
    return st.none() | st.builds(
        lambda clamp, **fields: Unit(**fields, relu=clamp[0], relux=clamp[1]),
        clamps,
        algo=st.sampled_from([None, ADD, MINUS]),
        alu=word,
        mul=st.none() | st.integers(-0x8000, 0x7FFF),
        shift=st.integers(0, 20),
        shift_negative=st.integers(0, 20),
        prelu=st.booleans(),
    )


@given(
    bs=units(),
    bn=units(),
    precision=st.sampled_from([INT8, INT16]),
    out=st.sampled_from([INT8, INT16, INT32]),
    scale=st.integers(-0x8000, 0x7FFF),
    shift=st.integers(0, 40),
    offset=st.integers(-1000, 1000),
    half_up=st.booleans(),
    add_first=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_integer_stages_and_output_converter(
    bs: Unit | None,
    bn: Unit | None,
    precision: int,
    out: int,
    scale: int,
    shift: int,
    offset: int,
    half_up: bool,
    add_first: bool,
    seed: int,
) -> None:
    registers = standalone(precision, W, C, out=out)
    registers |= {0x4080: offset & 0xFFFFFFFF, 0x4084: scale & 0xFFFF, 0x4088: add_first << 31 | half_up << 30 | shift}
    for unit, cfg, at in ((bs, 0x4040, 4), (bn, 0x4060, 10)):
        if unit is not None:
            registers |= unit.registers(cfg)
            registers[0x4010] |= unit.shift_negative << at
    limits = np.iinfo(DTYPES[precision])
    a = np.random.default_rng(seed).integers(limits.min, limits.max + 1, (W, C)).astype(DTYPES[precision])
    op = Operation(registers, a, out_bytes=W * C * 4)
    raw = op.run()
    want = np.empty((W, C), np.int64)
    for (i, j), value in np.ndenumerate(a):
        x = int(value)
        x = bs.of(x, mul_first=False) if bs else x
        x = bn.of(x, mul_first=True) if bn else x
        if out != INT32:
            before, after = (offset, 0) if add_first else (0, offset)
            y = Fraction((x + before) * scale, 1 << shift)
            x = (math.floor(y + Fraction(1, 2)) if half_up else half_even(y)) + after
        want[i, j] = clip(x, np.iinfo(DTYPES[out]).bits)
    dtype = np.dtype(DTYPES[out])
    assert np.array_equal(from_cube(raw[: want.size * dtype.itemsize], W, C, dtype.str), want)
    known = {"stage-unproven", "stage-overflow", "int16-overflow", "int32-overflow", "sdp-precisions"}
    assert set(op.board.report.counts) <= known


FLOAT_OPERATIONS = {
    MAX: np.maximum,
    MIN: np.minimum,
    ADD: np.add,
    DIV: np.divide,
    MINUS: np.subtract,
    ABS: lambda a, b: np.abs(a),
    NEG: lambda a, b: -a,
    FLOOR: lambda a, b: np.floor(a),
    CEIL: lambda a, b: np.ceil(a),
}


@pytest.mark.parametrize("out", [FP16, FP32])
@pytest.mark.parametrize("algo", [*FLOAT_OPERATIONS, "mul"])
def test_fp16_operations(algo: int | str, out: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(W, C)).astype(np.float16) * 3 for _ in range(2))
    a[0, :2], b[0, 0] = 0, 0
    bits = 1 << 2 if algo == "mul" else int(algo) << 16
    registers = standalone(FP16, W, C, out=out) | {0x4070: 0x108002C0 | bits, 0x5034: 0x40000008}
    op = Operation(registers, a, b, W * C * 4)
    raw = op.run()
    with np.errstate(invalid="ignore", divide="ignore"):
        operation = np.multiply if algo == "mul" else FLOAT_OPERATIONS[int(algo)]
        want = operation(a.astype(np.float32), b.astype(np.float32)).astype(DTYPES[out])
    got = from_cube(raw[: want.nbytes], W, C, want.dtype.str)
    assert np.array_equal(got, want, equal_nan=True)
    assert set(op.board.report.counts) == ({"stage-unproven"} if algo in (ABS, NEG, FLOOR, CEIL) else set())


def integer_operation(algo: int, a: int, b: int) -> int:
    if algo == DIV:
        return (1 << 31) - 1 if b == 0 and a >= 0 else -(1 << 31) if b == 0 else int(Fraction(a, b))
    return {MAX: max(a, b), MIN: min(a, b), ADD: a + b, MINUS: a - b, ABS: abs(a), NEG: -a}.get(algo, a)


@pytest.mark.parametrize("precision", [INT8, INT16])
@pytest.mark.parametrize("algo", range(9))
def test_integer_operations(algo: int, precision: int) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-100, 101, (W, C)).astype(DTYPES[precision]) for _ in range(2))
    b[0, :3] = 0
    size = 1 if precision == INT8 else 2
    registers = standalone(precision, W, C) | {
        0x4070: 0x100003C0 | size << 22 | algo << 16,
        0x5034: 0x40000000 | size << 2,
    }
    op = Operation(registers, a, b)
    limit = np.iinfo(a.dtype)
    want = [[integer_operation(algo, int(x), int(y)) for x, y in zip(*rows)] for rows in zip(a, b)]
    assert np.array_equal(from_cube(op.run()[: a.nbytes], W, C, a.dtype.str), np.clip(want, limit.min, limit.max))


@pytest.mark.parametrize("mode", ["pixel", "channel", "channel by pixel", "registers"])
@pytest.mark.parametrize("size", [1, 2, 3], ids=["8 bit", "16 bit", "32 bit"])
def test_ways_to_spread_an_operand(mode: str, size: int) -> None:
    """Products with an operand of another width than the data, converted on its way in."""
    rng = np.random.default_rng(0)
    dtype = {1: np.int8, 2: np.int16, 3: np.int32}[size]
    a = rng.integers(-100, 101, (W, 32)).astype(np.int8)
    b = rng.integers(-100, 101, (W, 32) if mode == "pixel" else 32).astype(dtype)
    code = {"channel": 0, "pixel": 1, "channel by pixel": 2, "registers": 0}[mode]
    registers = standalone(INT8, W, 32) | {
        0x4070: 1 << 31 | code << 28 | size << 22 | 0x2C4,
        0x4074: 7,
        0x4078: 1 << 16 | 3,
        0x4084: 5,
        0x4088: 9,
        0x5034: code << 30 | size << 2,
        0x5040: 16 * W if mode == "pixel" else 16,
    }
    if mode == "registers":
        registers |= {0x4090 + 4 * i: int(b[i]) & 0xFFFFFFFF for i in range(8)}
        registers |= {0x4070: registers[0x4070] & ~0x40, 0x5034: 1}
        b = np.resize(b[:8], 32)
    op = Operation(registers, a, b if b.ndim == 2 else b.reshape(1, -1))
    operand = np.rint((b.astype(np.float64) + 7) * 3 / 2)
    want = np.rint(a * operand * 5 / 512).clip(-128, 127)
    assert np.array_equal(from_cube(op.run()[: a.nbytes], W, 32, "<i1"), want)


def test_notches_and_tiles_of_larger_cubes() -> None:
    """A tile of 3 x 4 pixels, read out of and written into images of 5 x 9 pixels."""
    rng = np.random.default_rng(0)
    H, width, tile_h, tile_w, channels = 5, 9, 3, 4, 24
    a, b = (rng.normal(size=(H * width, channels)).astype(np.float16) for _ in range(2))
    registers = standalone(FP16, tile_w, channels, tile_h) | {
        0x4024: 16 * H * width,
        0x4038: (width - tile_w) * 0x10001,
        0x4070: 0x108202C0,
        0x40C0: 16 * H * width,
        0x5010: (width - tile_w) << 16 | (tile_h - 1),
        0x5034: 0x40000008,
        0x5040: 16 * H * width,
        0x5048: (width - tile_w) << 19,
        0x504C: 16 * (H * width - tile_h * tile_w),
    }
    op = Operation(registers, a, b)
    first = 16 * (width + 2)  # the tile's first pixel is in line 1, column 2
    for buffer in (op.a, op.b, op.c):
        buffer.iova += first
    got = from_cube(op.run()[: a.nbytes], H * width, channels, "<f2").reshape(H, width, channels)
    want = np.full(a.shape, np.float16(0), np.float16).reshape(H, width, channels)
    want.view(np.uint8)[:] = 0x5A
    inside = np.s_[1 : 1 + tile_h, 2 : 2 + tile_w]
    want[inside] = (a + b).reshape(H, width, channels)[inside]
    assert np.array_equal(got.view(np.uint16), want.view(np.uint16))


def test_compare_by_infinity() -> None:
    """BN times infinity, clamped to 1, turns differences into 0 and 1 (as a select of others does)."""
    a = np.linspace(-2, 2, W * C).astype(np.float16).reshape(W, C)
    registers = standalone(FP16, W, C) | {0x4060: 0x82, 0x4068: 0x7C00 << 16, 0x406C: 0x3F800000}
    assert np.array_equal(from_cube(Operation(registers, a).run()[: a.nbytes], W, C, "<f2"), a > 0)


@pytest.mark.parametrize("minimum", [False, True])
def test_extremes_over_channels(minimum: bool) -> None:
    """One value a pixel, packed densely; channels beyond the real ones do not count."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(20, 24)).astype(np.float16)
    registers = standalone(FP16, 20, 24) | {
        0x400C: 0x02000000 | 3 << 9 | 0x1E5,
        0x4014: 0x7BFF if minimum else 0xFBFF,
        0x4034: (5 if minimum else 7) << 22,
        0x403C: 18 << 16 | 23,
    }
    op = Operation(registers, a)
    real = a[:, :19]
    raw = op.run()
    assert np.array_equal(raw[:40].view("<f2"), real.min(axis=1) if minimum else real.max(axis=1))
    assert (raw[40:48] == 0).all()
    assert (raw[48 : a.nbytes] == 0x5A).all()


# --- behind the core ---


@pytest.mark.parametrize("engine", ["literal", "fast"])
@pytest.mark.parametrize("kind", [INT8_MATMUL, INT8_INT8, FP16_FP16], ids=["int32", "int8", "fp16"])
def test_relu_behind_a_matmul(kind: Any, engine: str) -> None:
    rng = np.random.default_rng(0)
    dtype = np.float16 if kind is FP16_FP16 else np.int8
    A, B = (rng.integers(-5, 6, shape).astype(dtype) for shape in ((5, 512), (512, 32)))
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, kind)), board.buffer(4096)
    clamp = 0x42C80000 if kind is FP16_FP16 else 100
    registers = matmul(kind, 5, 512, 32) | {0x4040: 0x92, 0x404C: clamp}
    assert board.run([board.place(registers, a, w, c)]).hang is None
    out = {4: "<i4", 1: "<i1", 2: "<f2"}[kind.out_bytes]
    got = c.cpu[: 160 * kind.out_bytes].view(out).reshape(5, 32)
    assert np.array_equal(got, (A.astype(float) @ B.astype(float)).clip(0, 100))
    assert not board.report.violations


def test_engines_agree_about_stages() -> None:
    """A program that leaves an operand of an active stage to an earlier one, in both engines."""
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((5, 64), (64, 32)))
    seen = []
    for engine in ("literal", "fast"):
        board = Board(engine)
        a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8_MATMUL)), board.buffer(4096)
        registers = board.place(matmul(INT8_MATMUL, 5, 64, 32), a, w, c)
        operands = {0x4044: 1000, 0x4048: 3 << 16 | 2 << 8, 0x4010: registers[0x4010] | 2 << 4}
        active = {**registers, 0x4040: 0x20040, 0x4010: operands[0x4010]}
        assert board.run([registers | operands, registers | operands | {0x4044: 5}, active]).hang is None
        seen.append(c.cpu.tobytes())
    want = np.rint((A.astype(float) @ B.astype(float) + 1000) * 3 / 4)
    assert seen[0] == seen[1]
    assert np.array_equal(np.frombuffer(seen[0], "<i4", 160).reshape(5, 32), want)
