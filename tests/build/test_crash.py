"""A first run that is killed: the next one goes on or starts again, and the pack has the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ork.api import LoadedModel
from ork.build.convert import DEFAULT_MAX_RAM, convert, make_blob, plan_pack
from ork.build.running import RunningPack
from ork.pack import writer
from ork.pack.format import NOTES_AREA
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.sources.base import open_source
from tests import tiny

ROOT = Path(__file__).parents[2]
TOKENS = list(range(10, 40))
# Runs a model while its pack is built, slowly, with small batches; killed by itself once `at` bytes are written.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from ork.api import LoadedModel
from ork.build.running import RunningPack
from ork.pack import writer
from ork.quant.recipe import builtin
from ork.sources.base import open_source
source, target, at, pause = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
writer.BATCH = 16 << 10
def hook(point, written):
    time.sleep(pause)
    if written >= at:
        os.kill(os.getpid(), signal.SIGKILL)
pack = RunningPack(open_source(source), target, builtin("i8"), max_ram=2 << 30, workers=2, hook=hook)
print("go", flush=True)
pack.begin()
with LoadedModel(pack, device="cpu", threads=1, context=None, kv=None) as model:
    model.logits(list(range(10, 40)))
    pack.finish()
"""


class Crash(BaseException):
    """What the hook raises in place of a power cut."""


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH", 16 << 10)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "model.gguf", "gemma3", kind="Q8_0")


@pytest.fixture
def whole(gguf: Path, tmp_path: Path) -> bytes:
    with contextlib.closing(open_source(gguf)) as source:
        made = convert(source, tmp_path / "whole.orkpack", builtin("i8"))
    data = made.read_bytes()
    made.unlink()
    return data


def run(gguf: Path, target: Path, hook: writer.Hook | None = None) -> np.ndarray:
    """A whole first run in this process: its logits."""
    pack = RunningPack(open_source(gguf), target, builtin("i8"), max_ram=DEFAULT_MAX_RAM, workers=2, hook=hook)
    with contextlib.closing(pack):
        pack.begin()
        with LoadedModel(pack, device="cpu", threads=1, context=None, kv=None) as model:
            logits = model.logits(TOKENS)
            pack.finish()
    return logits


def start(gguf: Path, target: Path, at: int = 1 << 40, pause: float = 0.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(gguf), str(target), str(at), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def check(gguf: Path, target: Path, whole: bytes) -> None:
    """The next run finishes what is there; nothing else stays."""
    if not target.exists():
        run(gguf, target)
    assert target.read_bytes() == whole
    assert {p.name for p in target.parent.iterdir()} - {f"{target.name}.journal"} == {gguf.name, target.name}


def test_a_crash_at_every_fsync_and_rename(gguf: Path, tmp_path: Path, whole: bytes) -> None:
    target = tmp_path / "x.orkpack"
    seen: list[str] = []
    want = run(gguf, target, lambda point, written: seen.append(point))
    counts = Counter(seen)
    assert set(counts) == {"write", "fsync", "journal", "index", "footer", "rename", "renamed"}
    assert counts["fsync"] > 1
    target.unlink()
    last = {point: counts[point] - 1 for point in counts}
    stops = [(point, n) for point in counts for n in (sorted({0, 1, last[point]} & set(range(counts[point]))))]
    for point, n in stops:
        left = Counter({point: n})

        def hook(at: str, written: int, left: Counter[str] = left, point: str = point) -> None:
            if at == point:
                left[at] -= 1
                if left[at] < 0:
                    raise Crash(at)

        try:
            run(gguf, target, hook)  # batches may be fewer than they were in the run that was counted
        except Crash:
            assert target.exists() == (point == "renamed")
        got = want if target.exists() else run(gguf, target)
        assert np.array_equal(got, want)
        check(gguf, target, whole)
        target.unlink()
        Path(f"{target}.journal").unlink(missing_ok=True)


def test_killed_at_a_count_of_written_bytes(gguf: Path, tmp_path: Path, whole: bytes) -> None:
    target = tmp_path / "x.orkpack"
    for share in (0.2, 0.5):  # of all but the notes, which are zero
        with start(gguf, target, at=int((len(whole) - 2 * NOTES_AREA) * share)) as child:
            child.wait()
        assert child.returncode == -signal.SIGKILL
        assert not target.exists()
    check(gguf, target, whole)


def killed_at_random(gguf: Path, target: Path, whole: bytes, times: int) -> int:
    """How many of the children were killed at work."""
    moments, killed = random.Random(7), 0
    for _ in range(times):
        with start(gguf, target, pause=0.004) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"go\n"
            time.sleep(moments.uniform(0, 0.25))
            child.kill()
        killed += child.returncode == -signal.SIGKILL
        if moments.random() < 0.5 or target.exists():  # else the next one is killed on top of it
            check(gguf, target, whole)
            os.unlink(target)
    check(gguf, target, whole)
    return killed


def test_killed_at_random_moments(gguf: Path, tmp_path: Path, whole: bytes) -> None:
    assert killed_at_random(gguf, tmp_path / "x.orkpack", whole, 3) > 0


@pytest.mark.slow
def test_killed_at_fifty_random_moments(gguf: Path, tmp_path: Path, whole: bytes) -> None:
    assert killed_at_random(gguf, tmp_path / "x.orkpack", whole, 50) > 25


def test_a_finished_pack_outlives_a_crash_of_its_successor(gguf: Path, tmp_path: Path, whole: bytes) -> None:
    """Converting again over a pack leaves it as it is until the last rename."""
    target = tmp_path / "x.orkpack"
    target.write_bytes(whole)

    def hook(point: str, written: int) -> None:
        if point == "rename":
            raise Crash

    with contextlib.closing(open_source(gguf)) as source:
        plan = plan_pack(source, builtin("i8"))
        with writer.PackWriter.open(target, plan, hook=hook) as w:
            for entry in list(w.missing()):
                w.write(entry, make_blob(plan, source, entry))
            with pytest.raises(Crash):
                w.finish()
    assert target.read_bytes() == whole
    with Pack.open(target) as pack:
        pack.verify()
