"""Reading a pack: a read-only mapping whose bytes are hashed before their first use and never copied."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ork.errors import PackError
from ork.pack.file import Part, SliceFile, aligned
from ork.pack.format import DTYPES, HASHED, NOTES_AREA, PAGE, TENSOR, damaged, hash_of
from ork.pack.index import Index, describe, map_pack, names_of, read_index
from ork.pack.metadata import BAD, Metadata, MetaValue
from ork.pack.notes import current, read_areas
from ork.pack.plan import SliceInfo, slice_infos
from ork.tiles import CODECS

_CODEC: Final = {c.number: c.name for c in CODECS.values()}
_DTYPE: Final = dict(DTYPES.values())
_RAW_NAME: Final = {number: name for name, (number, _) in DTYPES.items()}

Bytes = npt.NDArray[np.uint8]


class Tensor(NamedTuple):
    """A weight [N, K] of a pack. Padded sizes are Np and Kp; `ks` is the K slice; fields as in `TensorPlan`."""

    name: str
    codec: str
    N: int
    K: int
    Kp: int
    Np: int
    ks: int
    rotation: int
    mix: int
    group: int
    act_group: int
    layer: int
    expert: int
    first_slice: int
    slices: list[SliceInfo]


class Pack:
    """An open pack. Safe to use from many threads; views stay valid after `close` for as long as they are held.

    The mapping is of the file that was opened: replacing it by rename does not disturb a reader.
    """

    def __init__(self, path: str, data: mmap.mmap, fd: int):
        self.path = path
        self._view = memoryview(data)
        self._bytes: Bytes = np.frombuffer(data, np.uint8)
        self._base = self._bytes.ctypes.data
        self._file = SliceFile(path, fd, self._base)
        self._index: Index = read_index(path, self._view)
        self._checked = bytearray(len(self._index.entries))  # 1: hashed in this process
        self._sections: dict[str, memoryview] = {}
        self._names: dict[str, int] | None = None
        self._metadata: Metadata | None = None
        self._section("metadata")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Pack:
        """Map a pack and check header, footer, index and metadata.

        Raises PackError (missing, not a pack), PackVersion (another version), PackDamaged (cut, flipped, made up),
        StorageError (the system refuses to read it).
        """
        path = os.fspath(path)
        return cls(path, *map_pack(path))

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def digest(self) -> str:
        """The pack's hash in hex: the root over the hashes of everything but the notes."""
        return self._index.digest.hex()

    @property
    def metadata(self) -> Mapping[str, MetaValue]:
        """The model's key-value pairs, each decoded when asked for."""
        if self._metadata is None:
            self._metadata = Metadata(self._section("metadata"), self.path, self.section_span("metadata")[0])
        return self._metadata

    @property
    def tokenizer(self) -> memoryview:
        return self._section("tokenizer")

    @property
    def chat_template(self) -> str:
        return str(self._section("chat_template"), "utf-8", "replace")

    @property
    def recipe(self) -> dict[str, Any]:
        return self._object("recipe")

    @property
    def provenance(self) -> dict[str, Any]:
        return self._object("provenance")

    def __contains__(self, name: object) -> bool:
        return name in self._by_name()

    def names(self) -> list[str]:
        """Weights in canonical order, then raw tensors."""
        return list(self._by_name())

    def raw_names(self) -> list[str]:
        kinds = self._index.tensors["kind"].tolist()
        return [name for name, i in self._by_name().items() if kinds[i]]

    def tensor(self, name: str) -> Tensor:
        """A weight's description. Raises PackError if there is none of that name."""
        # a field at a time takes three times as long, and a mixture of experts has tens of thousands of tensors
        t = dict(zip(TENSOR.fields or (), self._record(name, raw=False).item()))
        N, K = t["shape"][:2].tolist()
        first = t["first_entry"]
        fields = {key: t[key] for key in ("Kp", "Np", "ks", "rotation", "mix", "group", "act_group", "layer", "expert")}
        slices = slice_infos(self._index.entries, first, t["entries"])
        return Tensor(name=name, codec=_CODEC[t["codec"]], N=N, K=K, first_slice=first, slices=slices, **fields)

    def content(self, name: str) -> str:
        """The hash (hex) over the hashes of a tensor's entries, weight or raw, in order: equal for equal bytes."""
        t = self._index.tensors[self._by_name()[name]]
        first = int(t["first_entry"])
        return hash_of(self._index.entries["hash"][first : first + int(t["entries"])].tobytes()).hex()

    def raw_type(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """(dtype as in DTYPES, shape, bytes) of a raw tensor, without reading it."""
        t = self._record(name, raw=True)
        shape = tuple(t["shape"][: int(t["ndim"])].tolist())
        return _RAW_NAME[int(t["codec"])], shape, int(self._index.entries["nbytes"][t["first_entry"]])

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A small tensor as a read-only view. Raises PackDamaged if its bytes do not match their hash."""
        t = self._record(name, raw=True)
        shape: list[int] = t["shape"][: int(t["ndim"])].tolist()
        array: npt.NDArray[Any] = self.slice(int(t["first_entry"])).view(_DTYPE[int(t["codec"])])
        return array.reshape(shape)

    def slice(self, entry: int) -> Bytes:
        """An entry's blob as a read-only view, hashed on its first use. Raises PackDamaged naming entry and offset."""
        e = self._index.entries[entry]
        offset, nbytes = int(e["offset"]), int(e["nbytes"])
        blob = self._bytes[offset : offset + nbytes]
        if not self._checked[entry]:
            if hash_of(blob) != e["hash"].tobytes():
                raise damaged(self.path, describe(self._index, entry), offset, "its bytes do not match their hash")
            self._checked[entry] = 1
        return blob

    def read_into(self, entry: int, memory: Bytes) -> int:
        """Reads an entry's blob into page-aligned `memory`, past the page cache where the file system can, and checks
        it on its first use, and again once somebody has written into the file; its bytes. Nothing of a slice's mapping
        is touched. Raises PackDamaged or StorageError."""
        self._look()
        e = self._index.entries[entry]
        offset, nbytes = int(e["offset"]), int(e["nbytes"])
        self._file.read(offset, nbytes, memory)
        self._check(entry, memory[:nbytes])
        return nbytes

    def read_run(self, items: Sequence[tuple[int, Bytes]]) -> list[int]:
        """The same for many entries, each with its own memory: by one read of the disk where they are neighbours in
        the file and the memories are whole pages. Their bytes."""
        return self._filled(items, self._file.read_run)

    def cached(self, entry: int) -> bool:
        """Whether an entry's blob is in the page cache, as far as its first page tells: to ask for all takes as long as
        to copy a tenth of it."""
        self._look()
        return self._file.cached(int(self._index.entries["offset"][entry]), 1)

    def copy(self, items: Sequence[tuple[int, Bytes]]) -> list[int]:
        """`read_run` for entries anywhere in the file that are in the page cache: all threads copy. Their bytes."""
        return self._filled(items, self._file.copy)

    def _filled(self, items: Sequence[tuple[int, Bytes]], read: Callable[[list[Part]], None]) -> list[int]:
        self._look()
        offsets, sizes = (
            self._index.entries[key][[entry for entry, _ in items]].tolist() for key in ("offset", "nbytes")
        )
        read([(offset, nbytes, memory) for offset, nbytes, (_, memory) in zip(offsets, sizes, items)])
        for nbytes, (entry, memory) in zip(sizes, items):
            self._check(entry, memory[:nbytes])
        return [int(nbytes) for nbytes in sizes]

    def _look(self) -> None:
        """Slices are read time and again, long after their first use: what somebody writes into the file meanwhile is
        not taken for what was checked."""
        if self._file.written():
            self._checked[:] = bytes(len(self._checked))

    def _check(self, entry: int, blob: Bytes) -> None:
        """Hashes what was read of an entry, once."""
        if not self._checked[entry]:
            e = self._index.entries[entry]
            if hash_of(blob) != e["hash"].tobytes():
                what = "its bytes do not match their hash"
                raise damaged(self.path, describe(self._index, entry), int(e["offset"]), what)
            self._checked[entry] = 1

    def expect(self, entry: int, start: int, nbytes: int) -> None:
        """Part of a blob will be read soon by `read_part`; one that has not been checked yet is read whole."""
        self._look()
        if self._checked[entry]:
            self._file.expect(int(self._index.entries["offset"][entry]) + start, nbytes)

    def read_part(self, entry: int, start: int, memory: Bytes) -> None:
        """Reads part of a blob that has been checked whole into `memory`, through the page cache."""
        self._look()
        e = self._index.entries[entry]
        if not self._checked[entry]:
            self.read_into(entry, aligned(int(e["nbytes"])))
        self._file.read_part(int(e["offset"]) + start, memory)

    def address(self, entry: int) -> int:
        """Where an entry's blob is in memory; valid until `close`. Call `slice` first: this does not hash."""
        return self._base + int(self._index.entries["offset"][entry])

    def notes(self) -> dict[str, Any]:
        """The notes as they are on the disk now. Raises PackDamaged only if neither area is whole."""
        offset, nbytes = self.section_span("notes")
        return current(self.path, offset, read_areas(self._view[offset : offset + nbytes]))[1]

    def section_span(self, name: str) -> tuple[int, int]:
        """(offset, nbytes) of one of SECTIONS."""
        return self._index.sections[name]

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read and check every byte: hashes, zero padding, names, JSON, both notes areas. The first fault raises
        PackDamaged. `progress(bytes done, bytes in all)` is called as it goes."""
        read_index(self.path, self._view)
        end = 0
        for offset, nbytes, what, digest in self._spans():
            if self._bytes[end:offset].any():
                raise damaged(self.path, f"the padding before {what}", end, "it is not zero")
            end = offset + nbytes
            if hash_of(self._bytes[offset:end]) != digest:
                raise damaged(self.path, what, offset, "its bytes do not match their hash")
            if progress:
                progress(end, self.nbytes)
        self._by_name()
        _ = self.recipe, self.provenance, [self.metadata[key] for key in self.metadata]
        offset, nbytes = self.section_span("notes")
        for i, area in enumerate(read_areas(self._view[offset : offset + nbytes])):
            if area is None:
                at = offset + i * NOTES_AREA
                raise damaged(self.path, f"notes area {i}", at, "a write was cut short or a byte flipped")
        if progress:
            progress(self.nbytes, self.nbytes)

    def close(self) -> None:
        """Let go of the mapping, which goes when the last view of it goes. A closed pack must not be used again."""
        if "_file" in self.__dict__:
            self._file.close()
        self.__dict__.clear()

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _spans(self) -> Iterator[tuple[int, int, str, bytes]]:
        """(offset, nbytes, name, hash) of all that is hashed but the footer, in file order."""
        index = self._index
        yield 0, PAGE, "the header", index.hashes["header"]
        for entry, e in enumerate(index.entries):
            yield int(e["offset"]), int(e["nbytes"]), describe(index, entry), e["hash"].tobytes()
        for name in HASHED[1:]:
            yield *self.section_span(name), f"section {name}", index.hashes[name]
        offset, nbytes = self.section_span("footer")  # `read_index` checked it
        yield offset, nbytes, "the footer", hash_of(self._view[offset : offset + nbytes])

    def _section(self, name: str) -> memoryview:
        """A section's bytes, hashed on first use."""
        if name not in self._sections:
            offset, nbytes = self.section_span(name)
            view = self._view[offset : offset + nbytes]
            if hash_of(view) != self._index.hashes[name]:
                raise damaged(self.path, f"section {name}", offset, "its bytes do not match their hash")
            self._sections[name] = view
        return self._sections[name]

    def _object(self, name: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self._section(name), type=dict[str, Any])
        except BAD as e:
            raise damaged(self.path, f"section {name}", self.section_span(name)[0], f"not a JSON object: {e}") from None

    def _by_name(self) -> dict[str, int]:
        if self._names is None:
            self._names = names_of(self.path, self._index)
        return self._names

    def _record(self, name: str, *, raw: bool) -> Any:
        i = self._by_name().get(name)
        if i is None:
            raise PackError(f"{self.path}: no tensor {name[:100]}; see `ork inspect`")
        record = self._index.tensors[i]
        if bool(record["kind"]) != raw:
            raise PackError(
                f"{self.path}: tensor {name} is {'a weight' if raw else 'raw'}, asked for as the other kind"
            )
        return record
