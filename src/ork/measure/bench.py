"""Prefill and decode speed under llama-bench's test names; loading is never inside a timed run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ork.engine.kvcache import Sequence
from ork.engine.session import Engine

VOCAB_SPREAD = 7919  # a prime step through the vocabulary: tokens that differ, the same in every run


@dataclass(frozen=True)
class Result:
    """`test` is ppN (prefill of N tokens) or tgN (N decode passes from an empty context); rates in tokens/s."""

    test: str
    rates: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


def tokens(count: int, vocab: int) -> list[int]:
    """`count` tokens spread over the vocabulary."""
    return [(1 + i * VOCAB_SPREAD) % vocab for i in range(count)]


def prefill(engine: Engine, n: int, repeats: int) -> Result:
    """One pass over n tokens, its last row's logits computed, `repeats` times after a warm-up."""
    prompt = tokens(n, engine.model.config.vocab)
    return Result(f"pp{n}", [n / s for s in _timed(engine, repeats, lambda seq: engine.prefill(seq, prompt))])


def decode(engine: Engine, n: int, repeats: int) -> Result:
    """n passes of one token each, `repeats` times after a warm-up."""
    text = tokens(n, engine.model.config.vocab)

    def once(seq: Sequence) -> None:
        for token in text:
            engine.forward([(seq, [token])])

    return Result(f"tg{n}", [n / s for s in _timed(engine, repeats, once)])


def _timed(engine: Engine, repeats: int, work: Callable[[Sequence], object]) -> list[float]:
    seconds = []
    for i in range(repeats + 1):  # the first warms up: pages mapped, hashes checked, buffers made
        seq = Sequence()
        start = time.perf_counter()
        work(seq)
        if i:
            seconds.append(time.perf_counter() - start)
        engine.pool.truncate(seq, 0)
    return seconds
