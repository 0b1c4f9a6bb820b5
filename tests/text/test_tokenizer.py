from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.errors import OrkError, PackDamaged, SourceError, UsageError
from ork.text import tokenizer as module
from ork.text.tokenizer import Tokenizer, build_tokenizer
from tests.text import reference
from tests.text.vocabs import TINY, as_metadata, tokenizer, with_keys

REFERENCE = {"bpe": reference.bpe, "spm": reference.spm}
# Text that reaches merges: pieces of the corpus, markers, blanks, digits, other scripts; arbitrary characters between.
PIECES = [
    *("the ", "Software", "copyright", "it's", " ", "  ", "\n", "\t", "12"),
    *("<tag>", "<|user|>", "на", "我", "🚀", "<0x41>"),
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)
BOTH = pytest.mark.parametrize("name", ["bpe", "spm"])


@contextmanager
def whole_from(characters: int) -> Iterator[None]:
    before, module.WHOLE_FROM = module.WHOLE_FROM, characters
    try:
        yield
    finally:
        module.WHOLE_FROM = before


@BOTH
def test_small_vocabularies_give_the_committed_tokens(name: str) -> None:
    t = tokenizer(name)
    for text, ids in TINY[name]["golden"]:
        assert t.encode(text, special=False, bos=False) == ids, text


@BOTH
@given(text=TEXT)
def test_tokens_are_those_of_the_plain_algorithm(name: str, text: str) -> None:
    assert tokenizer(name).encode(text, special=False, bos=False) == REFERENCE[name](TINY[name]["metadata"], text)


@BOTH
@given(text=TEXT, special=st.booleans())
def test_whole_and_restricted_vocabulary_agree(name: str, text: str, special: bool) -> None:
    with whole_from(10**9):
        few = tokenizer(name).encode(text, special)
    with whole_from(-1):
        assert tokenizer(name).encode(text, special) == few


@given(text=TEXT)
def test_bytes_come_back(text: str) -> None:
    t = tokenizer("bpe")
    assert t.decode(t.encode(text), special=True) == text


@given(text=TEXT.filter(lambda t: "<tag>" not in t and "\u2581" not in t))
def test_sentencepiece_comes_back_with_its_space(text: str) -> None:
    t = tokenizer("spm")
    assert t.decode(t.encode(text, special=False, bos=False)) == (" " + text if text else "")


@BOTH
@given(ids=st.lists(st.integers(0, 620), max_size=30), special=st.booleans())
def test_a_stream_is_the_whole_decoded(name: str, ids: list[int], special: bool) -> None:
    """Any tokens in any order: cut characters, lone continuation bytes, markers, numbers past the vocabulary."""
    t = tokenizer(name)
    stream = t.stream(special)
    pushed = [stream.push(i) for i in ids]
    assert "".join(pushed) + stream.flush() == t.decode(ids, special)
    assert stream.flush() == ""


@BOTH
def test_a_character_is_held_back_until_it_is_whole(name: str) -> None:
    t = tokenizer(name)
    ids = t.encode("🚀", bos=False)[-4:]
    stream = t.stream()
    assert [stream.push(i) for i in ids] == ["", "", "", "🚀"]
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"


@BOTH
def test_decoding_needs_no_encoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t = Tokenizer.load(build_tokenizer(as_metadata(TINY[name]["metadata"])))
    ids = tokenizer(name).encode("the Software")
    monkeypatch.setattr(module, "models", None)
    monkeypatch.setattr(module, "tokenizers", None)
    assert t.decode(ids).strip() == "the Software"


@BOTH
def test_markers_are_tokens_only_where_they_are_asked_for(name: str) -> None:
    t = tokenizer(name)
    user = TINY[name]["metadata"]["tokenizer.ggml.tokens"].index("<|user|>")
    assert t.encode("<|user|>", bos=False) == [user]
    typed = t.encode("<|user|>", special=False, bos=False)
    assert user not in typed
    assert t.decode(typed).strip() == "<|user|>"
    assert t.decode([user]) == ""
    assert t.decode([user], special=True) == t.piece(user) == "<|user|>"


def test_user_defined_tokens_are_found_in_any_text() -> None:
    t = tokenizer("bpe")
    tag = TINY["bpe"]["metadata"]["tokenizer.ggml.tokens"].index("<tag>")
    assert tag in t.encode("a<tag>b", special=False)
    assert t.decode(t.encode("a<tag>b")) == "a<tag>b"


def test_bos_is_the_models_choice_unless_told() -> None:
    spm, bpe = tokenizer("spm"), tokenizer("bpe")
    assert spm.encode("a")[0] == spm.bos == 1
    assert spm.encode("a", bos=False)[0] != 1
    assert spm.encode("<s>a").count(1) == 1  # a chat template has put it there already
    assert spm.encode("") == [1]
    assert bpe.encode("") == []
    assert bpe.encode("a", bos=True)[0] == bpe.bos
    none = Tokenizer.load(build_tokenizer(with_keys("bpe", bos_token_id=None)))
    with pytest.raises(UsageError, match="BOS"):
        none.encode("a", bos=True)


def test_space_prefix_follows_the_file() -> None:
    plain = Tokenizer.load(build_tokenizer(with_keys("spm", add_space_prefix=False)))
    assert plain.decode(plain.encode("the")) == "the"
    assert tokenizer("spm").decode(tokenizer("spm").encode("the")) == " the"


def test_ends_of_generation() -> None:
    assert tokenizer("spm").eog == {2}
    assert tokenizer("bpe").eog == {0}  # eos, and <|end|> by its text
    plain = with_keys("bpe", eos_token_id=5, token_type=[1, 3, 4, *[1] * 597])
    t = Tokenizer.load(build_tokenizer(plain))
    assert t.eog == {0, 5}  # <|end|> ends a generation though the file calls it a normal token
    assert t.is_control(0)


