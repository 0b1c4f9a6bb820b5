"""Safetensors files, read with every number checked against the file before it is used.

Format: https://github.com/huggingface/safetensors, "Format". A u64 length, a JSON object of that many bytes
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, then the data, of which every
byte belongs to exactly one tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ork.errors import SourceError
from ork.sources.base import MappedFile

MAX_HEADER = 16 << 20
MAX_PARTS = 1 << 21  # values and keys of one JSON text: what bounds the memory of its parse
MAX_TENSORS = 1 << 16
MAX_NAME = 1 << 10

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor: `nbytes` bytes from `start` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """One mapped file; `entries` in the order of the data."""

    def __init__(self, path: Path):
        self.path = path
        self.file = MappedFile(path)
        try:
            self.header, self.entries = _parse(path, self.file.data)
        except BaseException:
            self.file.close()
            raise

    def bytes_of(self, name: str) -> memoryview:
        e = self.entries[name]
        return self.file.data[e.start : e.start + e.nbytes]


def parse_json(path: Path, text: bytes | memoryview, what: str = "the file") -> dict[str, Any]:
    """A JSON object. SourceError if it is none, names a key twice, or could cost more memory than a model's would."""
    raw = bytes(text)
    if sum(raw.count(c) for c in (b",", b":", b"[", b"{")) > MAX_PARTS:
        raise SourceError(f"{path}: {what} holds more than {MAX_PARTS} values: damaged?")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise SourceError(f"{path}: {what} gives {twice[:200]!r} twice")
        return out

    def whole(digits: str) -> int:
        if len(digits) > 20:
            raise ValueError("a number of more than 20 digits")
        return int(digits)

    try:
        value = json.loads(raw, object_pairs_hook=unique, parse_int=whole)
    except (ValueError, RecursionError) as e:
        problem = str(e).replace("\n", " ") or "nested too deeply"
        raise SourceError(f"{path}: {what} is not JSON ({problem}): damaged, download it again") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path}: {what} is JSON, but not an object")
    return value


def _parse(path: Path, data: memoryview) -> tuple[memoryview, dict[str, Entry]]:
    size = len(data)
    if size < 8:
        raise SourceError(f"{path}: not a safetensors file: {size} bytes have no room for a header")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise SourceError(f"{path}: not a safetensors file: a header of {length} bytes, {MAX_HEADER} are the limit")
    if length > size - 8:
        raise SourceError(f"{path}: the file ends at {size}, its header needs {8 + length}: cut, download it again")
    header = data[8 : 8 + length]
    if length == 0 or header[0] != ord("{"):
        raise SourceError(f"{path}: not a safetensors file: the header at offset 8 is not a JSON object")
    fields = parse_json(path, header, "the header")
    fields.pop("__metadata__", None)
    if len(fields) > MAX_TENSORS:
        raise SourceError(f"{path}: {len(fields)} tensors are over the limit of {MAX_TENSORS}")

    base = 8 + length
    entries = sorted(
        ((name, _entry(path, name, value, base)) for name, value in fields.items()),
        key=lambda e: (e[1].start, e[1].nbytes),
    )
    at = base
    for name, e in entries:
        if e.start + e.nbytes > size:
            raise SourceError(
                f"{path}: the file ends at {size}, tensor {name!r} needs {e.start + e.nbytes}: cut, download it again"
            )
        if e.start != at:
            how = "overlaps another tensor" if e.start < at else f"leaves a hole of {e.start - at} bytes before it"
            raise SourceError(f"{path}: tensor {name!r} at offset {e.start} {how}: damaged, download it again")
        at = e.start + e.nbytes
    if at != size:
        raise SourceError(f"{path}: {size - at} bytes from offset {at} belong to no tensor: damaged, download it again")
    return header, dict(entries)


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    where = f"{path}: tensor {name[:200]!r}"
    if not 0 < len(name) <= MAX_NAME:
        raise SourceError(f"{where}: a name of {len(name)} characters, not 1 to {MAX_NAME}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{where}: not described by dtype, shape and data_offsets: damaged, download it again")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise SourceError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
    if not _counts(shape) or len(shape) > 8:
        raise SourceError(f"{where}: its shape is not a short list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{where}: its data_offsets are not [begin, end]")
    bits = BITS[dtype]
    for n in shape:
        bits *= n
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        raise SourceError(f"{where}: {dtype} {shape} takes {bits // 8} bytes, its data_offsets hold {nbytes}")
    return Entry(dtype, tuple(shape), base + offsets[0], nbytes)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
