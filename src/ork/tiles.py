"""The NPU's weight layouts: the only place that knows how a weight matrix becomes the bytes of a slice.

A weight is `[N, K]`: N output channels, K inputs. The chip reads tiles of G channels by 32 inputs, G depending on the
width of a code, and wants each K slice of at most 4096 inputs contiguous:

    codes       [K/ks][n/G][ks/32][G][32]     i8, i4, nf4, f16; two 4-bit codes a byte, the even k in the low nibble
                [n/16][K][16]                 f32, which no chip reads
    channel     [n] f32                       i8, i4, nf4
    groups      [n/G][K/group][G] f16         only if group > 0

K is padded to 32 and N to 64; padding holds zero codes and zero scales. Pure functions of numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

K_ALIGN: Final = 32  # inputs of one tile
N_ALIGN: Final = 64  # the widest tile's channels, so that every codec shares one padding
KS_MAX: Final = 4096  # the longest K slice
COLUMNS_MAX: Final = 8192  # the most channels one program takes
SLICE_BYTES: Final = 2 << 20  # code bytes a slice aims at
PART_ALIGN: Final = 64  # of each part of a blob

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """How one codec's codes are stored: `number` is its mark in a pack, `dtype` the array that holds unpacked codes."""

    name: str
    number: int
    G: int
    bits: int
    scaled: bool
    dtype: np.dtype[Any]


CODECS: Final[Mapping[str, Codec]] = MappingProxyType(
    {
        c.name: c
        for c in (
            Codec("i8", 1, 32, 8, True, np.dtype(np.int8)),
            Codec("i4", 2, 64, 4, True, np.dtype(np.int8)),  # -8..7, two's complement nibbles
            Codec("nf4", 3, 64, 4, True, np.dtype(np.int8)),  # 0..15, indices into the NF4 table
            Codec("f16", 4, 16, 16, False, np.dtype(np.float16)),
            Codec("f32", 5, 16, 32, False, np.dtype(np.float32)),
        )
    }
)


