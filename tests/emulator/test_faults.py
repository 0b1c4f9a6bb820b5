"""Faults on purpose: what a driver meets, and that a model still says the right thing, or stops, and leaves nothing."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.api import LoadedModel
from ork.emulator.faults import KINDS, Faults
from ork.emulator.kernel import EmulatedKernel
from ork.emulator.summary import leaks, summary
from ork.errors import NpuError, SubmitFailed, UsageError
from ork.npu import uabi
from ork.npu.driver import Npu
from ork.npu.jobs import Int8Job
from ork.pack.reader import Pack
from tests import tiny
from tests.emulator.board import Board, error, in_thread

TOKENS = [(5 * i + 1) % tiny.VOCAB for i in range(40)]


# --- the specification ---


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "write KIND@NUMBER"),
        ("timeout", "write KIND@NUMBER"),
        ("timeout@", "write KIND@NUMBER"),
        ("timeout@0", "write KIND@NUMBER"),
        ("timeout@1.5", "write KIND@NUMBER"),
        ("timeout:0", "write KIND@NUMBER"),
        ("timeout:1.01", "write KIND@NUMBER"),
        ("timeout:nan", "write KIND@NUMBER"),
        ("timeout=3", "write KIND@NUMBER"),
        ("timeout@3,,", "write KIND@NUMBER"),
        ("seed=x,timeout@3", "write KIND@NUMBER"),
        ("seed=3", "no fault in it"),
        ("flood@3", "fault 'flood' is not known: timeout, irq-lost, stale, enomem, create-enomem, create-efault"),
    ],
)
def test_a_malformed_specification_is_refused_and_says_why(spec: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Faults(spec)


def test_numbers_strike_once_each() -> None:
    faults = Faults("timeout@12, stale@3,timeout@2")
    struck = {kind: [n for n in range(1, 30) if faults.strikes(kind, n)] for kind in KINDS}
    assert {kind: found for kind, found in struck.items() if found} == {"timeout": [2, 12], "stale": [3]}
    assert str(faults) == "timeout 2, stale 1"


@given(seed=st.integers(0, 1 << 40), chance=st.floats(0.05, 0.95))
@settings(max_examples=20, deadline=None)
def test_probabilities_hold_and_a_seed_repeats_them(seed: int, chance: float) -> None:
    one, two = (Faults(f"timeout:{chance},seed={seed}") for _ in range(2))
    numbers = range(1, 801)
    struck = [one.strikes("timeout", n) for n in numbers]
    assert struck == [two.strikes("timeout", n) for n in reversed(numbers)][::-1]  # whatever the order of the threads
    assert abs(sum(struck) / 800 - chance) < 0.12  # more than six deviations
    assert struck != [Faults(f"timeout:{chance},seed={seed + 1}").strikes("timeout", n) for n in numbers]


# --- what the ioctls answer ---


def test_a_hanging_job_times_out_and_the_next_one_runs() -> None:
    board = Board(faults=Faults("timeout@2"))
    tasks = board.tasks()
    assert board.submit(tasks).task_counter == 1
    before = board.kernel.clock_ns
    assert error(lambda: board.submit(tasks, timeout=700)) == errno.ETIMEDOUT
    assert board.kernel.clock_ns - before >= 700_000_000
    assert len(board.cores[0].runs) == 1  # it never started
    assert board.submit(tasks).task_counter == 1
    assert (board.kernel.stats.timeouts, board.kernel.stats.resets) == (1, 1)


def test_a_lost_interrupt_times_out_after_the_work_is_done() -> None:
    board = Board(faults=Faults("irq-lost@1"))
    tasks = board.tasks()
    assert error(lambda: board.submit(tasks)) == errno.ETIMEDOUT
    assert len(board.cores[0].runs) == 1
    assert board.submit(tasks).task_counter == 1


def test_without_waiting_a_lost_interrupt_keeps_the_core() -> None:
    """What follows on the core never starts; the driver reaps the job when it is older than its timeout."""
    board = Board(faults=Faults("irq-lost@1"))
    tasks = board.tasks()
    board.submit(tasks, flags=uabi.JOB_PC | uabi.JOB_NONBLOCK, timeout=1)
    thread, result = in_thread(lambda: board.submit(tasks, timeout=10))
    thread.join(20)
    assert getattr(result[0], "errno", None) == errno.EINVAL
    board.submit(tasks, flags=uabi.JOB_PC | uabi.JOB_NONBLOCK, timeout=10)
    board.close()
    assert len(board.cores[0].runs) == 2


def test_no_memory_for_a_job_and_for_a_buffer() -> None:
    board = Board(faults=Faults("enomem@2,create-enomem@3,create-efault@4"))
    tasks, _ = board.tasks(), board.create(4096)
    codes = [error(lambda: board.create(4096)) for _ in range(3)]
    assert codes == [errno.ENOMEM, errno.EFAULT, 0]
    assert [error(lambda: board.submit(tasks)) for _ in range(3)] == [0, errno.ENOMEM, 0]
    assert board.kernel.stats.live_buffers == 3


@pytest.mark.parametrize("views", ["full", "sampled"])
def test_a_sync_without_effect_shows_the_device_old_bytes(views: str) -> None:
    """Two views: the sums of the old rows, reported. One view: nothing that the chip would not have given."""
    kernel = EmulatedKernel(views=views, faults=Faults("stale@3"))
    with Npu.open(kernel) as npu:
        a, w, c = npu.buffer(32 * 4), npu.buffer(32 * 32), npu.buffer(4096)
        with w.fill(0, 1024) as part:
            part[:] = np.eye(32, dtype=np.int8).tobytes()  # a tile is its own transpose here
        prepared = npu.prepare([Int8Job(a, w, c, M=4, K=32, N=32)])

        def run(value: int) -> np.ndarray:
            with a.fill(0, 128) as rows:
                rows[:] = bytes([value]) * 128
            npu.submit(prepared.chain)
            c.sync_from_device(0, 512)
            return c.array[:512].view(np.int32).copy()

        assert (run(1) == 1).all()  # submits 1, which warms up, and 2
        assert not kernel.report.counts
        if views == "full":
            assert (run(2) == 1).all()
        else:
            with pytest.raises(NpuError, match="timed out twice"):
                run(2)
        assert kernel.report.counts["missing-sync"] >= 1
        count = kernel.report.counts["missing-sync"]
        assert (run(3) == 3).all()
        assert kernel.report.counts["missing-sync"] == count
    assert leaks(kernel) == {}
    assert "faults: stale 1; rules: missing-sync" in summary(kernel)


@pytest.mark.parametrize("seed", range(3))
def test_three_cores_that_reset_each_other_still_answer(seed: int) -> None:
    """A time-out of one core resets all of them; each chain ends with its sums or in SubmitFailed."""
    kernel = EmulatedKernel(views="sampled", faults=Faults(f"timeout:0.15,irq-lost:0.1,seed={seed}"))
    rng = np.random.default_rng(seed)
    with Npu.open(kernel) as npu:
        a, w, c = npu.buffer(8 * 64), npu.buffer(64 * 32), npu.buffer(12 * 8 * 32 * 4)
        rows, codes = rng.integers(-9, 9, (8, 64), np.int8), rng.integers(-9, 9, (32, 64), np.int8)
        with a.fill(0, rows.nbytes) as part:
            part[:] = rows.tobytes()
        with w.fill(0, codes.nbytes) as part:
            part[:] = codes.reshape(32, 2, 32).transpose(1, 0, 2).tobytes()
        made = [npu.prepare([Int8Job(a, w, c, M=8, K=64, N=32, out_offset=1024 * i)]) for i in range(12)]
        for _ in range(4):
            try:
                npu.run([p.chain for p in made])
            except SubmitFailed:
                continue
            c.sync_from_device()
            sums = c.array.view(np.int32)[: 12 * 256].reshape(12, 8, 32).copy()
            assert (sums == rows.astype(np.int32) @ codes.T.astype(np.int32)).all()
    assert kernel.faults.struck.total() > 0
    assert leaks(kernel) == {}


# --- a model on a board that fails ---


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ork.cli.main import main

    path = tiny.random_gguf(tmp_path_factory.mktemp("faults") / "m.gguf")
    assert main(["convert", str(path)]) == 0
    return path.with_suffix(".orkpack")


@pytest.fixture(scope="module")
def right(pack: Path) -> np.ndarray:
    with LoadedModel(Pack.open(pack), device="cpu", threads=1, context=None, kv=None) as model:
        return model.logits(TOKENS, chunk=8).view(np.uint32)


def logits(pack: Path, spec: str) -> tuple[np.ndarray, EmulatedKernel]:
    kernel = EmulatedKernel(views="sampled", faults=Faults(spec))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with LoadedModel(Pack.open(pack), device="emu", threads=1, context=None, kv=None, board=kernel) as model:
            return model.logits(TOKENS, chunk=8).view(np.uint32), kernel


@pytest.mark.parametrize(
    "spec",
    [
        "timeout@12,stale@3,enomem@40,irq-lost@7",
        "timeout@1,timeout@2",
        "stale@1",
        "stale@1,stale@2,stale@3,stale@20",
        "enomem:0.3,seed=1",
        "timeout:1",
        "irq-lost:0.2,timeout:0.2,stale:0.2,enomem:0.1,seed=5",
    ],
)
def test_the_bits_are_right_whatever_fails(pack: Path, right: np.ndarray, spec: str) -> None:
    got, kernel = logits(pack, spec)
    assert (got == right).all()
    assert sum(kernel.faults.struck.values()) > 0
    assert leaks(kernel) == {}


@given(
    kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1),
    chance=st.sampled_from([0.01, 0.05, 0.3]),
    seed=st.integers(0, 999),
)
@settings(max_examples=15, deadline=None)
def test_right_or_one_error_and_nothing_left(
    pack: Path, right: np.ndarray, kinds: set[str], chance: float, seed: int
) -> None:
    """Faults of buffers end the program with one line; all the others are answered."""
    spec = ",".join([f"{kind}:{chance}" for kind in sorted(kinds)] + [f"seed={seed}"])
    kernel = EmulatedKernel(views="sampled", faults=Faults(spec))
    why = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            with LoadedModel(Pack.open(pack), device="emu", threads=1, context=None, kv=None, board=kernel) as model:
                got = model.logits(TOKENS, chunk=8).view(np.uint32)
        except NpuError as failure:
            why = str(failure)
    no_buffer = kernel.faults.struck["create-enomem"] + kernel.faults.struck["create-efault"]
    assert (no_buffer == 1 and why.count("\n") == 0) if why else (got == right).all()
    assert leaks(kernel) == {}
