"""Prompt look-up: what followed when the text last ended like this. No model, and no cost but the rows to verify."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import numpy as np

from ork.engine.sampling import Sampler
from ork.engine.speculative import Proposal

SHORTEST: Final = 2  # tokens of a match: one alone is no hint
LONGEST: Final = 64


class PromptLookup:
    """Proposes what came after the longest earlier match of the text's end; of several the last."""

    cost = 0.0

    def propose(self, tokens: Seq[int], most: int, sampler: Sampler) -> list[Proposal]:
        return [(token, ([token], [1.0])) for token in lookup(tokens, most)]

    def close(self) -> None:
        """Nothing is kept."""


def lookup(tokens: Seq[int], most: int) -> list[int]:
    """Up to `most` tokens: the continuation of the longest match, which may run on into itself (abcabc: abc abc ...).

    A match is of SHORTEST to LONGEST tokens; where it overlaps the end, the text repeats and so does the proposal.
    """
    text = np.asarray(tokens, np.int64)
    end = len(text)
    ends = np.arange(end - 1)  # where earlier matches end
    for n in range(LONGEST):
        longer = ends[ends >= n]
        longer = longer[text[longer - n] == text[end - 1 - n]]
        if not longer.size:
            break
        ends = longer
    else:
        n = LONGEST
    if n < SHORTEST:
        return []
    out, start = list(tokens), int(ends[-1]) + 1
    for i in range(most):
        out.append(out[start + i])
    return out[end:]
