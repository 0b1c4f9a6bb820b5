"""Convolutions for tests: programs written from the register tables by hand, layouts, and their definition in numpy.

Nothing here uses the emulator's own idea of a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ork.emulator.memory import Buffer
from tests.emulator.programs import Array, Kind, nibbles

BANK = 32768
BANKS = 12
DTYPES = {0: np.int8, 1: np.int16, 2: np.float16}
OUTPUTS = {(0, 1): "<i1", (0, 2): "<i2", (0, 4): "<i4", (1, 4): "<i4", (2, 2): "<f2", (2, 4): "<f4"}


@dataclass(frozen=True)
class Conv:
    """One convolution; `size`, `kernel`, `stride`, `dilation` and `pad` are (x, y), `pad` on the left and the top.

    `image`: the features are pixels of that many channels side by side, `pitch` pixels a line.
    """

    kind: Kind
    size: tuple[int, int]
    C: int
    N: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    end_pad: tuple[int, int] | None = None  # on the right and the bottom; None: as `pad`
    dilation: tuple[int, int] = (1, 1)
    pad_value: int = 0
    depthwise: bool = False
    image: int = 0
    pitch: int = 0
    zero_point: int | None = None  # of the weights: the operand of the OW term
    scale: int = 1
    shift: int = 0

    def __str__(self) -> str:
        what = "depthwise-" * self.depthwise + f"image{self.image}-" * bool(self.image)
        (w, h), (kw, kh), (sx, sy), (px, py) = self.size, self.kernel, self.stride, self.pad
        kind = f"{('i8', 'i16', 'f16')[self.kind.precision]}o{8 * self.kind.out_bytes}"
        return f"{what}{kind}-{w}x{h}x{self.C}-n{self.N}-k{kw}x{kh}-s{sx}{sy}-p{px}{py}"

    @property
    def itemsize(self) -> int:
        return self.kind.bits // 8

    @property
    def channels(self) -> int:
        """As the chip counts them: whole atoms."""
        atom = 16 // self.itemsize
        return -(-self.C // atom) * atom

    @property
    def results(self) -> int:
        return self.channels if self.depthwise else self.N

    @property
    def group(self) -> int:
        """Results that are written together."""
        return {8: 64, 16: 32}[self.kind.bits] if self.depthwise else self.kind.group

    @property
    def written(self) -> int:
        return -(-self.results // self.group) * self.group

    @property
    def out(self) -> tuple[int, int]:
        end = self.pad if self.end_pad is None else self.end_pad
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation)]
        x, y = ((n + p + e - r) // s + 1 for n, p, e, r, s in zip(self.size, self.pad, end, reach, self.stride))
        return x, y

    @property
    def out_dtype(self) -> str:
        return OUTPUTS[self.kind.precision, self.kind.out_bytes]

    @property
    def out_bytes(self) -> int:
        return self.out[0] * self.out[1] * self.written * self.kind.out_bytes


def operands(conv: Conv, rng: np.random.Generator) -> tuple[Array, Array]:
    """image [H, W, C] and kernels [N, kh, kw, C] ([1, kh, kw, C] if depthwise); fp16: integers whose sums are exact."""
    (W, H), (kw, kh) = conv.size, conv.kernel
    shapes = (H, W, conv.C), (1 if conv.depthwise else conv.N, kh, kw, conv.C)
    low, high = {0: (-128, 128), 1: (-300, 300), 2: (-4, 5)}[conv.kind.precision]
    image, kernels = (rng.integers(low, high, shape).astype(DTYPES[conv.kind.precision]) for shape in shapes)
    return image, kernels


def sums(conv: Conv, image: Array, kernels: Array) -> Array:
    """float64 [out_h, out_w, results], by definition: one product of matrices per kernel tap."""
    (W, H), (kw, kh), (out_w, out_h) = conv.size, conv.kernel, conv.out
    (sx, sy), (dx, dy), (px, py) = conv.stride, conv.dilation, conv.pad
    padding = np.array([conv.pad_value], "<u4").view(image.dtype)[0]
    wide = np.full((H + 200, W + 200, conv.C), padding, np.float64)
    wide[py : py + H, px : px + W] = image
    total = np.zeros((out_h, out_w, conv.C if conv.depthwise else conv.N))
    for ky in range(kh):
        for kx in range(kw):
            window = wide[ky * dy :, kx * dx :][: out_h * sy : sy, : out_w * sx : sx]
            tap = kernels[:, ky, kx].astype(np.float64) + (conv.zero_point or 0)
            total += window * tap[0] if conv.depthwise else window @ tap.T
    return total


def expected(conv: Conv, image: Array, kernels: Array) -> Array:
    """[out_h, out_w, C or N] in the output's type; scaled ones round halves to even and saturate."""
    total = sums(conv, image, kernels)
    if conv.kind.precision == 2 or conv.kind.out_bytes == 4:
        return total.astype(conv.out_dtype)
    limits = np.iinfo(conv.out_dtype)
    return np.rint(total * conv.scale / 2.0**conv.shift).clip(limits.min, limits.max).astype(conv.out_dtype)


