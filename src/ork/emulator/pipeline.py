"""What the output stages do to the data: int64 that fits int32 after every stage, or float32.

Each rounding that nobody has proved on silicon is a function of its own here (`round_bs`, `round_bn`, `round_operand`,
`round_operation`, `divide`), so that only it changes when somebody does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import out_cvt
from ork.emulator.lut import Tables
from ork.emulator.reader import ALU, MUL
from ork.emulator.rounding import shift_round
from ork.emulator.stages import Affine, Operation, Stages
from ork.npu.isa import Alu

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

_INT32: Final = np.iinfo(np.int32)


@dataclass(frozen=True)
class Side:
    """What the stages need beside the data: operands out of memory ([channels], or [pixels, channels]), tables."""

    bs: dict[int, Array] = field(default_factory=dict)
    bn: dict[int, Array] = field(default_factory=dict)
    ew: Array | None = None
    tables: Tables | None = None

    def part(self, pixels: int, first: int, last: int) -> Side:
        """Of the first `pixels` and channels [first, last)."""
        ew = self.ew if self.ew is None else self.ew[: max(pixels, 1), first:last]
        bs, bn = ({bit: vector[first:last] for bit, vector in x.items()} for x in (self.bs, self.bn))
        return Side(bs, bn, ew, self.tables)


NOTHING: Final = Side()


# --- roundings that are unproven: x / 2**shift ---


def round_bs(x: Integers, shift: int) -> Integers:
    return shift_round(x, shift, half_up=False)


def round_bn(x: Integers, shift: int) -> Integers:
    return shift_round(x, shift, half_up=False)


def round_operation(x: Integers, shift: int) -> Integers:
    return shift_round(x, shift, half_up=False)


def divide(a: Integers, b: Integers) -> Integers:
    """a / b towards zero; by zero, the largest number of a's sign."""
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(safe) * np.sign(a) * np.sign(safe)
    return np.where(b == 0, np.where(a < 0, _INT32.min, _INT32.max), quotient)


# --- the stages ---


def run(x: Array, stages: Stages, side: Side = NOTHING) -> tuple[Array, list[str]]:
    """Data [pixels, channels], int64 or float32, in the output precision, and the rules that values broke."""
    broken: list[str] = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if stages.active and not stages.floating:
            x = _clipped(x, broken)
        if stages.bs is not None:
            x = _affine(x, stages.bs, side.bs, broken)
        if stages.bn is not None:
            x = _affine(x, stages.bn, side.bn, broken)
        if stages.operation is not None:
            x = _operation(x, stages.operation, side.ew, broken)
        if stages.lookup is not None:
            assert side.tables is not None
            x, unknown = side.tables.look_up(x, stages.lookup)
            if unknown:
                broken.append("lut-unloaded")
            if not stages.floating:
                x = _clipped(x, broken)
        if stages.relu:
            x = _relu(x, stages.relux)
    if stages.floating:
        return out_cvt.floats(x, stages), broken
    results, rule = out_cvt.narrow(x, stages.out, stages.out_precision)
    return results, [*broken, rule] if rule else broken


def _clipped(x: Integers, broken: list[str]) -> Integers:
    """Between stages integers have 32 bits; that more saturates is unproven."""
    if x.size and (x.min() < _INT32.min or x.max() > _INT32.max):
        broken.append("stage-overflow")
    clipped: Integers = x.clip(_INT32.min, _INT32.max)
    return clipped


def _affine(x: Array, stage: Affine, memory: dict[int, Array], broken: list[str]) -> Array:
    floating = x.dtype.kind == "f"
    alu = memory[ALU] if stage.alu_memory else _word(stage.alu, floating)
    mul = memory[MUL] if stage.mul_memory else _half(stage.mul or 0, floating)
    steps = [(True, stage.mul is not None), (False, stage.algo is not None)]
    negative = x < 0
    plain = x
    for multiplies, active in steps if stage.mul_first else reversed(steps):
        if not active:
            continue
        if multiplies:
            negative = x < 0
            plain, x = x, x * mul
        else:
            plain, x = (_alu(y, alu, stage.algo or 0) for y in (plain, x))
    if stage.mul is not None:
        if not floating:
            rounding = round_bn if stage.mul_first else round_bs
            x = _shifted(x, stage.shift, stage.shift_negative, rounding)
        if stage.prelu:
            x = np.where(negative, x, plain)
    if not floating:
        x = _clipped(x, broken)
    return _relu(x, stage.relux) if stage.relu else x


def _shifted(x: Integers, shift: int, shift_negative: int, rounding: Any) -> Integers:
    if shift == shift_negative:
        same: Integers = rounding(x, shift)
        return same
    mixed: Integers = np.where(x < 0, rounding(x, shift_negative), rounding(x, shift))
    return mixed


def _alu(x: Array, operand: Any, algo: int) -> Array:
    """One operation of the ALUs; integers below 2**62, or float32."""
    result: Array
    if algo == Alu.MAX:
        result = np.maximum(x, operand)
    elif algo == Alu.MIN:
        result = np.minimum(x, operand)
    elif algo == Alu.ADD:
        result = x + operand
    elif algo == Alu.MINUS:
        result = x - operand
    elif algo == Alu.DIV:
        result = x / operand if x.dtype.kind == "f" else divide(x, np.broadcast_to(operand, x.shape))
    elif algo == Alu.ABS:
        result = np.abs(x)
    elif algo == Alu.NEG:
        result = -x
    elif x.dtype.kind != "f":
        result = x  # integers are their own floor and ceiling
    else:
        result = np.floor(x) if algo == Alu.FLOOR else np.ceil(x)
    return result


def _operation(x: Array, op: Operation, memory: Array | None, broken: list[str]) -> Array:
    floating = x.dtype.kind == "f"
    if op.unary:
        return _alu(x, None, op.algo) if floating else _clipped(_alu(x, None, op.algo), broken)
    operand = _registers(op, x.shape[1], floating) if memory is None else memory
    if op.converter is not None and not floating:
        operand = _clipped(out_cvt.converted(operand, op.converter), broken)
    elif op.converter is not None:
        how = op.converter
        before, after = (how.offset, 0) if how.add_first else (0, how.offset)
        scaled = (operand + np.float32(before)) * np.float32(how.scale)
        operand = np.ldexp(scaled, -how.shift) + np.float32(after)
    if not op.multiply:
        result = _alu(x, operand, op.algo)
    else:
        result = np.where(x < 0, x * operand, x) if op.prelu else x * operand
    if floating:
        return result
    return _clipped(_shifted(result, op.shift, op.shift_negative, round_operation), broken)


def _registers(op: Operation, channels: int, floating: bool) -> Array:
    words = np.array(op.registers, np.uint32)
    values = words.astype("<u2").view("<f2").astype(np.float32) if floating else words.view(np.int32).astype(np.int64)
    return values[np.arange(channels) % len(values)]


def _relu(x: Array, relux: int | None) -> Array:
    floating = x.dtype.kind == "f"
    zero = x.dtype.type(0)
    x = np.where(x <= 0, zero, x)
    if relux is None:
        return x
    top = _word(relux, floating)
    return np.where(x > top, top, x)


def _word(bits: int, floating: bool) -> Any:
    """A 32-bit operand of a register."""
    word = np.array(bits, np.uint32)
    return word.view(np.float32)[()] if floating else np.int64(word.view(np.int32))


def _half(bits: int, floating: bool) -> Any:
    """A 16-bit operand of a register."""
    half = np.array(bits, np.uint16)
    return np.float32(half.view(np.float16)) if floating else np.int64(half.view(np.int16))
