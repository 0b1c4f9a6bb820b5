"""The merges of a vocabulary: the native derivation beside the definitions, written out plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from ork.strings import StringTable

LETTERS = "ab \u00e9\u2581\U0001f680"  # one to four bytes, and the space that divides a merge
WORDS = st.lists(st.text(LETTERS, max_size=7), max_size=24)


def arrays(texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = StringTable.of(texts)
    return np.frombuffer(table.data, np.uint8), table.starts, table.lengths


def flags(count: int, without: set[int]) -> np.ndarray:
    return np.array([i not in without for i in range(count)], np.uint8)


def known(texts: Sequence[str], mergeable: np.ndarray) -> dict[str, int]:
    ids: dict[str, int] = {}
    for i, text in enumerate(texts):
        if text and mergeable[i]:
            ids.setdefault(text, i)
    return ids


def joined(parts: list[str], rank: Mapping[tuple[str, str], int]) -> list[str]:
    """Joins the best pair, the leftmost on a tie, until two parts are left or none can be joined."""
    while len(parts) > 2 and (pairs := [(rank[p], i) for i, p in enumerate(pairwise(parts)) if p in rank]):
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


class AnyPair(dict[tuple[str, str], int]):
    """A pair ranks as the token that it makes."""

    def __init__(self, rank: Mapping[str, int]):
        self.rank = rank

    def __contains__(self, pair: object) -> bool:
        return isinstance(pair, tuple) and pair[0] + pair[1] in self.rank

    def __getitem__(self, pair: tuple[str, str]) -> int:
        return self.rank[pair[0] + pair[1]]


@given(words=WORDS, without=st.sets(st.integers(0, 23)), seed=st.integers(0, 99))
@settings(max_examples=200)
def test_merges_by_score_are_those_of_sentencepiece(words: list[str], without: set[int], seed: int) -> None:
    texts, mergeable = [*LETTERS, *words], flags(6 + len(words), {6 + i for i in without} | {seed % 12})
    scores = np.random.default_rng(seed).integers(-4, 4, len(texts)).astype(np.float64)  # with ties
    ids = known(texts, mergeable)
    order = sorted(ids, key=lambda text: (-scores[ids[text]], -len(text), ids[text]))
    rank = AnyPair({text: r for r, text in enumerate(order)})
    expected = []
    for text in order:
        parts = joined(list(text), rank)
        if len(parts) == 2 and parts[0] in ids and parts[1] in ids:
            expected.append([ids[parts[0]], ids[parts[1]], ids[text]])
    assert native.merges_by_score(*arrays(texts), mergeable, scores).tolist() == expected
    assert native.distinct_texts(*arrays(texts), mergeable).tolist() == sorted(ids.values())


@given(
    words=WORDS,
    without=st.sets(st.integers(0, 23)),
    listed=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 6)), max_size=40),
    spaced=st.booleans(),
)
@settings(max_examples=200)
def test_of_listed_merges_one_a_token_stays(
    words: list[str], without: set[int], listed: list[tuple[int, int]], spaced: bool
) -> None:
    """`listed` are splits (token, characters of the left part), in any order and more than once."""
    texts, mergeable = [*LETTERS, *words], flags(6 + len(words), {6 + i for i in without})
    pairs = [(t[:cut], t[cut:]) for i, cut in listed for t in [texts[i % len(texts)]]]
    lines = [f"{left} {right}" for left, right in pairs]
    if spaced:  # as a GGUF lists them: what is in front of the first space that is not the first character
        cuts = None
        pairs = [(m[:1] + m[1:].partition(" ")[0], m[1:].partition(" ")[2]) for m in lines]
    else:
        cuts = np.array([len(left.encode()) for left, _ in pairs], np.uint64)
    ids = known(texts, mergeable)
    rank: dict[tuple[str, str], int] = {}
    for r, (left, right) in enumerate(pairs):
        if left in ids and right in ids and left + right in ids:
            rank.setdefault((left, right), r)
    kept = list(rank)
    if len({left + right for left, right in kept}) < len(kept):
        last = {tuple(joined(list(left + right), rank)) for left, right in kept}
        kept = sorted((pair for pair in rank if pair in last), key=rank.__getitem__)
    expected = [[ids[left], ids[right], ids[left + right]] for left, right in kept]
    assert native.merges_as_listed(*arrays(texts), mergeable, *arrays(lines), cuts).tolist() == expected


@given(words=st.lists(st.text("ab", min_size=2, max_size=6), max_size=12, unique=True), text=st.text("ab", max_size=16))
def test_one_merge_of_each_token_is_enough(words: list[str], text: str) -> None:
    texts = ["a", "b", *words]
    rank: dict[tuple[str, str], int] = {}
    for word in words:  # every split of every word, in any order of words
        for i in range(1, len(word)):
            if word[:i] in texts and word[i:] in texts:
                rank[word[:i], word[i:]] = len(rank)

    def merged(rank: Mapping[tuple[str, str], int]) -> list[str]:
        parts = list(text)
        while pairs := [(rank[p], i) for i, p in enumerate(pairwise(parts)) if p in rank]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    mergeable, lines = np.ones(len(texts), np.uint8), [f"{left} {right}" for left, right in rank]
    kept = native.merges_as_listed(*arrays(texts), mergeable, *arrays(lines), None).tolist()
    few = {(texts[left], texts[right]): rank[texts[left], texts[right]] for left, right, _ in kept}
    assert merged(few) == merged(rank)
    assert len({result for _, _, result in kept}) == len(kept)


def test_a_text_of_a_million_characters_takes_no_time() -> None:
    texts = ["a", *("a" * 2**k for k in range(1, 21))]
    scores = -np.arange(len(texts), dtype=np.float64)
    merges = native.merges_by_score(*arrays(texts), np.ones(len(texts), np.uint8), scores)
    assert merges.tolist() == [[k, k, k + 1] for k in range(20)]


def test_texts_that_are_not_utf8_stay_inside_their_bytes() -> None:
    texts = [b"\xff\xf0", b"\xf0", b"\x80", b"\xe0\x80", b" \xf0", b"a\xff"]
    ones = np.ones(len(texts), np.uint8)
    native.merges_by_score(*arrays(texts), ones, np.zeros(len(texts)))
    native.merges_as_listed(*arrays(texts), ones, *arrays(texts), None)
    data, starts, lengths = arrays(texts)
    with pytest.raises(ValueError, match="outside"):
        native.distinct_texts(data, starts, lengths + np.uint64(1), ones)
    with pytest.raises(ValueError, match="flag"):
        native.distinct_texts(data, starts, lengths, ones[1:])
    with pytest.raises(ValueError, match="score"):
        native.merges_by_score(data, starts, lengths, ones, np.zeros(1))
    with pytest.raises(ValueError, match="cut"):
        native.merges_as_listed(data, starts, lengths, ones, data, starts, lengths, starts[1:])


@given(st.lists(st.binary(max_size=4), max_size=12), st.booleans())
def test_a_table_of_utf8_decodes_as_its_strings_do(items: list[bytes], apart: bool) -> None:
    table = StringTable.of(items)
    if apart:  # as in a file: something lies between the strings
        gapped = b"".join(b"\xe2\x82" + item for item in items)
        table = StringTable(gapped, table.starts + 2 * np.arange(1, len(items) + 1, dtype=np.uint64), table.lengths)
    texts, characters = table.utf8().decoded()
    assert texts == table[:] == [item.decode("utf-8", "replace") for item in items]
    assert characters.tolist() == [len(text) for text in texts]
