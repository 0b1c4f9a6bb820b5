"""A first run: the converter ahead of the model. The same bits and bytes as converting first, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ork
from ork.api import LoadedModel
from ork.build import running
from ork.build.convert import DEFAULT_MAX_RAM, convert
from ork.build.running import RunningPack, open_running
from ork.errors import OrkError, SourceError, StorageError
from ork.pack import writer
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.residency.window import Window
from ork.sources.base import open_source
from tests import tiny

TOKENS = list(range(10, 60))
SMALL_WINDOW = 112 << 10  # of a model of 230 KiB


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "model.gguf", "llama", kind="Q8_0")


@pytest.fixture
def finished(gguf: Path, tmp_path: Path) -> Path:
    with contextlib.closing(open_source(gguf)) as source:
        return convert(source, tmp_path / "finished.orkpack", builtin("i8"))


@contextlib.contextmanager
def ahead(gguf: Path, target: Path, **options: object) -> Iterator[RunningPack]:
    made = RunningPack(open_source(gguf), target, builtin("i8"), max_ram=DEFAULT_MAX_RAM, **options)  # type: ignore[arg-type]
    with contextlib.closing(made):
        assert made.begin()
        yield made


def model(pack: Pack | RunningPack, device: str = "cpu", window: int | None = None) -> LoadedModel:
    made = LoadedModel(pack, device=device, threads=1, context=None, kv=None, window=window)
    if window is not None:
        assert isinstance(made.stream, Window)
    return made


def logits_of(pack: Path, **options: object) -> np.ndarray:
    with model(Pack.open(pack), **options) as m:  # type: ignore[arg-type]
        return m.logits(TOKENS)


class Gate:
    """Lets `free` blobs be made and holds the rest until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 0):
        self.made: list[int] = []
        self.opened = threading.Event()
        self.held = threading.Event()  # set once a worker stands before the gate
        self._make, self._free, self._lock = running.make_blob, free, threading.Lock()
        monkeypatch.setattr(running, "make_blob", self)

    def __call__(self, plan: object, source: object, entry: int) -> np.ndarray:
        with self._lock:
            self.made.append(entry)
            free = len(self.made) <= self._free
        if not free:
            self.held.set()
            assert self.opened.wait(60)
        return self._make(plan, source, entry)  # type: ignore[arg-type]


# --- the same bits


@pytest.mark.parametrize(
    ("device", "window", "workers"),
    [("cpu", None, 1), ("cpu", SMALL_WINDOW, 2), ("emu", None, 2), ("emu", SMALL_WINDOW, 1)],
)
def test_logits_while_the_pack_is_built_are_those_of_the_finished_one(
    gguf: Path, finished: Path, tmp_path: Path, device: str, window: int | None, workers: int
) -> None:
    target = tmp_path / "x.orkpack"
    with ahead(gguf, target, workers=workers) as pack, model(pack, device, window) as m:
        got = m.logits(TOKENS)
        pack.finish()
        again = m.logits(TOKENS)
    assert np.array_equal(got, logits_of(finished, device=device, window=window))
    assert np.array_equal(got, again)
    assert target.read_bytes() == finished.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "finished.orkpack", "x.orkpack"}


@pytest.mark.parametrize("arch", ["gemma3", "qwen2", "qwen3"])
def test_every_architecture(tmp_path: Path, arch: str) -> None:
    source = tiny.random_gguf(tmp_path / "model.gguf", arch)
    with ahead(source, tmp_path / "x.orkpack", workers=1) as pack, model(pack) as m:
        got = m.logits(TOKENS)
        pack.finish()
    assert np.array_equal(got, logits_of(tmp_path / "x.orkpack"))


@pytest.mark.parametrize("window", [None, SMALL_WINDOW])
def test_the_rename_disturbs_no_one(gguf: Path, finished: Path, tmp_path: Path, window: int | None) -> None:
    """Everything is written but the pack has no name yet; then it gets it, and the model goes on as before."""
    named = threading.Event()

    def hook(point: str, written: int) -> None:
        assert point != "rename" or named.wait(60)

    target = tmp_path / "x.orkpack"
    with ahead(gguf, target, hook=hook) as pack, model(pack, window=window) as m:
        before = m.logits(TOKENS)
        assert not target.exists()
        inode = Path(f"{target}.part").stat().st_ino
        named.set()
        pack.finish()
        assert target.stat().st_ino == inode
        assert np.array_equal(m.logits(TOKENS), before)
    assert np.array_equal(before, logits_of(finished))


