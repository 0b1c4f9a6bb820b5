"""Notes: what is learnt about a pack after conversion (quality, routing, placement), in the file but outside its hash.

Two areas of 1 MiB take turns: [hash 16][sequence u64][bytes u64][JSON][zeros], the hash over all that follows it. The
valid area with the larger sequence is the notes; a write goes to the other one, so a torn write loses only itself.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any, Final

import msgspec
import numpy as np

from ork.errors import StorageError, UsageError
from ork.pack.format import HASH, NOTES_AREA, damaged, hash_of
from ork.pack.index import map_pack, read_index
from ork.pack.journal import write_all
from ork.pack.metadata import BAD
from ork.pack.plan import to_json

HEAD: Final = HASH + 16
LIMIT: Final = NOTES_AREA - HEAD  # bytes of JSON

Area = tuple[int, dict[str, Any]]  # (sequence, notes); sequence 0 is an area never written


def read_area(view: memoryview) -> Area | None:
    """One area; None if it is neither all zero nor whole."""
    sequence = int.from_bytes(view[HASH : HASH + 8], "little")
    length = int.from_bytes(view[HASH + 8 : HEAD], "little")
    if sequence == 0:
        return None if np.frombuffer(view, np.uint64).any() else (0, {})
    if length > LIMIT or hash_of(view[HASH:]) != bytes(view[:HASH]):
        return None
    try:
        return sequence, msgspec.json.decode(view[HEAD : HEAD + length], type=dict[str, Any])
    except BAD:
        return None


def read_areas(view: memoryview) -> tuple[Area | None, Area | None]:
    """Both areas of the notes section."""
    return read_area(view[:NOTES_AREA]), read_area(view[NOTES_AREA:])


def current(path: str, offset: int, areas: tuple[Area | None, Area | None]) -> Area:
    """The area that counts. Raises PackDamaged only if neither is whole."""
    whole = [area for area in areas if area]
    if not whole:
        raise damaged(path, "the notes", offset, "neither of their two areas is whole")
    return max(whole, key=lambda area: area[0])


def write_note(path: str | os.PathLike[str], key: str, value: Any) -> None:
    """Set one note (a JSON value) of a pack, keeping the others. Safe against a crash and against other writers.

    Raises PackError if `path` is no whole pack, UsageError if the notes outgrow 1 MiB, StorageError if the disk
    refuses.
    """
    path = os.fspath(path)
    data, fd = map_pack(path)
    os.close(fd)
    offset, _ = read_index(path, memoryview(data)).sections["notes"]
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise StorageError(f"{path}: cannot write notes: {e.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        areas = read_areas(memoryview(os.pread(fd, 2 * NOTES_AREA, offset)))
        sequence, notes = current(path, offset, areas)
        text = to_json({**notes, key: value})
        if len(text) > LIMIT:
            raise UsageError(f"{path}: note {key}: the notes would take {len(text):,} bytes, {LIMIT:,} fit")
        stale = 1 if areas[0] and areas[0][0] == sequence else 0
        body = (sequence + 1).to_bytes(8, "little") + len(text).to_bytes(8, "little") + text
        body = body.ljust(NOTES_AREA - HASH, b"\0")
        write_all(fd, hash_of(body) + body, offset + stale * NOTES_AREA)
        os.fsync(fd)
    except OSError as e:
        raise StorageError(f"{path}: cannot write notes: {e.strerror}") from None
    finally:
        os.close(fd)
