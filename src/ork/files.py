"""Small files that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ork.errors import StorageError


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
