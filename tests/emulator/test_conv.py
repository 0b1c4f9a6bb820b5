"""Convolutions of every kind in the literal engine, against their definition in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

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
from tests.emulator.programs import FP16, FP16_FP16, INT8, INT8_INT8, INT8_INT16, INT16, Array, Board

ENGINES = pytest.mark.parametrize("engine", ["literal", "fast"])


def convolve(
    conv: Conv, image: Array, kernels: Array, engine: str = "literal", most: int = 1 << 30, **more: int
) -> tuple[Array, set[str]]:
    """[out_h, out_w, written channels] by the emulator, in tiles of at most `most` lines, and the rules that broke, no
    errors among them. `more`: registers, as r1040=..."""
    board = Board(engine)
    a, w = board.buffer(stored_image(conv, image)), board.buffer(stored_weights(conv, kernels))
    c = board.buffer(conv.out_bytes)
    changed = {int(name[1:], 16): value for name, value in more.items()}
    outcome = board.run([program(conv, part, a, w, c) | changed for part in tiles(conv, most)])
    assert outcome.hang is None
    assert not [v for v in board.report.violations if v.severity == "error"]
    return read_output(conv, c.cpu), set(board.report.counts)


def check(conv: Conv, engine: str = "literal", most: int = 1 << 30) -> set[str]:
    """The rules that a convolution of random data broke, after its results proved right."""
    image, kernels = operands(conv, np.random.default_rng(0))
    got, rules = convolve(conv, image, kernels, engine, most)
    want = expected(conv, image, kernels)
    assert np.array_equal(got[..., : want.shape[-1]], want)
    return rules


@ENGINES
@pytest.mark.parametrize(
    "conv",
    [
        Conv(INT8, (7, 6), 48, 40, (3, 3), pad=(1, 1), pad_value=0x83),
        Conv(INT8, (9, 11), 16, 32, (5, 3), (2, 3), (2, 1)),
        Conv(INT8, (12, 4), 96, 6, (1, 4), (1, 1), (0, 3), end_pad=(0, 0)),
        Conv(INT8_INT8, (6, 6), 64, 64, (3, 3), pad=(1, 1), scale=0x5000, shift=25),
        Conv(INT8_INT16, (6, 6), 32, 32, (2, 2), scale=0x5000, shift=20),
        Conv(INT16, (5, 6), 40, 24, (3, 2)),
        Conv(FP16, (8, 5), 40, 20, (3, 3), pad=(1, 1)),
        Conv(FP16_FP16, (10, 9), 24, 48, (3, 5), (2, 1), (1, 0)),
    ],
    ids=str,
)
def test_spatial_kernels(conv: Conv, engine: str) -> None:
    check(conv, engine)


@ENGINES
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize(
    ("kind", "C"),
    [(INT8_INT8, 32), (INT8_INT8, 64), (INT8_INT8, 80), (INT8_INT16, 64), (FP16_FP16, 8), (FP16_FP16, 96)],
)
def test_depthwise(kind, C: int, kernel: tuple[int, int], engine: str) -> None:  # type: ignore[no-untyped-def]
    conv = Conv(kind, (9, 7), C, 1, kernel, pad=(kernel[0] // 2, kernel[1] // 2), depthwise=True)
    rules = check(replace(conv, scale=3, shift=10) if kind is INT8_INT8 else conv, engine)
    assert rules <= {"depthwise", "padding", "int16-overflow"}
    assert ("depthwise" in rules) == (kind is INT8_INT16 or (kind is FP16_FP16 and C > 32))


def test_depthwise_of_infinities_keeps_them_in_their_channel() -> None:
    conv = Conv(FP16, (3, 2), 32, 1, (2, 1), depthwise=True)
    image, kernels = operands(conv, np.random.default_rng(0))
    image[0, 0, 3], kernels[0, 0, 1, 5], image[:, :, 5] = np.inf, np.nan, 1
    kernels[0, 0, 0, 3] = 2
    (got, _), want = convolve(conv, image, kernels), expected(conv, image, kernels)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.isinf(got[0, 0, 3])
    assert np.isfinite(np.delete(got, [3, 5], axis=2)).all()


@ENGINES
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [INT8, FP16_FP16])
def test_images(kind, channels: int, engine: str) -> None:  # type: ignore[no-untyped-def]
    conv = Conv(kind, (13, 10), channels, 24, (3, 3), (2, 2), (1, 1), image=channels, pitch=14)
    rules = check(conv, engine)
    assert rules == {
        *(["padding", "fp16-window"] if kind is FP16_FP16 else ["image"] if channels > 1 else []),
    }


@ENGINES
def test_tiles_of_an_image_begin_at_any_byte(engine: str) -> None:
    conv = Conv(INT8, (13, 10), 3, 32, (3, 3), image=3, pitch=13)
    assert check(conv, engine, most=2) == {"image", "image-alignment"}


def test_a_converter_makes_unsigned_bytes_signed() -> None:
    conv = Conv(INT8, (6, 5), 1, 32, (3, 3), image=1)
    rng = np.random.default_rng(0)
    raw, (_, kernels) = rng.integers(0, 256, (5, 6, 1), np.uint8), operands(conv, rng)
    got, rules = convolve(
        conv, raw.view(np.int8), kernels,
        r104c=14 << 22 | 14 << 16 | 14 << 10 | 14 << 4,
        **{f"r{offset:x}": 0x4000 << 16 | (-128 & 0xFFFF) for offset in (0x1050, 0x1054, 0x1058, 0x105C)},
        r1180=0xFFFF,
    )  # fmt: skip
    assert not rules
    assert np.array_equal(got, expected(conv, (raw.astype(np.int16) - 128).astype(np.int8), kernels))


def test_a_converter_scales_moves_and_saturates_channel_by_channel() -> None:
    conv = Conv(INT8, (6, 5), 3, 32, image=3)
    rng = np.random.default_rng(0)
    image, kernels = operands(conv, rng)
    for add_first in (0, 1):
        got, rules = convolve(
            conv, image, kernels, r104c=3 << 16 | 2 << 10 | 1 << 4 | 1 << 3 | add_first << 1,
            r1050=5 << 16 | 7, r1054=(-3 & 0xFFFF) << 16 | (-9 & 0xFFFF), r1058=200 << 16, r105c=0, r1180=0b011,
        )  # fmt: skip
        assert rules == {"feature-conversion", "image"}
        wide, scale, offset, step = image.astype(np.float64), [5, -3, 200], [7, -9, 0], [2.0, 4.0, 8.0]
        moved = np.rint((wide + offset) * scale / step) if add_first else np.rint(wide * scale / step) + offset
        moved = np.where([True, True, False], moved.clip(-128, 127), wide)  # the third is not enabled
        assert np.array_equal(got, expected(conv, moved.astype(np.int8), kernels))


@ENGINES
@pytest.mark.parametrize("depthwise", [False, True])
def test_weight_zero_points(depthwise: bool, engine: str) -> None:
    """The OW term: every weight moved by an operand, the padding's pixels included."""
    for zero_point in (5, -77):
        conv = Conv(
            INT8_INT8, (8, 7), 64, 64, (3, 3), (2, 1), (1, 1), pad_value=0xFFFFFF83,
            depthwise=depthwise, zero_point=zero_point, scale=0x4800, shift=21 if depthwise else 27,
        )  # fmt: skip
        assert not check(conv, engine)


