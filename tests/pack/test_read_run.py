"""Slices that lie one behind the other, as an expert's do, come by one read, and are checked like any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork import native
from ork.errors import PackDamaged
from ork.pack import Pack
from ork.pack.file import SliceFile, aligned
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


@pytest.mark.parametrize("names", [EXPERT, ["token_embd.weight", EXPERT[2], EXPERT[0]]])
def test_copying_from_the_page_cache_gives_the_same_bytes(path: Path, names: list[str]) -> None:
    with Pack.open(path) as pack:
        run = entries(pack, names)
        want = [np.array(pack.slice(entry)) for entry in run]
        rooms = [aligned(blob.nbytes) for blob in want]
        assert all(map(pack.cached, run))
        assert pack.copy(list(zip(run, rooms))) == [blob.nbytes for blob in want]
        for room, blob in zip(rooms, want):
            assert np.array_equal(room[: blob.nbytes], blob)
        dropped(path)  # a wrong guess costs time, nothing else
        again = [aligned(blob.nbytes) for blob in want]
        pack.copy(list(zip(run, again)))
        assert all(np.array_equal(a[: b.nbytes], b) for a, b in zip(again, want))


def test_a_file_that_ends_early_is_named_when_copied(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(5000))
    file = SliceFile(str(tmp_path / "short"), os.open(tmp_path / "short", os.O_RDONLY))
    with pytest.raises(PackDamaged, match=r"short: the file ends at 5000 while in use"):
        file.copy([(0, 4096, aligned(4096)), (4096, 4096, aligned(4096))])
    file.close()


def test_many_threads_fill_large_parts(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    spans = [(17, 1_500_000), (0, 1), (2_000_000, 1_000_001), (5, 0)]
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        rooms = [np.zeros(size, np.uint8) for _, size in spans]
        assert native.read_parts(fd, [start for start, _ in spans], rooms)
        for (start, size), room in zip(spans, rooms):
            assert np.array_equal(room, data[start : start + size])
        assert not native.read_parts(fd, [2_999_999], [np.zeros(3, np.uint8)])
        assert not native.read_parts(-1, [0], [np.zeros(3, np.uint8)])
        with pytest.raises(ValueError, match="differ in number"):
            native.read_parts(fd, [0, 1], rooms)
    finally:
        os.close(fd)


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
        monkeypatch.setattr(pack._file, "cached", lambda *_: False)
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
