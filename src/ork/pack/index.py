"""Reading a pack's header, footer and index: every field is checked against the file before anything is believed.

The hash says that the bytes are those written; the checks behind it say that a file made by anyone cannot lead a reader
outside the file. They run on whole columns: no Python object per entry.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.errors import PackError, PackVersion, StorageError
from ork.pack.format import (
    ACT_GROUPS,
    DIM_MAX,
    DTYPES,
    ENTRY,
    FOOT,
    HASH,
    HASH_AT,
    HASHED,
    HEADER,
    MAGIC,
    MIX_MAX,
    NOTES_AREA,
    PAGE,
    RAW_ALIGN,
    SECTIONS,
    TENSOR,
    VERSION,
    Records,
    align,
    damaged,
    hash_of,
    section_table,
)
from ork.tiles import CODECS, COLUMNS_MAX, K_ALIGN, KS_MAX, N_ALIGN, ks_of, part_bytes

Ints = npt.NDArray[np.int64]
_CODEC: Final = {c.number: c for c in CODECS.values()}
_ITEMSIZE: Final = {number: dtype.itemsize for number, dtype in DTYPES.values()}


@dataclass(frozen=True)
class Index:
    """What the header, footer and index of a pack say. `hashes` are those of HASHED; records are views of the file."""

    sections: dict[str, tuple[int, int]]
    slices: int
    hashes: dict[str, bytes]
    digest: bytes
    tensors: Records
    entries: Records
    names: memoryview


def map_pack(path: str) -> tuple[mmap.mmap, int]:
    """A file mapped read-only, and a descriptor of it for the caller to close.

    Raises PackError if it is missing or empty, StorageError if the system refuses.
    """
    try:
        with open(
            path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)
        ) as f:  # a pipe must not hang us
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PackError(f"{path}: not a regular file; give the path of a .orkpack")
            if status.st_size == 0:
                raise PackError(f"{path}: not an ork pack: the file is empty; make one with `ork convert`")
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), os.dup(f.fileno())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as e:
        raise PackError(f"{path}: {(e.strerror or '').lower()}; give the path of a .orkpack") from None
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}: cannot read: {getattr(e, 'strerror', None) or e}") from None


def read_index(path: str, view: memoryview) -> Index:
    """Check a whole pack's frame and index. Raises PackError, PackVersion or PackDamaged; reads no slice."""
    sections, slices, entries, tensors = _header(path, view)
    hashes, digest = _footer(path, view, sections["footer"][0])
    if hash_of(view[:PAGE]) != hashes["header"]:
        raise damaged(path, "the footer", sections["footer"][0], "it belongs to another header")
    parts = {}
    for name in ("names", "tensors", "entries"):
        offset, nbytes = sections[name]
        parts[name] = view[offset : offset + nbytes]
        if hash_of(parts[name]) != hashes[name]:
            raise damaged(path, f"the index ({name})", offset, "its bytes do not match their hash")
    tensor_records = np.frombuffer(parts["tensors"], TENSOR, tensors)
    entry_records = np.frombuffer(parts["entries"], ENTRY, entries)
    index = Index(sections, slices, hashes, digest, tensor_records, entry_records, parts["names"])
    _check_tensors(path, index, view.nbytes)
    _check_entries(path, index, view.nbytes)
    return index


def _header(path: str, view: memoryview) -> tuple[dict[str, tuple[int, int]], int, int, int]:
    size = view.nbytes
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise PackError(f"{path}: not an ork pack (at offset 0); make one with `ork convert`")
    if size < PAGE:
        raise damaged(path, "the header", 0, f"the file is cut off after {size} bytes")
    if hash_of(view[:HASH_AT]) != bytes(view[HASH_AT:PAGE]):
        raise damaged(path, "the header", 0, "its bytes do not match their hash")
    header = np.frombuffer(view, HEADER, 1)[0]
    version = int(header["version"])
    if version != VERSION:
        raise PackVersion(
            f"{path}: pack version {version} (at offset 8); this ork reads version {VERSION}:"
            f" {'update ork' if version > VERSION else 'convert the model again'}"
        )
    file_bytes = int(header["file_bytes"])
    if file_bytes != size:
        raise damaged(path, "the file", min(size, file_bytes), f"it has {size:,} bytes, its header says {file_bytes:,}")
    table = [(int(s["offset"]), int(s["nbytes"])) for s in header["sections"]]
    sections = dict(zip(SECTIONS, table))
    slices, entries, tensors = (int(header[name]) for name in ("slices", "entries", "tensors"))
    if (
        header["page"] != PAGE
        or header["reserved"].any()
        or bytes(view[HEADER.itemsize : HASH_AT]).strip(b"\0")
        or table[0][0] < PAGE
        or table != section_table(table[0][0], [nbytes for _, nbytes in table])
        or sections["footer"][1] != PAGE
        or sections["notes"][1] != 2 * NOTES_AREA
        or sum(sections["notes"]) != size
        or sections["entries"][1] != entries * ENTRY.itemsize
        or sections["tensors"][1] != tensors * TENSOR.itemsize
        or not slices <= entries < 1 << 32
    ):
        raise damaged(path, "the header", 0, "its sections and counts do not fit the file")
    return sections, slices, entries, tensors


