"""Recording: every job with the memory it reads and writes, one at a time, so that each can be run again.

A `Recorder` is a hook of `EmulatedKernel`; whoever hosts one, in this process or for another, records by giving it one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ork.emulator.job import Job
from ork.emulator.memory import Domain
from ork.emulator.orktrace import Head, Part, Piece, Recorded, Reset, Writer
from ork.emulator.report import Report
from ork.emulator.watch import Watched


class Recorder:
    """Writes the jobs of one board to `path`. Close it after the board's last job.

    StorageError when the disk refuses: from the constructor, or from the submit that could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.submits = 0
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._report = Report()

    def attach(self, soc: str, report: Report, profile: str) -> None:
        """What the board is; once, before its first job."""
        self._report = report
        self._writer = Writer(self.path, Head(soc=soc, strict=report.strict, profile=profile))

    @contextmanager
    def job(self, job: Job, domain: Domain) -> Iterator[Domain]:
        """The domain that the job is to run on; on leaving, the job's outcome is in it. Other jobs wait meanwhile."""
        with self._lock:
            before = Counter(self._report.counts)
            watched = Watched(domain)
            yield watched.as_domain()
            self._write(job, watched, Counter(self._report.counts) - before)

    def reset(self, core: int) -> None:
        """A core was reset."""
        with self._lock:
            if self._writer is not None:
                self._writer.add(Reset(core))

    def close(self) -> None:
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _write(self, job: Job, watched: Watched, rules: Counter[str]) -> None:
        writer = self._writer
        if writer is None:
            return  # closed under a job that was still queued
        parts = [
            Part(part.core, [Piece(*piece) for piece in part.pieces], part.int_mask, part.int_status)
            for part in job.parts
        ]
        buffers = sorted((b.iova, b.size) for b in watched.buffers.values())
        writer.add(
            Recorded(
                number=job.number,
                domain=job.domain,
                timeout_ms=job.timeout_ms,
                blocking=job.blocking,
                task_base=job.task_base,
                parts=parts,
                ran=not job.wedge,
                tasks=job.tasks,
                hw_ns=job.hw_ns,
                error=abs(job.hang),
                rules=dict(rules),
                buffers=buffers,
                before=writer.runs(watched.before),
                after=writer.runs(watched.after()),
                ping_pong=job.ping_pong,
            )
        )
        self.submits += 1
