"""Small files that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ork.errors import StorageError


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
