"""A pack is whole or not there: killed anywhere and resumed, it ends with the bytes of an uninterrupted run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ork.errors import PackError, StorageError, UsageError
from ork.pack import PackPlan, PackWriter, TensorPlan, journal, verify, writer
from tests.pack.samples import blob_of, complete, fill, sample_plan, write_sample

ROOT = Path(__file__).parents[2]  # so that a child process finds `tests`


class Crash(BaseException):
    """What the hook raises in place of a power cut."""


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH", 16 << 10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x"
    write_sample(path)
    return path.read_bytes()


def crash_at(count: int) -> Callable[[str, int], None]:
    seen = 0

    def hook(point: str, written: int) -> None:
        nonlocal seen
        seen += 1
        if seen > count:
            raise Crash(point)

    return hook


def points(path: Path, order: int | None = None) -> list[str]:
    seen: list[str] = []
    with PackWriter.open(path, sample_plan(), hook=lambda point, written: seen.append(point)) as w:
        complete(w, order=order)
    return seen


def crashed(path: Path, count: int) -> str:
    """Write until point number `count`, then leave everything as a killed process leaves it. The point's name."""
    w = PackWriter.open(path, sample_plan(), hook=crash_at(count))
    with pytest.raises(Crash) as crash:
        complete(w, order=count)
    w.close()  # the system closes a dead process's files: no more than that
    return str(crash.value)


