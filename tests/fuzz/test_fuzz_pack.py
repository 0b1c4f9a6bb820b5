"""4,000 spoilt packs: every one is refused with a typed error or read within bounds, never a crash or a balloon.

Half of them have their hashes recomputed, so that the checks behind the hashes are what stands. Those that have not
must all be found.
"""

from __future__ import annotations

import os
import resource
import struct
from collections import Counter
from pathlib import Path

import numpy as np

from ork.errors import PackError
from ork.pack import Pack, PackPlan, RawPlan, TensorPlan
from ork.pack.format import ENTRY, SECTIONS, TENSOR
from tests.pack import plain_reader
from tests.pack.samples import METADATA, write_sample

MUTANTS = 4000
INTERESTING = [0, 1, 2, 31, 32, 63, 64, 127, 128, 255, 4095, 4096, 4097, 8191, 8192, 8193, 65535, 2**31 - 1, 2**31]
INTERESTING += [2**32 - 1, 2**32, 2**48, 2**60, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 64, 2**64 - 1]
BOMBS = [  # msgpack that promises more than there is, nests for ever, or names a type that does not exist
    b"\x81\xa1k\xdd\xff\xff\xff\xff",
    b"\x81\xa1k\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa1k\xc6\xff\xff\xff\xff",
    b"\x81\xa1k\xc9\xff\xff\xff\xff\x08",
    b"\x81\xa1k\xc7\x08\x08" + b"\xff" * 8,
    b"\x81\xa1k\xc7\x0c\x08" + struct.pack("<QI", 1, 2**32 - 1),
    b"\x81\xa1k\xc7\x03\x06abc",
    b"\x81\xa1k\xd4\x07\x02",
    b"\x81\xa1k\xd4\x63\x00",
    b"\x81\xa1k\xd6\xff\x00\x00\x00\x00",
    b"\x81\xa1k\xc0",
    b"\x81\xa1k\x81\xa1k\x01",
    b"\x81\xa1k" + b"\x91" * 3000,
    b"\x81\xa1k" + b"\xdd\x10\x00\x00\x00" * 500,
    b"\x81\x01\x01",
    b"\x81\xa1\xff\x01",
]
JSON_BOMBS = [
    b"[" * 4000,
    b'{"a":' * 800,
    b"1e999",
    b'{"a":1e999}',
    b"{",
    b'{"\xff":1}',
    b"null",
    b'{"a":' + b"9" * 3000 + b"}",
]


def small_plan() -> PackPlan:
    return PackPlan(
        [
            TensorPlan("a", "i8", (130, 96), rotation=32),
            TensorPlan("b", "i4", (64, 64), group=32, act_group=32, layer=0),
            TensorPlan("c", "f32", (3, 8), layer=0),
            TensorPlan("d", "nf4", (64, 64), layer=0, expert=3),
        ],
        [RawPlan("norm", "f32", (8,)), RawPlan("cube", "u16", (2, 3, 4)), RawPlan("flags", "bool", (3,))],
        metadata=METADATA,
        tokenizer=b"{}" * 2000,
        chat_template="x" * 100,
        recipe={"filler": "y" * 4000},
        provenance={"filler": "z" * 4000},
    )


