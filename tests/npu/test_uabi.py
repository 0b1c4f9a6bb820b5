"""The kernel interface, byte for byte, and how a node is found, against made-up systems."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from ork.errors import NpuError
from ork.npu import uabi
from ork.npu.kernel import LinuxKernel, RecordingKernel, driver_version, find_node


@pytest.mark.parametrize(
    ("name", "size", "drm", "misc"),
    [
        ("ACTION", 8, 0xC0086440, 0xC0087200),
        ("SUBMIT", 104, 0xC0686441, 0xC0687201),
        ("MEM_CREATE", 48, 0xC0306442, 0xC0307202),
        ("MEM_MAP", 16, 0xC0106443, 0xC0107203),
        ("MEM_DESTROY", 16, 0xC0106444, 0xC0107204),
        ("MEM_SYNC", 32, 0xC0206445, 0xC0207205),
    ],
)
def test_vendor_calls(name: str, size: int, drm: int, misc: int) -> None:
    struct = {n: s for n, _, s in uabi.VENDOR_CALLS}[name]
    assert ctypes.sizeof(struct) == size
    assert uabi.drm_request(name) == drm
    assert uabi.misc_request(name) == misc
    assert uabi.split_request(drm) == (3, ord("d"), drm & 0xFF, size)
    assert uabi.NAMES[drm] == name


def test_generic_calls() -> None:
    assert uabi.DRM_VERSION == 0xC0406400
    assert uabi.GEM_CLOSE == 0x40086409
    assert uabi.PRIME_HANDLE_TO_FD == 0xC00C642D
    assert uabi.PRIME_FD_TO_HANDLE == 0xC00C642E
    assert uabi.DMA_HEAP_ALLOC == 0xC0184800
    assert uabi.DMA_BUF_SYNC == 0x40086200


@pytest.mark.parametrize(
    ("struct", "offsets"),
    [
        (uabi.MemCreate, (0, 4, 8, 16, 24, 32, 40, 44)),
        (uabi.MemMap, (0, 4, 8)),
        (uabi.MemDestroy, (0, 4, 8)),
        (uabi.MemSync, (0, 4, 8, 16, 24)),
        (uabi.Task, (0, 4, 8, 12, 16, 20, 24, 28, 32)),
        (uabi.Submit, (0, 4, 8, 12, 16, 20, 24, 32, 36, 40, 48, 56, 60, 64)),
    ],
)
def test_no_padding_anywhere(struct: type[ctypes.Structure], offsets: tuple[int, ...]) -> None:
    assert tuple(getattr(struct, name).offset for name, *_ in struct._fields_) == offsets


def test_sizes_inside() -> None:
    assert ctypes.sizeof(uabi.Task) == 40
    assert ctypes.sizeof(uabi.SubcoreTask) == 8
    assert (uabi.BUFFER, uabi.TASK_ARRAY) == (0x403, 0x40B)


def test_the_seam_needs_no_numpy() -> None:
    code = "import sys, ork.npu.uabi, ork.npu.kernel, ork.npu.soc; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Nodes:
    """A system whose nodes are (driver name, knows domains) or an errno for open."""

    def __init__(self, **nodes: tuple[str, bool] | int) -> None:
        self.table = {f"/dev/dri/{name}": what for name, what in nodes.items()}
        self.opened: dict[int, str] = {}

    def nodes(self) -> list[str]:
        return list(self.table)

    def open(self, path: str) -> int:
        what = self.table[path]
        if isinstance(what, int):
            raise OSError(what, os.strerror(what))
        fd = len(path) + 100 * (1 + list(self.table).index(path))
        self.opened[fd] = path
        return fd

    def close(self, fd: int) -> None:
        del self.opened[fd]

    def ioctl(self, fd: int, request: int, arg: ctypes.Structure) -> None:
        driver = self.table[self.opened[fd]]
        assert isinstance(driver, tuple)
        if request == uabi.DRM_VERSION and driver[0]:
            data = driver[0].encode()
            ctypes.memmove(arg.name, data, min(len(data), arg.name_len))
            arg.name_len, arg.desc_len, arg.version_minor = len(data), 0, 9
        elif request != uabi.ACTION or not driver[1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def mmap(self, fd: int, length: int, offset: int) -> memoryview:
        raise AssertionError("nothing is mapped here")

    def munmap(self, view: memoryview) -> None:
        raise AssertionError("nothing is mapped here")


def test_the_node_is_found_by_name() -> None:
    system = Nodes(card0=("rockchip", False), card1=("rknpu", True), renderD128=("panthor", False))
    path, fd = find_node(system)
    assert path == "/dev/dri/card1"
    assert list(system.opened) == [fd]
    assert driver_version(system, fd).version == (0, 9, 0)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({}, "no DRM node under /dev/dri"),
        ({"card0": ("panthor", False), "card1": ("", False)}, "card0: panthor"),
        ({"card0": ("rockchip", False), "card1": errno.EACCES}, "no permission to open /dev/dri/card1"),
        ({"card0": ("rocket", False)}, "mainline's `rocket`"),
        ({"card0": ("rknpu", False)}, "rknpu 0.9.0 has no IOMMU domains"),
        ({"card0": errno.ENODEV}, "No such device"),
    ],
)
def test_what_is_wrong_is_one_line(nodes: dict[str, tuple[str, bool] | int], said: str) -> None:
    system = Nodes(**nodes)
    with pytest.raises(NpuError, match=said) as failure:
        find_node(system)
    assert "\n" not in str(failure.value)
    assert not system.opened


def test_recording() -> None:
    kernel = RecordingKernel(Nodes(card0=("rknpu", True)))
    _, fd = find_node(kernel)
    with pytest.raises(OSError, match="Invalid argument"):
        kernel.ioctl(fd, uabi.SUBMIT, uabi.Submit(core_mask=4))
    kernel.close(fd)
    assert [call.name for call in kernel.calls] == ["open", "DRM_VERSION", "ACTION", "SUBMIT", "close"]
    submit = kernel.named("SUBMIT")[0]
    assert submit.error == errno.EINVAL
    assert submit.before["core_mask"] == 4
    assert submit.before["subcore_task"][2] == {"task_start": 0, "task_number": 0}
    version = kernel.named("DRM_VERSION")[0]
    assert (version.before["name_len"], version.after["name_len"]) == (64, 5)


def test_linux_system_calls(tmp_path: object) -> None:
    kernel = LinuxKernel()
    null = kernel.open("/dev/null")
    with pytest.raises(OSError) as failure:
        kernel.ioctl(null, uabi.DRM_VERSION, uabi.DrmVersion())
    assert failure.value.errno == errno.ENOTTY
    with pytest.raises(OSError) as failure:
        kernel.mmap(null, 4096, 0)
    assert failure.value.errno == errno.ENODEV
    kernel.close(null)
    with pytest.raises(FileNotFoundError):
        kernel.open(f"{tmp_path}/none")

    path = f"{tmp_path}/shared"
    with open(path, "wb") as file:
        file.write(bytes(8192))
    fd = kernel.open(path)
    before = len(os.listdir("/proc/self/fd"))
    view = kernel.mmap(fd, 4096, 4096)
    assert len(os.listdir("/proc/self/fd")) == before  # a mapping costs no descriptor
    view[10] = 7
    array = np.frombuffer(view, np.uint8)
    struct = ctypes.c_uint8.from_buffer(view, 10)
    for _ in range(2):
        with pytest.raises(BufferError):
            kernel.munmap(view)
        assert array is None or array[10] == 7
        assert struct.value == 7
        array = None
    del struct
    kernel.munmap(view)
    kernel.close(fd)
    with open(path, "rb") as file:
        assert file.read()[4106] == 7
