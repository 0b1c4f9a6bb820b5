"""Pooling against numpy: maximum, average, minimum, strides, padding, surfaces; the vendor's one-pixel program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ork.emulator.core import Outcome
from ork.npu import isa
from tests.emulator.elementwise import CAPTURES, DTYPES, FP16, INT8, INT16, Array
from tests.emulator.programs import UNCACHED, Board

AVERAGE, MAX, MIN = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    method: int
    height: int
    width: int
    channels: int
    kernel: tuple[int, int] = (2, 2)  # height, width
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right
    precision: int = FP16
    pad_value: int = 0

    @property
    def out(self) -> tuple[int, int]:
        (kh, kw), (sh, sw), (top, left, bottom, right) = self.kernel, self.stride, self.pads
        return (self.height + top + bottom - kh) // sh + 1, (self.width + left + right - kw) // sw + 1


def reciprocal(size: int, precision: int) -> int:
    return int(np.float16(65536 / size).view(np.uint16)) if precision == FP16 else 65536 // size


def registers(shape: Shape) -> dict[int, int]:
    """Registers without addresses."""
    (kh, kw), (sh, sw), (top, left, bottom, right) = shape.kernel, shape.stride, shape.pads
    oh, ow = shape.out
    line = 16 * shape.width
    return {
        0x6004: 0xE,
        0x7004: 0xE,
        0x600C: shape.width - 1,
        0x6010: shape.height - 1,
        0x6014: shape.channels - 1,
        0x6018: ow - 1,
        0x601C: oh - 1,
        0x6020: shape.channels - 1,
        0x6024: 0x10 | shape.method,
        0x6034: (sh - 1) << 20 | (sw - 1) << 16 | (kh - 1) << 8 | (kw - 1),
        0x6038: reciprocal(kw, shape.precision) if shape.method == AVERAGE else 0,
        0x603C: reciprocal(kh, shape.precision) if shape.method == AVERAGE else 0,
        0x6040: bottom << 12 | right << 8 | top << 4 | left,
        0x6044: shape.pad_value,
        0x6048: 0,
        0x6070: 0,
        0x607C: 16 * oh * ow,
        0x6084: shape.precision,
        0x60DC: 3,
        0x700C: shape.width - 1,
        0x7010: shape.height - 1,
        0x7014: shape.channels - 1,
        0x701C: 0,
        0x7024: line,
        0x7028: line * shape.height,
        0x7030: shape.precision,
    }


def reference(x: Array, shape: Shape) -> Array:
    """[height, width, channels], window by window."""
    (kh, kw), (sh, sw), (top, left, bottom, right) = shape.kernel, shape.stride, shape.pads
    pad = np.array([shape.pad_value], "<u4").view(x.dtype)[0]
    x = np.pad(x, ((top, bottom), (left, right), (0, 0)), constant_values=pad)
    oh, ow = shape.out
    out = np.empty((oh, ow, x.shape[2]), x.dtype)
    for y in range(oh):
        for column in range(ow):
            window = x[y * sh : y * sh + kh, column * sw : column * sw + kw].reshape(kh * kw, -1)
            if shape.method == AVERAGE:
                mean = window.astype(np.float64).mean(axis=0)
                out[y, column] = mean if x.dtype.kind == "f" else np.rint(mean)
            else:
                out[y, column] = window.max(axis=0) if shape.method == MAX else window.min(axis=0)
    return out


def run(shape: Shape, wrong: dict[int, int] | None = None) -> tuple[Board, Outcome, Array, Array]:
    """The board, how it ended, the output buffer and what should be in it."""
    dtype = DTYPES[shape.precision]
    rng = np.random.default_rng(0)
    x = rng.integers(-100, 100, (shape.height, shape.width, shape.channels)).astype(dtype)
    per_atom = 16 // x.itemsize
    surfaces = x.reshape(shape.height, shape.width, -1, per_atom).transpose(2, 0, 1, 3)
    board = Board()
    oh, ow = shape.out
    a, c = board.buffer(np.ascontiguousarray(surfaces)), board.buffer(oh * ow * shape.channels * x.itemsize + 64, 0x5A)
    program = registers(shape) | {0x701C: a.iova, 0x6070: c.iova} | (wrong or {})
    outcome = board.run([program], enable=0x60)
    want = reference(x, shape).reshape(oh, ow, -1, per_atom).transpose(2, 0, 1, 3)
    return board, outcome, c.cpu, np.ascontiguousarray(want)


GOOD = [
    Shape(MAX, 4, 4, 8),
    Shape(AVERAGE, 4, 4, 8),
    Shape(MAX, 9, 7, 24, (3, 3), (2, 2)),
    Shape(AVERAGE, 8, 8, 16, (4, 2), (4, 2)),
    Shape(MAX, 6, 5, 8, (6, 5), (6, 5)),  # global, as a generator that runs on boards writes it
    Shape(AVERAGE, 4, 8, 8, (4, 8), (4, 8)),
]
DOUBTFUL = [
    Shape(MIN, 5, 5, 16, (2, 3), (1, 2)),
    Shape(MAX, 5, 6, 32, (3, 3), (1, 1), precision=INT8),
    Shape(AVERAGE, 6, 6, 16, (2, 2), (2, 2), precision=INT8),
    Shape(AVERAGE, 4, 4, 8, (2, 4), (2, 4), precision=INT16),
    Shape(MAX, 5, 5, 8, (3, 3), (2, 2), (1, 1, 1, 1), pad_value=0xFC00),
    Shape(MAX, 6, 6, 8, (3, 2), (2, 2), (1, 0, 0, 0), pad_value=0xFC00),
    Shape(AVERAGE, 4, 4, 8, (2, 2), (2, 2), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("shape", GOOD + DOUBTFUL, ids=str)
def test_pooling(shape: Shape) -> None:
    board, outcome, raw, want = run(shape)
    assert (outcome.hang, outcome.tasks, outcome.int_status) == (None, 1, 0x400)
    assert np.array_equal(raw[: want.nbytes].view(want.dtype).reshape(want.shape), want)
    assert (raw[want.nbytes :] == 0x5A).all()
    assert set(board.report.counts) == (set() if shape in GOOD else {"pool-unproven"})


WRONG: list[tuple[str, dict[int, int], str]] = [
    ("pool-size", {0x700C: 5}, "PPU_RDMA.RDMA_CUBE_IN_WIDTH"),
    ("pool-size", {0x6020: 15}, "PPU_RDMA.RDMA_CUBE_IN_WIDTH"),
    ("pool-size", {0x6018: 3}, "PPU.DATA_CUBE_OUT_WIDTH"),
    ("pool-size", {0x601C: 3}, "PPU.DATA_CUBE_OUT_HEIGHT"),
    ("rdma-unconfigured", {0x6024: 1}, "PPU.OPERATION_MODE_CFG"),
    ("not-modelled", {0x6024: 0x13}, ""),
    ("not-modelled", {0x6024: 1 << 30 | 0x11}, ""),
    ("not-modelled", {0x60DC: 0x83}, ""),
    ("not-modelled", {0x6084: 6, 0x7030: 2}, ""),
    ("pool-unproven", {0x7030: 1}, "PPU.OPERATION_MODE_CFG"),
    ("unmapped-address", {0x701C: 0x1000}, "PPU_RDMA.RDMA_SRC_BASE_ADDR"),
    ("unmapped-address", {0x6070: 0x1000}, "PPU.DST_BASE_ADDR"),
]


@pytest.mark.parametrize(("rule", "wrong", "register"), WRONG)
def test_a_broken_rule_is_named(rule: str, wrong: dict[int, int], register: str) -> None:
    board, outcome, raw, _ = run(GOOD[0], wrong)
    assert board.report.counts == {rule: 1}
    if register:
        assert board.report.violations[0].register == register
    assert (outcome.hang is None) == (rule == "pool-unproven")
    assert outcome.refused == (rule == "not-modelled")
    assert (raw == 0x5A).all() == (outcome.hang is not None)


def test_groups_take_turns_and_the_interrupt_says_which_ran() -> None:
    board = Board()
    a, c = board.buffer(np.zeros(4096, np.uint8)), board.buffer(4096)
    program = registers(GOOD[0]) | {0x701C: a.iova, 0x6070: c.iova}
    assert board.run([program, program], enable=0x60).int_status == 0x800


@pytest.mark.skipif(not CAPTURES, reason="no captured programs: ORK_CAPTURES names their folder")
def test_the_program_that_ends_a_vendors_multi_core_chain() -> None:
    """One pixel of scratch memory, copied for the sake of the interrupt."""
    about: dict[str, Any] = json.loads(
        CAPTURES["f16_conv_live_conv2d_cc_b1_c64_h56_w56_oc128_wic64_k1x1_g1_1168w"].read_text()
    )
    words = np.array([int(w, 16) for w in about["words"]], np.uint64)
    first = int(about["tasks"][0]["regcmd_addr"], 16)
    task = next(t for t in about["tasks"] if t["regcfg_amount"] == 26)
    at = (int(task["regcmd_addr"], 16) - first) // 8
    program = words[at : at + 30].copy()
    board = Board()
    scratch = board.memory.create(1, 4096, UNCACHED, 0)
    scratch.cpu[:64] = np.arange(64)
    isa.patch(program, 0x701C, scratch.iova)
    isa.patch(program, 0x6070, scratch.iova + 1024)
    outcome = board.core.run(board.domain, board.buffer(program).iova, 26, 1)
    assert (outcome.hang, outcome.tasks, outcome.int_status) == (None, 1, 0x400)
    assert not board.report.violations
    assert np.array_equal(scratch.cpu[1024:1056], np.arange(32))
