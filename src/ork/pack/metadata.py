"""The metadata section: one msgpack map of a model's key-value pairs, arrays as typed binary.

Scalars are msgpack's own bool, int, float64 and str. A numeric array is an extension whose code is GGUF's value type
and whose data are the little-endian elements; a string array is extension 8: u64 count, u32 lengths[count], the bytes.
Anything else that is a list is a msgpack array. So a 262,144-token vocabulary is read as views, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ork.errors import PackError
from ork.pack.format import DTYPES, damaged
from ork.strings import StringTable

MetaValue: TypeAlias = "bool | int | float | str | npt.NDArray[Any] | StringTable | list[Any]"  # arrays are 1-D

STRINGS: Final = 8
_CODES: Final = {dtype: number for number, dtype in DTYPES.values()}
_DTYPES: Final = dict(DTYPES.values())
BAD: Final = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError, OverflowError)


def encode(metadata: Mapping[str, Any]) -> bytes:
    """Raises PackError for a value that is none of MetaValue. Keys keep their order."""
    return msgspec.msgpack.encode({key: _plain(key, value) for key, value in metadata.items()})


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):  # np.float64 is a float
        return float(value) if isinstance(value, float) else value
    if isinstance(value, np.generic):
        return _plain(key, value.item())
    if isinstance(value, StringTable):
        blob, lengths = value.packed()
        head = np.uint64(len(lengths)).astype("<u8").tobytes()
        return msgspec.msgpack.Ext(STRINGS, head + lengths.astype("<u4").tobytes() + blob)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        dtype = value.dtype.newbyteorder("<")
        if dtype in _CODES:
            return msgspec.msgpack.Ext(_CODES[dtype], value.astype(dtype).tobytes())
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, str) for v in value):
            return _plain(key, StringTable.of(value))
        return [_plain(key, v) for v in value]
    raise PackError(f"metadata {key}: a {type(value).__name__} cannot be kept in a pack")


class Metadata(Mapping[str, MetaValue]):
    """The decoded map; a value is decoded when it is asked for, and PackDamaged raised if it cannot be.

    `view` is the section, `path` and `offset` say where it is.
    """

    def __init__(self, view: memoryview, path: str, offset: int):
        self._path, self._offset = path, offset
        self._values: dict[str, MetaValue] = {}
        self._raw: dict[str, msgspec.Raw] = self._decode(view, dict[str, msgspec.Raw], "section")

    def __getitem__(self, key: str) -> MetaValue:
        if key not in self._values:
            value = self._decode(self._raw[key], Any, key)
            if not _known(value):
                raise damaged(self._path, f"metadata {key[:100]}", self._offset, "a value of an unknown kind")
            self._values[key] = value
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def _decode(self, data: Any, kind: Any, what: str) -> Any:
        try:
            return msgspec.msgpack.decode(data, type=kind, ext_hook=_extension)
        except BAD as e:
            raise damaged(self._path, f"metadata {what[:100]}", self._offset, f"cannot be decoded: {e}") from None


def _extension(code: int, data: memoryview) -> Any:
    if code == STRINGS:
        count = int.from_bytes(data[:8], "little")
        if len(data) < 8 or count > (len(data) - 8) // 4:
            raise ValueError(f"a table of {count} strings in {len(data)} bytes")
        lengths = np.frombuffer(data, "<u4", count, 8)
        blob = data[8 + 4 * count :]
        if int(lengths.sum(dtype=np.uint64)) != len(blob):
            raise ValueError("string lengths do not add up to their bytes")
        return StringTable.unpacked(blob, lengths)
    dtype = _DTYPES.get(code)
    if dtype is None or len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes of array type {code}")
    if dtype.kind == "b" and np.any(np.frombuffer(data, np.uint8) > 1):
        raise ValueError("a bool that is neither 0 nor 1")
    return np.frombuffer(data, dtype)


def _known(value: Any) -> bool:
    if isinstance(value, list):
        return all(_known(v) for v in value)
    return isinstance(value, (bool, int, float, str, np.ndarray, StringTable))
