"""A program as the datasheet would print it, back to words, and the difference between two dumps.

Nothing here judges a program: foreign words, padding and registers that nobody documented are shown as they are.
Everything streams: a dump of any length is never held as text or objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from ork.npu import isa
from ork.npu.isa import ADDRESS_OFFSETS, ENABLE_TARGET, MARKER_TARGET, NO_TARGETS, REGISTERS, Enable, Words

_GLOBAL_ENABLE = 0xF008  # the layout of an op-enable word's value
_IS_ENABLE = (ENABLE_TARGET, 0x0008)


@dataclass(frozen=True)
class Line:
    """One word. `kind` is write, enable, marker, padding, or foreign: a target or register that is not known."""

    index: int
    kind: str
    target: int
    offset: int
    value: int
    name: str  # "BLOCK.REGISTER", or what the word is
    fields: dict[str, int] = field(default_factory=dict)

    @property
    def word(self) -> int:
        """The word again: built from the fields where the register is known."""
        value = self.value
        if self.kind == "write":
            value = isa.encode(self.offset, **self.fields)
        elif self.kind == "enable":
            value = isa.encode(_GLOBAL_ENABLE, **self.fields)
        return isa.word(self.target, self.offset, value)


def lines(words: Words | Iterable[int]) -> Iterator[Line]:
    """A line for every word, one at a time. Never raises on words that mean nothing."""
    return (_line(i, *isa.split(int(w))) for i, w in enumerate(words))


def disassemble(words: Words | Iterable[int]) -> list[Line]:
    return list(lines(words))


def _line(index: int, target: int, value: int, offset: int) -> Line:
    known = REGISTERS.get(offset)
    if (target, offset) == _IS_ENABLE:
        return Line(index, "enable", target, offset, value, "OPERATION_ENABLE", isa.decode(_GLOBAL_ENABLE, value))
    if target == MARKER_TARGET and not value and not offset:
        return Line(index, "marker", target, offset, value, "marker")
    if target in NO_TARGETS:
        return Line(index, "padding", target, offset, value, "no operation")
    if known and known.block != "GLOBAL" and isa.target_of(offset) == target:
        return Line(index, "write", target, offset, value, known.full_name, isa.decode(offset, value))
    return Line(index, "foreign", target, offset, value, f"target {target:#06x}, no known register")


def reassemble(listed: Iterable[Line]) -> Words:
    """The words of the lines, from their fields: `reassemble(disassemble(words))` equals `words`."""
    return np.array([line.word for line in listed], dtype=np.uint64)


# ----------------------------------------------------------------------------------------------------- text


def listing(listed: Iterable[Line]) -> Iterator[str]:
    """Rows of text: index, offset, register, value, fields; a heading a program; a run of padding is one row."""
    program, fresh, padding = 0, True, 0
    start = 0
    for line in listed:
        if line.kind == "padding":
            start = start if padding else line.index
            padding += 1
            continue
        if padding:
            yield _padding(start, padding)
            padding = 0
        if fresh:
            yield f"program {program}"
        yield f"{line.index:6}  {line.offset:04x}  {line.name:<32}  {line.value:08x}  {_fields(line)}".rstrip()
        fresh = line.kind == "enable"
        program += fresh
    if padding:
        yield _padding(start, padding)


def text(listed: Iterable[Line]) -> str:
    return "\n".join(listing(listed))


def _padding(start: int, count: int) -> str:
    return f"{start:6}        no operation" + (f" x {count}" if count > 1 else "")


def _fields(line: Line) -> str:
    """The fields that are not zero, values by name where they have one; of a register with one field, that field."""
    if line.kind == "enable":
        return "starts " + (" ".join(e.name for e in Enable if e.name and line.value & e) or "nothing")
    if line.kind != "write":
        return ""
    shown = [_field(line.offset, name, v) for name, v in line.fields.items() if v or "precision" in name]
    return " ".join(shown or [_field(line.offset, name, v) for name, v in line.fields.items() if len(line.fields) == 1])


def _field(offset: int, name: str, value: int) -> str:
    return f"{name}={_value(offset, name, value)}"


def _value(offset: int, name: str, value: int) -> str:
    enum = next((f.enum for f in REGISTERS[offset].fields if f.name == name), None) if offset in REGISTERS else None
    if enum and value in enum.__members__.values():
        return enum(value).name
    as_hex = offset in ADDRESS_OFFSETS or name == "reserved" or value > 0xFFFF
    return f"{value:#x}" if as_hex else str(value)


# --------------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True)
class Difference:
    """A register that two programs leave with different values; None where one does not write it.

    Equal values mean that an earlier write of the same register differs: the last one wins.
    """

    program: int
    name: str
    offset: int
    a: int | None
    b: int | None
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        place = f"program {self.program}  {self.offset:04x}  {self.name:<32}  "
        if self.a is None or self.b is None:
            return place + (f"{self.b:08x} in the second only" if self.a is None else f"{self.a:08x} in the first only")
        if self.a == self.b:
            return place + f"{self.a:08x} in both, written differently before"
        changed = (
            f"{n} {_value(self.offset, n, x)} -> {_value(self.offset, n, y)}" for n, (x, y) in self.fields.items()
        )
        return f"{place}{self.a:08x} -> {self.b:08x}  {'; '.join(changed)}".rstrip("; ")


_Writes = dict[tuple[int, int], list[int]]  # (target, offset) -> values in order


def _programs(words: Words | Iterable[int]) -> Iterator[_Writes]:
    """What each program writes, cut after every op-enable word; at the end also what no op-enable word follows."""
    written: _Writes = {}
    for w in words:
        target, value, offset = isa.split(int(w))
        if target not in NO_TARGETS and target != MARKER_TARGET:
            written.setdefault((target, offset), []).append(value)
        if (target, offset) == _IS_ENABLE:
            yield written
            written = {}
    if written:
        yield written


def diff(words_a: Words | Iterable[int], words_b: Words | Iterable[int]) -> Iterator[Difference]:
    """Where two dumps differ, program by program and register by register; the order of writes does not matter."""
    nothing: _Writes = {}
    for number, (a, b) in enumerate(zip_longest(_programs(words_a), _programs(words_b), fillvalue=nothing)):
        for key in [*a, *(k for k in b if k not in a)]:
            if a.get(key) != b.get(key):
                yield _difference(number, *key, a.get(key), b.get(key))


def _difference(number: int, target: int, offset: int, a: list[int] | None, b: list[int] | None) -> Difference:
    one = _line(0, target, a[-1], offset) if a else None
    two = _line(0, target, b[-1], offset) if b else None
    name = (one or two or _line(0, target, 0, offset)).name
    if not one or not two:
        return Difference(number, name, offset, one.value if one else None, two.value if two else None)
    pairs = {n: (one.fields.get(n, 0), two.fields.get(n, 0)) for n in {**one.fields, **two.fields}}
    changed = {n: (x, y) for n, (x, y) in pairs.items() if x != y}
    return Difference(number, name, offset, one.value, two.value, changed)
