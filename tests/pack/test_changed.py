"""A pack that is written into while it is read, as by `cp` over it: what is read is right or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ork.errors import PackDamaged
from ork.pack import Pack, write_note
from ork.pack.file import aligned
from tests.pack.samples import write_sample

NAME = "blk.1.gate.0"

Read = Callable[[Pack, int], bytes]


def read_into(pack: Pack, entry: int) -> bytes:
    memory = aligned(1 << 16)
    return memory[: pack.read_into(entry, memory)].tobytes()


def read_run(pack: Pack, entry: int) -> bytes:
    memory = aligned(1 << 16)
    return memory[: pack.read_run([(entry, memory)])[0]].tobytes()


def copy(pack: Pack, entry: int) -> bytes:
    memory = aligned(1 << 16)
    return memory[: pack.copy([(entry, memory)])[0]].tobytes()


def read_part(pack: Pack, entry: int) -> bytes:
    memory = np.zeros(512, np.uint8)
    pack.expect(entry, 64, 512)
    pack.read_part(entry, 64, memory)
    return memory.tobytes()


READS = [read_into, read_run, copy, read_part]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.orkpack"
    write_sample(path)
    os.utime(path, ns=(0, 0))  # whatever is written now comes later
    return path


@pytest.mark.parametrize("read", READS)
def test_a_byte_that_changes_after_its_first_use(path: Path, read: Read) -> None:
    with Pack.open(path) as pack:
        s = pack.tensor(NAME).slices[0]
        want = read(pack, s.entry)
        with path.open("r+b") as f:
            f.seek(s.offset + 100)
            old = f.read(1)
            f.seek(s.offset + 100)
            f.write(bytes([old[0] ^ 4]))
        for _ in range(2):
            with pytest.raises(PackDamaged, match=r"blk\.1\.gate\.0.* at offset .*do not match their hash"):
                read(pack, s.entry)
        with path.open("r+b") as f:
            f.seek(s.offset + 100)
            f.write(old)
        assert read(pack, s.entry) == want


@pytest.mark.parametrize("read", READS)
def test_a_file_that_is_cut(path: Path, read: Read) -> None:
    """The index lies behind the slices: to look there in the mapping would end the process."""
    with Pack.open(path) as pack:
        entry = pack.tensor(NAME).slices[0].entry
        want, whole = read(pack, entry), path.read_bytes()
        os.truncate(path, 4096)
        for _ in range(2):
            with pytest.raises(PackDamaged, match="the file ends at 4096 while in use: convert the model again"):
                read(pack, entry)
        path.write_bytes(whole)
        assert read(pack, entry) == want


@pytest.mark.parametrize("read", READS)
def test_notes_may_be_written_and_the_name_may_go(path: Path, read: Read) -> None:
    with Pack.open(path) as pack:
        entry = pack.tensor(NAME).slices[0].entry
        want = read(pack, entry)
        write_note(path, "quality", {"ppl": 3.5})
        assert read(pack, entry) == want
        path.with_suffix(".new").write_bytes(b"another")
        os.replace(path.with_suffix(".new"), path)
        assert read(pack, entry) == want
