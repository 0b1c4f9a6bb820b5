"""From a device's name to a device, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ork import tiles
from ork.devices.base import Device, SliceSpec, blob_bytes
from ork.devices.cpu import CpuDevice
from ork.devices.dispatch import PLACES, Choice, Mixture, choose
from ork.errors import NpuError, UsageError

if TYPE_CHECKING:
    from ork.npu.driver import Npu
    from ork.npu.kernel import Kernel

DEVICES = ("auto", "cpu", "emu", "rk3588", "hybrid")


def open_device(
    name: str,
    *,
    threads: int | None = None,
    min_rows: int | None = None,
    board: Kernel | None = None,
    w4a4: bool = False,
    unproven: bool = False,
) -> tuple[Device, str]:
    """The device called `name`, and why it is that one. `board`: for emu, the emulated board to use.

    auto: `hybrid` on a board, else `cpu`. cpu: the host. emu: every int8 product on the emulated chip. rk3588: every
    int8 product on the chip. hybrid: ops with at least `min_rows` rows (default 32) on the chip, or on the emulator
    where there is no chip, the rest and tensors with scales by group on the CPU. `w4a4`: i4 weights meet
    rows of four bits, on the NPU as int4 products, in K slices that int16 holds whatever comes, or, `unproven`, in the
    pack's own. Raises UsageError, or NpuError for a chip that cannot be used.
    """
    if name not in DEVICES:
        raise UsageError(f"--device {name}: known are {', '.join(DEVICES)}")
    if board is not None and name != "emu":
        raise UsageError("faults are made on the emulated board: they go with --device emu")
    if min_rows is not None and name not in ("auto", "hybrid"):
        raise UsageError("--min-rows divides work between NPU and CPU: it goes with --device hybrid")
    if unproven and not w4a4:
        raise UsageError("--unproven lengthens the K slices of int4 products: it goes with --w4a4")
    cpu = CpuDevice(threads, w4a4=w4a4)
    if name == "cpu":
        return cpu, "asked for"
    # imported here: who runs on the CPU does not pay for the NPU's modules
    from ork.devices.npu import MIN_ROWS, NpuDevice
    from ork.npu.driver import Npu
    from ork.npu.kernel import LinuxKernel
    from ork.npu.plan import INT4_SAFE_K

    least = MIN_ROWS if min_rows is None else min_rows
    if least < 1:
        raise UsageError(f"--min-rows {least}: give a number of rows, 1 or more")
    int4_k = (tiles.KS_MAX if unproven else INT4_SAFE_K) if w4a4 else 0
    if name == "emu":
        npu = _emulated() if board is None else Npu.open(board)
        return NpuDevice(npu, cpu, name="emu", int4_k=int4_k), "asked for: the chip in software"
    try:
        npu = Npu.open(LinuxKernel())
    except NpuError as error:
        if name == "rk3588":
            raise
        if name == "auto":
            return cpu, f"auto: {error}"
        return _hybrid(_emulated(), cpu, least, int4_k), "asked for; emulated, as there is no chip"
    if name == "rk3588":
        return NpuDevice(npu, cpu, name="rk3588", int4_k=int4_k), "asked for"
    why = "asked for" if name == "hybrid" else f"auto: an RK3588 at {npu.path}"
    return _hybrid(npu, cpu, least, int4_k), f"{why}; ops with {least} rows and more on the chip"


def check_experts(mode: str | None, device: str) -> None:
    """Raises UsageError for a place of experts that is not known, or that the device called `device` has not."""
    if mode is not None and mode not in PLACES:
        raise UsageError(f"--experts {mode}: known are {', '.join(PLACES)}")
    if mode == "npu" and device == "cpu":
        raise UsageError("--experts npu: the device is the CPU; choose --device hybrid, emu or rk3588")


def place_experts(
    device: Device,
    mode: str | None,
    layers: Sequence[Sequence[Sequence[SliceSpec]]],
    *,
    experts: int,
    top_k: int,
    window: int | None,
    others: int,
) -> str:
    """Decides where a mixture's experts are computed, before any is placed, and says why; "" without an NPU.

    `layers`: the slices of one expert's gate, up and down in each layer, of `experts` alike; `others`: bytes that the
    rest of the model takes of the device. `mode` is npu, cpu, auto, or None: auto where the CPU shares the work
    (`hybrid`), else npu. Where layers are stored in different ways, the first that the NPU takes speaks for all. Raises
    UsageError for npu without an NPU.
    """
    check_experts(mode, device.name)
    if device.name == "cpu":
        return ""
    from ork.devices.npu import NpuDevice

    assert isinstance(device, NpuDevice)
    device.expert_rows = 0  # so that slices are told as the NPU would map them
    each = [[s for part in parts for s in part] for parts in layers]
    taken = [i for i, slices in enumerate(each) if all(map(device.copies, slices))]
    at = taken[0] if taken else 0
    gate, slices = layers[at][0], each[at]
    mapped = sum(map(device.mapped_bytes, slices))
    mixture = Mixture(experts, top_k, gate[0].K, gate[-1].n1, sum(map(blob_bytes, slices)), mapped)
    capacity, total = device.capacity(), experts * sum(device.mapped_bytes(s) for slices in each for s in slices)
    room = (capacity.domains * capacity.bytes_per_domain if window is None else window) - others
    asked = mode or ("auto" if device.name == "hybrid" else "npu")
    unable = why_not = ""
    if not taken:
        unable = "their codec, or scales by group, are none that this device gives the NPU"
    elif device.int4_k and slices[0].codec == "i4":
        unable = "int4 programs take rows in a form in which those of an expert do not lie together"
    elif any(s.group or s.act_group for s in slices):
        why_not = "scales by group: a program a group costs 13 to 283 times one"
    elif window is None and total > room:
        why_not = f"{total >> 20} MiB of them do not fit the NPU's {max(0, room) >> 20} MiB"
    if asked == "npu" and unable:
        choice = Choice(None, f"experts on the CPU{', although the NPU was asked for' if mode else ''}: {unable}")
    elif mode is None and asked == "npu":
        choice = Choice(0, f"experts on the NPU, as all that {device.name} gives it")
    else:
        streamed = max(0.0, 1 - max(0, room) / total)
        choice = choose(asked, mixture, streamed=streamed, why_not=unable or why_not)
    device.expert_rows = choice.rows
    left = len(layers) - len(taken)
    cpu = f"; of {left} of {len(layers)} layers on the CPU: their codec, or scales by group"
    return choice.reason + (cpu if left and choice.rows is not None else "")


def placement_reason(device: Device, specs: Iterable[SliceSpec]) -> str:
    """Which of a model's tensors a device with an NPU leaves to the CPU, and why; "" if none."""
    if device.name == "cpu":
        return ""
    first = {s.tensor: s for s in specs}.values()
    floats = sum(not tiles.CODECS[s.codec].scaled for s in first)
    grouped = sum(tiles.CODECS[s.codec].scaled and not device.copies(s) for s in first)
    said = [f"{floats} float tensors on the CPU: the order of the chip's fp16 sums is unknown"] if floats else []
    if grouped:
        said.append(f"{grouped} tensors with scales by group on the CPU: a program a group costs 13 to 283 times one")
    return "; ".join(said)


def check_w4a4(specs: Iterable[SliceSpec]) -> None:
    """Raises UsageError unless a model's 4-bit tensors, of which there must be some, are those that int4 multiplies."""
    codecs = {s.tensor: s.codec for s in specs}
    if odd := [name for name, codec in codecs.items() if codec == "nf4"]:
        raise UsageError(
            f"--w4a4: {odd[0]} is nf4, whose codes are places in a table, not the integers that int4 products take: "
            "convert with i4, or leave --w4a4 away and they are multiplied as int8"
        )
    if "i4" not in codecs.values():
        raise UsageError("--w4a4: no weight of this model is i4: convert it with `ork convert --codec i4`")


def _hybrid(npu: Npu, cpu: CpuDevice, least: int, int4_k: int) -> Device:
    from ork.devices.npu import NpuDevice

    return NpuDevice(npu, cpu, name="hybrid", min_rows=least, grouped=False, int4_k=int4_k)


def _emulated() -> Npu:
    from ork.emulator.kernel import EmulatedKernel
    from ork.npu.driver import Npu

    return Npu.open(EmulatedKernel(views="sampled"))
