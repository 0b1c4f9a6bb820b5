"""What a register is: its block, its fields, the names of their values, and the notation the tables use.

A field is written `name[hi:lo]` (or `name[bit]`) as in the datasheet, followed by marks in this order:

    -1      stored minus one: the value 8 is stored as 7
    *16     one step of the field is worth 16 (an address or a pitch in bytes whose low bits are not stored)
    ~       signed, two's complement
    ?       not in the manual, seen in the vendor's programs: may be left out, and is 0 then
    =Enum   the values have names
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, IntFlag


class Precision(IntEnum):
    """Element types, one numbering for all blocks; CNA knows no INT32 and FP32, DPU no TF32."""

    INT8 = 0
    INT16 = 1
    FP16 = 2
    BF16 = 3
    INT32 = 4
    FP32 = 5
    INT4 = 6
    TF32 = 7


class ConvMode(IntEnum):
    DIRECT = 0
    DEPTHWISE = 3


class Alu(IntEnum):
    """Operations of the output stage; BS and BN are known to do ADD and MINUS only."""

    MAX = 0
    MIN = 1
    ADD = 2
    DIV = 3
    MINUS = 4
    ABS = 5
    NEG = 6
    FLOOR = 7
    CEIL = 8


class OperandMode(IntEnum):
    """How the second operand of an element-wise operation is spread over the cube."""

    PER_CHANNEL = 0
    PER_PIXEL = 1
    PER_CHANNEL_BY_PIXEL = 2


class OperandSize(IntEnum):
    BITS_4 = 0
    BITS_8 = 1
    BITS_16 = 2
    BITS_32 = 3


class Pooling(IntEnum):
    AVERAGE = 0
    MAX = 1
    MIN = 2


class Enable(IntFlag):
    """Blocks that an op-enable word starts."""

    CNA = 1 << 0
    CORE = 1 << 2
    DPU = 1 << 3
    DPU_RDMA = 1 << 4
    PPU = 1 << 5
    PPU_RDMA = 1 << 6


MATMUL = Enable.CNA | Enable.CORE | Enable.DPU  # 0x0d, also every convolution


class Interrupt(IntFlag):
    """Bits of int_mask, int_clear and int_status; a pair belongs to the two register groups of one block."""

    CNA_FEATURE_0 = 1 << 0
    CNA_FEATURE_1 = 1 << 1
    CNA_WEIGHT_0 = 1 << 2
    CNA_WEIGHT_1 = 1 << 3
    CNA_CSC_0 = 1 << 4
    CNA_CSC_1 = 1 << 5
    CORE_0 = 1 << 6
    CORE_1 = 1 << 7
    DPU_0 = 1 << 8
    DPU_1 = 1 << 9
    PPU_0 = 1 << 10
    PPU_1 = 1 << 11
    DMA_READ_ERROR = 1 << 12
    DMA_WRITE_ERROR = 1 << 13


@dataclass(frozen=True)
class Block:
    """A block of the core: the target of words that write its registers, and where those start."""

    name: str
    target: int
    base: int
    enable: Enable


BLOCKS = {
    block.name: block
    for block in (
        Block("PC", 0x0101, 0x0000, Enable(0)),
        Block("CNA", 0x0201, 0x1000, Enable.CNA),
        Block("CORE", 0x0801, 0x3000, Enable.CORE),
        Block("DPU", 0x1001, 0x4000, Enable.DPU),
        Block("DPU_RDMA", 0x2001, 0x5000, Enable.DPU_RDMA),
        Block("PPU", 0x4001, 0x6000, Enable.PPU),
        Block("PPU_RDMA", 0x8001, 0x7000, Enable.PPU_RDMA),
    )
}


@dataclass(frozen=True)
class Field:
    """Bits [hi:lo] of a register. `low` and `high` bound its value, in the units of `encode` and `decode`."""

    name: str
    hi: int
    lo: int
    signed: bool = False
    minus_one: bool = False
    unit: int = 1
    optional: bool = False
    enum: type[IntEnum] | None = None

    @property
    def bits(self) -> int:
        return self.hi - self.lo + 1

    @property
    def mask(self) -> int:
        return ((1 << self.bits) - 1) << self.lo

    @property
    def low(self) -> int:
        return (int(self.minus_one) - (1 << self.bits - 1 if self.signed else 0)) * self.unit

    @property
    def high(self) -> int:
        return self.low + ((1 << self.bits) - 1) * self.unit


@dataclass(frozen=True)
class Register:
    block: str
    offset: int
    name: str
    fields: tuple[Field, ...]

    @property
    def full_name(self) -> str:
        return f"{self.block}.{self.name}"

    @property
    def mask(self) -> int:
        """Bits that belong to a field; the others are reserved."""
        return sum(field.mask for field in self.fields)


_ENUMS = {e.__name__: e for e in (Precision, ConvMode, Alu, OperandMode, OperandSize, Pooling)}
_FIELD = re.compile(
    r"(?P<name>\w+)\[(?P<hi>\d+)(:(?P<lo>\d+))?\]"
    r"(?P<minus_one>-1)?(\*(?P<unit>\d+))?(?P<signed>~)?(?P<optional>\?)?(=(?P<enum>\w+))?"
)


def parse_fields(text: str) -> tuple[Field, ...]:
    """The fields of "name[hi:lo] ...". Raises ValueError where the notation is not kept."""
    return tuple(map(_field, text.split()))


def _field(text: str) -> Field:
    m = _FIELD.fullmatch(text)
    if not m:
        raise ValueError(f"field {text!r} is not name[hi:lo] with marks")
    return Field(
        m["name"],
        int(m["hi"]),
        int(m["lo"] or m["hi"]),
        signed=bool(m["signed"]),
        minus_one=bool(m["minus_one"]),
        unit=int(m["unit"] or 1),
        optional=bool(m["optional"]),
        enum=_ENUMS[m["enum"]] if m["enum"] else None,
    )
