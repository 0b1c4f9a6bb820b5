"""Memory that other processes map: one memfd a buffer."""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE, _SHARED = 3, 1


class SharedMemory:
    """Makes blocks of memory, and knows the descriptor behind each. A block is freed with its last Python reference;
    what other processes have mapped of it stays valid."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}  # by address

    def allocate(self, size: int) -> Any:
        """A ctypes array of `size` zero bytes. MemoryError when the system refuses."""
        try:
            made = os.memfd_create("ork-npu-buffer")
            try:
                os.ftruncate(made, size)
                # Opened anew: a lease counts the openings, and the one that made it is not counted.
                fd = os.open(f"/proc/self/fd/{made}", os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.close(made)
        except OSError as error:
            raise MemoryError(f"{size} bytes of shared buffer: {error.strerror}") from error
        address = _libc.mmap(None, size, _READ_WRITE, _SHARED, fd, 0)
        if address == _FAILED:
            os.close(fd)
            raise MemoryError(f"{size} bytes of shared buffer: {os.strerror(ctypes.get_errno())}")
        block = (ctypes.c_uint8 * size).from_address(address)
        self._descriptors[address] = fd
        weakref.finalize(block, self._free, address, size)
        return block

    def opened(self, block: Any) -> int:
        """A new descriptor of the block's memory, for another process to map."""
        return os.open(f"/proc/self/fd/{self._of(block)}", os.O_RDWR | os.O_CLOEXEC)

    def mapped(self, block: Any) -> bool:
        """Whether another process (any that was given a descriptor, or a child of it) still has the block.

        The kernel knows: it gives a write lease only on a file that nobody else holds open or mapped.
        """
        fd = self._of(block)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def _of(self, block: Any) -> int:
        return self._descriptors[ctypes.addressof(block)]

    def _free(self, address: int, size: int) -> None:
        fd = self._descriptors.pop(address)  # first: the address may be another block's as soon as it is free
        _libc.munmap(address, size)
        os.close(fd)
