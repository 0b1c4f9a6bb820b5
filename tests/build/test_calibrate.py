"""Conversion with GPTQ: better than plain rounding, layer after layer, and the same bytes however it got there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ork.api import LoadedModel
from ork.build import calibrate
from ork.build.calibrate import convert_calibrated
from ork.build.convert import convert
from ork.errors import SourceError, UsageError
from ork.pack.reader import Pack
from ork.quant import codecs, gptq, rotation
from ork.quant.recipe import Recipe, usual
from ork.sources.base import open_source
from ork.text.tokenizer import Tokenizer
from ork.text.vocab import build_tokenizer
from tests import tiny
from tests.build.test_convert import unpacked

TEXT = "".join(f"the tin thing that they think in {i} {i * i}\n" for i in range(200))
TOKENS = 1536
PLAIN = Recipe("test", usual("i4", 32), (("token_embd", usual("i8")),))
RECIPE = PLAIN.with_gptq()


def make(source: Path, target: Path, recipe: Recipe = RECIPE, text: str = TEXT, **options: object) -> bytes:
    options = {"tokens": TOKENS, "max_ram": 1 << 30, "workers": 1} | options
    with contextlib.closing(open_source(source)) as s:
        assert convert_calibrated(s, target, recipe, text, **options) == []  # type: ignore[arg-type]
    return target.read_bytes()


def plainly(source: Path, target: Path, recipe: Recipe = PLAIN) -> Path:
    with contextlib.closing(open_source(source)) as s:
        return convert(s, target, recipe)


def codes(pack: Path, name: str) -> np.ndarray:
    with Pack.open(pack) as opened:
        return unpacked(opened, name)[0]


def logits(pack: Path, tokens: list[int]) -> np.ndarray:
    with LoadedModel(Pack.open(pack), device="cpu", threads=1, context=None, kv=None) as model:
        return model.logits(tokens).copy()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "model.gguf", "llama")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_are_nearer_to_those_in_f32(arch: str, tmp_path: Path) -> None:
    source = tiny.random_gguf(tmp_path / "x.gguf", arch)
    make(source, tmp_path / "gptq.orkpack")
    packs = [
        tmp_path / "gptq.orkpack",
        plainly(source, tmp_path / "plain.orkpack"),
        plainly(source, tmp_path / "f32.orkpack", Recipe("f32", usual("f32"))),
    ]
    with Pack.open(packs[0]) as pack:
        tokens = Tokenizer.load(pack.tokenizer).encode(TEXT)[:400]
    calibrated, rounded, exact = (logits(pack, tokens) for pack in packs)
    assert np.square(calibrated - exact).mean() < 0.6 * np.square(rounded - exact).mean()


def test_the_head_is_calibrated_and_the_embedding_is_not(gguf: Path, tmp_path: Path) -> None:
    make(gguf, tmp_path / "gptq.orkpack")
    plainly(gguf, tmp_path / "plain.orkpack")
    same = {name: np.array_equal(*(codes(tmp_path / f"{p}.orkpack", name) for p in ("gptq", "plain"))) for name in
            ("token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight")}  # fmt: skip
    assert same == dict(zip(same, (True, False, False, False)))


def test_the_first_codes_are_those_of_gptq_on_normed_embeddings(gguf: Path, tmp_path: Path) -> None:
    recipe = Recipe("test", usual("i8", rotation="mix", gptq=True), (("token_embd", usual("f32")),))
    make(gguf, tmp_path / "x.orkpack", recipe)
    with contextlib.closing(open_source(gguf)) as source:
        table, norm, w = (
            source.rows(n, 0, source.tensors[n].rows)
            for n in ("token_embd.weight", "blk.0.attn_norm.weight", "blk.0.attn_k.weight")
        )
        tokens = calibrate.tokens_of(Tokenizer.load(build_tokenizer(source.metadata)), TEXT, TOKENS)
    assert tokens.shape == (3, calibrate.SEQUENCE)
    x = table[tokens.reshape(-1)].astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-5) * norm
    hessian = gptq.Hessian(64)
    hessian.add(rotation.rotate_rows(x.astype(np.float32), 64, "mix"))
    expected = gptq.gptq("i8", rotation.rotate_rows(w, 64, "mix"), gptq.factor(hessian))
    assert np.mean(codes(tmp_path / "x.orkpack", "blk.0.attn_k.weight") != expected.codes) < 0.005  # sums may differ


def test_a_layer_sees_what_the_layers_before_it_became(gguf: Path, tmp_path: Path) -> None:
    finer = RECIPE.but([(r"blk\.0\.", usual("i8", gptq=True))])
    make(gguf, tmp_path / "a.orkpack")
    make(gguf, tmp_path / "b.orkpack", finer)
    a, b = (codes(tmp_path / f"{p}.orkpack", "blk.1.attn_q.weight") for p in "ab")
    assert not np.array_equal(a, b)


def test_tensors_that_share_rows_may_be_stored_in_different_ways(gguf: Path, tmp_path: Path) -> None:
    mixed = RECIPE.but(
        [("attn_k", usual("nf4", 64, rotation="none", gptq=True)), ("ffn_gate", usual("f16")), ("attn_v", usual("i8"))]
    )
    make(gguf, tmp_path / "a.orkpack", mixed)
    make(gguf, tmp_path / "b.orkpack")
    q = [codes(tmp_path / f"{p}.orkpack", "blk.0.attn_q.weight") for p in "ab"]
    assert np.array_equal(*q)
    plainly(gguf, tmp_path / "c.orkpack", PLAIN.but([("attn_v", usual("i8"))]))
    v = [codes(tmp_path / f"{p}.orkpack", "blk.1.attn_v.weight") for p in "ac"]
    assert np.array_equal(*v)


class Stop(Exception):
    pass


def stop_at(count: int) -> Callable[[int, int], None]:
    calls = [0]

    def progress(done: int, total: int) -> None:
        calls[0] += 1
        assert 0 <= done <= total
        if calls[0] == count:
            raise Stop

    return progress


def test_the_same_bytes_whatever_threads_memory_and_interruptions(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = make(gguf, tmp_path / "want.orkpack")
    assert make(gguf, tmp_path / "x.orkpack", workers=3) == want
    calls: list[int] = []
    make(gguf, tmp_path / "x.orkpack", progress=lambda done, total: calls.append(done))
    first = calls.count(0)  # small tensors and the embedding; then 7 tensors a layer, and the head
    assert len(calls) == first + 7 + 7 + 1
    target = tmp_path / "y.orkpack"
    for count in (2, first + 3, first + 7, first + 10, first + 15):
        with pytest.raises(Stop):
            make(gguf, target, progress=stop_at(count))
        assert make(gguf, target) == want
        target.unlink()
    with pytest.raises(Stop):
        make(gguf, target, progress=stop_at(first + 9))
    with pytest.raises(Stop):
        make(gguf, target, progress=stop_at(5))  # of what the second layer and the head still need
    assert make(gguf, target) == want
    monkeypatch.setattr(
        calibrate, "_within", lambda inputs, room: [[part] for part in inputs]
    )  # memory for one Hessian
    assert make(gguf, tmp_path / "z.orkpack") == want


def test_layers_that_are_done_are_not_rounded_again(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = make(gguf, tmp_path / "want.orkpack")
    layers: list[int] = []
    rounded = calibrate._Run.round_layer

    def noted(self: calibrate._Run, i: int, states: object) -> None:
        layers.append(i)
        if len(layers) == 2:
            raise Stop
        rounded(self, i, states)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate._Run, "round_layer", noted)
    with pytest.raises(Stop):
        make(gguf, tmp_path / "x.orkpack")
    assert make(gguf, tmp_path / "x.orkpack") == want
    assert layers == [0, 1, 1]


def test_another_text_is_another_pack(gguf: Path, tmp_path: Path) -> None:
    other = TEXT.upper()
    want = make(gguf, tmp_path / "want.orkpack", text=other)
    with pytest.raises(Stop):
        make(gguf, tmp_path / "x.orkpack", progress=stop_at(20))
    assert make(gguf, tmp_path / "x.orkpack", text=other) == want
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert pack.provenance["calibration"]["tokens"] == TOKENS


def test_more_inputs_than_the_text_has_tokens_are_rounded_plainly_and_listed(tmp_path: Path) -> None:
    tensors = tiny.random_tensors("llama")
    wide = calibrate.SEQUENCE + 32
    rng = np.random.default_rng(5)
    for i in range(2):
        for name, shape in (("gate", (wide, 64)), ("up", (wide, 64)), ("down", (64, wide))):
            tensors[f"blk.{i}.ffn_{name}.weight"] = rng.standard_normal(shape).astype(np.float32) / 8
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata("llama", **{"llama.feed_forward_length": wide}), tensors)
    with contextlib.closing(open_source(source)) as s:
        listed = convert_calibrated(s, tmp_path / "x.orkpack", RECIPE, TEXT, tokens=calibrate.SEQUENCE)
    assert listed == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    plainly(source, tmp_path / "plain.orkpack")
    for name, same in (("blk.1.ffn_down.weight", True), ("blk.1.ffn_up.weight", False)):
        assert np.array_equal(codes(tmp_path / "x.orkpack", name), codes(tmp_path / "plain.orkpack", name)) == same


def test_what_cannot_be_calibrated_is_refused_in_a_line(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.orkpack"
    with pytest.raises(UsageError, match="too short"):
        make(gguf, target, text="the tin")
    with pytest.raises(UsageError, match="--calibrate-tokens 511"):
        make(gguf, target, tokens=511)
    with pytest.raises(UsageError, match="--max-ram 16 MiB is too little: GPTQ on 1536 tokens"):
        make(gguf, target, max_ram=16 << 20)
    with pytest.raises(UsageError, match="looks at a text"):
        plainly(gguf, target, RECIPE)
    assert not list(tmp_path.glob("x.orkpack*"))


def test_a_model_that_overflows_on_the_text_is_refused(tmp_path: Path) -> None:
    tensors = tiny.random_tensors("llama")
    tensors["blk.1.ffn_norm.weight"] = np.full(64, 1e25, np.float32)
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata("llama"), tensors)
    with pytest.raises(SourceError, match=r"tensor blk\.1\.ffn_(gate|down)\.weight: on this text .* not finite"):
        make(source, tmp_path / "x.orkpack")
    assert list(tmp_path.iterdir()) == [source]


def test_codecs_all_round(gguf: Path, tmp_path: Path) -> None:
    for codec, group in (("nf4", 0), ("nf4", 32), ("i4", 0), ("i8", 32)):
        recipe = Recipe("test", usual(codec, group), (("token_embd", usual("i8")),))
        make(gguf, tmp_path / "a.orkpack", recipe.with_gptq())
        plainly(gguf, tmp_path / "b.orkpack", recipe)
        a, b = (codes(tmp_path / f"{p}.orkpack", "blk.0.ffn_up.weight") for p in "ab")
        assert not np.array_equal(a, b)
        assert a.dtype == b.dtype == np.int8
        assert np.abs(a).max() <= codecs.SCHEMES[codec].top
