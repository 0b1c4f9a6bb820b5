"""The two register groups of every block, and the pointers that say which one is written and which one runs.

A program's writes go to the group of the write pointer; op-enable runs the group of the execute pointer and then moves
both, as far as ping-pong is on. So a program that leaves registers out inherits them from the program two steps
earlier that used the same block. Groups outlive programs, chains and submits; only a reset clears them. (Executed:
captured chains of delta programs come out right under this model and wrong under one with a single group.)
"""

from __future__ import annotations

from typing import Final

from ork.npu.isa import BLOCKS

POINTER: Final = 0x004  # S_POINTER's place in every block; its bits:
_POINTER, POINTER_PP, _EXECUTER_PP, _POINTER_CLEAR, _EXECUTER_CLEAR = 1 << 0, 1 << 1, 1 << 2, 1 << 4, 1 << 5
CLEARS: Final = _POINTER_CLEAR | _EXECUTER_CLEAR
PING_PONG: Final = 0xE  # ping-pong on, pointers untouched: what programs and the kernel write
_CORE_SHIFT: Final = 28  # the kernel adds the core's number to S_POINTER here; without effect on results

Registers = dict[int, int]


class BlockGroups:
    """One block: two groups of registers (offset -> value, only those ever written), write and execute pointer."""

    __slots__ = ("executer", "executer_pp", "groups", "pointer", "pointer_pp")

    def __init__(self) -> None:
        self.groups: tuple[Registers, Registers] = ({}, {})
        self.pointer = self.executer = 0
        self.pointer_pp = self.executer_pp = False

    def write(self, offset: int, value: int) -> None:
        if offset & 0xFFF == POINTER:
            self._point(value)
        else:
            self.groups[self.pointer][offset] = value

    def _point(self, value: int) -> None:
        if value & _POINTER_CLEAR:
            self.pointer = 0
        if value & _EXECUTER_CLEAR:
            self.executer = 0
        self.pointer_pp, self.executer_pp = bool(value & POINTER_PP), bool(value & _EXECUTER_PP)
        if not self.pointer_pp:
            self.pointer = value & _POINTER

    def ran(self) -> None:
        """The block was op-enabled: both pointers move on as far as ping-pong is on."""
        self.pointer ^= self.pointer_pp
        self.executer ^= self.executer_pp


class Groups:
    """The register groups of one core."""

    def __init__(self) -> None:
        self.blocks = {name: BlockGroups() for name in BLOCKS if name != "PC"}
        self._by_bit = [(int(BLOCKS[name].enable), block) for name, block in self.blocks.items()]

    def commit(self, core: int) -> None:
        """What the kernel writes before it starts a submit: ping-pong on for CNA and CORE (kernel)."""
        for name in ("CNA", "CORE"):
            self.blocks[name].write(POINTER, PING_PONG + (core << _CORE_SHIFT))

    def running(self, block: str) -> Registers:
        """The registers that the block runs with when it is op-enabled now."""
        groups = self.blocks[block]
        return groups.groups[groups.executer]

    def ran(self, enable: int) -> None:
        """The blocks of that op-enable mask have run."""
        for bit, block in self._by_bit:
            if enable & bit:
                block.ran()
