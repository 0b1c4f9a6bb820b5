"""Submits one at a time: errnos, what the cores are told, core masks, jobs that hang, what a job touches.

Cores are scripted.
"""

from __future__ import annotations

import errno

import pytest

from ork.npu import uabi
from ork.npu.uabi import ActionCode
from tests.emulator.board import HANG, Board, Ended, error
from tests.emulator.jobs import MS, NONBLOCK, Gate, idle

pytestmark = pytest.mark.usefixtures("no_sleep")


# --- what SUBMIT refuses ---


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"task_number": 0}, None),
        ({"flags": 0}, None),
        ({"flags": uabi.JOB_PC | uabi.JOB_FENCE_IN}, None),
        ({"flags": uabi.JOB_PC | uabi.JOB_FENCE_OUT}, None),
        ({"core_mask": 8}, None),
        ({"task_obj_addr": 0}, None),
        ({"task_obj_addr": 4096}, None),
        ({"iommu_domain_id": 16}, "domain-range"),
        ({"iommu_domain_id": 0xFFFFFFFF}, "domain-range"),
    ],
)
def test_refused(board: Board, fields: dict[str, int], rule: str | None) -> None:
    array = board.tasks()
    assert error(lambda: board.submit(array, **fields)) == errno.EINVAL
    assert list(board.kernel.report.counts) == ([rule] if rule else [])
    assert not board.cores[0].runs
    assert board.kernel.switch_references == 0


def test_task_arrays_that_the_kernel_cannot_read(board: Board) -> None:
    plain = board.tasks(flags=uabi.BUFFER)
    assert error(lambda: board.submit(plain)) == errno.EINVAL
    short = board.tasks()
    assert error(lambda: board.submit(short, tasks=103)) == errno.EINVAL
    assert error(lambda: board.submit(short, tasks=0xFFFFFFFF)) == errno.EINVAL
    imported = board.adopt(board.heap(4096))
    assert error(lambda: board.submit(imported)) == errno.ETIMEDOUT
    counts = board.kernel.report.counts
    assert counts == {"task-array-mapping": 1, "task-array-range": 2, "task-array-import": 1}
    assert not board.cores[0].runs


# --- what the cores are told ---


def test_the_first_task_starts_the_chain(board: Board) -> None:
    array = board.tasks(5)
    arg = board.submit(array, tasks=5, core=1)
    assert board.cores[1].runs == [(0, 0x1000, 100, 5)]
    assert arg.task_counter == 5
    assert arg.hw_elapse_time == 1000
    assert board.kernel.stats.programs == 5


def test_a_start_within_the_array(board: Board) -> None:
    array = board.tasks(5)
    arg = uabi.Submit(flags=uabi.JOB_PC, timeout=9, task_number=1, task_obj_addr=array.obj_addr, core_mask=4)
    arg.subcore_task[2] = uabi.SubcoreTask(3, 2)
    board.kernel.ioctl(board.fd, uabi.SUBMIT, arg)
    assert board.cores[2].runs == [(0, 0x4000, 103, 2)]
    assert arg.task_counter == 2


def test_more_tasks_than_the_hardware_counts(board: Board) -> None:
    array = board.tasks(9000)
    assert board.submit(array, tasks=9000).task_counter == 9000
    assert [(run[1], run[3]) for run in board.cores[0].runs] == [
        (0x1000, 4095),
        (0x1000 * 4096, 4095),
        (0x1000 * 8191, 810),
    ]


def test_an_entry_of_no_tasks_never_completes(board: Board) -> None:
    array = board.tasks()
    arg = uabi.Submit(flags=uabi.JOB_PC, timeout=9, task_number=1, task_obj_addr=array.obj_addr, core_mask=2)
    arg.subcore_task[0].task_number = 1
    assert error(lambda: board.kernel.ioctl(board.fd, uabi.SUBMIT, arg)) == errno.ETIMEDOUT
    assert board.kernel.report.counts == {"subcore-task": 1}


def test_int_status_is_in_memory_not_in_the_cache(board: Board) -> None:
    array = board.tasks(3)
    board.submit(array, tasks=3)
    assert array.view is not None
    tasks = (uabi.Task * 3).from_buffer(array.view)
    assert [task.int_status for task in tasks] == [0, 0, 0]
    board.sync(array, uabi.SYNC_FROM_DEVICE)
    assert [task.int_status for task in tasks] == [0, 0, 0x100]


@pytest.mark.parametrize(("mask", "code"), [(0x300, 0), (0x100, errno.ETIMEDOUT), (0xC00, errno.ETIMEDOUT)])
def test_completion_is_the_last_tasks_pair_of_bits(board: Board, mask: int, code: int) -> None:
    array = board.tasks(int_mask=mask)
    assert error(lambda: board.submit(array)) == code
    assert board.kernel.report.counts["int-mask"] == (code != 0)


# --- core masks ---


def test_no_mask_means_the_idlest_core(board: Board) -> None:
    array = board.tasks()
    gate = board.cores[0].act = Gate()
    board.submit(array, flags=NONBLOCK)
    gate.wait()
    board.submit(array, core_mask=0)
    assert [len(core.runs) for core in board.cores] == [1, 1, 0]
    gate.open.release()
    idle(board)


