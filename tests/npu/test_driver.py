"""The driver against a scripted kernel: chains, patching, failures, precision changes, memory, what is refused."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.errors import NpuError, SubmitFailed, UsageError
from ork.npu import uabi
from ork.npu.buffers import AllocationFailed
from ork.npu.chain import CHAIN_LIMIT, Step
from ork.npu.driver import Npu
from ork.npu.jobs import Int8Job
from ork.npu.kernel import RecordingKernel
from ork.npu.matmul import MatmulShape, plan, program
from ork.npu.ranges import Ranges
from ork.npu.running import RESET_BEFORE
from ork.npu.soc import RK3576
from tests.npu.fake_kernel import FakeKernel, Ran, dropped

INPUT, WEIGHTS, OUTPUT = 0x1070, 0x1110, 0x4020


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def npu(kernel: FakeKernel) -> Iterator[Npu]:
    with Npu.open(kernel) as opened:
        yield opened
    assert not kernel.buffers
    assert not kernel.fds
    assert not kernel.mapped


def job(npu: Npu, M: int = 4, K: int = 64, N: int = 64, *, domain: int = 0, **more: int) -> Int8Job:
    room = [npu.buffer(n, domain=domain) for n in (4 * M * K + 4096, K * N + 4096, 8 * M * N * 4 + 4096)]
    for buffer in room:
        buffer.fresh = False
    return Int8Job(*room, M, K, N, **more)


def step(npu: Npu, kind: str, N: int = 64) -> Step:
    (tile,) = plan(MatmulShape(1, 64, N, "int8" if kind == "int16" else kind))
    operands = {role: (npu.buffer(8192), 0) for role in ("input", "weights", "output")}
    operands["output"][0].fresh = False
    return Step(replace(program(tile), kind=kind), operands)


# -- chains ------------------------------------------------------------------------------------------------------------


def test_a_job_becomes_programs_that_find_their_rows_weights_and_outputs(npu: Npu, kernel: FakeKernel) -> None:
    """M tiles, N slices and K slices: addresses computed here from the layouts alone."""
    M, K, N, ks = 450, 2048, 8256, 1024
    a, w, o = npu.buffer(M * K), npu.buffer(K * N), npu.buffer(2 * M * N * 4)
    o.fresh = False
    npu.submit(npu.prepare([Int8Job(a, w, o, M, K, N, ks=ks)]).chain)
    expected = {
        (a.iova + m * K + k, w.iova + (k // ks) * ks * N + n * ks, o.iova + ((k // ks) * M + m) * N * 4 + n * 4)
        for k in (0, 1024)
        for n in (0, 8192)
        for m in (0, 352)
    }
    (run,) = kernel.ran
    assert {(p[INPUT], p[WEIGHTS], p[OUTPUT]) for p in run.programs} == expected
    assert len(run.programs) == len(expected) == 8
    assert {p[0x107C] * 16 for p in run.programs} == {K}
    assert {((p[0x4038] & 0x1FFF) + 1) * 16 for p in run.programs} == {N * 4}


def test_submitting_again_writes_and_syncs_nothing(kernel: FakeKernel) -> None:
    recording = RecordingKernel(kernel)
    with Npu.open(recording) as npu:
        chain = npu.prepare([job(npu)]).chain
        npu.submit(chain)
        recording.calls.clear()
        npu.submit(chain, core=2)
        assert [c.name for c in recording.calls] == ["SUBMIT"]
        assert recording.calls[0].before["core_mask"] == 4
        assert recording.calls[0].before["flags"] == uabi.JOB_PC | uabi.JOB_PINGPONG


def test_moving_a_job_moves_all_its_programs_and_no_other(npu: Npu, kernel: FakeKernel) -> None:
    first, second = job(npu, 100, 4096, 64), job(npu, 100, 4096, 64)
    prepared = npu.prepare([first, second])
    npu.submit(prepared.chain)
    prepared.move(1, a=(first.a, 64), weights=(first.weights, 1024), out=(first.out, 256))
    npu.submit(prepared.chain)
    before, after = (r.programs for r in kernel.ran)
    assert len(before) == 4  # 64 rows and 36, twice
    assert after[:2] == before[:2]
    assert [p[INPUT] for p in after[2:]] == [first.a.iova + 64 + m * 4096 for m in (0, 64)]
    assert [p[WEIGHTS] for p in after[2:]] == [first.weights.iova + 1024] * 2
    assert [p[OUTPUT] for p in after[2:]] == [first.out.iova + 256 + m * 256 for m in (0, 64)]
    others = {INPUT, WEIGHTS, OUTPUT}
    assert [{o: v for o, v in p.items() if o not in others} for p in after] == [
        {o: v for o, v in p.items() if o not in others} for p in before
    ]


def test_patched_words_are_synced_before_the_submit(kernel: FakeKernel) -> None:
    recording = RecordingKernel(kernel)
    with Npu.open(recording) as npu:
        prepared = npu.prepare([job(npu)])
        npu.submit(prepared.chain)
        recording.calls.clear()
        prepared.move(0, weights=(npu.buffer(8192), 0))
        npu.submit(prepared.chain)
        names = [c.name for c in recording.calls]
        assert names[-2:] == ["MEM_SYNC", "SUBMIT"]
        assert recording.calls[-2].before["flags"] == uabi.SYNC_TO_DEVICE


def test_chains_share_an_arena_and_give_their_room_back(npu: Npu, kernel: FakeKernel) -> None:
    one = job(npu)
    npu.prepare([one]).free()
    buffers = len(kernel.buffers)
    for _ in range(10):
        alive = [npu.prepare([one] * n) for n in (1, 700, 3, 300)]
        for prepared in alive[::2] + alive[1::2]:
            prepared.free()
    assert len(kernel.buffers) == buffers


def test_more_programs_than_an_arena_holds_get_another(npu: Npu, kernel: FakeKernel) -> None:
    one = job(npu)
    chains = [npu.prepare([one] * 600).chain for _ in range(3)]
    npu.run(chains, cores=1)
    assert [len(r.programs) for r in kernel.ran] == [600] * 3


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60))
def test_ranges_never_overlap_and_come_back(asks: list[tuple[int, bool]]) -> None:
    ranges = Ranges(100)
    taken: list[tuple[int, int]] = []
    for length, give in asks:
        if give and taken:
            ranges.give(*taken.pop(length % len(taken)))
        start = ranges.take(length)
        if start is not None:
            assert all(start + length <= s or s + n <= start for s, n in taken)
            assert 0 <= start <= 100 - length
            taken.append((start, length))
        assert ranges.used == sum(n for _, n in taken)
    for each in taken:
        ranges.give(*each)
    assert ranges.take(100) == 0


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_timeout_is_reset_and_retried_once(npu: Npu, kernel: FakeKernel) -> None:
    kernel.script = [errno.ETIMEDOUT]
    npu.submit(npu.prepare([job(npu)]).chain)
    assert kernel.resets == 1
    assert len(kernel.ran) == 2
    assert (npu.counters.resets, npu.counters.retries) == (1, 1)


def test_a_second_timeout_fails_in_one_line(npu: Npu, kernel: FakeKernel) -> None:
    kernel.script = [errno.ETIMEDOUT] * 2
    prepared = npu.prepare([job(npu)] * 3)
    with pytest.raises(SubmitFailed, match="3 int8 programs on core 1 in domain 0: timed out twice, after 2 of 3") as e:
        npu.submit(prepared.chain, core=1)
    assert "\n" not in str(e.value)
    assert len(kernel.ran) == 2
    npu.submit(prepared.chain)  # the NPU can be used again


def test_a_refusal_is_not_repeated(npu: Npu, kernel: FakeKernel) -> None:
    kernel.script = [errno.EINVAL]
    with pytest.raises(SubmitFailed, match="refused by the kernel"):
        npu.submit(npu.prepare([job(npu)]).chain)
    assert (len(kernel.ran), kernel.resets) == (1, 0)


def test_a_failing_core_does_not_fail_the_others(npu: Npu, kernel: FakeKernel) -> None:
    """The kernel's reset wakes the jobs of other cores with EINVAL; they run again."""
    woken = threading.Semaphore(0)
    seen: set[int] = set()

    def outcome(run: Ran) -> int:
        if run.programs[0][OUTPUT] in seen:
            return 0
        seen.add(run.programs[0][OUTPUT])
        if run.programs[0][0x1020] & 0x7FF != 5:
            woken.release()
            return errno.EINVAL
        for _ in range(2):
            assert woken.acquire(timeout=5)
        return errno.ETIMEDOUT

    kernel.script = [outcome] * 6
    chains = [npu.prepare([j]).chain for j in (job(npu, M=5), job(npu), job(npu))]
    npu.run(chains, cores=3)
    assert (kernel.resets, len(kernel.ran)) == (1, 6)


