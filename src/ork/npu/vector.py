"""Element-wise programs of the DPU alone, and int8 matmuls whose results are requantised: pure functions.

A tensor of M rows and C channels is a cube: [C / c][M][c] with c the channels of 16 bytes (16 in int8, 8 otherwise).
Registers are written in the order of the vendor's standalone programs. Integers are affine, real = (q - zero) * scale;
every program rounds once, half to even, where the results leave the chip, so that they equal the formulas below.

    add   sat(round((A * fa + B * fb) * m / 2**s) + zero)   A = a - zero_a, fa and fb int16, m / 2**s a `Mantissa`
    mul   sat(round(A * B * m / 2**s) + zero)

fp16 is computed in fp32 and rounded once. An int16 operation of two inputs with zero points hangs inside of a chain
(measured): submit it alone. What follows a matmul as a submit of its own should be fp16 or int16 (int8 hung, measured).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.errors import UsageError
from ork.npu import isa, matmul
from ork.npu.fields import Alu, Enable, OperandMode, OperandSize, Precision
from ork.npu.plan import Form, Tile
from ork.npu.program import Operand, Program
from ork.npu.soc import RK3588, Soc

Array = npt.NDArray[Any]

DTYPES: Final[Mapping[str, type[Any]]] = {"int8": np.int8, "int16": np.int16, "fp16": np.float16}
PRECISIONS: Final = {"int8": Precision.INT8, "int16": Precision.INT16, "fp16": Precision.FP16}
STANDALONE: Final = Enable.DPU | Enable.DPU_RDMA
INPUT, OTHER, OUTPUT = 0x5018, 0x5038, 0x4020  # registers of the addresses
_ROLES: Final = {"input": INPUT, "other": OTHER, "output": OUTPUT}
_ORDER: Final = (
    *(0x4004, 0x5004, 0x400C, 0x4010, 0x4014, 0x4020, 0x4024, 0x4030, 0x4034, 0x4038, 0x403C, 0x4040, 0x4044, 0x4048),
    *(0x404C, 0x4050, 0x4054, 0x4058, 0x405C, 0x4060, 0x4064, 0x4068, 0x406C, 0x4070, 0x4074, 0x4078, 0x407C, 0x4080),
    *(0x4084, 0x4088, *range(0x4090, 0x40B0, 4), 0x40C0, 0x40C4, *range(0x4100, 0x4130, 4)),
    *(0x500C, 0x5010, 0x5014, 0x5018, 0x501C, 0x5020, 0x5028, 0x502C, 0x5034, 0x5038, 0x5040, 0x5044, 0x5048, 0x504C),
    *(0x5064, 0x5068, 0x506C),
)
_BITS: Final = 15  # of a mantissa


@dataclass(frozen=True)
class Affine:
    """Real numbers as integers: real = (q - zero) * scale."""

    scale: float = 1.0
    zero: int = 0


IDENTITY: Final = Affine()


@dataclass(frozen=True)
class Mantissa:
    """A positive factor as the chip multiplies: value / 2**shift, value of 15 bits."""

    value: int
    shift: int

    @classmethod
    def of(cls, factor: float, most_shift: int = 62) -> Mantissa:
        """The nearest one. Raises UsageError for a factor that no value and shift express."""
        if not (math.isfinite(factor) and factor > 0):
            raise UsageError(f"a factor of {factor} between scales: scales must be positive numbers")
        fraction, exponent = math.frexp(factor)  # 0.5 <= fraction < 1
        value, shift = round(math.ldexp(fraction, _BITS)), _BITS - exponent
        if value == 1 << _BITS:
            value, shift = value >> 1, shift - 1
        while shift > most_shift or (shift > 0 and value % 2 == 0):
            value, shift = value >> 1, shift - 1
        if shift < 0 or not value:
            raise UsageError(f"a factor of {factor:g} between scales: must be from 2**-{most_shift} to 2**{_BITS}")
        return cls(value, shift)


def field(name: str, **fields: int) -> int:
    """`isa.encode` with every field that is not named at 0 (which fields stored minus one refuse)."""
    return isa.encode(name, **{f.name: fields.pop(f.name, 0) for f in isa.register(name).fields}, **fields)


BYPASSED: Final = MappingProxyType(
    {
        0x4040: field("DPU.BS_CFG", bs_relu_bypass=1, bs_mul_bypass=1, bs_alu_bypass=1, bs_bypass=1),
        0x4060: field("DPU.BN_CFG", bn_relu_bypass=1, bn_mul_bypass=1, bn_alu_bypass=1, bn_bypass=1),
    }
)


def cube(rows: Array) -> npt.NDArray[np.uint8]:
    """Rows [M, C] as the chip reads them, u8[M * C * itemsize]; C fills whole atoms of 16 bytes."""
    atoms = np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], -1, 16)
    return np.ascontiguousarray(atoms.transpose(1, 0, 2)).reshape(-1)


def rows(raw: npt.NDArray[np.uint8], M: int, kind: str) -> Array:
    """Rows [M, C] out of a cube."""
    atoms = np.ascontiguousarray(raw.reshape(-1, M, 16).transpose(1, 0, 2))
    return atoms.reshape(M, -1).view(DTYPES[kind])


def check(kind: str, M: int, C: int, soc: Soc) -> int:
    """Bytes of the cube. Raises UsageError for a kind or size that standalone programs cannot have."""
    if kind not in DTYPES:
        raise UsageError(f"element-wise {kind!r}: use one of {', '.join(DTYPES)}")
    per_atom = soc.atom_bytes // np.dtype(DTYPES[kind]).itemsize
    if not 1 <= M <= soc.max_sdp_rows or per_atom > C or C % per_atom or soc.max_n < C:
        raise UsageError(
            f"element-wise {kind} of {M} rows and {C} channels: at most {soc.max_sdp_rows} rows, "
            f"channels a multiple of {per_atom} up to {soc.max_n}"
        )
    return M * C * np.dtype(DTYPES[kind]).itemsize


def standalone(kind: str, M: int, C: int, soc: Soc = RK3588) -> dict[int, int]:
    """Registers, without addresses, that copy a cube: no second operand, every stage bypassed."""
    check(kind, M, C, soc)
    precision, surface = PRECISIONS[kind], M * soc.atom_bytes
    turns = {"pointer_pp_mode": 1, "executer_pp_en": 1, "pointer_pp_en": 1}
    return {
        0x4004: field("DPU.S_POINTER", **turns),
        0x5004: field("DPU_RDMA.RDMA_S_POINTER", **turns),
        0x400C: field("DPU.FEATURE_MODE_CFG", burst_len=15, output_mode=2, flying_mode=1),
        0x4010: field("DPU.DATA_FORMAT", out_precision=precision, in_precision=precision, proc_precision=precision),
        0x4024: field("DPU.DST_SURF_STRIDE", dst_surf_stride=surface),
        0x4030: field("DPU.DATA_CUBE_WIDTH", width=M),
        0x403C: field("DPU.DATA_CUBE_CHANNEL", orig_channel=C, channel=C),
        **BYPASSED,
        0x4050: field("DPU.BS_OW_CFG", od_bypass=1),
        0x4058: field("DPU.WDMA_SIZE_0", channel_wdma=C),
        0x405C: field("DPU.WDMA_SIZE_1", height_wdma=1, width_wdma=M),
        0x4070: field("DPU.EW_CFG", ew_relu_bypass=1, ew_op_cvt_bypass=1, ew_lut_bypass=1, ew_op_bypass=1, ew_bypass=1),
        0x4078: field("DPU.EW_CVT_SCALE_VALUE", ew_op_cvt_scale=1),
        0x4084: field("DPU.OUT_CVT_SCALE", fp32tofp16_en=int(kind == "fp16"), out_cvt_scale=1),
        0x40C0: field("DPU.SURFACE_ADD", surf_add=surface),
        0x500C: field("DPU_RDMA.RDMA_DATA_CUBE_WIDTH", width=M),
        0x5014: field("DPU_RDMA.RDMA_DATA_CUBE_CHANNEL", channel=C),
        0x5034: field("DPU_RDMA.RDMA_ERDMA_CFG", erdma_disable=1),
        0x5044: field(
            "DPU_RDMA.RDMA_FEATURE_MODE_CFG",
            in_precision=precision,
            proc_precision=precision,
            burst_len=15,
            mrdma_fp16tofp32_en=int(kind == "fp16"),
            flying_mode=1,
        ),
        0x5068: field("DPU_RDMA.RDMA_WEIGHT", e_weight=1, n_weight=1, b_weight=1, m_weight=1),
    }


def _two(kind: str, M: int, C: int, soc: Soc, operation: Mapping[str, int], converts: bool) -> dict[int, int]:
    """Registers of an operation on two cubes."""
    size = OperandSize.BITS_8 if kind == "int8" else OperandSize.BITS_16
    registers = standalone(kind, M, C, soc)
    registers[0x4070] = field(
        "DPU.EW_CFG",
        ew_cvt_type=int(converts),
        ew_data_mode=OperandMode.PER_PIXEL,
        edata_size=size,
        ew_relu_bypass=1,
        ew_op_cvt_bypass=int(not converts),
        ew_lut_bypass=1,
        ew_op_src=1,
        **operation,
    )
    registers[0x5034] = field("DPU_RDMA.RDMA_ERDMA_CFG", erdma_data_mode=OperandMode.PER_PIXEL, erdma_data_size=size)
    registers[0x5040] = field("DPU_RDMA.RDMA_EW_SURF_STRIDE", ew_surf_stride=M * soc.atom_bytes)
    return registers


def add(
    kind: str, M: int, C: int, a: Affine = IDENTITY, b: Affine = IDENTITY, out: Affine = IDENTITY, soc: Soc = RK3588
) -> Program:
    """a + b of cubes [M, C] in one precision. fp16 takes no scales. Raises UsageError."""
    registers = _two(kind, M, C, soc, {"ew_alu_algo": Alu.ADD}, converts=kind != "fp16")
    if kind == "fp16":
        _plain(a, b, out)
    else:
        fa, fb, m = add_factors(kind, a, b, out)
        registers |= _biased(a, fa) | _converted(b, fb) | written(m, out)
    return program_of(kind, M, C, registers)


def add_factors(kind: str, a: Affine, b: Affine, out: Affine) -> tuple[int, int, Mantissa]:
    """What the inputs are multiplied with, and their sum: two terms of an int16 sum need one bit more."""
    unit = 1 << (14 if kind == "int8" else 13)
    largest = max(a.scale, b.scale)
    if not (math.isfinite(largest) and min(a.scale, b.scale) > 0):
        raise UsageError(f"scales {a.scale} and {b.scale}: must be positive numbers")
    return (
        round(a.scale / largest * unit),
        round(b.scale / largest * unit),
        Mantissa.of(largest / out.scale / unit if out.scale > 0 else math.nan),
    )


def mul(
    kind: str, M: int, C: int, a: Affine = IDENTITY, b: Affine = IDENTITY, out: Affine = IDENTITY, soc: Soc = RK3588
) -> Program:
    """a * b of cubes [M, C] in one precision. fp16 takes no scales. Raises UsageError."""
    registers = _two(kind, M, C, soc, {"ew_op_type": 1}, converts=kind != "fp16")
    if kind == "fp16":
        _plain(a, b, out)
    else:
        reach = -int(np.iinfo(DTYPES[kind]).min)
        if (reach + abs(a.zero)) * (reach + abs(b.zero)) >= 1 << 31:
            raise UsageError(f"zero points {a.zero} and {b.zero} of an {kind} product: it may not fit int32")
        registers |= _biased(a, None) | _converted(b, 1) | written(mul_factor(a, b, out), out)
    return program_of(kind, M, C, registers)


def mul_factor(a: Affine, b: Affine, out: Affine) -> Mantissa:
    return Mantissa.of(a.scale * b.scale / out.scale if out.scale > 0 else math.nan)


def _plain(*operands: Affine) -> None:
    if any(operand != IDENTITY for operand in operands):
        raise UsageError("scales and zero points of fp16: scale the numbers themselves")


def _biased(a: Affine, factor: int | None) -> dict[int, int]:
    """BS: (x - zero) * factor. Nothing to do: bypassed, which int16 operations in chains need."""
    if not a.zero and factor is None:
        return {}
    return {
        0x4040: field("DPU.BS_CFG", bs_alu_algo=Alu.ADD, bs_relu_bypass=1, bs_mul_bypass=int(factor is None)),
        0x4044: field("DPU.BS_ALU_CFG", bs_alu_operand=-a.zero & 0xFFFFFFFF),
        0x4048: field("DPU.BS_MUL_CFG", bs_mul_operand=factor or 0),
    }


def _converted(b: Affine, factor: int) -> dict[int, int]:
    """The operand's converter: (x - zero) * factor."""
    return {
        0x4074: field("DPU.EW_CVT_OFFSET_VALUE", ew_op_cvt_offset=-b.zero),
        0x4078: field("DPU.EW_CVT_SCALE_VALUE", ew_op_cvt_scale=factor),
    }


