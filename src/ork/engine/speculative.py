"""Several tokens a pass: somebody proposes what comes next, the model computes all of it and keeps what is right.

A pass over k proposals reads the weights once, as a pass over one token does, and a row's logits depend on that row
alone; so the text is what it would be without, if greedy to the last token, and if sampled by rejection (`Sampler.
verify`) with the same probabilities. Rows behind the first wrong proposal are cut off the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from ork.engine.sampling import Candidates, Sampler
from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.engine.session import Session, Stats

DEFAULT_MOST: Final = 8  # proposals in one pass
MOST: Final = 64
ROW_COST: Final = 0.08  # a further row in a pass, as a share of the pass of one (bench/draft.py measures it)

Proposal = tuple[int, Candidates]  # a token, and what it was drawn from


def check_most(most: int | None) -> int:
    """The bound on proposals, or its default. Raises UsageError for one that makes no sense."""
    if most is not None and not 1 <= most <= MOST:
        raise UsageError(f"--draft-max {most}: give a number of tokens from 1 to {MOST}")
    return most or DEFAULT_MOST


class Drafter(Protocol):
    """Proposes the next tokens of one text."""

    cost: float  # of one proposal, as a share of a pass of the model that verifies

    def propose(self, tokens: Seq[int], most: int, sampler: Sampler) -> list[Proposal]:
        """Up to `most` tokens that may follow `tokens`, none if there is no guess. `sampler` knows the filters and the
        tokens so far; it is for the drafter alone to use up."""

    def close(self) -> None:
        """Gives back what was kept for this text."""


class Pace:
    """How many proposals pay: the k with the most tokens for the cost, (1 + a + ... + a^k) / (1 + k (cost + row)).

    `a` is the share of right proposals, counted with a memory of about 1 / (1 - KEEP) passes above a hopeful prior. It
    comes of tokens, never of a clock: the same text and seed give the same passes. If none pays, k is 0 and the memory
    fades towards the prior, until a proposal is tried again.
    """

    KEEP: Final = 0.95
    PRIOR: Final = (1.4, 2.0)  # right, decided

    def __init__(self, cost: float, most: int):
        self.cost, self.most = cost + ROW_COST, most
        self.right = self.decided = 0.0

    def count(self, right: bool) -> None:
        """A proposal was compared with the model's choice."""
        self.right += right
        self.decided += 1.0

    def next(self) -> int:
        """Proposals for the next pass."""
        a = (self.right + self.PRIOR[0]) / (self.decided + self.PRIOR[1])
        gain, power, best, k = 1.0, 1.0, 1.0, 0
        for i in range(1, self.most + 1):
            power *= a
            gain += power
            if gain / (1.0 + i * self.cost) > best:
                best, k = gain / (1.0 + i * self.cost), i
        if self.decided < 1.0:
            k = max(k, 1)  # too little seen to give up
        self.right *= self.KEEP
        self.decided *= self.KEEP
        return k


class Verifier:
    """One generation with a drafter: takes the place of a forward pass for every token."""

    def __init__(self, session: Session, sampler: Sampler, drafter: Drafter, stats: Stats, most: int):
        self.session, self.sampler, self.drafter, self.stats = session, sampler, drafter, stats
        self.pace = Pace(drafter.cost, most)
        self._proposals: list[Proposal] = []
        self._rows: npt.NDArray[np.float32] | None = None
        self._at = 0  # the row that follows the next token

    def step(self, token: int, room: int) -> int:
        """The token that follows `token`, with a pass only if the last one did not already compute it.

        room: how many more tokens are wanted, and can be held, after that one.
        """
        session = self.session
        if self._rows is None:
            self._pass(token, room)
        assert self._rows is not None
        session.tokens.append(token)
        row, i = self._rows[self._at], self._at
        self._at += 1
        if i == len(self._proposals):
            self._rows = None
            return self.sampler.pick(row)
        proposed, theirs = self._proposals[i]
        token = self.sampler.verify(self.sampler.candidates(row), proposed, theirs)
        right = token == proposed
        self.pace.count(right)
        self.stats.accepted += right
        if not right:
            session.forget()
            self._rows = None
        return token

    def _pass(self, token: int, room: int) -> None:
        session, most = self.session, min(self.pace.next(), room)
        text = [*session.tokens, token]
        self._proposals = self.drafter.propose(text, most, self.sampler.ahead()) if most > 0 else []
        part = [token, *(proposed for proposed, _ in self._proposals)]
        self._rows = session.engine.forward([(session.seq, part)], every=True)
        self._at = 0
        self.stats.proposed += len(self._proposals)
        self.stats.passes += 1
