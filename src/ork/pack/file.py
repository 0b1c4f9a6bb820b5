"""Reading slices by descriptor, past the page cache where that works: the way of a pack that is larger than memory."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from ork.errors import PackDamaged, StorageError

Bytes = npt.NDArray[np.uint8]
PAGE = 4096
NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def aligned(nbytes: int) -> Bytes:
    """Anonymous page-aligned memory of at least `nbytes`, whole pages."""
    return np.frombuffer(mmap.mmap(-1, max(PAGE, -(-nbytes // PAGE) * PAGE)), np.uint8)


class SliceFile:
    """A pack's bytes through a descriptor of the file that was opened, whatever its name means by now."""

    def __init__(self, path: str, fd: int):
        self.path = path
        self._fd = fd
        self._direct = -1
        self._refused = False
        with contextlib.suppress(OSError):  # tmpfs and some network file systems have no O_DIRECT
            self._direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | getattr(os, "O_DIRECT", 0))

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct >= 0 and not self._refused

    def read(self, offset: int, nbytes: int, memory: Bytes) -> None:
        """`nbytes` at `offset` into page-aligned memory; both offset and room are whole pages.

        What the page cache happens to hold is copied from there, which is faster; nothing is added to it.
        """
        done = self._cached(offset, memory[:nbytes]) if NOWAIT else 0
        if done == nbytes:
            return
        offset, nbytes, memory = offset + done, nbytes - done, memory[done:]
        whole = min(-(-nbytes // PAGE) * PAGE, memory.nbytes)
        if self.direct:
            try:
                self._fill(self._direct, offset, memory[:whole], nbytes)
                return
            except OSError:  # a file system that accepted the flag and refuses the reads
                self._refused = True  # the descriptor stays: other threads may be reading by it
        self._fill(self._fd, offset, memory[:nbytes], nbytes)

    def read_part(self, offset: int, memory: Bytes) -> None:
        self._fill(self._fd, offset, memory, memory.nbytes)

    def _cached(self, offset: int, memory: Bytes) -> int:
        """Reads what is in the page cache from `offset` on: all of `memory`, or so many whole pages."""
        done = 0
        with contextlib.suppress(OSError):  # the next page is not there, or this file system cannot tell
            while done < memory.nbytes and (got := os.preadv(self._fd, [memory.data[done:]], offset + done, NOWAIT)):
                done += got
        return done if done == memory.nbytes else done // PAGE * PAGE

    def _fill(self, fd: int, offset: int, memory: Bytes, need: int) -> None:
        done = 0
        view = memory.data
        while done < need:
            try:
                got = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                if fd == self._direct:
                    raise
                raise StorageError(f"{self.path}: reading at {offset + done}: {error.strerror}") from None
            if not got:
                raise PackDamaged(
                    f"{self.path}: the file ends at {offset + done} while in use: convert the model again"
                )
            done += got

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