def written(m: Mantissa, out: Affine) -> dict[int, int]:
    """OUT_CVT: round(x * m) + zero."""
    return {
        0x4080: field("DPU.OUT_CVT_OFFSET", out_cvt_offset=out.zero),
        0x4084: field("DPU.OUT_CVT_SCALE", out_cvt_scale=m.value),
        0x4088: field("DPU.OUT_CVT_SHIFT", out_cvt_shift=m.shift),
    }


def program_of(kind: str, M: int, C: int, registers: Mapping[int, int], *, loads: tuple[int, ...] = ()) -> Program:
    """The program of standalone registers; `loads` are words for the tables, which then go without ping-pong."""
    if not registers.keys() <= set(_ORDER):
        raise AssertionError("a register has a value and no place in the order")
    words = isa.assemble([(offset, registers.get(offset, 0)) for offset in _ORDER], enable=STANDALONE)
    words = np.concatenate([words[:-4], np.array(loads, np.uint64), words[-4:]])
    nbytes = check(kind, M, C, RK3588)
    two = not registers[0x5034] & 1
    roles = {role: offset for role, offset in _ROLES.items() if two or role != "other"}
    return finished(words, {role: (offset, nbytes) for role, offset in roles.items()}, kind, ping_pong=not loads)


def finished(
    words: isa.Words, operands: Mapping[str, tuple[int, int]], kind: str, *, ping_pong: bool = True
) -> Program:
    """A Program of these words; `operands`: role -> (register, bytes)."""
    words.flags.writeable = False
    made = {
        role: Operand(tuple(map(int, isa.positions(words, offset))), nbytes, role == "output")
        for role, (offset, nbytes) in operands.items()
    }
    enable = isa.split(int(words[-1]))[1]
    element = np.dtype(DTYPES[kind]).itemsize
    return Program(words, len(words) - 4, MappingProxyType(made), kind, element, enable=enable, ping_pong=ping_pong)


