"""GGUF files, read with every count, size and offset checked against the file before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Header: magic, u32
version, u64 tensors, u64 pairs; pairs (string key, u32 type, value); tensor infos (string name, u32 dimensions, u64
each, u32 type, u64 offset); padding to the alignment; tensor data. A string is a u64 length and that many bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ork import native
from ork.errors import SourceError
from ork.sources.base import F32, MappedFile, MetaValue, TensorInfo, check_range
from ork.sources.dequant import TYPES, UNREAD, TensorType, expand
from ork.strings import StringTable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Far above any model known; what they bound is the time and memory that a hostile header can cost.
MAX_PAIRS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_KEY = 1 << 10
MAX_NAME = 1 << 8
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 48
MAX_METADATA = 128 << 20  # bytes of all values kept in memory; a string of an array counts as 16 (its view)

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), BOOL: np.dtype("u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip


class GgufSource:
    """A GGUF file as a `Source`: mapped, header parsed, tensors expanded on request."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file = MappedFile(self.path)
        try:
            header = _Header(self.path, self._file.data)
        except BaseException:
            self.close()
            raise
        self.metadata: Mapping[str, MetaValue] = MappingProxyType(header.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)
        self._offsets = header.offsets
        self._header_end = header.end

    def rows(self, name: str, start: int, stop: int, out: F32 | None = None) -> F32:
        info = self.tensors[name]
        return expand(info.kind, self.raw(name), start, check_range(info, start, stop, out))

    def raw(self, name: str) -> memoryview:
        offset = self._offsets[name]
        return self._file.data[offset : offset + self.tensors[name].nbytes]

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        info = self.tensors[name]
        check_range(info, start, start, None)
        row = info.nbytes // info.rows
        stop = info.rows if stop is None else min(stop, info.rows)
        at = self._offsets[name]
        self._file.release(at + start * row, at + stop * row)

    def digest(self) -> str:
        h = xxhash.xxh3_128(self._file.data[: self._header_end])
        h.update(struct.pack("<Q", len(self._file.data)))
        return h.hexdigest()

    def close(self) -> None:
        self._file.close()


