"""The emulator for programs in other processes: a Unix socket in front of an `EmulatedKernel`.

Each thread of a program has a connection and here a thread that answers it. An open node or a dma-buf is, in the
program, one end of a pair of sockets, the other end of which is here: when the program's last copy is closed, however
that comes about, this end hangs up, and the emulated descriptor is closed. Buffers are shared memory that the program
maps itself; the kernel that runs us says whether it still does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ork.emulator.files import DmaBuf, DrmFile
from ork.emulator.kernel import EmulatedKernel
from ork.emulator.memory import Buffer
from ork.emulator.shared import SharedMemory
from ork.emulator.wire import COPY, IOCTL, LONGEST, MMAP, OPEN, REPLY, REQUEST
from ork.npu import uabi

_GIVES_DESCRIPTOR = {uabi.DMA_HEAP_ALLOC: uabi.DmaHeapAllocation, uabi.PRIME_HANDLE_TO_FD: uabi.PrimeHandle}
_MAY_FREE = (uabi.MEM_DESTROY, uabi.GEM_CLOSE)
_MAY_ALLOCATE = (uabi.MEM_CREATE, uabi.DMA_HEAP_ALLOC, uabi.PRIME_FD_TO_HANDLE)
_CREDENTIALS = struct.Struct("3i")


class ServedKernel(EmulatedKernel):
    """An emulated kernel whose caller is another process."""

    def copy_out(self, address: int, data: bytes) -> None:
        if address and data:
            self._copies().append((address, data))

    def taken_copies(self) -> list[tuple[int, bytes]]:
        """What this thread's call copied out, once."""
        copies = self._copies()
        taken = list(copies)
        copies.clear()
        return taken

    def _copies(self) -> list[tuple[int, bytes]]:
        mine = self.__dict__.setdefault("_local", threading.local())
        if not hasattr(mine, "copies"):
            mine.copies = []
        copies: list[tuple[int, bytes]] = mine.copies
        return copies


@dataclass
class _Served:
    """A descriptor that a program holds."""

    file: int  # the emulated kernel's number
    end: socket.socket
    inode: int  # of the program's end


@dataclass
class _Answer:
    error: int = 0
    fd_at: int = -1
    close_on_exec: bool = True
    offset: int = 0
    argument: bytes = b""
    descriptor: int = -1  # to be sent, and closed then


