"""DPU_RDMA as plain numbers: what its registers say about the cube and the operands that it reads.

How those lie in memory is in `rdma`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ork.npu.isa import OperandMode, decode

ATOM: Final = 16
_WINDOW: Final = (1 << 32) - 1  # device addresses wrap at 32 bits
MAIN, BS, BN, EW = 0x5018, 0x5020, 0x502C, 0x5038  # registers of the addresses
ADDRESSES: Final = (MAIN, BS, BN, EW)
ALU, CPEND, MUL, SHIFT = 1, 2, 4, 8  # bits of data_use


@dataclass(frozen=True, slots=True)
class Element:
    """ERDMA: the operand of EW. Strides and notches in bytes."""

    mode: int  # OperandMode
    size: int  # OperandSize
    surf_stride: int
    line_notch: int
    surf_notch: int
    odd: bool  # surface or alignment modes that are not modelled


@dataclass(frozen=True, slots=True)
class Reader:
    """DPU_RDMA without its addresses. Notches in bytes."""

    precision: int
    proc_precision: int
    main: bool  # MRDMA reads
    flying: bool  # and feeds the DPU in place of the core
    width: int
    height: int
    channels: int
    line_notch: int
    surf_notch: int
    bs_use: int
    bn_use: int
    element: Element | None
    odd: bool  # unpooling, padding: not modelled
    missing: tuple[int, ...]

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def not_modelled(self) -> str:
        """What is asked for that the emulator cannot do, or ""."""
        element = self.element
        if self.odd or (element is not None and element.odd):
            return "unpooling, padding or another surface mode in DPU_RDMA"
        if element is not None and element.mode > OperandMode.PER_CHANNEL_BY_PIXEL:
            return f"operand mode {element.mode}"
        return "a shift operand out of memory" if (self.bs_use | self.bn_use) & SHIFT else ""


@dataclass(frozen=True, slots=True)
class Sources:
    """Device addresses, task base included, low four bits dropped."""

    main: int
    bs: int
    bn: int
    ew: int

    @classmethod
    def at(cls, registers: Mapping[int, int], base: int) -> Sources:
        return cls(*(base + registers.get(offset, 0) & _WINDOW & ~15 for offset in ADDRESSES))


_WANTED: Final = (0x500C, 0x5010, 0x5014, 0x5018, 0x5034, 0x5044)


def read(registers: Mapping[int, int]) -> Reader:
    """The reader that a register group of DPU_RDMA (offset -> value) describes. Never raises."""

    def field(offset: int) -> dict[str, int]:
        return decode(offset, registers.get(offset, 0))

    mode, erdma, dma = field(0x5044), field(0x5034), field(0x5048)
    element = None
    if not erdma["erdma_disable"]:
        element = Element(
            mode=erdma["erdma_data_mode"],
            size=erdma["erdma_data_size"],
            surf_stride=field(0x5040)["ew_surf_stride"],
            line_notch=ATOM * field(0x5010)["ew_line_notch_addr"],
            surf_notch=field(0x506C)["ew_surf_notch"],
            odd=bool(erdma["erdma_surf_mode"] or erdma["erdma_nonalign"]),
        )
    pads = field(0x5064)
    return Reader(
        precision=mode["in_precision"],
        proc_precision=mode["proc_precision"],
        main=not mode["mrdma_disable"],
        flying=bool(mode["flying_mode"]),
        width=field(0x500C)["width"],
        height=field(0x5010)["height"],
        channels=field(0x5014)["channel"],
        line_notch=ATOM * dma["line_notch_addr"],
        surf_notch=field(0x504C)["surf_notch_addr"],
        bs_use=field(0x501C)["brdma_data_use"],
        bn_use=field(0x5028)["nrdma_data_use"],
        element=element,
        odd=bool(dma["unpooling_en"] or dma["pooling_method"] or pads["pad_top"] or pads["pad_left"]),
        missing=tuple(offset for offset in _WANTED if offset not in registers),
    )
