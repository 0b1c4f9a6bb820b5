"""A mixture's experts on the emulated chip: the CPU's bits in a chain a core, whatever goes to which expert."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from ork.devices import npu_experts
from ork.devices.cpu import CpuDevice
from ork.devices.npu import NpuDevice
from ork.emulator.kernel import EmulatedKernel
from ork.errors import NpuError
from ork.npu.driver import Npu
from tests.devices.slices import random_slice
from tests.devices.test_npu import bits
from tests.emulator.board import Ended, ScriptedCore

KINDS = [("i8", 0), ("i4", 0), ("nf4", 0), ("i4", 32)]


class Case:
    """Rows for experts, `counts[e]` each, and `slices` slices of 64 columns of each expert that has any."""

    def __init__(self, counts: list[int], K: int, *, codec: str = "i8", group: int = 0, slices: int = 2, seed: int = 0):
        edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rng = np.random.default_rng(seed)
        self.x = native.Array.of(rng.standard_normal((int(edges[-1]), K), dtype=np.float32))
        self.rows = native.quantise(self.x, None, 0, group)
        self.N = 64 * slices
        active = [e for e, n in enumerate(counts) if n]
        self.parts = [
            random_slice(codec, 64, K, 100 * e + i, group=group, n0=64 * i) for e in active for i in range(slices)
        ]
        self.ranges = np.array([edges[e : e + 2] for e in active for _ in range(slices)], np.int32)

    def run(self, device: CpuDevice | NpuDevice, domains: int = 1) -> np.ndarray:
        out = native.Array(self.x.rows, self.N)
        out.numpy()[...] = np.nan
        handles = [device.place(s, b, i % domains) for i, (s, b, _) in enumerate(self.parts)]
        device.linear_experts(handles, self.ranges, self.x, self.rows, [out] * len(handles))
        for handle in handles:
            device.free(handle)
        return bits(out.numpy())


def npu_device(board: EmulatedKernel, **options: object) -> NpuDevice:
    return NpuDevice(Npu.open(board), CpuDevice(2), name="emu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "group"), KINDS)
@pytest.mark.parametrize("counts", [[1], [3, 0, 1, 40], [1] * 8, [0, 200, 0]])
def test_the_cpus_bits(kernel: EmulatedKernel, codec: str, group: int, counts: list[int]) -> None:
    case = Case(counts, 160, codec=codec, group=group)
    device = npu_device(kernel)
    assert (case.run(device) == case.run(CpuDevice(2))).all()
    assert (device.npu_ops, device.cpu_ops, device.failed_ops) == (1, 0, 0)
    device.close()


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any),
    st.sampled_from([32, 96, 1024, 4128]),
    st.integers(1, 3),
)
def test_any_routing(counts: list[int], K: int, domains: int) -> None:
    board = EmulatedKernel()
    case = Case(counts, K, seed=len(counts))
    device = npu_device(board)
    assert (case.run(device, domains) == case.run(CpuDevice(2))).all()
    assert device.cpu_ops == 0
    device.close()
    assert not board.report.violations


def test_the_literal_chip_agrees() -> None:
    board = EmulatedKernel(engine="literal")
    case = Case([2, 0, 3, 1], 64)
    device = npu_device(board)
    assert (case.run(device) == case.run(CpuDevice(1))).all()
    device.close()
    assert not board.report.violations


@pytest.mark.parametrize("experts", [1, 2, 8, 128])
def test_a_submit_a_core_for_all_experts_of_a_projection(kernel: EmulatedKernel, experts: int) -> None:
    case = Case([1 + e % 5 for e in range(experts)], 256)
    device = npu_device(kernel)
    case.run(device)  # the first results of new memory are thrown away
    before, programs = sum(device.npu.counters.submits), sum(device.npu.counters.programs)
    case.run(device)
    assert sum(device.npu.counters.submits) - before <= 3
    assert sum(device.npu.counters.programs) - programs >= 2 * experts
    device.close()


def test_cores_share_the_work() -> None:
    """One expert with most of the rows, many with a few: no core has much more than a third of the predicted time."""
    soc = Npu.open(EmulatedKernel()).soc
    work = [(npu_experts.seconds(rows, 2048, 768), i, [i]) for i, rows in enumerate([300] + [4] * 127)]
    shares = npu_experts.shares(work, soc)  # type: ignore[arg-type]
    assert sorted(i for share in shares for i in share) == list(range(128))  # type: ignore[misc]
    busy = [sum(work[i][0] for i in share) for share in shares]  # type: ignore[index]
    assert max(busy) < 1.1 * sum(busy) / 3


def test_more_sums_than_the_scratch_holds(kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, also within one expert; and rows that do not fit together."""
    case = Case([50, 1, 9], 512)
    want = case.run(CpuDevice(2))
    for name, size in (("OUTPUT_BYTES", 64 * 4 * 7), ("INPUT_BYTES", 512 * 11)):
        with monkeypatch.context() as patch:
            patch.setattr(npu_experts, name, size)
            device = npu_device(kernel)
            assert (case.run(device) == want).all()
            assert device.npu_ops > 5
            device.close()


