"""What a driver needs to know of a register program: its words, where addresses belong, what it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ork.npu import isa, uabi


@dataclass(frozen=True)
class Operand:
    """A buffer of a program: the indices of all words that hold its address, and how many bytes from there are used."""

    positions: tuple[int, ...]
    nbytes: int
    written: bool = False


@dataclass(frozen=True)
class Program:
    """Words of a program (body, then trailer; read-only) without addresses.

    `kind` is the precision it runs in, a name of `plan.KINDS` or "int16". Of the operand `output` the last
    `out_element` bytes are the last that the chip writes.
    """

    words: isa.Words
    body: int
    operands: Mapping[str, Operand]
    kind: str
    out_element: int
    enable: int = isa.MATMUL
    interrupt: int = uabi.INT_DPU
    ping_pong: bool = True  # False: the submit must go without the flag, as one that loads tables

    @property
    def nbytes(self) -> int:
        return 8 * len(self.words)
