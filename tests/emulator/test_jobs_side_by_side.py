"""NONBLOCK jobs, several cores, resets meanwhile, and threads. Cores are scripted."""

from __future__ import annotations

import ctypes
import errno
import threading
import time

import numpy as np
import pytest

from ork.npu import uabi
from ork.npu.uabi import ActionCode
from tests.emulator.board import HANG, Board, Ended, error, in_thread
from tests.emulator.jobs import JOB_SECONDS, MS, NONBLOCK, Gate, idle, joined

pytestmark = pytest.mark.usefixtures("no_sleep")


def test_nonblock_returns_at_once_and_the_result_is_polled(board: Board) -> None:
    array, out = board.tasks(), board.create(4096, mapped=True)
    gate = Gate()

    def act(domain: object, address: int, count: int) -> Ended | None:
        gate(domain, address, count)
        domain.write(out.iova, np.ones(4, np.uint8))  # type: ignore[attr-defined]
        return None

    board.cores[2].act = act
    arg = board.submit(array, core=2, flags=NONBLOCK)
    assert arg.task_counter == 0
    gate.wait()
    board.sync(out, uabi.SYNC_FROM_DEVICE)
    assert out.array[0] == 0
    gate.open.release()
    deadline = time.monotonic() + JOB_SECONDS
    while not out.array[0]:
        assert time.monotonic() < deadline
        board.sync(out, uabi.SYNC_TO_DEVICE | uabi.SYNC_FROM_DEVICE, 0, 64)


def test_jobs_of_a_core_keep_their_order_and_cores_run_side_by_side(board: Board) -> None:
    array = board.tasks()
    gates = [Gate(), Gate()]
    for core, gate in zip(board.cores, gates):
        core.act = gate
    done: list[int] = []
    board.cores[2].act = lambda *_: done.append(2)
    for core in (0, 1):
        board.submit(array, core=core, flags=NONBLOCK)
    for gate in gates:
        gate.wait()  # both are running
    board.submit(array, core=2)
    assert done == [2]

    def order(domain: object, address: int, count: int) -> None:
        done.append(address)

    thread, result = in_thread(lambda: board.submit(array, tasks=1))
    while not board.kernel.driver.jobs.slots[0].queue:
        pass
    board.cores[0].act = order
    arg = uabi.Submit(flags=NONBLOCK, task_number=1, task_obj_addr=array.obj_addr, core_mask=1)
    arg.subcore_task[0] = uabi.SubcoreTask(5, 1)
    board.kernel.ioctl(board.fd, uabi.SUBMIT, arg)
    for gate in gates:
        gate.open.release()
    joined(thread)
    idle(board)
    assert result[0].task_counter == 1
    assert done == [2, 0x1000, 0]


def test_another_domain_waits_for_the_job(board: Board) -> None:
    array, other = board.tasks(), board.create(4096, domain=1)
    gate = board.cores[0].act = Gate()
    board.submit(array, flags=NONBLOCK)
    gate.wait()
    thread, result = in_thread(lambda: board.sync(other, uabi.SYNC_TO_DEVICE))
    board.sync(array, uabi.SYNC_TO_DEVICE)  # the same domain is no matter
    assert not result
    gate.open.release()
    joined(thread)
    assert result == [None]
    assert board.action(ActionCode.GET_IOMMU_DOMAIN_ID) == 1
    assert board.kernel.stats.switches == 3  # for the create, the submit, the sync


def test_a_reset_lets_short_jobs_end_and_cuts_off_long_ones(board: Board) -> None:
    array = board.tasks()
    for hw_ns, code in ((50 * MS, 0), (200 * MS, errno.EINVAL)):
        gate = board.cores[0].act = Gate(Ended(hw_ns=hw_ns))
        submit, result = in_thread(lambda: error(lambda: board.submit(array)))
        gate.wait()
        reset, _ = in_thread(lambda: board.action(ActionCode.RESET))
        while not board.kernel.driver.jobs.resetting:
            pass
        board.action(ActionCode.RESET)  # another one under way: nothing to do
        gate.open.release()
        joined(submit)
        joined(reset)
        assert result == [code]
    assert board.kernel.switch_references == 0


def test_a_reset_wakes_those_who_wait_in_a_queue(board: Board) -> None:
    array = board.tasks()
    gate = board.cores[0].act = Gate()
    board.submit(array, flags=NONBLOCK)
    gate.wait()
    waiter, result = in_thread(lambda: error(lambda: board.submit(array)))
    while not board.kernel.driver.jobs.slots[0].queue:
        pass
    reset, _ = in_thread(lambda: board.action(ActionCode.RESET))
    while not board.kernel.driver.jobs.resetting:
        pass
    gate.open.release()
    joined(reset)
    joined(waiter)
    assert result == [errno.EINVAL]
    assert len(board.cores[0].runs) == 1


def test_hangs_on_all_cores_at_once(board: Board) -> None:
    array = board.tasks()
    gates = [Gate(HANG) for _ in range(3)]
    threads = []
    for index, gate in enumerate(gates):
        board.cores[index].act = gate
        threads.append(in_thread(lambda i=index: error(lambda: board.submit(array, core=i))))
    for gate in gates:
        gate.wait()
    for gate in gates:
        gate.open.release()
    for thread, result in threads:
        joined(thread)
        assert result == [errno.ETIMEDOUT]
    for core in board.cores:
        core.act = None
    assert error(lambda: board.submit(array)) == 0
    assert board.kernel.switch_references == 0


def test_a_buffer_freed_under_a_running_job(board: Board) -> None:
    array, out = board.tasks(), board.create(4096)
    gate = Gate()

    def act(domain: object, address: int, count: int) -> None:
        at = domain.write_address(out.iova, 4096)  # type: ignore[attr-defined]
        gate(domain, address, count)
        ctypes.memset(at, 1, 4096)

    board.cores[0].act = act
    board.submit(array, flags=NONBLOCK)
    gate.wait()
    board.destroy(out)
    assert board.kernel.memory.limbo == 1
    gate.open.release()
    idle(board)
    assert board.kernel.memory.limbo == 0


def test_many_threads_leave_nothing_behind() -> None:
    before = set(threading.enumerate())
    board = Board(views="sampled")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        mine = Board(board.kernel)
        domain = number % 2
        array = mine.tasks(domain=domain)
        for turn in range(40):
            made = mine.create(8192, domain=domain, mapped=True)
            made.array[:] = turn
            mine.sync(made, uabi.SYNC_TO_DEVICE)
            flags = uabi.JOB_PC if turn % 3 else NONBLOCK
            mine.submit(array, core=(number + turn) % 3, iommu_domain_id=domain, flags=flags)
            mine.sync(made, uabi.SYNC_FROM_DEVICE)
            mine.unmap(made)
            mine.destroy(made)
        mine.unmap(array)
        mine.close()

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,), name=f"test-{number}") for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    assert not failures
    idle(board)
    stats = board.kernel.stats
    assert (stats.live_buffers, stats.live_maps, stats.live_files) == (0, 0, 1)
    assert stats.submits == stats.programs == 240
    assert stats.creates == stats.destroys == 246
    assert board.kernel.switch_references == 0
    assert all(domain.space.used == 0 for domain in board.kernel.memory.domains)
    board.close()
    assert set(threading.enumerate()) <= before
