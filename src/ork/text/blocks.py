"""A long text as tokens, a block at a time: the library takes 60 to 400 bytes for each character that it gets at once.

A text is cut where that changes no token: between two words of the pre-tokenizer, which no merge joins, or, where a
word is as long as a block (without a pre-tokenizer the whole text is one), between two characters that no token has
side by side, so that no merge ever joins them; this only if the pre-tokenizer cuts the rest of a word no differently.

A block is encoded together with what follows it. Its tokens up to some words before its end are those of the whole
text, because pre-tokenizers run from left to right and look a few characters ahead. The next block starts there, and
must begin with the tokens that this one has found there: else the pipeline looks back, and the text is encoded as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import tokenizers

from ork.errors import UsageError

BLOCK: Final = 1 << 18  # characters
LONGEST: Final = 1 << 21  # characters without a place to cut: real texts have no hundredth of that in a row
WORDS, CHARACTERS, TOKENS = 8, 16, 16  # that lie between a cut and the end of what was seen

Apart = Callable[[int, int], bool]


def encode(text: str, start: tokenizers.Tokenizer, rest: tokenizers.Tokenizer, apart: Apart | None) -> list[int]:
    """Tokens of `text`: `start` encodes as a text starts, `rest` as it goes on, without a prefix.

    `apart` says of two neighbouring tokens whether no merge could join what lies on both sides of their border; None
    where words may be cut only between them. Raises UsageError where LONGEST characters have no place to cut.
    """
    ids: list[int] = []
    expected: list[int] = []
    at, size, library = 0, BLOCK, start
    while True:
        part = library.encode(text[at : at + size], add_special_tokens=False)
        found: list[int] = part.ids
        if found[: len(expected)] != expected:
            whole: list[int] = start.encode(text, add_special_tokens=False).ids
            return whole
        if at + size >= len(text):
            return ids + found
        cut = _last_cut(part, size, apart)
        if cut:
            ids += found[:cut]
            expected = found[cut : cut + TOKENS // 2]
            at, size, library = at + part.offsets[cut][0], BLOCK, rest
        elif size < LONGEST:
            size *= 2
        else:
            raise UsageError(
                f"the text has {size:,} characters in a row that are one word, from character {at:,} on: is it a text?"
            )


def _last_cut(part: Any, size: int, apart: Apart | None) -> int:
    """The token before which a block of `size` characters is best cut, 0 if there is none."""
    ids, words, offsets = part.ids, np.array(part.word_ids), np.array(part.offsets).reshape(-1, 2)
    if len(ids) < 2:
        return 0
    starts = offsets[1:, 0]
    # A character of several tokens is the place of each of them.
    good = (starts > 0) & (starts >= offsets[:-1, 1]) & (starts <= size - CHARACTERS)
    good[max(0, len(good) - TOKENS) :] = False
    between = np.flatnonzero(good & (words[1:] != words[:-1]) & (words[1:] <= words[-1] - WORDS))
    if len(between):
        return int(between[-1]) + 1
    if apart is None or offsets[-1, 1] != size or (starts > offsets[:-1, 1]).any():
        return 0  # behind a character that becomes no token the library counts on wrongly
    places = (np.flatnonzero(good) + 1).tolist()
    return next((k for k in reversed(places) if apart(ids[k - 1], ids[k])), 0)


def pairs_of(texts: Sequence[str]) -> frozenset[str]:
    """All pairs of characters that stand side by side in one of `texts`."""
    return frozenset(t[i : i + 2] for t in texts for i in range(len(t) - 1))