def test_a_failure_stops_the_queue_and_is_raised(npu: Npu, kernel: FakeKernel) -> None:
    kernel.script = [errno.ETIMEDOUT] * 2
    chains = [npu.prepare([job(npu)]).chain for _ in range(5)]
    with pytest.raises(SubmitFailed):
        npu.run(chains, cores=1)
    assert len(kernel.ran) == 2
    npu.run(chains, cores=1)
    assert len(kernel.ran) == 7


def test_first_results_of_a_new_buffer_are_thrown_away(npu: Npu, kernel: FakeKernel) -> None:
    one = job(npu)
    one.out.fresh = True
    chain = npu.prepare([one]).chain
    npu.submit(chain)
    assert (len(kernel.ran), npu.counters.warmups) == (2, 1)
    npu.submit(chain)
    npu.submit(npu.prepare([one]).chain)
    assert (len(kernel.ran), npu.counters.warmups) == (4, 1)


# -- without waiting ---------------------------------------------------------------------------------------------------


def test_polling_keeps_all_cores_busy_with_one_queue(npu: Npu, kernel: FakeKernel) -> None:
    chains = [npu.prepare([job(npu)]).chain for _ in range(7)]
    npu.run(chains, blocking=False)
    assert all(r.nonblock for r in kernel.ran)
    assert {r.core_mask for r in kernel.ran} == {1, 2, 4}
    assert len(kernel.ran) == 7
    assert not any(c.pending for c in chains)