def test_two_cores_run_their_own_ranges() -> None:
    board = Board()
    array = board.tasks(4)
    arg = uabi.Submit(flags=uabi.JOB_PC, timeout=9, task_number=4, task_obj_addr=array.obj_addr, core_mask=3)
    arg.subcore_task[0], arg.subcore_task[1] = uabi.SubcoreTask(0, 3), uabi.SubcoreTask(3, 1)
    board.kernel.ioctl(board.fd, uabi.SUBMIT, arg)
    assert [core.runs for core in board.cores] == [[(0, 0x1000, 100, 3)], [(0, 0x4000, 103, 1)], []]
    assert [v.severity for v in board.kernel.report.of("core-mask-pair")] == ["unproven"]


def test_all_three_cores_in_one_submit_wedge() -> None:
    board = Board()
    array = board.tasks()
    assert error(lambda: board.submit(array, core_mask=7)) == errno.ETIMEDOUT
    assert board.kernel.report.counts == {"core-mask": 1}
    assert not any(core.runs for core in board.cores)
    assert error(lambda: board.submit(array, core=2)) == 0

    lenient = Board(strict=False)
    array = lenient.tasks(3)
    arg = uabi.Submit(flags=uabi.JOB_PC, timeout=9, task_number=3, task_obj_addr=array.obj_addr, core_mask=7)
    for core in range(3):
        arg.subcore_task[core + 2] = uabi.SubcoreTask(core, 1)
    lenient.kernel.ioctl(lenient.fd, uabi.SUBMIT, arg)
    assert [core.runs[0][1] for core in lenient.cores] == [0x1000, 0x2000, 0x3000]


@pytest.mark.parametrize("mask", [5, 6])
def test_masks_that_are_queued_and_never_started(board: Board, mask: int) -> None:
    array = board.tasks()
    assert error(lambda: board.submit(array, core_mask=mask)) == errno.EINVAL
    assert board.kernel.report.counts == {"core-mask-stuck": 1}
    assert error(lambda: board.submit(array, core=2)) == 0


def test_the_render_node_is_doubted() -> None:
    board = Board(nodes={"/dev/dri/renderD128": "rknpu"})
    board.submit(board.tasks())
    assert board.kernel.report.counts == {"render-node": 1}


# --- jobs that hang ---


def test_a_hang_is_a_time_out_and_a_reset(board: Board) -> None:
    array = board.tasks(3)
    board.cores[1].act = lambda *_: Ended(tasks=2, int_status=0, hang="no third program")
    before = board.kernel.clock_ns
    arg = uabi.Submit(flags=uabi.JOB_PC, timeout=6000, task_number=3, task_obj_addr=array.obj_addr, core_mask=2)
    arg.subcore_task[1].task_number = 3
    assert error(lambda: board.kernel.ioctl(board.fd, uabi.SUBMIT, arg)) == errno.ETIMEDOUT
    assert arg.task_counter == 2
    assert 6105 * MS <= board.kernel.clock_ns - before < 6200 * MS
    assert [core.resets for core in board.cores] == [1, 1, 1]
    board.cores[1].act = None
    assert board.submit(array, tasks=3, core=1).task_counter == 3
    assert board.kernel.stats.timeouts == 1


def test_what_the_emulator_does_not_know_fails_at_once(board: Board) -> None:
    array = board.tasks()
    board.cores[0].act = lambda *_: Ended(tasks=0, hang="not modelled", refused=True)
    before = board.kernel.clock_ns
    assert error(lambda: board.submit(array)) == errno.EINVAL
    assert board.kernel.clock_ns - before < 1 * MS
    assert board.cores[0].resets == 0
    board.submit(array, flags=NONBLOCK)
    idle(board)
    board.cores[0].act = None
    assert error(lambda: board.submit(array)) == 0


def test_a_job_longer_than_its_timeout(board: Board) -> None:
    array = board.tasks()
    board.cores[0].act = lambda *_: Ended(hw_ns=11 * MS)
    assert error(lambda: board.submit(array, timeout=10)) == errno.ETIMEDOUT
    assert error(lambda: board.submit(array, timeout=12)) == 0


def test_a_stuck_nonblock_job_holds_its_core_and_domain(board: Board) -> None:
    array, other = board.tasks(), board.create(4096, domain=1)
    board.cores[0].act = lambda *_: HANG
    board.submit(array, flags=NONBLOCK)
    idle(board)
    board.cores[0].act = None
    # A blocking job behind it never starts: three rounds of its timeout.
    before = board.kernel.clock_ns
    assert error(lambda: board.submit(array, timeout=1000)) == errno.EINVAL
    assert 3000 * MS <= board.kernel.clock_ns - before < 3200 * MS
    assert error(lambda: board.submit(array, core=1)) == 0
    # Nothing of another domain works: 6 s each, three times for a destroy.
    for call, waits in (
        (lambda: board.sync(other, 1), 1),
        (lambda: board.create(4096, domain=1), 1),
        (lambda: board.submit(array, core=1, iommu_domain_id=1, timeout=0), 1),
        (lambda: board.action(ActionCode.SET_IOMMU_DOMAIN_ID, 1), 1),
        (lambda: board.destroy(other), 3),
    ):
        before = board.kernel.clock_ns
        assert error(call) == errno.EINVAL
        assert board.kernel.clock_ns - before == pytest.approx(waits * 6000 * MS, rel=0.001)
    assert board.kernel.report.counts["domain-busy"] == 7
    # A reset does not clear it, a NONBLOCK submit after its timeout does.
    board.action(ActionCode.RESET)
    assert error(lambda: board.submit(array)) == errno.EINVAL
    board.submit(array, flags=NONBLOCK)
    idle(board)
    assert error(lambda: board.submit(array)) == 0
    board.sync(other, 1)
    board.destroy(other)
    assert board.kernel.switch_references == 0