@pytest.mark.parametrize("text", ["\udcff", "a\ud83d", "\ud83d\ude80"])
def test_undecodable_arguments_are_encoded_as_replacement(text: str) -> None:
    t = tokenizer("bpe")
    assert t.decode(t.encode(text)) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- Hugging Face's tokenizer.json


FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def document(**changes: Any) -> dict[str, Any]:
    tiny = TINY["bpe"]["metadata"]
    tokens = tiny["tokenizer.ggml.tokens"]
    split = {"type": "Digits", "individual_digits": True}
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], "special": i < 2, **dict.fromkeys(FLAGS, False)} for i in range(3)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, gpt2]},
        "post_processor": None,
        "decoder": gpt2,
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [m.split(" ") for m in tiny["tokenizer.ggml.merges"]],
        },
        **changes,
    }


def from_document(doc: dict[str, Any], **metadata: Any) -> Tokenizer:
    return Tokenizer.load(build_tokenizer({"tokenizer.huggingface.json": json.dumps(doc), **metadata}))


@given(text=TEXT, special=st.booleans())
def test_tokenizer_json_gives_the_tokens_of_the_same_gguf(text: str, special: bool) -> None:
    assert HF.encode(text, special) == tokenizer("bpe").encode(text, special)


HF = from_document(document())


def test_tokenizer_json_agrees_with_its_own_library() -> None:
    library = module.tokenizers.Tokenizer.from_str(json.dumps(document()))
    for text, _ in TINY["bpe"]["golden"]:
        assert HF.encode(text) == library.encode(text).ids
        assert HF.decode(HF.encode(text)) == library.decode(library.encode(text).ids)


def test_tokenizer_json_names_its_bos_and_strips() -> None:
    added = document()["added_tokens"]
    added[1] |= {"lstrip": True, "rstrip": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    t = from_document(document(added_tokens=added, post_processor=template))
    assert t.bos == 0
    a = t.encode("a", bos=False)
    assert t.encode("a <|user|> a") == [0, *a, 1, *a]


def test_metaspace_prefixes_only_the_start() -> None:
    spm = TINY["spm"]["metadata"]
    tokens, kinds = spm["tokenizer.ggml.tokens"], spm["tokenizer.ggml.token_type"]
    doc = document(
        added_tokens=[{"id": 3, "content": "<|user|>", "special": True}],
        pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        model={
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [["t", "h"], ["th", "e"], ["\u2581", "the"]],
            "byte_fallback": True,
            "unk_token": "<unk>",
        },
    )
    doc["model"]["vocab"] |= {t: 600 + i for i, t in enumerate(["th", "the", "\u2581the"]) if t not in tokens}
    t = from_document(doc)
    assert kinds[3] == 3
    assert t.decode(t.encode("the<|user|>the"), special=True) == " the<|user|>the"
    assert [t.piece(i) for i in t.encode("é")] == [" ", "\ufffd", "\ufffd"]


# --- what cannot be used


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("bpe", {"model": "bert"}, "bert.*WordPiece.*gpt2"),
        ("bpe", {"model": "t5"}, "t5.*unigram"),
        ("bpe", {"model": "rwkv"}, "rwkv"),
        ("bpe", {"model": "plamo2"}, "plamo2"),
        ("bpe", {"model": "hat"}, "'hat'.*unknown.*gpt2"),
        ("bpe", {"model": None}, "tokenizer.ggml.model is missing"),
        ("bpe", {"pre": "martian"}, "'martian'.*llama-bpe"),
        ("bpe", {"merges": None}, "merges is missing"),
        ("bpe", {"tokens": None}, "tokens is missing"),
        ("bpe", {"tokens": [1, 2]}, "not an array of strings"),
        ("bpe", {"eos_token_id": 100_000}, "eos_token_id is 100000, outside"),
        ("bpe", {"token_type": [1, 2]}, "token_type.*600"),
        ("spm", {"scores": None}, "scores is missing"),
        ("spm", {"scores": [float("nan")] * 600}, "not finite"),
    ],
)
def test_unusable_vocabularies_are_refused_by_name(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        build_tokenizer(with_keys(name, **changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        (json.dumps({"model": {"type": "Unigram", "vocab": []}}), "Unigram.*BPE"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 10**9}, "merges": []}}), "holes"),
        (json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}), "damaged"),
        (json.dumps({**document(), "normalizer": {"type": "Magic"}}), "normalizer"),
    ],
)
def test_unusable_tokenizer_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        build_tokenizer({"tokenizer.huggingface.json": text})


def test_a_byte_token_that_names_no_byte_is_plain_text() -> None:
    tokens = list(TINY["spm"]["metadata"]["tokenizer.ggml.tokens"])
    tokens[5] = "<0xZZ>"
    t = Tokenizer.load(build_tokenizer(with_keys("spm", tokens=tokens)))
    assert t.piece(5) == "<0xZZ>"


@given(at=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_bytes_never_crash(at: int, value: int, cut: bool) -> None:
    """The pack's hash finds damage first; this is the second line: a typed error or a tokenizer that works."""
    data = bytearray(DATA)
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] = value
    try:
        t = Tokenizer.load(bytes(data))
        t.decode(range(t.n_vocab))
        t.encode("the Software")
    except OrkError:
        pass


DATA = build_tokenizer(as_metadata(TINY["spm"]["metadata"]))


def test_a_newer_ready_tokenizer_is_refused() -> None:
    import msgspec

    doc = msgspec.msgpack.decode(DATA)
    doc["version"] += 1
    with pytest.raises(PackDamaged, match="version 2"):
        Tokenizer.load(msgspec.msgpack.encode(doc))
