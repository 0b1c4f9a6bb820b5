"""What the chip reads: feature atoms in both geometries, and kernels in the order they are stored.

With L = line stride, S = surface stride, W = width, all in 16-byte atoms (derived from captures; executed):

    group mode   atom(c, h, w) = base + (h div 4) * L + c * (4 * W + S) + (h mod 4) * W + w
    off mode     atom(c, h, w) = base + h * L + c * (W + S) + w

Images have pixels of 1 to 4 channels side by side, and L in pixels; channels that they do not have are 0 (executed):

    image        pixel(h, w) = base + (h * L + w) * bytes of a pixel

Kernels: group of G > block of 32 channels > kernel row > kernel column > kernel in group > channel in block, the last
group and the last block dense. Depthwise: block of channels > kernel row > kernel column > channel in block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator.memory import Domain
from ork.emulator.rounding import shift_round
from ork.emulator.task import BLOCK, Conversion, Task
from ork.npu.isa import Precision

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]

ATOM: Final = 16
WINDOW: Final = (1 << 32) - 1  # device addresses wrap at 32 bits
_DTYPES: Final = {Precision.INT8: "<i1", Precision.INT16: "<i2", Precision.FP16: "<f2"}


def feature_addresses(task: Task, base: int, lines: int) -> Addresses:
    """Device addresses of the atoms of the first `lines` lines: int64 [surfaces, lines, width]."""
    c = np.arange(task.surfaces, dtype=np.int64)[:, None, None]
    h = np.arange(lines, dtype=np.int64)[None, :, None]
    w = np.arange(task.width, dtype=np.int64)[None, None, :]
    pitch = ATOM * task.width
    if task.group_mode:
        offsets = h // 4 * task.line_stride + c * (4 * pitch + task.surf_stride) + h % 4 * pitch + w * ATOM
    else:
        offsets = h * task.line_stride + c * (pitch + task.surf_stride) + w * ATOM
    return (base + offsets) & WINDOW


def features(domain: Domain, task: Task, base: int, lines: int) -> Array:
    """Values of the first `lines` lines: [lines, width, channels] in int8 (int4 too), int16 or float16, converted.

    Raises IommuFault.
    """
    if task.image:
        values, real = _image(domain, task, base, lines), min(task.image, task.channels)
    else:
        values, real = _surfaces(domain, task, base, lines), task.channels
    if task.conversion is not None:
        values[..., :real] = convert(values[..., :real], task.conversion)
    return values


def _surfaces(domain: Domain, task: Task, base: int, lines: int) -> Array:
    atoms = gather(domain, feature_addresses(task, base, lines))
    pixels = np.ascontiguousarray(atoms.transpose(1, 2, 0, 3)).reshape(lines, task.width, task.surfaces * ATOM)
    return elements(pixels, task.precision)[..., : task.channels]


def _image(domain: Domain, task: Task, base: int, lines: int) -> Array:
    itemsize = task.kind.bits // 8
    row = task.width * task.image * itemsize
    end = base + (lines - 1) * task.line_stride + row
    if not lines:
        return np.zeros((0, task.width, task.channels), _DTYPES[Precision(task.precision)])
    if task.line_stride >= row and end <= WINDOW + 1:
        raw = domain.read_rows(base, lines, row, task.line_stride)
    else:
        raw = np.stack([domain.read(base + line * task.line_stride & WINDOW, row) for line in range(lines)])
    pixels = elements(np.ascontiguousarray(raw), task.precision).reshape(lines, task.width, task.image)
    values = np.zeros((lines, task.width, task.channels), pixels.dtype)
    values[..., : task.image] = pixels[..., : task.channels]
    return values


def convert(values: Array, how: Conversion) -> Array:
    """int8 features [..., channels] through the converter: scaled, shifted, moved (or moved first), saturated.

    Executed: unsigned bytes, scaled first, with a shift that leaves no remainder. The rest follows the manual's names.
    """
    channel = np.arange(values.shape[-1])
    place = channel % len(how.scales)
    scale, offset, shift = (np.array(x, np.int64)[place] for x in (how.scales, how.offsets, how.shifts))
    wide = values.astype(np.int64) if how.signed else values.view(np.uint8).astype(np.int64)
    scaled = (wide + offset * how.add_first) * scale
    columns = [shift_round(scaled[..., c], int(shift[c]), half_up=how.half_up) for c in channel]
    moved = np.stack(columns, axis=-1) + offset * (not how.add_first)
    enabled = how.enabled >> channel % 32 & 1 == 1
    converted: Array = np.where(enabled, moved.clip(-128, 127), values).astype(np.int8)
    return converted


def elements(raw: Bytes, precision: int) -> Array:
    """The elements in the last axis of `raw` bytes; int4 as int8, the even element in the low nibble."""
    if precision != Precision.INT4:
        return raw.view(_DTYPES[Precision(precision)])
    signed = raw.view(np.int8)
    out = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.int8)
    out[..., 0::2] = (signed << 4) >> 4
    out[..., 1::2] = signed >> 4
    return out


def kernels(raw: Bytes, task: Task, first: int, last: int) -> Array:
    """Kernels [first, last) of the stored bytes: [kernels, kernel_height, kernel_width, channels]; depthwise, channels
    [first, last) of the one kernel: [1, kernel_height, kernel_width, channels].

    `first` is a multiple of the group; so is `last`, unless it is the number of kernels (channels).
    """
    if task.depthwise:
        return _channels(raw, task, first, last)
    size, bits = task.kernel_elements, task.kind.bits
    stored = elements(raw[first * size * bits // 8 : -(-last * size * bits // 8)], task.precision)
    parts, at = [], 0
    for kernels_in_group, groups in _groups(last - first, task.kind.group):
        count = groups * kernels_in_group * size
        parts.append(_unblock(stored[at : at + count], task, groups, kernels_in_group))
        at += count
    return np.concatenate(parts)


def _channels(raw: Bytes, task: Task, first: int, last: int) -> Array:
    taps, group = task.kernel_height * task.kernel_width, task.group
    stored = elements(raw, task.precision)[first * taps : last * taps]
    parts = []
    for at in range(0, last - first, group):
        block = stored[at * taps : (at + group) * taps]
        parts.append(block.reshape(task.kernel_height, task.kernel_width, -1))
    return np.concatenate(parts, axis=-1)[None]


def _groups(count: int, group: int) -> Iterator[tuple[int, int]]:
    """(kernels in a group, such groups): the whole groups, then the short one."""
    if count // group:
        yield group, count // group
    if count % group:
        yield count % group, 1


def _unblock(stored: Array, task: Task, groups: int, n: int) -> Array:
    """`groups` kernel groups of `n` kernels, out of their channel blocks."""
    kh, kw, C = task.kernel_height, task.kernel_width, task.channels
    blocks, rest = divmod(C, BLOCK)
    rows = stored.reshape(groups, -1)
    cut = blocks * BLOCK * kh * kw * n
    whole = rows[:, :cut].reshape(groups, blocks, kh, kw, n, BLOCK).transpose(0, 4, 2, 3, 1, 5)
    short = rows[:, cut:].reshape(groups, kh, kw, n, rest).transpose(0, 3, 1, 2, 4)
    values = np.concatenate([whole.reshape(groups, n, kh, kw, blocks * BLOCK), short], axis=-1)
    return values.reshape(groups * n, kh, kw, C)


# --- atoms in memory ---


def runs(addresses: Addresses) -> tuple[Addresses, Addresses]:
    """(start, bytes) of the stretches that ascending atom addresses without repetitions form."""
    breaks = np.flatnonzero(np.diff(addresses) != ATOM) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([starts, [len(addresses)]]))
    return addresses[starts], counts * ATOM


def gather(domain: Domain, addresses: Addresses) -> Bytes:
    """The atoms at these addresses: uint8 [*addresses.shape, 16]. Reads no byte beside them. Raises IommuFault."""
    atoms, inverse = np.unique(addresses, return_inverse=True)
    if not atoms.size:
        return np.empty((*addresses.shape, ATOM), np.uint8)
    starts, sizes = runs(atoms)
    pitch = int(starts[1] - starts[0]) if len(starts) > 1 else 0
    if (sizes == sizes[0]).all() and (np.diff(starts) == pitch).all():
        read = domain.read_rows(int(starts[0]), len(starts), int(sizes[0]), pitch).reshape(-1)
    else:
        read = np.concatenate([domain.read(s, n) for s, n in zip(starts.tolist(), sizes.tolist())])
    return read.reshape(-1, ATOM)[inverse.reshape(addresses.shape)]


def mapped(domain: Domain, addresses: Addresses) -> None:
    """Raises IommuFault unless all these atoms are mapped."""
    starts, sizes = runs(np.unique(addresses))
    for start, size in zip(starts.tolist(), sizes.tolist()):
        domain.locate(start, size)


def scatter(domain: Domain, addresses: Addresses, atoms: Bytes) -> None:
    """Write atoms [*addresses.shape, 16] in order: the last of several at one address stays. Raises IommuFault."""
    flat = addresses.reshape(-1)
    # np.unique returns the first of equals: of the reversed order, that is the last written
    at, order = np.unique(flat[::-1], return_index=True)
    data = np.ascontiguousarray(atoms.reshape(-1, ATOM)[len(flat) - 1 - order]).reshape(-1)
    starts, sizes = runs(at)
    offset = 0
    for start, size in zip(starts.tolist(), sizes.tolist()):
        domain.write(start, data[offset : offset + size])
        offset += size
