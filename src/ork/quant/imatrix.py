"""Importance of inputs: the mean square of every input of a linear layer over some text, as a GGUF imatrix file has it.

A file holds, for each weight tensor, `<name>.in_sum2` (sums of squares, f32 [K]; stacked experts [E, K]) and
`<name>.counts` (the rows that were summed, f32 [1] or [E, 1]); metadata general.type = "imatrix", imatrix.datasets,
imatrix.chunk_count, imatrix.chunk_size. Source: tools/imatrix of llama.cpp. `build/imatrix.py` reads such a file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ork.errors import UsageError
from ork.files import write_whole

F32 = npt.NDArray[np.float32]

SUMS: Final = ".in_sum2"
COUNTS: Final = ".counts"
ALIGNMENT: Final = 32  # GGUF's default
U32, STRING, ARRAY = 4, 8, 9  # GGUF's value types
F32_TENSOR: Final = 0  # ggml's number of the type


@dataclass(frozen=True)
class Imatrix:
    """`sums` f32 [E, K] and `counts` f32 [E] by tensor name, E = 1 but for stacked experts."""

    sums: Mapping[str, F32]
    counts: Mapping[str, F32]
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 512  # tokens
    where: str = "imatrix"  # the file, for messages

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.partition("#")[0] in self.sums

    def importance(self, name: str, K: int) -> F32:
        """Mean square f32 [K] of each input of a tensor, `stack#3` for an expert's; ones where no row was seen.

        Raises UsageError if the file does not list the tensor, or lists another number of inputs, or holds numbers
        that are no mean squares.
        """
        name, _, number = name.partition("#")
        expert = int(number or 0)
        if name not in self.sums:
            raise UsageError(f"{self.where}: lists no tensor {name}: it is of another model")
        sums, counts = self.sums[name], self.counts[name]
        if (
            number and sums.ndim == 2 and len(sums) == 1 and sums.shape[1] % K == 0
        ):  # old files: one expert after another
            sums = sums.reshape(-1, K)
            counts = np.repeat(counts, len(sums))
        if sums.ndim != 2 or sums.shape[1] != K or not 0 <= expert < sums.shape[0]:
            shape = " x ".join(map(str, sums.shape[sums.shape[0] == 1 :]))
            raise UsageError(f"{self.where}: tensor {name} has {shape} inputs, not {K}: it is of another model")
        count = counts[expert]
        if count == 0:
            return np.ones(K, np.float32)
        with np.errstate(all="ignore"):
            means: F32 = (sums[expert] / count).astype(np.float32)
        if not (np.isfinite(means).all() and (means >= 0).all() and count > 0):
            raise UsageError(f"{self.where}: tensor {name} holds a negative or infinite square: the file is damaged")
        return means

    @cached_property
    def digest(self) -> str:
        """xxh3-128 (hex) of names, sums and counts."""
        state = xxhash.xxh3_128()
        for name in sorted(self.sums):
            state.update(name.encode() + b"\0")
            state.update(np.ascontiguousarray(self.sums[name], np.float32).tobytes())
            state.update(np.ascontiguousarray(self.counts[name], np.float32).tobytes())
        return state.hexdigest()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a GGUF imatrix file, whole or not at all. Raises StorageError."""
        write_whole(path, self._encode())

    def _encode(self) -> bytes:
        tensors: list[tuple[str, F32]] = []
        for name in sorted(self.sums):
            sums = np.ascontiguousarray(self.sums[name], np.float32)
            tensors += [(name + SUMS, sums), (name + COUNTS, self.counts[name].astype(np.float32).reshape(-1, 1))]
        pairs = [
            _pair("general.type", STRING, _string("imatrix")),
            _pair("imatrix.datasets", ARRAY, _strings(self.datasets)),
            _pair("imatrix.chunk_count", U32, struct.pack("<I", self.chunk_count)),
            _pair("imatrix.chunk_size", U32, struct.pack("<I", self.chunk_size)),
        ]
        infos, data = [], bytearray()
        for name, values in tensors:
            dims = struct.pack("<I2Q", 2, values.shape[1], values.shape[0])
            infos.append(_string(name) + dims + struct.pack("<IQ", F32_TENSOR, len(data)))
            data += values.tobytes() + bytes(-values.nbytes % ALIGNMENT)
        header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(infos)
        return header + bytes(-len(header) % ALIGNMENT) + bytes(data)

    @staticmethod
    def from_tensors(tensors: Mapping[str, F32], metadata: Mapping[str, Any], where: str) -> Imatrix:
        """Of the f32 tensors [rows, columns] and metadata of a GGUF file. Raises UsageError if it is no imatrix."""
        names = [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]
        if not names or str(metadata.get("general.type", "imatrix")) != "imatrix":
            raise UsageError(f"{where}: not an imatrix: it holds no sums of squares of inputs ({SUMS})")
        for name in names:
            if tensors.get(name + COUNTS, np.empty(0)).size != tensors[name + SUMS].shape[0]:
                raise UsageError(f"{where}: tensor {name}{COUNTS} is missing or does not fit its sums: damaged")
        return Imatrix(
            {name: tensors[name + SUMS] for name in names},
            {name: tensors[name + COUNTS].reshape(-1) for name in names},
            _texts(metadata.get("imatrix.datasets")),
            _count(metadata.get("imatrix.chunk_count")),
            _count(metadata.get("imatrix.chunk_size")),
            where,
        )

    @staticmethod
    def from_legacy(data: bytes | memoryview, where: str) -> Imatrix:
        """Of an old binary file: i32 entries; each i32 length, name, i32 calls, i32 n, f32 [n] = mean square x calls;
        then, in newer ones, i32 chunks, i32 length, name of the text. Raises UsageError if it is cut or damaged."""
        sums: dict[str, F32] = {}
        counts: dict[str, F32] = {}
        at = 0

        def take(size: int) -> bytes | memoryview:
            nonlocal at
            if not 0 <= size <= len(data) - at:
                raise UsageError(f"{where}: not an imatrix, or cut at offset {at}")
            at += size
            return data[at - size : at]

        def number() -> int:
            return int(struct.unpack("<i", take(4))[0])

        for _ in range(number()):
            name = bytes(take(number())).decode("utf-8", "replace")
            calls = number()
            values = np.frombuffer(take(4 * number()), "<f4").astype(np.float32)
            if not name or not values.size or calls < 0 or name in sums:
                raise UsageError(f"{where}: entry {name!r} before offset {at} is empty or repeated: damaged")
            sums[name], counts[name] = values.reshape(1, -1), np.array([calls], np.float32)
        if not sums:
            raise UsageError(f"{where}: not an imatrix: it lists no tensor")
        return Imatrix(sums, counts, where=where)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _strings(texts: tuple[str, ...]) -> bytes:
    return struct.pack("<IQ", STRING, len(texts)) + b"".join(map(_string, texts))


def _pair(key: str, kind: int, payload: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + payload


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 32 else 0
