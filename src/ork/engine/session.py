"""Runs a model over sequences: prefill in chunks, decode token by token, text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ork.engine.kvcache import BLOCK, KvPool, Sequence
from ork.engine.sampling import Sampler, SamplingParams
from ork.engine.speculative import DEFAULT_MOST, Drafter, Verifier
from ork.errors import UsageError
from ork.models import Model
from ork.ops import Array, Ops
from ork.text.tokenizer import Tokenizer

CHUNK = 512  # rows of prefill in one forward pass


@dataclass
class Stats:
    """What a generation took. Times in seconds; prefill ends when the first token is known."""

    prompt_tokens: int = 0  # that were computed
    cached_tokens: int = 0  # of the prompt that the cache still held
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    reason: str = ""  # why it ended: 'stop' (end token or stop text), 'length', 'context', 'interrupted'
    passes: int = 0  # of decode; with a drafter fewer than tokens
    proposed: int = 0  # tokens by the drafter ...
    accepted: int = 0  # ... and those that the model agreed with

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second of decode passes; the first token belongs to prefill."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds and self.new_tokens > 1 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """The mean accepted length: the model's own token of each pass, and the proposals that it confirmed."""
        return 1.0 + self.accepted / self.passes if self.passes else 0.0


class Engine:
    """A model with a KV pool. Not thread-safe: one forward pass at a time."""

    def __init__(self, ops: Ops, model: Model, *, context: int, half: bool = True, sequences: int = 1):
        self.ops = ops
        self.model = model
        self.context = context
        blocks = -(-context // BLOCK)
        self.pool = KvPool.of(model.config, blocks * BLOCK * sequences, half=half)
        self.pool.serve(ops)

    def forward(self, parts: Seq[tuple[Sequence, Seq[int]]], *, every: bool = False) -> npt.NDArray[np.float32]:
        """Appends tokens to sequences; logits [rows, vocab] of the last row of each part, or of every row.

        The result is a view that the next pass may overwrite. Raises UsageError when a sequence outgrows the context.
        """
        logits: npt.NDArray[np.float32] = self.run(parts, every=every).numpy()
        return logits

    def run(self, parts: Seq[tuple[Sequence, Seq[int]]], *, every: bool = False, last: int | None = None) -> Array:
        """As `forward`, the logits as the array of the ops; with `last` those of the batch's last rows alone."""
        for seq, part in parts:
            if not part:
                raise ValueError("an empty part has no logits")
            if seq.length + len(part) > self.context:
                raise UsageError(
                    f"the text of {seq.length + len(part)} tokens is longer than the context of {self.context}: "
                    "give a larger -c or a shorter text"
                )
        vocab = self.model.config.vocab
        for _, part in parts:
            if min(part) < 0 or max(part) >= vocab:
                raise UsageError(f"a token lies outside of the vocabulary of {vocab}")
        rows = self.pool.rows(parts, every=every or last is not None)
        if last is not None:
            rows = replace(rows, wanted=rows.wanted[-last:])
        return self.model.forward(rows)

    def prefill(self, seq: Sequence, tokens: Seq[int], chunk: int = CHUNK) -> npt.NDArray[np.float32]:
        """Logits [vocab] after the last of `tokens`."""
        for i in range(0, len(tokens), chunk):
            logits = self.forward([(seq, tokens[i : i + chunk])])
        last: npt.NDArray[np.float32] = logits[0]
        return last

    def logits(self, tokens: Seq[int], chunk: int = CHUNK) -> npt.NDArray[np.float32]:
        """Logits [len(tokens), vocab] of every position of a sequence of its own."""
        seq = Sequence()
        out = np.empty((len(tokens), self.model.config.vocab), np.float32)
        try:
            for i in range(0, len(tokens), chunk):
                part = tokens[i : i + chunk]
                out[i : i + len(part)] = self.forward([(seq, part)], every=True)
        finally:
            self.pool.truncate(seq, 0)
        return out


@dataclass
class Session:
    """One conversation: the tokens so far and their place in the cache. With a drafter, several tokens a pass."""

    engine: Engine
    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    seq: Sequence = field(default_factory=Sequence)
    drafter: Drafter | None = None
    draft_max: int = DEFAULT_MOST  # proposals in one pass
    _runs: int = 0  # generations so far

    def generate(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        limit: int,
        stop: Iterable[str] = (),
        stats: Stats | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Iterator[str]:
        """Text as it is generated after `prompt`, which may begin with what the cache already holds.

        Ends at an end-of-generation token, a stop text (not yielded), `limit` tokens (-1: no limit) or a full context;
        `stats` says which. Closing the iterator keeps what has been generated so far.
        """
        stats = stats if stats is not None else Stats()
        self._runs = run = self._runs + 1
        fresh = self.reuse(prompt)
        if len(self.tokens) + len(fresh) > self.engine.context:
            raise UsageError(
                f"the prompt of {len(self.tokens) + len(fresh)} tokens is longer than the context of "
                f"{self.engine.context}: give a larger -c or a shorter prompt"
            )
        sampler = Sampler(params)
        sampler.accept(prompt)
        stats.prompt_tokens, stats.cached_tokens = len(fresh), len(self.tokens)
        stats.reason = "length"
        if limit == 0:
            return
        verifier = Verifier(self, sampler, self.drafter, stats, self.draft_max) if self.drafter else None
        decoder = self.tokenizer.stream()
        window = StopWindow(stop)
        try:
            start = clock()
            logits = self.engine.prefill(self.seq, fresh)
            self.tokens += fresh
            token = sampler.pick(logits)
            stats.prefill_seconds = clock() - start
            while True:
                if token in self.tokenizer.eog:
                    stats.reason = "stop"
                    break
                stats.new_tokens += 1
                sampler.accept([token])
                text, stopped = window.push(decoder.push(token))
                if text:
                    yield text
                if stopped:
                    stats.reason = "stop"
                    return
                if stats.new_tokens == limit:
                    break
                if len(self.tokens) >= self.engine.context:
                    stats.reason = "context"
                    break
                start = clock()
                if verifier is not None:
                    wanted = limit - stats.new_tokens if limit >= 0 else self.engine.context
                    token = verifier.step(token, min(wanted, self.engine.context - len(self.tokens)) - 1)
                else:
                    logits = self.engine.forward([(self.seq, [token])])[0]
                    self.tokens.append(token)
                    token = sampler.pick(logits)
                    stats.passes += 1
                stats.decode_seconds += clock() - start
            text, _ = window.push(decoder.flush())
            text += window.flush()
            if text:
                yield text
        except GeneratorExit:
            stats.reason = "interrupted"
            raise
        finally:
            if run == self._runs:  # else somebody left this one and went on
                self.forget()

    def close(self) -> None:
        """Gives the cache's blocks back; a session that is used again starts from nothing."""
        self.tokens.clear()
        self.forget()
        if self.drafter is not None:
            self.drafter.close()

    def forget(self) -> None:
        """Cuts what the cache holds beyond `tokens`: proposals that were wrong or not wanted, a pass cut short; where
        it cannot be cut there, `tokens` too."""
        self.engine.pool.truncate(self.seq, len(self.tokens))
        del self.tokens[self.seq.length :]

    def reuse(self, prompt: Seq[int]) -> list[int]:
        """Keeps the longest common prefix in the cache and returns what must be computed: at least one token."""
        if not prompt:
            raise UsageError("the prompt is empty: give some text with -p, -f or on standard input")
        keep = 0
        for a, b in zip(self.tokens, prompt):
            if a != b:
                break
            keep += 1
        keep = min(keep, len(prompt) - 1)
        self.engine.pool.truncate(self.seq, min(keep, self.seq.length))
        del self.tokens[self.seq.length :]
        return list(prompt[self.seq.length :])


class StopWindow:
    """Holds back text that may be the beginning of a stop text."""

    def __init__(self, stop: Iterable[str]):
        self.stop = [s for s in stop if s]
        self.held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop text was reached): the one that is complete first, however the text
        is cut into pieces."""
        self.held += text
        found = [(i + len(s), i) for s in self.stop if (i := self.held.find(s)) >= 0]
        if found:
            shown, self.held = self.held[: min(found)[1]], ""
            return shown, True
        hold = max((_overlap(self.held, s) for s in self.stop), default=0)
        shown = self.held[: len(self.held) - hold]
        self.held = self.held[len(self.held) - hold :]
        return shown, False

    def flush(self) -> str:
        shown, self.held = self.held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
