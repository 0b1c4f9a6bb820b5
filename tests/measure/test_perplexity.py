"""Perplexity: the chunks, positions and BOS of llama-perplexity; two models in step; bounded logits; saved bases."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.errors import OrkError, StorageError, UsageError
from ork.measure.base import Recording, SavedBase, base_bytes
from ork.measure.perplexity import Chunks, Pairs, Running, compare, cut, passes, same_text, score
from ork.strings import StringTable
from ork.text.tokenizer import Tokenizer, build_tokenizer
from tests import tiny
from tests.measure.conftest import LETTERS, Load
from tests.native.test_score import log_softmax


def tokenizer(**changes: object) -> Tokenizer:
    values = tiny.metadata() | changes
    arrays = {
        "tokenizer.ggml.token_type": np.array(values["tokenizer.ggml.token_type"]),
        "tokenizer.ggml.tokens": StringTable.of(values["tokenizer.ggml.tokens"]),
        "tokenizer.ggml.merges": StringTable.of(values["tokenizer.ggml.merges"]),
    }
    return Tokenizer.load(build_tokenizer(values | arrays))


def test_chunks_without_bos() -> None:
    t = tokenizer()
    tokens = t.encode(LETTERS * 3, special=False)
    found = cut(t, LETTERS * 3, 16)
    assert found.tokens.tolist() == [tokens[i : i + 16] for i in range(0, len(tokens) // 16 * 16, 16)]
    assert len(cut(t, LETTERS * 3, 16, 2)) == 2
    assert (found.first, found.scored) == (8, 7)
    assert found.targets(1).tolist() == tokens[16 + 9 : 32]


def test_chunks_with_bos() -> None:
    """The whole text begins with BOS, which shifts it by one; each chunk's first token gives way to BOS."""
    t = tokenizer(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1})
    plain = tokenizer().encode(LETTERS * 3)
    text = [1, *plain]
    found = cut(t, LETTERS * 3, 16)
    assert len(found) == len(text) // 16
    assert found.tokens[0].tolist() == text[:16]
    assert found.tokens[1].tolist() == [1, *text[17:32]]


def test_markers_in_a_text_are_text() -> None:
    t = tokenizer()
    assert 1 not in cut(t, "<|im_start|>" * 20, 16).tokens


