"""A reader written from docs/pack-format.md alone: numpy and xxhash, nothing of ork. Also re-seals edited packs."""

from __future__ import annotations

import numpy as np
import xxhash

NF4 = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127])
TYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
TYPES |= {10: "<u8", 11: "<i8", 12: "<f8", 13: "<f2"}


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def u(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def sections(data: bytes) -> list[tuple[int, int]]:
    return [(u(data, 64 + 16 * i, 8), u(data, 72 + 16 * i, 8)) for i in range(10)]


def read(data: bytes) -> dict[str, np.ndarray]:
    """Every tensor, weights as the f32 [N, K] they stand for (still rotated); all hashes checked."""
    assert data[:8] == bytes.fromhex("896f726b0d0a1a0a")
    assert (u(data, 8, 4), u(data, 16, 8)) == (1, len(data))
    spans = sections(data)
    footer = data[spans[8][0] : spans[8][0] + 4096]
    assert digest(data[:4080]) == data[4080:4096]
    assert digest(footer[:4080]) == footer[4080:]
    parts = [data[:4096], *(data[o : o + n] for o, n in spans[:8])]
    assert footer[8:152] == b"".join(map(digest, parts))
    names, records, entries = parts[6:9]
    tensors = {}
    for r in (records[i : i + 96] for i in range(0, len(records), 96)):
        name = names[u(r, 0, 4) :][: u(r, 4, 4)].decode()
        shape = [u(r, 32 + 8 * d, 8) for d in range(r[10])]
        Kp, ks, group = u(r, 64, 4), u(r, 72, 4), u(r, 80, 4)
        columns = []
        for e in (entries[48 * i : 48 * i + 48] for i in range(u(r, 24, 4), u(r, 24, 4) + u(r, 28, 4))):
            blob = data[u(e, 0, 8) : u(e, 0, 8) + u(e, 8, 8)]
            assert digest(blob) == e[16:32]
            n = u(e, 40, 4) - u(e, 36, 4)
            columns.append(np.frombuffer(blob, TYPES[r[9]]) if r[8] else weights(blob, r[9], (n, Kp), ks, group))
        whole = np.concatenate(columns)
        tensors[name] = whole.reshape(shape) if r[8] else whole[: shape[0], : shape[1]]
    return tensors


def weights(blob: bytes, codec: int, shape: tuple[int, int], ks: int, group: int) -> np.ndarray:
    n, K = shape
    if codec == 5:
        return np.frombuffer(blob, "<f4").reshape(n // 16, K, 16).transpose(0, 2, 1).reshape(n, K)
    G = {1: 32, 2: 64, 3: 64, 4: 16}[codec]
    bits = {1: 8, 2: 4, 3: 4, 4: 16}[codec]
    end = n * K * bits // 8
    codes = np.frombuffer(blob[:end], {1: "i1", 2: "u1", 3: "u1", 4: "<f2"}[codec])
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1)
    codes = codes.reshape(K // ks, n // G, ks // 32, G, 32).transpose(1, 3, 0, 2, 4).reshape(n, K)
    if codec == 4:
        return codes.astype(np.float32)
    value = {1: lambda c: c, 2: lambda c: c - 16.0 * (c > 7), 3: lambda c: NF4[c]}[codec](codes)
    scale = np.frombuffer(blob, "<f4", n, end)[:, None]
    if group:
        groups = np.frombuffer(blob, "<f2", n * K // group, end + 4 * n).reshape(n // G, K // group, G)
        rows = groups.transpose(0, 2, 1).reshape(n, K // group).astype(np.float32)
        scale = np.repeat(rows * scale, group, 1)
    return value.astype(np.float32) * scale


def turned_back(data: bytes, wanted: str) -> np.ndarray:
    """A rotated weight as it was before: f64 [N, K]."""
    tensors = read(data)
    names, records = (data[o : o + n] for o, n in sections(data)[5:7])
    found = [r for r in (records[i : i + 96] for i in range(0, len(records), 96)) if r[8] == 0]
    (r,) = (r for r in found if names[u(r, 0, 4) :][: u(r, 4, 4)].decode() == wanted)
    block, mix = u(r, 76, 4), u(r, 88, 4)
    rows = tensors[wanted].astype(np.float64)
    runs = rows.reshape(len(rows), -1, block)
    if mix:
        runs = np.einsum("ji,njb->nib", tensors[f"rotation.mix.{mix}"], runs)
    i = np.arange(block)
    ones = np.vectorize(lambda x: bin(x).count("1"))(i[:, None] & i)
    back = runs @ (1.0 - 2.0 * (ones % 2)).T / np.sqrt(block)
    return back.reshape(rows.shape) * tensors[f"rotation.signs.{rows.shape[1]}"]


def reseal(data: bytearray) -> None:
    """Recompute the hashes of an edited pack from the inside out, as far as its section table still makes sense."""
    spans = sections(data)
    size = len(data)
    data[4080:4096] = digest(data[:4080])
    at = spans[8][0]
    if at + 4096 > size:
        return
    parts = [bytes(data[:4096]), *(bytes(data[o : o + n]) if o + n <= size else b"" for o, n in spans[:8])]
    data[at + 8 : at + 152] = b"".join(map(digest, parts))
    data[at + 4080 : at + 4096] = digest(data[at : at + 4080])
