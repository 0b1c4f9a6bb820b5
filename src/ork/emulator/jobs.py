"""Jobs: what one SUBMIT asks of one core or several, and the queues of the cores.

A job runs when it is first in the queue of each of its cores. A blocking job runs in the thread that submitted it, a
NONBLOCK one in its core's worker thread. A job that never completes stays on its cores, as on the chip: a blocking one
until its timeout (simulated) is over, a NONBLOCK one until a later NONBLOCK submit reaps it. Domain references are held
from submit to completion.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from queue import SimpleQueue

from ork.emulator.domains import Clock, Device, DomainSwitch
from ork.emulator.job import ABORTED, DONE, QUEUED, RUNNING, STUCK, Job, RunsTasks, Slot, widened
from ork.emulator.memory import Domain, Memory
from ork.emulator.record import Recorder
from ork.emulator.report import Report
from ork.emulator.trace import Trace
from ork.npu.soc import Soc

_WORD = struct.Struct("<I")
RESET_SLEEP_NS = 100_000_000  # what the driver sleeps before it resets; jobs that take longer are cut off
REFUSED = -errno.EINVAL  # the submit fails at once, and nothing is stuck
TASK_NS = 4_400  # floor of a chained task (measured), where the core gives no time


class Jobs:
    """The scheduler of one device's cores."""

    def __init__(
        self,
        soc: Soc,
        memory: Memory,
        cores: Sequence[RunsTasks],
        report: Report,
        clock: Clock,
        device: Device,
        switch: DomainSwitch,
    ) -> None:
        self._soc, self._memory, self._report, self._clock = soc, memory, report, clock
        self._device, self._switch = device, switch
        self.slots = [Slot(core) for core in cores]
        self.programs = 0
        self.resets = 0
        self.timeouts = 0
        self.resetting = False
        self.recorder: Recorder | None = None
        self.trace: Trace | None = None
        self._crash: BaseException | None = None
        switch.stuck = self._stuck_references

    # --- submit ---

    def submit(self, job: Job) -> None:
        """Queue the job; a blocking one is over on return, with `tasks` and `hw_ns` set.

        OSError ETIMEDOUT when it did not complete; EINVAL when it never started, was cut off by a reset, or its domain
        could not be attached.
        """
        job.slots = [self.slots[part.core] for part in job.parts]
        with self._device.lock:
            self._raise_crash()
            if not self._switch.get(job.domain):
                self._clock.advance_ms(job.timeout_ms if job.blocking else 0)
                raise OSError(errno.EINVAL, "the domain is busy")
            if not job.blocking:
                self._reap(job)
            for slot in job.slots:
                slot.queue.append(job)
            self._start(job.slots[0])
            if job.blocking and job.state == QUEUED:
                self._await_turn(job)
        if job.blocking:
            if job.state == RUNNING:
                self._execute(job)
            if job.crash is not None:
                raise job.crash
            if job.error:
                raise OSError(job.error, "the job did not complete")

    def _await_turn(self, job: Job) -> None:
        """Wait until a queued blocking job is on its cores, or out of its queues. Lock held."""
        try:
            while job.state == QUEUED:
                if job in self._dead():
                    self._clock.advance_ms(3 * job.timeout_ms)  # three rounds, never committed
                    self._withdraw(job)
                else:
                    self._device.wait()
        except BaseException:  # an interrupt: nobody would run the job
            if job.state == QUEUED:
                self._withdraw(job)
            elif job.state == RUNNING:
                self._memory.end_epoch(job.epoch)
                self._leave(job, ABORTED)
            raise

    def _start(self, slot: Slot) -> None:
        """Put the first job of the queue on its cores, if all are free. Lock held."""
        if slot.current is not None or not slot.queue or self.resetting:
            return
        job = slot.queue[0]
        for other in job.slots:
            if other.current is not None or other.queue[0] is not job:
                return
        for other in job.slots:
            other.queue.popleft()
            other.current = job
        job.state = RUNNING
        job.started_ns = self._clock.ns
        job.epoch = self._memory.start_epoch()
        if job.blocking:
            self._device.ring()
        else:
            self._hand_over(slot, job)

    def _hand_over(self, slot: Slot, job: Job) -> None:
        if slot.worker is None:
            name = f"npu-core-{self.slots.index(slot)}"
            slot.work = SimpleQueue()
            slot.worker = threading.Thread(target=self._work, args=(slot.work,), name=name, daemon=True)
            slot.worker.start()
        slot.work.put(job)

    def _work(self, work: SimpleQueue[Job | None]) -> None:
        while (job := work.get()) is not None:
            self._execute(job)

    def stop(self) -> None:
        """End the worker threads once every job is over or stuck."""
        with self._device.lock:
            while any(slot.current is not None and slot.current.state == RUNNING for slot in self.slots):
                self._device.wait()
            ended = [(slot.worker, slot.work) for slot in self.slots]
            for slot in self.slots:
                slot.worker = None
        for worker, work in ended:
            if worker is not None:
                work.put(None)
                worker.join()

    # --- running ---

    def _execute(self, job: Job) -> None:
        """Run a job that is on its cores, then retire it. The lock is not held while the cores compute."""
        domain = self._memory.domains[job.domain]
        try:
            with self.recorder.job(job, domain) if self.recorder else nullcontext(domain) as seen:
                job.hang = job.wedge or self._work_on(job, seen)
        except BaseException as error:
            job.crash, job.hang = error, errno.EIO
        with self._device.lock:
            self._retire(job)

    def _work_on(self, job: Job, domain: Domain) -> int:
        """0, or the errno of a job that hangs."""
        access = self._memory.begin_access()
        try:
            hang = self._run_parts(job, domain) or self._check_access(len(access.imports), access.stale)
        finally:
            self._memory.end_access()
        return errno.ETIMEDOUT if job.irq_lost and not hang else hang

    def _run_parts(self, job: Job, domain: Domain) -> int:
        """0, or the errno of a job that hangs."""
        limit = job.timeout_ms * 1_000_000 if job.blocking else None
        for part in job.parts:
            core = self.slots[part.core].core
            status = 0
            for address, amount, count in part.pieces:
                outcome = core.run(domain, address, amount, count, job.task_base, limit, ping_pong=job.ping_pong)
                job.tasks += outcome.tasks
                job.hw_ns += outcome.hw_ns or outcome.tasks * TASK_NS
                if outcome.hang is not None:
                    return REFUSED if outcome.refused else errno.ETIMEDOUT
                status = outcome.int_status
            part.int_status = status
            if widened(status) != part.int_mask:
                self._report.add("int-mask", values={"int_mask": part.int_mask, "int_status": status})
                return errno.ETIMEDOUT
        return 0

    def _check_access(self, imports: int, stale: int) -> int:
        """What a job touched decides over it afterwards: too many imports, or bytes the chip would not have seen."""
        if imports > self._soc.chain_imports_ok:
            if imports >= self._soc.chain_imports_fail:
                self._report.add("import-chain", values={"imports": imports})
                return errno.ETIMEDOUT
            self._report.add("import-chain-unproven", values={"imports": imports})
        # With two views the job computed on the stale bytes, as the chip does. With one its result is better than the
        # chip's, so it is withheld.
        if stale and self._report.strict and self._memory.views != "full":
            return errno.ETIMEDOUT
        return 0

    def _retire(self, job: Job) -> None:
        """The end of a run. Lock held."""
        hang = job.hang
        self._memory.end_epoch(job.epoch)
        self.programs += job.tasks
        if job.in_reset and job.hw_ns > RESET_SLEEP_NS:
            hang = hang or errno.EINVAL  # the interrupt that would have ended it never came
        if job.blocking and job.hw_ns > job.timeout_ms * 1_000_000:
            hang = hang or errno.ETIMEDOUT
        job.hang = hang
        if self.trace is not None:
            self.trace.job(job)
        if job.crash is not None:
            if not job.blocking:
                self._crash = job.crash
            self._leave(job, ABORTED)
        elif not hang:
            self._clock.advance(job.hw_ns)
            if job.tasks_in is not None:
                for part in job.parts:
                    _WORD.pack_into(job.tasks_in.dev.data, part.status_at, part.int_status)
            self._leave(job, DONE)
        elif hang == REFUSED:
            job.error = errno.EINVAL
            self._leave(job, ABORTED)
        else:
            job.state = STUCK
            self._device.ring()
            if job.blocking:
                job.error = hang
                self.timeouts += hang == errno.ETIMEDOUT
                self._clock.advance_ms(job.timeout_ms * (1 if hang == errno.ETIMEDOUT else 3))
                self._reset()
                self._leave(job, ABORTED)

    def _leave(self, job: Job, state: str) -> None:
        """Free the job's cores and its domain, start what waits for them. Lock held."""
        job.state = state
        self._switch.put()
        for slot in job.slots:
            if slot.current is job:
                slot.current = None
        for slot in job.slots:
            self._start(slot)
        self._device.ring()

    def least_loaded(self) -> int:
        """The core with the fewest jobs, for a submit that names none. Lock held."""
        loads = [len(slot.queue) + (slot.current is not None) for slot in self.slots]
        return loads.index(min(loads))

    def _withdraw(self, job: Job) -> None:
        """Take a queued job out; a blocking one fails. Lock held."""
        for slot in job.slots:
            slot.queue.remove(job)
        job.error = errno.EINVAL
        self._leave(job, ABORTED)

    # --- jobs that hang, resets ---

    def reset(self) -> None:
        """Soft reset of the device; returns at once when one is under way. Takes the lock.

        Jobs that run get the 100 ms which the driver sleeps first, blocking jobs that wait in a queue fail; stuck and
        queued NONBLOCK jobs stay.
        """
        with self._device.lock:
            self._reset()

    def reset_core(self, number: int) -> None:
        """Reset one core, once its job is over or stuck (patched kernels)."""
        with self._device.lock:
            slot = self.slots[number]
            while (job := slot.current) is not None and job.state == RUNNING:
                self._device.wait()
            slot.core.reset()
            if self.recorder is not None:
                self.recorder.reset(number)

    def drop_all(self) -> bool:
        """Abort every stuck and queued job (patched kernels); False if one is still running. Takes the lock."""
        with self._device.lock:
            for slot in self.slots:
                for job in list(slot.queue):
                    self._withdraw(job)
                if slot.current is not None and slot.current.state == STUCK:
                    self._leave(slot.current, ABORTED)
            return all(slot.current is None for slot in self.slots)

    def _reset(self) -> None:
        if self.resetting:
            return
        self.resetting = True
        running = [job for slot in self.slots if (job := slot.current) is not None and job.state == RUNNING]
        woken = {job for slot in self.slots for job in slot.queue if job.blocking}
        for job in running:
            job.in_reset = True
        while any(job.state == RUNNING for job in running):
            self._device.wait()
        self._clock.advance_ms(self._soc.reset_ms)
        for slot in self.slots:
            slot.core.reset()
        if self.recorder is not None:
            for number in range(len(self.slots)):
                self.recorder.reset(number)
        if self.trace is not None:
            self.trace.reset(self._clock.ns)
        self.resets += 1
        self.resetting = False
        for job in woken:
            if job.state == QUEUED:
                self._withdraw(job)
        for slot in self.slots:
            self._start(slot)

    def _reap(self, new: Job) -> None:
        """Before a NONBLOCK job is queued: drop jobs on its cores that are older than their timeout. Lock held."""
        for slot in new.slots:
            old = slot.current
            if old is None or old.state != STUCK or old.blocking:
                continue
            age_us = (self._clock.ns - old.started_ns) // 1000
            if age_us < old.timeout_ms:
                continue
            if age_us < old.timeout_ms * 1000:
                # The driver compares microseconds with the milliseconds of the submit; not all accounts agree.
                self._report.add("reap-unit", values={"age_us": age_us, "timeout_ms": old.timeout_ms})
            for queued in list(slot.queue):
                self._withdraw(queued)
            self._reset()
            self._leave(old, ABORTED)

    def _dead(self) -> set[Job]:
        """Jobs that can't end: stuck NONBLOCK ones, and what waits behind them. Lock held."""
        dead = {
            job for slot in self.slots if (job := slot.current) is not None and job.state == STUCK and not job.blocking
        }
        grown = bool(dead)
        while grown:
            grown = False
            for slot in self.slots:
                blocked = slot.current in dead
                for job in slot.queue:
                    if blocked and job not in dead:
                        dead.add(job)
                        grown = True
                    blocked = blocked or job in dead
        return dead

    def _stuck_references(self) -> int:
        return sum(not job.blocking for job in self._dead())

    def _raise_crash(self) -> None:
        """A defect in a NONBLOCK run is not lost: the next submit raises it."""
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash
