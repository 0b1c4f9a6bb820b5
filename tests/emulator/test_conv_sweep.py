"""A sweep of convolutions against numpy: the layers of known networks, then 200 drawn from what one program may be.

Sizes 1 to 80, channels 3 to 1024, kernels 1, 3, 5 and 7, strides, pads, depthwise, images; int8 and fp16. Images too
large for the buffer are cut into row tiles, as hosts do.
"""

from __future__ import annotations

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
    tiles,
)
from tests.emulator.programs import FP16, FP16_FP16, INT8, INT8_INT8, Board

DRAWN = 200
_WORK, _FEATURES = 6_000_000, 400_000  # multiply-adds and features of a drawn shape: the sweep takes seconds
_BUFFER = 11 * 32768

NETWORKS = [
    # ResNet-50, MobileNet v1 and v2, VGG-16, YOLO heads, the vendor's captured layers
    Conv(INT8_INT8, (80, 80), 3, 32, (7, 7), (2, 2), (3, 3), image=3, pad_value=0x80, scale=3, shift=9),
    Conv(FP16_FP16, (56, 56), 64, 64, (3, 3), pad=(1, 1)),
    Conv(INT8_INT8, (56, 56), 64, 128, (3, 3), (2, 2), (1, 1), scale=3, shift=12),
    Conv(INT8, (28, 28), 128, 128, (3, 3), pad=(1, 1)),
    Conv(INT8, (14, 14), 256, 256, (3, 3), pad=(1, 1)),
    Conv(FP16, (14, 14), 1024, 64),
    Conv(INT8_INT8, (7, 7), 512, 512, (3, 3), pad=(1, 1), scale=3, shift=14),
    Conv(INT8_INT8, (80, 80), 64, 1, (3, 3), (2, 2), (1, 1), depthwise=True, scale=3, shift=9),
    Conv(FP16_FP16, (80, 56), 32, 1, (3, 3), pad=(1, 1), depthwise=True),
    Conv(INT8_INT8, (14, 14), 512, 1, (3, 3), pad=(1, 1), depthwise=True, scale=3, shift=9),
    Conv(FP16_FP16, (7, 7), 1024, 1, (3, 3), depthwise=True),
    Conv(FP16_FP16, (40, 40), 160, 32, (3, 3)),
    Conv(FP16_FP16, (7, 7), 832, 48),
    Conv(FP16_FP16, (1, 1), 1024, 1001),
    Conv(FP16_FP16, (3, 3), 128, 256, (3, 3)),
    Conv(FP16_FP16, (80, 80), 16, 128, (3, 3)),
    Conv(INT8, (20, 20), 255, 85),
    Conv(FP16_FP16, (28, 28), 256, 32, (3, 3)),
]


def draw(rng: np.random.Generator) -> Conv:
    """A convolution that one chain of programs can do: the kernels of a group and a window's lines fit the buffer."""
    while True:
        kind = [INT8, INT8_INT8, FP16, FP16_FP16][rng.integers(4)]
        depthwise = kind in (INT8_INT8, FP16_FP16) and rng.integers(3) == 0
        image = 0 if depthwise or rng.integers(5) else int(rng.integers(1, 5))
        kernel = tuple(int(k) for k in rng.choice([1, 3, 5, 7], 2))
        if rng.integers(3):
            kernel = (kernel[0], kernel[0])
        stride = (1, 1) if rng.integers(2) else tuple(int(s) for s in rng.integers(1, 5, 2))
        channels = int(rng.choice([3, 8, 16, 24, 32, 48, 64, 96, 128, 160, 256, 384, 512, 720, 1024]))
        conv = Conv(
            kind,
            (int(rng.integers(1, 81)), int(rng.integers(1, 81))),
            image or channels,
            1 if depthwise else int(rng.choice([1, 2, 6, 10, 16, 24, 32, 36, 48, 64, 96, 128, 255, 320])),
            kernel,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel),  # type: ignore[arg-type]
            pad_value=int(rng.integers(256)) if kind.precision == 0 else 0,
            depthwise=bool(depthwise),
            image=image,
            scale=int(rng.integers(1, 9)) if kind is INT8_INT8 else 1,
            shift=int(rng.integers(4, 15)) if kind is INT8_INT8 else 0,
        )
        (out_w, out_h), taps = conv.out, conv.kernel[0] * conv.kernel[1]
        one = taps * conv.channels * conv.itemsize
        group = one * (1 if depthwise else min(conv.N, conv.kind.group))
        lines = conv.kernel[1] * -(-conv.size[0] * conv.channels * conv.itemsize // 64) * 64
        work = out_w * out_h * taps * conv.C * conv.N
        if (
            min(conv.out) > 0
            and -(-group // 32768) * 32768 + lines <= _BUFFER
            and max(work / _WORK, conv.size[0] * conv.size[1] * conv.C / _FEATURES) <= 1
        ):
            return conv


def shapes() -> list[Conv]:
    rng = np.random.default_rng(2024)
    return NETWORKS + [draw(rng) for _ in range(DRAWN)]


def run(conv: Conv, engine: str) -> None:
    board = Board(engine)
    image, kernels = operands(conv, np.random.default_rng(7))
    a, w = board.buffer(stored_image(conv, image)), board.buffer(stored_weights(conv, kernels))
    c = board.buffer(conv.out_bytes)
    outcome = board.run([program(conv, part, a, w, c) for part in tiles(conv)])
    assert outcome.hang is None
    assert not [v for v in board.report.violations if v.severity == "error"]
    want = expected(conv, image, kernels)
    assert np.array_equal(read_output(conv, c.cpu)[..., : want.shape[-1]], want)


@pytest.mark.parametrize("conv", shapes(), ids=str)
def test_sweep(conv: Conv) -> None:
    run(conv, "fast")


@pytest.mark.parametrize("conv", shapes()[len(NETWORKS) :: 8], ids=str)
def test_sweep_literally(conv: Conv) -> None:
    run(conv, "literal")


def test_the_sweep_covers_what_it_says() -> None:
    drawn = shapes()
    assert len(set(drawn)) >= 200
    for kinds in ((INT8, INT8_INT8), (FP16, FP16_FP16)):
        of_kind = [c for c in drawn if c.kind in kinds]
        assert {c.kernel[0] for c in of_kind} == {1, 3, 5, 7}
        assert {c.depthwise for c in of_kind} == {True, False}
        assert {c.image for c in of_kind} >= {0, 1, 3, 4}
        assert any(max(c.stride) > 2 for c in of_kind)
        assert any(c.pad != (0, 0) for c in of_kind)
        assert any(len(tiles(c)) > 1 for c in of_kind)
    sizes, channels = [n for c in drawn for n in c.size], [c.C for c in drawn]
    assert (min(sizes), max(sizes), min(channels), max(channels)) == (1, 80, 1, 1024)
