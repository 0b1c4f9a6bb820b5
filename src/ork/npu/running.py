"""Running chains: submits that wait in the kernel, submits that are polled for, time-outs, resets, precision changes.

A submit that does not complete is answered by a reset of the device and one more attempt, then by SubmitFailed. A
chain's programs write the same results whenever they run, so running one again is always safe.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ork.errors import NpuError, SubmitFailed
from ork.npu import uabi
from ork.npu.chain import Chain
from ork.npu.kernel import Kernel
from ork.npu.soc import Soc
from ork.npu.team import Team

# Precision changes that need a reset of the device before the first program of the new kind; None is "just opened".
# Without it a published run of a model went from perplexity 10 to 3,442,988. fp16 <-> int8 was measured to need none,
# int16 is taken to be like them.
_KINDS = ("int8", "int16", "fp16", "int4")
RESET_BEFORE: Mapping[tuple[str | None, str], bool] = MappingProxyType(
    {(old, new): "int4" in (old, new) for old in (None, *_KINDS) for new in _KINDS if old != new}
)

# Written to the last element of an output before a submit without waiting, and polled until it is gone. No int32 sum
# reaches it and no fp32 result is this NaN; an int16 may be, so that the second attempt writes another.
SENTINELS: Mapping[int, tuple[bytes, bytes]] = MappingProxyType(
    {4: (b"\xff\xff\xff\x7f", b"\xfe\xff\xff\x7f"), 2: (b"\xff\x7f", b"\x01\x80")}
)

BUSY_TRIES, BUSY_PAUSE = 20, 50e-6  # a core whose last job is done but not yet retired by the kernel answers EINVAL
DOMAIN_SETTLE = 1e-3  # seconds between a polled result and a job in another domain (a shorter pause wedged boards)
INT4_LAG = 0.1  # seconds that results of int4 may come after their interrupt before they count as lost
POLL_PAUSE, POLL_PAUSE_MAX = 20e-6, 200e-6


@dataclass
class Counters:
    """What happened since the NPU was opened. Submits and programs are per core."""

    submits: list[int]
    programs: list[int]
    warmups: int = 0
    resets: int = 0
    retries: int = 0
    dropped: int = 0  # submits without waiting whose result never came
    busy: int = 0
    prepared: int = 0
    domains: set[int] = field(default_factory=set)


class Runner:
    """Runs the chains of one open node. One thread calls it, but for `run_blocking`, which the team's threads call."""

    def __init__(self, kernel: Kernel, fd: int, soc: Soc) -> None:
        self.kernel, self.fd, self.soc = kernel, fd, soc
        self.counters = Counters([0] * soc.cores, [0] * soc.cores)
        self._kind: str | None = None
        self._epoch = 0  # resets so far: a job that was interrupted by another core's reset is told by it
        self._lock = threading.Lock()
        self._marks = threading.Lock()  # of the buffers that chains on several cores write to
        self._unsettled: int | None = None  # the domain of the last polled result
        self._pending: set[Chain] = set()
        self._team: Team | None = None
        self._concurrent = False  # several cores run blocking jobs

    def ready(self, chain: Chain, timeout_ms: int | None = None) -> None:
        """What must be true before any submit: precision entered, words in memory, outputs written once."""
        if chain.freed:
            raise NpuError("the chain was freed: make a new one")
        if chain.pending:
            raise NpuError("the chain is running: wait for it before it is submitted again")
        if chain.kind != self._kind:
            self._enter_kind(chain.kind)
        if self._unsettled is not None and self._unsettled != chain.domain:
            time.sleep(DOMAIN_SETTLE)
            self._unsettled = None
        chain.flush()
        if chain.cold:
            # The first results in a new buffer may be lost (measured): spend a run on it.
            self.counters.warmups += 1
            self.run_blocking(chain, 0, timeout_ms, spent=True)
            for buffer in chain.outputs:
                buffer.fresh = False

    def run_blocking(self, chain: Chain, core: int, timeout_ms: int | None, *, spent: bool = False) -> None:
        """Submit until done: once more after a reset, and again where another core's reset interrupted it. Results of
        a run that is `spent` on a new buffer need not come."""
        arg = chain.submit
        arg.flags = chain.flags
        failures = interruptions = 0
        while True:
            epoch = self._epoch
            if late := chain.kind == "int4" and not spent:
                self._mark(chain, failures)
            code = self._submit(chain, core, timeout_ms)
            if code == 0 and late and not self._arrived(chain, failures):
                code = errno.ETIMEDOUT
            if code == 0:
                return
            if code == errno.EINVAL and (self._concurrent or epoch != self._epoch):
                # The kernel resets the whole device when a job of another core times out, and wakes this one with it.
                interruptions += 1
                if interruptions <= 2 * self.soc.cores:
                    time.sleep(BUSY_PAUSE)
                    continue
            failures += 1
            if code != errno.ETIMEDOUT or failures == 2:
                raise self._failed(chain, core, code)
            self._reset_since(epoch)
            self.counters.retries += 1

    def _mark(self, chain: Chain, attempt: int) -> None:
        """The sentinel of an attempt into the last element of a chain's results."""
        buffer, offset, size = chain.last
        with self._marks:
            buffer.view[offset : offset + size] = SENTINELS[size][attempt]
            buffer.sync_to_device(offset, size)

    def _written(self, chain: Chain, attempt: int) -> bool:
        """Whether the last element was written since it was marked."""
        buffer, offset, size = chain.last
        with self._marks:
            # cleaned as well: an invalidation alone was seen to leave old lines
            buffer.sync(uabi.SYNC_TO_DEVICE | uabi.SYNC_FROM_DEVICE, offset, size)
            return bool(buffer.view[offset : offset + size] != SENTINELS[size][attempt])

    def _arrived(self, chain: Chain, attempt: int) -> bool:
        """int4 results may come after the interrupt (measured): waits until the last one is there."""
        deadline, pause = time.monotonic() + INT4_LAG, POLL_PAUSE
        while not self._written(chain, attempt):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, POLL_PAUSE_MAX)
        return True

    def _submit(self, chain: Chain, core: int, timeout_ms: int | None) -> int:
        """One submit ioctl; 0 or the errno. Where the core may still be retiring a polled job it is asked again."""
        arg = chain.submit
        arg.core_mask = 1 << core
        arg.timeout = self.soc.timeout_ms if timeout_ms is None else timeout_ms
        arg.task_number = len(chain.steps)
        arg.task_counter = 0
        for _ in range(BUSY_TRIES):
            epoch = self._epoch
            try:
                self.kernel.ioctl(self.fd, uabi.SUBMIT, arg)
            except OSError as e:
                code = e.errno or errno.EIO
                transient = code == errno.EBUSY or (code == errno.EINVAL and self._unsettled is not None)
                if not transient or epoch != self._epoch:
                    return code
                self.counters.busy += 1
                time.sleep(BUSY_PAUSE)
                continue
            self.counters.submits[core] += 1
            self.counters.programs[core] += len(chain.steps)
            return 0
        return errno.EBUSY

    def _failed(self, chain: Chain, core: int, code: int) -> SubmitFailed:
        done, total = min(chain.submit.task_counter, len(chain)), len(chain)
        why = {
            errno.ETIMEDOUT: f"timed out twice, after {done} of {total} programs",
            errno.EINVAL: "refused by the kernel",
            errno.EBUSY: "the core stays busy",
        }.get(code, "failed")
        return SubmitFailed(
            f"a chain of {total} {chain.kind} program{'s' * (total > 1)} on core {core} in domain {chain.domain}: "
            f"{why} (errno {code}); its results must not be used"
        )

    def run_team(self, chains: Sequence[Chain], cores: int, timeout_ms: int | None) -> None:
        """Run ready chains on several cores, each of which takes the next when it is done."""
        if self._team is None:
            self._team = Team(self.run_blocking, self.soc.cores)
        self._concurrent = cores > 1
        try:
            self._team.run(chains, cores, timeout_ms)
        finally:
            self._concurrent = False

    # -- submits without waiting -----------------------------------------------------------------------------------

    def start(self, chain: Chain, core: int, *, timeout_ms: int | None = None, attempt: int = 0) -> None:
        """Queue a chain on a core and return at once. `landed` tells when it is done; SubmitFailed if it is refused."""
        size = chain.last[2]
        if size not in SENTINELS:
            raise NpuError(
                f"results of {size} byte may be any value, so none can be polled for: run the chain blocking"
            )
        self._mark(chain, attempt)
        chain.submit.flags = chain.flags | uabi.JOB_NONBLOCK
        if code := self._submit(chain, core, timeout_ms):
            raise self._failed(chain, core, code)
        chain.pending = True
        self._pending.add(chain)

    def landed(self, chain: Chain, attempt: int = 0) -> bool:
        """Whether the last element of a started chain was written; then the chain is idle again."""
        if not self._written(chain, attempt):
            return False
        self._idle(chain)
        self._unsettled = chain.domain
        return True

    def _idle(self, chain: Chain) -> None:
        chain.pending = False
        self._pending.discard(chain)

    def run_polled(self, chains: Sequence[Chain], cores: int, timeout_ms: int | None) -> None:
        """Run ready chains on several cores by queuing them and polling for their results."""
        limit = (self.soc.timeout_ms if timeout_ms is None else timeout_ms) / 1000
        waiting = list(reversed(chains))
        active: dict[int, tuple[Chain, int, float]] = {}  # core -> chain, attempt, deadline
        pause = POLL_PAUSE
        try:
            while waiting or active:
                for core in range(cores):
                    if waiting and core not in active:
                        chain = waiting.pop()
                        self.start(chain, core, timeout_ms=timeout_ms)
                        active[core] = (chain, 0, time.monotonic() + limit)
                done = [core for core, (chain, attempt, _) in active.items() if self.landed(chain, attempt)]
                for core in done:
                    del active[core]
                if done:
                    pause = POLL_PAUSE
                    continue
                now = time.monotonic()
                if late := [core for core, (_, _, deadline) in active.items() if now > deadline]:
                    self._restart(active, late, limit, timeout_ms)
                time.sleep(pause)
                pause = min(2 * pause, POLL_PAUSE_MAX)
        except BaseException:
            if active:
                self.reset()  # nothing of ours may still be running when the caller frees its buffers
            raise

    def _restart(
        self, active: dict[int, tuple[Chain, int, float]], late: list[int], limit: float, timeout_ms: int | None
    ) -> None:
        """A reset ends the jobs of all cores, so all of them start again; the late ones for the last time."""
        self.counters.dropped += len(late)
        self.reset()
        for core, (chain, before, _) in list(active.items()):
            attempt = before + (core in late)
            if attempt == 2:
                del active[core]
                raise self._failed(chain, core, errno.ETIMEDOUT)
            self.counters.retries += core in late
            self.start(chain, core, timeout_ms=timeout_ms, attempt=attempt)
            active[core] = (chain, attempt, time.monotonic() + limit)

    # -- resets, precision -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Soft reset of the whole device: jobs that run are lost, and whatever the cores kept (tables, weights)."""
        self._reset_since(self._epoch)

    def _reset_since(self, epoch: int) -> None:
        with self._lock:
            if epoch != self._epoch:
                return  # another core's failure has reset the device meanwhile
            self._epoch += 1
            self.counters.resets += 1
            for chain in list(self._pending):
                self._idle(chain)
            self.kernel.ioctl(self.fd, uabi.ACTION, uabi.Action(flags=uabi.ActionCode.RESET))

    def _enter_kind(self, kind: str) -> None:
        if RESET_BEFORE[self._kind, kind]:
            if self._pending:
                raise NpuError(f"{kind} programs need a reset first: wait for the jobs that run")
            self.reset()
        self._kind = kind

    def stop(self) -> None:
        """End the threads and whatever still runs: closing under a stuck job can make the kernel free memory twice."""
        if self._team:
            self._team.stop()
        if self._pending:
            self.reset()
            time.sleep(2e-3)
