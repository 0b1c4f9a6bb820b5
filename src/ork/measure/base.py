"""A reference's log-probabilities in a file, so that many models are compared with one that runs once.

Layout, little-endian: magic, u64 length, JSON (`Head`), the tokens i32 [chunks, context], then a chunk after another:
top f32 [rows] and step f32 [rows], codes u16 [rows, vocab], and the xxh3-128 of these. A row's logarithm of probability
is top - step * code, step its whole range over 65535: errors below 0.0005 nats for a range of 60, a hundredth of what
f16 makes of it. Written beside the target and renamed when whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ork import native
from ork.errors import StorageError, UsageError
from ork.files import Kind, begins_with
from ork.measure.perplexity import LOGITS_BYTES, Chunks, Logits, passes

MAGIC: Final = b"ORKBASE1"
BASE: Final = Kind("file of `ork ppl --save-base`", begins_with(MAGIC))
STEPS: Final = 65535
HASH: Final = 16
HEAD_LIMIT: Final = 1 << 20
BLOCK_BYTES: Final = 32 << 20  # of float64, at a time


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """What the file is of. `model` is the name of the pack that made it."""

    model: str
    vocab: int
    context: int
    chunks: int


def chunk_bytes(vocab: int, scored: int) -> int:
    return scored * (8 + 2 * vocab) + HASH


def base_bytes(vocab: int, chunks: Chunks) -> int:
    """Size of the file, a few hundred bytes of head aside."""
    return len(chunks) * chunk_bytes(vocab, chunks.scored) + 4 * chunks.tokens.size


class Recording:
    """Passes on the logits of `logits` and writes them to `path`; `finish` after the last chunk.

    Raises StorageError where the disk has no room or refuses, before the first chunk where that can be known.
    """

    def __init__(self, logits: Logits, chunks: Chunks, path: Path, model: str):
        self.logits, self.chunks, self.path, self.vocab = logits, chunks, path, logits.vocab
        self._part = path.with_name(path.name + ".part")
        need = base_bytes(self.vocab, chunks)
        try:
            free = shutil.disk_usage(path.absolute().parent).free
            if free < need:
                raise StorageError(f"{path}: {need:,} bytes are needed, the disk has {free:,}")
            self._file: BinaryIO = self._part.open("wb")
            head = msgspec.json.encode(Head(model, self.vocab, chunks.context, len(chunks)))
            self._file.write(MAGIC + len(head).to_bytes(8, "little") + head + chunks.tokens.astype("<i4").tobytes())
        except OSError as e:
            raise StorageError(f"{path}: {e.strerror}") from None

    def chunk(self, i: int) -> Generator[native.Array, None, None]:
        top, step = np.empty(self.chunks.scored, "<f4"), np.empty(self.chunks.scored, "<f4")
        codes = np.empty((self.chunks.scored, self.vocab), "<u2")
        at = 0
        for part in self.logits.chunk(i):
            end = at + part.rows
            encode(part.numpy(), top[at:end], step[at:end], codes[at:end])
            at = end
            yield part
            del part
        self._write(top, step, codes)

    def _write(self, *parts: npt.NDArray[Any]) -> None:
        state = xxhash.xxh3_128()
        try:
            for a in parts:
                data = a.data.cast("B")
                state.update(data)
                self._file.write(data)
            self._file.write(state.digest())
        except OSError as e:
            raise StorageError(f"{self.path}: {e.strerror}") from None

    def finish(self) -> None:
        """Makes the file whole."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self.path)
        except OSError as e:
            raise StorageError(f"{self.path}: {e.strerror}") from None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def encode(
    logits: npt.NDArray[np.float32],
    top: npt.NDArray[np.float32],
    step: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint16],
) -> None:
    """Rows of logits as log-probabilities top - step * code."""
    rows = max(1, BLOCK_BYTES // (8 * logits.shape[1]))
    for b in range(0, len(logits), rows):
        at = slice(b, min(b + rows, len(logits)))
        x = logits[at].astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        top[at] = -np.log(np.exp(x).sum(axis=1))
        step[at] = -x.min(axis=1) / STEPS
        x /= -np.maximum(step[at, None], np.finfo(np.float32).tiny)
        codes[at] = np.minimum(np.rint(x, out=x), STEPS)


class SavedBase:
    """The file as logits: its chunks are those of `chunks`, whose tokens must be the ones it was made of."""

    def __init__(self, path: Path):
        self.path = path
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: not a file of `ork ppl --save-base`")
        try:
            self._size = path.stat().st_size
            self._file = path.open("rb")
        except OSError as e:
            raise StorageError(f"{path}: {e.strerror}") from None
        try:
            self._read_head()
        except BaseException:
            self._file.close()
            raise

    def _read_head(self) -> None:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise UsageError(f"{self.path}: not a file of `ork ppl --save-base`")
        length = int.from_bytes(self._file.read(8), "little")
        if length > HEAD_LIMIT:
            raise self._damaged("its head")
        try:
            self.head = msgspec.json.decode(self._file.read(length), type=Head)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._damaged("its head") from None
        self.vocab, scored = self.head.vocab, self.head.context - 1 - self.head.context // 2
        self._start = len(MAGIC) + 8 + length + 4 * self.head.context * self.head.chunks
        if self.vocab < 1 or scored < 1 or self.head.chunks < 1:
            raise self._damaged("its head")
        if self._size != self._start + self.head.chunks * chunk_bytes(self.vocab, scored):
            raise self._damaged("its length")
        tokens = np.frombuffer(self._file.read(4 * self.head.context * self.head.chunks), "<i4")
        self.chunks = Chunks(tokens.astype(np.int32).reshape(self.head.chunks, self.head.context))

    def check(self, chunks: Chunks) -> None:
        """Raises UsageError unless the file holds these chunks, or more that begin with them."""
        held = self.chunks.tokens[: len(chunks)]
        if not np.array_equal(held, chunks.tokens):
            raise UsageError(
                f"{self.path}: made of other tokens ({self.head.chunks} chunks of {self.head.context}); "
                "give the text, -c and model family that it was made with"
            )

    def chunk(self, i: int) -> Generator[native.Array, None, None]:
        scored = self.chunks.scored
        nbytes = chunk_bytes(self.vocab, scored)
        self._file.seek(self._start + i * nbytes)
        data = np.frombuffer(self._file.read(nbytes), np.uint8)
        if xxhash.xxh3_128_digest(data[:-HASH].data) != data[-HASH:].tobytes():
            raise self._damaged(f"chunk {i + 1}")
        top, step = (data[4 * scored * j : 4 * scored * (j + 1)].view("<f4") for j in (0, 1))
        codes = data[8 * scored : -HASH].view("<u2").reshape(scored, self.vocab)
        at = 0
        for _, _, wanted in passes(self.chunks.context, max(1, LOGITS_BYTES // (4 * self.vocab))):
            if wanted:
                here = slice(at, at + wanted)
                rows = codes[here].astype(np.float32)
                rows *= -step[here, None]
                rows += top[here, None]
                yield native.Array.of(rows)
                at += wanted

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{self.path}: {what} is damaged; make the file again with --save-base")

    def close(self) -> None:
        self._file.close()
