"""What a loaded model does and when, in the format of Chrome's tracing (chrome://tracing, ui.perfetto.dev).

Nothing is hooked in the code that is traced: `attach` puts a timer around the public methods of one model's ops,
device and source, so that a model that is not traced pays nothing. Tracks: host ops (linear ones included), products
(what overlap is counted against), one per NPU core, one per thread that moves slices, domain switches.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ork.errors import StorageError

if TYPE_CHECKING:
    from ork.npu.chain import Chain
    from ork.ops import Ops

MAX_EVENTS: Final = 1 << 20  # kept; what comes later is counted
BUILDING: Final = {"vector", "weight"}  # methods of Ops that a model calls once, when it is built
HOST, PRODUCTS, DOMAINS = "host ops", "products", "domain switches"
LOAD, TRANSFER, COMPUTE, OP, SUBMIT, SWITCH = "load", "transfer", "compute", "op", "submit", "switch"

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Event:
    """Something on `track` from `start` to `end`, in seconds of time.perf_counter; an instant where they are equal."""

    track: str
    kind: str
    name: str
    start: float
    end: float
    about: dict[str, Any]


class Trace:
    """Events of one model. Safe for threads; attach it before the first pass, or before `reside` to see the load."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.dropped = 0
        self._undo: list[Callable[[], None]] = []
        self._residing = False
        self._domain: int | None = None

    def add(self, track: str, kind: str, name: str, start: float, end: float, **about: Any) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(Event(track, kind, name, start, end, about))
        else:
            self.dropped += 1

    # --- taps ------------------------------------------------------------------------------------------------------

    def attach(self, ops: Ops) -> None:
        """Traces a model from now on, until `detach`."""
        for name, method in vars(type(ops)).items():
            if inspect.isfunction(method) and not name.startswith("_") and name not in BUILDING:
                self._tap(ops, name, self._host_op(name))
        self._tap(ops.device, "linear", self._product)
        self._tap(ops.device, "linear_experts", self._experts)
        self._tap(ops.source, "read_into", self._transfer)
        self._tap(ops.source, "read_run", self._run_of_slices)
        self._tap(ops.source, "blob", self._transfer)
        self._watch_reside(ops.stream)
        if (npu := getattr(ops.device, "npu", None)) is not None:
            self._tap(npu.runner, "run_blocking", self._submit)

    def detach(self) -> None:
        """Everything is as before `attach`; the events stay."""
        while self._undo:
            self._undo.pop()()

    def _tap(self, target: Any, name: str, record: Callable[[Sequence[Any], float, float], None]) -> None:
        """Calls of `target.name` also go to `record`, with their arguments and times, failed ones too."""
        inner, now = getattr(target, name), time.perf_counter

        def timed(*args: Any, **keywords: Any) -> Any:
            start = now()
            try:
                return inner(*args, **keywords)
            finally:
                record(args, start, now())

        self._replace(target, name, timed)

    def _replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        own = vars(target).get(name)  # already replaced by someone else
        setattr(target, name, method)
        self._undo.append(lambda: delattr(target, name) if own is None else setattr(target, name, own))

    def _watch_reside(self, stream: Any) -> None:
        inner = stream.reside

        def reside() -> Any:
            before, start = stream.stats.loads, time.perf_counter()
            self._residing = True
            try:
                return inner()
            finally:
                self._residing = False
                if loads := stream.stats.loads - before:
                    self.add(HOST, LOAD, "reside", start, time.perf_counter(), slices=loads)

        self._replace(stream, "reside", reside)

    def _host_op(self, op: str) -> Callable[[Sequence[Any], float, float], None]:
        def record(args: Sequence[Any], start: float, end: float) -> None:
            about: dict[str, Any] = {}
            if op == "linear":
                about = {"rows": args[0].rows, "weights": [w.tensor.name for w in args[1:]]}
            elif op == "attention":
                about = {"layer": args[0]}
            self.add(HOST, OP, op, start, end, **about)

        return record

    def _product(self, args: Sequence[Any], start: float, end: float) -> None:
        self.add(PRODUCTS, COMPUTE, "linear", start, end, slices=len(args[0]), rows=args[1].rows)

    def _experts(self, args: Sequence[Any], start: float, end: float) -> None:
        self.add(PRODUCTS, COMPUTE, "linear_experts", start, end, slices=len(args[0]))

    def _run_of_slices(self, args: Sequence[Any], start: float, end: float) -> None:
        """An expert's slices, by one read."""
        name, index, _ = args[0][0]
        self._transfer((name, index), start, end)

    def _transfer(self, args: Sequence[Any], start: float, end: float) -> None:
        name, index = args[:2]
        kind = LOAD if self._residing else TRANSFER
        self.add(f"transfer: {threading.current_thread().name}", kind, f"{name} {index}", start, end)

    def _submit(self, args: Sequence[Any], start: float, end: float) -> None:
        chain: Chain = args[0]
        if chain.domain != self._domain:
            if self._domain is not None:
                self.add(DOMAINS, SWITCH, f"{self._domain} -> {chain.domain}", start, start)
            self._domain = chain.domain
        self.add(f"NPU core {args[1]}", SUBMIT, chain.kind, start, end, programs=len(chain), domain=chain.domain)

    # --- what can be read off it --------------------------------------------------------------------------------------

    def spans(self, kind: str) -> list[Span]:
        """When something of this kind was going on: sorted, disjoint."""
        return union((e.start, e.end) for e in self.events if e.kind == kind)

    @property
    def overlap(self) -> float:
        """Share of the transfer time, loading before the first pass apart, during which a product was computed."""
        transfers = self.spans(TRANSFER)
        total = length(transfers)
        return length(intersection(transfers, self.spans(COMPUTE))) / total if total else 0.0

    def save(self, path: Path) -> None:
        """Writes Chrome's JSON; times in microseconds since the first event. StorageError when the disk refuses."""
        events = sorted(self.events, key=lambda e: e.start)
        zero = events[0].start if events else 0.0
        tracks = {track: i for i, track in enumerate(sorted({e.track for e in events}, key=_rank))}
        rows: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "ork, wall time"}},
        ]
        for track, tid in tracks.items():
            rows.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": track}})
            rows.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": tid, "args": {"sort_index": tid}})
        for e in events:
            row = {"name": e.name, "cat": e.kind, "pid": 1, "tid": tracks[e.track], "args": e.about}
            at = {"ts": round(1e6 * (e.start - zero), 3)}
            if e.end > e.start:
                rows.append({**row, **at, "ph": "X", "dur": round(1e6 * (e.end - e.start), 3)})
            else:
                rows.append({**row, **at, "ph": "i", "s": "t"})
        about = json.dumps({"dropped": self.dropped, "overlap": self.overlap})
        try:
            with path.open("w") as file:
                file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n')
                file.write(",\n".join(map(json.dumps, rows)))
                file.write("\n]}\n")
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from None


def _rank(track: str) -> tuple[int, str]:
    order = [HOST, PRODUCTS, "NPU core", DOMAINS, "transfer"]
    return next(i for i, start in enumerate(order) if track.startswith(start)), track


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points in time as disjoint, sorted spans."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def intersection(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Points in both; each is sorted and disjoint, and so is the result."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
