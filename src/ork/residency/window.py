"""A model in a window: a pinned prefix, slots for the rest, and nothing else of the pack in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import cycle

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.devices.base import Device, Handle, SliceSpec, Slot
from ork.pack.format import align
from ork.residency.cache import Key, WindowPlan, plan_window
from ork.residency.expert_cache import ExpertCache, slices_of
from ork.residency.experts import ExpertPlan, Profile, check_policy, plan_experts, plan_parts
from ork.residency.loading import load_slices, release_frames
from ork.residency.prefetch import Clock, Loader
from ork.residency.stream import (
    Batch,
    ExpertBatch,
    ExpertLayer,
    Ready,
    SliceSource,
    StreamStats,
    TensorSpec,
    domain_of,
    with_experts,
)

GATHER = 64  # columns that an embedding look-up reads together
GATHERED = 64  # such pieces that are kept: frequent tokens

Piece = tuple[native.Slice, npt.NDArray[np.uint8]]
Ranges = tuple[int, list[tuple[int, int, int]]]  # bytes in all; start in the blob, start in the piece, bytes of each


class Window:
    """Streams slices through `window` bytes of the device. `tensors` must be set before use, in a pass's order.

    One op at a time: whoever asks for batches while another generator of them is half used may find no slot free, and
    is told so. The slots are in the domain of the last pinned slices, whose neighbours in the order pass through them.
    """

    def __init__(
        self,
        source: SliceSource,
        device: Device,
        window: int,
        *,
        prefetch: bool = True,
        expert_policy: str = "lru",
        profile: Profile | None = None,
    ):
        self.source = source
        self.device = device
        self.window = window
        self.stats = StreamStats()
        self.tensors: list[TensorSpec] = []
        self.expert_layers: list[ExpertLayer] = []
        self.plan: WindowPlan | None = None
        self.expert_plan: ExpertPlan | None = None
        self._prefetch = prefetch
        self._policy, self._profile = check_policy(expert_policy), profile
        self._cache: ExpertCache | None = None
        self._placement: Mapping[Key, int] = {}
        self._slot_domain = 0
        self._pinned: dict[Key, Handle] = {}
        self._whole: dict[tuple[str, ...], Batch] = {}  # by names: what ops ask for that is all pinned
        self._slots: list[tuple[Slot, int, int | None]] = []  # all of them, with bytes and domain
        self._ready: Ready | None = None
        self._loader: Loader | None = None
        self._clock = Clock(self.stats)
        self._pieces: OrderedDict[tuple[str, int], Piece] = OrderedDict()
        self._piece_bytes = 0

    def reside(self) -> Ready:
        """Plans the window, fills what stays, makes the slots. Raises UsageError for a window that is too small."""
        if self._ready is None:
            start = time.perf_counter()
            try:
                self._fill(self._planned())
            except BaseException as error:
                release_frames(error)
                self.close()
                raise
            seconds = time.perf_counter() - start
            stats = self.stats
            stay = self.expert_plan.stay if self.expert_plan else {}
            experts = sum(len(slices_of(layer, e)) for layer in self.expert_layers for e in stay.get(layer.layer, ()))
            self._ready = Ready(len(self._pinned) + experts, stats.resident_bytes, dict(stats.domains), seconds)
        return self._ready

    def staying(self) -> tuple[list[Key], int]:
        plan, experts = self._planned(), self.expert_plan
        specs = {(t.name, i): s for t in self.tensors for i, s in enumerate(t.slices)}
        keys = [key for key in plan.pinned if self._domain([specs[key]], 0) is not None]
        through = self._domain([specs[key] for key in plan.streamed], 0)
        slots = 0 if through is None else plan.slots * plan.slot_bytes
        if experts is not None and self._domain(self._expert_specs(self.expert_layers), 0) is not None:
            keys += [key for layer in self.expert_layers for key in self._expert_keys(layer, experts)]
            place = {t.name: i for i, t in enumerate(with_experts(self.tensors, self.expert_layers))}
            keys.sort(key=lambda key: (place[key[0]], key[1]))
            slots += sum(pool.nbytes for pool in experts.pools if pool.shared)
        return keys, slots

    def place(self, placement: Mapping[Key, int], slot_domain: int) -> None:
        self._placement, self._slot_domain = placement, slot_domain

    def _planned(self) -> WindowPlan:
        if self.plan is not None:
            return self.plan
        device, domain = self.device, self.device.capacity().bytes_per_domain
        # where it takes several domains an op's slices should be in one: each change waits for the device to be idle
        even = not domain or self.window <= domain
        if self.expert_layers:
            self.expert_plan = self._plan_experts()
        left = self.window - (self.expert_plan.nbytes if self.expert_plan else 0)
        return plan_window(self.tensors, left, device.cores, device.mapped_bytes, even=even)

    def _plan_experts(self) -> ExpertPlan:
        """Weights that every pass reads come first: experts have what these leave. Where they leave too little, or do
        not fit themselves, experts pass through as few slots as can be."""
        mapped, layers = self.device.mapped_bytes, self.expert_layers
        dense = sum(align(mapped(s)) for t in self.tensors for s in t.slices)
        plan = plan_experts(layers, self.window - dense, mapped, self._policy, self._profile)
        if plan is not None:
            return plan
        largest = max(align(mapped(s)) for t in self.tensors for s in t.slices)
        least = min(dense, (self.device.cores + 1) * largest)
        return plan_parts(layers, self.window - least, mapped, self.device.cores + 1, self._policy)

    def _fill(self, plan: WindowPlan) -> None:
        self.plan = plan
        self.stats.reason = f"window {self.window / 2**20:.1f} MiB: {plan.reason}"
        specs = {t.name: t for t in self.tensors}
        slots = self._make_pinned(plan.pinned, specs)
        loaded = load_slices(
            self.source, self.device, [(specs[n], i, slot) for (n, i), slot in zip(plan.pinned, slots)]
        )
        for key, (handle, nbytes) in zip(plan.pinned, loaded):
            self._pinned[key] = handle
            self.stats.loads += 1
            self.stats.moved_bytes += nbytes
        if plan.streamed:
            self._loader = Loader(
                self.source,
                self.device,
                specs,
                plan.streamed,
                self._make_slots(plan, specs),
                self.stats,
                self._clock,
                threads=self._prefetch,
            )
        if self.expert_plan is not None:
            self._fill_experts(self.expert_plan)

    def _fill_experts(self, plan: ExpertPlan) -> None:
        """Brings in the experts that stay, and makes slots for the others."""
        self.stats.reason += f"; {plan.reason}"
        places = {layer.layer: self._expert_places(layer, plan) for layer in self.expert_layers}
        slots = []
        for pool in plan.pools:
            if not pool.shared:
                slots.append(places[pool.layers[0]])
                continue
            domain = self._domain(self._expert_specs(self.expert_layers), self._slot_domain)
            made = self.device.make_slots(list(pool.sizes) * pool.slots, domain)
            owned = [self._own(s, n, domain) for s, n in zip(made, cycle(pool.sizes))]
            slots.append([owned[i : i + len(pool.sizes)] for i in range(0, len(owned), len(pool.sizes))])
        self._cache = ExpertCache(
            self.source, self.device, plan, slots, self.stats.experts, self._clock, prefetch=self._prefetch
        )
        self._cache.stay(
            [
                (layer, expert, place)
                for layer in self.expert_layers
                for expert, place in zip(plan.stay.get(layer.layer, ()), places[layer.layer])
            ]
        )

    def _expert_keys(self, layer: ExpertLayer, plan: ExpertPlan) -> list[Key]:
        """Slices of the experts that stay; of a layer that has slots of its own, those of as many experts, whose place
        and size the slots have."""
        own = next((pool.slots for pool in plan.pools if not pool.shared and layer.layer in pool.layers), 0)
        return [key for expert in plan.stay.get(layer.layer, range(own)) for key in slices_of(layer, expert)]

    def _expert_places(self, layer: ExpertLayer, plan: ExpertPlan) -> list[list[Slot]]:
        """The pieces of a place for each of these."""
        count = len(slices_of(layer, 0))
        specs = {t.name: t for t in (*layer.gate, *layer.up, *layer.down)}
        pieces = self._make_pinned(self._expert_keys(layer, plan), specs)
        return [pieces[i : i + count] for i in range(0, len(pieces), count)]

    def experts(self, layer: ExpertLayer, needed: Sequence[int]) -> Iterator[ExpertBatch]:
        self.reside()
        assert self._cache is not None
        return self._cache.batches(layer, needed)

    def _make_slots(self, plan: WindowPlan, specs: Mapping[str, TensorSpec]) -> list[Slot]:
        domain = self._domain([specs[name].slices[i] for name, i in plan.streamed], self._slot_domain)
        slots = self.device.make_slots([plan.slot_bytes] * plan.slots, domain)
        return [self._own(slot, plan.slot_bytes, domain) for slot in slots]

    def _domain(self, specs: Iterable[SliceSpec], domain: int) -> int | None:
        return domain_of(self.device, specs, domain)

    @staticmethod
    def _expert_specs(layers: Sequence[ExpertLayer]) -> list[SliceSpec]:
        """Slices of an expert of each layer: the others are like it."""
        return [s for layer in layers for t in layer.tensors(0) for s in t.slices]

    def _own(self, slot: Slot, nbytes: int, domain: int | None) -> Slot:
        self._slots.append((slot, nbytes, domain))
        self.stats.resident(nbytes, domain)
        return slot

    def _make_pinned(self, keys: Sequence[Key], specs: Mapping[str, TensorSpec]) -> list[Slot]:
        """A slot for each key, in its domain."""
        by_domain: dict[int | None, list[Key]] = {}
        for name, index in keys:
            domain = self._domain([specs[name].slices[index]], self._placement.get((name, index), 0))
            by_domain.setdefault(domain, []).append((name, index))
        slots: dict[Key, Slot] = {}
        for domain, group in by_domain.items():
            sizes = [align(self.device.mapped_bytes(specs[name].slices[index])) for name, index in group]
            for key, nbytes, slot in zip(group, sizes, self.device.make_slots(sizes, domain)):
                slots[key] = self._own(slot, nbytes, domain)
        return [slots[key] for key in keys]

    def batches(self, tensors: Sequence[TensorSpec]) -> Iterator[Batch]:
        self.reside()
        assert self.plan is not None
        names = tuple([t.name for t in tensors])
        if (whole := self._whole.get(names)) is not None:
            self.stats.hits += len(whole[1])
            if self._loader is None:
                yield whole  # nothing that it could hide is on its way
            else:
                yield from self._hand_out(whole, [])
            return
        most = self.plan.batch
        batch: Batch = ([], [])
        taken: list[Key] = []
        try:
            for i, t in enumerate(tensors):
                for index in range(len(t.slices)):
                    key = (t.name, index)
                    handle = self._pinned.get(key)
                    if handle is None:
                        loader = self._loader
                        assert loader is not None
                        # what is not ready is waited for with nothing in hand
                        if batch[1] and (len(taken) >= most or not loader.ready(key)):
                            yield from self._hand_out(batch, taken)
                            batch = ([], [])
                        taken.append(key)  # first: an interrupt right behind `take` would leave it pinned for good
                        handle = loader.take(key)
                    else:
                        self.stats.hits += 1
                    batch[0].append(i)
                    batch[1].append(handle)
            if len(batch[1]) == sum(len(t.slices) for t in tensors) and not taken:
                self._whole[names] = batch
            yield from self._hand_out(batch, taken)
        finally:
            self._give(taken)

    def _hand_out(self, batch: Batch, taken: list[Key]) -> Iterator[Batch]:
        """One batch to the op, which computes until it asks for the next one."""
        self._clock.change(computing=1)
        try:
            yield batch
        finally:
            self._clock.change(computing=-1)
            self._give(taken)

    def _give(self, taken: list[Key]) -> None:
        if taken and self._loader is not None:
            self._loader.give(*taken)
        taken.clear()

    @contextmanager
    def rows(self, tensor: TensorSpec, columns: npt.NDArray[np.int32]) -> Iterator[list[native.Slice]]:
        self.reside()
        width = tensor.slices[0].n1 - tensor.slices[0].n0
        found: dict[int, native.Slice] = {}
        wanted: list[tuple[int, int, Ranges]] = []
        for column in sorted({int(c) // GATHER * GATHER for c in columns if 0 <= c < tensor.N}):
            index = column // width
            handle = self._pinned.get((tensor.name, index))
            if handle is not None:
                found[-1 - index] = self.device.host(handle)
            else:
                wanted.append((index, column, _ranges(tensor.slices[index], column)))
        for index, column, (_, ranges) in wanted:  # the disk sees all of them before the first is waited for
            if (tensor.name, column) not in self._pieces:
                for start, _, nbytes in ranges:
                    self.source.expect(tensor.name, index, start, nbytes)
        # the memory too: the cache of pieces may let go of it meanwhile
        pieces = [self._piece(tensor, *piece) for piece in wanted]
        yield [*found.values(), *(piece for piece, _ in pieces)]

    def _piece(self, tensor: TensorSpec, index: int, column: int, place: Ranges) -> Piece:
        """Columns [column, column + 64) of a slice that is not pinned, read from the file alone."""
        key = (tensor.name, column)
        held = self._pieces.get(key)
        if held is not None:
            self._pieces.move_to_end(key)
            return held
        s = tensor.slices[index]
        nbytes, ranges = place
        room = np.empty(nbytes + 63, np.uint8)
        memory = room[-room.ctypes.data % 64 :][:nbytes]
        for start, to, count in ranges:
            self.source.read_part(tensor.name, index, start, memory[to : to + count])
        made = self.device.host_slice(
            SliceSpec(tensor.name, s.codec, s.K, s.Kp, s.ks, column, column + GATHER, s.group), memory
        )
        self._pieces[key] = made, memory
        self._piece_bytes += memory.nbytes
        self.stats.scratch_bytes = max(self.stats.scratch_bytes, self._piece_bytes)
        if len(self._pieces) > GATHERED:
            self._piece_bytes -= self._pieces.popitem(last=False)[1][1].nbytes
        return made, memory

    def close(self) -> None:
        """Stops the loaders and gives everything back; used again, it starts anew."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self._pinned.clear()
        self._whole.clear()
        while self._slots:
            slot, nbytes, domain = self._slots.pop()
            self.device.free_slot(slot)
            self.stats.resident(-nbytes, domain)
        self._pieces.clear()
        self._piece_bytes = 0
        self.plan = self.expert_plan = None
        self._ready = None


