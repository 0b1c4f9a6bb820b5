"""What a pack will hold, decided before its first byte is written: every offset and size follows from the plan.

Canonical order: layer; in a layer the non-expert tensors by name, then experts by number, by role (gate < up < down)
within one; slices by column; then raw tensors by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from ork.errors import PackError
from ork.pack import metadata as meta
from ork.pack.format import (
    DIM_MAX,
    DTYPES,
    ENTRY,
    HASH_AT,
    HEADER,
    MAGIC,
    NOTES_AREA,
    PAGE,
    RAW,
    RAW_ALIGN,
    SECTIONS,
    TENSOR,
    TILED,
    VERSION,
    Records,
    align,
    check_rotation,
    hash_of,
    section_table,
)
from ork.tiles import CODECS, SliceLayout, ks_of, pad_k, pad_n, slice_columns, slice_layout

NAME_MAX: Final = 1024  # bytes


@dataclass(frozen=True)
class TensorPlan:
    """A weight to be stored as slices. `shape` is the logical (N, K): outputs, inputs.

    `rotation` is the Hadamard block along K (0 = none), `mix` the number of such blocks if an orthogonal matrix mixes
    them (0 = it does not), `group` the inputs per f16 weight scale (0 = per channel), `act_group` the inputs per
    activation scale (0 = per row). `layer` and `expert` are -1 where there is none;
    `role_order` sorts the tensors of one expert (gate 0, up 1, down 2).
    """

    name: str
    codec: str
    shape: tuple[int, int]
    rotation: int = 0
    group: int = 0
    act_group: int = 0
    layer: int = -1
    expert: int = -1
    role_order: int = 0
    mix: int = 0


@dataclass(frozen=True)
class RawPlan:
    """A small tensor stored as it is, in C order (norms, biases, sign vectors). `dtype` is a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SliceInfo(NamedTuple):
    """One slice of a tensor: columns [n0, n1) as the blob [offset, offset + nbytes) of the file."""

    entry: int
    n0: int
    n1: int
    offset: int
    nbytes: int


def canonical(t: TensorPlan) -> tuple[Any, ...]:
    name = t.name.encode()
    return (t.layer, 1, t.expert, t.role_order, name) if t.expert >= 0 else (t.layer, 0, name)


class PackPlan:
    """The whole file but for its blobs. Raises PackError, naming the tensor, for what the format cannot hold.

    `recipe` and `provenance` are JSON objects; `provenance` must not hold a time, host or path (same source, same
    bytes), and should identify the source's bytes, because a resumed conversion trusts blobs of a plan of equal `hash`.
    """

    def __init__(
        self,
        tensors: Iterable[TensorPlan],
        raws: Iterable[RawPlan] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        tokenizer: bytes = b"",
        chat_template: str = "",
        recipe: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ):
        self.tensors = tuple(sorted(tensors, key=canonical))
        self.raws = tuple(sorted(raws, key=lambda r: r.name.encode()))
        self._index: dict[str, int] = {}
        items: list[TensorPlan | RawPlan] = [*self.tensors, *self.raws]
        for i, item in enumerate(items):
            if self._index.setdefault(item.name, i) != i:
                raise PackError(f"tensor {item.name}: planned twice")
            if not 0 < len(item.name.encode()) <= NAME_MAX:
                raise PackError(f"tensor {item.name[:40]!r}: a name has 1 to {NAME_MAX} bytes")

        names = [item.name.encode() for item in items]
        self.tensor_records: Records = np.zeros(len(names), TENSOR)
        rows: list[tuple[int, int, int, int]] = []  # of entries: nbytes, tensor, n0, n1
        for i, tensor in enumerate(self.tensors):
            rows += _tiled(self.tensor_records[i], i, len(rows), tensor)
        self.slices = len(rows)
        for i, raw in enumerate(self.raws, len(self.tensors)):
            rows += _raw(self.tensor_records[i], i, len(rows), raw)
        lengths = np.array([len(n) for n in names], np.int64)
        self.tensor_records["name_bytes"] = lengths
        self.tensor_records["name_offset"] = np.cumsum(lengths) - lengths

        self.entry_records: Records = np.zeros(len(rows), ENTRY)
        table = np.array(rows, np.int64).reshape(-1, 4)
        for column, field in enumerate(("nbytes", "tensor", "n0", "n1")):
            self.entry_records[field] = table[:, column]
        offset = PAGE
        offsets = []
        for entry, nbytes in enumerate(table[:, 0].tolist()):
            offset = align(offset, PAGE if entry <= self.slices else RAW_ALIGN)
            offsets.append(offset)
            offset += nbytes
        self.entry_records["offset"] = offsets

        self.sections: dict[str, bytes] = {
            "metadata": meta.encode(metadata or {}),
            "tokenizer": bytes(tokenizer),
            "chat_template": chat_template.encode(),
            "recipe": to_json(recipe or {}),
            "provenance": to_json(provenance or {}),
            "names": b"".join(names),
            "tensors": self.tensor_records.tobytes(),
        }
        sizes = [*map(len, self.sections.values()), self.entry_records.nbytes, PAGE, 2 * NOTES_AREA]
        self.table = dict(zip(SECTIONS, section_table(offset, sizes)))
        self.file_bytes = sum(self.table["notes"])
        self.header = self._header()
        # What entries depend on, which is what a resumed conversion must not mix. The tokenizer follows from the
        # metadata: the first slices are written before it is built.
        parts = [self.entry_records.tobytes(), *(self.sections[s] for s in self.sections if s != "tokenizer")]
        self.hash = hash_of(VERSION.to_bytes(4, "little") + b"".join(map(hash_of, parts)))

    def __len__(self) -> int:
        """Entries to write: slices, then raw tensors."""
        return len(self.entry_records)

    def item(self, entry: int) -> tuple[TensorPlan | RawPlan, int, int]:
        """(plan, n0, n1) of an entry; a raw tensor's columns are (0, 0)."""
        record = self.entry_records[entry]
        tensor = int(record["tensor"])
        tiled = tensor < len(self.tensors)
        plan = self.tensors[tensor] if tiled else self.raws[tensor - len(self.tensors)]
        return plan, int(record["n0"]), int(record["n1"])

    def layout(self, entry: int) -> SliceLayout:
        """Where the parts of a slice's blob lie."""
        plan, n0, n1 = self.item(entry)
        if not isinstance(plan, TensorPlan):
            raise ValueError(f"entry {entry} is the raw tensor {plan.name}")
        return slice_layout(plan.codec, plan.shape[1], n1 - n0, plan.group)

    def entries(self, name: str) -> list[SliceInfo]:
        """The slices of a tensor in column order, or the one entry of a raw tensor. Raises KeyError."""
        record = self.tensor_records[self._index[name]]
        return slice_infos(self.entry_records, int(record["first_entry"]), int(record["entries"]))

    def nbytes(self, entry: int) -> int:
        return int(self.entry_records["nbytes"][entry])

    def _header(self) -> bytes:
        header = np.zeros(1, HEADER)
        header["magic"] = np.frombuffer(MAGIC, np.uint8)
        header["version"] = VERSION
        header["page"] = PAGE
        header["file_bytes"] = self.file_bytes
        header["slices"] = self.slices
        header["entries"] = len(self)
        header["tensors"] = len(self.tensor_records)
        header["sections"]["offset"] = [self.table[s][0] for s in SECTIONS]
        header["sections"]["nbytes"] = [self.table[s][1] for s in SECTIONS]
        page = header.tobytes().ljust(HASH_AT, b"\0")
        return page + hash_of(page)


