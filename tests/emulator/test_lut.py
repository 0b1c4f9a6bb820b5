"""The tables: loading, lookups against a scalar reference, slopes, priorities, and what may go wrong with them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ork.emulator.dpu import POISON
from ork.npu import isa
from tests.emulator.elementwise import FP16, INT16, Array, cube, from_cube, load_tables, standalone
from tests.emulator.programs import FP16 as FP16_MATMUL
from tests.emulator.programs import FP16_FP16, INT8_INT8, Board, matmul, stored_kernels

LOOK_UP = {0x4070: 0x302, 0x4108: 0x68, 0x410C: 0x50500, 0x4110: -16384 & 0xFFFFFFFF, 0x4114: 0, 0x4118: 0,
           0x411C: 16384, 0x4120: 0, 0x4124: 0, 0x4128: 0, 0x412C: 0}  # fmt: skip


def curve(index: float) -> float:
    return index * abs(index) / 10000 - 500


def loaded(board: Board, function: Any = curve, select: int = 5, **submit: bool) -> None:
    """Fill both tables, in a submit of its own."""
    scratch = board.buffer(4096)
    registers = standalone(INT16, 1, 8) | {0x5018: scratch.iova, 0x4020: scratch.iova}
    program = load_tables(registers, function, select=select)
    outcome = board.core.run(board.domain, board.buffer(program).iova, len(program) - 4, 1, **submit)  # type: ignore[arg-type]
    assert outcome.hang is None


def look_up(board: Board, a: Array, precision: int = INT16, wrong: dict[int, int] | None = None) -> Array:
    """The table's values of `a`, through a program of its own."""
    source, target = board.buffer(cube(a)), board.buffer(a.nbytes, 0x5A)
    registers = standalone(precision, *a.shape) | LOOK_UP | (wrong or {})
    assert board.run([registers | {0x5018: source.iova, 0x4020: target.iova}], enable=0x18).hang is None
    return from_cube(target.cpu[: a.nbytes], *a.shape, a.dtype.str)


