"""Generation: where a text ends, what is reused, and that nothing that happens on the way leaves a trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ork
from ork.engine.kvcache import Sequence
from ork.engine.sampling import SamplingParams
from ork.engine.session import Session, Stats, StopWindow
from ork.errors import UsageError
from tests import tiny

GREEDY = SamplingParams()
SAID = "The-wizard's böx"  # no byte twice
CONTEXT = 300


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ork.LoadedModel]:
    """Says SAID after a T, then stops."""
    with ork.load(tiny.speaking_gguf(tmp_path_factory.mktemp("speaking") / "x.gguf", SAID)) as model:
        yield model


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ork.LoadedModel]:
    """abcdefgh, again and again."""
    path = tiny.speaking_gguf(tmp_path_factory.mktemp("endless") / "x.gguf", "abcdefgh", tail="a")
    with ork.load(path, n_ctx=CONTEXT) as model:
        yield model


@pytest.fixture(scope="module")
def rambling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ork.LoadedModel]:
    """Random weights: every token of the prompt has a say in what follows. Room for two sequences."""
    path = tiny.random_gguf(tmp_path_factory.mktemp("rambling") / "x.gguf", "qwen3")
    with ork.load(path, n_ctx=600, sequences=2) as model:
        yield model


def text_of(model: ork.LoadedModel, prompt: str, n: int = -1, **more: object) -> tuple[str, Stats]:
    stats = Stats()
    return "".join(model.generate(prompt, max_tokens=n, stats=stats, **more)), stats  # type: ignore[arg-type]


# --- where a text ends


def test_an_end_token_ends_it(speaking: ork.LoadedModel) -> None:
    text, stats = text_of(speaking, "T")
    assert text == SAID[1:]
    assert stats.reason == "stop"
    assert stats.prompt_tokens == 1
    assert stats.new_tokens == len(SAID.encode()) - 1


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_limit_ends_it(speaking: ork.LoadedModel, limit: int) -> None:
    text, stats = text_of(speaking, "T", limit)
    assert text == SAID[1 : 1 + limit]
    assert (stats.reason, stats.new_tokens) == ("length", limit)


def test_a_cut_character_is_shown_as_such(speaking: ork.LoadedModel) -> None:
    cut = len(SAID.encode()[1 : SAID.encode().index("ö".encode()) + 1])
    text, _ = text_of(speaking, "T", cut)
    assert text == SAID[1 : SAID.index("ö")] + "\N{REPLACEMENT CHARACTER}"


def test_characters_come_whole(speaking: ork.LoadedModel) -> None:
    pieces = list(speaking.generate("T"))
    assert "ö" in pieces
    assert all(pieces)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["wiz"], "he-"),
        (["iz", "wizard"], "he-w"),  # complete first
        (["wizard", "zar"], "he-wi"),
        (["d's b"], "he-wizar"),
        (["b\N{LATIN SMALL LETTER O WITH DIAERESIS}"], "he-wizard's "),
        (["wizzard", "x!"], "he-wizard's böx"),
        (["h"], ""),
        ([""], "he-wizard's böx"),
    ],
)
def test_a_stop_text_ends_it(speaking: ork.LoadedModel, stops: list[str], text: str) -> None:
    got, stats = text_of(speaking, "T", stop=stops)
    assert got == text
    assert stats.reason == "stop"


def test_a_limit_shows_what_was_held_back(speaking: ork.LoadedModel) -> None:
    text, stats = text_of(speaking, "T", 5, stop=["wizened"])
    assert (text, stats.reason) == ("he-wi", "length")


def test_a_full_context_ends_it(endless: ork.LoadedModel) -> None:
    text, stats = text_of(endless, "a")
    assert stats.reason == "context"
    assert text == "".join(islice(iter("bcdefgha" * CONTEXT), CONTEXT))
    assert stats.new_tokens == CONTEXT  # the last of them is never fed


def test_a_prompt_that_fills_the_context(endless: ork.LoadedModel) -> None:
    text, stats = text_of(endless, "abcdefgh" * 37 + "abcd")
    assert (text, stats.reason) == ("e", "context")
    with pytest.raises(UsageError, match=r"prompt of 301 tokens is longer than the context of 300.*larger -c"):
        text_of(endless, "abcdefgh" * 37 + "abcde")
    assert endless.engine.pool.used_blocks == 0


def test_an_empty_prompt(endless: ork.LoadedModel) -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        text_of(endless, "")


# --- what is reused


def tokens(model: ork.LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text)


def answer(session: Session, prompt: list[int], n: int = 12) -> tuple[str, Stats]:
    stats = Stats()
    return "".join(session.generate(prompt, GREEDY, limit=n, stats=stats)), stats


PROMPTS = [
    "the quick brown fox jumps over the lazy dog. " * 8,
    "the quick brown fox jumps over the lazy dog. " * 8 + "And then?",
    "the quick brown cat",
    "something else",
    "something",
    "something",
]


def test_a_reused_prefix_changes_nothing(rambling: ork.LoadedModel) -> None:
    session = Session(rambling.engine, rambling.tokenizer)
    reused = []
    for prompt in PROMPTS:
        text, stats = answer(session, tokens(rambling, prompt))
        assert text == text_of(rambling, prompt, 12)[0]
        assert stats.prompt_tokens + stats.cached_tokens == len(tokens(rambling, prompt))
        reused.append(stats.cached_tokens)
        assert session.seq.length == len(session.tokens)
    lengths = [len(tokens(rambling, p)) for p in PROMPTS]
    assert reused[0] == 0
    assert lengths[0] - 2 <= reused[1] <= lengths[0]
    assert reused[3] == 0
    assert reused[5] == lengths[5] - 1  # one token is computed again: its logits are needed
    session.close()
    assert rambling.engine.pool.used_blocks == 0


def test_going_on_with_what_was_generated_computes_only_the_new(rambling: ork.LoadedModel) -> None:
    session = Session(rambling.engine, rambling.tokenizer)
    first = tokens(rambling, PROMPTS[0])
    answer(session, first)
    more = [*session.tokens, 70, 71, 72]
    held = len(session.tokens)
    assert held == len(first) + 11
    text, stats = answer(session, more)
    assert (stats.cached_tokens, stats.prompt_tokens) == (held, 3)
    session.close()
    assert text == answer(session, more)[0]
    session.close()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_generation_that_is_left_leaves_the_session_whole(rambling: ork.LoadedModel, taken: int) -> None:
    session = Session(rambling.engine, rambling.tokenizer)
    prompt = tokens(rambling, PROMPTS[0])
    stats = Stats()
    pieces = session.generate(prompt, GREEDY, limit=30, stats=stats)
    shown = [next(pieces) for _ in range(taken)]
    pieces.close()  # type: ignore[attr-defined]
    assert stats.reason == ("interrupted" if taken else "")
    assert "".join(shown) == "".join(islice(rambling.generate(PROMPTS[0], max_tokens=30), taken))
    assert session.seq.length == len(session.tokens)
    assert answer(session, prompt)[0] == text_of(rambling, PROMPTS[0], 12)[0]
    session.close()


def test_an_interrupt_within_a_pass(rambling: ork.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two operations: positions that were taken but not computed are not believed later."""
    session = Session(rambling.engine, rambling.tokenizer)
    prompt = tokens(rambling, PROMPTS[0])
    real = rambling.model.ends.logits  # type: ignore[attr-defined]
    for passes in (1, 3):
        left = passes

        def interrupting(x: object, rows: object) -> object:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return real(x, rows)

        monkeypatch.setattr(rambling.model.ends, "logits", interrupting)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            answer(session, prompt)
        monkeypatch.undo()
        assert answer(session, prompt)[0] == text_of(rambling, PROMPTS[0], 12)[0]
    session.close()


