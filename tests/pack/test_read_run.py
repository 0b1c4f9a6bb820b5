"""Slices that lie one behind the other, as an expert's do, come by one read, and are checked like any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork.errors import PackDamaged
from ork.pack import Pack
from ork.pack.file import aligned
from tests.pack.samples import write_sample

EXPERT = [f"blk.1.{role}.0" for role in ("gate", "up", "down")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sample.orkpack"
    write_sample(path)
    return path


def entries(pack: Pack, names: list[str]) -> list[int]:
    return [s.entry for name in names for s in pack.tensor(name).slices]


def dropped(path: Path) -> None:
    """Nothing of the file is in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize(
    "names", [EXPERT, EXPERT[::-1], [EXPERT[0], EXPERT[2]], EXPERT[:1], ["token_embd.weight", *EXPERT]]
)
def test_bytes_are_those_of_single_reads(path: Path, names: list[str], cold: bool) -> None:
    with Pack.open(path) as pack, Pack.open(path) as other:
        run = entries(pack, names)
        want = [np.array(other.slice(entry)) for entry in run]
        if cold:
            dropped(path)
        rooms = [aligned(blob.nbytes) for blob in want]
        assert pack.read_run(list(zip(run, rooms))) == [blob.nbytes for blob in want]
        for room, blob in zip(rooms, want):
            assert np.array_equal(room[: blob.nbytes], blob)


def test_an_expert_is_one_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    inner = os.preadv

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        reads.append(len(buffers))
        return inner(fd, buffers, offset)

    with Pack.open(path) as pack:
        if not pack._file.direct:
            pytest.skip("this file system has no O_DIRECT")
        run = entries(pack, EXPERT)
        rooms = [aligned(1 << 13) for _ in run]
        monkeypatch.setattr(pack._file, "_cached", lambda *_: False)
        monkeypatch.setattr(os, "preadv", counted)
        pack.read_run(list(zip(run, rooms)))
        assert reads == [3]


def test_a_flipped_byte_is_named(path: Path) -> None:
    with Pack.open(path) as pack:
        second = pack.tensor(EXPERT[1]).slices[0].entry
        offset = pack.address(second) - pack._base
    with path.open("r+b") as f:
        f.seek(offset + 7)
        byte = f.read(1)[0]
        f.seek(offset + 7)
        f.write(bytes([byte ^ 1]))
    with Pack.open(path) as pack:
        run = entries(pack, EXPERT)
        rooms = [aligned(1 << 13) for _ in run]
        with pytest.raises(PackDamaged, match=r"blk\.1\.up\.0.*its bytes do not match their hash"):
            pack.read_run(list(zip(run, rooms)))
