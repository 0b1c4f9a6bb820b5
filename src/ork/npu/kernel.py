"""The seam to the operating system: open, ioctl, mmap, close. Everything above it is the same code on a board and off.

`LinuxKernel` is the real one, the emulator is another, `RecordingKernel` wraps either and keeps a list of the calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ork.errors import NpuError
from ork.npu import uabi

DRIVER_NAME = "rknpu"

T = TypeVar("T")
Mapped = weakref.ref[ctypes.Array[ctypes.c_uint8]]


class Kernel(Protocol):
    """What a driver needs of an operating system. Failures are `OSError` with the errno the kernel would give."""

    def open(self, path: str) -> int:
        """Open a node for reading and writing; returns a descriptor."""
        ...

    def ioctl(self, fd: int, request: int, arg: ctypes.Structure) -> None:
        """One call; `arg` is filled in place."""
        ...

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        """The CPU's view: `length` writable bytes (format B) at `offset` of what `fd` names."""
        ...

    def munmap(self, view: memoryview) -> None:
        """End a mapping, and `view` with it. BufferError while an array made from it lives: drop it and call again."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor; a DRM node's buffers die with it unless mapped or exported."""
        ...

    def nodes(self) -> list[str]:
        """Paths where a DRM driver may be, in the order to try."""
        ...


def release(view: memoryview, mapped: Mapped) -> None:
    """End `view`; BufferError while arrays, views or ctypes objects made from it still hold its memory."""
    view.release()
    if mapped() is not None:
        raise BufferError("a mapping is still in use")


class LinuxKernel:
    """The system calls."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
        ]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._mappings: dict[int, tuple[memoryview, Mapped, int, int]] = {}

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, arg: ctypes.Structure) -> None:
        fcntl.ioctl(fd, request, arg, True)

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        # Not mmap.mmap: that keeps a duplicate of the descriptor for every mapping, and there may be thousands.
        if length <= 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        address = self._libc.mmap(None, length, 3, 1, fd, offset)  # PROT_READ | PROT_WRITE, MAP_SHARED
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        mapped = (ctypes.c_uint8 * length).from_address(address)
        view = memoryview(mapped).cast("B")
        self._mappings[id(view)] = (view, weakref.ref(mapped), address, length)
        return view

    def munmap(self, view: memoryview) -> None:
        _, mapped, address, length = self._mappings[id(view)]
        release(view, mapped)
        del self._mappings[id(view)]
        self._libc.munmap(address, length)

    def close(self, fd: int) -> None:
        os.close(fd)

    def nodes(self) -> list[str]:
        # Primary nodes first: a submit through the render node timed out in one measured case.
        return sorted(glob.glob("/dev/dri/card*")) + sorted(glob.glob("/dev/dri/renderD*"))


@dataclass
class Call:
    """One call that went through a `RecordingKernel`."""

    name: str
    request: int
    before: dict[str, Any]  # the argument's fields on the way in
    after: dict[str, Any]  # and on the way out
    error: int = 0  # errno, 0 if the call succeeded


@dataclass
class RecordingKernel:
    """Passes every call on to `inner` and keeps it in `calls`."""

    inner: Kernel
    calls: list[Call] = field(default_factory=list)

    def open(self, path: str) -> int:
        return self._plain("open", {"path": path}, lambda: self.inner.open(path))

    def ioctl(self, fd: int, request: int, arg: ctypes.Structure) -> None:
        call = Call(uabi.NAMES.get(request, hex(request)), request, fields_of(arg), {})
        self.calls.append(call)
        try:
            self.inner.ioctl(fd, request, arg)
        except OSError as error:
            call.error = error.errno or 0
            raise
        finally:
            call.after = fields_of(arg)

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        return self._plain(
            "mmap", {"fd": fd, "length": length, "offset": offset}, lambda: self.inner.mmap(fd, length, offset)
        )

    def munmap(self, view: memoryview) -> None:
        self._plain("munmap", {"length": len(view)}, lambda: self.inner.munmap(view))

    def close(self, fd: int) -> None:
        self._plain("close", {"fd": fd}, lambda: self.inner.close(fd))

    def nodes(self) -> list[str]:
        return self.inner.nodes()

    def named(self, name: str) -> list[Call]:
        """The calls of one name, oldest first."""
        return [call for call in self.calls if call.name == name]

    def _plain(self, name: str, before: dict[str, Any], act: Callable[[], T]) -> T:
        call = Call(name, 0, before, {})
        self.calls.append(call)
        try:
            return act()
        except OSError as error:
            call.error = error.errno or 0
            raise


def fields_of(struct: ctypes.Structure) -> dict[str, Any]:
    """A structure's fields as plain values: nested structures as dicts, arrays as lists."""
    return {name: _plain_value(getattr(struct, name)) for name, *_ in struct._fields_}


