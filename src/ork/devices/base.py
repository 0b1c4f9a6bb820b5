"""The Device protocol: what residency and ops see of a CPU or an NPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ork import native, tiles

Handle = Any  # a placed slice; only the device that made it looks inside


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Columns [n0, n1) of one weight tensor, as its blob holds them (docs/pack-format.md, "Slice").

    K is logical, Kp padded to 32; ks is the length of a K slice; group 0 means one scale per channel, act_group 0 one
    scale for each row that is multiplied with it.
    """

    tensor: str
    codec: str
    K: int
    Kp: int
    ks: int
    n0: int
    n1: int
    group: int = 0
    act_group: int = 0


def is_expert(spec: SliceSpec) -> bool:
    """Whether it is of one of a mixture's routed experts, which packs call `<tensor>#<number>`."""
    return "#" in spec.tensor


def blob_bytes(spec: SliceSpec) -> int:
    """Bytes of a slice's blob in the pack."""
    return tiles.slice_layout(spec.codec, spec.K, tiles.pad_n(spec.n1 - spec.n0), spec.group).nbytes


class Slot(Protocol):
    """A piece of the device's memory that slices pass through."""

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """Page-aligned, written by the host. Not to be kept: the slot cannot be freed meanwhile."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device can hold: `domains` windows of `bytes_per_domain` (0: no limit of its own)."""

    domains: int
    bytes_per_domain: int


class Device(Protocol):
    """Holds slices and multiplies rows with them. All results are equal to the last bit on every device."""

    name: str
    threads: int
    isa: str
    cores: int  # slices that are computed at a time

    def copies(self, spec: SliceSpec) -> bool:
        """Whether a slice must be in the device's own memory to be used: then it is best read into a slot."""

    def mapped_bytes(self, spec: SliceSpec) -> int:
        """What a slice takes of the device's memory: its blob, or more where the device keeps it in another form."""

    def room(self, spec: SliceSpec, slot: Slot) -> npt.NDArray[np.uint8]:
        """Page-aligned memory to read the blob of `spec` into before `fill`, on the same thread: the slot's own where
        the device takes blobs as they are. Not to be kept."""

    def place(self, spec: SliceSpec, blob: npt.NDArray[np.uint8], domain: int = 0) -> Handle:
        """A slice that stays: where it lies, or copied into the device's memory."""

    def free(self, handle: Handle) -> None: ...

    def make_slot(self, nbytes: int, domain: int = 0) -> Slot:
        """Memory for one slice at a time."""

    def make_slots(self, sizes: Sequence[int], domain: int | None = 0) -> Sequence[Slot]:
        """Slots of these bytes, in few large pieces of memory; each is freed with `free_slot`. Domain None: in host
        memory, for slices that the device does not copy (`copies`)."""

    def free_slot(self, slot: Slot) -> None: ...

    def fill(self, spec: SliceSpec, slot: Slot, nbytes: int) -> Handle:
        """The slice whose blob has just been written to `room(spec, slot)[:nbytes]`, made visible to the device."""

    def host_slice(self, spec: SliceSpec, memory: npt.NDArray[np.uint8]) -> native.Slice:
        """A slice in host memory that the caller keeps alive, for embedding look-ups."""

    def host(self, handle: Handle) -> native.Slice:
        """The slice as the host's kernels see it, for embedding look-ups."""

    def activation_limit(self, codec: str) -> int:
        """The largest code of the activations that meet weights of `codec`: 127, or 7 where they have four bits."""

    def linear(
        self,
        handles: Sequence[Handle],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
        biases: Sequence[native.Array | None],
    ) -> None:
        """outs[i][:, n0:n1] = x @ slice i (+ biases[i]); `rows` is x quantised, needed by quantised codecs, in the
        groups of the weights. f16 and f32 slices take x as it is and are computed on the host by every device."""

    def linear_experts(
        self,
        handles: Sequence[Handle],
        ranges: npt.NDArray[np.int32],
        x: native.Array,
        rows: native.QuantisedRows | None,
        outs: Sequence[native.Array],
    ) -> None:
        """outs[i][b:e, n0:n1] = x[b:e] @ slice i with (b, e) = ranges[i], to the same bits as `linear`: the products of
        many experts, whose rows lie together in x or `rows`, at a time."""

    def accumulators(self, handle: Handle, a8: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
        """Exact int32 sums [M, n1 - n0] of int8 rows [M, Kp], all of [-128, 127] allowed."""

    def fence(self) -> None:
        """Returns when everything submitted is done."""

    def capacity(self) -> Capacity: ...

    def close(self) -> None:
        """Gives everything back."""