# --- layouts ---


def stored_image(conv: Conv, image: Array) -> Array:
    """Bytes of the features: surfaces of atoms, or lines of pixels."""
    H, W, C = image.shape
    if conv.image:
        lines = np.zeros((H, conv.pitch or W, C), image.dtype)
        lines[:, :W] = image
        return lines.reshape(-1).view(np.uint8)
    padded = np.zeros((H * W, conv.channels), image.dtype)
    padded[:, :C] = image.reshape(H * W, C)
    return np.ascontiguousarray(padded.view(np.uint8).reshape(H * W, -1, 16).transpose(1, 0, 2)).reshape(-1)


def stored_weights(conv: Conv, kernels: Array) -> Array:
    """Bytes of the kernels, in the chip's order, channels padded to whole atoms with zeros."""
    n, kh, kw, C = kernels.shape
    padded = np.zeros((n, kh, kw, conv.channels), kernels.dtype)
    padded[..., :C] = kernels
    block = conv.group if conv.depthwise else 32
    parts = []
    for first in range(0, n, conv.kind.group):
        for channel in range(0, conv.channels, block):
            part = padded[first : first + conv.kind.group, :, :, channel : channel + block]
            parts.append(part.transpose(1, 2, 0, 3).reshape(-1))  # row, column, kernel, channel
    flat = np.concatenate(parts)
    return nibbles(flat) if conv.kind.bits == 4 else flat.view(np.uint8)


def read_output(conv: Conv, raw: Array) -> Array:
    """[out_h, out_w, written channels] out of a dense output."""
    (out_w, out_h) = conv.out
    surfaces = raw[: conv.out_bytes].reshape(-1, out_h * out_w, 16).transpose(1, 0, 2)
    return np.ascontiguousarray(surfaces).reshape(-1).view(conv.out_dtype).reshape(out_h, out_w, -1)


# --- programs ---


