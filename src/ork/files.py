"""Files that commands write: nothing is overwritten but its own kind, small ones are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ork.errors import StorageError, UsageError


@dataclass(frozen=True)
class Kind:
    """What a command writes: `name` as in "is no pack", and whether a file `holds` it, which may raise OSError."""

    name: str
    holds: Callable[[Path], bool]
    in_place: bool = False  # rather than beside it and renamed, so that it may be a device or a pipe


def begins_with(*starts: bytes) -> Callable[[Path], bool]:
    """Tells a kind of file by its beginning, one of `starts`."""

    def holds(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(max(map(len, starts))).startswith(starts)

    return holds


TRACE: Final = Kind("trace", begins_with(b'{"displayTimeUnit": '), in_place=True)  # of the chip and of a model


def check_output(path: str | os.PathLike[str], kind: Kind) -> None:
    """What keeps `path` from being written, as far as it can be told before the work. Nothing but its own kind, or an
    empty file, is ever overwritten, the model least of all.

    Raises UsageError for a folder or another file, StorageError as `check_folder` and for what cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UsageError(f"{path}: this is a folder; name the {kind.name} to write")
        there = path.exists()
        if not (there and kind.in_place):
            check_folder(path)
        if not there or (kind.in_place and not path.is_file()):
            return
        if path.is_file() and (path.stat().st_size == 0 or kind.holds(path)):
            return
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    raise UsageError(f"{path}: is there and is no {kind.name}; choose another name or remove it")


def check_folder(path: str | os.PathLike[str]) -> None:
    """What keeps `path` from being written, as far as it can be told before the work: StorageError where its folder is
    missing or read-only."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise StorageError(f"{path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{path}: no permission to write into {folder}")


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `path` beside itself, fsyncs and renames: a crash or a full disk leaves what was there. Raises
    StorageError."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StorageError(f"{target}: {error.strerror or error}") from None