def reference(x: Any, under: tuple[int, int] = (0, 0), over: tuple[int, int] = (0, 0)) -> Any:
    """Linear between points 32 apart from -16384 to 16384; exact for fractions, rounded half to even for integers."""
    exact = isinstance(x, Fraction)
    low = max(-16384, min(16384, x))
    at = min(low // 32 * 32, 16384 - 32)
    left, right = (int(np.clip(curve(float(p)), -32768, 32767)) for p in (at, at + 32))
    rise = Fraction(right - left) * Fraction(low - at) / 32
    value = left + (rise if exact else round(rise))
    for outside, (scale, shift) in ((min(x + 16384, 0), under), (max(x - 16384, 0), over)):
        beyond = Fraction(outside) * scale / (1 << shift)
        value += beyond if exact else beyond // 1
    return value


def test_integers_between_and_beyond_the_points() -> None:
    board = Board()
    loaded(board)
    a = np.random.default_rng(0).integers(-32768, 32768, (16, 64)).astype(np.int16)
    a[0, :8] = (-32768, -16385, -16384, -16383, 0, 16383, 16384, 32767)
    slopes = {0x4120: 3, 0x4124: 2, 0x4128: 0xFFFB << 16, 0x412C: 4 << 5}
    got = look_up(board, a, wrong=slopes)
    want = np.vectorize(lambda x: reference(int(x), (3, 2), (-5, 4)))(a).clip(-32768, 32767)
    assert np.array_equal(got, want)
    assert set(board.report.counts) == {"int16-overflow"}  # the slopes lead out of the range


def test_floats_between_the_points() -> None:
    board = Board()
    loaded(board)
    a = (np.random.default_rng(0).normal(size=(8, 64)) * 8000).astype(np.float16)
    got = look_up(board, a, FP16, {0x4128: 1 << 16, 0x412C: 3 << 5})
    want = np.vectorize(lambda x: float(reference(Fraction(float(x)), over=(1, 3))))(a)
    assert np.array_equal(got, want.astype(np.float32).astype(np.float16))
    assert not board.report.violations


def test_not_a_number_stays_one() -> None:
    board = Board()
    loaded(board)
    got = look_up(board, np.array([[np.nan, np.inf, -np.inf, 0, 1, 2, 3, 4]], np.float16), FP16)
    assert np.isnan(got[0, 0])
    assert np.isfinite(got[0, 1:]).all()


@pytest.mark.parametrize(
    ("cfg", "value", "table"),
    [(0x08, 0, "LE"), (0x48, 0, "LO"), (0x08, 20000, "LE"), (0x28, 20000, "LO"), (0x08, -20000, "LE"),
     (0x18, -20000, "LO")],
)  # fmt: skip
def test_priorities_where_both_or_neither_answer(cfg: int, value: int, table: str) -> None:
    """LE says -100 everywhere, LO 100."""
    board = Board()
    loaded(board, lambda index: 0.0)
    board.core.tables.points[0], board.core.tables.points[1] = -100, 100
    got = look_up(board, np.full((1, 8), value, np.int16), wrong={0x4108: cfg, 0x4118: -8 & 0xFFFFFFFF, 0x4114: 8})
    assert (got == {"LE": -100, "LO": 100}[table]).all()


def test_tables_outlive_submits_and_a_reset_clears_them() -> None:
    board = Board()
    loaded(board)
    a = np.zeros((1, 8), np.int16)
    assert (look_up(board, a) == -500).all()
    assert (look_up(board, a) == -500).all()
    board.core.reset()
    assert (look_up(board, a).view(np.uint8) == POISON).all()
    assert board.report.counts == {"lut-unloaded": 1}


def test_points_beyond_the_table_are_dropped_and_named() -> None:
    board = Board()
    scratch = board.buffer(4096)
    pairs = list((standalone(INT16, 1, 8) | {0x5018: scratch.iova, 0x4020: scratch.iova}).items())
    pairs += [(0x4100, 0x20000 | 511), (0x4104, 1), (0x4104, 2), (0x4104, 3), (0x4104, 4)]
    program = isa.assemble(pairs, enable=0x18)
    assert board.core.run(board.domain, board.buffer(program).iova, len(pairs), 1).hang is None
    assert board.core.tables.points[0, 511:].tolist() == [1, 2]
    assert board.report.violations[0].values == {"words": 2}


def test_access_that_reads_writes_nothing() -> None:
    """Matmul programs of the vendor write both access registers with 0."""
    board = Board()
    loaded(board)
    before = board.core.tables.points.copy()
    a, w, c = board.buffer(4096), board.buffer(4096), board.buffer(4096)
    registers = board.place(matmul(INT8_INT8, 2, 512, 32) | {0x4100: 0, 0x4104: 0}, a, w, c)
    board.run([registers])
    assert np.array_equal(board.core.tables.points, before)


@pytest.mark.parametrize("strict", [True, False])
def test_tables_loaded_under_ping_pong(strict: bool) -> None:
    """The next operation may read them half written, unless it stands still: S_POINTER 0x30."""
    a = np.zeros((1, 8), np.int16)
    board = Board(strict=strict)
    loaded(board, ping_pong=True)
    got = look_up(board, a)
    assert board.report.counts == {"lut-ping-pong": 1}
    assert ((got.view(np.uint8) == POISON).all() if strict else (got == -500).all()) is np.True_
    board.report.clear()
    assert (look_up(board, a) == -500).all()  # by now they are whole
    loaded(board, ping_pong=True)
    assert (look_up(board, a, wrong={0x4004: 0x30, 0x5004: 0x30}) == -500).all()
    loaded(board)
    assert (look_up(board, a) == -500).all()
    assert not board.report.violations


def test_a_program_may_load_the_tables_that_it_uses() -> None:
    board = Board()
    source, target = board.buffer(cube(np.full((1, 8), 64, np.int16))), board.buffer(16)
    registers = standalone(INT16, 1, 8) | LOOK_UP | {0x5018: source.iova, 0x4020: target.iova}
    program = load_tables(registers, curve)
    outcome = board.core.run(board.domain, board.buffer(program).iova, len(program) - 4, 1, ping_pong=True)
    assert outcome.hang is None
    assert (target.cpu[:16].view(np.int16) == int(curve(64))).all()
    assert (look_up(board, np.zeros((1, 8), np.int16)) == -500).all()  # and later ones may use them too
    assert not board.report.violations


# --- behind a matmul ---


@pytest.mark.parametrize("engine", ["literal", "fast"])
def test_int8_matmul_through_the_tables(engine: str) -> None:
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-20, 21, shape).astype(np.int8) for shape in ((5, 512), (512, 32)))
    board = Board(engine)
    loaded(board)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8_INT8)), board.buffer(4096)
    registers = matmul(INT8_INT8, 5, 512, 32) | LOOK_UP | {0x4084: 3, 0x4088: 6}
    assert board.run([board.place(registers, a, w, c)]).hang is None
    sums = A.astype(np.int64) @ B.astype(np.int64)
    want = np.vectorize(lambda x: round(Fraction(reference(int(x)) * 3, 64)))(sums).clip(-128, 127)
    assert np.array_equal(c.cpu[:160].view(np.int8).reshape(5, 32), want)
    assert not board.report.violations
    board.core.reset()
    assert board.run([board.place(registers, a, w, c)]).hang is None
    assert (c.cpu[:160] == POISON).all()


def test_fp16_matmul_through_the_tables_is_written_as_fp32() -> None:
    board = Board()
    loaded(board)
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-20, 21, shape).astype(np.float16) for shape in ((5, 64), (64, 16)))
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, FP16_MATMUL)), board.buffer(4096)
    assert board.run([board.place(matmul(FP16_FP16, 5, 64, 16) | LOOK_UP, a, w, c)]).hang
    assert board.report.counts == {"lut-fp16-output": 1}
    assert board.run([board.place(matmul(FP16_MATMUL, 5, 64, 16) | LOOK_UP, a, w, c)]).hang is None
    want = np.vectorize(lambda x: float(reference(Fraction(int(x)))))(A.astype(int) @ B.astype(int))
    assert np.array_equal(c.cpu[:320].view(np.float32).reshape(5, 16), want.astype(np.float32))
