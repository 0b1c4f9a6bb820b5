"""Perplexity and KL divergence of models on a text, cut as llama-perplexity cuts it, so that numbers compare.

The whole text becomes tokens, begun with BOS where the model wants one; chunks of `context` tokens are sequences of
their own, whose first token gives way to BOS likewise. The second half is scored: positions context/2 to context - 2
predict their successors. What is left at the end is dropped. (Facts: tools/perplexity of llama.cpp, MIT.)

Only the scored rows' logits are computed, a bounded number at a time; the chunks of two models run in step, so that
nothing is kept of them but a few numbers a token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ork import native
from ork.engine.kvcache import Sequence as Place
from ork.engine.session import CHUNK, Engine
from ork.errors import OrkError, UsageError
from ork.measure.compare import Comparison, Perplexity, comparison, perplexity
from ork.text.tokenizer import Tokenizer

LOGITS_BYTES = 256 << 20  # of one model's logits at a time
LEAST_CONTEXT = 4  # a chunk of three has one prediction, of two none

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Chunks:
    """A text as sequences of tokens i32 [chunks, context]; the first token of each is BOS if the model wants one."""

    tokens: I32

    @property
    def context(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def first(self) -> int:
        """The first position whose prediction is scored."""
        return self.context // 2

    @property
    def scored(self) -> int:
        """Predictions scored in a chunk."""
        return self.context - 1 - self.first

    def targets(self, i: int) -> I32:
        """The tokens that chunk `i`'s scored positions should predict, i32 [scored]."""
        return np.ascontiguousarray(self.tokens[i, self.first + 1 :])

    def __len__(self) -> int:
        return len(self.tokens)


