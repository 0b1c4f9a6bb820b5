"""Reads imatrix files: GGUF ones through the reader of models, old ones as `quant/imatrix.py` knows them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from ork.errors import OrkError, UsageError
from ork.files import check_folder
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


def check_output(path: Path) -> None:
    """Nothing but an imatrix is ever overwritten, the model least of all: raises UsageError for what else is there,
    StorageError for a folder that is not."""
    check_folder(path)
    if path.exists():
        try:
            read_imatrix(path)
        except OrkError:
            raise UsageError(f"{path}: is there and is no imatrix; choose another name or remove it") from None