def test_killed_at_every_point_and_resumed(tmp_path: Path, whole: bytes) -> None:
    all_points = points(tmp_path / "count")
    assert {"write", "fsync", "journal", "index", "footer", "rename", "renamed"} == set(all_points)
    assert all_points.count("journal") > 3
    plan = sample_plan()
    rng = np.random.default_rng(3)
    for count in range(len(all_points)):
        path = tmp_path / f"x{count}"
        if count >= len(points(tmp_path / f"count{count}", order=count)):
            continue  # this order of the slices fills fewer batches
        point = crashed(path, count)
        if point == "renamed":
            assert path.read_bytes() == whole
            continue
        assert not path.exists()
        safe = {
            int(r["entry"])
            for r in np.fromfile(f"{path}.journal", np.dtype([("entry", "<u8"), ("rest", "V24")]), offset=32)
        }
        # a power cut also loses what no fsync has brought to the disk, and tears what was on its way
        with open(f"{path}.part", "r+b") as part:
            for entry in set(range(len(plan))) - safe:
                part.seek(int(plan.entry_records["offset"][entry]))
                part.write(rng.bytes(plan.nbytes(entry) // 2))
        with open(f"{path}.journal", "ab") as torn:
            torn.write(rng.bytes(int(rng.integers(0, 60))))
        with PackWriter.open(path, plan) as w:
            assert w.resumed == len(safe)
            assert set(w.missing()) == set(range(len(plan))) - safe
            complete(w)
        assert path.read_bytes() == whole
        assert not os.path.exists(f"{path}.part")
        assert not os.path.exists(f"{path}.journal")


def test_killed_again_and_again(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    for count in (4, 9, 7, 3, 5):
        crashed(path, count)
    with PackWriter.open(path, sample_plan()) as w:
        assert w.resumed > 0
        complete(w)
    assert path.read_bytes() == whole


def test_a_process_killed_outright(tmp_path: Path, whole: bytes) -> None:
    script = """
import os, signal, sys
from ork.pack import PackWriter, writer
from tests.pack.samples import complete, sample_plan
writer.BATCH = 16 << 10
left = int(sys.argv[2])
def hook(point, written):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
with PackWriter.open(sys.argv[1], sample_plan(), hook=hook) as w:
    complete(w)
"""
    path = tmp_path / "x"
    for count in (10, 14):
        done = subprocess.run([sys.executable, "-c", script, str(path), str(count)], check=False, cwd=ROOT)
        assert done.returncode == -signal.SIGKILL
    with PackWriter.open(path, sample_plan()) as w:
        assert 0 < w.resumed < len(w.plan)
        complete(w)
    assert path.read_bytes() == whole


def test_journalled_bytes_that_changed_are_written_again(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    plan = sample_plan()
    with PackWriter.open(path, plan) as w:
        fill(w)
    with PackWriter.open(path, plan) as w:
        resumed = w.resumed
        assert resumed > 3
    with open(f"{path}.part", "r+b") as part:
        part.seek(int(plan.entry_records["offset"][0]) + 7)
        part.write(b"\xaa")
    with PackWriter.open(path, plan) as w:
        assert w.resumed == resumed - 1
        assert next(w.missing()) == 0
        complete(w)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "change", [{"provenance": {"source": "another"}}, {"chat_template": "x"}, {"metadata": {"a": 1}}]
)
def test_another_plan_starts_from_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "x"
    with PackWriter.open(path, sample_plan()) as w:
        fill(w, seed=9)
    with PackWriter.open(path, sample_plan(**change)) as w:
        assert w.resumed == 0
        complete(w)
    write_sample(tmp_path / "fresh", sample_plan(**change))
    assert path.read_bytes() == (tmp_path / "fresh").read_bytes()


def test_slices_come_before_the_tokenizer(tmp_path: Path) -> None:
    """A plan without tokenizer is enough to begin; where a crash leaves it, one with a tokenizer goes on."""
    ready = sample_plan(tokenizer=b"t" * 10_000)
    write_sample(tmp_path / "fresh", ready)
    for name, later in (("extended", False), ("resumed", True)):
        path = tmp_path / name
        with PackWriter.open(path, sample_plan(tokenizer=b"")) as w:
            fill(w)
            if not later:
                w.extend(ready)
                complete(w)
            with pytest.raises(ValueError, match="other entries"):
                w.extend(sample_plan(metadata={"a": 1}))
        if later:
            with PackWriter.open(path, ready) as w:
                assert w.resumed > 3
                complete(w)
        assert path.read_bytes() == (tmp_path / "fresh").read_bytes()


def test_a_part_that_was_cut_or_a_journal_that_is_none_start_from_nothing(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    for spoil in (lambda: os.truncate(f"{path}.part", 5000), lambda: os.truncate(f"{path}.journal", 20)):
        with PackWriter.open(path, sample_plan()) as w:
            fill(w)
        spoil()
        with PackWriter.open(path, sample_plan()) as w:
            assert w.resumed == 0
    with PackWriter.open(path, sample_plan()) as w:
        complete(w)
    assert path.read_bytes() == whole


def test_from_many_threads(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    plan = sample_plan()
    progress: list[tuple[int, int]] = []
    with PackWriter.open(path, plan, lambda done, total: progress.append((done, total))) as w:
        queue = list(w.missing())
        blobs = {entry: blob_of(plan, entry) for entry in queue}

        def work() -> None:
            while True:
                try:
                    entry = queue.pop()
                except IndexError:
                    return
                w.write(entry, blobs[entry])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert list(w.missing()) == []
        w.finish()
    assert path.read_bytes() == whole
    total = sum(plan.nbytes(e) for e in range(len(plan)))
    assert max(progress) == (total, total)


def test_what_a_writer_refuses(tmp_path: Path) -> None:
    path = tmp_path / "x"
    plan = sample_plan()
    w = PackWriter.open(path, plan)
    with pytest.raises(UsageError, match="another process"):
        PackWriter.open(path, plan)
    with pytest.raises(ValueError, match="planned"):
        w.write(0, bytes(plan.nbytes(0) - 1))
    w.write(0, blob_of(plan, 0))
    with pytest.raises(ValueError, match="twice"):
        w.write(0, blob_of(plan, 0))
    with pytest.raises(PackError, match=f"{len(plan) - 1} of {len(plan)} entries"):
        w.finish()
    w.abort()
    assert list(tmp_path.iterdir()) == []
    PackWriter.open(path, plan).close()


def test_a_finished_pack_stays_until_the_new_one_is_whole(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    write_sample(path, seed=4)
    old = path.read_bytes()
    with PackWriter.open(path, sample_plan()) as w:
        fill(w)
        assert path.read_bytes() == old
        w.finish()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_later_is_one_line_and_resumable(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    path = tmp_path / "x"
    real = journal.write_all
    left = 9

    def refusing(fd: int, data: bytes | memoryview, offset: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(error, os.strerror(error))
        real(fd, data, offset)

    monkeypatch.setattr(writer, "write_all", refusing)
    with pytest.raises(StorageError) as e, PackWriter.open(path, sample_plan()) as w:
        complete(w)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)
    assert not path.exists()
    monkeypatch.setattr(writer, "write_all", real)
    with PackWriter.open(path, sample_plan()) as w:
        assert w.resumed > 0
        complete(w)
    assert path.read_bytes() == whole


def test_a_failed_fsync_is_never_believed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = PackWriter.open(tmp_path / "x", sample_plan())
    real = os.fsync

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="Input/output"):
        fill(w)
    monkeypatch.setattr(os, "fsync", real)
    with pytest.raises(StorageError, match="earlier write failed"):
        complete(w)
    w.close()
    assert not (tmp_path / "x").exists()


def test_a_file_system_that_cannot_reserve(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    write_sample(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == whole
    monkeypatch.setattr(PackWriter, "_free", lambda self: 1000)
    with pytest.raises(StorageError, match=r"2,\d+,\d+ more bytes are needed, 1,000 are free"):
        write_sample(tmp_path / "y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where the machine lets us mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "ork", tmp_path], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk_is_one_line_before_the_first_byte(tiny_disk: Path) -> None:
    with pytest.raises(StorageError, match=r"no room: 2,\d+,\d+ more bytes are needed, 1,0\d\d,\d+ are free") as e:
        PackWriter.open(tiny_disk / "x", sample_plan())
    assert "\n" not in str(e.value)
    assert list(tiny_disk.iterdir()) == []


def test_a_limit_on_file_sizes_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    script = """
import resource, sys
from ork.errors import StorageError
from ork.pack import PackWriter
from tests.pack.samples import sample_plan
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    PackWriter.open(sys.argv[1], sample_plan())
except StorageError as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x")], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert "more bytes are needed" in done.stdout
    assert "takes no file this large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        PackWriter.open(tmp_path / "no" / "x", sample_plan())
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        PackWriter.open(tmp_path / "file" / "x", sample_plan())


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    write_sample(Path("x"))
    assert Path("x").read_bytes() == whole
    assert verify("x")


def test_an_empty_pack(tmp_path: Path) -> None:
    write_sample(tmp_path / "x", PackPlan([]))
    assert verify(tmp_path / "x")
    write_sample(tmp_path / "y", PackPlan([TensorPlan("w", "f32", (1, 1))]))
    assert verify(tmp_path / "y")
