"""Measurements in a file, so that another budget needs no other measuring: JSON, of one model on one text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from ork.build.allocate import Measured, Measurements
from ork.build.convert import plan_pack
from ork.build.layerwise import I32
from ork.errors import SourceError, UsageError
from ork.files import write_whole
from ork.quant.recipe import builtin
from ork.sources.base import Source

MEASURING: Final = 2  # counts the changes of what is measured on the same model and text
MAX_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Kept:
    """`subject` tells apart models, texts and rotations."""

    subject: str
    measurements: Measurements


def subject_of(source: Source, tokens: I32, mode: str) -> str:
    """xxh3-128 (hex) of what a pack's provenance says of its source, the tokens and the rotation."""
    provenance = plan_pack(source, builtin("f32"), tokenizer=b"").sections["provenance"]
    return xxhash.xxh3_128_hexdigest(repr((MEASURING, provenance, tokens.shape, tokens.tobytes(), mode)).encode())


def load(path: Path, subject: str) -> Measurements | None:
    """What the file holds of `subject`; None if there is no file.

    Raises UsageError for one that holds something else, which is never overwritten.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: no file, so that it holds no measurements; name another")
    try:
        with path.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
        kept = msgspec.json.decode(data, type=Kept)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UsageError(f"{path}: holds no measurements; name another file") from None
    if not kept.measurements.tensors or not all(_usable(t) for t in kept.measurements.tensors):
        raise UsageError(f"{path}: holds costs that cannot be; name another file")
    if kept.subject != subject:
        raise UsageError(f"{path}: measured on another model, text or rotation, or by an older ork; name another file")
    return kept.measurements


def recall(path: Path, subject: str) -> Measurements | None:
    """As `load`, but of what an earlier conversion left: anything else there is nothing."""
    with contextlib.suppress(UsageError):
        return load(path, subject)
    return None


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Where measurements wait until the pack `target` is whole, so that the next conversion goes on without measuring
    when this one is interrupted, or refused for too few bytes, say; but not where its source is no good."""
    path = target.with_name(f"{target.name}.measuring")
    try:
        yield path
    except SourceError:
        path.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)


def _usable(t: Measured) -> bool:
    return min(t.shape) > 0 and bool(t.options) and all(o.nbytes > 0 and o.error >= 0 for o in t.options)


def save(path: Path, subject: str, measurements: Measurements) -> None:
    """Raises StorageError."""
    write_whole(path, msgspec.json.encode(Kept(subject, measurements)))
