"""Reads imatrix files: GGUF ones through the reader of models, old ones as `quant/imatrix.py` knows them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from ork.errors import UsageError
from ork.quant.imatrix import COUNTS, LEGACY_MAX, SUMS, Imatrix
from ork.sources.gguf import MAGIC, GgufSource


def read_imatrix(path: Path) -> Imatrix:
    """Raises UsageError or SourceError, naming the file, for what is no imatrix or damaged; StorageError."""
    try:
        with path.open("rb") as f:
            old = f.read(len(MAGIC)) != MAGIC
            f.seek(0)
            data = f.read(LEGACY_MAX + 1) if old else b""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if len(data) > LEGACY_MAX:
        raise UsageError(f"{path}: larger than {LEGACY_MAX >> 30} GiB: not an imatrix")
    if old:
        return Imatrix.from_legacy(data, str(path))
    with contextlib.closing(GgufSource(path)) as source:
        tensors = {
            name: np.atleast_2d(source.rows(name, 0, info.rows))
            for name, info in source.tensors.items()
            if name.endswith((SUMS, COUNTS)) and info.kind == "F32"
        }
        return Imatrix.from_tensors(tensors, source.metadata, str(path))
