"""Functions of one variable through the DPU's tables: SiLU, GELU, exp, rsqrt, or any other. Pure functions.

A `Curve` is a function sampled over [low, high] at 1025 points: the index x' = (x - middle) * step runs from -16384 to
16384, table LE holds the lower half, LO the upper one, and the chip interpolates between points 32 apart. Beyond the
ends the line goes on with the slope given. Points are int16: v = y * scale - 1, where the chip adds the 1 back, so that
the largest value may be 2**15.

The tables are one pair a core, outlive submits, and are lost in a reset. `load` fills them; it must be a submit of its
own without the ping-pong flag (measured), which its Program says. The programs that use them stop the register groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.errors import UsageError
from ork.npu import isa
from ork.npu.fields import Alu, Enable
from ork.npu.plan import Tile
from ork.npu.program import Program
from ork.npu.soc import RK3588, Soc
from ork.npu.vector import IDENTITY, Affine, Mantissa, field, matmul_program, matmul_registers, program_of, standalone

Array = npt.NDArray[Any]

POINTS: Final = 513  # of a table
SELECT: Final = 5  # points are 2**5 apart
REACH: Final = (POINTS - 1) << SELECT  # 16384
_FULL: Final = 1 << 15
FUSED: Final = isa.MATMUL | Enable.DPU_RDMA


@dataclass(frozen=True)
class Curve:
    """A function and the range that the tables cover. `slopes`: of the lines beyond `low` and `high`."""

    name: str
    function: Callable[[Array], Array]
    low: float
    high: float
    slopes: tuple[float, float] = (0.0, 0.0)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def step(self) -> float:
        """Index steps of one unit of x. fp16 programs multiply with it, so it is an fp16 number."""
        return float(np.float16(2 * REACH / (self.high - self.low)))

    @property
    def scale(self) -> float:
        """Table steps of one unit of y: a power of two, by which fp16 results are divided exactly."""
        most = float(np.abs(self._sampled()).max())
        if not 0 < most < math.inf:
            raise UsageError(f"the curve {self.name} is {most} somewhere: finite values that are not all 0 are needed")
        return 2.0 ** math.floor(math.log2(_FULL / most))

    def _sampled(self) -> Array:
        index = np.arange(-REACH, REACH + 1, 1 << SELECT)
        return np.asarray(self.function(index / self.step + self.middle), np.float64)

    def points(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
        """Tables LE and LO."""
        words = np.rint(self._sampled() * self.scale - 1).clip(-_FULL, _FULL - 1).astype(np.int16)
        return words[:POINTS], words[POINTS - 1 :]

    def value(self, x: Array) -> Array:
        """What an exact interpolation of the points gives: the reference of tests and probes."""
        index = (np.asarray(x, np.float64) - self.middle) * self.step
        le, lo = self.points()
        line = np.concatenate([le, lo[1:]]).astype(np.float64)
        y = np.interp(index, np.arange(-REACH, REACH + 1, 1 << SELECT), line)
        y += np.minimum(index + REACH, 0) * self.slopes[0] * self.scale / self.step
        y += np.maximum(index - REACH, 0) * self.slopes[1] * self.scale / self.step
        result: Array = (y + 1) / self.scale
        return result


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


SILU: Final = Curve("silu", _silu, -8.0, 8.0, (0.0, 1.0))
GELU: Final = Curve("gelu", _gelu, -8.0, 8.0, (0.0, 1.0))
EXP: Final = Curve("exp", np.exp, -10.0, 0.0)
RSQRT: Final = Curve("rsqrt", lambda x: 1 / np.sqrt(x), 0.25, 4.25)
CURVES: Final = {curve.name: curve for curve in (SILU, GELU, EXP, RSQRT)}


# --- programs ---


def load(curve: Curve) -> Program:
    """Fills both tables of a core; its operands `input` and `output` are 16 bytes of scratch, the same or not."""
    words = []
    for table, points in enumerate(curve.points()):
        words.append((0x4100, field("DPU.LUT_ACCESS_CFG", lut_access_type=1, lut_table_id=table)))
        words += [(0x4104, int(point) & 0xFFFFFFFF) for point in points]
    loads = tuple(isa.word(isa.target_of(offset), offset, value) for offset, value in words)
    return program_of("int16", 1, 8, standalone("int16", 1, 8), loads=loads)


def apply(
    curve: Curve, kind: str, M: int, C: int, a: Affine = IDENTITY, out: Affine = IDENTITY, soc: Soc = RK3588
) -> Program:
    """The loaded curve of a cube [M, C], in its own precision; fp16 takes no scales. Raises UsageError."""
    registers = standalone(kind, M, C, soc) | _look_up(curve)
    if kind != "fp16":
        registers |= _index(curve, a, registers[0x4010]) | _restored(curve, out)
    else:
        if (a, out) != (IDENTITY, IDENTITY):
            raise UsageError("scales and zero points of fp16: scale the numbers themselves")
        exponent = round(math.log2(curve.scale))
        if exponent < 0:
            raise UsageError(f"the curve {curve.name} reaches 2**15: too large for fp16 results")
        start = np.float32(-curve.middle * curve.step)
        registers |= {
            **_affine(int(start.view(np.uint32)), int(np.float16(curve.step).view(np.uint16)), 0),
            0x4080: field("DPU.OUT_CVT_OFFSET", out_cvt_offset=1),
            0x4088: field("DPU.OUT_CVT_SHIFT", minus_exp=exponent),
        }
    return program_of(kind, M, C, registers)


def fused(
    curve: Curve, tile: Tile, a_scale: float, out: Affine, soc: Soc = RK3588, *, unproven: bool = False
) -> Program:
    """An int8 matmul whose sums, `a_scale` real units each, go through the loaded curve to int8. Raises UsageError."""
    registers = matmul_registers(tile, soc, unproven=unproven) | _look_up(curve)
    registers |= _index(curve, Affine(a_scale), registers[0x4010]) | _restored(curve, out)
    rdma = {
        0x500C: field("DPU_RDMA.RDMA_DATA_CUBE_WIDTH", width=1),
        0x5010: field("DPU_RDMA.RDMA_DATA_CUBE_HEIGHT", height=tile.M),
        0x5014: field("DPU_RDMA.RDMA_DATA_CUBE_CHANNEL", channel=tile.N),
        **dict.fromkeys((0x5018, 0x501C, 0x5020, 0x5028, 0x502C, 0x5038, 0x5040, 0x5048, 0x504C, 0x5064, 0x506C), 0),
        0x5034: field("DPU_RDMA.RDMA_ERDMA_CFG", erdma_disable=1),
        0x5044: field("DPU_RDMA.RDMA_FEATURE_MODE_CFG", burst_len=15, mrdma_disable=1),
        0x5068: field("DPU_RDMA.RDMA_WEIGHT", e_weight=1, n_weight=1, b_weight=1, m_weight=1),
    }
    return matmul_program(tile, registers | rdma, FUSED)


def _look_up(curve: Curve) -> dict[int, int]:
    """What turns the tables on, and the register groups off."""
    clear = {"pointer_pp_clear": 1, "executer_pp_clear": 1}
    under, over = (_slope(slope * curve.scale / curve.step) for slope in curve.slopes)
    return {
        0x4004: field("DPU.S_POINTER", **clear),
        0x5004: field("DPU_RDMA.RDMA_S_POINTER", **clear),
        0x4070: field("DPU.EW_CFG", ew_relu_bypass=1, ew_op_cvt_bypass=1, ew_op_bypass=1),
        0x4108: field("DPU.LUT_CFG", lut_hybrid_priority=1, lut_oflow_priority=1, lut_lo_le_mux=2),
        0x410C: field("DPU.LUT_INFO", lut_lo_index_select=SELECT, lut_le_index_select=SELECT),
        0x4110: field("DPU.LUT_LE_START", lut_le_start=-REACH),
        0x411C: field("DPU.LUT_LO_END", lut_lo_end=REACH),
        0x4120: field("DPU.LUT_LE_SLOPE_SCALE", lut_le_slope_uflow_scale=under.value),
        0x4124: field("DPU.LUT_LE_SLOPE_SHIFT", lut_le_slope_uflow_shift=under.shift),
        0x4128: field("DPU.LUT_LO_SLOPE_SCALE", lut_lo_slope_oflow_scale=over.value),
        0x412C: field("DPU.LUT_LO_SLOPE_SHIFT", lut_lo_slope_oflow_shift=over.shift),
    }


def _slope(slope: float) -> Mantissa:
    made = Mantissa.of(abs(slope), most_shift=31) if slope else Mantissa(0, 0)
    return replace(made, value=(made.value if slope >= 0 else -made.value) & 0xFFFF)


def _index(curve: Curve, a: Affine, data_format: int) -> dict[int, int]:
    """BN: the index of an integer, (x * mul + alu) >> shift."""
    mul = Mantissa.of(a.scale * curve.step, most_shift=31)
    alu = round(-a.zero * mul.value - math.ldexp(curve.middle * curve.step, mul.shift))
    if not -(1 << 31) <= alu < 1 << 31:
        raise UsageError(f"a scale of {a.scale:g} for the curve {curve.name}: too fine for its range")
    negative = isa.decode("DPU.DATA_FORMAT", data_format) | {"bn_mul_shift_value_neg": mul.shift}
    return _affine(alu & 0xFFFFFFFF, mul.value, mul.shift) | {0x4010: isa.encode("DPU.DATA_FORMAT", **negative)}


def _affine(alu: int, mul: int, shift: int) -> dict[int, int]:
    return {
        0x4060: field("DPU.BN_CFG", bn_alu_algo=Alu.ADD, bn_relu_bypass=1),
        0x4064: field("DPU.BN_ALU_CFG", bn_alu_operand=alu),
        0x4068: field("DPU.BN_MUL_CFG", bn_mul_operand=mul, bn_mul_shift_value=shift),
    }


def _restored(curve: Curve, out: Affine) -> dict[int, int]:
    """OUT_CVT: table steps in steps of the output. (The 1 that the points lack is below half a step, and left out.)"""
    m = Mantissa.of(1 / (curve.scale * out.scale) if out.scale > 0 else math.nan)
    return {
        0x4080: field("DPU.OUT_CVT_OFFSET", out_cvt_offset=out.zero),
        0x4084: field("DPU.OUT_CVT_SCALE", out_cvt_scale=m.value),
        0x4088: field("DPU.OUT_CVT_SHIFT", out_cvt_shift=m.shift),
    }
