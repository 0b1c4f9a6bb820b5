"""`ork run --draft`: the same text, what the draft was good for, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from ork.cli.run import DRAFT_MAX
from ork.engine.speculative import DEFAULT_MOST
from tests import tiny
from tests.cli.conftest import SAID, Ork

TEXT = SAID[1:] + "\n"


def test_the_text_is_the_same(ork: Ork, pack: Path, speaking: Path) -> None:
    for draft in (speaking, "ngram"):
        code, out, err = ork("run", pack, "-p", "T", "--draft", draft)
        assert (code, out) == (0, TEXT)
        assert re.search(r"ork: draft \S+: \d+ of \d+ proposed tokens right \(\d+ %\), [\d.]+ tokens a pass over", err)


def test_json_says_what_the_draft_did(ork: Ork, pack: Path, speaking: Path) -> None:
    prompt = SAID + "\nT"
    alone = json.loads(ork("run", pack, "-p", prompt, "--json")[1])
    assert not any("draft" in key for key in alone)
    about = json.loads(ork("run", pack, "-p", prompt, "--json", "--draft", "ngram", "--draft-max", "3")[1])
    assert about["text"] == alone["text"] == SAID[1:]
    assert (about["draft"], about["end"], about["new_tokens"]) == ("ngram", "stop", alone["new_tokens"])
    assert about["draft_passes"] < alone["new_tokens"] / 2
    assert 0 < about["draft_accepted"] <= about["draft_proposed"] <= 3 * about["draft_passes"]
    assert 2 < about["tokens_per_pass"] <= 4
    small = json.loads(ork("run", pack, "-p", prompt, "--json", "--draft", speaking)[1])
    assert Path(small["draft"]).name.startswith("speaking-")
    assert small["draft_proposed"] > 0


def test_a_chat_with_a_draft(ork: Ork, pack: Path) -> None:
    for draft in (pack, "ngram"):
        assert ork("run", pack, "--chat", "-p", "hello", "--draft", draft)[1] == SAID + "\n"


def test_the_default_is_the_engines() -> None:
    assert DRAFT_MAX == DEFAULT_MOST


def test_refusals(ork: Ork, refused: Callable[..., str], pack: Path, tmp_path: Path) -> None:
    tokens = [*tiny.TOKENS[:-1], "Ġthen"]
    other = tiny.random_gguf(tmp_path / "other.gguf", **{"tokenizer.ggml.tokens": tokens})
    assert ork("convert", other)[0] == 0
    line = refused("run", pack, "-p", "T", "--draft", other.with_suffix(".orkpack"), "--draft-max", 4)
    assert "other" in line
    assert "vocabularies differ" in line
    assert "nothing.gguf" in refused("run", pack, "-p", "T", "--draft", tmp_path / "nothing.gguf")
    assert "ork pull qwen2.5-coder-0.5b" in refused("run", pack, "-p", "T", "--draft", "qwen2.5-coder-0.5b")
    for bad in (0, 65):
        assert f"--draft-max {bad}" in refused("run", pack, "-p", "T", "--draft", "ngram", "--draft-max", bad)
    assert "goes with --draft" in refused("run", pack, "-p", "T", "--draft-max", 4)
