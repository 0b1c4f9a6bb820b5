"""From a device's name to a device, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ork.devices.base import Device
from ork.devices.cpu import CpuDevice
from ork.errors import NpuError, UsageError

if TYPE_CHECKING:
    from ork.npu.driver import Npu
    from ork.npu.kernel import Kernel

DEVICES = ("auto", "cpu", "emu", "rk3588", "hybrid")


def open_device(
    name: str, *, threads: int | None = None, min_rows: int | None = None, board: Kernel | None = None
) -> tuple[Device, str]:
    """The device called `name`, and why it is that one. `board`: for emu, the emulated board to use.

    auto: `hybrid` on a board, else `cpu`. cpu: the host. emu: every int8 product on the emulated chip. rk3588: every
    int8 product on the chip. hybrid: ops with at least `min_rows` rows (default 32) on the chip, or on the emulator
    where there is no chip, the rest on the CPU. Raises UsageError, or NpuError for a chip that cannot be used.
    """
    if name not in DEVICES:
        raise UsageError(f"--device {name}: known are {', '.join(DEVICES)}")
    if board is not None and name != "emu":
        raise UsageError("faults are made on the emulated board: they go with --device emu")
    if min_rows is not None and name not in ("auto", "hybrid"):
        raise UsageError("--min-rows divides work between NPU and CPU: it goes with --device hybrid")
    cpu = CpuDevice(threads)
    if name == "cpu":
        return cpu, "asked for"
    # imported here: who runs on the CPU does not pay for the NPU's modules
    from ork.devices.npu import MIN_ROWS, NpuDevice
    from ork.npu.driver import Npu
    from ork.npu.kernel import LinuxKernel

    least = MIN_ROWS if min_rows is None else min_rows
    if least < 1:
        raise UsageError(f"--min-rows {least}: give a number of rows, 1 or more")
    if name == "emu":
        npu = _emulated() if board is None else Npu.open(board)
        return NpuDevice(npu, cpu, name="emu"), "asked for: the chip in software"
    try:
        npu = Npu.open(LinuxKernel())
    except NpuError as error:
        if name == "rk3588":
            raise
        if name == "auto":
            return cpu, f"auto: {error}"
        return NpuDevice(_emulated(), cpu, name="hybrid", min_rows=least), "asked for; emulated, as there is no chip"
    if name == "rk3588":
        return NpuDevice(npu, cpu, name="rk3588"), "asked for"
    why = "asked for" if name == "hybrid" else f"auto: an RK3588 at {npu.path}"
    return NpuDevice(npu, cpu, name="hybrid", min_rows=least), f"{why}; ops with {least} rows and more on the chip"


def _emulated() -> Npu:
    from ork.emulator.kernel import EmulatedKernel
    from ork.npu.driver import Npu

    return Npu.open(EmulatedKernel(views="sampled"))