@pytest.mark.parametrize("window", [None, SMALL_WINDOW])
def test_a_pack_that_is_replaced_while_in_use(gguf: Path, finished: Path, tmp_path: Path, window: int | None) -> None:
    other = tiny.random_gguf(tmp_path / "other.gguf", "llama", seed=5)
    with contextlib.closing(open_source(other)) as source:
        convert(source, tmp_path / "other.orkpack", builtin("i8"))
    with (
        model(Pack.open(finished), window=window) as old,
        ahead(gguf, tmp_path / "x.orkpack") as pack,
        model(pack, window=window) as ran,
    ):
        want = old.logits(TOKENS)
        assert np.array_equal(ran.logits(TOKENS), want)
        pack.finish()
        os.link(tmp_path / "other.orkpack", tmp_path / "again.orkpack")
        os.replace(tmp_path / "other.orkpack", finished)
        os.replace(tmp_path / "again.orkpack", tmp_path / "x.orkpack")
        for _ in range(2):
            assert np.array_equal(old.logits(TOKENS), want)
            assert np.array_equal(ran.logits(TOKENS), want)
    assert not np.array_equal(logits_of(finished), want)


# --- order


def test_what_an_op_asks_for_goes_first(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ahead(gguf, tmp_path / "x.orkpack", workers=1) as pack:
        assert gate.held.wait(60)
        got: list[np.ndarray] = []
        ask = threading.Thread(target=lambda: got.append(pack.blob("output.weight", 0).copy()))
        ask.start()
        while not pack._asked:
            ask.join(0.001)
        gate.opened.set()
        ask.join()
        assert gate.made[1] == pack.plan.entries("output.weight")[0].entry
        pack.finish()
        assert sorted(gate.made) == list(range(len(pack.plan)))  # nothing twice
        assert np.array_equal(got[0], pack.blob("output.weight", 0))


# --- interrupted


def test_interrupted_and_resumed_by_a_run_or_a_conversion(
    gguf: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, resume in enumerate(("run", "convert")):
        target = tmp_path / f"x{n}.orkpack"
        with monkeypatch.context() as patch:
            gate = Gate(patch, free=9)
            with ahead(gguf, target, workers=1) as pack:
                assert gate.held.wait(60)
                pack._stop = True  # as `close` does; then the worker that stands before the gate goes on
                gate.opened.set()
        assert not target.exists()
        if resume == "run":
            again = Gate(monkeypatch, free=10**6)
            with ahead(gguf, target) as pack:
                pack.finish()
            assert len(again.made) == len(pack.plan) - 10
        else:
            seen: list[int] = []
            with contextlib.closing(open_source(gguf)) as source:
                convert(source, target, builtin("i8"), progress=lambda done, total: seen.append(done))  # noqa: B023
            assert len(seen) == len(pack.plan) - 10
        assert target.read_bytes() == finished.read_bytes()


def test_a_conversion_that_was_interrupted_is_resumed_by_a_run(
    gguf: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    monkeypatch.setattr(writer, "BATCH", 16 << 10)
    target = tmp_path / "x.orkpack"
    with contextlib.closing(open_source(gguf)) as source, pytest.raises(Stop):
        convert(source, target, builtin("i8"), progress=stop)
    gate = Gate(monkeypatch, free=10**6)
    with ahead(gguf, target) as pack, model(pack) as m:
        assert np.array_equal(m.logits(TOKENS), logits_of(finished))
        pack.finish()
    assert 0 < len(gate.made) < len(pack.plan)
    assert target.read_bytes() == finished.read_bytes()


# --- two at a time


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, list[str]], Pack | RunningPack]:
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "home"))

    def open_(path: Path, told: list[str]) -> Pack | RunningPack:
        return open_running(path, builtin("i8"), max_ram=DEFAULT_MAX_RAM, announce=told.append)

    return open_


def test_the_second_of_two_runs_waits_for_the_first(
    gguf: Path, finished: Path, opened: Callable[[Path, list[str]], Pack | RunningPack], monkeypatch: pytest.MonkeyPatch
) -> None:
    for interrupted in (False, True):
        gate = Gate(monkeypatch, free=5)
        told: tuple[list[str], list[str]] = ([], [])
        first = opened(gguf, told[0])
        assert isinstance(first, RunningPack)
        assert gate.held.wait(60)
        got: list[Pack | RunningPack] = []
        second = threading.Thread(target=lambda: got.append(opened(gguf, told[1])))  # noqa: B023
        second.start()
        while not told[1]:
            second.join(0.01)
        assert "another process is converting this model" in told[1][0]
        if interrupted:
            first._stop = True
        gate.opened.set()
        if interrupted:
            first.close()
        second.join()
        first.close()
        assert len(told[0]) == 1
        assert "converting model.gguf once, into " in told[0][0]
        with contextlib.closing(got[0]) as pack:
            assert isinstance(pack, RunningPack) == interrupted
            if isinstance(pack, RunningPack):
                pack.finish()
            target = Path(pack.path)
        assert target.read_bytes() == finished.read_bytes()
        target.unlink()