def _plain_value(value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return fields_of(value)
    if isinstance(value, ctypes.Array):
        return [_plain_value(item) for item in value]
    return value


@dataclass(frozen=True)
class DriverVersion:
    """What DRM_IOCTL_VERSION says of a node."""

    name: str
    version: tuple[int, int, int]
    description: str


def driver_version(kernel: Kernel, fd: int) -> DriverVersion:
    """Name and version of the driver behind a DRM descriptor. OSError if it is not a DRM node."""
    name, description = ctypes.create_string_buffer(64), ctypes.create_string_buffer(128)
    arg = uabi.DrmVersion(
        name_len=len(name),
        name=ctypes.addressof(name),
        desc_len=len(description),
        desc=ctypes.addressof(description),
    )
    kernel.ioctl(fd, uabi.DRM_VERSION, arg)
    return DriverVersion(
        name.raw[: min(arg.name_len, len(name))].decode("ascii", "replace"),
        (arg.version_major, arg.version_minor, arg.version_patchlevel),
        description.raw[: min(arg.desc_len, len(description))].decode("ascii", "replace"),
    )


def find_node(kernel: Kernel) -> tuple[str, int]:
    """Path and open descriptor of the NPU's node, found by the driver's name, whatever its number.

    Raises NpuError, one line, when there is none, it may not be opened, or its driver has no IOMMU domains.
    """
    seen: list[str] = []
    denied: list[str] = []
    for path in kernel.nodes():
        try:
            fd = kernel.open(path)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                denied.append(path)
            else:
                seen.append(f"{path}: {error.strerror}")
            continue
        try:
            found = driver_version(kernel, fd)
            if found.name == DRIVER_NAME:
                _require_domains(kernel, fd, path, found)
                return path, fd
            seen.append(f"{path}: {found.name}")
        except OSError as error:
            seen.append(f"{path}: {error.strerror}")
        except NpuError:
            kernel.close(fd)
            raise
        kernel.close(fd)
    if denied:
        raise NpuError(
            f"no permission to open {', '.join(denied)}: add yourself to the groups `video` and `render` "
            "(sudo usermod -aG video,render $USER), log in again"
        )
    if any(entry.endswith(": rocket") for entry in seen):
        raise NpuError(
            "the NPU is driven by mainline's `rocket`, which has no vendor interface: boot a kernel with `rknpu`"
        )
    if seen:
        raise NpuError(f"no DRM node of the `rknpu` driver (found {', '.join(seen)}): is this an RK3588 vendor kernel?")
    raise NpuError("no DRM node under /dev/dri: is this a Rockchip board whose kernel has the `rknpu` driver?")


def _require_domains(kernel: Kernel, fd: int, path: str, found: DriverVersion) -> None:
    """Old drivers answer EINVAL to what they don't know; the question for the current domain tells them apart."""
    try:
        kernel.ioctl(fd, uabi.ACTION, uabi.Action(flags=uabi.ActionCode.GET_IOMMU_DOMAIN_ID))
    except OSError as error:
        version = ".".join(map(str, found.version))
        raise NpuError(
            f"{path}: rknpu {version} has no IOMMU domains ({error.strerror}): "
            "install a kernel with rknpu 0.9.8 or newer"
        ) from error