class Server:
    """Answers programs until `close`. `name` goes into their environment (`wire.SERVER`).

    refused: told of every call that failed for a reason worth a line: call, errno, reason. after: called after every
    call, in the thread that answered it.
    """

    def __init__(
        self,
        kernel: ServedKernel,
        *,
        refused: Callable[[str, int, str], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.kernel = kernel
        self.calls = 0
        self.clients: set[int] = set()  # process ids that ever asked
        self._refused, self._after = refused, after
        self._shared = SharedMemory()
        kernel.memory.allocate = self._shared.allocate
        self._lock = threading.Lock()
        self._reaping = threading.Lock()
        self._served: dict[int, _Served] = {}  # by our end's descriptor
        self._inodes: dict[int, int] = {}  # of the program's ends -> emulated descriptor
        self._hangups = select.epoll()
        self._maps: dict[Buffer, int] = {}  # objects that were mapped, each counted once in `refs`
        self._orphans: set[Buffer] = set()  # only mappings keep these
        self._connections: set[socket.socket] = set()
        self.name = f"ork-emu-{os.getpid()}-{secrets.token_hex(8)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(f"\0{self.name}")
        self._door.listen(128)
        threading.Thread(target=self._accept, name="ork-emu-door", daemon=True).start()

    def close(self) -> None:
        """Stop answering, and close what programs left open."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.settle()
        for served in self._served.values():
            self.kernel.close(served.file)
            served.end.close()
        self._served.clear()
        self._sweep(set(self._maps))
        self._hangups.close()

    def settle(self) -> None:
        """Take notice of everything that programs closed or unmapped so far."""
        self._reap()
        self._sweep(self._orphans)

    @property
    def open_descriptors(self) -> int:
        """How many nodes and dma-bufs programs hold."""
        self._reap()
        return len(self._served)

    # --- connections ---

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:
                return
            pid, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid not in (os.getuid(), 0):  # abstract names have no permissions
                connection.close()
                continue
            with self._lock:
                self._connections.add(connection)
            self.clients.add(pid)
            name = f"ork-emu-{pid}"
            threading.Thread(target=self._serve, args=(connection, pid), name=name, daemon=True).start()

    def _serve(self, connection: socket.socket, pid: int) -> None:
        try:
            while message := connection.recv(LONGEST):
                answer = self._answer(pid, message)
                copies = self.kernel.taken_copies()
                head = REPLY.pack(answer.error, answer.fd_at, answer.close_on_exec, len(copies), answer.offset)
                tail = b"".join(COPY.pack(at, len(data)) + data for at, data in copies)
                reply = [head, answer.argument, tail]
                if answer.descriptor < 0:
                    connection.sendmsg(reply)
                else:
                    try:
                        socket.send_fds(connection, reply, [answer.descriptor])
                    finally:
                        os.close(answer.descriptor)
        except OSError:
            pass  # the program is gone
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, pid: int, message: bytes) -> _Answer:
        op, file, value, offset = REQUEST.unpack_from(message)
        with self._lock:
            self.calls += 1
        self._reap()
        answer = _Answer()
        try:
            if op == OPEN:
                self._open(answer, message[REQUEST.size :].decode("utf-8", "surrogateescape"))
            elif op == IOCTL:
                self._ioctl(answer, pid, file, value, message)
            elif op == MMAP:
                self._mmap(answer, file, value, offset)
            else:
                answer.error = errno.EPROTO
        except OSError as error:
            answer.error = error.errno or errno.EIO
            if error.strerror not in (None, os.strerror(answer.error)):
                self._explain(op, value, answer.error, str(error.strerror))
        except Exception as error:  # ours, not the program's: it goes on with an error, as after a kernel's oops
            answer.error = errno.EIO
            self._explain(op, value, errno.EIO, f"a defect of the emulator: {error!r}")
        if self._after is not None:
            self._after()
        return answer

    def _explain(self, op: int, value: int, error: int, text: str) -> None:
        if self._refused is not None:
            name = {OPEN: "open", MMAP: "mmap"}.get(op) or uabi.NAMES.get(value, hex(value))
            self._refused(name, error, text)

    # --- calls ---

    def _open(self, answer: _Answer, path: str) -> None:
        file = self.kernel.open(path)
        answer.descriptor = self._hand_out(file, path.lstrip("/"))

    def _ioctl(self, answer: _Answer, pid: int, file: int, request: int, message: bytes) -> None:
        direction, _, _, size = uabi.split_request(request)
        argument = _structure(request, size)
        given = message[REQUEST.size :]
        ctypes.memmove(ctypes.addressof(argument), given, min(len(given), size))
        if request in _MAY_ALLOCATE and self._orphans:
            self._sweep(self._orphans)
        freed = self._object(file, argument) if request in _MAY_FREE else None
        named = argument.fd if isinstance(argument, uabi.PrimeHandle) else 0
        try:
            if request == uabi.PRIME_FD_TO_HANDLE:
                argument.fd = self._emulated(pid, named)
            self.kernel.ioctl(file, request, argument)
        finally:
            if request == uabi.PRIME_FD_TO_HANDLE:
                argument.fd = named
            if direction & uabi.IOC_READ:
                answer.argument = bytes(argument)
        if request in _GIVES_DESCRIPTOR:
            pages = self._dma_buf(argument.fd).pages
            answer.descriptor = self._hand_out(argument.fd, f"dmabuf:{pages.size}")
            answer.fd_at = _GIVES_DESCRIPTOR[request].fd.offset
            flags = argument.flags if isinstance(argument, uabi.PrimeHandle) else argument.fd_flags
            answer.close_on_exec = bool(flags & os.O_CLOEXEC)
        if freed is not None:
            self._sweep({freed})

    def _mmap(self, answer: _Answer, file: int, length: int, offset: int) -> None:
        kernel = self.kernel
        with kernel.driver.device.lock:
            pages, answer.offset, origin = kernel.mapping(file, length, offset)
            answer.descriptor = self._shared.opened(pages.memory)
            kernel.driver.counts.maps += 1
            if origin is None:
                kernel.driver.counts.unmaps += 1  # the memory outlives its dma-buf by itself
            else:
                if origin not in self._maps:
                    origin.refs += 1
                self._maps[origin] = self._maps.get(origin, 0) + 1

    # --- descriptors of programs ---

    def _hand_out(self, file: int, what: str) -> int:
        """The program's end of a new pair, named for what it is."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        theirs.bind(f"\0{self.name}/{file}/{what}")
        inode = os.fstat(theirs.fileno()).st_ino
        with self._lock:
            self._served[ours.fileno()] = _Served(file, ours, inode)
            self._inodes[inode] = file
        self._hangups.register(ours.fileno(), 0)
        return theirs.detach()

    def _emulated(self, pid: int, fd: int) -> int:
        """The emulated descriptor behind a number of that process. OSError EBADF or, for something else's, EINVAL."""
        try:
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
        except OSError as error:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
        file = self._inodes.get(int(inode[1:-1])) if kind == "socket" else None
        if file is None:
            raise OSError(errno.EINVAL, f"descriptor {fd} is no dma-buf")
        return file

    def _dma_buf(self, file: int) -> DmaBuf:
        found = self.kernel.file(file)
        assert isinstance(found, DmaBuf)
        return found

    def _object(self, file: int, argument: ctypes.Structure) -> Buffer | None:
        found = self.kernel.file(file)
        return found.handles.get(getattr(argument, "handle", 0)) if isinstance(found, DrmFile) else None

    def _reap(self) -> None:
        """Close what programs closed. It is closed when any thread's call of this returns."""
        with self._reaping:
            for fd, _ in self._hangups.poll(0):
                with self._lock:
                    served = self._served.pop(fd)
                    del self._inodes[served.inode]
                    self._hangups.unregister(fd)
                    served.end.close()
                self.kernel.close(served.file)
                self._sweep(set(self._maps))

    def _sweep(self, buffers: set[Buffer]) -> None:
        """Let go of objects that no handle names and no program maps any more."""
        driver = self.kernel.driver
        with driver.device.lock:
            for buffer in list(buffers):
                if buffer.refs > 1 or buffer not in self._maps:
                    continue
                if self._shared.mapped(buffer.pages.memory):
                    self._orphans.add(buffer)
                    continue
                driver.counts.unmaps += self._maps.pop(buffer)
                self._orphans.discard(buffer)
                driver.drop(buffer)


_KNOWN: dict[int, type[ctypes.Structure]] = {
    **{uabi.drm_request(name): struct for name, _, struct in uabi.VENDOR_CALLS},
    uabi.DRM_VERSION: uabi.DrmVersion,
    uabi.GEM_CLOSE: uabi.GemClose,
    uabi.PRIME_HANDLE_TO_FD: uabi.PrimeHandle,
    uabi.PRIME_FD_TO_HANDLE: uabi.PrimeHandle,
    uabi.DMA_HEAP_ALLOC: uabi.DmaHeapAllocation,
    uabi.DMA_BUF_SYNC: uabi.DmaBufSync,
}


def _structure(request: int, size: int) -> ctypes.Structure:
    """Zeroed: the request's own structure, or so many bytes."""
    known = _KNOWN.get(request)
    return known() if known is not None else _raw(size)()


def _raw(size: int) -> type[ctypes.Structure]:
    return type("Raw", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_uint8 * size)]})
