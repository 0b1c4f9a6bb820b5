"""`x.journal`: which entries of `x.part` are safely on the disk, so that a killed conversion goes on where it was.

    magic 8 | plan hash 16 | xxh3-64 of these 24 bytes, 8 | records of 32 bytes: entry u64, hash 16, xxh3-64 of these 24

A batch of records is appended only after an fsync of the blobs it names. A torn tail fails its check and is cut off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash

MAGIC: Final = b"\x89orkjrn\n"
RECORD: Final = 32


class Journal:
    """An open journal. `records` is what it names, an entry's last record winning; None if it isn't this plan's."""

    def __init__(self, path: str, plan_hash: bytes):
        self._head = _checked(MAGIC + plan_hash)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(self._fd, "rb", closefd=False) as f:
            data = f.read()
        self.records: dict[int, bytes] | None = None
        self._end = RECORD
        if data[:RECORD] != self._head:
            return
        self.records = {}
        while len(record := data[self._end : self._end + RECORD]) == RECORD and _checked(record[:24]) == record:
            self.records[int.from_bytes(record[:8], "little")] = record[8:24]
            self._end += RECORD
        os.ftruncate(self._fd, self._end)

    def restart(self) -> None:
        """Empty it and make it this plan's."""
        os.ftruncate(self._fd, 0)
        self._write(self._head, 0)
        self._end = RECORD

    def append(self, records: Iterable[tuple[int, bytes]]) -> None:
        """Add (entry, hash) records and fsync. The blobs they name must be on the disk already."""
        data = b"".join(_checked(np.uint64(entry).astype("<u8").tobytes() + digest) for entry, digest in records)
        self._write(data, self._end)
        self._end += len(data)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: bytes, offset: int) -> None:
        write_all(self._fd, data, offset)
        os.fsync(self._fd)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite until everything is written. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def _checked(data: bytes) -> bytes:
    return data + xxhash.xxh3_64_digest(data)
