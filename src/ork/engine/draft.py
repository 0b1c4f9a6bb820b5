"""A small model as drafter: it stays in memory and runs ahead of the large one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from ork.engine.sampling import Sampler
from ork.engine.session import Engine, Session
from ork.engine.speculative import Proposal
from ork.errors import PackDamaged
from ork.text.tokenizer import Tokenizer

STREAMED_COST: Final = 4  # a byte that comes through a window beside one that is read in place: disk and memory


class DraftModel:
    """Proposes what a small model says, drawn with the same filters; its KV cache follows the text.

    vocab: how many ids mean the same to both models; the small one's logits behind them do not count, and with a text
    that has other ids nothing is proposed, and neither is past the small model's context.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, vocab: int, cost: float):
        self.cost = cost
        self.vocab = min(vocab, engine.model.config.vocab)
        self._session = Session(engine, tokenizer)

    def propose(self, tokens: Seq[int], most: int, sampler: Sampler) -> list[Proposal]:
        session, engine = self._session, self._session.engine
        if len(tokens) > engine.context or not most:
            return []
        fresh = session.reuse(tokens)
        if max(fresh) >= self.vocab:
            return []
        out: list[Proposal] = []
        while True:
            logits = engine.prefill(session.seq, fresh)
            session.tokens += fresh
            try:
                candidates = sampler.candidates(logits[: self.vocab])
            except PackDamaged as error:
                raise PackDamaged(f"the draft: {error}") from None
            token = sampler.draw(candidates)
            out.append((token, candidates))
            if len(out) == most or token in session.tokenizer.eog or len(session.tokens) == engine.context:
                return out
            sampler.accept([token])
            fresh = [token]

    def close(self) -> None:
        self._session.close()


def relative_cost(small: int, big: int, window: int | None) -> float:
    """A small model's pass as a share of a large one's, from the bytes that each reads; a streamed byte costs more."""
    streamed = 0 if window is None else max(0, big - window)
    return small / (big + (STREAMED_COST - 1) * streamed)