def test_a_result_counts_only_when_it_is_there(npu: Npu, kernel: FakeKernel) -> None:
    """The kernel is asked to sync the last element before each look; nothing else tells that a job is done."""
    kernel.script = [dropped]
    chain = npu.prepare([job(npu)]).chain
    npu.runner.ready(chain)
    npu.runner.start(chain, 0)
    assert chain.pending
    assert not npu.runner.landed(chain)
    with pytest.raises(NpuError, match="is running"):
        npu.submit(chain)
    with pytest.raises(NpuError, match="cannot be patched before it is done"):
        chain.patch(0, "input", chain.operands[0]["input"][0], 0)
    with pytest.raises(NpuError, match="cannot be freed before it is done"):
        chain.free()
    kernel.finish(kernel.ran[-1])
    assert npu.runner.landed(chain)
    buffer, offset, size = chain.last
    assert kernel.events[-1] == ("sync", 3, buffer.handle, offset, size)


def test_a_dropped_job_is_reset_and_all_that_ran_start_again(npu: Npu, kernel: FakeKernel) -> None:
    kernel.script = [dropped, dropped]
    chains = [npu.prepare([job(npu)]).chain for _ in range(2)]
    npu.run(chains, cores=2, blocking=False, timeout_ms=20)
    assert (kernel.resets, len(kernel.ran)) == (1, 4)
    assert 1 <= npu.counters.dropped <= 2  # the second may not have been late yet when the first was


