"""A standalone operation of the DPU (op-enable mask 0x18): a cube in, through the stages, a cube out.

MRDMA takes the place of the core. The writer counts as after a convolution (see `dpu`), with groups of the channels
that SIZE_E + 1 atoms hold: one atom in every known program. With minmax the cube is reduced over its channels to one
value a pixel, which the non-aligned writer packs densely (executed: a softmax).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import dpu, fetch, operands, pipeline, rdma, reader, stages
from ork.emulator.checks import Finding, Verdict, verdict_of
from ork.emulator.fetch import ATOM, WINDOW
from ork.emulator.lut import Tables
from ork.emulator.memory import Domain
from ork.emulator.pipeline import Side
from ork.emulator.reader import MAIN, Reader, Sources
from ork.emulator.rules import RULES, Effect
from ork.emulator.stages import OUT_BYTES, Stages
from ork.emulator.task import name_of
from ork.npu.isa import Precision, decode
from ork.npu.soc import Soc

Array = npt.NDArray[Any]

OUTPUT: Final = 0x4020
MAX_ATOMS: Final = 1 << 22  # of one cube: 64 MiB, more than a program that works can have
_TO_MEMORY: Final = 2
_MAX, _MIN = 7, 5  # minmax_ctl: enable, type (1 max), nothing but the extreme
_CHUNK: Final = 1 << 20  # elements handled at once
# Registers without which a program means nothing sure; validated programs leave out the others of the output.
_WANTED: Final = (0x400C, 0x4010, 0x4020, 0x4030, 0x4034, 0x403C, 0x4070)
_KINDS: Final[Mapping[int, frozenset[int]]] = {  # precision -> those it may be written in
    Precision.INT8: frozenset({Precision.INT8, Precision.INT16, Precision.INT32}),
    Precision.INT16: frozenset({Precision.INT8, Precision.INT16, Precision.INT32}),
    Precision.FP16: frozenset({Precision.FP16, Precision.FP32}),
}
_PROVED: Final = {(0, 0), (1, 1), (2, 2), (2, 5)}  # (in, out) of validated and captured programs


@dataclass(frozen=True, slots=True)
class Elementwise:
    """One operation without its addresses. Strides and notches in bytes."""

    stages: Stages
    reader: Reader
    proc_precision: int  # of the DPU
    flying: bool
    width: int
    height: int
    channels: int
    real_channels: int
    wdma_channels: int
    wdma: tuple[int, int]
    atoms: int
    atom_stride: int
    group_stride: int
    notch: int
    notches_equal: bool
    minmax: int
    nonalign: bool
    surf_len: int
    pad_bits: int  # OFFSET_PEND: what a channel beyond the real ones counts as
    not_modelled: str
    missing: tuple[int, ...]

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def group(self) -> int:
        """Channels of a pixel that are written together."""
        return self.atoms * ATOM // OUT_BYTES[self.stages.out_precision]

    @property
    def groups(self) -> int:
        return -(-self.channels // self.group)


def read(dpu_registers: Mapping[int, int], reader_registers: Mapping[int, int]) -> Elementwise:
    """The operation that these register groups (offset -> value) describe. Never raises."""

    def field(offset: int, unwritten: int = 0) -> dict[str, int]:
        return decode(offset, dpu_registers.get(offset, unwritten))

    mode, form, size, notch = field(0x400C), field(0x4010), field(0x403C), field(0x4038)
    width, lines, wdma = field(0x4030)["width"], field(0x4034), field(0x405C)
    atoms = field(0x4050)["size_e_0"] + 1
    stage = stages.read(dpu_registers)
    source = reader.read(reader_registers)
    surface = ATOM * width * lines["height"]
    asked = {
        stage.not_modelled: stage.not_modelled,
        f"input precision {stage.precision} of DPU_RDMA": stage.precision not in _KINDS,
        f"output precision {stage.out_precision}": stage.out_precision not in OUT_BYTES,
        f"output mode {mode['output_mode']}": mode["output_mode"] != _TO_MEMORY,
        "transposed or surface-wise output": mode["tp_en"] or form["mc_surf_out"],
        source.not_modelled: source.not_modelled,
        f"minmax mode {lines['minmax_ctl']}": lines["minmax_ctl"] not in {0, _MAX, _MIN},
        "minmax without dense output": lines["minmax_ctl"] and not mode["nonalign"],
        "dense output without minmax": mode["nonalign"] and not lines["minmax_ctl"],
    }
    return Elementwise(
        stages=stage,
        reader=source,
        proc_precision=form["proc_precision"],
        flying=bool(mode["flying_mode"]),
        width=width,
        height=lines["height"],
        channels=size["channel"],
        real_channels=size["orig_channel"],
        wdma_channels=field(0x4058)["channel_wdma"] if 0x4058 in dpu_registers else size["channel"],
        wdma=(wdma["width_wdma"], wdma["height_wdma"]) if 0x405C in dpu_registers else (width, lines["height"]),
        atoms=atoms,
        atom_stride=field(0x4024)["dst_surf_stride"],
        group_stride=field(0x40C0)["surf_add"] if 0x40C0 in dpu_registers else surface * atoms,
        notch=ATOM * notch["notch_addr_0"],
        notches_equal=notch["notch_addr_0"] == notch["notch_addr_1"],
        minmax=lines["minmax_ctl"],
        nonalign=bool(mode["nonalign"]),
        surf_len=mode["surf_len"],
        pad_bits=field(0x4014)["offset_pend"],
        not_modelled=next((what for what, yes in asked.items() if yes), ""),
        missing=(*(offset for offset in _WANTED if offset not in dpu_registers), *source.missing),
    )


# --- checks ---


def judge(op: Elementwise, soc: Soc, strict: bool, *, chained: bool) -> Verdict:
    """What the checks say; `chained`: there are other programs in the submit."""
    return verdict_of(tuple(_findings(op, soc, chained)), strict)


def _findings(op: Elementwise, soc: Soc, chained: bool) -> Iterator[Finding]:
    if op.missing:
        yield Finding("never-written", None, {"registers": " ".join(map(name_of, op.missing))})
    hangs = list(_hangs(op, soc, chained))
    yield from hangs
    if hangs:
        return
    if op.not_modelled:
        yield Finding("not-modelled", None, {"asked": op.not_modelled})
        return
    atoms = op.pixels * max(op.groups * op.atoms, op.channels // 4)
    if atoms > MAX_ATOMS:
        yield Finding("work-limit", 0x4030, {"atoms": atoms})
    yield from (Finding(*x) for x in operands.doubts(op.stages, op.reader, op.pixels, 1))
    if (op.stages.precision, op.stages.out_precision) not in _PROVED:
        yield Finding("sdp-precisions", 0x4010, {"in": op.stages.precision, "out": op.stages.out_precision})
    per_atom = ATOM // np.dtype(rdma.MAIN_TYPES[op.reader.precision]).itemsize
    if op.channels % per_atom or op.channels % op.group:
        yield Finding("channel-alignment", 0x403C, {"channels": op.channels, "atom": per_atom, "group": op.group})
    if op.minmax:
        dense = -(-op.pixels * OUT_BYTES[op.stages.out_precision] // ATOM)
        if op.minmax == _MIN or op.stages.active:
            yield Finding("minmax-unproven", 0x4034, {"minmax_ctl": op.minmax})
        if op.surf_len != dense:
            yield Finding("surface-length", 0x400C, {"surf_len": op.surf_len, "atoms": dense})
        return
    if op.atoms > 1 and op.group_stride != op.atoms * op.atom_stride:
        values = {"surface_add": op.group_stride, "atoms": op.atoms, "surf_stride": op.atom_stride}
        yield Finding("surface-add", 0x40C0, values)
    if not op.notches_equal:
        yield Finding("notch-halves", 0x4038)


def _hangs(op: Elementwise, soc: Soc, chained: bool) -> Iterator[Finding]:
    """What keeps the pipe from draining, or from starting."""
    stage, source = op.stages, op.reader
    if not (op.flying and source.flying and source.main):
        values: dict[str, object] = {"dpu_flying": op.flying, "rdma_flying": source.flying, "mrdma": source.main}
        yield Finding("rdma-unconfigured", 0x5044, values)
        return
    precisions = {stage.precision, op.proc_precision, source.precision, source.proc_precision}
    allowed = _KINDS.get(stage.precision, frozenset({stage.out_precision}))
    if len(precisions) > 1 or stage.out_precision not in allowed:
        values = {"rdma_in": source.precision, "rdma": source.proc_precision, "in": stage.precision}
        yield Finding("precision-mix", 0x4010, values | {"dpu": op.proc_precision, "out": stage.out_precision})
    sizes = {(op.width, op.height, op.channels), (source.width, source.height, source.channels)}
    if len(sizes) > 1 or op.wdma_channels != op.channels:
        values = {"dpu": (op.width, op.height, op.channels), "wdma_channels": op.wdma_channels}
        yield Finding("output-size", 0x403C, values | {"rdma": (source.width, source.height, source.channels)})
    yield from (Finding(*x) for x in operands.hangs(stage, source))
    if op.width > soc.max_sdp_rows and not stage.floating:
        yield Finding("sdp-rows", 0x4030, {"width": op.width, "limit": soc.max_sdp_rows})
    two = stage.operation is not None and stage.operation.from_memory
    if chained and two and stage.bs is not None and stage.precision == Precision.INT16:
        yield Finding("sdp-int16-chain", 0x4040)


# --- running ---


def run(domain: Domain, op: Elementwise, sources: Sources, output: int, tables: Tables, *, poison: bool) -> list[str]:
    """Compute and write; the rules that values broke. Raises IommuFault before anything is written."""
    if op.minmax:
        at = output + np.arange(op.surf_len, dtype=np.int64) * ATOM & WINDOW
        if op.surf_len:
            fetch.mapped(domain, at)
        data = _data(domain, op, sources)
        atoms, broken = _extremes(op, data, tables)
        if poison:
            atoms[:] = dpu.POISON
        if op.surf_len:
            fetch.scatter(domain, at, atoms)
        return broken
    for first, last in _chunks(op):
        fetch.mapped(domain, dpu.output_addresses(op, output, first, last))
    # All is read before anything is written; a chain that works in place sees the same either way.
    data = _data(domain, op, sources)
    side = operands.fetch(domain, op.stages, op.reader, sources, op.channels, tables)
    broken = []
    for first, last in _chunks(op):
        columns = first * op.group, min(last * op.group, op.channels)
        results, rules = pipeline.run(_wide(data[:, slice(*columns)]), op.stages, side.part(op.pixels, *columns))
        broken += [rule for rule in rules if rule not in broken]
        spoiled = poison or any(RULES[rule].effect is Effect.POISON for rule in rules)
        atoms = dpu.atoms_of(results, op, last - first)
        if spoiled:
            atoms = np.full(atoms.shape, dpu.POISON, np.uint8)
        fetch.scatter(domain, dpu.output_addresses(op, output, first, last), atoms)
    return broken


def _data(domain: Domain, op: Elementwise, sources: Sources) -> Array:
    with rdma.at_register(MAIN):
        return rdma.main(domain, op.reader, sources.main)


def _chunks(op: Elementwise) -> Iterator[tuple[int, int]]:
    step = max(_CHUNK // (op.group * op.pixels), 1)
    return ((g, min(g + step, op.groups)) for g in range(0, op.groups, step))


def _wide(data: Array) -> Array:
    return data.astype(np.float32 if data.dtype.kind == "f" else np.int64)


def _extremes(op: Elementwise, data: Array, tables: Tables) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """The largest (smallest) of each pixel's channels, densely, in whole atoms."""
    data = data.copy()
    pad = np.array([op.pad_bits], "<u2").view(np.uint8)[: data.itemsize].view(data.dtype)[0]
    data[:, op.real_channels :] = pad
    results, broken = pipeline.run(_wide(data), op.stages, Side(tables=tables))
    reduce = np.max if op.minmax == _MAX else np.min
    raw = np.ascontiguousarray(reduce(results, axis=1)).view(np.uint8)
    atoms = np.zeros(op.surf_len * ATOM, np.uint8)
    count = min(raw.size, atoms.size)
    atoms[:count] = raw[:count]
    return atoms.reshape(-1, ATOM), broken