@dataclass(frozen=True)
class Part:
    """Bytes [offset, offset + nbytes) of a blob."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class SliceLayout:
    """Where the parts of a slice of `n` channels by `K` (padded) inputs lie. Absent parts have 0 bytes."""

    codec: Codec
    K: int
    n: int
    group: int
    ks: int
    codes: Part
    channel: Part
    groups: Part
    nbytes: int


def pad_k(K: int) -> int:
    return -(-K // K_ALIGN) * K_ALIGN


def pad_n(N: int) -> int:
    return -(-N // N_ALIGN) * N_ALIGN


def check_group(K: int, group: int) -> None:
    """Raise ValueError unless `group` (0 = none) is a multiple of 32, at most 4096, that divides the padded K."""
    if group and (group < 0 or group % K_ALIGN or group > KS_MAX or K % group):
        raise ValueError(f"group {group} is not a multiple of {K_ALIGN} up to {KS_MAX} that divides K = {K}")


def ks_of(K: int, group: int = 0) -> int:
    """Inputs per K slice: the padded K itself up to 4096, else its largest divisor up to 4096 that is a multiple of 32
    and of the group (one exists: 32 divides a padded K, and the group does)."""
    if K <= 0 or K % K_ALIGN:
        raise ValueError(f"K = {K} is not a positive multiple of {K_ALIGN}")
    check_group(K, group)
    if K <= KS_MAX:
        return K
    step = group or K_ALIGN
    return next(ks for ks in range(KS_MAX // step * step, 0, -step) if K % ks == 0)


def slice_columns(codec: str, K: int, N: int, group: int = 0) -> list[tuple[int, int]]:
    """The columns [n0, n1) of each slice of a tensor, over the padded N: multiples of 64, as many as fit 2 MiB of
    codes, at least 64, at most 8192; the last slice may be narrower."""
    if N <= 0:
        raise ValueError(f"N = {N} is not positive")
    Kp, Np = pad_k(K), pad_n(N)
    check_group(Kp, group)
    per_column = Kp * CODECS[codec].bits // 8
    width = min(max(SLICE_BYTES // per_column // N_ALIGN * N_ALIGN, N_ALIGN), COLUMNS_MAX)
    return [(n0, min(n0 + width, Np)) for n0 in range(0, Np, width)]


@lru_cache(maxsize=1024)
def slice_layout(codec: str, K: int, n: int, group: int = 0) -> SliceLayout:
    """Offsets and sizes of the parts of a blob. `n` is a multiple of 64, K is padded here."""
    c, K = CODECS[codec], pad_k(K)
    ks = ks_of(K, group)
    if n <= 0 or n % N_ALIGN or n > COLUMNS_MAX:
        raise ValueError(f"a slice of {n} columns: not a multiple of {N_ALIGN} up to {COLUMNS_MAX}")
    if group and not c.scaled:
        raise ValueError(f"codec {codec} takes no group scales")
    sizes = part_bytes(c.bits, c.scaled, K, n, group)
    # every size is a multiple of 64 because n is, so parts that follow each other stay aligned
    codes = Part(0, sizes[0])
    channel = Part(codes.nbytes, sizes[1])
    groups = Part(channel.offset + channel.nbytes, sizes[2])
    return SliceLayout(c, K, n, group, ks, codes, channel, groups, groups.offset + groups.nbytes)


def part_bytes(bits: Any, scaled: Any, K: Any, n: Any, group: Any) -> tuple[Any, Any, Any]:
    """(codes, channel scales, group scales) in bytes, elementwise: ints, or integer arrays of one shape."""
    grouped = group > 0
    return n * K * bits // 8, n * 4 * scaled, n * (K // (group + (1 - grouped))) * 2 * grouped


def pack_codes(codec: str, codes: Array, group: int = 0, out: Bytes | None = None) -> Bytes:
    """Lay `codes [n, K]` (int8, or the codec's float; n a multiple of 64, K of 32) into tiles: one copy, flat bytes.

    `out`, if given, is the contiguous u8 array of exactly the right size that receives them.
    """
    c = CODECS[codec]
    n, K = codes.shape
    ks = ks_of(K, group)
    if n % N_ALIGN:
        raise ValueError(f"{n} columns are not a multiple of {N_ALIGN}")
    if codes.dtype != c.dtype:
        raise ValueError(f"codec {codec} takes {c.dtype} codes, not {codes.dtype}")
    if out is None:
        out = np.empty(n * K * c.bits // 8, np.uint8)
    codes = np.ascontiguousarray(codes)
    if c.bits == 32:
        _tiled_f32(out, n, K)[...] = codes.reshape(n // 16, 16, K).transpose(0, 2, 1)
        return out
    if c.bits == 4:
        pairs = codes.view("<u2")  # even k in the low byte
        codes = ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).astype(np.uint8)
    run = _run(c)
    rows = codes.view(run).reshape(n // c.G, c.G, K // ks, ks // K_ALIGN)
    _tiled(out, c, n, K, ks)[...] = rows.transpose(2, 0, 3, 1)
    return out


def unpack_codes(codec: str, packed: Array | bytes | memoryview, n: int, K: int, group: int = 0) -> Array:
    """The inverse of `pack_codes`: `[n, K]` in the codec's dtype (i4 sign-extended, nf4 as 0..15)."""
    c = CODECS[codec]
    flat = np.frombuffer(packed, np.uint8)
    if c.bits == 32:
        return np.ascontiguousarray(_tiled_f32(flat, n, K).transpose(0, 2, 1)).reshape(n, K)
    rows = np.ascontiguousarray(_tiled(flat, c, n, K, ks_of(K, group)).transpose(1, 3, 0, 2))
    if c.bits != 4:
        return rows.view(c.dtype).reshape(n, K)
    octets = rows.view(np.uint8).reshape(n, K // 2)
    codes = np.empty((n, K), np.int8)
    if c.name == "i4":
        signed = octets.view(np.int8)
        codes[:, 0::2] = (signed << 4) >> 4
        codes[:, 1::2] = signed >> 4
    else:
        codes[:, 0::2] = octets & 0x0F
        codes[:, 1::2] = octets >> 4
    return codes


def build_blob(layout: SliceLayout, codes: Array, channel: Array | None = None, groups: Array | None = None) -> Bytes:
    """A slice's bytes from `codes [n, K]`, `channel [n]` f32 and `groups [n, K/group]` f16 (both as the codec asks)."""
    c, n, K = layout.codec, layout.n, layout.K
    if codes.shape != (n, K):
        raise ValueError(f"codes of shape {codes.shape}, not {(n, K)}")
    wanted = ((n,) if c.scaled else None, (n, K // layout.group) if layout.group else None)
    given = tuple(None if a is None else a.shape for a in (channel, groups))
    if given != wanted:
        raise ValueError(f"channel and group scales of shapes {given}, not {wanted}")
    blob = np.empty(layout.nbytes, np.uint8)
    pack_codes(c.name, codes, layout.group, _part(blob, layout.codes))
    if channel is not None:
        _part(blob, layout.channel).view("<f4")[...] = channel
    if groups is not None:
        tiles = groups.reshape(n // c.G, c.G, K // layout.group).transpose(0, 2, 1)
        _part(blob, layout.groups).view("<f2").reshape(tiles.shape)[...] = tiles
    return blob


def split_blob(layout: SliceLayout, blob: Array | bytes | memoryview) -> tuple[Array, Array | None, Array | None]:
    """Views of a blob's parts: (tiled code bytes u8, channel scales `[n]` f32, group scales `[n/G][K/group][G]` f16);
    a part that the codec does not have is None."""
    flat = np.frombuffer(blob, np.uint8)
    if flat.nbytes != layout.nbytes:
        raise ValueError(f"a blob of {flat.nbytes} bytes, not {layout.nbytes}")
    c = layout.codec
    channel = _part(flat, layout.channel).view("<f4") if c.scaled else None
    groups = None
    if layout.group:
        groups = _part(flat, layout.groups).view("<f2").reshape(layout.n // c.G, layout.K // layout.group, c.G)
    return _part(flat, layout.codes), channel, groups


def unpack_blob(layout: SliceLayout, blob: Array | bytes | memoryview) -> tuple[Array, Array | None, Array | None]:
    """The inverse of `build_blob`: (`codes [n, K]`, `channel [n]`, `groups [n, K/group]`)."""
    codes, channel, tiles = split_blob(layout, blob)
    groups = None if tiles is None else tiles.transpose(0, 2, 1).reshape(layout.n, -1)
    return unpack_codes(layout.codec.name, codes, layout.n, layout.K, layout.group), channel, groups


def _run(c: Codec) -> np.dtype[Any]:
    """32 neighbouring codes of one channel as one opaque element: numpy then moves whole runs, twice as fast."""
    return np.dtype((np.void, K_ALIGN * c.bits // 8))


def _tiled(flat: Bytes, c: Codec, n: int, K: int, ks: int) -> Array:
    return flat.view(_run(c)).reshape(K // ks, n // c.G, ks // K_ALIGN, c.G)


def _tiled_f32(flat: Bytes, n: int, K: int) -> Array:
    return flat.view("<f4").reshape(n // 16, K, 16)


def _part(blob: Bytes, part: Part) -> Bytes:
    return blob[part.offset : part.offset + part.nbytes]
