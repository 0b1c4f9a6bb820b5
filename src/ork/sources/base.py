"""What every other module sees of a foreign model file: metadata, tensors, rows as f32."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ork.errors import SourceError, StorageError
from ork.strings import StringTable

MetaValue = bool | int | float | str | npt.NDArray[Any] | StringTable
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TensorInfo:
    """`shape` is in numpy order: (N rows, K columns) for a matrix, (n,) for a vector, (E, N, K) for stacked experts."""

    name: str
    shape: tuple[int, ...]
    kind: str  # ggml's name of the type: 'Q4_1', 'F32', ...
    nbytes: int

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of `columns` floats; experts are stacked, a vector is one row."""
        count = 1
        for n in self.shape[:-1]:
            count *= n
        return count


class Source(Protocol):
    """A model to convert from. Metadata keys and tensor names are those of GGUF, whatever the file is."""

    path: Path
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]  # in file order

    def rows(self, name: str, start: int, stop: int, out: F32 | None = None) -> F32:
        """Rows [start, stop) as f32 [stop - start, K], written to `out` if given (C-contiguous, exactly that shape).

        Stacked experts are addressed as E * N flat rows, a vector is one row.
        KeyError for an unknown tensor, ValueError for a range or an `out` that does not fit.
        """
        ...

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes as the file has them, without a copy."""
        ...

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Tell the system that the mapped pages of these rows are not needed now; reading them again is allowed."""
        ...

    def digest(self) -> str:
        """xxh3-128 (hex) of the headers (metadata, tensor names, types, shapes, offsets) and the size of every file.

        A cheap identity of the source, enough to notice another model or another quantisation under the same path;
        it does not cover the tensor data.
        """
        ...

    def close(self) -> None:
        """Drop the mapping. Views that were handed out stay valid; no further rows can be read."""
        ...


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a `.gguf` file, or a Hugging Face folder (config.json, *.safetensors, tokenizer.json).

    SourceError if it is missing, damaged or not supported; StorageError if it cannot be read.
    """
    from ork.sources.gguf import GgufSource
    from ork.sources.huggingface import HuggingFaceSource

    where = Path(path)
    try:
        mode = where.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{where}: no such file or folder") from None
    except (OSError, ValueError) as e:
        raise StorageError(f"{where}: {getattr(e, 'strerror', None) or e}") from None
    if stat.S_ISDIR(mode):
        return HuggingFaceSource(where)
    if where.suffix == ".safetensors":
        raise SourceError(f"{where}: name the folder that also holds its config.json, not the .safetensors file")
    return GgufSource(where)


def matrices(t: TensorInfo) -> dict[str, tuple[int, int]]:
    """The weights (name: N, K) that a tensor is: itself if it is a matrix, `name#0`, `name#1` ... of a stack."""
    if len(t.shape) == 2:
        return {t.name: (t.shape[0], t.shape[1])}
    return {f"{t.name}#{e}": (t.shape[1], t.shape[2]) for e in range(t.shape[0] if len(t.shape) == 3 else 0)}


def read_weight(source: Source, name: str, start: int, stop: int) -> F32:
    """Rows [start, stop) of a weight as `matrices` names it; their mapped pages are dropped."""
    first = 0
    if name not in source.tensors:
        name, _, expert = name.partition("#")
        first = int(expert) * source.tensors[name].shape[1]
    rows = source.rows(name, first + start, first + stop)
    source.release(name, first + start, first + stop)
    return rows


def finite(source: Source, name: str, rows: F32) -> F32:
    """The same rows. Raises SourceError that names the tensor if a value of them is not finite."""
    if not np.isfinite(np.abs(rows).max(initial=0)):
        raise SourceError(f"{source.path}: tensor {name} holds a value that is not finite")
    return rows


class MappedFile:
    """A whole file, mapped read-only. `data` are its bytes; views of them stay valid after `close`."""

    def __init__(self, path: Path):
        """SourceError if `path` is missing, empty or no regular file; StorageError if it cannot be read."""
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # before opening: a pipe would wait for its writer
                raise SourceError(f"{path}: not a regular file")
            with path.open("rb") as f:
                size = os.fstat(f.fileno()).st_size
                if not size:
                    raise SourceError(f"{path}: the file is empty: download it again")
                self._map = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            raise SourceError(f"{path}: no such file") from None
        except (OSError, ValueError) as e:
            raise StorageError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
        self.data = memoryview(self._map)

    def release(self, start: int, stop: int) -> None:
        """Drop the mapped pages of bytes [start, stop), to be read again if need be (also one shared at the start)."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def close(self) -> None:
        self.data.release()
        with contextlib.suppress(BufferError):  # views are alive: the mapping goes with the last of them
            self._map.close()


def check_range(info: TensorInfo, start: int, stop: int, out: F32 | None) -> F32:
    """The array that rows [start, stop) go to: `out`, or a new one. ValueError if range or `out` do not fit."""
    if not 0 <= start <= stop <= info.rows:
        raise ValueError(f"{info.name}: rows [{start}, {stop}) of {info.rows}")
    shape = (stop - start, info.columns)
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"{info.name}: out must be a writable C-contiguous float32 array of shape {shape}")
    return out