@given(st.integers(4, 3000), st.integers(1, 700))
def test_passes_cover_a_chunk(context: int, rows: int) -> None:
    made = passes(context, rows)
    assert [start for start, _, _ in made[1:]] == [stop for _, stop, _ in made[:-1]]
    assert (made[0][0], made[-1][1]) == (0, context - 1)
    assert all(0 < stop - start <= 512 and 0 <= wanted <= min(rows, stop - start) for start, stop, wanted in made)
    scored = [p for _, stop, wanted in made for p in range(stop - wanted, stop)]
    assert scored == list(range(context // 2, context - 1))


@pytest.mark.parametrize(("context", "rows"), [(16, None), (33, 5), (64, 1)])
def test_scores_are_those_of_the_logits(load: Load, context: int, rows: int | None) -> None:
    model = load(codec="f32")
    chunks = cut(model.tokenizer, LETTERS * 6, context)
    found = score(Running(model.engine, chunks, rows), chunks)
    want, top = [], []
    for i, tokens in enumerate(chunks.tokens.tolist()):
        logits = model.logits(tokens)[context // 2 : context - 1]
        want.append(-log_softmax(logits)[np.arange(len(logits)), chunks.targets(i)])
        top.append(logits.argmax(axis=1))
    np.testing.assert_allclose(found.nll, np.concatenate(want), atol=2e-6)
    np.testing.assert_array_equal(found.top, np.concatenate(top))
    assert model.engine.pool.used_blocks == 0
    assert found.summary().perplexity == pytest.approx(np.exp(np.concatenate(want).mean()), rel=1e-5)


def test_how_many_rows_at_a_time_changes_nothing(load: Load) -> None:
    model, reference = load(), load(codec="f32")
    chunks = cut(model.tokenizer, LETTERS * 6, 32)

    def found(rows: int | None) -> Pairs:
        return compare(Running(reference.engine, chunks, rows), Running(model.engine, chunks, rows), chunks)

    whole, parts = found(None), found(3)
    for key in ("nll", "top", "kl"):
        assert (getattr(whole, key) == getattr(parts, key)).all()


def test_two_models_in_step(load: Load) -> None:
    model, reference = load(), load(codec="f32")
    chunks = cut(model.tokenizer, LETTERS * 6, 32)
    heard: list[int] = []
    found = compare(
        Running(reference.engine, chunks), Running(model.engine, chunks), chunks, lambda done, _: heard.append(done)
    )
    assert heard == list(range(1, len(chunks) + 1))
    p, q = (np.concatenate([m.logits(t)[16:31] for t in chunks.tokens.tolist()]) for m in (reference, model))
    a, b = log_softmax(p), log_softmax(q)
    np.testing.assert_allclose(found.kl, (np.exp(a) * (a - b)).sum(axis=1), atol=3e-6)
    assert found.kl.max() > 1e-5  # int8 is not the model itself
    summary = found.summary()
    assert summary.top1 == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    alone = score(Running(model.engine, chunks), chunks)
    assert (alone.nll == found.nll[:, 1]).all()


def test_a_saved_base_is_as_good_as_the_model(load: Load, tmp_path: Path) -> None:
    model, reference = load(), load(codec="f32")
    chunks = cut(model.tokenizer, LETTERS * 6, 32)
    path = tmp_path / "x.base"
    with Recording(Running(reference.engine, chunks), chunks, path, "name") as recording:
        recorded = score(recording, chunks)
        assert not path.exists()
        recording.finish()
    assert abs(path.stat().st_size - base_bytes(recording.vocab, chunks)) < 200
    assert [f.name for f in tmp_path.iterdir()] == ["x.base"]
    assert (recorded.nll == score(Running(reference.engine, chunks), chunks).nll).all()
    saved = SavedBase(path)
    saved.check(chunks)
    few = Chunks(chunks.tokens[:2])
    saved.check(few)
    found = compare(saved, Running(model.engine, chunks), chunks)
    direct = compare(Running(reference.engine, chunks), Running(model.engine, chunks), chunks)
    np.testing.assert_allclose(found.nll, direct.nll, atol=1e-3)
    np.testing.assert_allclose(found.kl, direct.kl, atol=2e-5)
    assert (found.nll[:, 1] == direct.nll[:, 1]).all()
    with pytest.raises(UsageError, match="other tokens"):
        saved.check(cut(model.tokenizer, LETTERS[4:] * 6, 32))
    with pytest.raises(UsageError, match="other tokens"):
        saved.check(cut(model.tokenizer, LETTERS * 6, 16))
    saved.close()


def test_a_base_that_is_damaged_or_cut_short(load: Load, tmp_path: Path) -> None:
    model = load()
    chunks = cut(model.tokenizer, LETTERS, 16, 2)
    path = tmp_path / "x.base"
    with Recording(Running(model.engine, chunks), chunks, path, "name") as recording:
        score(recording, chunks)
        recording.finish()
    whole = path.read_bytes()
    for data, word in ((whole[:-1], "length"), (whole[:9], "head|length"), (b"GGUF" + whole[4:], "--save-base")):
        path.write_bytes(data)
        with pytest.raises(OrkError, match=word):
            SavedBase(path)
    path.write_bytes(whole[:-30] + b"\xff" + whole[-29:])
    saved = SavedBase(path)
    with pytest.raises(StorageError, match="chunk 2"):
        compare(saved, Running(model.engine, chunks), chunks)
    saved.close()
    with pytest.raises(ZeroDivisionError), Recording(Running(model.engine, chunks), chunks, path, "name"):
        _ = 1 / 0
    assert [f.name for f in tmp_path.iterdir()] == ["x.base"]
    with pytest.raises(StorageError):
        Recording(Running(model.engine, chunks), chunks, tmp_path / "no" / "x.base", "name")
    os.mkfifo(tmp_path / "pipe")  # nobody would ever write into it
    with pytest.raises(UsageError, match="pipe: not a file of"):
        SavedBase(tmp_path / "pipe")


def test_texts_and_models_that_do_not_fit(load: Load, tmp_path: Path) -> None:
    t = tokenizer()
    for call, words in (
        (lambda: cut(t, "short", 512), r"too short: it has \d tokens, one chunk takes 512"),
        (lambda: cut(t, "", 4), "too short: it has 0 tokens"),
        (lambda: cut(t, LETTERS, 3), "at least 4"),
        (lambda: cut(t, LETTERS, 8, 0), "1 or more"),
        (lambda: same_text([t, tokenizer(**{"tokenizer.ggml.merges": []})], LETTERS, 8, None), "different tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    model = load()
    beyond = Chunks(np.full((1, 8), tiny.VOCAB, np.int32))
    with pytest.raises(UsageError, match=f"outside of the model's vocabulary of {tiny.VOCAB}"):
        score(Running(model.engine, beyond), beyond)
    wider = tiny.write(tmp_path / "wider.gguf", tiny.metadata(), tiny.random_tensors(rows=tiny.VOCAB + 4))
    chunks = cut(t, LETTERS, 8)
    with pytest.raises(UsageError, match="vocabularies differ"):
        compare(Running(load(wider).engine, chunks), Running(model.engine, chunks), chunks)


def test_a_model_that_overflows_is_told(load: Load, tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["output.weight"] = np.full_like(tensors["output.weight"], 3e38)
    model = load(tiny.write(tmp_path / "big.gguf", tiny.metadata(), tensors), codec="f32")
    chunks = cut(model.tokenizer, LETTERS, 8)
    with pytest.raises(OrkError, match="chunk 1: the model's logits are not finite"):
        score(Running(model.engine, chunks), chunks)


def test_the_python_api(load: Load) -> None:
    model, reference = load(), load(codec="f32")
    chunks = cut(model.tokenizer, LETTERS * 6, 32)
    assert model.perplexity(LETTERS * 6, context=32) == score(Running(model.engine, chunks), chunks).summary()
    found = model.compare(reference, LETTERS * 6, context=32, chunks=2)
    assert found.tokens == 30
    assert found.kl > 0
    with pytest.raises(UsageError, match="longer than the context of 64"):
        model.perplexity(LETTERS * 9, context=128)
