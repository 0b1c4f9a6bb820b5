"""Pooling out of memory (op-enable mask 0x60): PPU_RDMA reads a cube, PPU reduces windows of it.

Cubes are surfaces of 16 bytes of channels, strides in bytes (executed with one surface, the others derived):

    in(s, y, x)  = 701c + s * 7028 + y * 7024 + 16 * x        out(s, y, x) = 6070 + s * 607c + 16 * (y * out_w + x)
    window(y, x) = rows y * stride_h - pad_top + 0 .. kernel_h - 1, columns alike

Maximum, minimum, or average: sum * recip_w / 65536 * recip_h / 65536, where the reciprocals hold 65536 / size, as an
integer, or for fp16 data as the bits of that fp16 number. fp16 sums are float32, rows first, rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import fetch
from ork.emulator.checks import Finding, Verdict, verdict_of
from ork.emulator.dpu import POISON
from ork.emulator.elementwise import MAX_ATOMS
from ork.emulator.fetch import ATOM, WINDOW
from ork.emulator.memory import Domain
from ork.emulator.rdma import at_register
from ork.emulator.rounding import shift_round
from ork.emulator.task import name_of
from ork.npu.isa import Pooling, Precision, decode

Array = npt.NDArray[Any]

SOURCE, OUTPUT = 0x701C, 0x6070
_TYPES: Final[Mapping[int, str]] = {Precision.INT8: "<i1", Precision.INT16: "<i2", Precision.FP16: "<f2"}
_WANTED: Final = (
    *(0x600C, 0x6010, 0x6014, 0x6018, 0x601C, 0x6020, 0x6024, 0x6034, 0x6070, 0x6084),
    *(0x700C, 0x7010, 0x7014, 0x701C, 0x7024, 0x7030),
)
_UNIT: Final = 65536.0
MAX_TAPS: Final = 1 << 26  # atoms read under kernels


@dataclass(frozen=True, slots=True)
class Pool:
    """One pooling without its addresses. Strides in bytes, sizes as (width, height)."""

    precision: int
    rdma_precision: int
    method: int
    size: tuple[int, int]
    rdma_size: tuple[int, int]
    out_size: tuple[int, int]
    channels: tuple[int, int, int]  # in, out, PPU_RDMA
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad_left: int
    pad_top: int
    pad_right: int
    pad_bottom: int
    pad_bits: int
    reciprocals: tuple[int, int]
    flying: bool
    line_stride: int
    surf_stride: int
    out_surf_stride: int
    not_modelled: str
    missing: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(_TYPES[self.precision])

    @property
    def surfaces(self) -> int:
        return -(-self.channels[0] * self.dtype.itemsize // ATOM)

    @property
    def windows(self) -> int:
        return self.out_size[0] * self.out_size[1]

    @property
    def padded(self) -> bool:
        return bool(self.pad_left or self.pad_top or self.pad_right or self.pad_bottom)


def read(ppu: Mapping[int, int], rdma: Mapping[int, int]) -> Pool:
    """The pooling that these register groups (offset -> value) describe. Never raises."""
    registers = {**ppu, **rdma}

    def field(offset: int) -> dict[str, int]:
        return decode(offset, registers.get(offset, 0))

    def sizes(first: int, prefix: str) -> tuple[int, int, int]:
        width, height, channel = (
            field(first + 4 * i)[f"{prefix}_{axis}"] for i, axis in enumerate(("width", "height", "channel"))
        )
        return width, height, channel

    inside, out, source = sizes(0x600C, "cube_in"), sizes(0x6018, "cube_out"), sizes(0x700C, "cube_in")
    mode, kernel, pads, form = field(0x6024), field(0x6034), field(0x6040), field(0x6084)
    misc = field(0x60DC)
    asked = {
        f"pooling method {mode['pooling_method']}": mode["pooling_method"] > Pooling.MIN,
        f"pooling of precision {form['proc_precision']}": form["proc_precision"] not in _TYPES,
        "indices of maxima": mode["index_en"],
        "pooling with a notch": mode["notch_addr"],
        "non-aligned or surface-wise output of pooling": misc["nonalign"] or misc["mc_surf_out"],
    }
    return Pool(
        precision=form["proc_precision"],
        rdma_precision=field(0x7030)["in_precision"],
        method=mode["pooling_method"],
        size=inside[:2],
        rdma_size=source[:2],
        out_size=out[:2],
        channels=(inside[2], out[2], source[2]),
        kernel=(kernel["kernel_width"], kernel["kernel_height"]),
        stride=(kernel["kernel_stride_width"], kernel["kernel_stride_height"]),
        pad_left=pads["pad_left"],
        pad_top=pads["pad_top"],
        pad_right=pads["pad_right"],
        pad_bottom=pads["pad_bottom"],
        pad_bits=field(0x6044)["pad_value_0"],
        reciprocals=(field(0x6038)["recip_kernel_width"], field(0x603C)["recip_kernel_height"]),
        flying=bool(mode["flying_mode"]),
        line_stride=field(0x7024)["src_line_stride"],
        surf_stride=field(0x7028)["src_surf_stride"],
        out_surf_stride=field(0x607C)["dst_surf_stride"],
        not_modelled=next((what for what, yes in asked.items() if yes), ""),
        missing=tuple(offset for offset in _WANTED if offset not in registers),
    )


# --- checks ---


def judge(pool: Pool, strict: bool) -> Verdict:
    return verdict_of(tuple(_findings(pool)), strict)


def _findings(pool: Pool) -> Iterator[Finding]:
    if pool.missing:
        yield Finding("never-written", None, {"registers": " ".join(map(name_of, pool.missing))})
    if not pool.flying:
        yield Finding("rdma-unconfigured", 0x6024, {"flying_mode": pool.flying})
        return
    if pool.size != pool.rdma_size or len(set(pool.channels)) > 1:
        values: dict[str, object] = {"ppu": pool.size, "rdma": pool.rdma_size, "channels": pool.channels}
        yield Finding("pool-size", 0x700C, values)
        return
    padding = ((pool.pad_left, pool.pad_right), (pool.pad_top, pool.pad_bottom))
    for axis, register in enumerate((0x6018, 0x601C)):
        reach = (pool.out_size[axis] - 1) * pool.stride[axis] + pool.kernel[axis]
        if reach > pool.size[axis] + sum(padding[axis]):
            values = {"windows_reach": reach, "cube": pool.size[axis], "padding": padding[axis]}
            yield Finding("pool-size", register, values)
            return
    if pool.not_modelled:
        yield Finding("not-modelled", None, {"asked": pool.not_modelled})
        return
    trivial = pool.kernel == (1, 1) and pool.method != Pooling.AVERAGE
    doubts = {
        "precisions of PPU and PPU_RDMA differ": pool.precision != pool.rdma_precision and not trivial,
        "minimum": pool.method == Pooling.MIN,
        "integers": pool.precision != Precision.FP16 and not trivial,
        "padding": pool.padded,
    }
    for what, doubtful in doubts.items():
        if doubtful:
            yield Finding("pool-unproven", 0x6024, {"what": what})
    atoms = pool.surfaces * max(pool.windows, pool.size[0] * pool.size[1])
    if atoms > MAX_ATOMS or pool.windows * pool.surfaces * pool.kernel[0] * pool.kernel[1] > MAX_TAPS:
        yield Finding("work-limit", 0x6018, {"atoms": atoms, "kernel": pool.kernel})


# --- running ---


def run(domain: Domain, pool: Pool, source: int, output: int, *, poison: bool) -> None:
    """Pool, surface by surface. Raises IommuFault before anything of a surface is written."""
    out_w, out_h = pool.out_size
    width, height = pool.size
    inside = np.arange(height)[:, None] * pool.line_stride + np.arange(width) * ATOM
    outside = np.arange(out_h * out_w) * ATOM
    for surface in range(pool.surfaces):
        to = output + surface * pool.out_surf_stride + outside & WINDOW
        fetch.mapped(domain, to)
        with at_register(SOURCE):
            atoms = fetch.gather(domain, source + surface * pool.surf_stride + inside & WINDOW)
        with np.errstate(over="ignore", invalid="ignore"):
            raw = pooled(atoms.view(pool.dtype), pool).view(np.uint8).reshape(-1, ATOM)
        fetch.scatter(domain, to, np.full_like(raw, POISON) if poison else raw)


def pooled(values: Array, pool: Pool) -> Array:
    """One surface [height, width, channels] reduced to [out_h, out_w, channels], in its own precision."""
    out_w, out_h = pool.out_size
    reach_x, reach_y = (
        (out - 1) * stride + kernel for out, stride, kernel in zip(pool.out_size, pool.stride, pool.kernel)
    )
    pad = np.array([pool.pad_bits], "<u4").view(np.uint8)[: values.itemsize].view(values.dtype)[0]
    padded = np.full((reach_y, reach_x, values.shape[2]), pad)
    rows, columns = min(values.shape[0], reach_y - pool.pad_top), min(values.shape[1], reach_x - pool.pad_left)
    if rows > 0 and columns > 0:
        padded[pool.pad_top : pool.pad_top + rows, pool.pad_left : pool.pad_left + columns] = values[:rows, :columns]
    averages = pool.method == Pooling.AVERAGE
    wide: type[Any] = np.float32 if values.dtype.kind == "f" else np.int64
    total: Array | None = None
    for y in range(pool.kernel[1]):
        for x in range(pool.kernel[0]):
            tap = padded[y :: pool.stride[1], x :: pool.stride[0]][:out_h, :out_w]
            tap = tap.astype(wide) if averages else tap
            if total is None:
                total = tap
            elif averages:
                total = total + tap
            else:
                total = np.maximum(total, tap) if pool.method == Pooling.MAX else np.minimum(total, tap)
    assert total is not None
    return np.ascontiguousarray(average(total, pool) if averages else total)


def average(sums: Array, pool: Pool) -> Array:
    """Sums times both reciprocals. How integers round is unproven: the product once, half to even."""
    if sums.dtype.kind == "f":
        halves = np.array(pool.reciprocals, np.uint32).astype("<u2").view("<f2").astype(np.float32) / np.float32(_UNIT)
        mean: Array = (sums * halves[0] * halves[1]).astype(pool.dtype)
        return mean
    limits = np.iinfo(pool.dtype)
    product = sums * pool.reciprocals[0] * pool.reciprocals[1]
    return shift_round(product, 32, half_up=False).clip(limits.min, limits.max).astype(pool.dtype)