class Mutator:
    """Spoils a copy of the pack's bytes in one of several ways; deterministic."""

    def __init__(self, whole: bytes, seed: int):
        self.whole = whole
        self.rng = np.random.default_rng(seed)
        self.spans = dict(zip(SECTIONS, plain_reader.sections(whole)))
        self.kinds = (
            self.octets,
            self.header,
            self.tensor,
            self.entry,
            self.swap,
            self.metadata,
            self.json,
            self.notes,
        )

    def __call__(self) -> tuple[str, bytearray]:
        data = bytearray(self.whole)
        kind = self.kinds[self.below(len(self.kinds))]
        for _ in range(1 + self.below(3)):
            kind(data)
        return kind.__name__, data

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def put(self, data: bytearray, at: int, size: int) -> None:
        value = INTERESTING[self.below(len(INTERESTING))]
        if self.below(3) == 0:
            value = int.from_bytes(data[at : at + size], "little") + [-4096, -64, -1, 1, 64, 4096][self.below(6)]
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")

    def octets(self, data: bytearray) -> None:
        data[self.below(self.spans["notes"][0])] = self.below(256)

    def header(self, data: bytearray) -> None:
        self.put(data, 8 * (1 + self.below(28)), 8)

    def field(self, data: bytearray, section: str, record: np.dtype) -> None:
        at, nbytes = self.spans[section]
        name = list(record.fields or {})[self.below(len(record.fields or {}))]
        dtype, offset = (record.fields or {})[name][:2]
        size = min(dtype.itemsize, dtype.base.itemsize)
        element = self.below(dtype.itemsize // size)
        self.put(data, at + self.below(nbytes // record.itemsize) * record.itemsize + offset + element * size, size)

    def tensor(self, data: bytearray) -> None:
        self.field(data, "tensors", TENSOR)

    def entry(self, data: bytearray) -> None:
        self.field(data, "entries", ENTRY)

    def swap(self, data: bytearray) -> None:
        section, size = (("tensors", TENSOR.itemsize), ("entries", ENTRY.itemsize))[self.below(2)]
        at, nbytes = self.spans[section]
        i, j = (at + self.below(nbytes // size) * size for _ in range(2))
        data[i : i + size], data[j : j + size] = data[j : j + size], data[i : i + size]

    def metadata(self, data: bytearray) -> None:
        at, nbytes = self.spans["metadata"]
        if self.below(2):
            data[at + self.below(nbytes)] = self.below(256)
        else:
            self.fill(data, "metadata", BOMBS[self.below(len(BOMBS))])

    def json(self, data: bytearray) -> None:
        section = ("recipe", "provenance")[self.below(2)]
        self.fill(data, section, JSON_BOMBS[self.below(len(JSON_BOMBS))])

    def fill(self, data: bytearray, section: str, content: bytes) -> None:
        """The section becomes exactly this content: a shorter section and the same padded place."""
        at, nbytes = self.spans[section]
        content = content[:nbytes]
        data[at : at + nbytes] = content.ljust(nbytes, b"\0")
        if content.rstrip(b"\0"):
            struct.pack_into("<Q", data, 72 + 16 * SECTIONS.index(section), len(content))

    def notes(self, data: bytearray) -> None:
        at = self.spans["notes"][0] + (self.below(2) << 20)
        content = [b'{"a":1}', *JSON_BOMBS][self.below(1 + len(JSON_BOMBS))]
        body = struct.pack("<QQ", [1, 5, 2**63, 2**64 - 1][self.below(4)], [len(content), 2**20, 2**60][self.below(3)])
        body = (body + content).ljust((1 << 20) - 16, b"\0")
        data[at : at + (1 << 20)] = (plain_reader.digest(body) if self.below(4) else bytes(16)) + body


def use(path: Path) -> None:
    """All that a program does with a pack."""
    with Pack.open(path) as pack:
        for key in pack.metadata:
            _ = pack.metadata[key]
        _ = pack.notes(), pack.recipe, pack.provenance, pack.chat_template, pack.tokenizer.nbytes
        raws = set(pack.raw_names())
        for name in pack.names():
            if name in raws:
                pack.raw(name).sum()
                continue
            for s in pack.tensor(name).slices:
                pack.slice(s.entry)
        pack.verify()


def test_spoilt_packs_are_refused_or_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "x.orkpack"
    write_sample(path, small_plan())
    whole = path.read_bytes()
    use(path)
    mutate = Mutator(whole, 20240229)
    outcomes: Counter[tuple[bool, str]] = Counter()
    head = mutate.spans["notes"][0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fd = os.open(path, os.O_RDWR)
    for i in range(MUTANTS):
        kind, data = mutate()
        sealed = i % 2 == 0
        if sealed:
            plain_reader.reseal(data)
        os.pwrite(fd, data[:head] if kind != "notes" else data, 0)
        cut = mutate.below(len(whole)) if i % 40 == 0 else None
        if cut is not None:
            os.ftruncate(fd, cut)
        refusal = None
        try:
            use(path)
        except PackError as e:
            refusal = str(e)
        if refusal is None:
            assert cut is None
            assert sealed or data == whole or kind == "notes", f"mutant {i} ({kind}) was not found"
        else:
            assert "\n" not in refusal
            assert len(refusal) < 1000
        outcomes[sealed, "refused" if refusal else "read"] += 1
        if cut is not None or kind == "notes":
            os.pwrite(fd, whole, 0)
    os.close(fd)
    assert outcomes[True, "refused"] > MUTANTS / 4
    assert outcomes[True, "read"] > 50  # the mutations are fine enough that some make another good pack
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
