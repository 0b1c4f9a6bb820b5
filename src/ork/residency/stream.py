"""Hands an op the slices it needs. With no window every slice is placed once, where it lies, and stays."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ork import native
from ork.devices.base import Device, Handle, SliceSpec, Slot, blob_bytes
from ork.residency.loading import load_slices, release_frames


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A weight tensor as ops see it: y[N] = x[K] @ W, in slices of columns."""

    name: str
    codec: str
    N: int
    K: int
    rotation: int  # block of the Hadamard rotation along K, 0 for none
    act_group: int  # inputs that share an activation scale, 0: the whole row
    slices: tuple[SliceSpec, ...]
    mix: int = 0  # blocks that the rotation mixes, 0: it does not

    def blob_bytes(self, index: int) -> int:
        """Bytes of a slice's blob in the pack."""
        return blob_bytes(self.slices[index])


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one layer, by number. In the pack an expert's gate, up and down are neighbours."""

    layer: int
    gate: tuple[TensorSpec, ...]
    up: tuple[TensorSpec, ...]
    down: tuple[TensorSpec, ...]

    def __len__(self) -> int:
        return len(self.gate)

    def tensors(self, expert: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """In the order in which they are computed, and lie in the file."""
        return self.gate[expert], self.up[expert], self.down[expert]


class SliceSource(Protocol):
    """Where slices come from: a pack, or a converter that runs ahead of the model."""

    def spec(self, name: str) -> TensorSpec: ...

    def __contains__(self, name: str) -> bool: ...

    def blob(self, name: str, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of slice `index` of a tensor, checked against their hash."""

    def read_into(self, name: str, index: int, memory: npt.NDArray[np.uint8]) -> int:
        """The same, read into page-aligned memory; its bytes."""

    def read_run(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        """The same for slices (name, index, memory) that follow each other: by one read if they do; their bytes."""

    def cached(self, name: str, index: int) -> bool:
        """Whether a slice seems to be in memory already, so that bringing it is copying, not waiting: a guess."""

    def copy(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        """`read_run` for any slices that are `cached`, by all threads of the native code: by an op's own thread."""

    def expect(self, name: str, index: int, start: int, nbytes: int) -> None:
        """Part of a slice will be read soon: a hint, so that several are on their way at a time."""

    def read_part(self, name: str, index: int, start: int, memory: npt.NDArray[np.uint8]) -> None:
        """Part of a slice's bytes."""

    def raw(self, name: str) -> npt.NDArray[np.generic]:
        """A small tensor that is not sliced: norms, biases, sign vectors."""

    @property
    def metadata(self) -> Mapping[str, object]: ...


@dataclass
class ExpertStats:
    """Lookups of experts by layer: one for each expert that a pass of a layer needs, however many rows it gets."""

    lookups: Counter[int] = field(default_factory=Counter)
    hits: Counter[int] = field(default_factory=Counter)  # it was there, or its slices lay in place
    loads: Counter[int] = field(default_factory=Counter)
    moved_bytes: Counter[int] = field(default_factory=Counter)
    waits: int = 0  # times that an op waited for an expert
    wait_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Of all layers; 1 where nothing was looked up."""
        lookups = self.lookups.total()
        return self.hits.total() / lookups if lookups else 1.0


@dataclass
class StreamStats:
    """Since the model was loaded. Seconds are wall time; overlap is transfer time during which an op computed."""

    loads: int = 0  # slices brought in, the pinned ones included
    hits: int = 0  # slices that were there when asked for
    waits: int = 0  # slices that an op had to wait for
    evictions: int = 0  # slices that another one took the slot of
    lazy: int = 0  # slices that were to stay and came only when an op asked, although `reside` was called before
    moved_bytes: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    scratch_bytes: int = 0  # of the host, at most: pieces of an embedding that streams
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    overlap_seconds: float = 0.0
    reason: str = "no window: slices are used where they lie"
    domains: dict[int, int] = field(default_factory=dict)  # bytes by domain; of slots in host memory none
    experts: ExpertStats = field(default_factory=ExpertStats)  # of a window: not in the counts above

    @property
    def overlap(self) -> float:
        """Share of the transfer time that was hidden under computation."""
        return self.overlap_seconds / self.transfer_seconds if self.transfer_seconds else 0.0

    def resident(self, nbytes: int, domain: int | None = 0) -> None:
        """Bytes that are mapped from now on; negative: no longer. Domain None: in host memory beside an NPU's."""
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        if domain is not None:
            self.domains[domain] = self.domains.get(domain, 0) + nbytes


@dataclass(frozen=True)
class Ready:
    """What `reside` brought in. `domains` are bytes by IOMMU domain, slots that slices will pass through included."""

    slices: int
    nbytes: int
    domains: dict[int, int]
    seconds: float


Batch = tuple[list[int], list[Handle]]  # index into the op's tensors for each handle, and the handles
ExpertHandles = tuple[list[Handle], list[Handle], list[Handle]]  # gate, up, down: the slices of one expert
ExpertBatch = tuple[list[int], list[ExpertHandles]]  # numbers of experts, and the handles of each


class Streams(Protocol):
    """What ops need of residency, with or without a window."""

    source: SliceSource
    device: Device
    stats: StreamStats
    tensors: list[TensorSpec]  # in the order of a pass, without routed experts; set once the model is built
    expert_layers: list[ExpertLayer]  # likewise

    def batches(self, tensors: Sequence[TensorSpec]) -> Iterator[Batch]:
        """The slices of an op's tensors, a batch at a time; a batch is pinned until the next one is asked for."""

    def experts(self, layer: ExpertLayer, needed: Sequence[int]) -> Iterator[ExpertBatch]:
        """The experts `needed` (ascending) of a layer, in any order, a batch at a time; a batch is pinned until the
        next one is asked for. Those that are there come first.

        An expert comes whole, unless it is larger than what the window has for one: then its slices come in several
        batches, gate and up before down, and the lists of what a batch has not are empty or shorter.
        """

    def rows(self, tensor: TensorSpec, columns: npt.NDArray[np.int32]) -> AbstractContextManager[list[native.Slice]]:
        """Host slices that hold the given columns, for embedding look-ups."""

    def staying(self) -> tuple[list[tuple[str, int]], int]:
        """The slices (tensor, index) that will stay in the device's memory, in order, and the bytes of slots for the
        others. Raises UsageError where not even those fit."""

    def place(self, placement: Mapping[tuple[str, int], int], slot_domain: int) -> None:
        """Domains for what stays and for the slots (see `planner`); before anything is brought in."""

    def reside(self) -> Ready:
        """Brings in everything that will stay, without running an op; again: what is there."""

    def close(self) -> None: ...


def domain_of(device: Device, specs: Iterable[SliceSpec], domain: int) -> int | None:
    """Where slots are that these go into: None, in host memory, if an NPU leaves all of them to the CPU."""
    return domain if not device.capacity().bytes_per_domain or any(map(device.copies, specs)) else None


class Stream:
    """Slices in place: placed at first use, kept until `close`."""

    def __init__(self, source: SliceSource, device: Device):
        self.source = source
        self.device = device
        self.stats = StreamStats()
        self.tensors: list[TensorSpec] = []
        self.expert_layers: list[ExpertLayer] = []
        self._placement: Mapping[tuple[str, int], int] = {}
        self._handles: dict[str, list[Handle]] = {}
        self._looked_up: dict[tuple[str, int], native.Slice] = {}
        self._batches: dict[tuple[str, ...], Batch] = {}
        self._experts: dict[tuple[int, int], ExpertHandles] = {}  # layer, number
        self._ready: Ready | None = None

    def batches(self, tensors: Sequence[TensorSpec]) -> Iterator[Batch]:
        key = tuple([t.name for t in tensors])
        batch = self._batches.get(key)
        if batch is None:
            indices: list[int] = []
            handles: list[Handle] = []
            before = self.stats.loads
            for i, t in enumerate(tensors):
                held = self.handles(t)
                handles += held
                indices += [i] * len(held)
            batch = self._batches[key] = (indices, handles)
            self.stats.waits += self.stats.loads - before
            self.stats.hits += len(handles) - (self.stats.loads - before)
        else:
            self.stats.hits += len(batch[1])
        yield batch

    def experts(self, layer: ExpertLayer, needed: Sequence[int]) -> Iterator[ExpertBatch]:
        stats, before = self.stats.experts, self.stats.moved_bytes
        handles: list[ExpertHandles] = []
        loads = 0
        for expert in needed:
            held = self._experts.get((layer.layer, expert))
            if held is None:
                gate, up, down = layer.tensors(expert)
                held = self._experts[layer.layer, expert] = (self.handles(gate), self.handles(up), self.handles(down))
                loads += 1
            handles.append(held)
        stats.lookups[layer.layer] += len(handles)
        stats.hits[layer.layer] += len(handles) - loads
        stats.loads[layer.layer] += loads
        stats.moved_bytes[layer.layer] += self.stats.moved_bytes - before
        if handles:
            yield list(needed), handles

    def rows(self, tensor: TensorSpec, columns: npt.NDArray[np.int32]) -> AbstractContextManager[list[native.Slice]]:
        if tensor.name in self._handles or any(t.name == tensor.name for t in self.tensors):
            return nullcontext([self.device.host(h) for h in self.handles(tensor)])
        # only looked up, never multiplied with: the slices that are needed, where they lie
        width = tensor.slices[0].n1 - tensor.slices[0].n0
        needed = sorted({int(c) // width for c in columns if 0 <= c < tensor.N})
        return nullcontext([self._look_up(tensor, i) for i in needed])

    def _look_up(self, tensor: TensorSpec, index: int) -> native.Slice:
        key = (tensor.name, index)
        held = self._looked_up.get(key)
        if held is None:
            held = self.device.host_slice(tensor.slices[index], self.source.blob(*key))
            self._looked_up[key] = held
        return held

    def handles(self, tensor: TensorSpec) -> list[Handle]:
        """All slices of a tensor, placed now if they are not yet."""
        held = self._handles.get(tensor.name)
        if held is None:
            held = self._handles[tensor.name] = self._place(tensor)
        return held

    def _place(self, tensor: TensorSpec) -> list[Handle]:
        placed: list[Handle] = []
        try:
            for i, spec in enumerate(tensor.slices):
                blob = self.source.blob(tensor.name, i)
                placed.append(self.device.place(spec, blob, self._placement.get((tensor.name, i), 0)))
                self.stats.loads += 1
                self.stats.moved_bytes += blob.nbytes
                self.stats.resident(self.device.mapped_bytes(spec), self._domain(tensor, i))
        except BaseException:
            self._free(tensor, placed)
            raise
        if self._ready is not None:
            self.stats.lazy += len(placed)
        return placed

    def _read(self, tensors: Sequence[TensorSpec]) -> None:
        """Reads tensors that the device must hold itself: into few large pieces of its memory, on all threads."""
        by_domain: dict[int, list[tuple[TensorSpec, int]]] = {}
        for t in tensors:
            for i in range(len(t.slices)):
                by_domain.setdefault(self._placement.get((t.name, i), 0), []).append((t, i))
        slots: list[tuple[TensorSpec, int, Slot]] = []
        try:
            for domain, group in by_domain.items():
                made = self.device.make_slots([self.device.mapped_bytes(t.slices[i]) for t, i in group], domain)
                slots += [(t, i, slot) for (t, i), slot in zip(group, made)]
            loaded = load_slices(self.source, self.device, slots)
        except BaseException as error:
            release_frames(error)
            for _, _, slot in slots:
                self.device.free_slot(slot)
            raise
        placed: dict[str, dict[int, Handle]] = {t.name: {} for t in tensors}
        for (t, i, _), (handle, nbytes) in zip(slots, loaded):
            placed[t.name][i] = handle
            self.stats.loads += 1
            self.stats.moved_bytes += nbytes
            self.stats.resident(self.device.mapped_bytes(t.slices[i]), self._domain(t, i))
        self._handles |= {t.name: [placed[t.name][i] for i in range(len(t.slices))] for t in tensors}

    def _free(self, tensor: TensorSpec, handles: Sequence[Handle]) -> None:
        for i, handle in enumerate(handles):
            self.device.free(handle)
            self.stats.resident(-self.device.mapped_bytes(tensor.slices[i]), self._domain(tensor, i))

    def _domain(self, tensor: TensorSpec, index: int) -> int | None:
        return domain_of(self.device, [tensor.slices[index]], self._placement.get((tensor.name, index), 0))

    def staying(self) -> tuple[list[tuple[str, int]], int]:
        return [(t.name, i) for t in self._all() if self.device.copies(t.slices[0]) for i in range(len(t.slices))], 0

    def _all(self) -> list[TensorSpec]:
        """Experts too, in the order of a pass."""
        return with_experts(self.tensors, self.expert_layers)

    def place(self, placement: Mapping[tuple[str, int], int], slot_domain: int) -> None:
        self._placement = placement

    def reside(self) -> Ready:
        if self._ready is None:
            start = time.perf_counter()
            everything = self._all()
            self._read([t for t in everything if t.name not in self._handles and self.device.copies(t.slices[0])])
            for tensor in everything:
                self.handles(tensor)
            slices = sum(map(len, self._handles.values()))
            seconds = time.perf_counter() - start
            self._ready = Ready(slices, self.stats.resident_bytes, dict(self.stats.domains), seconds)
        return self._ready

    def close(self) -> None:
        for name, handles in self._handles.items():
            self._free(self.source.spec(name), handles)
        self._handles.clear()
        self._batches.clear()
        self._experts.clear()
        self._looked_up.clear()
        self._ready = None


def with_experts(tensors: Sequence[TensorSpec], layers: Sequence[ExpertLayer]) -> list[TensorSpec]:
    """All weights in the order of a pass: the experts of a layer behind the last of its other tensors."""
    experts = {f"blk.{layer.layer}": layer for layer in layers}
    last = {_layer_of(t.name): i for i, t in enumerate(tensors)}
    order: list[TensorSpec] = []
    for i, t in enumerate(tensors):
        order.append(t)
        layer = experts.get(_layer_of(t.name)) if last[_layer_of(t.name)] == i else None
        if layer is not None:
            order += [tensor for expert in range(len(layer)) for tensor in layer.tensors(expert)]
    return order


def _layer_of(name: str) -> str:
    return name[: name.index(".", 4)] if name.startswith("blk.") else ""
