"""A trace of the cores in simulated time, in the format of Chrome's tracing (chrome://tracing, ui.perfetto.dev).

Each core is a thread; a submit is a bar, and on it the programs of its chain. The board's clock adds up the work of all
cores, so a bar begins when its core is free and the board's clock had come to the submit.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ork.emulator.job import Job
from ork.errors import StorageError

MAX_EVENTS: Final = 1 << 20  # kept; what comes later is counted
_PID: Final = 1


class Trace:
    """Collects what the cores of one board do; `save` writes it. Safe for threads."""

    def __init__(self) -> None:
        self.dropped = 0
        self._events: list[dict[str, Any]] = []
        self._free_at: dict[int, int] = {}  # core -> simulated ns
        self._programs: dict[int, list[tuple[int, int, int]]] = {}  # core -> (number, address, ns) of the job it runs
        self._lock = threading.Lock()

    def programs_of(self, core: int) -> Callable[[int, int, int], None]:
        """What core `core` calls after each program: its number in the chain, its address, its time in ns."""
        return lambda number, address, ns: self._programs.setdefault(core, []).append((number, address, ns))

    def job(self, job: Job) -> None:
        """A job has left its cores."""
        failed = errno.errorcode.get(abs(job.hang), str(abs(job.hang))) if job.hang else ""
        waited = job.timeout_ms * 1_000_000 if abs(job.hang) == errno.ETIMEDOUT and job.blocking else 0
        with self._lock:
            for part in job.parts:
                ran = self._programs.pop(part.core, [])
                start = max(self._free_at.get(part.core, 0), job.started_ns)
                took = max(sum(ns for _, _, ns in ran) or job.hw_ns, waited)
                about = {
                    "domain": job.domain,
                    "tasks": sum(count for _, _, count in part.pieces),
                    "programs": len(ran),
                    "blocking": job.blocking,
                }
                name = f"submit {job.number}" + (f": {failed}" if failed else "")
                self._bar(part.core, name, start, took, about | ({"error": failed} if failed else {}))
                at = start
                for number, address, ns in ran:
                    self._bar(part.core, f"program {number}", at, ns, {"address": hex(address)})
                    at += ns
                self._free_at[part.core] = start + took

    def reset(self, clock_ns: int) -> None:
        """The device was reset."""
        with self._lock:
            self._add({"name": "reset", "ph": "i", "s": "p", "pid": _PID, "tid": 0, "ts": clock_ns / 1000})

    def _bar(self, core: int, name: str, start: int, ns: int, args: dict[str, Any]) -> None:
        event = {"name": name, "ph": "X", "pid": _PID, "tid": core, "ts": start / 1000, "dur": ns / 1000}
        self._add({**event, "args": args})

    def _add(self, event: dict[str, Any]) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self.dropped += 1

    def save(self, path: Path) -> None:
        """Write everything so far. StorageError when the disk refuses."""
        names = [{"name": "process_name", "ph": "M", "pid": _PID, "args": {"name": "NPU, simulated time"}}]
        with self._lock:
            cores = sorted({event["tid"] for event in self._events})
            names += [
                {"name": "thread_name", "ph": "M", "pid": _PID, "tid": core, "args": {"name": f"core {core}"}}
                for core in cores
            ]
            try:
                with path.open("w") as file:
                    file.write('{"displayTimeUnit": "ns", "otherData": ' + json.dumps({"dropped": self.dropped}))
                    file.write(', "traceEvents": [\n')
                    file.write(",\n".join(json.dumps(event) for event in [*names, *self._events]))
                    file.write("\n]}\n")
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror or error}") from None
