"""What tests of submits share: waiting for jobs that wait for each other."""

from __future__ import annotations

import threading

from ork.npu import uabi
from tests.emulator.board import Board, Ended

MS = 1_000_000
JOB_SECONDS = 20  # a thread that is not back by then never will be
NONBLOCK = uabi.JOB_PC | uabi.JOB_NONBLOCK


class Gate:
    """An `act` of a core that waits until the test lets it go."""

    def __init__(self, outcome: Ended | None = None) -> None:
        self.outcome = outcome
        self.entered, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, domain: object, address: int, count: int) -> Ended | None:
        self.entered.release()
        assert self.open.acquire(timeout=JOB_SECONDS)
        return self.outcome

    def wait(self) -> None:
        assert self.entered.acquire(timeout=JOB_SECONDS)


def joined(thread: threading.Thread) -> None:
    thread.join(JOB_SECONDS)
    assert not thread.is_alive()


def idle(board: Board) -> None:
    """Wait until no job runs (NONBLOCK jobs tell nobody)."""
    jobs, device = board.kernel.driver.jobs, board.kernel.driver.device
    with device.lock:
        while any(slot.current is not None and slot.current.state == "running" for slot in jobs.slots):
            device.wait(JOB_SECONDS)
