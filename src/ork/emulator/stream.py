"""What the program counter makes of the words it fetches: register writes up to the op-enable word.

Everything behind the op-enable word is without effect, so amounts that are too large are harmless (executed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ork.npu.isa import BLOCKS, ENABLE_TARGET, MARKER_TARGET, NO_TARGETS, Words, split

_OWNER: Final = {block.target: (name, block.base >> 12) for name, block in BLOCKS.items()}
_QUIET: Final = (MARKER_TARGET, *NO_TARGETS)
_NEXT_ADDRESS, _NEXT_AMOUNT = 0x0010, 0x0014


@dataclass(frozen=True, slots=True)
class Write:
    """One register write: `index` is the word's place in the stream."""

    block: str
    offset: int
    value: int
    index: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One program as fetched. `next_index` is the word that holds the next address, -1 if there is none."""

    writes: tuple[Write, ...]
    next_index: int
    next_amount: int
    enable: int | None  # the blocks to start; None: no op-enable word was fetched
    strays: tuple[int, ...]  # indices of words whose target does not own their offset
    length: int  # words looked at


def parse(words: Words) -> Stream:
    """The writes of a fetched program in order. `words` u64[n]; never raises, whatever they hold."""
    ends = np.flatnonzero(words >> 48 == ENABLE_TARGET)
    if ends.size:
        words = words[: ends[0] + 1]
    writes: list[Write] = []
    strays: list[int] = []
    next_index, next_amount = -1, 0
    for index, word in enumerate(words.tolist()):
        target, value, offset = split(word)
        if target == ENABLE_TARGET:
            return Stream(tuple(writes), next_index, next_amount, value, tuple(strays), len(words))
        block, page = _OWNER.get(target, ("", -1))
        if offset >> 12 != page:
            if target not in _QUIET:
                strays.append(index)
        elif block != "PC":
            writes.append(Write(block, offset, value, index))
        elif offset == _NEXT_ADDRESS:
            next_index = index
        elif offset == _NEXT_AMOUNT:
            next_amount = value & 0xFFFF  # the bits above mark multi-core sets and change nothing (executed)
    return Stream(tuple(writes), next_index, next_amount, None, tuple(strays), len(words))
