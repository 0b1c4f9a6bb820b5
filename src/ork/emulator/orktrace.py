"""`.orktrace`: submits with the memory they read and wrote, as a file that is written while the program runs.

    magic "ORKTRACE", u32 version, u32 0
    records: u32 kind, u32 stored bytes, u32 bytes, u32 CRC-32 of what is stored; then that, compressed with zlib

Kinds: `PAGES` holds pages of 4096 bytes that no earlier record held, numbered from 1 in the order of the file (page 0
is zeros); `HEAD`, `SUBMIT`, `RESET` and `END` hold JSON of the structures below. A file without END was cut off, and is
good up to there.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Final, TypeVar

import msgspec
import xxhash

from ork.emulator.iova import PAGE
from ork.errors import SourceError, StorageError
from ork.files import Kind, begins_with

MAGIC: Final = b"ORKTRACE"
RECORDING: Final = Kind("recording", begins_with(MAGIC), in_place=True)
VERSION: Final = 1
PAGES, HEAD, SUBMIT, RESET, END = 1, 2, 3, 4, 5
CHUNK: Final = 256  # pages of one record
MAX_JSON: Final = 64 << 20
MAX_PAGES: Final = 1 << 18  # of one submit, zeros apart
ZEROS: Final = bytes(PAGE)
_START = struct.Struct("<8s2I")
_RECORD = struct.Struct("<4I")
_KEPT = 32  # decompressed page records that a reader holds: 32 MiB
_WINDOW = 1 << 20  # pages of 4 GiB

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U64 = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
PageNumber = Annotated[int, msgspec.Meta(ge=1, lt=_WINDOW)]
Run = tuple[PageNumber, Annotated[int, msgspec.Meta(ge=1, le=_WINDOW)], U64]  # first page, pages, first id (0: zeros)


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The board that was recorded."""

    soc: str
    strict: bool
    profile: str = ""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One hardware submit of a core: at most 4095 programs, the first at `address`."""

    address: U32
    amount: U32
    tasks: Annotated[int, msgspec.Meta(ge=1, le=4095)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One core's share of a submit."""

    core: Annotated[int, msgspec.Meta(ge=0, lt=3)]
    pieces: Annotated[list[Piece], msgspec.Meta(max_length=65536)]
    int_mask: U32
    int_status: U32


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One submit. Pages are those the cores touched: `before` it ran, and `after` it those that it wrote."""

    number: U64
    domain: Annotated[int, msgspec.Meta(ge=0, lt=16)]
    timeout_ms: U32
    blocking: bool
    task_base: U32
    parts: Annotated[list[Part], msgspec.Meta(min_length=1, max_length=3)]
    ran: bool  # False: it hung before any core began
    tasks: U64
    hw_ns: U64
    error: Annotated[int, msgspec.Meta(ge=-4095, le=4095)]
    rules: dict[str, U64] | None  # broken ones, and how often; None: recorded where nobody watches them
    buffers: Annotated[list[tuple[U32, U64]], msgspec.Meta(max_length=65536)]  # device address, bytes
    before: Annotated[list[Run], msgspec.Meta(max_length=_WINDOW)]
    after: Annotated[list[Run], msgspec.Meta(max_length=_WINDOW)]
    ping_pong: bool = False  # the submit's flag


class Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A soft reset of one core, between submits."""

    core: Annotated[int, msgspec.Meta(ge=0, lt=3)]


Event = Recorded | Reset
_T = TypeVar("_T")


class Writer:
    """Writes a recording. StorageError when the disk refuses. One thread at a time."""

    def __init__(self, path: Path, head: Head) -> None:
        self.path = path
        self._ids: dict[int, int] = {xxhash.xxh3_128_intdigest(ZEROS): 0}
        self._next = 1
        self._fresh: list[bytes] = []
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from None
        self._put(_START.pack(MAGIC, VERSION, 0))
        self._record(HEAD, msgspec.json.encode(head))

    def runs(self, pages: Mapping[int, bytes]) -> list[Run]:
        """Store these pages (number -> 4096 bytes), each content once; what names them in a `Recorded`."""
        found: list[Run] = []
        for number in sorted(pages):
            content = self._id(pages[number])
            if found:
                first, count, start = found[-1]
                if number == first + count and content == (start and start + count):
                    found[-1] = (first, count + 1, start)
                    continue
            found.append((number, 1, content))
        return found

    def add(self, event: Event) -> None:
        self._flush()
        self._record(SUBMIT if isinstance(event, Recorded) else RESET, msgspec.json.encode(event))

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._record(END, b"{}")
        finally:
            with contextlib.suppress(OSError):  # of a full disk, which was told already
                self._file.close()

    def _id(self, page: bytes) -> int:
        key = xxhash.xxh3_128_intdigest(page)
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = self._next
            self._next += 1
            self._fresh.append(page)
            if len(self._fresh) == CHUNK:
                self._flush()
        return known

    def _flush(self) -> None:
        if self._fresh:
            self._record(PAGES, b"".join(self._fresh))
            self._fresh.clear()

    def _record(self, kind: int, data: bytes) -> None:
        stored = zlib.compress(data, 1)
        self._put(_RECORD.pack(kind, len(stored), len(data), zlib.crc32(stored)) + stored)

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}") from None