def test_a_model_that_is_its_own_draft(gguf: Path, opened: Callable[[Path, list[str]], Pack | RunningPack]) -> None:
    told: list[str] = []
    packs = [opened(gguf, told) for _ in range(2)]
    for pack in packs:
        pack.close()
    assert isinstance(packs[1], Pack)


# --- what goes wrong


def test_a_number_that_is_none(tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_down.weight"][3, 3] = np.nan
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    with ahead(source, tmp_path / "x.orkpack") as pack, model(pack) as m:
        with pytest.raises(SourceError, match=r"tensor blk\.1\.ffn_down\.weight.*not finite"):
            m.logits(TOKENS)
        with pytest.raises(SourceError):
            pack.finish()
    assert list(tmp_path.iterdir()) == [source]


def test_a_tokenizer_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    metadata = tiny.metadata() | {"tokenizer.ggml.pre": "nobody's"}
    source = tiny.write(tmp_path / "x.gguf", metadata, tiny.random_tensors())
    made = RunningPack(open_source(source), tmp_path / "x.orkpack", builtin("i8"), max_ram=DEFAULT_MAX_RAM)
    said: list[str] = []
    with contextlib.closing(made), pytest.raises(SourceError, match="nobody's"):
        made.begin(lambda: said.append("converting"))
    assert not said
    assert list(tmp_path.iterdir()) == [source]


def test_a_disk_that_fills_up(gguf: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all, left = writer.write_all, 12

    def full(fd: int, data: bytes, offset: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(fd, data, offset)

    target = tmp_path / "x.orkpack"
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_all", full)
        with (
            ahead(gguf, target) as pack,
            model(pack) as m,
            pytest.raises(StorageError, match=r"no room: .* are needed"),
        ):
            m.logits(TOKENS)
    assert not target.exists()
    with ahead(gguf, target) as pack, model(pack) as m:
        assert np.array_equal(m.logits(TOKENS), logits_of(finished))
        pack.finish()
    assert target.read_bytes() == finished.read_bytes()


@pytest.mark.parametrize("built", [True, False])
def test_a_read_that_fails(
    gguf: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    def broken(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with contextlib.ExitStack() as stack:
        pack = Pack.open(finished) if built else stack.enter_context(ahead(gguf, tmp_path / "x.orkpack"))
        m = stack.enter_context(model(pack, window=SMALL_WINDOW))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", broken)
            with pytest.raises(StorageError, match=r"orkpack: reading at \d+: Input/output error"):
                m.logits(TOKENS)
        if isinstance(pack, RunningPack):
            pack.finish()
    assert np.array_equal(logits_of(finished), logits_of(finished if built else tmp_path / "x.orkpack"))


def test_source_pages_are_released_once_packed(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "model.gguf", tiny.metadata(), tiny.random_tensors(rows=40_000))
    assert source.stat().st_size > 16 << 20
    with ahead(source, tmp_path / "x.orkpack") as pack:
        pack.finish()
        assert resident(source) < 1 << 20


def resident(path: Path) -> int:
    """Bytes of a file that this process has mapped and in memory."""
    found, nbytes = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            found = line.endswith(str(path))
        elif found and fields[0] == "Rss:":
            nbytes += int(fields[1]) << 10
    return nbytes


def test_load_and_run_share_the_pack(gguf: Path, opened: Callable[[Path, list[str]], Pack | RunningPack]) -> None:
    told: list[str] = []
    with contextlib.closing(opened(gguf, told)) as pack:
        assert isinstance(pack, RunningPack)
        pack.finish()
    with ork.load(gguf) as m:
        assert str(m.pack.path) == pack.path
    with contextlib.closing(opened(gguf, told)) as pack:
        assert isinstance(pack, Pack)
    assert len(told) == 1


def test_refusals(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(OrkError, match="no such file"):
        open_running(tmp_path / "no.gguf", builtin("i8"), max_ram=1 << 30, announce=print)
    with pytest.raises(OrkError, match="--max-ram 1 MiB is too little"):
        open_running(gguf, builtin("i8"), max_ram=1 << 20, announce=print)
