"""A plain writer of GGUF files for tests: any metadata, any tensors, and any lie that a test wants to tell.

    write_gguf(path, {"general.architecture": "llama"}, {"token_embd.weight": ("Q8_0", f32_array, (64, 32))})

Tensor payloads are bytes as they stand, or f32 arrays, quantised by `gguf.quants` where that package can
(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0); `random_blocks` makes payloads of every other type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

STRING, ARRAY = 8, 9
SCALARS = {
    np.dtype("u1"): 0, np.dtype("i1"): 1, np.dtype("u2"): 2, np.dtype("i2"): 3, np.dtype("u4"): 4, np.dtype("i4"): 5,
    np.dtype("f4"): 6, np.dtype("?"): 7, np.dtype("u8"): 10, np.dtype("i8"): 11, np.dtype("f8"): 12,
}  # fmt: skip

# Byte offsets of the f16 fields of a block: what has to be finite for a block to mean anything.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """A metadata value given as its type number and its bytes, true or false."""

    kind: int
    payload: bytes


def string(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def value(v) -> bytes:
    """Type number and bytes of a value. ints are u32 (else i32, u64, i64), floats f32; numpy types as they are."""
    if isinstance(v, Raw):
        return struct.pack("<I", v.kind) + v.payload
    if isinstance(v, (str, bytes)):
        return struct.pack("<I", STRING) + string(v)
    if isinstance(v, (list, tuple)):
        if not v or isinstance(v[0], (str, bytes)):
            return struct.pack("<IIQ", ARRAY, STRING, len(v)) + b"".join(map(string, v))
        v = np.array(v, dtype=np.float32 if isinstance(v[0], float) else None)
        v = v.astype(np.int32) if v.dtype == np.int64 else v
    if isinstance(v, np.ndarray):
        return struct.pack("<IIQ", ARRAY, SCALARS[v.dtype], v.size) + v.tobytes()
    if isinstance(v, bool):
        v = np.bool_(v)
    elif type(v) is int:
        v = next(t(v) for t in (np.uint32, np.int32, np.uint64, np.int64) if np.iinfo(t).min <= v <= np.iinfo(t).max)
    elif type(v) is float:
        v = np.float32(v)
    return struct.pack("<I", SCALARS[v.dtype]) + v.tobytes()


def kind_number(kind: str | int) -> int:
    return kind if isinstance(kind, int) else int(gguf.GGMLQuantizationType[kind])


def payload(kind: str | int, data: np.ndarray | bytes) -> bytes:
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    return gguf.quants.quantize(np.asarray(data, np.float32), gguf.GGMLQuantizationType(kind_number(kind))).tobytes()


def random_blocks(kind: str, blocks: int, rng: np.random.Generator) -> bytes:
    """`blocks` blocks of random bytes whose f16 (or f32, bf16) numbers are finite."""
    if kind in {"F32", "BF16"}:
        floats = rng.standard_normal(blocks).astype(np.float32) * np.float32(10) ** rng.integers(-30, 30, blocks)
        return payload(kind, floats.astype(np.float32))
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (blocks, size), np.uint8)
    for at in HALVES[kind]:
        high = data[:, at + 1]
        high[(high & 0x7C) == 0x7C] ^= 0x40  # an exponent of 31 would be an infinity or no number
    return data.tobytes()


def gguf_bytes(
    metadata: Mapping[str, object] | Iterable[tuple[str | bytes, object]],
    tensors: Mapping[str, tuple] | Iterable[tuple[str, tuple]] = (),
    version: int = 3,
    alignment: int = 32,
    *,
    offsets: Mapping[str, int] | None = None,
    dims: Mapping[str, list[int]] | None = None,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """The bytes of a GGUF. Tensors are name -> (kind, f32 array or bytes, shape in numpy order).

    An `alignment` other than 32 is also written to the metadata. Lies: pairs instead of dicts may hold duplicates;
    `offsets` and `dims` (in ggml's order) replace those of the named tensors, `counts` the (tensors, pairs) of the
    header.
    """
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if alignment != 32 and not any(k == "general.alignment" for k, _ in pairs):
        pairs.append(("general.alignment", alignment))
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(named), len(pairs)))))
    for key, v in pairs:
        out += string(key) + value(v)
    body = bytearray()
    for name, (kind, data, shape) in named:
        body += bytes(-len(body) % alignment)
        shown = (dims or {}).get(name, list(reversed(shape)))
        offset = (offsets or {}).get(name, len(body))
        out += string(name) + struct.pack(f"<I{len(shown)}QIQ", len(shown), *shown, kind_number(kind), offset)
        body += payload(kind, data)
    return bytes(out) + bytes(-len(out) % alignment) + bytes(body)


def write_gguf(path, metadata, tensors=(), version: int = 3, alignment: int = 32, **lies) -> Path:
    """Write `gguf_bytes(...)` to `path` and return it."""
    where = Path(path)
    where.write_bytes(gguf_bytes(metadata, tensors, version, alignment, **lies))
    return where
