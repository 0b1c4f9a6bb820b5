"""bench/moe_from_dense.py: a dense model divided into experts is the dense model while all of them are used."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ork
from ork.api import LoadedModel
from ork.native import Routes
from ork.sources.gguf import GgufSource
from tests import tiny

BENCH = Path(__file__).parents[2] / "bench"
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 4
TOKENS = [(7 * i) % tiny.VOCAB for i in range(70)]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("moe_from_dense")


def divided(tool: ModuleType, folder: Path, arch: str, experts: int, top_k: int) -> tuple[Path, Path]:
    dense, out = tiny.random_gguf(folder / "dense.gguf", arch), folder / "moe.gguf"
    tool.convert(dense, out, TEXT, experts=experts, top_k=top_k, tokens=200, kind="F32")
    return dense, out


def greedy(model: LoadedModel) -> str:
    return "".join(model.generate("It is", max_tokens=24))


@pytest.mark.parametrize(("arch", "experts"), [("llama", 3), ("llama", 4), ("qwen2", 2), ("qwen2", 4), ("llama", 1)])
def test_with_all_experts_it_is_the_dense_model(tool: ModuleType, tmp_path: Path, arch: str, experts: int) -> None:
    """Also where neurons do not divide among experts, and through biases and the shared expert."""
    dense, out = divided(tool, tmp_path, arch, experts, experts)
    with ork.load(dense, codec="f32", device="cpu") as a, ork.load(out, codec="f32", device="cpu") as b:
        assert b.model.config.experts is not None
        assert b.model.config.experts.count == b.model.config.experts.used == experts
        want, got = a.logits(TOKENS).astype(np.float64), b.logits(TOKENS)
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        assert greedy(a) == greedy(b)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_with_some_experts_rows_go_where_they_add_most(tool: ModuleType, tmp_path: Path, arch: str) -> None:
    """Every row to k experts, not all rows to the same; and weights that count each chosen expert about once."""
    _, out = divided(tool, tmp_path, arch, 4, 2)
    routed: dict[int, Routes] = {}
    with ork.load(out, codec="f32", device="cpu") as model:
        scale = 4 if arch == "qwen2" else 2
        model.ops.router = routed.__setitem__
        model.logits(TOKENS)
    assert sorted(routed) == [0, 1]
    for routes in routed.values():
        assert routes.ids().shape == (len(TOKENS), 2)
        assert len(np.unique(routes.ids())) > 2
        assert np.abs(scale * routes.weights() - 1).max() < 0.5


@pytest.mark.parametrize("mode", ["npu", "cpu", "auto"])
def test_it_computes_the_same_on_every_device(tool: ModuleType, tmp_path: Path, mode: str) -> None:
    _, out = divided(tool, tmp_path, "qwen2", 4, 2)
    with ork.load(out, device="cpu") as cpu, ork.load(out, device="hybrid", experts=mode) as npu:
        assert np.array_equal(cpu.logits(TOKENS), npu.logits(TOKENS))
        assert np.array_equal(cpu.logits(TOKENS[:4], chunk=1), npu.logits(TOKENS[:4], chunk=1))
        assert f"experts on the {'CPU' if mode == 'cpu' else 'NPU'}" in npu.device_reason or mode == "auto"


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 100))
def test_clusters_are_balanced(n: int, clusters: int, spare: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        tool = importlib.import_module("moe_from_dense")
    room = -(-n // clusters) + spare
    chosen = tool.balanced(np.random.default_rng(seed).standard_normal((n, clusters)).astype(np.float32), room)
    assert chosen.min() >= 0
    assert np.bincount(chosen).max() <= room


def test_neurons_that_fire_together_go_together(tool: ModuleType) -> None:
    rng = np.random.default_rng(0)
    groups = np.arange(48) % 4
    patterns = (rng.random((4, 60)) < 0.3)[groups] ^ (rng.random((48, 60)) < 0.02)
    chosen = tool.cluster(patterns.astype(np.float32), 4, 12)
    assert len(set(zip(groups, chosen))) <= 8  # k-means may start badly; by chance it would be 16
    x = rng.standard_normal((200, 16)).astype(np.float32)
    wanted = x @ rng.standard_normal((16, 4)).astype(np.float32)
    assert ((x @ tool.fit_router(x, wanted).T).argmax(axis=1) == wanted.argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize(
    ("arch", "options", "said"),
    [
        ("qwen3", {}, "architecture qwen3"),
        ("llama", {"top_k": 5}, "give 1 to 4"),
    ],
)
def test_what_it_cannot_do_is_said(
    tool: ModuleType, tmp_path: Path, arch: str, options: dict[str, int], said: str
) -> None:
    dense = tiny.random_gguf(tmp_path / "dense.gguf", arch)
    with pytest.raises(SystemExit, match=said):
        tool.convert(dense, tmp_path / "moe.gguf", TEXT, **{"experts": 4, "top_k": 2, **options})
    assert os.listdir(tmp_path) == ["dense.gguf"]


def test_shapes_of_known_models_convert_and_run(tool: ModuleType, tmp_path: Path) -> None:
    """The first layers of LFM2-8B-A1B and Qwen3-30B-A3B at a hundredth of their size: the same tensors."""
    shapes = importlib.import_module("moe_shapes")
    for name, shape in shapes.SHAPES.items():
        small = dataclasses.replace(
            shape, width=128, heads=4, kv_heads=2, head_dim=32, expert_ffn=64, experts=8, top_k=2, dense_ffn=96
        )
        path = tmp_path / f"{name}.gguf"
        shapes.write(path, small, 3, "Q4_0")
        source = GgufSource(path)
        assert source.tensors["blk.2.ffn_gate_exps.weight"].shape == (8, 64, 128)
        source.close()
        with ork.load(path, device="cpu") as model:
            logits = model.logits(TOKENS)
            assert np.isfinite(logits).all()
            assert logits.std() > 0


@pytest.mark.slow
def test_smollm2_in_experts_is_smollm2(tool: ModuleType, tmp_path: Path) -> None:
    from ork.sources import hub

    dense, out = hub.pull("smollm2-135m"), tmp_path / "moe.gguf"
    tool.convert(dense, out, TEXT, experts=16, top_k=16, tokens=128, kind="F32")
    with ork.load(dense, codec="f32", device="cpu") as a, ork.load(out, codec="f32", device="cpu") as b:
        tokens = a.tokenizer.encode(TEXT)[:80]
        want, got = a.logits(tokens).astype(np.float64), b.logits(tokens)
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        assert greedy(a) == greedy(b)
