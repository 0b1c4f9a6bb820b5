"""From per-token figures to what is reported: means with their standard errors, as llama-perplexity counts them.

Everything is in nats. A standard error is that of a mean over tokens taken as independent (standard deviation over
sqrt(n)); of a perplexity e^m it is e^m times that of m. A ratio's error is that of the paired difference, which is
what the covariance term in llama-perplexity comes to.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` +- `error` over `tokens` predictions; `nll` is their mean -ln p."""

    tokens: int
    nll: float
    perplexity: float
    error: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """A model against a reference on the same predictions.

    kl = KL(reference || model): its mean, median, 99th and 99.9th percentile, maximum. top1: the share of positions at
    which both find the same token likeliest. ratio: the model's perplexity over the reference's.
    """

    tokens: int
    perplexity: float
    error: float
    reference: float
    reference_error: float
    ratio: float
    ratio_error: float
    kl: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_999: float
    kl_max: float
    top1: float
    top1_error: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


def mean_error(values: F64) -> tuple[float, float]:
    """The mean and its standard error; of a single value the error is not known: infinite."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.inf


def perplexity(nll: F64) -> Perplexity:
    """Of negative log-likelihoods [T]."""
    mean, error = mean_error(nll)
    value = _exp(mean)
    return Perplexity(len(nll), mean, value, value * error)


def comparison(nll: F64, kl: F64, same: npt.NDArray[np.bool_]) -> Comparison:
    """nll [T, 2] of the reference and of the model, kl [T], same [T]: whether both find the same token likeliest."""
    n = len(kl)
    reference, model = perplexity(nll[:, 0]), perplexity(nll[:, 1])
    difference, difference_error = mean_error(nll[:, 1] - nll[:, 0])
    ratio = _exp(difference)
    kl_mean, kl_error = mean_error(kl)
    median, kl_99, kl_999 = (float(x) for x in np.percentile(kl, (50, 99, 99.9)))
    top1 = float(same.mean())
    return Comparison(
        tokens=n,
        perplexity=model.perplexity,
        error=model.error,
        reference=reference.perplexity,
        reference_error=reference.error,
        ratio=ratio,
        ratio_error=ratio * difference_error,
        kl=kl_mean,
        kl_error=kl_error,
        kl_median=median,
        kl_99=kl_99,
        kl_999=kl_999,
        kl_max=float(kl.max()),
        top1=top1,
        top1_error=math.sqrt(top1 * (1 - top1) / (n - 1)) if n > 1 else math.inf,
    )


def _exp(x: float) -> float:
    """e^x, infinite where that is no double: a broken model's perplexity."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