def test_sequences_fill_the_pool_each_to_its_context(rambling: ork.LoadedModel) -> None:
    """600 positions are three blocks: two sequences of 600 need six, not five."""
    seqs = [Sequence(), Sequence()]
    for seq in seqs:
        rambling.engine.prefill(seq, [5] * 600)
        with pytest.raises(UsageError, match="longer than the context of 600"):
            rambling.engine.forward([(seq, [5])])
    for seq in seqs:
        rambling.engine.pool.truncate(seq, 0)


def test_a_pass_that_does_not_fit_takes_nothing(rambling: ork.LoadedModel) -> None:
    seqs = [Sequence() for _ in range(3)]
    with pytest.raises(UsageError, match="KV cache is full"):
        rambling.engine.forward([(s, [5] * 600) for s in seqs])
    assert [s.length for s in seqs] == [0, 0, 0]
    assert rambling.engine.pool.used_blocks == 0


def test_tokens_outside_of_the_vocabulary(rambling: ork.LoadedModel) -> None:
    for bad in (-1, tiny.VOCAB):
        with pytest.raises(UsageError, match="outside of the vocabulary"):
            rambling.logits([1, bad])
    assert rambling.engine.pool.used_blocks == 0


def test_the_prompt_counts_as_said(rambling: ork.LoadedModel) -> None:
    """The repetition penalty begins with the tokens of the prompt."""
    changed = 0
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(3, 259, 40).tolist()
        session = Session(rambling.engine, rambling.tokenizer)
        params = SamplingParams(repeat_penalty=3.0)
        list(session.generate(prompt, params, limit=2))
        logits = rambling.logits(prompt)[-1]
        penalised = logits.copy()
        seen = sorted(set(prompt))
        penalised[seen] = np.where(logits[seen] > 0, logits[seen] / np.float32(3), logits[seen] * np.float32(3))
        if session.tokens[len(prompt) :]:  # nothing if it was an end token
            assert session.tokens[len(prompt)] == penalised.argmax()
        changed += penalised.argmax() != logits.argmax()
        session.close()
    assert changed >= 2


