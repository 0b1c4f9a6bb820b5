"""Choosing the next token: greedy, or temperature with top-k, top-p, min-p and a repetition penalty.

Filters apply in llama.cpp's order: penalty, top-k, top-p, min-p, temperature.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ork import native
from ork.errors import PackDamaged, UsageError

Candidates = tuple[list[int], list[float]]  # tokens, best first, and their probabilities

PENALTY_WINDOW = 64  # tokens that the repetition penalty looks back on


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repeat_penalty 1 switch a filter off."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None

    def check(self) -> SamplingParams:
        """Raises UsageError naming the value that makes no sense."""
        limits = {
            "--temp": (self.temperature, 0.0, 100.0),
            "--top-k": (self.top_k, 0, 1 << 30),
            "--top-p": (self.top_p, 0.0, 1.0),
            "--min-p": (self.min_p, 0.0, 1.0),
            "--repeat-penalty": (self.repeat_penalty, 0.01, 100.0),
        }
        for flag, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise UsageError(f"{flag} {value}: give a number from {low} to {high}")
        return self


class Sampler:
    """Draws tokens; with a seed, the same tokens every time."""

    def __init__(self, params: SamplingParams):
        self.params = params.check()
        self._random = random.Random(params.seed)
        self._recent: deque[int] = deque(maxlen=PENALTY_WINDOW)

    def accept(self, tokens: Iterable[int]) -> None:
        """Tells the penalty which tokens are in the text."""
        self._recent.extend(tokens)

    def pick(self, logits: npt.NDArray[np.float32]) -> int:
        """A token for one row of logits [vocab]. Raises PackDamaged for logits that are no numbers."""
        return self.draw(self.candidates(logits))

    def candidates(self, logits: npt.NDArray[np.float32]) -> Candidates:
        """What the filters leave of one row of logits [vocab]; the best alone if greedy. Raises as `pick`."""
        p = self.params
        row = np.ascontiguousarray(logits, np.float32).reshape(1, -1)
        if p.repeat_penalty != 1.0 and self._recent:
            row = self._penalised(row)
        count = 1 if p.temperature <= 0.0 else min(p.top_k, row.shape[1])  # 0: all
        ids, values = native.top_k(row, 0, count)
        if values[0] != values[0]:
            raise PackDamaged("the logits are not numbers: the model is damaged, or overflows f16 (then try --kv f32)")
        if p.temperature <= 0.0:
            return ids, [1.0]
        keep = _nucleus(native.softmax(values, 1.0), p.top_p, p.min_p)
        return ids[:keep], native.softmax(values[:keep], 1.0 / p.temperature)

    def draw(self, candidates: Candidates) -> int:
        """A token at random, as likely as the candidates say."""
        ids, probabilities = candidates
        return ids[0] if self.params.temperature <= 0.0 else ids[_draw(probabilities, self._random.random())]

    def verify(self, mine: Candidates, token: int, theirs: Candidates) -> int:
        """A token as likely as `mine` says, and `token`, which somebody drew from `theirs`, as often as that allows.

        Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): the token stays with probability
        min(1, mine / theirs); otherwise one is drawn from what `mine` has more of than `theirs`.
        """
        if self._random.random() * _probability(theirs, token) < _probability(mine, token):
            return token
        q = dict(zip(*theirs))
        rest = [max(0.0, p - q.get(i, 0.0)) for i, p in zip(*mine)]
        return self.draw((mine[0], rest) if sum(rest) > 0.0 else mine)

    def ahead(self) -> Sampler:
        """For tokens that are only proposed: the same filters and random numbers, recent tokens of its own."""
        other = copy(self)
        other._recent = self._recent.copy()
        return other

    def _penalised(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        row = row.copy()
        seen = np.array(list(Counter(self._recent)), np.int64)
        part = row[0, seen]
        penalty = np.float32(self.params.repeat_penalty)
        row[0, seen] = np.where(part > 0, part / penalty, part * penalty)
        return row


def _probability(candidates: Candidates, token: int) -> float:
    ids, probabilities = candidates
    return probabilities[ids.index(token)] if token in ids else 0.0


def _nucleus(probabilities: list[float], top_p: float, min_p: float) -> int:
    """How many of the sorted candidates remain: the fewest with mass top_p, and none below min_p times the best."""
    mass, floor = 0.0, min_p * probabilities[0]
    for i, p in enumerate(probabilities):
        if i and (mass >= top_p or p < floor):
            return i
        mass += p
    return len(probabilities)


def _draw(probabilities: list[float], u: float) -> int:
    mass, total = 0.0, sum(probabilities)
    for i, p in enumerate(probabilities):
        mass += p
        if u * total < mass:
            return i
    return len(probabilities) - 1
