"""Sampling against the definitions of its filters, in float64."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ork.engine.sampling import PENALTY_WINDOW, Sampler, SamplingParams
from ork.errors import PackDamaged, UsageError

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits_of(seed: int, n: int = 40, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64) - x.max())
    return p / p.sum()


def distribution(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """llama.cpp's order: top-k, then top-p and min-p on what is left at temperature 1, then temperature."""
    order = np.argsort(-logits, kind="stable")
    order = order[: top_k or len(order)]
    p = softmax(logits[order])
    before = np.cumsum(p) - p
    keep = (before < top_p) & (p >= min_p * p[0])
    keep[0] = True
    order = order[: np.argmin(keep) if not keep.all() else len(order)]
    out = np.zeros(len(logits))
    out[order] = softmax(logits[order] / temperature)
    return out


def draws(logits: np.ndarray, count: int, seed: int = 0, **params: float) -> Counter[int]:
    sampler = Sampler(SamplingParams(seed=seed, **params))  # type: ignore[arg-type]
    return Counter(sampler.pick(logits) for _ in range(count))


# --- greedy


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.sampled_from([-3.0, 0.0, 1.5, 7.0, 7.5])))
def test_greedy_is_the_first_of_the_largest(logits: np.ndarray) -> None:
    assert Sampler(SamplingParams()).pick(logits) == int(np.argmax(logits))


def test_greedy_ignores_the_filters() -> None:
    logits = logits_of(0)
    assert Sampler(SamplingParams(top_k=1, top_p=0.0, min_p=1.0, seed=5)).pick(logits) == int(np.argmax(logits))


def test_logits_that_are_no_numbers() -> None:
    """No token comes out of a broken model; a few bad logits do not win."""
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1))
        with pytest.raises(PackDamaged, match="not numbers"):
            sampler.pick(np.full(20, np.nan, np.float32))
    logits = logits_of(1)
    logits[int(np.argmax(logits))] = np.nan
    assert Sampler(SamplingParams()).pick(logits) == int(np.nanargmax(logits))


# --- seeds


def test_a_seed_makes_it_repeatable() -> None:
    logits = [logits_of(i) for i in range(50)]

    def text(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed, **OFF))
        return [sampler.pick(x) for x in logits]

    assert text(7) == text(7)
    assert text(7) != text(8)
    assert text(None) != text(None)


# --- filters

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    }
)


@given(PARAMS, st.integers(0, 1000))
@settings(max_examples=60)
def test_only_what_the_filters_leave_is_drawn(params: dict, seed: int) -> None:
    logits = logits_of(seed)
    want = distribution(logits, **params)
    drawn = draws(logits, 200, seed, **params)
    assert all(want[token] > 0 for token in drawn)
    likely = {int(i) for i in np.flatnonzero(want > 0.08)}  # each missed with a chance below 1e-7
    assert likely <= set(drawn)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, **OFF},
        {"temperature": 0.7, "top_k": 10, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    ],
)
def test_tokens_come_as_often_as_they_should(params: dict) -> None:
    """Chi-square: the statistic of n cells has mean n - 1 and deviation sqrt(2 (n - 1))."""
    logits = logits_of(3, spread=0.8)
    want = distribution(logits, **params)
    count = 6000
    drawn = draws(logits, count, 11, **params)
    cells = np.flatnonzero(want * count >= 5)
    observed = np.array([drawn[int(i)] for i in cells], float)
    expected = want[cells] * count
    freedom = len(cells) - 1
    assert freedom >= 3
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
    assert observed.sum() > 0.95 * count


def test_no_filter_means_no_filter() -> None:
    """With all filters off a flat vocabulary of 5,000 is drawn from end to end."""
    flat = np.zeros(5000, np.float32)
    drawn = draws(flat, 300, temperature=1.0, **OFF)
    assert len(drawn) > 250
    assert max(drawn) > 4500
    assert sum(token >= 2500 for token in drawn) > 100
    assert max(draws(flat, 300, temperature=1.0, top_k=2000, top_p=1.0, min_p=0.0)) in range(1500, 2000)


# --- repetition penalty


def test_repetition_penalty() -> None:
    """Seen tokens: positive logits are divided, negative ones multiplied, once however often they were seen."""
    logits = np.array([2.0, 1.9, -1.0, -1.05], np.float32)
    sampler = Sampler(SamplingParams(repeat_penalty=1.1))
    assert sampler.pick(logits) == 0
    sampler.accept([0])
    assert sampler.pick(logits) == 1
    sampler.accept([1])
    assert sampler.pick(logits) == 0
    sampler.accept([0, 0, 0, 0])
    assert sampler.pick(logits) == 0  # 2 / 1.1 > 1.9 / 1.1
    low = logits[2:]
    sampler = Sampler(SamplingParams(repeat_penalty=1.1))
    sampler.accept([0])
    assert sampler.pick(low) == 1
    assert logits.tolist() == np.array([2.0, 1.9, -1.0, -1.05], np.float32).tolist()  # the caller's row is left alone


def test_the_penalty_looks_back_on_a_window() -> None:
    logits = np.array([2.0, 1.9] + [0.0] * 10, np.float32)
    sampler = Sampler(SamplingParams(repeat_penalty=1.5))
    sampler.accept([0, *[5] * (PENALTY_WINDOW - 1)])
    assert sampler.pick(logits) == 1
    sampler.accept([5])
    assert sampler.pick(logits) == 0


# --- values that make no sense


@pytest.mark.parametrize(
    ("name", "flag", "values"),
    [
        ("temperature", "--temp", [-0.1, 101.0, float("nan"), float("inf")]),
        ("top_k", "--top-k", [-1, 2**31]),
        ("top_p", "--top-p", [-0.1, 1.1, float("nan")]),
        ("min_p", "--min-p", [-0.1, 1.1]),
        ("repeat_penalty", "--repeat-penalty", [0.0, -1.0, 101.0, float("nan")]),
    ],
)
def test_refusals_name_the_flag(name: str, flag: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=flag):
            Sampler(SamplingParams(**{name: value}))  # type: ignore[arg-type]