def test_a_job_that_is_dropped_twice_fails(npu: Npu, kernel: FakeKernel) -> None:
    kernel.script = [dropped, dropped]
    chain = npu.prepare([job(npu)]).chain
    with pytest.raises(SubmitFailed, match="timed out twice"):
        npu.run([chain], blocking=False, timeout_ms=20)
    assert not chain.pending


def test_a_result_equal_to_the_sentinel_is_found_by_the_second_attempt(npu: Npu, kernel: FakeKernel) -> None:
    one = job(npu)
    chain = npu.prepare([one]).chain
    buffer, offset, size = chain.last
    kernel.script = [dropped, dropped]

    def restarted() -> bool:
        return len(kernel.ran) == 2

    original = kernel._submit

    def submit(arg: Any) -> None:
        original(arg)
        buffer.view[offset : offset + size] = b"\xff\xff\xff\x7f"  # what the first attempt waits to see go away

    kernel._submit = submit  # type: ignore[method-assign]
    npu.run([chain], blocking=False, timeout_ms=20)
    assert restarted()


def test_a_core_that_is_still_retiring_is_asked_again(npu: Npu, kernel: FakeKernel) -> None:
    chain = npu.prepare([job(npu)]).chain
    npu.run([chain], blocking=False)
    kernel.script = [errno.EINVAL, errno.EBUSY]
    npu.submit(chain)
    assert npu.counters.busy == 2
    assert npu.counters.resets == 0


def test_a_domain_is_left_only_when_its_polled_jobs_are_retired(
    npu: Npu, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = npu.prepare([job(npu)]).chain, npu.prepare([job(npu, domain=1)]).chain
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    npu.submit(here)
    npu.submit(there)
    assert pauses == []
    npu.run([here], blocking=False)
    npu.submit(here)
    assert max(pauses, default=0) < 1e-3
    npu.submit(there)
    assert pauses[-1] == 1e-3
    npu.submit(here)
    assert pauses.count(1e-3) == 1


def test_an_interrupt_waits_for_the_jobs_that_run(npu: Npu, kernel: FakeKernel) -> None:
    def interrupted(run: Ran) -> int:
        raise KeyboardInterrupt

    kernel.script = [interrupted]
    chains = [npu.prepare([job(npu)]).chain for _ in range(6)]
    with pytest.raises(KeyboardInterrupt):
        npu.run(chains)
    before = len(kernel.ran)
    npu.run(chains)
    assert len(kernel.ran) == before + 6


def test_a_chip_with_two_cores_uses_two(kernel: FakeKernel) -> None:
    with Npu.open(kernel, RK3576) as npu:
        npu.run([npu.prepare([job(npu)]).chain for _ in range(6)], blocking=False)
        assert {r.core_mask for r in kernel.ran} == {1, 2}
        with pytest.raises(NpuError, match="3 cores: RK3576 has 2"):
            npu.run([], cores=3)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [k for k in RESET_BEFORE if k[0] is not None])
def test_precision_changes_reset_as_the_table_says(npu: Npu, kernel: FakeKernel, before: str, after: str) -> None:
    chains = {kind: npu.chain([step(npu, kind)]) for kind in (before, after)}

    def finish(run: Ran) -> None:  # one row of 64 int16: int4 rows end elsewhere than the others
        kernel.at(run.domain, run.programs[-1][0x4020], 128)[:] = bytes(128)

    kernel.finish = finish  # type: ignore[method-assign]
    npu.submit(chains[before])
    start = kernel.resets
    npu.submit(chains[after])
    npu.submit(chains[after])
    assert kernel.resets - start == RESET_BEFORE[before, after]
    assert RESET_BEFORE[before, after] == ("int4" in (before, after))