def slice_infos(entries: Records, first: int, count: int) -> list[SliceInfo]:
    records = entries[first : first + count].tolist()
    return [SliceInfo(first + i, n0, n1, at, nbytes) for i, (at, nbytes, _, _, n0, n1, _) in enumerate(records)]


def to_json(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. Raises PackError for what JSON cannot hold."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as e:
        raise PackError(f"not a JSON object: {e}") from None


def _tiled(record: Any, tensor: int, first: int, t: TensorPlan) -> list[tuple[int, int, int, int]]:
    N, K = t.shape
    try:
        if t.codec not in CODECS:
            raise ValueError(f"codec {t.codec} is not one of {', '.join(CODECS)}")
        if not (0 < N <= DIM_MAX and 0 < K <= DIM_MAX):
            raise ValueError(f"shape {t.shape} is not positive and at most 2^31")
        if t.layer < -1 or t.expert < -1:
            raise ValueError(f"layer {t.layer}, expert {t.expert}: -1 means none")
        check_rotation(K, t.rotation, t.mix, t.act_group, t.group, t.codec)
        columns = slice_columns(t.codec, K, N, t.group)
        sizes = {n: slice_layout(t.codec, K, n, t.group).nbytes for n in {n1 - n0 for n0, n1 in columns}}
    except ValueError as e:
        raise PackError(f"tensor {t.name}: {e}") from None
    record["kind"] = TILED
    record["codec"] = CODECS[t.codec].number
    record["ndim"] = 2
    record["shape"] = (N, K, 0, 0)
    record["Kp"] = pad_k(K)
    record["Np"] = pad_n(N)
    record["ks"] = ks_of(pad_k(K), t.group)
    record["role"] = t.role_order
    for field in ("layer", "expert", "rotation", "mix", "group", "act_group"):
        record[field] = getattr(t, field)
    record["first_entry"] = first
    record["entries"] = len(columns)
    return [(sizes[n1 - n0], tensor, n0, n1) for n0, n1 in columns]


def _raw(record: Any, tensor: int, first: int, r: RawPlan) -> list[tuple[int, int, int, int]]:
    if r.dtype not in DTYPES:
        raise PackError(f"tensor {r.name}: type {r.dtype} is not one of {', '.join(DTYPES)}")
    if len(r.shape) > 4 or not all(0 < d <= DIM_MAX for d in r.shape):
        raise PackError(f"tensor {r.name}: shape {r.shape} has more than 4 dimensions or one that is not positive")
    number, dtype = DTYPES[r.dtype]
    record["kind"] = RAW
    record["codec"] = number
    record["ndim"] = len(r.shape)
    record["shape"] = (*r.shape, 0, 0, 0, 0)[:4]
    record["layer"] = record["expert"] = -1
    record["first_entry"] = first
    record["entries"] = 1
    return [(prod(r.shape) * dtype.itemsize, tensor, 0, 0)]
