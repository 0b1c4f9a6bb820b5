"""Experts in a window: moves the bytes that a plan's pools ask for, and hands experts to the op that computes them.

All that a pass is missing is asked for at once, on threads of its own; meanwhile what is there is computed. What the
page cache has needs no waiting for: all threads copy it together, and the pass is computed in one go. Without prefetch
the op's own thread brings each expert when its turn has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from ork.devices.base import Device, Handle, Slot
from ork.residency.experts import ExpertPlan, Item, Load, Pool, Visit, make_policy
from ork.residency.loading import as_stored, load_run
from ork.residency.prefetch import Clock
from ork.residency.stream import ExpertBatch, ExpertHandles, ExpertLayer, ExpertStats, SliceSource, TensorSpec

LOADERS = 4  # threads: as many reads keep a disk busy

Pieces = list[tuple[TensorSpec, int]]  # slices in the order of the file


class _Slots:
    """A pool with its memory: the pieces of each slot, and the handles of what is in them."""

    def __init__(self, policy: str, layers: int, slots: Sequence[Sequence[Slot]]):
        self.slots = slots
        self.handles: list[ExpertHandles] = [([], [], []) for _ in slots]
        self._policy, self._layers = policy, layers
        self.empty()

    def empty(self) -> None:
        self.pool = Pool(len(self.slots), make_policy(self._policy, self._layers))


@dataclass(eq=False)
class _Pass:
    """One pass of a layer: what it asked for, what came and was computed, and whether it has ended."""

    held: _Slots
    visit: Visit | None = None
    jobs: dict[Item, Future[int]] = field(default_factory=dict)
    came: set[Item] = field(default_factory=set)
    given: set[Item] = field(default_factory=set)
    filling: int = 0  # slots, by threads
    over: bool = False


class ExpertCache:
    """Experts that stay (`staying`), and slots that the others pass through: `slots` holds, for each pool of the plan,
    the pieces of each of its slots. The memory stays the caller's.

    One pass at a time: whoever asks for experts while another pass is half computed is told so. A pass may end
    anywhere, by an error of the op or an interrupt: what did not come is forgotten, and where an interrupt kept that
    from being written down, everything is.
    """

    def __init__(
        self,
        source: SliceSource,
        device: Device,
        plan: ExpertPlan,
        slots: Sequence[Sequence[Sequence[Slot]]],
        stats: ExpertStats,
        clock: Clock,
        *,
        prefetch: bool,
    ):
        self._source, self._device, self._plan = source, device, plan
        self._stats, self._clock = stats, clock
        self._by_layer: dict[int, _Slots] = {}
        for pool, memory in zip(plan.pools, slots):
            self._by_layer |= dict.fromkeys(pool.layers, _Slots(plan.policy, len(pool.layers), memory))
        self._stay: dict[Item, ExpertHandles] = {}
        self._changed = threading.Condition()
        self._running: _Pass | None = None
        self._threads = ThreadPoolExecutor(LOADERS, thread_name_prefix="ork-expert") if prefetch else None

    def stay(self, experts: Sequence[tuple[ExpertLayer, int, Sequence[Slot]]]) -> None:
        """Brings in experts that stay, each into a slot for each of its slices."""

        def bring(layer: ExpertLayer, expert: int, slots: Sequence[Slot]) -> int:
            pieces = _pieces(layer, expert)
            handles, nbytes = load_run(self._source, self._device, [(*p, slot) for p, slot in zip(pieces, slots)])
            self._stay[layer.layer, expert] = _by_role(pieces, handles, layer, expert)
            return nbytes

        with ThreadPoolExecutor(LOADERS, thread_name_prefix="ork-expert") as pool:
            jobs = [pool.submit(bring, *item) for item in experts]
            try:
                for (layer, *_), job in zip(experts, jobs):
                    self._stats.moved_bytes[layer.layer] += job.result()
                    self._stats.loads[layer.layer] += 1
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def batches(self, layer: ExpertLayer, needed: Sequence[int]) -> Iterator[ExpertBatch]:
        """See `Streams.experts`."""
        if (last := self._running) is not None:
            if not last.over:
                raise RuntimeError(f"experts of layer {layer.layer} were asked for before another pass was ended")
            last.held.empty()  # its end was interrupted
            self._end(last)
        number = layer.layer
        stay = [(expert, self._stay[number, expert]) for expert in needed if (number, expert) in self._stay]
        rest: list[Item] = [(number, expert) for expert in needed if (number, expert) not in self._stay]
        self._stats.lookups[number] += len(needed)
        self._stats.hits[number] += len(stay)
        if not rest:
            if stay:
                yield from self._hand_out(_batch(stay))
            return
        run = _Pass(self._by_layer[number])
        try:
            self._running = run
            yield from self._batches(layer, rest, stay, run)
        finally:
            run.over = True  # before anything that an interrupt can come between
            self._end(run)

    def close(self) -> None:
        """Ends the threads, each after the transfer it is in; the slots are the caller's again."""
        with self._changed:
            if self._running is not None:
                self._running.over = True
                self._changed.notify_all()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._stay.clear()
        self._by_layer.clear()

    # --- a pass ------------------------------------------------------------------------------------------------------

    def _batches(
        self, layer: ExpertLayer, rest: list[Item], stay: list[tuple[int, ExpertHandles]], run: _Pass
    ) -> Iterator[ExpertBatch]:
        held = run.held
        if self._plan.parts:
            held.pool.clear()
            rest = [item for (_, expert) in rest for item in _parts(layer, expert)]
        visit = run.visit = held.pool.visit(rest)
        self._stats.hits[layer.layer] += len(visit.hits)
        if not visit.loads or (self._threads is not None and self._cached(layer, held, visit.loads)):
            if visit.loads:
                self._copy(layer, visit.loads, run)
            slots = dict(visit.hits) | {load.item: load.slot for load in visit.loads}
            yield from self._hand_out(_batch(stay + [(item[1], held.handles[slot]) for item, slot in slots.items()]))
            return
        if self._threads is not None:
            for load in visit.loads:
                run.jobs[load.item] = self._threads.submit(self._ahead, layer, load, run)
        yield from self._present(visit, stay, run)
        yield from self._coming(layer, visit, run)

    def _present(self, visit: Visit, stay: list[tuple[int, ExpertHandles]], run: _Pass) -> Iterator[ExpertBatch]:
        """What is there; a few at a time if others wait for the slots."""
        hits = list(visit.hits)
        size = visit.most if any(load.after in visit.hits for load in visit.loads) else max(1, len(hits))
        for start in range(0, max(1, len(hits)), size):
            part = hits[start : start + size]
            found = [(item[1], run.held.handles[visit.hits[item]]) for item in part]
            if batch := stay + found:
                yield from self._hand_out(_batch(batch))
            stay = []
            self._give(run, part)

    def _coming(self, layer: ExpertLayer, visit: Visit, run: _Pass) -> Iterator[ExpertBatch]:
        """What is missing, in the order of the file: as many as are ready, at least one."""
        loads, at = visit.loads, 0
        while at < len(loads):
            end = at
            while end < len(loads) and end - at < visit.most and (end == at or self._ready(loads[end], run)):
                self._wait(layer, loads[end], run)
                end += 1
            part = loads[at:end]
            yield from self._hand_out(_batch([(load.item[1], run.held.handles[load.slot]) for load in part]))
            self._give(run, [load.item for load in part])
            at = end

    def _cached(self, layer: ExpertLayer, held: _Slots, loads: Sequence[Load]) -> bool:
        """Whether all have slots that take them as they are, and the first slice of each is in the page cache: then the
        others are taken to be there too."""
        if any(load.after is not None for load in loads):
            return False
        pieces = [_pieces_of(layer, load.item) for load in loads]
        if not all(as_stored(self._device, *p, slot) for p, slot in zip(pieces[0], held.slots[loads[0].slot])):
            return False  # each is laid out anew, which the threads do side by side
        return all(self._source.cached(tensor.name, index) for (tensor, index), *_ in pieces)

    def _copy(self, layer: ExpertLayer, loads: Sequence[Load], run: _Pass) -> None:
        """Fills slots from the page cache, by all threads."""
        start = time.perf_counter()
        self._stats.moved_bytes[layer.layer] += self._bring(layer, loads, run, cached=True)
        for load in loads:
            self._count(layer, load)
        self._stats.waits += 1
        self._stats.wait_seconds += time.perf_counter() - start

    @staticmethod
    def _ready(load: Load, run: _Pass) -> bool:
        job = run.jobs.get(load.item)
        return job is not None and job.done()

    def _wait(self, layer: ExpertLayer, load: Load, run: _Pass) -> None:
        """Until the expert is there. Raises what loading it raised."""
        if run.over:
            raise RuntimeError("the window was closed while an op waited for experts")
        job = run.jobs.get(load.item)
        start = time.perf_counter()
        ready = job is not None and job.done()
        nbytes = self._bring(layer, [load], run) if job is None else job.result()
        if not ready:
            self._stats.waits += 1
            self._stats.wait_seconds += time.perf_counter() - start
        self._count(layer, load)
        self._stats.moved_bytes[layer.layer] += nbytes

    def _count(self, layer: ExpertLayer, load: Load) -> None:
        """A load; of an expert that comes in parts the last one counts."""
        self._stats.loads[layer.layer] += not self._plan.parts or _last_part(layer, load.item)

    def _ahead(self, layer: ExpertLayer, load: Load, run: _Pass) -> int:
        """On a thread of its own: fills a slot once what was in it has been computed; bytes read."""
        with self._changed:
            while load.after is not None and load.after not in run.given and not run.over:
                self._changed.wait()
            if run.over:
                raise CancelledError
            run.filling += 1
        try:
            return self._bring(layer, [load], run)
        finally:
            with self._changed:
                run.filling -= 1
                self._changed.notify_all()

    def _bring(self, layer: ExpertLayer, loads: Sequence[Load], run: _Pass, *, cached: bool = False) -> int:
        """Fills slots that nothing is computed from, of one expert, or of any that are `cached`; bytes read."""
        held = run.held
        pieces = [_pieces_of(layer, load.item) for load in loads]
        items = [(*piece, slot) for load, own in zip(loads, pieces) for piece, slot in zip(own, held.slots[load.slot])]
        self._clock.change(transfers=1)
        try:
            handles, nbytes = load_run(self._source, self._device, items, cached=cached)
        finally:
            self._clock.change(transfers=-1)
        given = iter(handles)
        for load, own in zip(loads, pieces):
            held.handles[load.slot] = _by_role(own, list(islice(given, len(own))), layer, load.item[1])
            run.came.add(load.item)
        return nbytes

    def _hand_out(self, batch: ExpertBatch) -> Iterator[ExpertBatch]:
        """To the op, which computes until it asks for the next one."""
        self._clock.change(computing=1)
        try:
            yield batch
        finally:
            self._clock.change(computing=-1)

    def _give(self, run: _Pass, items: Sequence[Item]) -> None:
        with self._changed:
            run.given.update(items)
            self._changed.notify_all()

    def _end(self, run: _Pass) -> None:
        """Whatever happened: nothing is being filled any more, and what did not come is forgotten."""
        if run.visit is None:  # nothing was asked for, or an interrupt came while the pool was at it
            run.held.empty()
        elif run.visit.loads:
            for job in run.jobs.values():
                job.cancel()
            with self._changed:
                self._changed.notify_all()  # those that wait for a slot see that it is over
                while run.filling:
                    self._changed.wait()
            run.held.pool.forget(*(load.item for load in run.visit.loads if load.item not in run.came))
        self._running = None