def test_one_run_may_mix_precisions_and_domains(npu: Npu, kernel: FakeKernel) -> None:
    chains = [
        npu.prepare([job(npu, domain=d)]).chain for d in (0, 3, 0, 3)
    ] + [npu.chain([step(npu, "fp16")])]  # fmt: skip
    npu.run(chains)
    assert [r.domain for r in kernel.ran] == [0, 0, 3, 3, 0]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_buffers_are_whole_pages_with_exact_addresses_and_synced_once(npu: Npu, kernel: FakeKernel) -> None:
    b = npu.buffer(5000)
    assert (b.size, b.flags, b.array.shape) == (8192, 0x403, (8192,))
    assert kernel.events[-1] == ("sync", 3, b.handle, 0, 8192)
    b.array[:3] = 1, 2, 3
    b.sync_to_device(0, 3)
    assert kernel.events[-1] == ("sync", 1, b.handle, 0, 3)
    b.sync_from_device(4096)
    assert kernel.events[-1] == ("sync", 2, b.handle, 4096, 4096)
    with b.fill(64, 2) as view:
        view[:] = b"xy"
    assert kernel.events[-1] == ("sync", 1, b.handle, 64, 2)
    assert bytes(kernel.buffers[b.handle].data[:66]) == b"\1\2\3" + bytes(61) + b"xy"


def test_tasks_have_a_kernel_mapping_and_never_lie_in_an_import(npu: Npu, kernel: FakeKernel) -> None:
    npu.buffer(4096, domain=2)
    flags = [e[3] for e in kernel.events if e[0] == "create" and e[2] == 2]
    assert flags == [0x403, 0x40B, 0x403]


def test_freeing_twice_is_nothing_and_live_arrays_are_an_error(npu: Npu, kernel: FakeKernel) -> None:
    b = npu.buffer(4096)
    view = b.array[10:20]
    with pytest.raises(NpuError, match="an array made of it is still in use"):
        b.free()
    del view
    b.free()
    b.free()
    assert b.handle not in kernel.buffers


def test_a_full_domain_is_refused_before_the_kernel_is_asked(kernel: FakeKernel) -> None:
    with Npu.open(kernel, iova_ceiling=8 << 20) as npu:
        npu.buffer(4 << 20)
        creates = len(kernel.events)
        with pytest.raises(AllocationFailed, match=r"do not fit domain 0: \d+ of 8388608 bytes are in use") as e:
            npu.buffer(4 << 20)
        assert e.value.errno == errno.ENOSPC
        assert len(kernel.events) == creates
        npu.buffer(4 << 20, domain=1)


def test_the_kernels_refusal_is_explained(npu: Npu, kernel: FakeKernel) -> None:
    kernel.room = 4 << 20
    with pytest.raises(AllocationFailed, match="address space of the domain is full") as e:
        npu.buffer(8 << 20)
    assert e.value.errno == errno.EFAULT
    kernel.room = 1 << 32
    for request in (uabi.MEM_MAP, uabi.PRIME_FD_TO_HANDLE):
        before, fds = len(kernel.buffers), len(kernel.fds)
        kernel.refuse = {request: errno.ENOMEM}
        with pytest.raises(AllocationFailed, match="errno 12"):
            npu.import_buffer(4096) if request == uabi.PRIME_FD_TO_HANDLE else npu.buffer(4096)
        assert (len(kernel.buffers), len(kernel.fds)) == (before, fds)
    kernel.refuse = {}


def test_imports_follow_a_native_anchor_and_sync_through_their_dma_buf(npu: Npu, kernel: FakeKernel) -> None:
    first = npu.import_buffer(1 << 20, 5)
    creates = [e for e in kernel.events if e[0] == "create" and e[2] == 5]
    assert [e[4] for e in creates] == [False, False, False, True]
    assert (first.imported, first.domain) == (True, 5)
    assert kernel.buffers[first.handle].domain == 5
    second = npu.import_buffer(1 << 20, 5)  # a fresh anchor before each, the old one freed
    creates = [e for e in kernel.events if e[0] == "create" and e[2] == 5]
    assert [e[4] for e in creates[4:]] == [False, True]
    assert sum(b.domain == 5 and not b.imported for b in kernel.buffers.values()) == 3
    kernel.events.clear()
    with first.fill() as view:
        view[:3] = b"abc"
    first.sync_from_device()
    assert kernel.events == [("dma-buf-sync", f) for f in (0 | 2, 4 | 2, 0 | 1, 4 | 1)]
    second.free()
    assert second.handle not in kernel.buffers