def _footer(path: str, view: memoryview, offset: int) -> tuple[dict[str, bytes], bytes]:
    page = view[offset : offset + PAGE]
    digest = bytes(page[HASH_AT:])
    end = len(FOOT) + HASH * len(HASHED)
    if hash_of(page[:HASH_AT]) != digest:
        raise damaged(path, "the footer", offset, "its bytes do not match their hash")
    if bytes(page[: len(FOOT)]) != FOOT or bytes(page[end:HASH_AT]).strip(b"\0"):
        raise damaged(path, "the footer", offset, "it is not a footer")
    starts = range(len(FOOT), end, HASH)
    return {name: bytes(page[at : at + HASH]) for name, at in zip(HASHED, starts)}, digest


def _column(records: Records, field: str) -> Ints:
    return records[field].astype(np.int64)


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _check_tensors(path: str, index: Index, size: int) -> None:
    t = index.tensors
    at = index.sections["tensors"][0]

    def refuse(bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            i = int(bad.argmax())
            raise damaged(path, f"tensor {i} of the index", at + i * TENSOR.itemsize, why)

    length, count = _column(t, "name_bytes"), _column(t, "entries")
    refuse((length == 0) | (t["name_offset"] != _starts(length)), "its name lies outside the names")
    refuse((count == 0) | (t["first_entry"] != _starts(count)), "its entries do not follow the tensor before")
    if int(length.sum()) != len(index.names) or int(count.sum()) != len(index.entries):
        raise damaged(path, "the index (tensors)", at, "names or entries are left over")
    refuse((t["reserved"] != 0) | t["reserved2"].any(axis=1), "a reserved field is not zero")

    raw = t["kind"] != 0
    refuse(t["kind"] > 1, "it is of an unknown kind")
    refuse(np.r_[False, raw[:-1] & ~raw[1:]] if len(t) else raw, "a weight follows the raw tensors")
    if int(count[~raw].sum()) != index.slices:
        raise damaged(path, "the index (tensors)", at, "the slices are not as many as the header says")
    refuse((t["layer"] < -1) | (t["expert"] < -1), "its layer or expert is below -1")

    shape = t["shape"]
    ndim = t["ndim"].astype(np.int64)
    used = np.arange(4) < ndim[:, None]
    refuse((ndim > 4) | ((shape == 0) == used).any(axis=1) | (shape > DIM_MAX).any(axis=1), "its shape is impossible")
    fields = {name: _column(t, name) for name in ("Kp", "Np", "ks", "rotation", "mix", "group", "act_group")}
    tiling = np.stack(list(fields.values()))

    refuse(raw & (~np.isin(t["codec"], list(_ITEMSIZE)) | tiling.any(axis=0)), "its type is unknown")
    itemsize = _table(_ITEMSIZE)[t["codec"]]
    elements = np.where(used, shape, 1).astype(np.float64).prod(axis=1)
    refuse(raw & ((count != 1) | (elements * itemsize > size)), "its data are larger than the file")

    refuse(~raw & (~np.isin(t["codec"], list(_CODEC)) | (ndim != 2)), "its codec is unknown")
    N, K = shape[:, 0].astype(np.int64), shape[:, 1].astype(np.int64)
    Kp, Np, ks, rotation, mix, group, act = tiling
    scaled = _table({n: c.scaled for n, c in _CODEC.items()})[t["codec"]] != 0
    i8 = t["codec"] == CODECS["i8"].number
    step = np.maximum(group, 1)
    bad = (Kp != -(-K // K_ALIGN) * K_ALIGN) | (Np != -(-N // N_ALIGN) * N_ALIGN)
    bad |= (group > 0) & (~scaled | (group % K_ALIGN != 0) | (group > KS_MAX) | (Kp % step != 0))
    bad |= (rotation > 0) & (
        (rotation & (rotation - 1) != 0) | (rotation > KS_MAX) | (K % np.maximum(rotation, 1) != 0)
    )
    bad |= (rotation > 0) & ~scaled
    bad |= (mix > 0) & ((mix * rotation != K) | (mix < 2) | (mix > MIX_MAX))
    per_channel = np.isin(act, ACT_GROUPS) & ((act == 0) | (i8 & (Kp % np.maximum(act, 1) == 0)))
    bad |= np.where(group > 0, act != group, ~per_channel)
    refuse(~raw & bad, "its padding, group or rotation does not fit its shape")
    refuse(~raw & (ks != _ks(Kp, group, ~raw)), "its K slice is not the one that K and the group ask for")


def _check_entries(path: str, index: Index, size: int) -> None:
    t, e, slices = index.tensors, index.entries, index.slices
    at = index.sections["entries"][0]

    def refuse(bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            i = int(bad.argmax())
            raise damaged(path, f"{describe(index, i)} of the index", at + i * ENTRY.itemsize, why)

    tensor = np.repeat(np.arange(len(t)), t["entries"])
    refuse((e["tensor"] != tensor) | (e["reserved"] != 0), "it does not belong to its tensor")
    refuse((e["offset"] > size) | (e["nbytes"] > size), "it lies outside the file")
    n0, n1 = _column(e, "n0"), _column(e, "n1")
    offset, nbytes = _column(e, "offset"), _column(e, "nbytes")

    first = np.zeros(len(e), bool)
    first[t["first_entry"]] = True
    last = np.roll(first, -1)
    before = np.where(first, 0, np.roll(n1, 1))
    tiled = np.arange(len(e)) < slices
    bad = (n0 != before) | (n1 <= n0) | (n1 % N_ALIGN != 0) | (n1 - n0 > COLUMNS_MAX)
    bad |= last & (n1 != t["Np"][tensor])
    refuse(np.where(tiled, bad, (n0 != 0) | (n1 != 0)), "its columns do not follow the slice before")

    codec = t["codec"][tensor]
    bits = _table({n: c.bits for n, c in _CODEC.items()})[codec]
    scaled = _table({n: c.scaled for n, c in _CODEC.items()})[codec]
    blob = sum(part_bytes(bits, scaled, _column(t, "Kp")[tensor], n1 - n0, _column(t, "group")[tensor]))
    shape = np.where(t["shape"] == 0, 1, t["shape"])[tensor[slices:]]
    blob[slices:] = shape.prod(axis=1).astype(np.int64) * _table(_ITEMSIZE)[codec[slices:]]
    refuse(nbytes != blob, "its size is not the one that its shape asks for")

    end = np.r_[PAGE, (offset + nbytes)[:-1]] if len(e) else offset
    to = np.where(np.arange(len(e)) <= slices, PAGE, RAW_ALIGN)
    refuse(offset != -(-end // to) * to, "it overlaps, or does not follow, the entry before")
    if align(int(offset[-1] + nbytes[-1]) if len(e) else PAGE) != index.sections["metadata"][0]:
        raise damaged(path, "the index (entries)", at, "the last entry does not end where the metadata begin")


def describe(index: Index, entry: int) -> str:
    """An entry's name for people: `slice 12 (blk.0.ffn_up.weight, columns 64-128)`."""
    e = index.entries[entry]
    name = "?"
    if e["tensor"] < len(index.tensors):
        t = index.tensors[e["tensor"]]
        start = int(t["name_offset"])
        name = bytes(index.names[start : start + min(int(t["name_bytes"]), 100)]).decode("utf-8", "replace")
    if entry >= index.slices:
        return f"entry {entry} (raw tensor {name})"
    return f"slice {entry} ({name}, columns {e['n0']}-{e['n1']})"


def names_of(path: str, index: Index) -> dict[str, int]:
    """Tensor numbers by name. Raises PackDamaged for a name that is not UTF-8 or appears twice."""
    names: dict[str, int] = {}
    at = index.sections["names"][0]
    for i, (start, length) in enumerate(_spans(index.tensors)):
        try:
            name = str(index.names[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise damaged(path, f"the name of tensor {i}", at + start, "it is not UTF-8") from None
        if names.setdefault(name, i) != i:
            raise damaged(path, f"the name of tensor {i}", at + start, f"{name[:100]} appears twice")
    return names


def _spans(tensors: Records) -> Iterator[tuple[int, int]]:
    return zip(tensors["name_offset"].tolist(), tensors["name_bytes"].tolist())


def _table(values: dict[int, Any]) -> Ints:
    """A u8-indexed table of small integers, 0 where nothing is known."""
    table = np.zeros(256, np.int64)
    table[list(values)] = list(values.values())
    return table


def _ks(Kp: Ints, group: Ints, tiled: npt.NDArray[np.bool_]) -> Ints:
    """`ks_of` of each tiled tensor; one call per distinct pair (a model has a handful)."""
    pairs = Kp[tiled] << 13 | group[tiled]
    distinct, inverse = np.unique(pairs, return_inverse=True)
    ks = np.zeros(len(Kp), np.int64)
    ks[tiled] = np.array([ks_of(p >> 13, p & 8191) for p in distinct.tolist()], np.int64)[inverse]
    return ks