def _ranges(s: SliceSpec, column: int) -> Ranges:
    """Bytes of a slice of columns [column, column + 64) alone, and where they lie in the slice that holds them: (start
    in its blob, start in the piece, bytes)."""
    nbytes, parts = _pieces_of(s.codec, s.K, s.Kp, s.ks, tiles.pad_n(s.n1 - s.n0), s.group)
    at = (column - s.n0) // GATHER
    return nbytes, [(start + at * count, to, count) for start, to, count in parts]


@lru_cache(maxsize=64)
def _pieces_of(codec: str, K: int, Kp: int, ks: int, n: int, group: int) -> Ranges:
    """The same for the first piece of a slice of `n` columns; the next ones follow at once."""
    layout, piece = (tiles.slice_layout(codec, K, m, group) for m in (n, GATHER))
    slices = 1 if codec == "f32" else Kp // ks  # of K, each with a run of a piece's columns
    step, run = layout.codes.nbytes // slices, piece.codes.nbytes // slices
    parts = [(layout.codes.offset + k * step, k * run, run) for k in range(slices)]
    if layout.channel.nbytes:
        parts.append((layout.channel.offset, piece.channel.offset, 4 * GATHER))
    if group:
        parts.append((layout.groups.offset, piece.groups.offset, 2 * (Kp // group) * GATHER))
    return piece.nbytes, parts
