"""Reads imatrix files: GGUF ones through the reader of models, old ones as `quant/imatrix.py` knows them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import numpy as np

from ork.errors import SourceError, UsageError
from ork.files import Kind
from ork.quant.imatrix import COUNTS, SUMS, Imatrix
from ork.sources.base import MappedFile
from ork.sources.gguf import MAGIC, GgufSource


def read_imatrix(path: Path) -> Imatrix:
    """Raises UsageError or SourceError, naming the file, for what is no imatrix or damaged; StorageError."""
    with contextlib.closing(MappedFile(path)) as file:
        if file.data[: len(MAGIC)] != MAGIC:
            return Imatrix.from_legacy(file.data, str(path))
    with contextlib.closing(GgufSource(path)) as source:
        tensors = {
            name: np.atleast_2d(source.rows(name, 0, info.rows))
            for name, info in source.tensors.items()
            if name.endswith((SUMS, COUNTS)) and info.kind == "F32"
        }
        return Imatrix.from_tensors(tensors, source.metadata, str(path))


def _holds(path: Path) -> bool:
    """Read as a whole, for a model may be a GGUF file too, and old imatrix files begin with nothing of their own."""
    try:
        read_imatrix(path)
    except (SourceError, UsageError):
        return False
    return True


IMATRIX: Final = Kind("imatrix", _holds)