def test_the_heap_of_imports_can_be_chosen(npu: Npu, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    npu.import_buffer(4096)
    monkeypatch.setenv("ORK_DMA_HEAP", "/dev/dma_heap/other")
    npu.import_buffer(4096)
    heaps = [e[1] for e in kernel.events if e[0] == "open" and "dma_heap" in e[1]]
    assert heaps == ["/dev/dma_heap/system", "/dev/dma_heap/other"]


def test_large_imports_and_chains_over_many_are_refused(npu: Npu) -> None:
    with pytest.raises(NpuError, match="import chunks of 16 MiB"):
        npu.import_buffer((16 << 20) + 1)
    one = job(npu)
    parts = [npu.import_buffer(4096) for _ in range(7)]
    jobs = [Int8Job(one.a, p, one.out, 4, 64, 64) for p in parts]
    npu.prepare(jobs[:6]).free()
    with pytest.raises(NpuError, match="a chain over 7 imported buffers"):
        npu.prepare(jobs)
    prepared = npu.prepare([*jobs[:6], one])
    with pytest.raises(NpuError, match="a chain over 7 imported buffers"):
        prepared.move(6, weights=(parts[6], 0))
    npu.submit(prepared.chain)  # as it was


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda n: n.buffer(0), "a buffer of 0 bytes"),
        (lambda n: n.buffer(4096, domain=16), "IOMMU domain 16: RK3588 has 0 to 15"),
        (lambda n: n.buffer(4096, domain=-1), "IOMMU domain -1"),
        (lambda n: n.buffer(4096, kernel_mapping=True, sram=True), "SRAM .* hangs the board"),
        (lambda n: n.buffer(4096).sync_to_device(4000, 97), "outside"),
        (lambda n: n.run([], cores=4), "4 cores: RK3588 has 3"),
        (lambda n: n.chain([]), "a chain of 0 programs"),
        (lambda n: n.prepare([]), "no jobs"),
        (lambda n: n.prepare([job(n)] * (CHAIN_LIMIT + 1)), "a chain of 1025 programs: 1 to 1024"),
        (lambda n: n.chain([step(n, "int8"), step(n, "fp16")]), "one precision a chain"),
        (lambda n: n.prepare([job(n), job(n, domain=1)]), "the chain runs in domain 0"),
        (lambda n: n.prepare([job(n, a_offset=8)]), "not a multiple of 16"),
        (lambda n: n.prepare([job(n, weights_offset=8192)]), "outside"),
        (lambda n: n.prepare([job(n, out_offset=-16)]), "outside"),
        (lambda n: n.prepare([job(n, a_pitch=32)]), "less than K=64"),
        (lambda n: n.prepare([job(n, out_pitch=128)]), "output rows 128 bytes apart"),
        (lambda n: n.prepare([job(n, ks=48)]), "a K slice of 48"),
        (lambda n: n.run([c := n.prepare([job(n)]).chain, c]), "listed twice"),
    ],
)
def test_what_cannot_be_is_refused_before_any_submit(
    npu: Npu, kernel: FakeKernel, do: Callable[[Npu], object], says: str
) -> None:
    with pytest.raises((NpuError, UsageError), match=says) as e:
        do(npu)
    assert "\n" not in str(e.value)
    assert not kernel.ran


def test_a_freed_chain_cannot_run(npu: Npu) -> None:
    prepared = npu.prepare([job(npu)])
    prepared.free()
    prepared.free()
    with pytest.raises(NpuError, match="was freed"):
        npu.submit(prepared.chain)


def test_closing_with_a_job_that_is_stuck_resets_first(kernel: FakeKernel) -> None:
    npu = Npu.open(kernel)
    kernel.script = [dropped]
    chain = npu.prepare([job(npu)]).chain
    npu.runner.ready(chain)
    npu.runner.start(chain, 0)
    npu.close()
    npu.close()
    assert kernel.resets == 1
    assert not kernel.buffers
