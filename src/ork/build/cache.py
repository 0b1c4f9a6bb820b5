"""Packs that were made from a source on the way to running it, kept under `$ORK_HOME` or `~/.cache/ork`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xxhash

from ork.build.convert import CONVERTER, convert
from ork.errors import StorageError, UsageError
from ork.pack.format import MAGIC
from ork.quant.recipe import Recipe
from ork.sources.base import Source, open_source
from ork.sources.hub import home


def is_pack(path: Path) -> bool:
    """Whether the file says of itself that it is a pack, or is named like one."""
    if path.suffix == ".orkpack":
        return True
    try:
        with path.open("rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def cached_pack(
    path: Path,
    recipe: Recipe,
    *,
    max_ram: int,
    progress: Callable[[int, int], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> Path:
    """The pack of a model: `path` itself if it is one, else the cache's, converted now if it is not there.

    `recipe` is for what is no pack. `announce` is told once what is about to be converted, and where to. The
    name holds the source's identity and the recipe's, so a changed source is converted again.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    if path.is_file() and is_pack(path):
        return path
    with contextlib.closing(open_source(path)) as source:
        target = place_of(path, source, recipe)
        if not target.exists():
            said = announce and partial(announce, f"converting {path.name} once, into {target}")
            convert(source, target, recipe, max_ram=max_ram, progress=progress, announce=said)
    return target


def place_of(path: Path, source: Source, recipe: Recipe) -> Path:
    """Where the cache keeps the pack of a source, in a folder that is there. Raises StorageError."""
    stem = path.stem if path.is_file() else path.name
    # The digest covers the headers; size and time of the files stand for the data, which is not read for a name.
    identity = (CONVERTER, source.digest(), _stamps(path), recipe.digest)
    stamp = xxhash.xxh3_64_hexdigest(repr(identity).encode())
    target = home() / "packs" / f"{stem}-{stamp}-{recipe.name}.orkpack"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{target.parent}: {error.strerror}; set ORK_HOME to a folder for packs") from None
    return target


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
