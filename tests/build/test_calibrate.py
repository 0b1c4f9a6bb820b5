"""Conversion with GPTQ: better than plain rounding, layer after layer, and the same bytes however it got there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ork.api import LoadedModel
from ork.build import calibrate
from ork.build.calibrate import convert_calibrated
from ork.build.convert import convert
from ork.build.layerwise import SourceLayers
from ork.build.workload import Input, Plain, within
from ork.errors import SourceError, UsageError
from ork.ops import Array, Weight
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
        assert convert_calibrated(s, target, recipe, text, **options).lines() == []  # type: ignore[arg-type]
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
    monkeypatch.setattr(calibrate, "within", lambda inputs, room: within(inputs, 0))  # memory for one Hessian
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
    assert listed.tensors == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    assert listed.few == {}
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


# --- experts: of 8, two a token; few rows reach those that the routers do not like

EXPERTS = 8
MIXTURE = Recipe("test", usual("i4", 32, gptq=True), (("token_embd", usual("f32")),))


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return tiny.moe_gguf(tmp_path / "moe.gguf", experts=EXPERTS)


def mixture(source: Path, target: Path, recipe: Recipe = MIXTURE, **options: object) -> tuple[Plain, bytes]:
    options = {"tokens": TOKENS, "max_ram": 1 << 30, "workers": 1} | options
    with contextlib.closing(open_source(source)) as s:
        plain = convert_calibrated(s, target, recipe, TEXT, **options)  # type: ignore[arg-type]
    return plain, target.read_bytes()


def read_by_experts(source: Path) -> dict[str, list[np.ndarray]]:
    """The rows that each tensor of the first layer reads, by pass: with the source's weights, all in memory at once."""
    seen: dict[str, list[np.ndarray]] = {}

    def observe(weights: Sequence[Weight], x: Array) -> None:
        for w in weights:
            seen.setdefault(w.tensor.name, []).append(x.numpy().copy())

    with contextlib.closing(open_source(source)) as s:
        tokens = calibrate.tokens_of(Tokenizer.load(build_tokenizer(s.metadata)), TEXT, TOKENS)
        layers = SourceLayers(s, 1)
        layers.hold(0)
        layers.ops.observer = observe
        for at in range(0, len(tokens), calibrate.TOGETHER):
            rows = layers.rows(tokens[at : at + calibrate.TOGETHER], np.zeros(1, np.int32))
            layers.model.layer(0, layers.model.begin(rows))
    return seen


def test_an_expert_gets_the_codes_of_gptq_on_its_own_rows_or_those_of_plain_rounding(moe: Path, tmp_path: Path) -> None:
    listed, _ = mixture(moe, tmp_path / "gptq.orkpack")
    plainly(moe, tmp_path / "plain.orkpack", Recipe("test", usual("i4", 32), (("token_embd", usual("f32")),)))
    seen = read_by_experts(moe)
    few: dict[str, list[int]] = {}
    for part in ("gate", "up", "down"):
        stack = f"blk.0.ffn_{part}_exps.weight"
        for e in range(EXPERTS):
            name = f"{stack}#{e}"
            found, plain = (codes(tmp_path / f"{p}.orkpack", name) for p in ("gptq", "plain"))
            with contextlib.closing(open_source(moe)) as s:
                table = s.rows(stack, 0, s.tensors[stack].rows)
            weight = table.reshape(EXPERTS, -1, table.shape[1])[e]
            K = weight.shape[1]
            if sum(map(len, seen.get(name, []))) < K:
                few.setdefault(stack, []).append(e)
                assert np.array_equal(found, plain)
                continue
            with gptq.one_blas_thread():
                hessian = gptq.Hessian(K)
                for x in seen[name]:
                    hessian.add(rotation.rotate_rows(x, K, "mix"))
                rows = rotation.rotate_rows(weight, K, "mix")
                want = gptq.gptq("i4", rows, gptq.factor(hessian), 32, search="mse")
            assert np.array_equal(found, want.codes)
            assert not np.array_equal(found, plain)
    assert {stack: few.get(stack, []) for stack in few} == {s: n for s, n in listed.few.items() if "blk.0." in s}
    assert all(0 < len(few[f"blk.0.ffn_{part}_exps.weight"]) < EXPERTS for part in ("gate", "up"))


