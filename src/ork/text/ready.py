"""The ready tokenizer: what a pack stores so that starting costs milliseconds, not a pass over the vocabulary.

It is one msgpack map of byte arrays that are read in place. Beside the token texts it holds the merges, one per token
at most (`vocab._merges_as_listed` says why one is enough), and an index from the hash of a text to its token, by which
a short prompt finds the few dozen tokens that it can contain at all.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ork.errors import PackDamaged
from ork.strings import StringTable

VERSION: Final = 1
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

# Kinds of tokens, numbered as `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BYTES: Final = "bytes"  # texts are spelled in GPT-2's byte alphabet
SPACES: Final = "spaces"  # texts are UTF-8 with U+2581 for a space, and <0x..> tokens for lone bytes


class Ready(msgspec.Struct, omit_defaults=True):
    """Ids are u32 little-endian throughout. `pipeline` is the part of a tokenizer.json that cuts text into words."""

    version: int
    spelling: str
    text_bytes: memoryview
    text_lengths: memoryview  # u32 per token
    kinds: memoryview  # u8 per token
    merge_left: memoryview  # u32 per merge, best first; ids of the two parts ...
    merge_right: memoryview
    merge_result: memoryview  # ... and of what they become
    index_hashes: memoryview  # u64, ascending: xxh3-64 of the texts that merging can make
    index_ids: memoryview  # u32, their tokens
    marker_texts: list[str]  # tokens that are cut out of the text before anything else: control and user-defined
    marker_ids: list[int]
    eog: list[int]
    longest: int  # characters of the longest text that merging can make
    pipeline: dict[str, Any]  # normalizer, pre_tokenizer
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    add_bos: bool = False
    space_prefix: bool = False  # SPM's dummy prefix: a space before text that starts, or follows a marker
    byte_fallback: bool = False
    ignore_merges: bool = False
    fuse_unk: bool = False
    strip_left: list[int] = []  # markers that swallow the whitespace before them ...
    strip_right: list[int] = []  # ... and after them

    @property
    def n_vocab(self) -> int:
        return len(self.kinds)

    def texts(self) -> StringTable:
        return StringTable.unpacked(self.text_bytes, u32(self.text_lengths))


def u32(view: memoryview) -> U32:
    return np.frombuffer(view, "<u4")


def text_hash(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw)


def lookup(ready: Ready, texts: list[str]) -> list[tuple[str, int]]:
    """(text, token) of those texts that merging can make."""
    raw = [text.encode() for text in texts]
    hashes = np.array([text_hash(r) for r in raw], dtype=np.uint64)
    index, ids, table = np.frombuffer(ready.index_hashes, "<u8"), u32(ready.index_ids), ready.texts()
    at = np.searchsorted(index, hashes)
    at[at == len(index)] = 0
    hits = np.flatnonzero(index[at] == hashes).tolist() if len(index) else []
    found = ((h, int(ids[at[h]])) for h in hits)
    return [(texts[h], token) for h, token in found if table.raw(token) == raw[h]]


def pack(ready: Ready) -> bytes:
    return msgspec.msgpack.encode(ready)


def unpack(data: bytes | memoryview) -> Ready:
    """Raises PackDamaged for bytes that are not a ready tokenizer of this version, naming the field."""
    try:
        ready = msgspec.msgpack.decode(data, type=Ready)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PackDamaged(f"the tokenizer in the pack cannot be read ({error}); convert the model again") from None
    if ready.version != VERSION:
        raise PackDamaged(f"the tokenizer in the pack has version {ready.version}, this program reads {VERSION}")
    n = ready.n_vocab
    merges = len(ready.merge_result)
    arrays = (ready.merge_left, ready.merge_right, ready.merge_result, ready.index_ids)
    ids = (*ready.marker_ids, *ready.eog, *ready.strip_left, *ready.strip_right)
    checks = {
        "spelling": ready.spelling in (BYTES, SPACES),
        "text_lengths": len(ready.text_lengths) == 4 * n
        and int(u32(ready.text_lengths).sum(dtype=np.uint64)) == len(ready.text_bytes),
        "merges": merges % 4 == 0 and len(ready.merge_left) == merges and len(ready.merge_right) == merges,
        "index": len(ready.index_ids) % 4 == 0 and len(ready.index_hashes) == 2 * len(ready.index_ids),
        "ids": all(len(a) % 4 == 0 and (not len(a) or int(u32(a).max()) < n) for a in arrays)
        and all(0 <= i < n for i in ids)
        and all(i is None or 0 <= i < n for i in (ready.bos, ready.eos, ready.unk)),
        "markers": len(ready.marker_ids) == len(ready.marker_texts) and "" not in ready.marker_texts,
        "pipeline": set(ready.pipeline) == {"normalizer", "pre_tokenizer"},
    }
    for field, good in checks.items():
        if not good:
            raise PackDamaged(f"the tokenizer in the pack has wrong {field}; convert the model again")
    return ready
