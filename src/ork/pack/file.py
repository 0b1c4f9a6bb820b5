"""Reading slices by descriptor, past the page cache where that works: the way of a pack that is larger than memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ork import native
from ork.errors import PackDamaged, StorageError
from ork.pack.format import align

Bytes = npt.NDArray[np.uint8]
Part = tuple[int, int, Bytes]  # offset, bytes, memory
LIBC = ctypes.CDLL(None)


def aligned(nbytes: int) -> Bytes:
    """Anonymous page-aligned memory of at least `nbytes`, whole pages."""
    return np.frombuffer(mmap.mmap(-1, align(max(1, nbytes))), np.uint8)


class SliceFile:
    """A pack's bytes through a descriptor of the file that was opened, whatever its name means by now."""

    def __init__(self, path: str, fd: int, mapped: int = 0):
        """`mapped` is the address at which the whole file is mapped for as long as this is used, if it is."""
        self.path = path
        self._mapped = mapped
        self._fd = fd
        self._direct = self._parts = -1
        self._refused = False
        self._seen = self._state()  # bytes and time of the last change
        with contextlib.suppress(OSError):  # tmpfs and some network file systems have no O_DIRECT
            self._direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        with contextlib.suppress(OSError):  # of its own: reading ahead is right for the mapping and wrong for parts
            self._parts = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            os.posix_fadvise(self._parts, 0, 0, os.POSIX_FADV_RANDOM)

    def _state(self) -> tuple[int, int]:
        held = os.fstat(self._fd)
        return held.st_size, held.st_mtime_ns

    def written(self) -> bool:
        """Whether somebody has written into the file since this was last asked. Raises PackDamaged while it is shorter
        than it was: its end must not be touched in a mapping then."""
        now = self._state()
        if now[0] < self._seen[0]:
            raise PackDamaged(f"{self.path}: the file ends at {now[0]} while in use: convert the model again")
        changed, self._seen = now != self._seen, now
        return changed

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct >= 0 and not self._refused

    def read(self, offset: int, nbytes: int, memory: Bytes) -> None:
        """`nbytes` at `offset` into page-aligned memory; both offset and room are whole pages.

        What is whole in the page cache is copied from there, which is faster; nothing is added to it.
        """
        if self.cached(offset, nbytes):
            self._fill(self._fd, offset, memory[:nbytes], nbytes)
            return
        whole = min(align(nbytes), memory.nbytes)
        if self.direct:
            try:
                self._fill(self._direct, offset, memory[:whole], nbytes)
                return
            except OSError:  # a file system that accepted the flag and refuses the reads
                self._refused = True  # the descriptor stays: other threads may be reading by it
        self._fill(self._fd, offset, memory[:nbytes], nbytes)

    def read_run(self, parts: Sequence[Part]) -> None:
        """Parts (offset, bytes, memory), each as in `read`; one system call where they lie one behind the other and
        each has whole pages of memory."""
        first, need = parts[0][0], parts[-1][0] + parts[-1][1] - parts[0][0]
        whole = [align(nbytes) for _, nbytes, _ in parts]
        lined_up = all(a[0] + size == b[0] for a, b, size in zip(parts, parts[1:], whole))
        if len(parts) > 1 and lined_up and all(memory.nbytes >= size for (*_, memory), size in zip(parts, whole)):
            fd = self._fd if not self.direct or self.cached(first, need) else self._direct
            with contextlib.suppress(OSError):  # refused: each by itself finds out what is wrong
                if os.preadv(fd, [memory[:size].data for (*_, memory), size in zip(parts, whole)], first) >= need:
                    return
        for part in parts:
            self.read(*part)

    def copy(self, parts: Sequence[Part]) -> None:
        """Parts (offset, bytes, memory) of what is in the page cache, by all threads of the native code."""
        if not native.read_parts(self._fd, [o for o, *_ in parts], [memory[:nbytes] for _, nbytes, memory in parts]):
            self.read_run(parts)  # says what is wrong, if it still is

    def expect(self, offset: int, nbytes: int) -> None:
        """Starts to bring a range into the page cache, without waiting for it."""
        with contextlib.suppress(OSError):  # a hint
            os.posix_fadvise(self._parts if self._parts >= 0 else self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_part(self, offset: int, memory: Bytes) -> None:
        """Bytes of any range, through the page cache, without reading ahead."""
        self._fill(self._parts if self._parts >= 0 else self._fd, offset, memory, memory.nbytes)

    def cached(self, offset: int, nbytes: int) -> bool:
        """Whether all pages of a range are in the page cache, where reading it is copying; False of a file that is not
        mapped. A read that must not wait would start a read-ahead; this does not."""
        if not self._mapped:
            return False
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset + nbytes - start
        seen = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        arguments = ctypes.c_void_p(self._mapped + start), ctypes.c_size_t(length), ctypes.c_void_p(seen.ctypes.data)
        return LIBC.mincore(*arguments) == 0 and bool((seen & 1).all())

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
        for fd in (self._fd, self._direct, self._parts):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = self._parts = -1