def test_experts_with_few_rows_are_listed_in_a_few_lines(moe: Path, tmp_path: Path) -> None:
    listed, _ = mixture(moe, tmp_path / "x.orkpack")
    few = {(stack[4], e) for stack, numbers in listed.few.items() for e in numbers}
    told = listed.lines()
    assert told[0].startswith(f"{len(few)} of {2 * EXPERTS} experts had fewer rows than inputs")
    gate = [f"{i}: {len(listed.few[f'blk.{i}.ffn_gate_exps.weight'])}" for i in range(2)]
    assert told[1] == f"  ffn_gate_exps, experts by layer: {', '.join(gate)}"
    assert len(told) <= 4


def test_a_mixture_has_the_same_bytes_whatever_threads_memory_and_interruptions(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, want = mixture(moe, tmp_path / "want.orkpack")
    assert mixture(moe, tmp_path / "x.orkpack", workers=3) == (listed, want)
    calls: list[int] = []
    mixture(moe, tmp_path / "x.orkpack", progress=lambda done, total: calls.append(done))
    first = calls.count(0)
    for count in (first + 6, first + 20, first + 40, len(calls)):
        target = tmp_path / f"{count}.orkpack"
        with pytest.raises(Stop):
            mixture(moe, target, progress=stop_at(count))
        assert mixture(moe, target) == (listed, want)
    together = []
    for room in (0, 3 * 4 * 64**2):  # of one Hessian, of three of gate and up

        def noted(inputs: Sequence[Input], _: int, room: int = room) -> Iterator[list[Input]]:
            for some in within(inputs, room):
                together.append(len(some))
                yield some

        monkeypatch.setattr(calibrate, "within", noted)
        assert mixture(moe, tmp_path / f"room{room}.orkpack") == (listed, want)
    assert set(together) >= {1, 2}


def test_experts_see_what_the_layers_before_them_became(moe: Path, tmp_path: Path) -> None:
    mixture(moe, tmp_path / "a.orkpack")
    mixture(moe, tmp_path / "b.orkpack", MIXTURE.but([(r"blk\.0\.ffn_down_exps", usual("i8", gptq=True))]))
    stack = "blk.1.ffn_down_exps.weight"
    assert any(
        not np.array_equal(*(codes(tmp_path / f"{p}.orkpack", f"{stack}#{e}") for p in "ab")) for e in range(EXPERTS)
    )


def test_a_mixtures_logits_are_nearer_to_those_in_f32(moe: Path, tmp_path: Path) -> None:
    mixture(moe, tmp_path / "gptq.orkpack")
    plainly(moe, tmp_path / "plain.orkpack", Recipe("p", usual("i4", 32), (("token_embd", usual("f32")),)))
    plainly(moe, tmp_path / "f32.orkpack", Recipe("f32", usual("f32")))
    with Pack.open(tmp_path / "f32.orkpack") as pack:
        tokens = Tokenizer.load(pack.tokenizer).encode(TEXT)[:400]
    calibrated, rounded, exact = (logits(tmp_path / f"{p}.orkpack", tokens) for p in ("gptq", "plain", "f32"))
    assert np.square(calibrated - exact).mean() < 0.8 * np.square(rounded - exact).mean()


def test_the_memory_of_a_mixture_is_that_of_a_few_experts(moe: Path, tmp_path: Path) -> None:
    """Four times the experts ask for no more than their part of the pack."""
    needs = []
    for experts in (8, 32):
        source = tiny.moe_gguf(tmp_path / f"{experts}.gguf", experts=experts, inner=128)
        with pytest.raises(UsageError, match="needs") as refused:
            mixture(source, tmp_path / "x.orkpack", max_ram=64 << 20)
        needs.append(int(str(refused.value).split()[-2]))
        assert mixture(source, tmp_path / "x.orkpack", max_ram=needs[-1] << 20)[0].experts == 2 * experts
    assert needs[1] <= needs[0] + 2