def cut(tokenizer: Tokenizer, text: str, context: int = 512, chunks: int | None = None) -> Chunks:
    """The first `chunks` (default: all) chunks of a text. Markers in it are plain text.

    Raises UsageError if `context` is below LEAST_CONTEXT, `chunks` not positive, or the text too short for one chunk.
    """
    if context < LEAST_CONTEXT:
        raise UsageError(f"-c {context}: chunks need at least {LEAST_CONTEXT} tokens")
    if chunks is not None and chunks < 1:
        raise UsageError(f"--chunks {chunks}: give a number of chunks, 1 or more")
    tokens = tokenizer.encode(text, special=False)
    count = min(len(tokens) // context, chunks or len(tokens))
    if not count:
        raise UsageError(
            f"the text is too short: it has {len(tokens)} tokens, one chunk takes {context}; "
            "give a longer text or a smaller -c"
        )
    cut = np.array(tokens[: count * context], np.int32).reshape(count, context)
    if tokenizer.add_bos and tokenizer.bos is not None:
        cut[:, 0] = tokenizer.bos
    return Chunks(cut)


class Logits(Protocol):
    """Where the logits of a text's scored positions come from: a model that runs, or a file of an earlier run."""

    vocab: int

    def chunk(self, i: int) -> Generator[native.Array, None, None]:
        """Logits of chunk `i`'s scored positions in order, f32 [rows, vocab], in the parts that `passes` makes."""


class Running:
    """A model's logits, `rows` positions at a time at most (default: as many as fit LOGITS_BYTES)."""

    def __init__(self, engine: Engine, chunks: Chunks, rows: int | None = None):
        self.engine = engine
        self.chunks = chunks
        self.vocab = engine.model.config.vocab
        self.rows = rows or max(1, LOGITS_BYTES // (4 * self.vocab))

    def chunk(self, i: int) -> Generator[native.Array, None, None]:
        tokens = self.chunks.tokens[i].tolist()
        place = Place()
        try:
            for start, stop, wanted in passes(self.chunks.context, self.rows):
                if wanted:  # nothing here keeps the part, which is freed before the next one is made
                    yield self.engine.run([(place, tokens[start:stop])], last=wanted)
                else:
                    self.engine.run([(place, tokens[start:stop])], last=1)
        finally:
            self.engine.pool.truncate(place, 0)


def passes(context: int, rows: int) -> list[tuple[int, int, int]]:
    """Passes (first token, behind the last, rows scored, which are the last ones) over a chunk without its last token,
    which predicts nothing: of CHUNK tokens and `rows` scored rows at most."""
    out, at, first = [], 0, context // 2
    while at < context - 1:
        stop = min(at + CHUNK, context - 1, max(at, first) + rows)
        out.append((at, stop, max(0, stop - max(at, first))))
        at = stop
    return out


@dataclass(frozen=True)
class Scores:
    """Of every prediction [T]: -ln p of what came, and the token found likeliest."""

    nll: F64
    top: I32

    def summary(self) -> Perplexity:
        return perplexity(self.nll)


@dataclass(frozen=True)
class Pairs:
    """Of every prediction: nll and top [T, 2] of the reference and the model, kl [T] = KL(reference || model)."""

    nll: F64
    top: I32
    kl: F64

    def summary(self) -> Comparison:
        return comparison(self.nll, self.kl, self.top[:, 0] == self.top[:, 1])


def score(logits: Logits, chunks: Chunks, progress: Callable[[int, Perplexity], None] | None = None) -> Scores:
    """Every chunk; `progress` hears how many are done and the figures so far. Raises OrkError for NaN or infinities."""
    _check(logits, chunks)
    total = len(chunks) * chunks.scored
    nll, top = np.empty(total), np.empty(total, np.int32)
    at = 0
    for i in range(len(chunks)):
        targets = chunks.targets(i)
        for part in logits.chunk(i):
            here = slice(at, at + part.rows)
            native.score(part, targets[: part.rows], nll[here], top[here])
            at, targets = here.stop, targets[part.rows :]
            del part
        _finite(nll[:at], i)
        if progress:
            progress(i + 1, perplexity(nll[:at]))
    return Scores(nll, top)


def compare(
    reference: Logits, model: Logits, chunks: Chunks, progress: Callable[[int, Comparison], None] | None = None
) -> Pairs:
    """Both chunk by chunk, in step; else as `score`. Raises UsageError if their vocabularies differ in size."""
    for logits in (reference, model):
        _check(logits, chunks)
    if reference.vocab != model.vocab:
        raise UsageError(
            f"the models cannot be compared: their vocabularies differ ({reference.vocab} and {model.vocab} tokens)"
        )
    total = len(chunks) * chunks.scored
    nll, top, kl = np.empty((total, 2)), np.empty((total, 2), np.int32), np.empty(total)
    at = 0
    for i in range(len(chunks)):
        targets = chunks.targets(i)
        bases, others = reference.chunk(i), model.chunk(i)
        while (base := next(bases, None)) is not None:
            other = next(others)
            here = slice(at, at + base.rows)
            native.compare(base, other, targets[: base.rows], nll[here], top[here], kl[here])
            at, targets = here.stop, targets[base.rows :]
            del base, other
        others.close()
        _finite(nll[:at], i)
        if progress:
            done = slice(0, at)
            progress(i + 1, comparison(nll[done], kl[done], top[done, 0] == top[done, 1]))
    return Pairs(nll, top, kl)


def _check(logits: Logits, chunks: Chunks) -> None:
    if int(chunks.tokens.max()) >= logits.vocab:
        raise UsageError(f"the text has a token outside of the model's vocabulary of {logits.vocab}")


def _finite(nll: F64, chunk: int) -> None:
    if not np.isfinite(nll).all():
        raise OrkError(f"chunk {chunk + 1}: the model's logits are not finite; its weights overflow, or are damaged")


def same_text(tokenizers: Sequence[Tokenizer], text: str, context: int, chunks: int | None) -> Chunks:
    """The text's chunks, when all tokenizers make the same tokens of it. Raises UsageError where they do not."""
    first, *others = (cut(t, text, context, chunks) for t in tokenizers)
    for other in others:
        if not np.array_equal(first.tokens, other.tokens):
            raise UsageError("the models cannot be compared: their tokenizers make different tokens of this text")
    return first
