"""The rules that a task's numbers must keep, and what follows for its run when they don't.

Each check looks at one `Task` and yields what it found; `rules.RULES` holds texts, grades and effects. Rules about the
stream and about memory are checked where those are read, in `core` and `convolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ork.emulator import operands
from ork.emulator.reader import CPEND
from ork.emulator.rules import RULES, Effect
from ork.emulator.task import Task, name_of
from ork.npu.isa import Precision
from ork.npu.soc import Soc

MAX_PIXELS: Final = 1 << 18  # of one program; what fits the data banks is far below
MAX_OUTPUT: Final = 1 << 28  # bytes written by one program
MAX_WORK: Final = 1 << 35  # multiply-adds of one program; matmuls whose rows fit stay below 2**33

_FLOATS = {Precision.FP16, Precision.BF16, Precision.FP32, Precision.TF32}
_INT4_ROWS = 4  # of a batch with K >= _INT4_K
_INT4_K = 3072
_NARROW_N, _NARROW_K, _NARROW_ROWS, _NARROW_BANKS = 32, 1024, range(129, 177), 4
_REQUANT_K = 512
_FP16_KERNEL = 5  # larger ones, and strides, have no recorded result on a board


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: the register that shows it (offset or None) and the numbers that disagree."""

    rule: str
    register: int | None
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def effect(self) -> Effect:
        return RULES[self.rule].effect

    @property
    def register_name(self) -> str | None:
        return None if self.register is None else name_of(self.register)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a task: `lines` is how many feature lines are right, the others are poisoned."""

    findings: tuple[Finding, ...]
    hang: str
    refuse: str
    poison: bool
    lines: int


def judge(task: Task, soc: Soc, strict: bool) -> Verdict:
    """All findings of a task and what they add up to."""
    verdict = verdict_of(tuple(_findings(task, soc)), strict)
    known = not task.not_modelled and not verdict.hang
    return replace(verdict, lines=task.lines_that_fit(soc) if known else 0)


def verdict_of(findings: tuple[Finding, ...], strict: bool) -> Verdict:
    """What findings add up to; no line is called right yet."""

    def first(*effects: Effect) -> str:
        return next((f.rule for f in findings if f.effect in effects), "")

    spoiled = first(Effect.POISON, *((Effect.DOUBT,) if strict else ()))
    return Verdict(findings, first(Effect.HANG), first(Effect.REFUSE), bool(spoiled), 0)


def _findings(task: Task, soc: Soc) -> Iterator[Finding]:
    """Hangs first: where blocks disagree about precision or size, the other numbers mean nothing."""
    if task.missing:
        yield Finding("never-written", None, {"registers": " ".join(map(name_of, task.missing))})
    hangs = list(_precisions(task)) or list(_outputs(task, soc)) or list(_operands(task))
    yield from hangs
    if hangs:
        return
    if task.not_modelled:
        yield Finding("not-modelled", None, {"asked": task.not_modelled})
        return
    yield from (Finding(*x) for x in operands.doubts(task.stages, task.reader, task.pixels, task.atoms))
    for check in _CHECKS:
        yield from check(task, soc)


def _precisions(task: Task) -> Iterator[Finding]:
    if set(task.precisions) != {task.precision}:
        cna, core, dpu_in, dpu = task.precisions
        values = {"cna_in": task.precision, "cna": cna, "core": core, "dpu_in": dpu_in, "dpu": dpu}
        yield Finding("precision-mix", 0x4010 if {cna, core} == {task.precision} else 0x3010, values)
    elif (task.precision in _FLOATS) != (task.out_precision in _FLOATS):
        yield Finding("precision-mix", 0x4010, {"in": task.precision, "out": task.out_precision})


def _outputs(task: Task, soc: Soc) -> Iterator[Finding]:
    """Every block counts pixels and channels for itself; one that waits for more than it is sent never ends."""
    width, height = task.core_out
    if task.cna_out != (width, width * height):
        yield Finding("output-size", 0x102C, {"cna": task.cna_out, "core": (width, width * height)})
    if task.dpu_out != task.core_out:
        yield Finding("output-size", 0x4034, {"core": task.core_out, "dpu": task.dpu_out})
    if task.core_channels <= soc.max_n:  # beyond, the fields of DPU wrap: that is the rule n-limit
        counts = {"kernels": task.results, "core": task.core_channels}
        counts |= {"dpu": task.dpu_channels, "wdma": task.wdma_channels}
        if not task.results <= task.core_channels == task.dpu_channels == task.wdma_channels:
            yield Finding("output-size", 0x403C, counts)
        if not task.kernels:
            yield Finding("output-size", 0x1038, counts)
    if not task.not_modelled and task.atoms * 16 != task.group * task.out_bytes:
        yield Finding("output-size", 0x4050, {"atoms": task.atoms, "needed": task.group * task.out_bytes // 16})
    sizes = {"width": task.width, "height": task.height, "channels": task.channels}
    sizes |= {"kernel_width": task.kernel_width, "kernel_height": task.kernel_height}
    sizes |= {"stride_x": task.stride_x, "stride_y": task.stride_y}
    if not all(sizes.values()):
        yield Finding("output-size", 0x1020, sizes)
    last = ((width - 1) * task.stride_x - task.pad_left, (height - 1) * task.stride_y - task.pad_top)
    if last[0] >= task.width or last[1] >= task.height:  # the last window holds nothing but padding
        yield Finding("output-size", 0x3014, {"last_window": last, "features": (task.width, task.height)})


def _operands(task: Task) -> Iterator[Finding]:
    """What DPU_RDMA must deliver beside a convolution."""
    yield from (Finding(*x) for x in operands.hangs(task.stages, task.reader))
    reader = task.reader
    if task.ow_memory and not (reader and reader.bs_use & CPEND):
        yield Finding("operand-missing", 0x501C, {"stage": "ow"})
    if reader is None:
        return
    if reader.flying:
        yield Finding("rdma-unconfigured", 0x5044, {"flying": reader.flying})
    if {reader.precision, reader.proc_precision} != {task.precision}:
        values = {"rdma_in": reader.precision, "rdma": reader.proc_precision, "in": task.precision}
        yield Finding("precision-mix", 0x5044, values)
    sizes = (reader.width, reader.height), task.dpu_out
    if reader.element is not None and sizes[0] != sizes[1]:
        yield Finding("output-size", 0x500C, {"rdma": sizes[0], "dpu": sizes[1]})


def _banks(task: Task, soc: Soc) -> Iterator[Finding]:
    total = task.data_bank + task.weight_bank
    values = {"data_bank": task.data_bank, "weight_bank": task.weight_bank}
    if total > soc.cbuf_banks or not task.data_bank or not task.weight_bank:
        yield Finding("bank-split", 0x1040, values)
    elif total < soc.cbuf_banks:
        yield Finding("bank-unused", 0x1040, values)


def _entries(task: Task, soc: Soc) -> Iterator[Finding]:
    need, surfaces = task.need(soc), task.surfaces
    rounded = (surfaces + 1) // 4 * task.width  # whole entries a pixel: Mesa's count where atoms % 4 = 3
    image = task.image and task.entries == 4 * task.height * need  # what programs write for images, all its lines
    if task.entries != need and not image and not (surfaces % 4 == 3 and task.entries == rounded):
        rule = "data-entries" if task.entries > need else "data-entries-short"
        yield Finding(rule, 0x1044, {"entries": task.entries, "needed": need})


def _rows(task: Task, soc: Soc) -> Iterator[Finding]:
    fit = task.lines_that_fit(soc)
    values = {"lines": task.height, "fit": fit, "data_bank": task.data_bank, "entries": task.need(soc)}
    int4_batch = task.precision == Precision.INT4 and task.group_mode
    if int4_batch and task.channels >= _INT4_K and task.height > 4 * _INT4_ROWS:
        yield Finding("int4-overshoot", 0x1020, values)
    elif fit < task.height:
        yield Finding("rows-streamed" if task.kernels <= task.kind.group else "rows-over-bank", 0x1040, values)
    narrow_n = task.kernels <= _NARROW_N and not task.depthwise
    if task.precision == Precision.FP16 and narrow_n and task.weight_bank < _NARROW_BANKS:
        narrow = {"kernels": task.kernels, "lines": task.height, "weight_bank": task.weight_bank}
        if task.channels == _NARROW_K and task.height in _NARROW_ROWS and task.weight_bank == 1:
            yield Finding("narrow-n-hang", 0x1040, narrow)
        elif task.height >= _NARROW_ROWS.start:
            yield Finding("narrow-n", 0x1040, narrow)


def _kernels(task: Task, soc: Soc) -> Iterator[Finding]:
    one = -(-task.kernel_elements * task.kind.bits // 8)
    if task.kernel_bytes != one or task.weight_bytes != task.kernel_bytes * task.kernels:
        values = {"total": task.weight_bytes, "kernel": task.kernel_bytes, "kernels": task.kernels, "shape": one}
        yield Finding("weight-size", 0x1030, values)
    if task.depthwise:
        group = one * min(task.group, task.channels) // task.channels
        if task.kernels != 1:
            yield Finding("depthwise-kernels", 0x1038, {"kernels": task.kernels})
    else:
        group = one * min(task.group, task.kernels)
    values = {"group_bytes": group, "weight_bank": task.weight_bank}
    if group > (soc.cbuf_banks - 1) * soc.bank_bytes:
        yield Finding("k-limit", 0x1034, values)
    elif group > task.weight_bank * soc.bank_bytes:
        yield Finding("kernel-over-banks", 0x1040, values)
    elif task.kernel_width == task.kernel_height == 1 and task.channels > soc.max_k:
        yield Finding("k-unproven", 0x1024, {"channels": task.channels})
    if max(task.results, task.core_channels) > soc.max_n:
        yield Finding("n-limit", 0x3018, {"kernels": task.results, "channels": task.core_channels})


def _addressing(task: Task, soc: Soc) -> Iterator[Finding]:
    if task.channels * task.kind.bits % 128:
        yield Finding("channel-alignment", 0x1024, {"channels": task.channels, "bits": task.kind.bits})
    if task.image:
        if task.group_mode or not task.nonalign:
            yield Finding("image-flags", 0x100C, {"group_line_off": not task.group_mode, "nonalign": task.nonalign})
    elif task.group_mode and task.precision != Precision.INT4:
        if task.line_stride != 64 * task.width:
            yield Finding("group-line-stride", 0x107C, {"line_stride": task.line_stride, "width": task.width})
        line = 16 * task.width
        pitch = task.surf_stride + 4 * line
        if task.surfaces > 1 and (pitch % line or pitch < line * task.height):
            yield Finding("surface-stride", 0x1080, {"surface_pitch": pitch, "surface": line * task.height})
    if not task.group_mode and task.precision == Precision.INT4 and task.height > 1:
        yield Finding("int4-rows", 0x100C, {"lines": task.height})
    if task.group_stride != task.atoms * task.atom_stride:
        values = {"surface_add": task.group_stride, "atoms": task.atoms, "surf_stride": task.atom_stride}
        yield Finding("surface-add", 0x40C0, values)
    if not task.notches_equal:
        yield Finding("notch-halves", 0x4038)


def _unproven(task: Task, soc: Soc) -> Iterator[Finding]:
    padded = task.precision == Precision.FP16 and (task.pad_left or task.pad_top)
    if padded or task.dilation_x > 1 or task.dilation_y > 1:
        dilation = (task.dilation_x, task.dilation_y)
        yield Finding("padding", 0x1068, {"left": task.pad_left, "top": task.pad_top, "dilation": dilation})
    fp16 = task.precision == Precision.FP16
    stride, kernel = max(task.stride_x, task.stride_y), max(task.kernel_width, task.kernel_height)
    if fp16 and not task.depthwise and (stride > 1 or kernel > _FP16_KERNEL) and kernel > 1:
        yield Finding("fp16-window", 0x1014, {"stride": stride, "kernel": kernel})
    if set(task.modes) != {task.depthwise}:
        yield Finding("conv-mode", 0x400C, dict(zip(("cna", "core", "dpu"), task.modes)))
    if task.depthwise and (task.image or (fp16 and task.channels > task.group) or task.out_bytes * 8 > task.kind.bits):
        yield Finding("depthwise", 0x100C, {"channels": task.channels, "image": task.image})
    if task.image and not fp16 and not (task.precision == Precision.INT8 and task.image == 1):
        yield Finding("image", 0x100C, {"channels": task.image, "precision": task.precision})
    if task.conversion and not (task.image and task.conversion.plain):
        yield Finding("feature-conversion", 0x104C)
    if task.window_sums and task.ow_operand and task.precision != Precision.INT8:
        yield Finding("window-sums", 0x4054)
    rows = not task.group_mode and not task.image
    if rows and task.precision == task.out_precision == Precision.INT8 and task.kernel_elements < _REQUANT_K:
        yield Finding("requant-k", 0x1024, {"channels": task.channels})
    if task.data_reuse:
        yield Finding("data-reuse-used", 0x1040)


def _work(task: Task, soc: Soc) -> Iterator[Finding]:
    written = task.pixels * task.groups * task.group * task.out_bytes
    work = task.pixels * task.kernels * task.kernel_elements
    if task.pixels > MAX_PIXELS or written > MAX_OUTPUT or work > MAX_WORK:
        yield Finding("work-limit", 0x3014, {"pixels": task.pixels, "bytes": written, "multiply_adds": work})


_CHECKS: Final[tuple[Callable[[Task, Soc], Iterable[Finding]], ...]] = (
    *(_banks, _entries, _rows, _kernels, _addressing, _unproven, _work),
)
