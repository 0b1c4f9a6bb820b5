"""Convolutions in the fast engine equal those in the literal one, every byte of memory and every finding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.emulator.convolutions import (
    Conv,
    expected,
    operands,
    program,
    read_output,
    stored_image,
    stored_weights,
    tiles,
)
from tests.emulator.programs import FP16, FP16_FP16, INT8, INT8_INT8, INT8_INT16, INT16, UNCACHED, Board

SIZE = 1 << 16  # of each operand's memory
KINDS = (INT8, INT8, INT8_INT8, INT8_INT16, FP16, FP16_FP16, INT16)
PAIR = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    kind = draw(st.sampled_from(KINDS))
    depthwise = draw(st.integers(1, 5)) == 1 and kind in (INT8_INT8, FP16_FP16)
    image = draw(st.integers(1, 4)) if draw(st.integers(1, 6)) == 1 and not depthwise else 0
    kernel = draw(st.sampled_from([(1, 1), (1, 1), (3, 3), (2, 3), (5, 1)]))
    conv = Conv(
        kind,
        (draw(st.integers(1, 12)), draw(st.integers(1, 12))),
        image or draw(st.sampled_from([8, 16, 32, 48, 64, 96])),
        draw(st.sampled_from([1, 7, 16, 32, 40, 64])),
        kernel,
        draw(PAIR) if draw(st.booleans()) else (1, 1),
        (draw(st.integers(0, kernel[0] - 1)), draw(st.integers(0, kernel[1] - 1))),
        dilation=draw(PAIR) if draw(st.integers(1, 5)) == 1 else (1, 1),
        pad_value=draw(st.integers(0, 0xFFFFFFFF)),
        depthwise=depthwise,
        image=image,
        zero_point=draw(st.sampled_from([None, 0, -5])) if kind is INT8_INT8 else None,
        scale=draw(st.integers(-4, 9)) & 0xFFFF if kind.precision == 0 else 1,
        shift=draw(st.integers(0, 14)) if kind.precision == 0 else 0,
    )
    assume(min(conv.out) > 0)
    return conv


def run(engine: str, listed: list[dict[int, int]], memory: Any, strict: bool) -> dict[str, Any]:
    """Everything that can be seen after the programs, whose addresses are offsets into the memory."""
    board = Board(engine, strict)
    buffer = board.memory.create(1, 3 * SIZE, UNCACHED, 0)
    buffer.cpu[:] = memory
    moved = [{**p, **{o: buffer.iova + p[o] for o in (0x1070, 0x1110, 0x4020) if o in p}} for p in listed]
    outcomes = [board.run(moved), board.run(moved)]
    return {
        "outcomes": outcomes,
        "report": [str(v) for v in board.report.violations],
        "memory": buffer.dev.tobytes(),
        "groups": {name: (block.groups, block.pointer) for name, block in board.core.groups.blocks.items()},
    }


@settings(max_examples=200)
@given(st.data(), convolutions(), st.booleans())
def test_fast_equals_literal(data: st.DataObject, conv: Conv, strict: bool) -> None:
    """Whole chains: a convolution, its tiles with weights or features reused, something broken in them now and then."""
    at = [Placed(64 * data.draw(st.integers(0, 9))), Placed(SIZE), Placed(2 * SIZE + 16 * data.draw(st.integers(0, 9)))]
    chain = [program(conv, part, *at) for part in tiles(conv, data.draw(st.integers(1, 12)))][:4]  # type: ignore[arg-type]
    assume(conv.out_bytes < SIZE - 1024)
    for registers in chain[1:]:
        registers[0x1040] |= data.draw(st.sampled_from([0, 0, 1 << 13, 1 << 12]))
    if data.draw(st.integers(1, 3)) == 1:
        victim = data.draw(st.sampled_from(chain))
        offset = data.draw(st.sampled_from(sorted(victim)))
        if data.draw(st.booleans()):
            victim[offset] ^= 1 << data.draw(st.integers(0, 31))
        elif offset != 0x4004:
            del victim[offset]
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    memory = rng.integers(0, 256, 3 * SIZE, np.uint8)
    if data.draw(st.booleans()):  # sums that are exact in a double
        memory = (rng.integers(-9, 10, 3 * SIZE // 2).astype(np.float16) if conv.kind.precision == 2 else memory).view(
            np.uint8
        )
    literal, fast = (run(engine, chain, memory, strict) for engine in ("literal", "fast"))
    for what, seen in literal.items():
        assert seen == fast[what], what


class Placed:
    """Where an operand lies."""

    def __init__(self, iova: int) -> None:
        self.iova = iova


@pytest.mark.parametrize(
    "conv",
    [
        Conv(INT8, (14, 14), 64, 64, (3, 3), pad=(1, 1)),
        Conv(INT8_INT8, (15, 9), 48, 40, (3, 3), (2, 2), (1, 1), scale=0x4000, shift=20),
        Conv(INT8, (7, 7), 512, 32),
        Conv(FP16_FP16, (14, 14), 32, 128, (3, 3)),
        Conv(FP16, (10, 6), 24, 10, (1, 5), dilation=(1, 1)),
    ],
    ids=str,
)
def test_usual_convolutions_run_natively(conv: Conv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ork.emulator.convolve.run", lambda *_: pytest.fail("the long way"))
    board = Board("fast")
    image, kernels = operands(conv, np.random.default_rng(0))
    a, w = board.buffer(stored_image(conv, image)), board.buffer(stored_weights(conv, kernels))
    c = board.buffer(conv.out_bytes)
    assert board.run([program(conv, part, a, w, c) for part in tiles(conv)]).hang is None
    assert np.array_equal(read_output(conv, c.cpu)[..., : conv.N], expected(conv, image, kernels))