class _Header:
    """The parse. `at` is the offset of the next byte; `end` where the header ends."""

    def __init__(self, path: Path, data: memoryview):
        self.path = path
        self.data = data
        if data[: len(MAGIC)] != MAGIC:
            raise SourceError(f"{path}: not a GGUF file: it starts with {bytes(data[:4])!r}, not {MAGIC!r}")
        self.at = len(MAGIC)
        self.kept = 0
        self.metadata: dict[str, MetaValue] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.offsets: dict[str, int] = {}

        version = self.number("<I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                raise self.error("version", 4, "a big-endian GGUF, only little-endian ones are supported")
            hint = "written by a newer program" if version > max(VERSIONS) else "convert the model again"
            raise self.error("version", 4, f"GGUF version {version} is not supported (2 and 3 are): {hint}")
        tensors = self.count("tensor count", MAX_TENSORS, least=25)
        pairs = self.count("metadata count", MAX_PAIRS, least=13)
        for i in range(pairs):
            self.pair(i)
        self.alignment = self.check_alignment()
        self.refuse_splits()
        infos = [self.tensor(i) for i in range(tensors)]
        self.end = self.at
        self.place(infos)

    # --- primitives: each checks before it reads ---

    def error(self, field: str, offset: int, problem: str) -> SourceError:
        return SourceError(f"{self.path}: {field} at offset {offset}: {problem}")

    def need(self, size: int, field: str) -> int:
        """The offset of the next `size` bytes, which are then behind us."""
        at = self.at
        if size > len(self.data) - at:
            problem = f"needs {size} bytes, but the file ends at {len(self.data)}: cut or damaged, download it again"
            raise self.error(field, at, problem)
        self.at = at + size
        return at

    def number(self, code: str, field: str) -> Any:
        return struct.unpack_from(code, self.data, self.need(struct.calcsize(code), field))[0]

    def count(self, field: str, most: int, least: int) -> int:
        """A count of things of at least `least` bytes each."""
        at = self.at
        n: int = self.number("<Q", field)
        if n > most:
            raise self.error(field, at, f"{n} is over the limit of {most}: damaged, download it again")
        if n * least > len(self.data) - self.at:
            raise self.error(field, at, f"{n} do not fit in {len(self.data)} bytes: download it again")
        return n

    def keep(self, size: int, field: str, at: int) -> None:
        self.kept += size
        if self.kept > MAX_METADATA:
            raise self.error(field, at, f"the metadata is over the limit of {MAX_METADATA} bytes: damaged?")

    def label(self, field: str, most: int) -> str:
        """A key or a tensor name."""
        at = self.at
        size = self.number("<Q", field)
        if not 0 < size <= most:
            raise self.error(field, at, f"a length of {size}, not 1 to {most}: damaged, download it again")
        start = self.need(size, field)
        try:
            return bytes(self.data[start : start + size]).decode()
        except UnicodeDecodeError:
            raise self.error(field, start, "not UTF-8: damaged, download it again") from None

    # --- metadata ---

    def pair(self, i: int) -> None:
        at = self.at
        key = self.label(f"metadata key {i}", MAX_KEY)
        if key in self.metadata:
            raise self.error(f"metadata key {key!r}", at, "given twice")
        self.metadata[key] = self.value(f"metadata {key!r}")

    def value(self, field: str) -> MetaValue:
        at = self.at
        kind = self.number("<I", field)
        if kind == STRING:
            return self.string(field)
        if kind == ARRAY:
            return self.array(field)
        if kind not in NUMBERS:
            raise self.error(field, at, f"unknown value type {kind}: damaged, or written by a newer program")
        value = self.numbers(kind, 1, field)[0].item()
        assert isinstance(value, (bool, int, float))
        return value

    def string(self, field: str) -> str:
        at = self.at
        size = self.number("<Q", field)
        start = self.need(size, field)
        self.keep(size, field, at)
        return bytes(self.data[start : start + size]).decode("utf-8", "replace")

    def array(self, field: str) -> MetaValue:
        at = self.at
        kind = self.number("<I", field)
        n = self.number("<Q", field)
        if kind == STRING:
            return self.strings(n, field)
        if kind == ARRAY:
            raise self.error(field, at, "an array of arrays is not supported")
        if kind not in NUMBERS:
            raise self.error(field, at, f"unknown array type {kind}: damaged, or written by a newer program")
        return self.numbers(kind, n, field)

    def numbers(self, kind: int, n: int, field: str) -> npt.NDArray[Any]:
        dtype = NUMBERS[kind]
        at = self.need(n * dtype.itemsize, field)
        self.keep(n * dtype.itemsize, field, at)
        values: npt.NDArray[Any] = np.frombuffer(self.data, dtype, n, at).copy()  # copied: the file need not align it
        if kind == BOOL:
            if n and values.max() > 1:
                raise self.error(field, at + int((values > 1).argmax()), f"a bool of {values.max()}, not 0 or 1")
            values = values.view(np.bool_)
        return values

    def strings(self, n: int, field: str) -> StringTable:
        at = self.at
        if n > (len(self.data) - at) // 8:
            raise self.error(field, at, f"{n} strings do not fit in {len(self.data)} bytes: download it again")
        self.keep(16 * n, field, at)
        starts, lengths = np.empty(n, np.uint64), np.empty(n, np.uint64)
        good, end = native.scan_strings(self.data, at, starts, lengths)
        if good < n:
            raise self.error(f"{field}, string {good}", end, "does not end inside the file: cut or damaged")
        self.at = end
        return StringTable(self.data, starts, lengths)

    def check_alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        good = isinstance(value, int) and 0 < value <= MAX_ALIGNMENT and value & (value - 1) == 0
        if isinstance(value, bool) or not good:
            raise SourceError(f"{self.path}: metadata 'general.alignment' is {value}, not a power of two")
        assert isinstance(value, int)
        return value

    def refuse_splits(self) -> None:
        parts = self.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            number = self.metadata.get("split.no", 0)
            which = number + 1 if isinstance(number, int) else "one"
            raise SourceError(
                f"{self.path}: part {which} of {parts} of a split GGUF: join the parts first (llama-gguf-split --merge)"
            )

    # --- tensors ---

    def tensor(self, i: int) -> tuple[TensorInfo, int, int]:
        """(info, offset in the data section, offset of this entry)."""
        at = self.at
        name = self.label(f"tensor name {i}", MAX_NAME)
        field = f"tensor {name!r}"
        if name in self.tensors:
            raise self.error(field, at, "given twice")
        n = self.number("<I", field)
        if not 1 <= n <= MAX_DIMENSIONS:
            raise self.error(field, at, f"{n} dimensions, not 1 to {MAX_DIMENSIONS}")
        dims = [self.number("<Q", field) for _ in range(n)]
        kind = self.type(self.number("<I", field), field, at)
        offset = self.number("<Q", field)
        elements = 1
        for d in dims:
            elements *= d
        if not 0 < elements <= MAX_ELEMENTS:
            raise self.error(field, at, f"dimensions {dims} are empty or too large: damaged, download it again")
        if dims[0] % kind.block:
            raise self.error(field, at, f"{dims[0]} columns are no multiple of {kind.name}'s block of {kind.block}")
        info = TensorInfo(name, tuple(reversed(dims)), kind.name, kind.row_bytes(elements))
        self.tensors[name] = info
        return info, offset, at

    def type(self, number: int, field: str, at: int) -> TensorType:
        if number in TYPES:
            return TYPES[number]
        known = f"type {UNREAD[number]}" if number in UNREAD else f"type {number}, unknown here,"
        names = " ".join(t.name for t in TYPES.values())
        raise self.error(field, at, f"{known} is not supported; supported are {names}")

    def place(self, infos: list[tuple[TensorInfo, int, int]]) -> None:
        """Offsets in the file; nothing outside of it, nothing shared."""
        start = -(-self.end // self.alignment) * self.alignment
        size = len(self.data)
        for info, offset, at in infos:
            field = f"tensor {info.name!r}"
            if offset % self.alignment:
                raise self.error(field, at, f"data offset {offset} is no multiple of the alignment {self.alignment}")
            end = start + offset + info.nbytes
            if end > size:
                raise SourceError(
                    f"{self.path}: the file ends at {size}, {field} needs {end}: cut or incomplete, download it again"
                )
            self.offsets[info.name] = start + offset
        ordered = sorted((self.offsets[info.name], info.nbytes, info.name) for info, _, _ in infos)
        for (a, nbytes, first), (b, _, second) in pairwise(ordered):
            if a + nbytes > b:
                raise self.error(f"tensor {second!r}", b, f"its data overlaps that of {first!r}")
