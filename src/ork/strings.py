"""A table of byte strings kept as views into one buffer: a 262,144-token vocabulary without 262,144 objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class StringTable(Sequence[str]):
    """Strings `data[starts[i] : starts[i] + lengths[i]]`, decoded from UTF-8 only when asked for.

    `data` is any bytes-like object, `starts` and `lengths` are u64 arrays of equal length whose ranges the
    maker has checked against `data`. Bytes that are not UTF-8 decode with U+FFFD; `raw` gives them as they are.
    """

    __slots__ = ("data", "lengths", "starts")

    def __init__(self, data: bytes | memoryview, starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]):
        self.data = memoryview(data).cast("B")
        self.starts = starts
        self.lengths = lengths

    @classmethod
    def of(cls, items: Iterable[str | bytes]) -> StringTable:
        raw = [s.encode() if isinstance(s, str) else bytes(s) for s in items]
        lengths = np.array([len(s) for s in raw], dtype=np.uint64)
        ends = np.cumsum(lengths, dtype=np.uint64)
        return cls(b"".join(raw), ends - lengths, lengths)

    def raw(self, i: int) -> bytes:
        start = int(self.starts[i])
        return bytes(self.data[start : start + int(self.lengths[i])])

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.raw(i).decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def packed(self) -> tuple[bytes, npt.NDArray[np.uint32]]:
        """(all bytes in order, u32 lengths): the form in which a pack stores a table."""
        contiguous = len(self) and bool(np.all(self.starts[1:] == (self.starts + self.lengths)[:-1]))
        if contiguous:
            start = int(self.starts[0])
            blob = bytes(self.data[start : int(self.starts[-1] + self.lengths[-1])])
        else:
            ends = np.cumsum(self.lengths, dtype=np.uint64)
            shift = np.repeat(self.starts - (ends - self.lengths), self.lengths.astype(np.int64))
            blob = np.frombuffer(self.data, np.uint8)[shift + np.arange(len(shift), dtype=np.uint64)].tobytes()
        return blob, self.lengths.astype(np.uint32)

    def utf8(self) -> StringTable:
        """The same strings in one piece and all UTF-8: in one that is not, U+FFFD replaces what does not decode."""
        blob, lengths = self.packed()
        table = StringTable.unpacked(blob, lengths)
        first = np.frombuffer(blob, np.uint8)[table.starts[lengths > 0]]
        try:
            blob.decode()
        except UnicodeDecodeError:
            return StringTable.of(self[:])
        return table if not (first & 0xC0 == 0x80).any() else StringTable.of(self[:])

    def decoded(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """All strings of a table made by `utf8`, and how many characters each has."""
        text = str(self.data, "utf-8")
        firsts = np.zeros(len(self.data) + 1, np.int64)  # characters before each byte
        np.cumsum(np.frombuffer(self.data, np.uint8) & 0xC0 != 0x80, out=firsts[1:])
        starts, ends = firsts[self.starts], firsts[self.starts + self.lengths]
        return [text[a:b] for a, b in zip(starts.tolist(), ends.tolist())], ends - starts

    @classmethod
    def unpacked(cls, blob: bytes | memoryview, lengths: npt.NDArray[np.uint32]) -> StringTable:
        wide = lengths.astype(np.uint64)
        ends = np.cumsum(wide, dtype=np.uint64)
        return cls(blob, ends - wide, wide)
