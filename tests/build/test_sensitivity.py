"""Measured recipes: what is measured is what happens, and budgets are kept."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ork
from ork.build import outputs
from ork.build.allocate import Measurements
from ork.build.convert import convert
from ork.build.sensitivity import SEQUENCE, calibration_tokens, groups_of, measure
from ork.devices.cpu import CpuDevice
from ork.errors import UsageError
from ork.pack.format import align
from ork.pack.reader import Pack
from ork.quant import codecs, rotation
from ork.quant.recipe import Recipe, usual
from ork.sources.base import open_source
from ork.text.tokenizer import Tokenizer, build_tokenizer
from tests import tiny

TOKENS = np.random.default_rng(5).integers(3, tiny.VOCAB, (2, 64)).astype(np.int32)

BPW = np.arange(8.5, 16, 0.25)  # a tiny model's slices are mostly padding: pages take 8.3 bits a weight at least


def measured(path: Path, **options: object) -> Measurements:
    with contextlib.closing(open_source(path)) as source:
        return measure(source, TOKENS, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.random_gguf(tmp_path_factory.mktemp("sensitivity") / "model.gguf")


@pytest.fixture(scope="module")
def found(gguf: Path) -> Measurements:
    return measured(gguf)


def made(source: Path, target: Path, recipe: Recipe) -> Path:
    with contextlib.closing(open_source(source)) as s:
        return convert(s, target, recipe)


def logits(path: Path) -> np.ndarray:
    """Of TOKENS, f64 [rows, vocab]."""
    with ork.load(path, kv="f32") as model:
        return np.concatenate([model.logits(row) for row in TOKENS.tolist()]).astype(np.float64)


def kl(base: np.ndarray, other: np.ndarray) -> float:
    def log_softmax(z: np.ndarray) -> np.ndarray:
        z = z - z.max(axis=1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    p, q = log_softmax(base), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


# --- what is measured


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_all_weights_in_all_codecs_that_they_allow(tmp_path: Path, arch: str) -> None:
    path = tiny.random_gguf(tmp_path / "x.gguf", arch)
    found = measured(path)
    with contextlib.closing(open_source(path)) as source:
        shapes = {t.name: t.shape for t in source.tensors.values() if len(t.shape) == 2}
    assert {t.name: t.shape for t in found.tensors} == shapes
    for t in found.tensors:
        groups = {g for g in (32, 64) if t.shape[1] % g == 0}
        assert {(o.codec, o.group) for o in t.options} == {(c, g) for c in ("i4", "nf4", "i8") for g in {0, *groups}}
        costs = {(o.codec, o.group): o.error for o in t.options}
        assert t.coarse > 0
        assert costs["i8", 0] < 0.1 * costs["nf4", 0] < costs["i4", 0]


def test_bytes_are_those_of_the_pack(gguf: Path, found: Measurements, tmp_path: Path) -> None:
    for kind in (("nf4", 32), ("i8", 0), ("i4", 0)):
        pack = made(gguf, tmp_path / f"{kind[0]}.orkpack", Recipe("x", usual(*kind)))
        with contextlib.closing(Pack.open(pack)) as p:
            for t in found.tensors:
                own = sum(align(s.nbytes) for s in p.tensor(t.name).slices)
                assert [o.nbytes for o in t.options if (o.codec, o.group) == kind] == [own]


@pytest.mark.parametrize(
    "name", ["blk.0.attn_v.weight", "blk.1.ffn_down.weight", "blk.0.ffn_up.weight", "output.weight"]
)
@pytest.mark.parametrize("kind", [("nf4", 32), ("i4", 0)])
def test_a_tensor_costs_about_what_was_foretold(
    gguf: Path, found: Measurements, tmp_path: Path, name: str, kind: tuple[str, int]
) -> None:
    recipe = Recipe("x", usual("f32"), ((f"^{name}$", usual(*kind, rotation=found.mode)),))
    real = kl(logits(made(gguf, tmp_path / "f32.orkpack", Recipe("f32", usual("f32")))),
              logits(made(gguf, tmp_path / "x.orkpack", recipe)))  # fmt: skip
    (foretold,) = [o.error for t in found.tensors if t.name == name for o in t.options if (o.codec, o.group) == kind]
    assert foretold == pytest.approx(real, rel=0.5)


def test_a_tied_embedding_costs_as_table_and_as_head(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tiny.random_tensors(tied=True))
    apart = tiny.random_tensors(tied=True)
    apart["output.weight"] = apart["token_embd.weight"].copy()
    other = tiny.write(tmp_path / "y.gguf", tiny.metadata(), apart)
    tied = {t.name: t for t in measured(path).tensors}
    untied = {t.name: t for t in measured(other).tensors}
    for i, option in enumerate(tied["token_embd.weight"].options):
        both = sum(untied[name].options[i].error for name in ("token_embd.weight", "output.weight"))
        assert option.error == pytest.approx(both, rel=1e-6)


def test_what_does_nothing_costs_nothing(tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_down.weight"][:] = 0
    found = measured(tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors))
    kinds = {}
    for t, o in zip(found.tensors, found.allocate(found.bytes_at(10), "x").chosen):
        kinds[t.name] = o.codec, o.group
        if t.name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"):
            assert o.error == 0
            assert (o.codec, o.group) in {("nf4", 0), ("i4", 0)}
    assert "i8" in {codec for codec, _ in kinds.values()}


def test_threads_do_not_change_what_is_measured(gguf: Path, found: Measurements) -> None:
    assert measured(gguf, threads=1) == found
    assert measured(gguf, threads=3) == found


def test_progress_ends_at_its_total(gguf: Path) -> None:
    seen: list[tuple[int, int]] = []
    measured(gguf, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_too_little_memory(gguf: Path) -> None:
    with pytest.raises(UsageError, match=r"--max-ram 20 MiB is too little: measuring this model takes \d+ MiB"):
        measured(gguf, max_ram=20 << 20)


def test_names_that_share_a_pass() -> None:
    roles = ("attn_q", "attn_k", "shortconv.in_proj", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_shexp")
    names = [f"blk.3.{role}.weight" for role in roles]
    assert [[n[6:-7] for n in group] for group in groups_of(names)] == [
        ["attn_q", "attn_k", "attn_output"], ["shortconv.in_proj"], ["ffn_gate_exps", "ffn_up_shexp"]
    ]  # fmt: skip


# --- errors of outputs


@pytest.mark.parametrize("mode", rotation.MODES)
def test_output_errors_against_float64(mode: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 96)).astype(np.float32)
    x[3] *= 1000  # rows count alike
    w = rng.standard_normal((50, 96)).astype(np.float32)
    kinds = outputs.kinds_for(96)
    found = outputs.output_errors(CpuDevice(), x, w, kinds, mode)
    assert set(found) == {(c, g) for c in ("nf4", "i4", "i8") for g in (0, 32)}
    turned = rotation.rotate_rows(w, 96, mode).astype(np.float64)
    rows = rotation.rotate_rows(x, 96, mode).astype(np.float64)
    y = rows @ turned.T
    for (codec, group), e in found.items():
        q = codecs.quantise(codec, turned.astype(np.float32), group, search="absmax" if codec == "i8" else "mse")
        blocks = rows.reshape(20, -1, group or 96)
        scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
        rounded = (np.round(blocks / scale) * scale).reshape(20, 96)
        product = rounded @ codecs.dequantise(codec, q, 96).astype(np.float64).T
        want = np.mean(((product - y) ** 2).sum(axis=1) / (y**2).sum(axis=1))
        assert e == pytest.approx(want, rel=0.25 if codec == "i8" else 0.05)


def test_samples_cover_a_weight() -> None:
    assert outputs.sample_rows(100) == [(0, 100)]
    spread = outputs.sample_rows(10_000)
    assert sum(b - a for a, b in spread) == outputs.SAMPLE
    assert (spread[0][0], spread[-1][1]) == (0, 10_000)
    assert all(b <= c for (_, b), (c, _) in pairwise(spread))


# --- recipes


def test_more_bits_never_cost_more(found: Measurements) -> None:
    allocations = [found.allocate(found.bytes_at(bpw), "x") for bpw in BPW]
    costs = [a.kl for a in allocations]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.1 * costs[0]
    assert all(a.nbytes <= found.bytes_at(bpw) for a, bpw in zip(allocations, BPW))


def test_the_recipe_is_the_allocation(gguf: Path, found: Measurements, tmp_path: Path) -> None:
    budget = found.bytes_at(10)
    allocation = found.allocate(budget, "mixed")
    recipe = allocation.recipe()
    assert Recipe.of(json.loads(json.dumps(recipe.record()))) == recipe
    with contextlib.closing(Pack.open(made(gguf, tmp_path / "x.orkpack", recipe))) as pack:
        for t, o in zip(found.tensors, allocation.chosen):
            stored = pack.tensor(t.name)
            assert (stored.codec, stored.group) == (o.codec, o.group)
            assert pack.recipe["figures"]["tensors"][t.name] == pytest.approx(o.error, rel=1e-3, abs=1e-12)
        weights = sum(align(s.nbytes) for t in found.tensors for s in pack.tensor(t.name).slices)
        assert weights == allocation.nbytes <= budget
        assert pack.recipe["figures"]["bytes"] == allocation.nbytes


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_tensors_that_read_the_same_rows_agree_on_the_group(tmp_path: Path, arch: str, share: float) -> None:
    """So that query, key and value share one quantised input, gate and up another; but for what the user gives."""
    found = measured(tiny.random_gguf(tmp_path / "x.gguf", arch))
    base = Recipe("nf4", usual("nf4")).but([("attn_[qk]", usual("i8", 32)), ("ffn_up", usual("f16"))])
    roles = "1.attn_k", "0.attn_q", "0.ffn_up"
    for some, given in (found, []), (found.fixed(base, [*roles]), [f"blk.{role}" for role in roles]):
        least, most = (sum(f(o.nbytes for o in t.options) for t in some.tensors) for f in (min, max))
        allocation = some.allocate(least + int(share * (most - least)), "x")
        group = {t.name.removesuffix(".weight"): o.group for t, o in zip(some.tensors, allocation.chosen)}
        for i in range(2):
            for call in ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"):
                assert len({group[n] for n in (f"blk.{i}.{role}" for role in call) if n not in given}) == 1


def test_what_the_user_gives_binds_no_other_tensor(found: Measurements) -> None:
    """Not even where it comes first of those that read the same rows."""
    base = Recipe("nf4", usual("nf4")).but([("ffn_gate", usual("f16"))])
    fixed = found.fixed(base, ["ffn_gate"])
    most = sum(max(o.nbytes for o in t.options) for t in fixed.tensors)
    ups = [(t, o) for t, o in zip(fixed.tensors, fixed.allocate(most, "x").chosen) if "ffn_up" in t.name]
    assert all(o.error == min(o.error for o in t.options) and o.group for t, o in ups)


def test_a_budget_too_small_says_what_it_takes(found: Measurements) -> None:
    with pytest.raises(
        UsageError, match=r"2\.00 bits a weight are too few for this model: the smallest choice of codecs takes"
    ):
        found.allocate(found.bytes_at(2), "x")


def test_promotion_is_int8_within_the_extra_bytes(found: Measurements) -> None:
    base = Recipe("nf4", usual("nf4", 32))
    least = sum(next(o.nbytes for o in t.options if (o.codec, o.group) == ("nf4", 32)) for t in found.tensors)
    before = None
    for extra in (0, 12 << 10, 60 << 10, 1 << 30):
        allocation = found.promote(base, extra)
        assert allocation.nbytes <= least + extra
        assert {(o.codec, o.group) for o in allocation.chosen} <= {("nf4", 32), ("i8", 0)}
        assert before is None or allocation.kl < before
        before = allocation.kl
    assert {o.codec for o in allocation.chosen} == {"i8"}


def test_promotion_leaves_the_rest_of_a_recipe_alone(found: Measurements) -> None:
    """Its rotation, searches, GPTQ and other codecs; the name says megabytes as they were given."""
    four = usual("nf4", 32, rotation="block", search="absmax", gptq=True)
    base = Recipe("mine", four, (("attn_v", usual("f16")), ("ffn_up", usual("i4", 64))))
    allocation = found.promote(base, 10_000_000)
    recipe = allocation.recipe()
    assert recipe.name == "mine+10MB"
    assert recipe.default == four
    assert recipe.choose("blk.0.attn_v.weight") == usual("f16")
    assert recipe.choose("blk.0.attn_q.weight") == usual("i8", rotation="block", gptq=True)
    assert recipe.choose("blk.0.ffn_up.weight") == usual("i8", rotation="mix")
    same = found.promote(base, 0).recipe()
    assert [same.choose(t.name) for t in found.tensors] == [base.choose(t.name) for t in found.tensors]


def test_tensors_that_are_given_a_codec_count_in_the_budget(found: Measurements) -> None:
    base = Recipe("nf4", usual("nf4")).but([("attn_q", usual("f32")), ("attn_k", usual("i4", 32))])
    fixed = found.fixed(base, ["attn_q", "attn_k"])
    budget = found.bytes_at(12)
    allocation = fixed.allocate(budget, "x")
    codec = {t.name: (o.codec, o.group) for t, o in zip(fixed.tensors, allocation.chosen)}
    assert codec["blk.0.attn_q.weight"] == ("f32", 0)
    assert codec["blk.1.attn_k.weight"] == ("i4", 32)
    assert allocation.nbytes <= budget
    assert allocation.kl > found.allocate(budget, "x").kl  # less is left for the others


def test_experts_are_measured_as_stacks_and_kept_within_the_budget(tmp_path: Path) -> None:
    """Also those that no row of the text went to; routers stay f32."""
    source = tiny.moe_gguf(tmp_path / "moe.gguf", experts=16, inner=64)
    with contextlib.closing(open_source(source)) as s:
        found = measure(s, TOKENS[:1, :8])
    names = [t.name for t in found.tensors]
    assert not any("#" in name for name in names)
    by_name = {t.name: t for t in found.tensors}
    gate = by_name["blk.0.ffn_gate_exps.weight"]
    assert gate.shape == (16 * 64, 64)
    assert gate.coarse > 0
    assert [o.codec for o in by_name["blk.0.ffn_gate_inp.weight"].options] == ["f32"]
    assert by_name["blk.0.ffn_up_exps.weight"].reads == gate.reads == gate.name
    allocation = found.allocate(found.bytes_at(9.5), "mixed")
    target = made(source, tmp_path / "moe.orkpack", allocation.recipe())
    with Pack.open(target) as pack:
        for t, option in zip(found.tensors, allocation.chosen):
            parts = [n for n in pack.names() if n.partition("#")[0] == t.name]
            assert {pack.tensor(n).codec for n in parts} == {option.codec}
            assert sum(align(s.nbytes) for n in parts for s in pack.tensor(n).slices) == option.nbytes


# --- the text


def test_calibration_tokens_are_spread_over_the_text(gguf: Path) -> None:
    with contextlib.closing(open_source(gguf)) as source:
        tokenizer = Tokenizer.load(build_tokenizer(source.metadata))
    text = "".join(chr(97 + i // SEQUENCE) for i in range(8 * SEQUENCE))
    tokens = calibration_tokens(tokenizer, text)
    assert tokens.shape == (2, SEQUENCE)
    assert tokenizer.decode(tokens.reshape(-1).tolist()) == "c" * SEQUENCE + "g" * SEQUENCE
    assert calibration_tokens(tokenizer, text[: SEQUENCE + 5]).shape == (1, SEQUENCE)
    with pytest.raises(UsageError, match="text to calibrate with is too short: give one of 128 tokens or more"):
        calibration_tokens(tokenizer, text[: SEQUENCE - 1])