class Recording:
    """A recording, opened: `head`, `events`, and pages by id. SourceError, one line, for what is no recording.

    Memory is bounded: of the pages only the latest are held.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complete = False
        self._chunks: list[tuple[int, int]] = []  # of each PAGES record: first id, place in the file
        self._pages = 1  # ids given out
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._places: list[tuple[int, int]] = []  # of each event: kind, place
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror or error}") from None
        try:
            self.head = self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def events(self) -> Iterator[Event]:
        """In the order in which they ended."""
        for kind, place in self._places:
            data = self._load(place)
            yield self._decoded(data, Recorded, place) if kind == SUBMIT else self._decoded(data, Reset, place)

    @property
    def submits(self) -> Iterator[Recorded]:
        return (event for event in self.events if isinstance(event, Recorded))

    def pages(self, runs: Iterable[Run]) -> Iterator[tuple[int, bytes]]:
        """(page number, 4096 bytes) of each page that the runs name; those of zeros are all `ZEROS`."""
        runs = list(runs)
        if sum(count for _, count, start in runs if start) > MAX_PAGES:
            raise self._bad("more than 1 GiB in one submit")
        for first, count, start in runs:
            if start + (count if start else 0) > self._pages:
                raise self._bad(f"page {start + count - 1} is named, and there are {self._pages - 1}")
            for i in range(count):
                yield first + i, self._page(start + i) if start else ZEROS

    def _page(self, number: int) -> bytes:
        chunk = bisect.bisect_right(self._chunks, (number, 1 << 63)) - 1
        first, place = self._chunks[chunk]
        data = self._cache.get(place)
        if data is None:
            data = self._cache[place] = self._load(place)
            if len(self._cache) > _KEPT:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(place)
        at = (number - first) * PAGE
        return data[at : at + PAGE]

    # --- the file ---

    def _scan(self) -> Head:
        """Where every record lies; nothing is decompressed but the head."""
        start = self._file.read(_START.size)
        if len(start) < _START.size or start[:8] != MAGIC:
            raise SourceError(f"{self.path}: no .orktrace recording")
        _, version, _ = _START.unpack(start)
        if version != VERSION:
            raise SourceError(f"{self.path}: version {version} of the format; this is version {VERSION}")
        size = self._file.seek(0, 2)
        head: Head | None = None
        place = _START.size
        while place + _RECORD.size <= size and not self.complete:
            self._file.seek(place)
            kind, stored, nbytes, _ = _RECORD.unpack(self._file.read(_RECORD.size))
            self._check(kind, nbytes, place)
            if place + _RECORD.size + stored > size:
                break
            if kind == PAGES:
                self._chunks.append((self._pages, place))
                self._pages += nbytes // PAGE
            elif kind == HEAD:
                head = self._decoded(self._load(place), Head, place)
            elif kind == END:
                self.complete = True
            else:
                self._places.append((kind, place))
            place += _RECORD.size + stored
        if head is None:
            raise self._bad("no head: cut off before the first submit")
        return head

    def _check(self, kind: int, nbytes: int, place: int) -> None:
        if kind not in (PAGES, HEAD, SUBMIT, RESET, END):
            raise self._bad(f"a record of unknown kind {kind} at {place}")
        if kind == PAGES and (nbytes % PAGE or not 0 < nbytes <= CHUNK * PAGE):
            raise self._bad(f"a record of {nbytes} bytes of pages at {place}")
        if nbytes > MAX_JSON:
            raise self._bad(f"a record of {nbytes} bytes at {place}: at most {MAX_JSON}")

    def _load(self, place: int) -> bytes:
        self._file.seek(place)
        _, stored, nbytes, crc = _RECORD.unpack(self._file.read(_RECORD.size))
        data = self._file.read(stored)
        if zlib.crc32(data) != crc:
            raise self._bad(f"the record at {place} does not match its checksum")
        try:
            unpacker = zlib.decompressobj()
            out = unpacker.decompress(data, nbytes)
        except zlib.error as error:
            raise self._bad(f"the record at {place}: {error}") from None
        if len(out) != nbytes or not unpacker.eof:
            raise self._bad(f"the record at {place} is not the {nbytes} bytes that it says")
        return out

    def _decoded(self, data: bytes, kind: type[_T], place: int) -> _T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(f"the record at {place}: {error}") from None

    def _bad(self, what: str) -> SourceError:
        return SourceError(f"{self.path}: {what}: record it again")
