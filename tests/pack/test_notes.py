"""Notes: kept beside the hash, whole or as they were."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ork.errors import PackDamaged, PackError, UsageError
from ork.pack import Pack, verify, write_note
from tests.pack.samples import write_sample

AREA = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sample(tmp_path / "x.orkpack")
    return tmp_path / "x.orkpack"


def test_notes_come_back_and_leave_the_digest_alone(path: Path) -> None:
    digest = verify(path)
    pack = Pack.open(path)
    assert pack.notes() == {}
    write_note(path, "quality", {"ppl": 12.5, "text": "né"})
    write_note(path, "placement", [1, 2, None, True])
    write_note(path, "quality", {"ppl": 11})
    assert pack.notes() == {"quality": {"ppl": 11}, "placement": [1, 2, None, True]}
    assert verify(path) == digest == pack.digest


def test_notes_are_zero_after_conversion(path: Path) -> None:
    assert not any(path.read_bytes()[-2 * AREA :])


def test_a_write_torn_at_any_byte_leaves_the_notes_as_they_were_or_new(path: Path) -> None:
    write_note(path, "k", "old" * 100)
    before = path.read_bytes()
    for value in ("new" * 90, "newer" * 200):
        write_note(path, "k", value)
        after = path.read_bytes()
        changed = [i for i in range(len(before) - 2 * AREA, len(before)) if before[i] != after[i]]
        assert changed[-1] - changed[0] < AREA
        old = Pack.open(path).notes()["k"]
        path.write_bytes(before)
        kept = Pack.open(path).notes()["k"]
        for cut in (changed[0], changed[3], changed[len(changed) // 2], changed[-1]):
            path.write_bytes(before[:cut] + after[cut : len(before)])
            assert Pack.open(path).notes()["k"] in (kept, old)
            path.write_bytes(after[:cut] + before[cut:])
            assert Pack.open(path).notes()["k"] in (kept, old)
        # the next write heals the torn area
        write_note(path, "healed", 1)
        assert verify(path)
        path.write_bytes(after)
        before = after


def test_a_damaged_area_is_reported_and_healed_by_the_next_note(path: Path) -> None:
    write_note(path, "a", 1)
    write_note(path, "b", 2)
    data = bytearray(path.read_bytes())
    newest = data.rindex(b'{"a":1,"b":2}')
    data[newest] ^= 1
    path.write_bytes(data)
    assert Pack.open(path).notes() == {"a": 1}
    with pytest.raises(PackDamaged, match=r"notes area \d at offset"):
        verify(path)
    write_note(path, "c", 3)
    assert Pack.open(path).notes() == {"a": 1, "c": 3}
    assert verify(path)
    data[data.index(b'{"a":1}')] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackDamaged, match="neither"):
        Pack.open(path).notes()


def test_writers_at_once_lose_nothing(path: Path) -> None:
    threads = [threading.Thread(target=write_note, args=(path, f"k{i}", i)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert Pack.open(path).notes() == {f"k{i}": i for i in range(8)}


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1,048,544 fit"):
        write_note(path, "k", "x" * AREA)
    with pytest.raises(PackError, match="JSON"):
        write_note(path, "k", float("nan"))
    with pytest.raises(PackError, match="no such file"):
        write_note(tmp_path / "none", "k", 1)
    (tmp_path / "gguf").write_bytes(b"GGUF" + bytes(9999))
    with pytest.raises(PackError, match="not an ork pack"):
        write_note(tmp_path / "gguf", "k", 1)
    assert (tmp_path / "gguf").read_bytes() == b"GGUF" + bytes(9999)
    write_note(path, "k", "x" * (AREA - 60))
    assert len(Pack.open(path).notes()["k"]) == AREA - 60
    assert os.path.getsize(path) == Pack.open(path).nbytes
