"""A pack as a source of slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ork.devices.base import SliceSpec
from ork.pack.reader import Pack
from ork.residency.stream import TensorSpec


class PackSource:
    """Slices of an open pack, in place: blobs are views of the mapping, hashed on first use."""

    def __init__(self, pack: Pack):
        self.pack = pack
        self._specs: dict[str, TensorSpec] = {}
        self._entries: dict[str, list[int]] = {}

    @property
    def metadata(self) -> Mapping[str, object]:
        return self.pack.metadata

    def __contains__(self, name: str) -> bool:
        return name in self.pack

    def spec(self, name: str) -> TensorSpec:
        held = self._specs.get(name)
        if held is None:
            t = self.pack.tensor(name)
            slices = tuple(
                SliceSpec(name, t.codec, t.K, t.Kp, t.ks, s.n0, s.n1, t.group, t.act_group) for s in t.slices
            )
            held = TensorSpec(name, t.codec, t.N, t.K, t.rotation, t.act_group, slices, t.mix)
            self._entries[name] = [s.entry for s in t.slices]
            self._specs[name] = held  # last: other threads look here
        return held

    def blob(self, name: str, index: int) -> npt.NDArray[np.uint8]:
        self.spec(name)
        return self.pack.slice(self._entries[name][index])

    def read_into(self, name: str, index: int, memory: npt.NDArray[np.uint8]) -> int:
        self.spec(name)
        return self.pack.read_into(self._entries[name][index], memory)

    def read_run(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        return self.pack.read_run(self._by_entry(items))

    def cached(self, name: str, index: int) -> bool:
        self.spec(name)
        return self.pack.cached(self._entries[name][index])

    def copy(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        return self.pack.copy(self._by_entry(items))

    def _by_entry(
        self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]
    ) -> list[tuple[int, npt.NDArray[np.uint8]]]:
        for name in {name for name, _, _ in items}:
            self.spec(name)
        return [(self._entries[name][index], memory) for name, index, memory in items]

    def expect(self, name: str, index: int, start: int, nbytes: int) -> None:
        self.spec(name)
        self.pack.expect(self._entries[name][index], start, nbytes)

    def read_part(self, name: str, index: int, start: int, memory: npt.NDArray[np.uint8]) -> None:
        self.spec(name)
        self.pack.read_part(self._entries[name][index], start, memory)

    def raw(self, name: str) -> npt.NDArray[np.generic]:
        return self.pack.raw(name)
