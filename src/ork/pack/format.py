"""The `.orkpack` file, version 1, as data: marks, records, sections and alignments. `docs/pack-format.md` is the page.

    header | slices | raw tensors | metadata, tokenizer, chat_template, recipe, provenance
           | names, tensors, entries | footer | notes

Every integer is little-endian. Every hash is XXH3-128 in its canonical (big-endian) 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ork.errors import PackDamaged
from ork.files import Kind, begins_with
from ork.tiles import K_ALIGN, KS_MAX

MAGIC: Final = b"\x89ork\r\n\x1a\n"  # as PNG's: an eighth bit and line ends, so that a text-mode copy shows
PACK: Final = Kind("pack", begins_with(MAGIC))
FOOT: Final = b"\x89orkend\n"
VERSION: Final = 1
PAGE: Final = 4096  # header, footer, and the alignment of slices and sections
RAW_ALIGN: Final = 64
HASH: Final = 16
HASH_AT: Final = PAGE - HASH  # header and footer end with the hash of what precedes it
NOTES_AREA: Final = 1 << 20
REMEDY: Final = "convert the model again"

SECTIONS: Final = (
    "metadata",
    "tokenizer",
    "chat_template",
    "recipe",
    "provenance",
    "names",
    "tensors",
    "entries",
    "footer",
    "notes",
)
HASHED: Final = ("header", *SECTIONS[:-2])  # the footer's hashes, in order

HEADER: Final = np.dtype(
    [
        ("magic", "u1", 8),
        ("version", "<u4"),
        ("page", "<u4"),
        ("file_bytes", "<u8"),
        ("slices", "<u8"),
        ("entries", "<u8"),
        ("tensors", "<u8"),
        ("reserved", "u1", 16),
        ("sections", [("offset", "<u8"), ("nbytes", "<u8")], len(SECTIONS)),
    ]
)
TENSOR: Final = np.dtype(
    [
        ("name_offset", "<u4"),
        ("name_bytes", "<u4"),
        ("kind", "u1"),
        ("codec", "u1"),
        ("ndim", "u1"),
        ("reserved", "u1"),
        ("layer", "<i4"),
        ("expert", "<i4"),
        ("role", "<i4"),
        ("first_entry", "<u4"),
        ("entries", "<u4"),
        ("shape", "<u8", 4),
        ("Kp", "<u4"),
        ("Np", "<u4"),
        ("ks", "<u4"),
        ("rotation", "<u4"),
        ("group", "<u4"),
        ("act_group", "<u4"),
        ("mix", "<u4"),
        ("reserved2", "u1", 4),
    ]
)
ENTRY: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("hash", "u1", HASH),
        ("tensor", "<u4"),
        ("n0", "<u4"),
        ("n1", "<u4"),
        ("reserved", "<u4"),
    ]
)
assert (HEADER.itemsize, TENSOR.itemsize, ENTRY.itemsize) == (224, 96, 48)

TILED: Final = 0
RAW: Final = 1
DIM_MAX: Final = 1 << 31
ACT_GROUPS: Final = (0, 32, 64, 128)
MIX_MAX: Final = 512  # the most blocks that a rotation mixes

# Raw tensors and metadata arrays: the numbers are GGUF's value types (8 is a string, 9 an array); f16 is ours.
DTYPES: Final[Mapping[str, tuple[int, np.dtype[Any]]]] = MappingProxyType(
    {
        "u8": (0, np.dtype("u1")),
        "i8": (1, np.dtype("i1")),
        "u16": (2, np.dtype("<u2")),
        "i16": (3, np.dtype("<i2")),
        "u32": (4, np.dtype("<u4")),
        "i32": (5, np.dtype("<i4")),
        "f32": (6, np.dtype("<f4")),
        "bool": (7, np.dtype("?")),
        "u64": (10, np.dtype("<u8")),
        "i64": (11, np.dtype("<i8")),
        "f64": (12, np.dtype("<f8")),
        "f16": (13, np.dtype("<f2")),
    }
)

Records = npt.NDArray[Any]


def hash_of(data: Any) -> bytes:
    """XXH3-128 of any contiguous buffer, canonical 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def align(offset: int, to: int = PAGE) -> int:
    return -(-offset // to) * to


def section_table(start: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, nbytes) of sections that follow each other from `start`, each on a page."""
    table = []
    for size in sizes:
        start = align(start)
        table.append((start, size))
        start += size
    return table


def check_rotation(K: int, rotation: int, mix: int, act_group: int, group: int, codec: str) -> None:
    """Raise ValueError unless the fields that say how activations are prepared fit the tensor."""
    if rotation and (rotation & (rotation - 1) or rotation > KS_MAX or K % rotation):
        raise ValueError(f"rotation {rotation} is not a power of two up to {KS_MAX} that divides K = {K}")
    if mix and not (rotation and mix * rotation == K and 2 <= mix <= MIX_MAX):
        raise ValueError(f"mix {mix} is not the number of rotation blocks, 2 to {MIX_MAX}, in K = {K}")
    if rotation and codec in ("f16", "f32"):
        raise ValueError(f"codec {codec} is never rotated: its activations are not quantised")
    if group and act_group != group:
        raise ValueError(f"act_group {act_group} differs from the weight group {group}")
    if not group and act_group and (codec != "i8" or act_group not in ACT_GROUPS or align(K, K_ALIGN) % act_group):
        raise ValueError(f"act_group {act_group} does not fit per-channel {codec} with K = {K}")


def damaged(path: str, what: str, offset: int, why: str) -> PackDamaged:
    """The one line a user reads: file, entry, offset, what is wrong, remedy. Names come from the file: no control
    character of theirs reaches a terminal."""
    line = f"{what} at offset {offset}: {why}; {REMEDY}"
    return PackDamaged(f"{path}: " + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line))