# --- the Python API


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    path = tiny.speaking_gguf(tmp_path / "x.gguf", "abc")
    for bad in ({"threads": 0}, {"threads": 257}, {"n_ctx": 0}, {"n_ctx": 2049}, {"kv": "i8"}, {"device": "gpu"}):
        with pytest.raises(UsageError):
            ork.load(path, **bad)  # type: ignore[arg-type]


def test_chats_remember_and_let_go(speaking: ork.LoadedModel) -> None:
    pool = speaking.engine.pool
    for _ in range(3):
        chat = speaking.chat()
        stats = Stats()
        first = "".join(chat.send("hello T", stats=stats))
        assert stats.cached_tokens == 0
        assert [m["role"] for m in chat.messages] == ["user", "assistant"]
        assert chat.messages[1]["content"] == first
        "".join(chat.send("and T again", stats=stats))
        assert stats.cached_tokens > 10
        assert len(chat.messages) == 4
        assert pool.used_blocks > 0
        del chat
        assert pool.used_blocks == 0


def test_a_chat_message_that_does_not_fit_is_not_remembered(endless: ork.LoadedModel) -> None:
    chat = endless.chat()
    with pytest.raises(UsageError, match="longer than the context"):
        list(chat.send("x" * 400))
    assert chat.messages == []
    assert list(chat.send("x", max_tokens=3)) == ["a", "b", "c"]


def test_a_template_that_refuses_leaves_the_messages_alone(tmp_path: Path) -> None:
    picky = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}" + tiny.TEMPLATE
    path = tiny.speaking_gguf(tmp_path / "x.gguf", "abc", **{"tokenizer.chat_template": picky})
    with ork.load(path) as model:
        chat = model.chat()
        with pytest.raises(UsageError, match="not this"):
            list(chat.send("no"))
        assert chat.messages == []
        assert "".join(chat.send("yes")) == "abc"


def test_logits_have_a_row_a_token(rambling: ork.LoadedModel) -> None:
    text = tokens(rambling, PROMPTS[0])
    whole = rambling.logits(text)
    assert whole.shape == (len(text), tiny.VOCAB)
    assert np.array_equal(rambling.logits(text, chunk=7), whole)
    assert rambling.engine.pool.used_blocks == 0


# --- the window in which a stop text is looked for

ALPHABET = st.text("ab", max_size=12)


@given(ALPHABET, st.lists(st.text("ab", max_size=4), max_size=3), st.lists(st.integers(1, 8), max_size=12))
@example("aabab", ["bab", "ab"], [5])
@example("aabab", ["abab", "b"], [1, 4])
@settings(max_examples=150)
def test_the_window_finds_what_find_finds(text: str, stops: list[str], sizes: list[int]) -> None:
    """However the text is cut: everything before the stop text that is complete first, and never a letter more."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s and s in text]
    want = text[: min(ends)[1]] if ends else text
    cuts = [c for c in accumulate(sizes, initial=0) if c < len(text)] + [len(text)]
    window, shown, stopped = StopWindow(stops), "", False
    for a, b in pairwise(cuts):
        part, stopped = window.push(text[a:b])
        shown += part
        assert want.startswith(shown)
        if stopped:
            break
    assert stopped == bool(ends)
    assert shown + window.flush() == want


@given(ALPHABET, st.text("ab", min_size=1, max_size=5))
def test_the_window_holds_back_no_more_than_it_must(text: str, stop: str) -> None:
    window = StopWindow([stop])
    shown, stopped = window.push(text)
    if not stopped:
        held = text[len(shown) :]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[i:]) for i in range(len(shown)))
