"""The driver: one open NPU, its domains, buffers and chains, and how a chain is run until it is done or has failed.

Works through the `Kernel` seam alone, so it is the same on a board and on the emulator. It raises; it never computes
anything elsewhere. One thread calls it; the threads that keep several cores busy are its own (`ork.npu.team`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ork.errors import NpuError
from ork.npu import uabi
from ork.npu.buffers import IOVA_CEILING, DmaBuffer, DmaMemory
from ork.npu.chain import BLOCK, REGCMD_BYTES, Arena, Chain, Step, check_steps, regcmd_bytes
from ork.npu.jobs import Int8Job, Job, Place, steps_of
from ork.npu.kernel import Kernel, find_node
from ork.npu.running import Runner
from ork.npu.soc import RK3588, Soc


class Prepared:
    """A chain made of jobs, and which of its programs belong to which job."""

    def __init__(self, chain: Chain, places: Sequence[Place]) -> None:
        self.chain = chain
        self._by_job: dict[int, list[tuple[int, Place]]] = {}
        for step, place in enumerate(places):
            self._by_job.setdefault(place.job, []).append((step, place))

    def move(
        self,
        job: int,
        *,
        a: tuple[DmaBuffer, int] | None = None,
        weights: tuple[DmaBuffer, int] | None = None,
        out: tuple[DmaBuffer, int] | None = None,
    ) -> None:
        """Patch the programs of a job to other operands of the same sizes, each a buffer and an offset in bytes."""
        patch = self.chain.patch
        for step, place in self._by_job[job]:
            if a is not None:
                patch(step, "input", a[0], a[1] + place.input)
            if weights is not None:
                patch(step, "weights", weights[0], weights[1] + place.weights)
            if out is not None:
                patch(step, "output", out[0], out[1] + place.output)

    def free(self) -> None:
        self.chain.free()


class Npu:
    """An open NPU. `close`, or the end of a `with` block, frees everything that was allocated from it."""

    def __init__(self, kernel: Kernel, fd: int, path: str, soc: Soc, iova_ceiling: int) -> None:
        self.kernel, self.fd, self.path, self.soc = kernel, fd, path, soc
        self.memory = DmaMemory(kernel, fd, soc, iova_ceiling)
        self.runner = Runner(kernel, fd, soc)
        self.counters = self.runner.counters
        self._arenas: dict[int, list[Arena]] = {}
        self._closed = False

    @classmethod
    def open(cls, kernel: Kernel, soc: Soc = RK3588, *, iova_ceiling: int = IOVA_CEILING) -> Npu:
        """The NPU behind `kernel`. NpuError, one line, if there is none or it cannot be used."""
        path, fd = find_node(kernel)
        return cls(kernel, fd, path, soc, iova_ceiling)

    # -- memory --------------------------------------------------------------------------------------------------

    def buffer(
        self,
        nbytes: int,
        *,
        domain: int = 0,
        flags: int = uabi.BUFFER,
        kernel_mapping: bool = False,
        sram: bool = False,
    ) -> DmaBuffer:
        """A buffer of at least `nbytes`, page-rounded. AllocationFailed if there is no room."""
        self._enter_domain(domain)
        flags |= uabi.MEM_KERNEL_MAPPING if kernel_mapping else 0
        return self.memory.allocate(nbytes, domain=domain, flags=flags, sram=sram)

    def import_buffer(self, nbytes: int, domain: int = 0, *, unproven: bool = False) -> DmaBuffer:
        """A buffer of at most 16 MiB (more is `unproven`) from the system's dma-heap."""
        self._enter_domain(domain)
        return self.memory.import_buffer(nbytes, domain=domain, unproven=unproven)

    def _enter_domain(self, domain: int) -> None:
        """A domain's own scratch memory comes first: the first buffer of a domain must not be an import."""
        if domain not in self._arenas:
            self._arenas[domain] = []
            try:
                self._arenas[domain].append(Arena(self.memory, domain, self.soc))
            except BaseException:
                del self._arenas[domain]
                raise
            self.counters.domains.add(domain)

    # -- chains --------------------------------------------------------------------------------------------------

    def chain(self, steps: Sequence[Step], *, unproven: bool = False) -> Chain:
        """Programs of one precision and one domain, laid into device memory and linked. Free it when done.

        `unproven` allows more imported buffers than are known to work in one chain.
        """
        domain = steps[0].operands["output"][0].domain if steps else 0
        check_steps(steps, domain, self.soc)
        self._enter_domain(domain)
        blocks = regcmd_bytes(steps) // BLOCK
        if blocks * BLOCK > REGCMD_BYTES:
            raise NpuError(f"a chain of {blocks * BLOCK} bytes of programs: at most {REGCMD_BYTES} are possible")
        for arena in self._arenas[domain]:
            if room := arena.take(blocks, len(steps)):
                break
        else:
            arena = Arena(self.memory, domain, self.soc)
            self._arenas[domain].append(arena)
            room = arena.take(blocks, len(steps))
            assert room is not None  # it is empty, and the chain is no larger
        self.counters.prepared += len(steps)
        return Chain(arena, steps, *room, unproven=unproven)

    def prepare(self, jobs: Sequence[Job]) -> Prepared:
        """The chain of some jobs of one precision, in order. Free it when done."""
        steps, places = steps_of(jobs, self.soc)
        return Prepared(self.chain(steps), places)

    # -- running -------------------------------------------------------------------------------------------------

    def submit(self, chain: Chain, core: int = 0, *, timeout_ms: int | None = None) -> None:
        """Run a chain on one core and return when it is done. Inputs must be synced; outputs are the caller's to sync.

        SubmitFailed if it does not complete, nor after a reset of the device and one more attempt.
        """
        self.runner.ready(chain, timeout_ms)
        self.runner.run_blocking(chain, core, timeout_ms)

    def run(
        self,
        chains: Sequence[Chain],
        *,
        cores: int | None = None,
        blocking: bool = True,
        timeout_ms: int | None = None,
    ) -> None:
        """Run chains that do not depend on each other; the cores (default: all) take the next from one queue.

        `blocking` waits for each in the kernel, on a thread per core; otherwise jobs are queued and this thread polls
        for their results. Chains of one domain and precision run together, others one after the other.
        """
        cores = self.soc.cores if cores is None else cores
        if not 1 <= cores <= self.soc.cores:
            raise NpuError(f"{cores} cores: {self.soc.name} has {self.soc.cores}")
        if len(set(map(id, chains))) < len(chains):
            raise NpuError("a chain is listed twice: it can run once at a time")
        if len(chains) == 1 and blocking:
            self.submit(chains[0], timeout_ms=timeout_ms)
            return
        groups: dict[tuple[int, str], list[Chain]] = {}
        for chain in chains:
            groups.setdefault((chain.domain, chain.kind), []).append(chain)
        for group in groups.values():
            for chain in group:
                self.runner.ready(chain, timeout_ms)
            if blocking:
                self.runner.run_team(group, cores, timeout_ms)
            else:
                self.runner.run_polled(group, cores, timeout_ms)

    def run_int8(self, jobs: Sequence[Int8Job], *, cores: int | None = None, blocking: bool = True) -> None:
        """Run independent int8 jobs once, each a chain of its own. `prepare` once and `run` often where it counts."""
        prepared: list[Prepared] = []
        try:
            prepared += [self.prepare([job]) for job in jobs]
            self.run([p.chain for p in prepared], cores=cores, blocking=blocking)
        finally:
            for p in prepared:
                if not p.chain.pending:
                    p.free()

    # -- the end ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Soft reset of the whole device: jobs that run are lost, and whatever the cores kept (tables, weights)."""
        self.runner.reset()

    def close(self) -> None:
        """Free everything and close the node; the second time nothing happens."""
        if self._closed:
            return
        self._closed = True
        self.runner.stop()
        for arenas in self._arenas.values():
            for arena in arenas:
                arena.release()
        self._arenas.clear()
        self.memory.free_all()
        self.kernel.close(self.fd)

    def __enter__(self) -> Npu:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