def test_a_young_stuck_job_is_not_reaped(board: Board) -> None:
    array = board.tasks()
    board.cores[0].act = lambda *_: HANG
    board.submit(array, flags=NONBLOCK, timeout=60000)
    idle(board)
    board.cores[0].act = None
    board.submit(array, flags=NONBLOCK)
    assert len(board.cores[0].runs) == 1
    board.action(ActionCode.RESET)  # 105 ms: more than 60000 us, less than 60000 ms
    board.submit(array, flags=NONBLOCK)
    idle(board)
    assert len(board.cores[0].runs) == 2  # the one in the queue went with the stuck one
    assert board.kernel.report.counts == {"reap-unit": 1}
    assert board.kernel.switch_references == 0


def test_closing_with_a_stuck_job() -> None:
    board = Board()
    array = board.tasks()
    board.cores[0].act = lambda *_: HANG
    board.submit(array, flags=NONBLOCK)
    idle(board)
    board.unmap(array)
    board.close()
    assert board.kernel.stats.live_buffers == 0
    again = Board(board.kernel)
    assert error(lambda: again.submit(again.tasks(), core=1)) == 0


def test_a_defect_of_the_emulator_is_not_swallowed(board: Board) -> None:
    array = board.tasks()

    def broken(*_: object) -> Ended:
        raise ZeroDivisionError("a bug")

    board.cores[0].act = broken
    with pytest.raises(ZeroDivisionError):
        board.submit(array)
    board.submit(array, flags=NONBLOCK)
    idle(board)
    board.cores[0].act = None
    with pytest.raises(ZeroDivisionError):
        board.submit(array)
    assert error(lambda: board.submit(array)) == 0
    assert board.kernel.switch_references == 0


def test_an_interrupt_while_waiting_for_a_core(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    array = board.tasks()
    gate = board.cores[0].act = Gate()
    board.submit(array, flags=NONBLOCK)
    gate.wait()

    def interrupt(seconds: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(board.kernel.driver.device, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            board.submit(array)
    gate.open.release()
    idle(board)
    board.cores[0].act = None
    assert board.submit(array).task_counter == 1
    assert board.kernel.switch_references == 0


def test_closing_waits_for_what_is_queued(board: Board) -> None:
    array = board.tasks()
    gate = board.cores[0].act = Gate()
    for _ in range(3):
        board.submit(array, flags=NONBLOCK)
        gate.open.release()
    board.close()
    assert len(board.cores[0].runs) == 3
    assert board.kernel.switch_references == 0
    board.fd = board.kernel.open(board.path)


# --- what a job touches ---


@pytest.mark.parametrize(
    ("imports", "code", "rule"),
    [(6, 0, None), (7, 0, "import-chain-unproven"), (18, 0, "import-chain-unproven"), (19, 110, "import-chain")],
)
def test_imported_mappings_in_one_chain(board: Board, imports: int, code: int, rule: str | None) -> None:
    array = board.tasks()
    made = [board.adopt(board.heap(4096)) for _ in range(imports)]
    native = [board.create(4096) for _ in range(20)]

    def act(domain: object, address: int, count: int) -> None:
        for buffer in (*made, *made, *native):
            domain.read(buffer.iova, 64)  # type: ignore[attr-defined]

    board.cores[0].act = act
    for _ in range(2):
        assert error(lambda: board.submit(array)) == code
    assert list(board.kernel.report.counts) == ([rule] if rule else [])


@pytest.mark.parametrize(
    ("views", "strict", "code"), [("full", True, 0), ("sampled", True, errno.ETIMEDOUT), ("sampled", False, 0)]
)
def test_stale_reads(views: str, strict: bool, code: int) -> None:
    """With two views the job gets the stale bytes, as on the chip; with one its result is withheld."""
    board = Board(views=views, strict=strict)
    array, rows = board.tasks(), board.create(4096, mapped=True)
    seen = []
    board.cores[0].act = lambda domain, *_: seen.append(int(domain.read(rows.iova, 4096)[7]))
    rows.array[:] = 5
    assert error(lambda: board.submit(array)) == code
    assert board.kernel.report.counts == {"missing-sync": 1}
    board.sync(rows, uabi.SYNC_TO_DEVICE)
    assert error(lambda: board.submit(array)) == 0
    assert seen == [0 if views == "full" else 5, 5]
