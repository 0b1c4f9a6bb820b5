"""Writing a pack that is either whole or not there: `x.part` and `x.journal`, then `x` by one rename.

Blobs come in any order, from any thread. Every 64 MiB, and at the end, the part is fsynced and only then does the
journal name the batch, so that a process killed anywhere resumes, and ends with the bytes of an uninterrupted run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final

import numpy as np

from ork.errors import PackBusy, PackError, SourceError, StorageError
from ork.pack.format import FOOT, HASH_AT, HASHED, NOTES_AREA, SECTIONS, hash_of
from ork.pack.journal import Journal, write_all
from ork.pack.plan import PackPlan

BATCH: Final = 64 << 20
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Hook = Callable[[str, int], None]  # tests: (point, bytes written), called before the point's work; may raise


class PackWriter:
    """Use as a context manager: leaving it without `finish` keeps the part and the journal for the next `open`."""

    def __init__(self, path: str, plan: PackPlan, progress: Progress | None, hook: Hook | None):
        self.path = path
        self.plan = plan
        self.resumed = 0  # entries taken over from an earlier run
        self._progress = progress or (lambda done, total: None)
        self._hook = hook or (lambda point, written: None)
        self._part, self._journal_path = path + ".part", path + ".journal"
        self._entries = plan.entry_records.copy()
        self._total = int(self._entries["nbytes"].sum())
        self._done = 0  # bytes of entries written or taken over
        self._state = bytearray(len(plan))  # 0 missing, 1 being written, 2 written
        self._pending: list[tuple[int, bytes]] = []
        self._pending_bytes = 0
        self._lock = threading.Lock()  # of the fields above
        self._sync_lock = threading.Lock()  # one batch at a time: fsync, journal
        self._broken = False
        self._fd = self._locked_part()
        try:
            with self._storage():
                self._journal = self._start()
        except BaseException:
            os.close(self._fd)
            raise
        self._open = True

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        plan: PackPlan,
        progress: Progress | None = None,
        *,
        hook: Hook | None = None,
    ) -> PackWriter:
        """Creates `path`.part with all its space, or resumes one of the same plan: entries that its journal names are
        hashed again and taken over if they match.

        Raises StorageError (disk full: nothing is left behind; no permission; no such folder) and PackBusy (another
        process writes the same path).
        """
        return cls(os.fspath(path), plan, progress, hook)

    def missing(self) -> Iterator[int]:
        """Entry ids still to be written, in canonical order; one that another thread has taken since is left out."""
        return (entry for entry in range(len(self.plan)) if not self._state[entry])

    @property
    def full(self) -> bool:
        """Whether a batch waits for `sync`."""
        return self._pending_bytes >= BATCH

    def write(self, entry: int, blob: Any, *, sync: bool = True) -> None:
        """Store the blob (any contiguous buffer of exactly the planned size) of an entry. Safe from any thread.

        The thread that fills a batch brings it to the disk, unless `sync` is off and another thread calls `sync`.
        Raises ValueError for a wrong size or an entry written before, StorageError if the disk refuses.
        """
        view = memoryview(blob).cast("B")
        record = self._entries[entry]
        nbytes, offset = int(record["nbytes"]), int(record["offset"])
        if view.nbytes != nbytes:
            raise ValueError(f"entry {entry}: a blob of {view.nbytes} bytes, planned {nbytes}")
        with self._lock:
            if self._state[entry]:
                raise ValueError(f"entry {entry} is written twice")
            self._state[entry] = 1
        try:
            self._hook("write", self._done)
            digest = hash_of(view)
            with self._storage():
                write_all(self._fd, view, offset)
        except BaseException:
            self._state[entry] = 0
            raise
        record["hash"] = np.frombuffer(digest, np.uint8)
        with self._lock:
            self._state[entry] = 2
            self._pending.append((entry, digest))
            self._pending_bytes += nbytes
            self._done += nbytes
            done = self._done
        self._progress(done, self._total)
        if sync and self.full:
            self.sync()

    def extend(self, plan: PackPlan) -> None:
        """Takes the place of a plan that had no tokenizer yet. Raises ValueError for another one, StorageError."""
        if plan.hash != self.plan.hash:
            raise ValueError(f"{self.path}: the plan is of other entries")
        self.plan = plan
        with self._storage():
            self._reserve()

    def finish(self) -> None:
        """Index, footer, fsync, rename, fsync of the folder. Raises PackError if entries are missing."""
        missing = len(self._state) - self._state.count(2)
        if missing:
            raise PackError(f"{self.path}: {missing} of {len(self.plan)} entries are not written yet")
        self.sync()
        plan, sections = self.plan, {**self.plan.sections, "entries": self._entries.tobytes()}
        footer = footer_page({"header": plan.header, **sections})
        with self._storage():
            self._hook("index", self._done)
            for name, data in sections.items():
                write_all(self._fd, data, plan.table[name][0])
            write_all(self._fd, bytes(2 * NOTES_AREA), plan.table["notes"][0])
            self._hook("footer", self._done)
            write_all(self._fd, footer, plan.table["footer"][0])
            write_all(self._fd, plan.header, 0)
            self._hook("fsync", self._done)
            os.fsync(self._fd)
            self._hook("rename", self._done)
            os.replace(self._part, self.path)
            fsync_folder(self.path)
            self._hook("renamed", self._done)
            os.unlink(self._journal_path)
        self.close()

    def close(self) -> None:
        """Let go of the files; an unfinished part stays for a later `open`. Waits for no one: end the writers first."""
        if self._open:
            self._open = False
            self._journal.close()
            os.close(self._fd)

    def abort(self) -> None:
        """Close and delete the part and the journal."""
        if self._open:
            for path in (self._journal_path, self._part):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            self.close()

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, SourceError):
            self.abort()  # it would fail again
        else:
            self.close()

    def _locked_part(self) -> int:
        """The part's descriptor, locked. Asks again if the file was renamed away while we were opening it."""
        while True:
            with self._storage():
                fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self._part)):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise PackBusy(f"{self.path}: another process is writing it; wait or choose another path") from None
            except FileNotFoundError:
                pass
            os.close(fd)

    def _start(self) -> Journal:
        journal = Journal(self._journal_path, self.plan.hash)
        end = self.plan.table[SECTIONS[0]][0]  # of the entries; behind it nothing is taken over
        resuming = journal.records is not None and os.fstat(self._fd).st_size >= end
        try:
            os.ftruncate(self._fd, end if resuming else 0)
            self._reserve()
            if resuming:
                self._take_over(journal.records or {})
            else:
                journal.restart()
        except BaseException:
            journal.close()
            if not resuming:
                os.unlink(self._journal_path)
                os.unlink(self._part)
            raise
        return journal

    def _reserve(self) -> None:
        """All of the file's space now, so that a full disk shows before an hour of work."""
        try:
            os.posix_fallocate(self._fd, 0, self.plan.file_bytes)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            if self._needed() > self._free():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            os.ftruncate(self._fd, self.plan.file_bytes)

    def _take_over(self, records: dict[int, bytes]) -> None:
        for entry, digest in sorted(records.items()):
            if entry >= len(self.plan):
                continue
            record = self._entries[entry]
            nbytes = int(record["nbytes"])
            if hash_of(os.pread(self._fd, nbytes, int(record["offset"]))) == digest:
                record["hash"] = np.frombuffer(digest, np.uint8)
                self._state[entry] = 2
                self.resumed += 1
                self._done += nbytes
                self._progress(self._done, self._total)

    def sync(self) -> None:
        """Bring what is pending to the disk, then name it in the journal. Raises StorageError."""
        with self._sync_lock:
            with self._lock:
                batch, self._pending, self._pending_bytes = self._pending, [], 0
            if self._broken:
                raise StorageError(f"{self.path}: an earlier write failed; convert again to go on")
            if not batch:
                return
            self._broken = True  # a failed fsync may drop pages and succeed next time: never ask twice
            with self._storage():
                self._hook("fsync", self._done)
                os.fsync(self._fd)
                self._hook("journal", self._done)
                self._journal.append(batch)
            self._broken = False

    @contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.errno not in FULL:
                raise StorageError(f"{self.path}: cannot write: {e.strerror}") from None
            raise StorageError(
                f"{self.path}: no room: {self._needed():,} more bytes are needed, {self._free():,} are free"
                f"{' (or the file system takes no file this large)' if e.errno == errno.EFBIG else ''};"
                " free some or choose another path"
            ) from None

    def _needed(self) -> int:
        try:
            return max(0, self.plan.file_bytes - os.stat(self._part).st_blocks * 512)
        except FileNotFoundError:
            return self.plan.file_bytes

    def _free(self) -> int:
        fs = os.statvfs(os.path.dirname(self.path) or ".")
        return fs.f_bavail * fs.f_frsize


def footer_page(parts: dict[str, bytes]) -> bytes:
    """The footer: mark, the hash of each of HASHED in order, zeros, and the hash of all that: the pack's digest."""
    page = (FOOT + b"".join(hash_of(parts[name]) for name in HASHED)).ljust(HASH_AT, b"\0")
    return page + hash_of(page)


def fsync_folder(path: str) -> None:
    """Make a rename in the folder of `path` durable. File systems that cannot fsync a folder say EINVAL."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
