"""Packs that commands make on the way are kept: a source is converted once for each recipe."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from ork.build.cache import cached_pack
from ork.build.convert import DEFAULT_MAX_RAM, convert
from ork.errors import StorageError, UsageError
from ork.quant.recipe import Recipe, builtin
from ork.sources.base import open_source
from tests import tiny
from tests.models.test_goldens import GOLDENS


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "model.gguf", "gemma3", kind="Q8_0")


def cached(path: Path, told: list[str] | None = None, recipe: Recipe | None = None) -> Path:
    announce = None if told is None else told.append
    return cached_pack(path, recipe or builtin("i8"), max_ram=DEFAULT_MAX_RAM, announce=announce)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_source_is_converted_once(gguf: Path, home: Path) -> None:
    told: list[str] = []
    first = cached(gguf, told)
    assert home in first.parents
    assert len(told) == 1
    stamp = first.stat()
    assert cached(gguf, told) == first
    assert first.stat().st_mtime_ns == stamp.st_mtime_ns
    assert len(told) == 1
    assert cached(first, told) == first  # a pack is what it is


def test_what_differs_has_a_pack_of_its_own(gguf: Path, home: Path) -> None:
    recipes = [builtin("i8"), builtin("f32"), builtin("i8", rotate=False), builtin("nf4"), builtin("nf4", group=32)]
    paths = [cached(gguf, recipe=recipe) for recipe in recipes]
    assert len(set(paths)) == len(recipes)
    assert cached(gguf, recipe=builtin("f32", rotate=False)) == paths[1]


def test_a_changed_source_is_converted_again(gguf: Path, home: Path, tmp_path: Path) -> None:
    first = cached(gguf)
    data = bytearray(gguf.read_bytes())
    data[-40] ^= 1  # a code of the last tensor: no header tells
    gguf.write_bytes(data)
    os.utime(gguf, ns=(1, gguf.stat().st_mtime_ns + 1))
    second = cached(gguf)
    assert second != first
    assert second.read_bytes() != first.read_bytes()
    folder = tmp_path / "hf"
    folder.mkdir()
    for f in (GOLDENS / "qwen2").iterdir():
        (folder / f.name).write_bytes(f.read_bytes())
    third = cached(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert cached(folder) != third


def test_a_pack_without_its_name_is_known(gguf: Path, tmp_path: Path) -> None:
    with contextlib.closing(open_source(gguf)) as source:
        convert(source, tmp_path / "x.orkpack", builtin("i8"))
    plain = (tmp_path / "x.orkpack").rename(tmp_path / "model.bin")
    assert cached(plain) == plain


def test_a_cache_that_cannot_be(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="ORK_HOME"):
        cached(gguf)
    with pytest.raises(UsageError, match="no such file or folder"):
        cached(tmp_path / "nothing.gguf")
