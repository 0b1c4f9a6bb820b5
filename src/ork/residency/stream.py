"""Hands an op the slices it needs. With no window every slice is placed once, where it lies, and stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ork.devices.base import Device, Handle, SliceSpec


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A weight tensor as ops see it: y[N] = x[K] @ W, in slices of columns."""

    name: str
    codec: str
    N: int
    K: int
    rotation: int  # block of the Hadamard rotation along K, 0 for none
    act_group: int
    slices: tuple[SliceSpec, ...]


class SliceSource(Protocol):
    """Where slices come from: a pack, or a converter that runs ahead of the model."""

    def spec(self, name: str) -> TensorSpec: ...

    def __contains__(self, name: str) -> bool: ...

    def blob(self, name: str, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of slice `index` of a tensor, checked against their hash."""

    def raw(self, name: str) -> npt.NDArray[np.generic]:
        """A small tensor that is not sliced: norms, biases, sign vectors."""

    @property
    def metadata(self) -> Mapping[str, object]: ...


class Stream:
    """Slices in place: placed at first use, kept until `close`."""

    def __init__(self, source: SliceSource, device: Device):
        self.source = source
        self.device = device
        self.placed_bytes = 0
        self._handles: dict[str, list[Handle]] = {}

    @contextmanager
    def stream(self, tensor: TensorSpec) -> Iterator[list[Handle]]:
        """The handles of all slices of `tensor`, in column order, for the length of one op."""
        yield self.handles(tensor)

    def handles(self, tensor: TensorSpec) -> list[Handle]:
        held = self._handles.get(tensor.name)
        if held is None:
            held = []
            for i, spec in enumerate(tensor.slices):
                blob = self.source.blob(tensor.name, i)
                held.append(self.device.place(spec, blob))
                self.placed_bytes += blob.nbytes
            self._handles[tensor.name] = held
        return held

    def close(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                self.device.free(handle)
        self._handles.clear()