def registers(
    conv: Conv, height: int | None = None, pad_top: int | None = None, rows: int | None = None
) -> dict[int, int]:
    """A program, addresses left 0, that makes `rows` output lines out of `height` input lines (default: all).

    A part of an image keeps the strides of the whole one.
    """
    (W, H), (kw, kh), (out_w, out_h) = conv.size, conv.kernel, conv.out
    height = H if height is None else height
    rows = out_h if rows is None else rows
    pad_top = conv.pad[1] if pad_top is None else pad_top
    precision, C = conv.kind.precision, conv.channels
    stored = 1 if conv.depthwise else conv.N
    one = kw * kh * C * conv.itemsize
    entries = -(-W * C * conv.itemsize // 64)
    data = min(max(-(-height * entries // 512), 1), BANKS - 1)
    atoms = conv.group * conv.kind.out_bytes // 16
    size_e = (atoms - 1) * 0b1001001 << 2
    mode = 3 if conv.depthwise else 0
    image = (7 + conv.image) << 12 | 3 << 29 if conv.image else 0
    qd = conv.zero_point is not None
    pitch = 16 * out_w * out_h
    dilation = [0 if d == 1 else d for d in conv.dilation]
    fp16_out = precision == 2 and conv.kind.out_bytes == 2
    return {
        0x4004: 0xE,
        0x100C: image | precision << 7 | precision << 4 | mode,
        0x1010: 0x50,
        0x1014: dilation[1] << 21 | dilation[0] << 16 | conv.stride[1] << 3 | conv.stride[0],
        0x1020: W << 16 | height,
        0x1024: (conv.C - 1) << 16 | C,
        0x1028: out_w,
        0x102C: out_w * rows,
        0x1030: one * stored,
        0x1034: one,
        0x1038: kw << 24 | kh << 16 | stored,
        0x1040: (BANKS - data) << 4 | data,
        0x1044: 4 * height * entries if conv.image else entries,
        0x104C: 0xB,
        0x1060: 0,
        0x1068: conv.pad[0] << 4 | pad_top,
        0x1070: 0,
        0x107C: (conv.pitch or W) if conv.image else 4 * W,
        0x1080: (H - 4) * W & 0xFFFFFFF,
        0x1100: 0,
        0x1110: 0,
        0x1184: conv.pad_value,
        0x3010: precision << 8 | conv.depthwise << 1 | (precision != 2 or qd),
        0x3014: (rows - 1) << 16 | (out_w - 1),
        0x3018: conv.written - 1,
        0x400C: 0x1E4 | mode << 3,
        0x4010: conv.kind.data_format,
        0x4020: 0,
        0x4024: pitch,
        0x4030: out_w - 1,
        0x4034: rows - 1,
        0x4038: 0,
        0x403C: (conv.written - 1) * 0x10001,
        0x4040: 0x53,
        0x4050: size_e | (0 if qd else 2),
        0x4054: (conv.zero_point or 0) & 0xFFFF,
        0x4058: conv.written - 1,
        0x405C: (rows - 1) << 16 | (out_w - 1),
        0x4060: 0x53,
        0x4070: 0x383,
        0x4080: 0,
        0x4084: 0x10001 if fp16_out else conv.scale,
        0x4088: conv.shift,
        0x40C0: atoms * pitch,
    }


@dataclass(frozen=True)
class Tile:
    """Output lines [first, first + rows), out of `height` input lines from `top`."""

    first: int
    rows: int
    top: int
    height: int
    pad_top: int


def tile(conv: Conv, first: int, rows: int) -> Tile:
    start = first * conv.stride[1] - conv.pad[1]
    end = start + (rows - 1) * conv.stride[1] + (conv.kernel[1] - 1) * conv.dilation[1] + 1
    top = max(start, 0)
    return Tile(first, rows, top, min(end, conv.size[1]) - top, max(-start, 0))


def tiles(conv: Conv, most: int = 1 << 30) -> list[Tile]:
    """Cuts of the output lines, so that the input lines of each fit beside one group of kernels."""
    one = conv.kernel[0] * conv.kernel[1] * conv.channels * conv.itemsize
    group = one * (1 if conv.depthwise else min(conv.N, conv.kind.group))
    banks = BANKS - max(-(-group // BANK), 1)
    lines = banks * 512 // -(-conv.size[0] * conv.channels * conv.itemsize // 64)
    found, first, out_h = [], 0, conv.out[1]
    while first < out_h:
        rows = next(n for n in range(min(out_h - first, most), 0, -1) if tile(conv, first, n).height <= lines)
        found.append(tile(conv, first, rows))
        first += rows
    return found


def program(conv: Conv, part: Tile, a: Buffer, w: Buffer, c: Buffer) -> dict[int, int]:
    """The program of one tile, with its addresses."""
    line = (conv.pitch or conv.size[0]) * conv.image * conv.itemsize if conv.image else 16 * conv.size[0]
    return {
        **registers(conv, part.height, part.pad_top, part.rows),
        0x1070: a.iova + part.top * line,
        0x1110: w.iova,
        0x4020: c.iova + part.first * 16 * conv.out[0],
    }


def narrowed(conv: Conv, kind: Kind, **changes: object) -> Conv:
    """The same convolution with another output."""
    return replace(conv, kind=kind, **changes)  # type: ignore[arg-type]