def test_what_the_chip_does_not_finish_the_cpu_computes() -> None:
    dead = [ScriptedCore(act=lambda *_: Ended(tasks=0, hang="dead")) for _ in range(3)]
    board = EmulatedKernel(cores=dead)
    case = Case([3, 1], 128)
    device = npu_device(board)
    with pytest.warns(RuntimeWarning, match="the CPU computes instead"):
        got = case.run(device)
    assert (got == case.run(CpuDevice(1))).all()
    assert (device.failed_ops, device.npu_ops, device.cpu_ops) == (1, 0, 1)
    device.close()
    assert board.stats.live_buffers == 0


def test_few_rows_an_expert_stay_on_the_cpu(kernel: EmulatedKernel) -> None:
    device = npu_device(kernel, min_rows=32)
    device.expert_rows = 4.5
    few, many = Case([4, 4, 5], 128, codec="i4"), Case([1, 9], 128, codec="i4")
    assert (few.run(device) == few.run(CpuDevice(1))).all()
    assert (device.npu_ops, device.cpu_ops) == (0, 1)
    assert (many.run(device) == many.run(CpuDevice(1))).all()
    assert (device.npu_ops, device.cpu_ops) == (1, 1)
    device.close()


def test_experts_of_four_bit_rows_are_the_cpus(kernel: EmulatedKernel) -> None:
    """int4 programs take rows in another form, in which those of an expert do not lie together."""
    device = NpuDevice(Npu.open(kernel), CpuDevice(1, w4a4=True), name="emu", int4_k=640)
    case = Case([3, 2], 128, codec="i4")
    case.rows = native.quantise(case.x, None, 0, 0, None, 7)
    assert (case.run(device) == case.run(CpuDevice(1, w4a4=True))).all()
    assert (device.npu_ops, device.cpu_ops) == (0, 1)
    device.close()


def test_what_was_prepared_is_freed_when_the_next_chain_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_experts, "in_chains", lambda share, _: [[job] for job in share])
    board = EmulatedKernel()
    device, case = npu_device(board), Case([3, 1, 4, 2], 128)
    prepare, calls = device.npu.prepare, count()

    def full(jobs: object) -> object:
        if next(calls) % 3 == 2:
            raise NpuError("no room")
        return prepare(jobs)  # type: ignore[arg-type]

    case.run(device)  # scratch is made
    live = board.stats.live_buffers
    monkeypatch.setattr(device.npu, "prepare", full)
    handles = [device.place(s, b) for s, b, _ in case.parts]
    out = native.Array(case.x.rows, case.N)
    for _ in range(600):  # of programs that one buffer holds at most 1024
        with pytest.raises(NpuError, match="no room"):
            device.linear_experts(handles, case.ranges, case.x, case.rows, [out] * len(handles))
    for handle in handles:
        device.free(handle)
    assert board.stats.live_buffers == live
    device.close()
