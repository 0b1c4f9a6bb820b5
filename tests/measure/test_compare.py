"""Reported figures from per-token ones, against llama-perplexity's formulas spelt out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ork.measure.compare import comparison, perplexity


def test_perplexity_and_its_error() -> None:
    nll = np.random.default_rng(0).gamma(2, 1.5, 1000)
    n, mean = len(nll), nll.mean()
    error = math.sqrt(((nll**2).mean() - mean**2) / (n - 1))  # tools/perplexity: sqrt(var / (count - 1))
    found = perplexity(nll)
    assert found.tokens == n
    assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-12)
    assert found.error == pytest.approx(math.exp(mean) * error, rel=1e-9)


def test_a_comparison() -> None:
    rng = np.random.default_rng(1)
    base = rng.gamma(2, 1.5, 2000)
    nll = np.stack([base, base + 0.1 * rng.standard_normal(2000) + 0.02], axis=1)
    kl = rng.gamma(1, 0.01, 2000)
    same = rng.random(2000) < 0.9
    c = comparison(nll, kl, same)
    n = 2000
    a, b = nll.T
    errors = [math.sqrt(((x**2).mean() - x.mean() ** 2) / (n - 1)) for x in (a, b)]
    covariance = ((a * b).mean() - a.mean() * b.mean()) / (n - 1)
    ratio = math.exp(b.mean() - a.mean())
    assert c.ratio == pytest.approx(ratio)
    assert c.ratio_error == pytest.approx(ratio * math.sqrt(errors[0] ** 2 + errors[1] ** 2 - 2 * covariance), rel=1e-6)
    assert (c.reference, c.perplexity) == (pytest.approx(math.exp(a.mean())), pytest.approx(math.exp(b.mean())))
    assert c.kl == pytest.approx(kl.mean())
    at = 0.999 * (n - 1)
    low, high = np.sort(kl)[[int(at), int(at) + 1]]
    assert c.kl_999 == pytest.approx(low + (at - int(at)) * (high - low))
    assert (c.kl_median, c.kl_max) == (pytest.approx(np.median(kl)), kl.max())
    assert c.top1 == pytest.approx(same.mean())
    assert c.top1_error == pytest.approx(math.sqrt(c.top1 * (1 - c.top1) / (n - 1)))


def test_one_prediction_has_no_error_and_a_broken_model_no_finite_perplexity() -> None:
    assert perplexity(np.array([1.0])).error == math.inf
    assert perplexity(np.full(3, 1e4)).perplexity == math.inf