# --- experts and their slices ------------------------------------------------------------------------------------


def _pieces(layer: ExpertLayer, expert: int) -> Pieces:
    return [(tensor, index) for tensor in layer.tensors(expert) for index in range(len(tensor.slices))]


def _by_role(pieces: Pieces, handles: Sequence[Handle], layer: ExpertLayer, expert: int) -> ExpertHandles:
    """Gate, up and down of the slices that are there."""
    names = [t.name for t in layer.tensors(expert)]
    gate, up, down = ([h for h, (t, _) in zip(handles, pieces) if t.name == name] for name in names)
    return gate, up, down


def _parts(layer: ExpertLayer, expert: int) -> Iterator[Item]:
    """Items of an expert's slices: layer, expert, role, index."""
    for role, tensor in enumerate(layer.tensors(expert)):
        for index in range(len(tensor.slices)):
            yield layer.layer, expert, role, index


def _pieces_of(layer: ExpertLayer, item: Item) -> Pieces:
    """An expert's, or that one which the item is."""
    return _pieces(layer, item[1]) if len(item) == 2 else [(layer.tensors(item[1])[item[2]], item[3])]


def _last_part(layer: ExpertLayer, item: Item) -> bool:
    return item[2] == 2 and item[3] == len(layer.down[item[1]].slices) - 1


def _batch(found: Sequence[tuple[int, ExpertHandles]]) -> ExpertBatch:
    """Numbers and handles; the parts of one expert together."""
    ids: list[int] = []
    handles: list[ExpertHandles] = []
    for expert, parts in found:
        if ids and ids[-1] == expert:
            handles[-1] = tuple([*a, *b] for a, b in zip(handles[-1], parts))  # type: ignore[assignment]
        else:
            ids.append(expert)
            handles.append(parts)
    return ids, handles


def slices_of(layer: ExpertLayer, expert: int) -> list[tuple[str, int]]:
    """Keys of an expert's slices, in the order of the file."""
    return [(tensor.name, index) for tensor, index in _pieces(layer, expert)]
