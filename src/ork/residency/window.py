"""A model in a window: a pinned prefix, slots for the rest, and nothing else of the pack in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.devices.base import Device, Handle, SliceSpec, Slot
from ork.pack.file import aligned
from ork.residency.cache import Key, WindowPlan, pages, plan_window
from ork.residency.prefetch import Clock, Loader
from ork.residency.stream import Batch, SliceSource, StreamStats, TensorSpec

GATHER = 64  # columns that an embedding look-up reads together
GATHERED = 64  # such pieces that are kept: frequent tokens

Piece = tuple[native.Slice, npt.NDArray[np.uint8]]


class Window:
    """Streams slices through `window` bytes of the device. `tensors` must be set before use, in a pass's order."""

    def __init__(
        self,
        source: SliceSource,
        device: Device,
        window: int,
        *,
        prefetch: bool = True,
        placement: Mapping[Key, int] | None = None,
    ):
        self.source = source
        self.device = device
        self.window = window
        self.stats = StreamStats()
        self.tensors: list[TensorSpec] = []
        self.plan: WindowPlan | None = None
        self._prefetch = prefetch
        self._placement = placement or {}
        self._pinned: dict[Key, Handle] = {}
        self._slots: list[Slot] = []  # of the pinned slices
        self._loader: Loader | None = None
        self._clock = Clock(self.stats)
        self._pieces: OrderedDict[tuple[str, int], Piece] = OrderedDict()

    def reside(self) -> None:
        """Plans the window, fills what stays, makes the slots. Raises UsageError for a window that is too small."""
        if self.plan is not None:
            return
        specs = {t.name: t for t in self.tensors}
        plan = self.plan = plan_window(self.tensors, self.window, self.device.cores)
        self.stats.reason = f"window {self.window >> 20} MiB: {plan.reason}"
        for key in plan.pinned:
            name, index = key
            nbytes = pages(specs[name].blob_bytes(index))
            slot = self.device.make_slot(nbytes, self._placement.get(key, 0))
            self._slots.append(slot)
            self._count(nbytes, self._placement.get(key, 0))
            read = self.source.read_into(name, index, slot.memory)
            self._pinned[key] = self.device.fill(specs[name].slices[index], slot, read)
            self.stats.loads += 1
            self.stats.moved_bytes += read
        if plan.streamed:
            slots = []
            for _ in range(plan.slots):
                slots.append(self.device.make_slot(plan.slot_bytes, 0))
                self._count(plan.slot_bytes, 0)
            self._loader = Loader(
                self.source,
                self.device,
                specs,
                plan.streamed,
                slots,
                self.stats,
                self._clock,
                threads=self._prefetch,
            )

    def batches(self, tensors: Sequence[TensorSpec]) -> Iterator[Batch]:
        self.reside()
        batch: Batch = ([], [])
        taken: list[Key] = []
        for i, t in enumerate(tensors):
            for index in range(len(t.slices)):
                key = (t.name, index)
                handle = self._pinned.get(key)
                if handle is None:
                    # one slice a core at a time; what is not ready is waited for with nothing in hand
                    full = len(taken) >= self.device.cores
                    if batch[1] and (full or not self._ready(key)):
                        yield from self._hand_out(batch, taken)
                        batch, taken = ([], []), []
                    assert self._loader is not None
                    handle = self._loader.take(key)
                    taken.append(key)
                batch[0].append(i)
                batch[1].append(handle)
        yield from self._hand_out(batch, taken)

    def _ready(self, key: Key) -> bool:
        return self._loader is not None and self._loader.ready(key)

    def _hand_out(self, batch: Batch, taken: list[Key]) -> Iterator[Batch]:
        """One batch to the op, which computes until it asks for the next one."""
        self._clock.change(computing=1)
        try:
            yield batch
        finally:
            self._clock.change(computing=-1)
            for key in taken:
                assert self._loader is not None
                self._loader.give(key)

    @contextmanager
    def rows(self, tensor: TensorSpec, columns: npt.NDArray[np.int32]) -> Iterator[list[native.Slice]]:
        self.reside()
        found: dict[int, native.Slice] = {}
        kept = []  # the pieces' memory, which the cache of pieces may let go of meanwhile
        for column in sorted({int(c) // GATHER * GATHER for c in columns if 0 <= c < tensor.N}):
            index = next(i for i, s in enumerate(tensor.slices) if s.n0 <= column < s.n1)
            handle = self._pinned.get((tensor.name, index))
            if handle is not None:
                found[-1 - index] = self.device.host(handle)
            else:
                found[column], memory = self._piece(tensor, index, column)
                kept.append(memory)
        yield list(found.values())

    def _piece(self, tensor: TensorSpec, index: int, column: int) -> Piece:
        """Columns [column, column + 64) of a slice that is not pinned, read from the file alone."""
        key = (tensor.name, column)
        held = self._pieces.get(key)
        if held is not None:
            self._pieces.move_to_end(key)
            return held
        s = tensor.slices[index]
        n = tiles.pad_n(s.n1 - s.n0)
        layout, piece = (tiles.slice_layout(s.codec, s.K, m, s.group) for m in (n, GATHER))
        memory = aligned(piece.nbytes)
        run = GATHER * layout.codes.nbytes // n * s.ks // s.Kp if s.codec != "f32" else piece.codes.nbytes
        per_slice = layout.codes.nbytes * s.ks // s.Kp if s.codec != "f32" else layout.codes.nbytes
        for k in range(piece.codes.nbytes // run):  # one run a K slice
            start = k * per_slice + (column - s.n0) // GATHER * run
            self.source.read_part(tensor.name, index, layout.codes.offset + start, memory[k * run : (k + 1) * run])
        if layout.channel.nbytes:
            at, to = layout.channel.offset + 4 * (column - s.n0), piece.channel.offset
            self.source.read_part(tensor.name, index, at, memory[to : to + 4 * GATHER])
        made = self.device.host_slice(
            SliceSpec(tensor.name, s.codec, s.K, s.Kp, s.ks, column, column + GATHER, s.group), memory
        )
        self._pieces[key] = made, memory
        if len(self._pieces) > GATHERED:
            self._pieces.popitem(last=False)
        return made, memory

    def _count(self, nbytes: int, domain: int) -> None:
        self.stats.resident(nbytes)
        self.stats.domains[domain] = self.stats.domains.get(domain, 0) + nbytes

    def close(self) -> None:
        """Stops the loaders and gives everything back."""
        if self._loader is not None:
            for slot in self._loader.close():
                self.device.free_slot(slot)
            self._loader = None
        self._pinned.clear()
        for slot in self._slots:
            self.device.free_slot(slot)
        self._slots.clear()
        self._pieces.clear()
        self.plan = None
