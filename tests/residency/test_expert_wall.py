"""Experts past the 4 GiB of a domain: refused where they are to be in one, run where they are spread or streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ork.devices.base import SliceSpec
from ork.devices.cpu import CpuDevice
from ork.devices.npu import NpuDevice
from ork.emulator.kernel import EmulatedKernel
from ork.errors import NpuError, UsageError
from ork.npu.buffers import IOVA_CEILING
from ork.npu.driver import Npu
from ork.residency.planner import arrange, plan_placement
from ork.residency.stream import ExpertLayer, Stream, TensorSpec
from ork.residency.window import Window
from tests.residency.fakes import FakeSource

LAYERS, EXPERTS, K = 16, 32, 4096  # 512 experts of 12 MiB: 6 GiB
BLOB = K * 256 + 4 * 256


class Sparse(FakeSource):
    """Slices of nothing but zero pages."""

    def read_into(self, name: str, index: int, memory: npt.NDArray[np.uint8]) -> int:
        return BLOB


def tensor(name: str, columns: int) -> TensorSpec:
    specs = tuple(SliceSpec(name, "i8", K, K, K, i, i + 256) for i in range(0, columns, 256))
    return TensorSpec(name, "i8", columns, K, 0, 0, specs)


def model() -> tuple[list[TensorSpec], list[ExpertLayer], Sparse]:
    dense = [tensor(f"blk.{i}.attn_q.weight", 256) for i in range(LAYERS)]
    layers = []
    for i in range(LAYERS):
        parts = [
            tuple(tensor(f"blk.{i}.ffn_{part}_exps.weight#{e}", 1024) for e in range(EXPERTS))
            for part in ("gate", "up", "down")
        ]
        layers.append(ExpertLayer(i, *parts))
    every = [t for layer in layers for e in range(EXPERTS) for t in layer.tensors(e)]
    return dense, layers, Sparse([*dense, *every])


def device(ceiling: int = IOVA_CEILING) -> tuple[EmulatedKernel, NpuDevice]:
    board = EmulatedKernel(views="sampled")
    return board, NpuDevice(Npu.open(board, iova_ceiling=ceiling), CpuDevice(1), name="emu")


@pytest.mark.slow
def test_forced_into_one_domain_they_fail() -> None:
    """By the planner, else by the driver, else by the chip's own kernel."""
    for says, ceiling in (("do not fit domain 0", IOVA_CEILING), ("the address space of the domain is full", 8 << 30)):
        dense, layers, source = model()
        board, npu = device(ceiling)
        stream = Stream(source, npu)  # type: ignore[arg-type]
        stream.tensors, stream.expert_layers = dense, layers
        keys, _ = stream.staying()
        assert len(keys) == LAYERS * (1 + EXPERTS * 12)
        if ceiling == IOVA_CEILING:
            with pytest.raises(UsageError, match=r"6\.\d+ GiB of slices do not fit 1 domains"):
                plan_placement([(key, BLOB) for key in keys], npu.capacity(), domains=1)
        with pytest.raises(NpuError, match=says):
            stream.reside()
        stream.close()
        npu.close()
        assert (board.stats.live_buffers, board.report.violations) == (0, [])


def visit(stream: Stream | Window, layer: ExpertLayer, needed: Sequence[int], seen: Callable[[int], None]) -> None:
    for ids, handles in stream.experts(layer, needed):
        for e, (gate, up, down) in zip(ids, handles):
            assert [len(gate), len(up), len(down)] == [4, 4, 4]
            seen(e)


@pytest.mark.slow
def test_spread_over_domains_they_run() -> None:
    dense, layers, source = model()
    board, npu = device()
    stream = Stream(source, npu)  # type: ignore[arg-type]
    stream.tensors, stream.expert_layers = dense, layers
    placement = arrange(stream, npu.capacity())
    assert len(placement.bytes) == 2
    ready = stream.reside()
    assert ready.slices == LAYERS * (1 + EXPERTS * 12)
    found: list[int] = []
    for layer in layers:
        visit(stream, layer, [0, 31], found.append)
    assert found == [0, 31] * LAYERS
    stream.close()
    npu.close()
    assert (board.stats.live_buffers, board.report.violations) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "domains"), [(3 << 30, 1), (5 << 30, 2)])
def test_through_a_window_they_run(size: int, domains: int) -> None:
    dense, layers, source = model()
    board, npu = device()
    window = Window(source, npu, size)  # type: ignore[arg-type]
    window.tensors, window.expert_layers = dense, layers
    assert len(arrange(window, npu.capacity()).bytes) == domains
    found: list[int] = []
    for layer in layers:
        visit(window, layer, range(EXPERTS), found.append)
        visit(window, layer, [1, 5], found.append)
    assert sorted(found) == sorted([*range(EXPERTS), 1, 5] * LAYERS)
    assert window.stats.peak_bytes <= size
    assert window.stats.experts.loads.total() >= LAYERS * EXPERTS
    assert sum(n > 0 for n in window.stats.domains.values()) == domains
    window.close()
    npu.close()
    assert (board.stats.live_buffers, board.report.violations) == (0, [])
