"""Weights and features that stay in the convolution buffer from one program to the next, and when they don't."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ork.emulator.dpu import POISON
from tests.emulator.convolutions import (
    Conv,
    expected,
    operands,
    program,
    read_output,
    stored_image,
    stored_weights,
    tile,
    tiles,
)
from tests.emulator.programs import FP16_FP16, INT8, INT8_INT8, Array, Board

ENGINES = pytest.mark.parametrize("engine", ["literal", "fast"])
WEIGHTS, FEATURES = 1 << 13, 1 << 12
CONVS = [
    Conv(INT8, (9, 14), 48, 40, (3, 3), pad=(1, 1)),
    Conv(FP16_FP16, (9, 14), 64, 32, (3, 3)),
    Conv(FP16_FP16, (9, 14), 96, 1, (3, 3), depthwise=True),  # the vendor reuses kernels of depthwise tiles too
    Conv(INT8, (9, 14), 3, 32, (5, 5), image=3),
]


def setup(conv: Conv, engine: str) -> tuple[Board, Array, Array, list]:  # type: ignore[type-arg]
    """The board, operands, and their buffers: features, kernels, output."""
    board = Board(engine)
    image, kernels = operands(conv, np.random.default_rng(0))
    a, w = (board.buffer(conv.out_bytes + (1 << 16)) for _ in range(2))  # outputs fit them too
    for buffer, data in ((a, stored_image(conv, image)), (w, stored_weights(conv, kernels))):
        buffer.cpu[: data.size] = data
    return board, image, kernels, [a, w, board.buffer(conv.out_bytes)]


@ENGINES
@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_row_tiles_reuse_the_kernels_of_the_first(conv: Conv, engine: str) -> None:
    board, image, kernels, (a, w, c) = setup(conv, engine)
    first, *rest = (program(conv, part, a, w, c) for part in tiles(conv, 4))
    # The tiles have the bank split of the largest, as in the vendor's buffers, and one more goes ahead, whose output
    # lands on the kernels in memory.
    reusing = [{**registers, 0x1040: first[0x1040] | WEIGHTS} for registers in (first, *rest)]
    assert board.run([{**first, 0x4020: w.iova}, *reusing]).hang is None
    want = expected(conv, image, kernels)
    assert np.array_equal(read_output(conv, c.cpu)[..., : want.shape[-1]], want)
    assert not np.array_equal(w.cpu[: stored_weights(conv, kernels).size], stored_weights(conv, kernels))
    assert not board.report.of("weight-reuse")


@ENGINES
@pytest.mark.parametrize("conv", CONVS[:2], ids=str)
def test_other_kernels_meet_the_features_of_the_program_before(conv: Conv, engine: str) -> None:
    board, image, kernels, (a, w, c) = setup(conv, engine)
    second = kernels[::-1].copy()
    v, d = board.buffer(stored_weights(conv, second)), board.buffer(conv.out_bytes)
    whole = tile(conv, 0, conv.out[1])
    programs = [program(conv, whole, a, w, c), program(conv, whole, a, v, d)]
    programs[0][0x4020] = a.iova  # over the features
    programs[1][0x1040] |= FEATURES
    assert board.run(programs).hang is None
    assert np.array_equal(read_output(conv, d.cpu)[..., : conv.N], expected(conv, image, second))
    assert board.report.counts["data-reuse-used"] == 1
    assert not board.report.of("data-reuse")


@ENGINES
@pytest.mark.parametrize(
    ("rule", "bit", "change"),
    [
        ("weight-reuse", WEIGHTS, {"N": 32}),
        ("weight-reuse", WEIGHTS, {"kernel": (1, 3), "pad": (0, 1)}),
        ("data-reuse", FEATURES, {"C": 32}),
        ("data-reuse", FEATURES, {"size": (9, 13)}),
    ],
)
def test_what_does_not_lie_in_the_buffer_cannot_be_reused(
    rule: str, bit: int, change: dict[str, object], engine: str
) -> None:
    conv = CONVS[0]
    other = replace(conv, **change)  # type: ignore[arg-type]
    board, _, _, buffers = setup(conv, engine)
    last = program(other, tile(other, 0, other.out[1]), *buffers)
    last[0x1040] |= bit
    assert board.run([program(conv, tile(conv, 0, conv.out[1]), *buffers), last]).hang is None
    assert board.report.counts[rule] == 1
    assert (buffers[2].cpu[: other.out_bytes] == POISON).all()


@ENGINES
def test_kernels_stay_only_if_all_of_them_fit_and_nobody_else_loads(engine: str) -> None:
    big = Conv(INT8_INT8, (3, 3), 512, 128, (3, 3), shift=12)  # 18 banks of kernels
    board = Board(engine)
    whole = program(big, tile(big, 0, 1), *(board.buffer(1 << 20) for _ in range(3)))
    board.run([whole, {**whole, 0x1040: whole[0x1040] | WEIGHTS}])
    assert board.report.counts["weight-reuse"] == 1

    conv = CONVS[0]
    board, _, _, buffers = setup(conv, engine)
    whole = program(conv, tile(conv, 0, conv.out[1]), *buffers)
    stranger = {**whole, 0x1110: board.buffer(1 << 16).iova}
    board.run([whole, stranger, {**whole, 0x1040: whole[0x1040] | WEIGHTS}])
    assert board.report.counts["weight-reuse"] == 1
    board.report.clear()
    board.run([{**whole, 0x1040: whole[0x1040] | WEIGHTS}])  # a new submit: nothing is sure to be there
    assert board.report.counts["weight-reuse"] == 1
