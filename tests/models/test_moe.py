"""Mixtures of experts: the same bits on every path, every expert in the pack, and routing tensors that make no sense.

What they compute is compared with `transformers` in test_goldens.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ork
from ork import native
from ork.build.calibrate import convert_calibrated
from ork.build.convert import Aids, convert
from ork.build.importance import collect
from ork.build.layerwise import SourceLayers
from ork.cli.main import main
from ork.engine.kvcache import Sequence
from ork.engine.sampling import SamplingParams
from ork.engine.session import Session, Stats
from ork.errors import OrkError, SourceError
from ork.models import ARCHITECTURES, Rows, traits
from ork.models.config import read_config
from ork.ops import Array
from ork.pack import Pack
from ork.quant.recipe import Choice, Recipe, builtin
from ork.residency.source import PackSource
from ork.residency.stream import TensorSpec
from ork.sources.base import open_source
from tests import tiny
from tests.models.test_same_bits import equal, feed, path_of

ISAS = native.isa_names()
TOKENS = np.random.default_rng(1).integers(3, tiny.VOCAB, 700).tolist()
TEXTS = [TOKENS[:270], TOKENS[270:280], TOKENS[300:301], TOKENS[400:460]]
RECIPES = {
    "f32": builtin("f32"),
    "int8": builtin("int8"),
    "nf4 of 32": builtin("nf4", group=32),
    "mixed": Recipe(
        "mixed",
        Choice("i4"),
        (
            ("gate_exps", Choice("nf4", 32)),
            ("up_exps", Choice("i8")),
            ("down_exps", Choice("f16")),
            ("shexp", Choice("i8")),
        ),
    ),
}
CASES = [(arch, "int8") for arch in tiny.MOE] + [("qwen3moe", "f32"), ("qwen3moe", "nf4 of 32"), ("qwen2moe", "mixed")]


def pack_of(folder: Path, arch: str, recipe: Recipe, **changes: Any) -> Path:
    source = open_source(tiny.random_gguf(folder / "m.gguf", arch, **changes))
    with contextlib.closing(source):
        return convert(source, folder / "m.orkpack", recipe)


@pytest.mark.parametrize(("arch", "recipe"), CASES)
def test_the_same_bits_on_every_path(tmp_path: Path, arch: str, recipe: str) -> None:
    """Instruction sets, threads, chunks and company change nothing."""
    with ork.load(pack_of(tmp_path, arch, RECIPES[recipe]), n_ctx=512, sequences=4) as model:
        with path_of("portable", 1):
            want = [model.logits(text, chunk=1024) for text in TEXTS]
        assert np.isfinite(want[0]).all()
        assert len(set(want[0].argmax(axis=1).tolist())) > 20
        steps = [[1, 0, 0, 7], [200, 3, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]]
        for isa in ISAS:
            with path_of(isa, 2):
                assert equal(feed(model, TEXTS, iter(steps)), want), isa
        with path_of("best", 3):
            assert equal(feed(model, TEXTS, iter([[0, 0, 0, 0]])), want)
            assert equal(feed(model, TEXTS[:1], iter([[250], *[[1]] * 20])), want[:1])


def test_what_is_cut_off_leaves_no_trace(tmp_path: Path) -> None:
    """Short convolutions look back over the cut, at inputs that were kept."""
    with ork.load(pack_of(tmp_path, "lfm2moe", builtin("int8")), n_ctx=512) as model:
        want = model.logits(TOKENS[:300])
        seq = Sequence()
        model.engine.forward([(seq, TOKENS[:257] + TOKENS[400:430])])
        for length in (257, 100):
            model.engine.pool.truncate(seq, length)
            got = model.engine.forward([(seq, TOKENS[length:300])], every=True)
            assert np.array_equal(got, want[length:])


def test_a_conversation_that_is_cut_far_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most inputs of its convolutions are gone by then: what is missing is computed again, to the same text."""
    other = TOKENS[100:105]
    long = TOKENS + TOKENS[:200]
    with ork.load(pack_of(tmp_path, "lfm2moe", builtin("int8")), n_ctx=1024, sequences=2) as model:
        session, stats = model.session(), Stats()

        def answer(session: Session, prompt: list[int]) -> str:
            return "".join(session.generate(prompt, SamplingParams(), limit=6, stats=stats))

        def anew(prompt: list[int]) -> str:
            with contextlib.closing(model.session()) as other:
                return answer(other, prompt)

        answer(session, long)
        for length, cached in ((860, 860), (600, 600), (500, 256), (400, 400), (255, 0)):
            prompt = long[:length] + other
            text, held = answer(session, prompt), stats.cached_tokens
            assert (text, held) == (anew(prompt), cached)

        answer(session, long[:40])
        forward, passes = model.model.forward, iter([512])

        def interrupted(rows: Rows) -> Array:
            if next(passes, None) is None:
                raise KeyboardInterrupt
            return forward(rows)

        with monkeypatch.context() as patch:
            patch.setattr(model.model, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                answer(session, long)
        assert session.tokens == []
        assert answer(session, long[:40] + other) == anew(long[:40] + other)


# --- packs


@pytest.mark.parametrize("arch", ["mixtral", "lfm2moe"])
def test_every_expert_is_in_the_pack_and_lies_together(tmp_path: Path, arch: str) -> None:
    tensors = tiny.random_tensors(arch)
    with Pack.open(pack_of(tmp_path, arch, builtin("f32"))) as pack:
        stacks = [name for name in tensors if "_exps" in name]
        assert len(stacks) == (6 if arch == "mixtral" else 3)
        for layer in range(2):
            ends = None
            for e in range(tiny.EXPERTS):
                for part in ("gate", "up", "down"):
                    name = f"blk.{layer}.ffn_{part}_exps.weight"
                    if name not in tensors:
                        continue
                    t = pack.tensor(f"{name}#{e}")
                    assert tensors[name].shape[1:] == (t.N, t.K)
                    assert (t.layer, t.expert) == (layer, e)
                    assert ends in (None, t.slices[0].offset)  # whole pages, one behind the other
                    ends = t.slices[-1].offset + -(-t.slices[-1].nbytes // 4096) * 4096
    with ork.load(tmp_path / "m.orkpack") as model:
        table = model.ops.weight(f"blk.1.ffn_up_exps.weight#{tiny.EXPERTS - 1}", tiny.INNER, 64)
        rows = model.ops.embed(table, np.arange(tiny.INNER, dtype=np.int32)).numpy()
    assert np.array_equal(rows, tensors["blk.1.ffn_up_exps.weight"][-1])


@pytest.mark.parametrize("recipe", [builtin("i4"), Recipe("all", Choice("i8"), (("ffn_gate_inp", Choice("i4")),))])
def test_routers_stay_f32(tmp_path: Path, recipe: Recipe) -> None:
    tensors = tiny.random_tensors("qwen2moe")
    with ork.load(pack_of(tmp_path, "qwen2moe", recipe)) as model:
        for i in range(2):
            name = f"blk.{i}.ffn_gate_inp.weight"
            assert model.pack.tensor(name).codec == "f32"  # type: ignore[union-attr]
            table = model.ops.weight(name, tiny.EXPERTS, 64)
            rows = model.ops.embed(table, np.arange(tiny.EXPERTS, dtype=np.int32)).numpy()
            assert np.array_equal(rows, tensors[name])


def test_a_stack_has_one_choice_and_each_expert_its_importance(tmp_path: Path) -> None:
    path = tiny.random_gguf(tmp_path / "m.gguf", "qwen3moe")
    tokens = np.array(TOKENS[:40], np.int32).reshape(2, 20)
    with contextlib.closing(open_source(path)) as source:
        found = collect(SourceLayers(source), tokens)
        stack = "blk.1.ffn_down_exps.weight"
        assert found.sums[stack].shape == (tiny.EXPERTS, tiny.INNER)
        assert found.counts[stack].sum() == tokens.size * tiny.USED
        seen = [found.importance(f"{stack}#{e}", tiny.INNER) for e in range(tiny.EXPERTS) if found.counts[stack][e]]
        assert len({s.tobytes() for s in seen}) == len(seen) > 3
        recipe = builtin("i4", rotate=False).with_importance()
        weighed = convert(source, tmp_path / "w.orkpack", recipe, aids=Aids(importance=found))
        plain = convert(source, tmp_path / "p.orkpack", builtin("i4", rotate=False))
        with Pack.open(weighed) as a, Pack.open(plain) as b:
            differ = [n for n in a.names() if "_exps" in n and a.content(n) != b.content(n)]
            assert {n.partition("#")[0] for n in differ} >= {stack, "blk.0.ffn_gate_exps.weight"}


@pytest.mark.parametrize("arch", tiny.MOE)
def test_gptq_rounds_what_experts_read_often_enough(arch: str, tmp_path: Path) -> None:
    recipe = builtin("i4", rotate=False)
    with contextlib.closing(open_source(tiny.random_gguf(tmp_path / "m.gguf", arch))) as source:
        plain = convert_calibrated(source, tmp_path / "g.orkpack", recipe.with_gptq(), "some text " * 400, tokens=512)
        convert(source, tmp_path / "p.orkpack", recipe)
    few = {f"{stack}#{e}" for stack, numbers in plain.few.items() for e in numbers}
    with Pack.open(tmp_path / "g.orkpack") as a, Pack.open(tmp_path / "p.orkpack") as b:
        experts = {n for n in a.names() if "_exps" in n}
        assert {n for n in experts if a.content(n) == b.content(n)} == few < experts


# --- what listens to a pass


def test_the_router_is_heard_once_a_layer(tmp_path: Path) -> None:
    with ork.load(pack_of(tmp_path, "lfm2moe", builtin("int8"))) as model:
        heard: list[tuple[int, int, int]] = []
        model.ops.router = lambda layer, routes: heard.append((layer, routes.rows, routes.top_k))
        model.logits(TOKENS[:30])
        assert heard == [(1, 30, tiny.USED)]


# --- routing tensors and keys that make no sense


def wrong(arch: str, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> tuple[Any, Any]:
    return tiny.metadata(arch, **changes), tiny.random_tensors(arch) | (tensors or {})


def with_nan(shape: tuple[int, ...]) -> np.ndarray:
    out = np.ones(shape, np.float32)
    out.flat[-1] = np.nan
    return out


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


WRONG = {
    "a router of NaN": (
        wrong("qwen3moe", {"blk.1.ffn_gate_inp.weight": with_nan((8, 64))}),
        "blk.1.ffn_gate_inp.weight",
    ),
    "an expert of NaN": (
        wrong("qwen3moe", {"blk.1.ffn_up_exps.weight": with_nan((8, 40, 64))}),
        "ffn_up_exps.weight#7",
    ),
    "a bias of NaN": (wrong("lfm2moe", {"blk.1.exp_probs_b.bias": with_nan((8,))}), "blk.1.exp_probs_b.bias"),
    "a router of other experts": (
        wrong("olmoe", {"blk.0.ffn_gate_inp.weight": ones(7, 64)}),
        "blk.0.ffn_gate_inp.weight",
    ),
    "a bias of other experts": (wrong("lfm2moe", {"blk.1.exp_probs_b.bias": ones(9)}), "blk.1.exp_probs_b.bias"),
    "fewer experts": (
        wrong("mixtral", {"blk.0.ffn_up_exps.weight": ones(7, 40, 64)}),
        "blk.0.ffn_up_exps.weight: 7 experts",
    ),
    "more experts": (
        wrong("mixtral", {"blk.1.ffn_down_exps.weight": ones(9, 64, 40)}),
        "ffn_down_exps.weight: 9 experts",
    ),
    "narrower experts": (wrong("mixtral", {"blk.0.ffn_up_exps.weight": ones(8, 39, 64)}), "blk.0.ffn_up_exps.weight"),
    "another count": (wrong("mixtral", **{"llama.expert_count": 4}), "llama.expert_count is 4"),
    "more used than there are": (
        wrong("qwen2moe", **{"qwen2moe.expert_used_count": 9}),
        "qwen2moe.expert_used_count = 9",
    ),
    "none used": (wrong("qwen2moe", **{"qwen2moe.expert_used_count": 0}), "qwen2moe.expert_used_count = 0"),
    "no count": (wrong("qwen3moe", **{"qwen3moe.expert_count": 0}), "qwen3moe.expert_count is 0"),
    "an unknown gate": (wrong("lfm2moe", **{"lfm2moe.expert_gating_func": 4}), "lfm2moe.expert_gating_func = 4"),
    "groups that do not divide": (wrong("qwen3moe", **{"qwen3moe.expert_group_count": 3}), "expert_group_count = 3"),
    "groups of too few": (
        wrong("qwen3moe", **{"qwen3moe.expert_group_count": 4, "qwen3moe.expert_group_used_count": 1}),
        "expert_group_count = 4, 1 of them used",
    ),
    "no shared gate": (
        (tiny.metadata("qwen2moe"), {k: v for k, v in tiny.random_tensors("qwen2moe").items() if "inp_shexp" not in k}),
        "blk.0.ffn_gate_inp_shexp.weight is missing",
    ),
    "layers of two kinds of attention": (
        wrong("lfm2moe", **{"lfm2moe.attention.head_count_kv": np.array([1, 2], np.uint32)}),
        "lfm2moe.attention.head_count_kv",
    ),
    "heads of other layers": (
        wrong("lfm2moe", **{"lfm2moe.attention.head_count_kv": np.array([0, 2, 2], np.uint32)}),
        "head_count_kv has 3 values",
    ),
    "taps of another length": (wrong("lfm2moe", **{"lfm2moe.shortconv.l_cache": 4}), "blk.0.shortconv.conv.weight"),
    "too many taps": (wrong("lfm2moe", **{"lfm2moe.shortconv.l_cache": 17}), "lfm2moe.shortconv.l_cache = 17"),
    "no multiple of anything": (wrong("granitemoe", **{"granitemoe.logit_scale": 0.0}), "granitemoe.logit_scale = 0"),
    "a stack of something else": (wrong("mixtral", {"blk.0.attn_k.weight": ones(8, 32, 64)}), "blk.0.attn_k.weight"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_routing_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (values, tensors), said = WRONG[name]
    path = tiny.write(tmp_path / "wrong.gguf", values, tensors)
    assert main(["convert", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("ork: ")
    assert said in err
    assert not list(tmp_path.glob("*.orkpack"))


def test_experts_that_are_cut_in_several_ways_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of others may cut them so; a slot has pieces for the slices of any expert of its layer."""
    path, spec = pack_of(tmp_path, "qwen3moe", builtin("int8")), PackSource.spec

    def odd(source: PackSource, name: str) -> TensorSpec:
        t = spec(source, name)
        (s,) = t.slices[:1]
        return replace(t, slices=(s, replace(s, n0=64, n1=128))) if name == "blk.1.ffn_up_exps.weight#5" else t

    monkeypatch.setattr(PackSource, "spec", odd)
    with pytest.raises(SourceError, match=r"blk\.1\.ffn_up_exps.*stored in several ways"):
        ork.load(path)


def test_logits_that_overflow_name_the_layer(tmp_path: Path) -> None:
    tensors = tiny.random_tensors("mixtral")
    tensors["blk.1.ffn_norm.weight"][:] = 1e38
    path = tiny.write(tmp_path / "m.gguf", tiny.metadata("mixtral"), tensors)
    with ork.load(path, codec="f32") as model, pytest.raises(SourceError, match=r"blk\.1\.ffn_gate_inp\.weight"):
        model.logits(TOKENS[:3])


def test_defaults_where_the_metadata_are_silent() -> None:
    def experts(arch: str, **changes: Any) -> Any:
        name = tiny.architecture(arch)
        values = {k: v for k, v in tiny.metadata(arch, **changes).items() if v is not None}
        return read_config(values, vocab=9, tied=False, **traits(ARCHITECTURES[name])).experts

    e = {arch: experts(arch) for arch in tiny.MOE}
    assert {arch: x.normalise for arch, x in e.items()} == {
        "mixtral": True, "qwen2moe": False, "qwen3moe": True, "olmoe": False, "granitemoe": True, "lfm2moe": True,
    }  # fmt: skip
    assert [arch for arch, x in e.items() if x.gating == "sigmoid"] == ["lfm2moe"]
    assert [x.shared_ffn for x in e.values()] == [0, 56, 0, 0, 0, 0]
    old = experts("qwen2moe", **{"qwen2moe.expert_feed_forward_length": None,
                                 "qwen2moe.expert_shared_feed_forward_length": None})  # fmt: skip
    assert (old.ffn, old.shared_ffn) == (96 // tiny.USED, 96)
    assert not experts("qwen3moe", **{"qwen3moe.expert_weights_norm": False}).normalise
    assert experts("mixtral", **{"llama.expert_count": None}) is None
    with pytest.raises(OrkError, match=r"lfm2moe\.expert_feed_forward_length is missing"):
        experts("lfm2moe", **{"lfm2moe.expert_feed_forward_length": None})


def test_groups_are_taken_from_the_metadata(tmp_path: Path) -> None:
    """With one group of two used, the experts of a row are neighbours."""
    keys = {"qwen3moe.expert_group_count": 2, "qwen3moe.expert_group_used_count": 1}
    with ork.load(pack_of(tmp_path, "qwen3moe", builtin("int8"), **keys)) as model:
        seen: list[np.ndarray] = []
        model.ops.router = lambda layer, routes: seen.append(routes.ids().copy())
        model.logits(TOKENS[:50])
    ids = np.concatenate(seen)
    assert np.array_equal(ids[:, 0] // 4, ids[:, -1] // 4)
    assert len(set((ids[:, 0] // 4).tolist())) == 2