# --- requantised matmuls ---

REQUANT_K: Final = 512  # below, int8 results were reported wrong or refused


def matmul_registers(tile: Tile, soc: Soc = RK3588, *, unproven: bool = False) -> dict[int, int]:
    """Registers, without addresses, of an int8 matmul in row form whose results are int8, scaled by 1.

    Raises UsageError for another kind or form, and for K below 512 unless `unproven`.
    """
    if tile.kind != "int8" or tile.form is not Form.ROW:
        raise UsageError(f"a requantised {tile.kind} matmul in {tile.form.value} form: int8 rows are known to work")
    if tile.K < REQUANT_K and not unproven:
        raise UsageError(f"a requantised int8 matmul with K={tile.K}: below {REQUANT_K} results were wrong on boards")
    words = matmul.program(tile, soc=soc).words[: matmul.REGCFG_AMOUNT]
    registers = {offset: value for _, value, offset in map(isa.split, words.tolist())}
    atoms = 32 // soc.atom_bytes  # of one pixel of a kernel group
    notch = tile.N // soc.atom_bytes - 1
    return registers | {
        0x4010: field("DPU.DATA_FORMAT"),
        0x4038: field("DPU.DATA_CUBE_NOTCH_ADDR", notch_addr_1=notch, notch_addr_0=notch),
        0x4050: field("DPU.BS_OW_CFG", size_e_2=atoms - 1, size_e_1=atoms - 1, size_e_0=atoms - 1),
        0x40C0: field("DPU.SURFACE_ADD", surf_add=atoms * soc.atom_bytes),
    }


def matmul_program(tile: Tile, registers: Mapping[int, int], enable: int = isa.MATMUL) -> Program:
    """The program of such registers: rows [M, K] and weights in, rows [M, N] of int8 out."""
    words = isa.assemble(registers, enable=enable)
    sizes = {"input": tile.M * tile.K, "weights": tile.K * tile.N, "output": tile.M * tile.N}
    return finished(words, {role: (matmul.ROLES[role], sizes[role]) for role in sizes}, "int8")


def requantised(tile: Tile, factor: float, zero: int = 0, soc: Soc = RK3588, *, unproven: bool = False) -> Program:
    """sat8(round(sums * factor) + zero), the factor as a `Mantissa`. Raises UsageError."""
    registers = matmul_registers(tile, soc, unproven=unproven)
    return matmul_program(tile, registers | written(Mantissa.of(factor), Affine(zero=zero)))
