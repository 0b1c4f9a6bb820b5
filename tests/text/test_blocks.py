"""Long texts become tokens a block at a time; blocks are small here, so that every text is long."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.errors import PackDamaged, UsageError
from ork.text import blocks
from ork.text.pretokenizers import TABLE
from ork.text.tokenizer import Tokenizer, build_tokenizer
from tests.text.test_tokenizer import document, from_document, whole_from
from tests.text.vocabs import TINY, tokenizer, with_keys

# What pre-tokenizers look at: runs of each class of characters, contractions, all kinds of blanks.
CHARACTERS = ["a", "A", "é", "1", " ", "\n", "\r\n", "\t", "-", "!", "'", "中", "か", "\u0301", "а"]
PIECES = ["the ", " Software", "it's", "'LL", "12345", "我们", " (c)", "\n\n  ", "<tag>", "x_y", "A'd", "。"]
RUN = st.builds(str.__mul__, st.sampled_from(CHARACTERS), st.integers(1, 40))
TEXT = st.lists(RUN | st.sampled_from(PIECES), min_size=8).map("".join)

MARK = "\u2581"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BEHIND = {"type": "Split", "pattern": {"Regex": "(?<=the ).| "}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, SPACES]}
MERGES = [["t", "h"], ["th", "e"], [MARK, "the"], [MARK, "S"], ["o", "f"], ["1", "2"]]


def sentencepiece() -> dict[str, Any]:
    """The model of a tokenizer.json that spells spaces as U+2581."""
    vocab = {t: i for i, t in enumerate(TINY["spm"]["metadata"]["tokenizer.ggml.tokens"])}
    for made in map("".join, MERGES):
        vocab.setdefault(made, len(vocab))
    return {
        "type": "BPE",
        "vocab": vocab,
        "merges": MERGES,
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }


SPELLINGS = {
    "prepended": {"normalizer": PREPENDED, "pre_tokenizer": None, "model": sentencepiece(), "added_tokens": []},
    "metaspace": {"pre_tokenizer": METASPACE | {"split": True}, "model": sentencepiece(), "added_tokens": []},
    "unsplit": {"pre_tokenizer": METASPACE | {"split": False}, "model": sentencepiece(), "added_tokens": []},
    "composed": {"normalizer": {"type": "NFC"}},
    "stripped": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    "prefixed": {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
    "looks back": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BEHIND, BYTES | {"use_regex": False}]}},
    "leaves out": {"pre_tokenizer": None},
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 32)


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    with whole_from(-1):
        yield


def in_blocks(t: Tokenizer, text: str) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 32)
        return t.encode(text, special=False)


@lru_cache
def of_kind(pre: str) -> Tokenizer:
    return Tokenizer.load(build_tokenizer(with_keys("bpe", pre=pre)))


@lru_cache
def spelled(name: str) -> Tokenizer:
    return from_document(document(**SPELLINGS[name]))


@pytest.mark.parametrize("pre", [*(row.names[0] for row in TABLE), "gemma4"])
@settings(max_examples=30)
@given(text=TEXT)
def test_every_kind_of_words(pre: str, text: str) -> None:
    assert in_blocks(of_kind(pre), text) == of_kind(pre).encode(text, special=False)


@settings(max_examples=30)
@given(text=TEXT)
def test_a_text_without_words(text: str) -> None:
    assert in_blocks(tokenizer("spm"), text) == tokenizer("spm").encode(text, special=False)


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=30)
@given(text=TEXT)
def test_every_way_to_spell(name: str, text: str) -> None:
    assert in_blocks(spelled(name), text) == spelled(name).encode(text, special=False)


class Counting:
    """A library that notes how much it gets at once."""

    def __init__(self, inner: Any, seen: list[int]):
        self.inner, self.seen = inner, seen

    def encode(self, text: str, **options: Any) -> Any:
        self.seen.append(len(text))
        return self.inner.encode(text, **options)


@pytest.mark.parametrize("name", ["bpe", "spm"])
@pytest.mark.parametrize(
    "text", ["the thin thing. " * 20, "我们，中。" * 100, "1 2\n" * 100], ids=["words", "han", "digits"]
)
@pytest.mark.usefixtures("small")
def test_the_library_gets_a_block_at_a_time(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t, seen = Tokenizer.load(build_tokenizer(with_keys(name))), []  # type: tuple[Tokenizer, list[int]]
    library = t._library
    monkeypatch.setattr(t, "_library", lambda *args: Counting(library(*args), seen))
    t.encode(text)
    assert max(seen) <= 128 < len(text)


@pytest.mark.usefixtures("small")
def test_a_word_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONGEST", 256)
    t = tokenizer("bpe")
    letter = next(a for a, b in t._pairs if a == b and a.isascii() and a.isalpha())
    text = "the " * 20 + letter * 100 + " the" * 20
    assert t.decode(t.encode(text)) == text
    with pytest.raises(UsageError, match=r"has 256 characters in a row that are one word, from character \d\d on"):
        t.encode("the " * 20 + letter * 600)


def test_a_run_of_spaces_takes_time_by_its_length() -> None:
    """Not by the square of it, which are minutes."""
    text = "a" + " " * 200_000 + "b"
    assert of_kind("deepseek-llm").decode(of_kind("deepseek-llm").encode(text, bos=False)) == text


def test_a_pattern_that_the_library_gives_up_on_is_one_error() -> None:
    """It panics, which is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": r"(a|a)*\p{Lu}"}, "behavior": "Isolated", "invert": False}
    t = from_document(document(pre_tokenizer=split))
    with pytest.raises(PackDamaged, match="the tokenizer in the pack is inconsistent"):
        t.encode("a" * 60 + "b")
