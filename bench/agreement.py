"""How far one model's predictions are from another's: top-1 agreement, Kullback-Leibler divergence, perplexity."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

ROWS = 64  # at a time: a block of Gemma's 262,144 logits in float64 stays at 128 MiB


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities, float64 [T, vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


class Agreement:
    """Collects predictions of a reference and of a model for the same tokens."""

    def __init__(self) -> None:
        self.count = 0
        self.same_top = 0
        self.divergence = 0.0
        self.surprise = 0.0
        self.reference_surprise = 0.0

    def add(
        self, reference: npt.NDArray[np.float32], model: npt.NDArray[np.float32], targets: npt.NDArray[np.integer]
    ) -> None:
        """Logits [T, vocab] of both, and the T tokens that came next."""
        for start in range(0, len(targets), ROWS):
            rows = slice(start, start + ROWS)
            want, got, target = log_softmax(reference[rows]), log_softmax(model[rows]), targets[rows, None]
            self.count += len(target)
            self.same_top += int((want.argmax(axis=1) == got.argmax(axis=1)).sum())
            self.divergence += float((np.exp(want) * (want - got)).sum())
            self.reference_surprise -= float(np.take_along_axis(want, target, 1).sum())
            self.surprise -= float(np.take_along_axis(got, target, 1).sum())

    def summary(self) -> dict[str, float]:
        """`top1` share, mean `kl` in nats, both perplexities and their ratio, over `tokens` predictions."""
        return {
            "tokens": self.count,
            "top1": self.same_top / self.count,
            "kl": self.divergence / self.count,
            "reference_perplexity": math.exp(self.reference_surprise / self.count),
            "perplexity": math.exp(self.surprise / self.count),
            "perplexity_ratio": math.exp((self.surprise - self.reference_surprise) / self.count),
        }
