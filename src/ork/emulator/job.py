"""What one SUBMIT asks for, as data: a job, its share for each core, a core's queue; and what a core must offer."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from ork.emulator.memory import Buffer, Domain

QUEUED, RUNNING, STUCK, DONE, ABORTED = "queued", "running", "stuck", "done", "aborted"


class Outcome(Protocol):
    """What a core says of a run: tasks completed, interrupt bits, why it hangs (None: completed), simulated time.

    `refused`: the emulator does not know what the chip would do.
    """

    @property
    def tasks(self) -> int: ...
    @property
    def int_status(self) -> int: ...
    @property
    def hang(self) -> str | None: ...
    @property
    def hw_ns(self) -> int: ...
    @property
    def refused(self) -> bool: ...


class RunsTasks(Protocol):
    """One NPU core."""

    def run(
        self,
        domain: Domain,
        address: int,
        amount: int,
        task_number: int,
        task_base: int = 0,
        limit_ns: int | None = None,
        *,
        ping_pong: bool = False,
    ) -> Outcome: ...
    def reset(self) -> None: ...


@dataclass(slots=True)
class Part:
    """One core's share: hardware submits of at most 4095 tasks, as (address, regcfg_amount, tasks)."""

    core: int
    pieces: list[tuple[int, int, int]]
    int_mask: int  # of the last task: what the interrupt must raise
    status_at: int  # offset of the last task's int_status in the task array
    int_status: int = 0


@dataclass(slots=True, eq=False)
class Job:
    domain: int
    parts: list[Part]
    blocking: bool
    timeout_ms: int
    tasks_in: Buffer | None = None  # the task array, where int_status is written
    task_base: int = 0
    ping_pong: bool = False  # the submit's flag
    wedge: int = 0  # errno of a job that the chip accepts and never completes
    irq_lost: bool = False  # it does its work, and nobody is told
    number: int = 0  # of the submit
    hang: int = 0  # errno of a job that did not complete, or jobs.REFUSED
    state: str = QUEUED
    tasks: int = 0  # completed
    hw_ns: int = 0
    started_ns: int = 0
    epoch: int = 0
    error: int = 0  # errno of a blocking submit
    in_reset: bool = False  # a reset began while it ran
    crash: BaseException | None = None  # a defect of the emulator, raised to the caller
    slots: list[Slot] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """A core, its queue, and the job on it."""

    core: RunsTasks
    queue: deque[Job] = field(default_factory=deque)
    current: Job | None = None
    worker: threading.Thread | None = None
    work: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)  # of this worker; None ends it


def widened(status: int) -> int:
    """Interrupt bits come in pairs, one a register group; either stands for both."""
    pairs = 0
    for pair in (0x3, 0xC, 0x30, 0xC0, 0x300, 0xC00):
        if status & pair:
            pairs |= pair
    return pairs
