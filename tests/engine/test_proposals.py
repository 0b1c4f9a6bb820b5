"""How many tokens are proposed, and which the prompt's own text proposes."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ork.engine.draft import relative_cost
from ork.engine.ngram import LONGEST, SHORTEST, lookup
from ork.engine.speculative import Pace

# --- how many are proposed


def run_pace(pace: Pace, share: float, passes: int) -> list[int]:
    """Proposals of each pass, if each is right with an evenly spread share."""
    out, credit = [], 0.0
    for _ in range(passes):
        k = pace.next()
        out.append(k)
        for _ in range(k):
            credit += share
            right = credit >= 1.0
            credit -= right
            pace.count(right)
            if not right:
                break
    return out


def test_the_pace_follows_the_share_of_right_proposals() -> None:
    assert run_pace(Pace(0.3, 8), 1.0, 60)[-1] == 8
    assert run_pace(Pace(0.3, 5), 1.0, 60)[-1] == 5
    means = [np.mean(run_pace(Pace(0.3, 8), share, 200)[50:]) for share in (0.2, 0.5, 0.7, 0.8, 0.9)]
    assert means == sorted(means)
    assert means[0] < 0.3
    assert 1 <= means[2] < 3.5 < means[4]
    cheap = [np.mean(run_pace(Pace(cost, 8), 0.8, 200)) for cost in (1.2, 0.5, 0.2, 0.0)]
    assert cheap == sorted(cheap)


def test_the_pace_rests_and_tries_again() -> None:
    ks = run_pace(Pace(0.3, 8), 0.0, 200)
    assert ks[0] > 0
    assert 0 < sum(k > 0 for k in ks[20:]) < 40
    assert run_pace(Pace(0.3, 8), 0.6, 100) == run_pace(Pace(0.3, 8), 0.6, 100)


def test_a_streamed_model_is_dearer_than_its_bytes() -> None:
    assert relative_cost(300, 1000, None) == 0.3
    assert relative_cost(300, 1000, 2000) == 0.3
    assert relative_cost(300, 1000, 500) < relative_cost(300, 1000, 900) < 0.3


# --- prompt look-up


def matches(text: list[int]) -> dict[int, int]:
    """For every earlier place that can be continued: how many tokens before it equal the text's end."""
    out = {}
    for start in range(1, len(text)):
        n = 0
        while n < min(start, LONGEST) and text[start - 1 - n] == text[-1 - n]:
            n += 1
        out[start] = n
    return out


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 9))
@example([1] * 100, 5)
@example([1, 2], 3)
@settings(max_examples=150)
def test_look_up_continues_the_longest_and_last_match(text: list[int], most: int) -> None:
    found = matches(text)
    longest = max(found.values(), default=0)
    got = lookup(text, most)
    if longest < SHORTEST:
        assert got == []
        return
    start = max(s for s, n in found.items() if n == longest)
    want = text[start:]
    while len(want) < most:
        want = want + want
    assert got == want[:most]
