"""The output stages as plain numbers: what the DPU's registers ask of BS, BN, EW, the tables and OUT_CVT.

The data goes BS -> BN -> EW operation -> tables -> EW ReLU -> OUT_CVT (executed). A stage whose CFG register was never
written is bypassed (validated programs rely on it). Operands are kept as the bits of the registers: they are integers,
or floats, by the precision of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ork.npu.isa import Alu, OperandSize, Precision, decode

BYPASSED: Final = 0x53  # BS_CFG, BN_CFG: the stage and each of its units bypassed
EW_BYPASSED: Final = 0x383
FLOATS: Final = frozenset({Precision.FP16, Precision.FP32})
OUT_BYTES: Final[Mapping[int, int]] = {
    Precision.INT8: 1,
    Precision.INT16: 2,
    Precision.FP16: 2,
    Precision.INT32: 4,
    Precision.FP32: 4,
}
# what the stages read beside the registers that say whether they are active
READS: Final = (
    *(0x4044, 0x4048, 0x404C, 0x4064, 0x4068, 0x406C, 0x4074, 0x4078, 0x407C, 0x4080, 0x4084, 0x4088),
    *range(0x4090, 0x40B0, 4),
    *range(0x4108, 0x4130, 4),
)
_PROVED_ALU: Final = (Alu.ADD, Alu.MINUS)  # of BS and BN; the others are reserved in the manual


@dataclass(frozen=True, slots=True)
class Affine:
    """BS or BN: an addition and a multiplication, then ReLU. A part that is bypassed is None."""

    mul_first: bool  # BN multiplies first, BS adds first (executed: exp needs it)
    algo: int | None
    alu: int  # bits of the operand
    alu_memory: bool
    mul: int | None  # bits of the operand
    mul_memory: bool
    prelu: bool  # negative values alone are multiplied
    shift: int
    shift_negative: int  # instead of `shift` for negative values (manual)
    relu: bool
    relux: int | None  # bits of the upper clamp


@dataclass(frozen=True, slots=True)
class Converter:
    """scale, shift and offset of integers: (x * scale >> shift) + offset, or (x + offset) * scale >> shift."""

    scale: int
    shift: int
    offset: int
    half_up: bool
    add_first: bool

    @property
    def identity(self) -> bool:
        return (self.scale, self.shift, self.offset) == (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Operation:
    """EW: the data and an operand."""

    multiply: bool
    algo: int
    from_memory: bool  # else of the registers, for channels modulo 8
    registers: tuple[int, ...]
    size: int  # OperandSize
    prelu: bool
    converter: Converter | None
    shift: int
    shift_negative: int

    @property
    def unary(self) -> bool:
        return not self.multiply and self.algo in {Alu.ABS, Alu.NEG, Alu.FLOOR, Alu.CEIL}


@dataclass(frozen=True, slots=True)
class Table:
    """One of the two tables: 513 points from `start` on, 2**select apart; beyond the ends a slope of its own."""

    start: int
    end: int
    select: int
    under: tuple[int, int]  # scale, shift
    over: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lookup:
    """LUT_CFG: which of the tables answers where both or neither hold a value (False: LE, True: LO)."""

    le: Table
    lo: Table
    hybrid_lo: bool
    over_lo: bool
    under_lo: bool


@dataclass(frozen=True, slots=True)
class Stages:
    """Everything between the sums (or the cube that MRDMA reads) and the writer."""

    precision: int  # of the data
    out_precision: int
    bs: Affine | None
    bn: Affine | None
    operation: Operation | None
    lookup: Lookup | None
    relu: bool
    relux: int | None
    out: Converter
    minus_exp: int
    reads: tuple[int, ...]  # registers that the active stages depend on
    not_modelled: str
    unproven: tuple[tuple[int, str], ...]  # (register, what about it nobody has shown)

    @property
    def floating(self) -> bool:
        return self.precision in FLOATS

    @property
    def active(self) -> bool:
        """Whether anything stands between the data and OUT_CVT."""
        return bool(self.bs or self.bn or self.operation or self.lookup or self.relu)

    @property
    def from_memory(self) -> bool:
        """Whether operands are read by DPU_RDMA."""
        affine = any(s is not None and (s.alu_memory or s.mul_memory) for s in (self.bs, self.bn))
        return affine or (self.operation is not None and self.operation.from_memory)


def read(registers: Mapping[int, int]) -> Stages:
    """The stages that a register group of the DPU (offset -> value) asks for. Never raises."""

    def field(offset: int, unwritten: int = 0) -> dict[str, int]:
        return decode(offset, registers.get(offset, unwritten))

    form, ew = field(0x4010), field(0x4070, EW_BYPASSED)
    bs = _affine(field, "bs", 0x4040, form["bs_mul_shift_value_neg"])
    bn = _affine(field, "bn", 0x4060, form["bn_mul_shift_value_neg"])
    operation = _operation(field, ew, form["ew_truncate_neg"], registers)
    lookup = None if ew["ew_bypass"] or ew["ew_lut_bypass"] else _lookup(field)
    relu = not ew["ew_bypass"] and not ew["ew_relu_bypass"]
    shift = field(0x4088)
    out = Converter(
        scale=field(0x4084, 1)["out_cvt_scale"],
        shift=shift["out_cvt_shift"],
        offset=field(0x4080)["out_cvt_offset"],
        half_up=bool(shift["cvt_round"]),
        add_first=bool(shift["cvt_type"]),
    )
    stages = Stages(
        precision=form["in_precision"],
        out_precision=form["out_precision"],
        bs=bs,
        bn=bn,
        operation=operation,
        lookup=lookup,
        relu=relu,
        relux=field(0x407C)["ew_relux_cmp_dat"] if relu and ew["ew_relux_en"] else None,
        out=out,
        minus_exp=shift["minus_exp"],
        reads=READS if bs or bn or operation or lookup or relu else (),
        not_modelled="",
        unproven=(),
    )
    return _with_doubts(stages, ew, field(0x4108), registers)


def _affine(field: Any, stage: str, cfg: int, shift_negative: int) -> Affine | None:
    at = {
        name.removeprefix(f"{stage}_"): value
        for offset, unwritten in ((cfg, BYPASSED), (cfg + 4, 0), (cfg + 8, 0), (cfg + 12, 0))
        for name, value in field(offset, unwritten).items()
    }
    if at["bypass"] or (at["alu_bypass"] and at["mul_bypass"] and at["relu_bypass"]):
        return None
    relu = not at["relu_bypass"]
    return Affine(
        mul_first=stage == "bn",
        algo=None if at["alu_bypass"] else at["alu_algo"],
        alu=at["alu_operand"],
        alu_memory=bool(at["alu_src"]) and not at["alu_bypass"],
        mul=None if at["mul_bypass"] else at["mul_operand"],
        mul_memory=bool(at["mul_src"]) and not at["mul_bypass"],
        prelu=bool(at["mul_prelu"]),
        shift=at["mul_shift_value"],
        shift_negative=shift_negative,
        relu=relu,
        relux=at["relux_cmp_dat"] if relu and at["relux_en"] else None,
    )


def _operation(field: Any, ew: dict[str, int], shift_negative: int, registers: Mapping[int, int]) -> Operation | None:
    if ew["ew_bypass"] or ew["ew_op_bypass"]:
        return None
    scale = field(0x4078, 1)
    converter = Converter(
        scale=_signed16(scale["ew_op_cvt_scale"]),
        shift=scale["ew_op_cvt_shift"],
        offset=field(0x4074)["ew_op_cvt_offset"],
        half_up=bool(ew["ew_cvt_round"]),
        add_first=bool(ew["ew_cvt_type"]),
    )
    operation = Operation(
        multiply=bool(ew["ew_op_type"]),
        algo=ew["ew_alu_algo"],
        from_memory=bool(ew["ew_op_src"]) or ew["ew_data_mode"] == 2,
        registers=tuple(registers.get(offset, 0) for offset in range(0x4090, 0x40B0, 4)),
        size=ew["edata_size"],
        prelu=bool(ew["ew_mul_prelu"]),
        converter=None if ew["ew_op_cvt_bypass"] or converter.identity else converter,
        shift=scale["ew_truncate"],
        shift_negative=shift_negative,
    )
    if not operation.unary:
        return operation
    return Operation(False, operation.algo, False, (0,) * 8, operation.size, False, None, 0, 0)


def _signed16(value: int) -> int:
    return value - (value >> 15 << 16)


def _lookup(field: Any) -> Lookup:
    cfg, select = field(0x4108), field(0x410C)
    tables = []
    for name, first, slopes in (("le", 0x4110, 0x4120), ("lo", 0x4118, 0x4128)):
        scale, shift = field(slopes), field(slopes + 4)
        slope = [
            (_signed16(scale[f"lut_{name}_slope_{way}_scale"]), shift[f"lut_{name}_slope_{way}_shift"])
            for way in ("uflow", "oflow")
        ]
        start, end = field(first)[f"lut_{name}_start"], field(first + 4)[f"lut_{name}_end"]
        tables.append(Table(start, end, select[f"lut_{name}_index_select"], *slope))
    hybrid, over, under = (bool(cfg[f"lut_{when}_priority"]) for when in ("hybrid", "oflow", "uflow"))
    le, lo = tables
    return Lookup(le, lo, hybrid_lo=hybrid, over_lo=over, under_lo=under)


_BOTH_TABLES: Final = 2  # of LUT_CFG.lut_lo_le_mux, in every program that uses the tables


def _with_doubts(stages: Stages, ew: dict[str, int], lut: dict[str, int], registers: Mapping[int, int]) -> Stages:
    """The stages, and what of them is not modelled or unproven."""
    op, lookup = stages.operation, stages.lookup
    integer_out = stages.out_precision in {Precision.INT8, Precision.INT16}
    fp16_out = stages.out_precision == Precision.FP16
    asked = {
        "element-wise comparison (equal_en, binary_en)": op and (ew["ew_equal_en"] or ew["ew_binary_en"]),
        f"EW operation {ew['ew_alu_algo']}": op and not op.multiply and op.algo > Alu.CEIL,
        "4-bit operands": op and op.from_memory and op.size == OperandSize.BITS_4,
        "8-bit operands of floats": op and op.from_memory and stages.floating and op.size == OperandSize.BITS_8,
        "shifts out of memory": any(
            registers.get(cfg + 8, 0) & 2 and stage for cfg, stage in ((0x4040, stages.bs), (0x4060, stages.bn))
        ),
        "an expanded table, or another table road": lookup and (lut["lut_expand_en"] or lut["lut_road_sel"]),
        "table steps of 2**32 and more": lookup and max(lookup.le.select, lookup.lo.select) > 31,
        "scaling of fp16 outputs": fp16_out and (stages.out.scale != 1 or stages.out.shift),
        "an exponent in integer outputs": integer_out and stages.minus_exp,
        "shifts of 64 and more": op and max(op.shift, op.shift_negative) > 63,
    }
    doubts = {
        (0x4040, "BS operation"): stages.bs and stages.bs.algo not in (None, *_PROVED_ALU),
        (0x4060, "BN operation"): stages.bn and stages.bn.algo not in (None, *_PROVED_ALU),
        (0x4040, "PReLU"): stages.bs and stages.bs.prelu,
        (0x4060, "PReLU"): stages.bn and stages.bn.prelu,
        (0x4070, "PReLU"): op and op.prelu,
        (0x4070, "operation of its own operand"): op and op.unary,
        (0x4070, "operand of EW_OP_VALUE registers"): op and not op.from_memory and not op.unary,
        (0x4070, "division of integers"): op and not op.multiply and op.algo == Alu.DIV and not stages.floating,
        (0x4078, "conversion of a float operand"): op and op.converter and stages.floating,
        (0x4078, "shift after the EW operation"): op and (op.shift or op.shift_negative),
        (0x5028, "BN operand out of memory"): stages.bn and (stages.bn.alu_memory or stages.bn.mul_memory),
        (0x4108, "choice of tables"): lookup and lut["lut_lo_le_mux"] != _BOTH_TABLES,
        (0x4088, "addition before scaling in OUT_CVT"): integer_out and stages.out.add_first,
    }
    changed = {name: getattr(stages, name) for name in Stages.__slots__}
    changed["not_modelled"] = next((what for what, yes in asked.items() if yes), "")
    changed["unproven"] = tuple(key for key, yes in doubts.items() if yes)
    return Stages(**changed)