@ENGINES
def test_weight_zero_points_need_all_three_switches(engine: str) -> None:
    conv = Conv(INT8, (8, 7), 32, 32, (3, 3), zero_point=9)
    image, kernels = operands(conv, np.random.default_rng(0))
    plain = expected(replace(conv, zero_point=None), image, kernels)
    assert not np.array_equal(convolve(conv, image, kernels, engine)[0], plain)
    for off in ({"r3010": 0}, {"r4050": 0x7FE}, {"r4054": 0}):
        assert np.array_equal(convolve(conv, image, kernels, engine, **off)[0], plain)


@ENGINES
@pytest.mark.parametrize("most", [1, 3, 4])
@pytest.mark.parametrize("kind", [INT8, FP16_FP16])
def test_row_tiles_give_the_whole(kind, most: int, engine: str) -> None:  # type: ignore[no-untyped-def]
    check(Conv(kind, (7, 13), 64, 32, (3, 3), (1, 2), (1, 1)), engine, most)


# --- rules ---


def broken(conv: Conv, strict: bool, **more: int) -> tuple[bool, set[str]]:
    """Whether one program with registers changed comes out right, and the rules it broke."""
    board = Board("literal", strict)
    image, kernels = operands(conv, np.random.default_rng(0))
    a, w = board.buffer(stored_image(conv, image)), board.buffer(stored_weights(conv, kernels))
    c = board.buffer(conv.out_bytes)
    changed = {int(name[1:], 16): value for name, value in more.items()}
    outcome = board.run([program(conv, tile(conv, 0, conv.out[1]), a, w, c) | changed])
    assert outcome.hang is None
    want = expected(conv, image, kernels)
    return np.array_equal(read_output(conv, c.cpu)[..., : want.shape[-1]], want), set(board.report.counts)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("depthwise-kernels", {"r1038": 3 << 24 | 3 << 16 | 2, "r1030": 2 * 9 * 64}),
        ("conv-mode", {"r3010": 1}),
    ],
)
def test_depthwise_programs_that_contradict_themselves(rule: str, wrong: dict[str, int], strict: bool) -> None:
    conv = Conv(INT8_INT8, (8, 7), 64, 1, (3, 3), depthwise=True, shift=8)
    right, rules = broken(conv, strict, **wrong)
    assert rules == {rule}
    assert right == (not strict)


def test_image_flags_and_zero_points_of_int16_are_unproven() -> None:
    conv = Conv(INT8, (8, 7), 1, 32, (3, 3), image=1)
    assert broken(conv, True, r100c=8 << 12) == (True, {"image-flags"})
    assert broken(Conv(INT16, (8, 7), 32, 16, zero_point=3), True) == (True, {"window-sums"})
