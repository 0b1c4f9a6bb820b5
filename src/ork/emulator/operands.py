"""The operands that the stages take out of memory: whether DPU_RDMA delivers them, and fetching them.

Checks yield (rule, register, values), for whoever judges a convolution or a standalone operation.
"""

from __future__ import annotations

from collections.abc import Iterator

from ork.emulator import rdma
from ork.emulator.lut import Tables
from ork.emulator.memory import Domain
from ork.emulator.pipeline import Side
from ork.emulator.reader import ALU, ATOM, BN, BS, CPEND, EW, MUL, Reader, Sources
from ork.emulator.stages import FLOATS, Affine, Stages
from ork.npu.isa import OperandMode, Precision

Broken = tuple[str, int, dict[str, object]]


def hangs(stages: Stages, reader: Reader | None) -> Iterator[Broken]:
    """What keeps a stage waiting for ever."""
    for name, stage, register, use in (
        ("bs", stages.bs, 0x501C, reader.bs_use if reader else 0),
        ("bn", stages.bn, 0x5028, reader.bn_use if reader else 0),
    ):
        if wanted := _wanted(stage) & ~use:
            yield "operand-missing", register, {"stage": name, "wanted": wanted, "data_use": use}
    op = stages.operation
    if op is not None and op.from_memory:
        element = reader.element if reader else None
        if element is None:
            yield "operand-missing", 0x5034, {"stage": "ew"}
        elif element.size != op.size:
            yield "precision-mix", 0x5034, {"edata_size": op.size, "erdma_data_size": element.size}
    if stages.lookup is not None and stages.floating and reader is None and stages.out_precision == Precision.FP16:
        yield "lut-fp16-output", 0x4070, {"out": stages.out_precision}


def _wanted(stage: Affine | None) -> int:
    return 0 if stage is None else ALU * stage.alu_memory | MUL * stage.mul_memory


def doubts(stages: Stages, reader: Reader | None, pixels: int, atoms: int) -> Iterator[Broken]:
    """What nobody has shown, or what contradicts itself; `atoms` of a pixel are delivered together."""
    for register, what in stages.unproven:
        yield "stage-unproven", register, {"what": what}
    if reader is None:
        return
    for register, use in ((0x501C, reader.bs_use), (0x5028, reader.bn_use)):
        if use & ~ALU and use != 0:
            yield "operand-layout", register, {"data_use": use}
    element = reader.element
    if element is None or stages.operation is None or not stages.operation.from_memory:
        return
    if element.mode == OperandMode.PER_PIXEL and element.surf_stride and element.surf_notch:
        jump = ATOM * pixels + element.surf_notch
        if jump != atoms * element.surf_stride:
            values: dict[str, object] = {"surf_stride": element.surf_stride, "surf_notch": element.surf_notch}
            yield "operand-stride", 0x506C, values | {"atoms": atoms, "pixels": pixels}
    if element.mode == OperandMode.PER_CHANNEL and element.surf_stride not in {0, ATOM}:
        yield "operand-stride", 0x5040, {"surf_stride": element.surf_stride}


def fetch(
    domain: Domain, stages: Stages, reader: Reader | None, sources: Sources | None, channels: int, tables: Tables
) -> Side:
    """Everything the stages need beside the data, for all pixels and `channels` channels. Raises IommuFault."""
    if reader is None or sources is None:
        return Side(tables=tables)
    floating = stages.precision in FLOATS
    ew = None
    with rdma.at_register(BS):
        bs = rdma.vectors(domain, sources.bs, reader.bs_use, channels, floating=floating)
    with rdma.at_register(BN):
        use = reader.bn_use & ~CPEND if stages.bn is not None else 0
        bn = rdma.vectors(domain, sources.bn, use, channels, floating=floating)
    if stages.operation is not None and stages.operation.from_memory:
        with rdma.at_register(EW):
            ew = rdma.element(domain, reader, sources.ew, channels, floating=floating)
    return Side(bs, bn, ew, tables)
