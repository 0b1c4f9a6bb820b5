"""The register-command instruction set: words, encoding of registers, assembly, patching. Pure functions.

A program is an array of little-endian u64 words, each one register write:

    bits 63:48 target (which block)     bits 47:16 value     bits 15:0 register offset

and ends in a trailer of four words: address and fetch amount of the next program (zero if this is the last), a
marker, and the op-enable word that starts the blocks. The tables are in `ork.npu.registers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ork.errors import OrkError
from ork.npu.fields import (
    BLOCKS,
    MATMUL,
    Alu,
    Block,
    ConvMode,
    Enable,
    Field,
    Interrupt,
    OperandMode,
    OperandSize,
    Pooling,
    Precision,
    Register,
)
from ork.npu.registers import ADDRESS_OFFSETS, REGISTERS

__all__ = [
    "ADDRESS_OFFSETS",
    "BLOCKS",
    "ENABLE_TARGET",
    "MARKER_TARGET",
    "MATMUL",
    "NO_TARGETS",
    "REGCFG_EXTRA",
    "REGISTERS",
    "Alu",
    "AssemblyError",
    "Block",
    "ConvMode",
    "Enable",
    "Field",
    "Interrupt",
    "OperandMode",
    "OperandSize",
    "Pooling",
    "Precision",
    "Register",
    "Words",
    "assemble",
    "decode",
    "encode",
    "fetch_amount",
    "fetched_words",
    "link",
    "mask_addresses",
    "patch",
    "positions",
    "register",
    "split",
    "target_of",
    "word",
]

Words = npt.NDArray[np.uint64]

REGCFG_EXTRA = 4  # trailer words, which regcfg_amount does not count
MARKER_TARGET = 0x0041  # must stand before the op-enable word; value and offset 0
ENABLE_TARGET = 0x0081  # the op-enable word, offset 8, value of GLOBAL.OPERATION_ENABLE's layout
NO_TARGETS = (0x0000, 0x0001)  # words without effect: padding
_NEXT_ADDRESS, _NEXT_AMOUNT, _ENABLE = 0x0010, 0x0014, 0x0008
_U32 = 0xFFFFFFFF


class AssemblyError(OrkError):
    """A register, field or value that the instruction set does not have."""


# ---------------------------------------------------------------------------------------------------- words


def word(target: int, offset: int, value: int) -> int:
    """One register write. Raises AssemblyError for a part that does not fit its bits (16, 16 and 32)."""
    if not (0 <= target <= 0xFFFF and 0 <= offset <= 0xFFFF and 0 <= value <= _U32):
        raise AssemblyError(f"word {target:#x}:{offset:#x} = {value:#x} does not fit 16:16 = 32 bits")
    return target << 48 | value << 16 | offset


@overload
def split(words: int) -> tuple[int, int, int]: ...
@overload
def split(words: Words) -> tuple[Words, Words, Words]: ...
def split(words: int | Words) -> tuple[int, int, int] | tuple[Words, Words, Words]:
    """(target, value, offset) of a word, or of each word of a u64 array."""
    if isinstance(words, np.ndarray):
        return words >> np.uint64(48), words >> np.uint64(16) & np.uint64(_U32), words & np.uint64(0xFFFF)
    return words >> 48, words >> 16 & _U32, words & 0xFFFF


_TARGETS = {block.base >> 12: block.target for block in BLOCKS.values()}


def target_of(offset: int) -> int:
    """The target of words that write the register at `offset`. Raises AssemblyError if no block is there."""
    try:
        return _TARGETS[offset >> 12]
    except KeyError:
        raise AssemblyError(f"offset {offset:#06x} belongs to no block that a program can write") from None


# ------------------------------------------------------------------------------------------------ registers

_BY_NAME: dict[str, list[Register]] = {}
for _r in REGISTERS.values():
    _BY_NAME.setdefault(_r.full_name, []).append(_r)
    _BY_NAME.setdefault(_r.name, []).append(_r)


def register(key: int | str) -> Register:
    """By offset, by "BLOCK.NAME", or by "NAME" where only one block has it. Raises AssemblyError."""
    if isinstance(key, int):
        if key in REGISTERS:
            return REGISTERS[key]
        raise AssemblyError(f"no register at offset {key:#06x}")
    found = _BY_NAME.get(key, [])
    if not found:
        raise AssemblyError(f"no register is named {key}")
    if len(found) > 1:
        raise AssemblyError(f"{key} is in several blocks: write {' or '.join(r.full_name for r in found)}")
    return found[0]


def _put(reg: Register, field: Field, value: int) -> int:
    if not field.low <= value <= field.high:
        raise AssemblyError(f"{reg.full_name}.{field.name} = {value}: must be from {field.low} to {field.high}")
    if value % field.unit:
        raise AssemblyError(f"{reg.full_name}.{field.name} = {value:#x}: must be a multiple of {field.unit}")
    return (value // field.unit - field.minus_one) << field.lo & field.mask


def encode(key: int | str, **fields: int) -> int:
    """The 32-bit value of a register, from every one of its fields.

    Values are what they mean: a width of 8 is 8 although the chip stores 7, a pitch is in bytes although it stores
    sixteenths. Fields marked `?` in the tables and `reserved` (the bits of no field) may be left out and are 0 then.
    Raises AssemblyError for an unknown or forgotten field and for a value outside its range.
    """
    reg = register(key)
    value = fields.pop("reserved", 0)
    if value & reg.mask or not 0 <= value <= _U32:
        raise AssemblyError(f"{reg.full_name}.reserved = {value:#x} overlaps its fields")
    forgotten = []
    for field in reg.fields:
        if field.name in fields:
            value |= _put(reg, field, fields.pop(field.name))
        elif not field.optional:
            forgotten.append(field.name)
    if fields:
        raise AssemblyError(f"{reg.full_name} has no field {', '.join(fields)}: it has {_names(reg)}")
    if forgotten:
        raise AssemblyError(f"{reg.full_name}: {', '.join(forgotten)} not given")
    return value


def _names(reg: Register) -> str:
    return ", ".join(field.name for field in reg.fields)


def decode(key: int | str, value: int) -> dict[str, int]:
    """Every field of a register's value, in the units of `encode`; `reserved` only if such bits are set.

    `encode(key, **decode(key, value)) == value` for every 32-bit value. Raises AssemblyError for an unknown register.
    """
    reg = register(key)
    out = {}
    for field in reg.fields:
        raw = (value & field.mask) >> field.lo
        if field.signed and raw >> field.bits - 1:
            raw -= 1 << field.bits
        out[field.name] = (raw + field.minus_one) * field.unit
    if value & ~reg.mask & _U32:
        out["reserved"] = value & ~reg.mask & _U32
    return out


# ------------------------------------------------------------------------------------------------- programs


def fetch_amount(body_words: int) -> int:
    """What the PC is told to fetch for a body of so many words (without trailer): pairs of words, minus one."""
    return (body_words + REGCFG_EXTRA + 1) // 2 - 1


def fetched_words(amount: int) -> int:
    """Words that the PC reads for that amount; the high half of the register is not part of it."""
    return 2 * ((amount & 0xFFFF) + 1)


def assemble(
    writes: Sequence[tuple[int, int]] | Mapping[int, int],
    *,
    next_address: int = 0,
    next_amount: int = 0,
    enable: int = MATMUL,
) -> Words:
    """Words of a program: the writes (offset, value) in order, then the trailer. u64[len(writes) + 4].

    `next_address` (bytes, a multiple of 16) and `next_amount` (`fetch_amount` of its body) link the following
    program of a chain; both 0 for the last. Raises AssemblyError for an unknown register or a value that does not fit.
    """
    pairs = writes.items() if isinstance(writes, Mapping) else writes
    body = [word(target_of(register(offset).offset), offset, value) for offset, value in pairs]
    if not enable or enable & ~REGISTERS[0xF008].mask:
        raise AssemblyError(f"op-enable mask {enable:#x}: must name blocks within {REGISTERS[0xF008].mask:#x}")
    trailer = [0, 0, word(MARKER_TARGET, 0, 0), word(ENABLE_TARGET, _ENABLE, enable)]
    words = np.array(body + trailer, dtype=np.uint64)
    link(words, next_address, next_amount)
    return words


def link(words: Words, next_address: int = 0, next_amount: int = 0) -> None:
    """Makes an assembled program continue at `next_address` (both 0: makes it the last), in place."""
    if bool(next_address) != bool(next_amount):
        raise AssemblyError(f"next program at {next_address:#x} with amount {next_amount}: give both or neither")
    follows = encode(_NEXT_ADDRESS, pc_source_addr=next_address, pc_sel=0)
    amount = encode(_NEXT_AMOUNT, pc_data_amount=next_amount)
    words[-4] = word(target_of(_NEXT_ADDRESS), _NEXT_ADDRESS, follows) if next_address else 0
    words[-3] = word(target_of(_NEXT_AMOUNT), _NEXT_AMOUNT, amount)


def positions(words: Words, offset: int) -> npt.NDArray[np.intp]:
    """Indices of all words that write the register at `offset`; bodies may write one twice, and the last wins."""
    head = target_of(offset) << 48 | offset
    return np.flatnonzero((words & np.uint64(0xFFFF00000000FFFF)) == np.uint64(head))


def patch(words: Words, offset: int, value: int) -> int:
    """Replaces the value of every write of the register at `offset`, in place. Returns how many there were."""
    found = positions(words, offset)
    words[found] = word(target_of(offset), offset, value)
    return len(found)


_KEEP = np.full(1 << 16, 0xFFFFFFFFFFFFFFFF, np.uint64)
_KEEP[list(ADDRESS_OFFSETS)] = 0xFFFF00000000FFFF


def mask_addresses(words: Words) -> bytes:
    """The words with the values of address registers zeroed: equal for programs that differ in addresses alone.

    `words` is a contiguous u64 array. A key for caches of decoded programs: targets and offsets stay in it.
    """
    kept: Words = words & _KEEP[words.view(np.uint16)[::4]]
    return kept.tobytes()
