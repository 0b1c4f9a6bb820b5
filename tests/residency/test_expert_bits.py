"""Experts through windows of any size, by every policy, on every device: the same logits to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ork
from ork import models
from ork.cli.main import main
from ork.cli.skew import dense_bytes
from ork.devices.npu import NpuDevice
from ork.residency.experts import ExpertPlan
from ork.residency.source import PackSource
from ork.residency.window import Window
from tests import tiny

TOKENS = [(7 * i) % tiny.VOCAB for i in range(70)]
EXPERTS = 8

F32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[F32], int, int]:
    """A pack with a profile in it; its logits of a prefill and of single rows without a window; bytes of its dense
    weights and of one expert."""
    folder = tmp_path_factory.mktemp("moe")
    path = tiny.moe_gguf(folder / "moe.gguf", experts=EXPERTS)
    assert main(["convert", str(path)]) == 0
    pack, text = path.with_suffix(".orkpack"), folder / "text.txt"
    text.write_text("Anyone may be said to hold a lantern for somebody. " * 5)
    assert main(["skew", str(pack), "-f", str(text), "-c", "128", "--save"]) == 0
    with ork.load(pack, device="cpu", threads=1) as model:
        layer = model.stream.expert_layers[0]
        expert = sum(-(-model.device.mapped_bytes(s) // 4096) * 4096 for t in layer.tensors(0) for s in t.slices)
        return pack, [model.logits(TOKENS), model.logits(TOKENS[:12], chunk=1)], dense_bytes(model), expert


# (experts that the window has room for, bytes more or less, policy, prefetch, threads, device, domains)
WAYS = [
    (16, 0, "lru", True, 1, "cpu", None),
    (8, 0, "lru", True, 2, "cpu", None),
    (8, 0, "lfu", False, 2, "cpu", None),
    (5, 4096, "lfu", True, 1, "cpu", None),
    (10, 0, "pinned", True, 2, "cpu", None),
    (4, 0, "pinned", False, 1, "cpu", None),
    (3, 0, "lru", True, 1, "cpu", None),  # all layers share them
    (2, -40960, "lru", True, 2, "cpu", None),  # not even the dense weights fit
    (0, -40960, "lru", True, 1, "cpu", None),  # in slices
    (0, -20480, "lru", False, 2, "cpu", None),
    (8, 0, "lru", True, 1, "emu", None),
    (10, 4096, "pinned", True, 2, "emu", 2),
    (16, 0, "lfu", False, 1, "emu", 2),
    (9, 0, "lfu", True, 2, "hybrid", None),
]


@pytest.mark.parametrize("cached", [True, False])  # copied from the page cache, or waited for
@pytest.mark.parametrize(("room", "more", "policy", "prefetch", "threads", "device", "domains"), WAYS)
def test_the_same_bits(
    case: tuple[Path, list[F32], int, int],
    room: int,
    more: int,
    policy: str,
    prefetch: bool,
    threads: int,
    device: str,
    domains: int | None,
    cached: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PackSource, "cached", lambda *_: cached)
    pack, want, dense, expert = case
    window = dense + room * expert + more
    with ork.load(
        pack,
        device=device,
        threads=threads,
        window=window,
        prefetch=prefetch,
        expert_policy=policy,
        domains=domains,
        preload=True,
    ) as model:
        got = [model.logits(TOKENS), model.logits(TOKENS[:12], chunk=1), model.logits(TOKENS, chunk=9)]
        stats, stream = model.stream.stats, model.stream
        assert isinstance(stream, Window)
        plan = stream.expert_plan
        assert isinstance(plan, ExpertPlan)
        assert stats.peak_bytes <= window
        assert plan.parts == (room == 0)
        if plan.pools:
            assert stats.experts.loads.total() > 0
            assert stats.experts.hits.total() < stats.experts.lookups.total()
        if device == "cpu" and room == 16:
            assert plan.reason == "all 16 experts fit"
            assert model.ready is not None
            assert model.ready.slices == sum(
                len(t.slices) for t in models.order_of_pass(model.ops) if t.name != "token_embd.weight"
            )
        if domains is not None:
            assert model.ready is not None
            assert sorted(model.ready.domains) == list(range(domains))
    for logits, expected in zip(got, [*want, want[0]]):
        assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32))
    assert stats.resident_bytes == 0


@pytest.mark.parametrize(("room", "policy"), [(8, "lru"), (10, "pinned"), (3, "lru"), (16, "lru"), (2, "lru")])
def test_experts_of_the_cpu_take_no_npu_memory(case: tuple[Path, list[F32], int, int], room: int, policy: str) -> None:
    """They count to the window, and lie in host memory: a board's domains are for what its NPU reads."""
    pack, want, dense, expert = case
    short = 16384 if room == 2 else 0  # not even the dense weights fit
    window = dense + room * expert - short
    with ork.load(
        pack, device="emu", experts="cpu", window=window, expert_policy=policy, domains=2, preload=True
    ) as model:
        stats, device = model.stream.stats, model.device
        assert isinstance(device, NpuDevice)
        assert model.ready is not None
        slices = sum(device.npu.memory.mapped.values()) - sum(device.scratch_bytes.values())
        assert slices == sum(model.ready.domains.values()) == sum(stats.domains.values())
        assert sorted(model.ready.domains) == [0, 1]
        floats = sum(s.codec == "f32" for t in model.stream.tensors for s in t.slices)
        assert slices < dense if floats or short else slices == dense
        assert stats.resident_bytes <= window
        assert stats.resident_bytes - slices >= room * expert
        got = [model.logits(TOKENS), model.logits(TOKENS[:12], chunk=1)]
    for logits, expected in zip(got, want):
        assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32))
    assert stats.resident_bytes == 0


def test_what_lies_in_the_mapped_pack_is_in_no_domain(case: tuple[Path, list[F32], int, int]) -> None:
    with ork.load(case[0], device="emu", experts="cpu", preload=True) as model:
        stats, device = model.stream.stats, model.device
        assert isinstance(device, NpuDevice)
        slices = sum(device.npu.memory.mapped.values()) - sum(device.scratch_bytes.values())
        copied = [s for t in model.stream.tensors for s in t.slices if device.copies(s)]
        assert stats.domains == {0: sum(map(device.mapped_bytes, copied))}
        assert slices >= stats.domains[0]
        assert stats.resident_bytes > slices
