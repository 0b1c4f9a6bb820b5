"""The solver against brute force, and its promises: within the budget, exact, monotone."""

from __future__ import annotations

from itertools import pairwise, product
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.quant.allocation import PAGE, BudgetTooSmall, Option, pareto, solve, together

pages = st.integers(1, 60)
pages_and_error = st.tuples(pages, st.floats(0, 1))
option = st.builds(lambda n, e: Option("i4", 0, n * PAGE, e), pages, st.floats(0, 1))
model = st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=5)


def least(tensors: list[list[Option]]) -> int:
    return sum(min(o.nbytes for o in options) for options in tensors)


@settings(max_examples=150, deadline=None)
@given(model, st.integers(0, 200 * PAGE))
def test_no_other_choice_within_the_budget_is_better(tensors: list[list[Option]], extra: int) -> None:
    budget = least(tensors) + extra
    picked = solve(tensors, budget)
    assert all(o in options for o, options in zip(picked, tensors))
    assert sum(o.nbytes for o in picked) <= budget
    best = min(sum(o.error for o in c) for c in product(*tensors) if sum(o.nbytes for o in c) <= budget)
    assert sum(o.error for o in picked) == pytest.approx(best, rel=1e-12, abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(model, st.lists(st.integers(0, 300 * PAGE), min_size=2, max_size=8), st.sampled_from([1, 997, 40_009]))
def test_more_bytes_never_mean_more_error(tensors: list[list[Option]], extras: list[int], scale: int) -> None:
    """Also where a step is many pages (scale), so that bytes are rounded."""
    grown = [[Option(o.codec, o.group, o.nbytes * scale, o.error) for o in options] for options in tensors]
    errors = []
    for extra in sorted(extras):
        budget = least(grown) + extra * scale
        picked = solve(grown, budget)
        assert sum(o.nbytes for o in picked) <= budget
        errors.append(sum(o.error for o in picked))
    assert all(b <= a + 1e-12 for a, b in pairwise(errors))


def test_everything_that_is_affordable_is_taken() -> None:
    tensors = [[Option("i4", 0, PAGE, 1.0), Option("i8", 0, 2 * PAGE, 0.1)]] * 200
    assert {o.codec for o in solve(tensors, 400 * PAGE)} == {"i8"}
    assert sum(o.codec == "i8" for o in solve(tensors, 300 * PAGE + 1)) == 100
    assert {o.codec for o in solve(tensors, 200 * PAGE)} == {"i4"}


def test_a_budget_that_holds_nothing_says_what_would() -> None:
    tensors = [[Option("i4", 0, 3 * PAGE, 1.0)], [Option("i4", 0, 2 * PAGE, 1.0)]]
    with pytest.raises(BudgetTooSmall) as e:
        solve(tensors, 5 * PAGE - 1)
    assert e.value.least == 5 * PAGE


@pytest.mark.parametrize("error", [nan, -1.0])
def test_errors_that_are_none_are_refused(error: float) -> None:
    with pytest.raises(ValueError, match="error"):
        solve([[Option("i4", 0, PAGE, error)]], PAGE)
    with pytest.raises(ValueError, match="options"):
        solve([[]], PAGE)
    assert solve([[Option("i4", 0, PAGE, inf)]], PAGE)[0].error == inf


def test_of_equal_options_the_smaller_stays() -> None:
    small, big = Option("nf4", 64, PAGE, 0.5), Option("i4", 64, 2 * PAGE, 0.5)
    assert pareto([big, small]) == [small]
    assert solve([[big, small]], 10 * PAGE) == [small]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tensors_that_read_the_same_rows_get_the_best_choice_of_one_group(data: st.DataObject) -> None:
    groups = data.draw(st.sets(st.sampled_from([0, 32, 64, 128]), min_size=1, max_size=3))
    codec = st.lists(st.sampled_from(["nf4", "i4", "i8"]), min_size=1, max_size=3, unique=True)
    tensors = [
        [Option(c, g, n * PAGE, e) for g in groups for c in data.draw(codec) for n, e in [data.draw(pages_and_error)]]
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    budget = least(tensors) + data.draw(st.integers(0, 100)) * PAGE
    alike = [c for c in product(*tensors) if len({o.group for o in c}) == 1]
    affordable = [c for c in alike if sum(o.nbytes for o in c) <= budget]
    if not affordable:
        with pytest.raises(BudgetTooSmall) as e:
            solve([together(tensors)], budget)
        assert e.value.least == min(sum(o.nbytes for o in c) for c in alike)
        return
    (joint,) = solve([together(tensors)], budget)
    assert joint.options in affordable
    assert (joint.nbytes, joint.error) == (sum(o.nbytes for o in joint.options), sum(o.error for o in joint.options))
    assert joint.error == pytest.approx(min(sum(o.error for o in c) for c in affordable), rel=1e-12, abs=1e-15)
