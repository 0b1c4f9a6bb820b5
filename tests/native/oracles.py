"""Plain numpy for what the kernels compute, and dense matrices as slices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.devices.base import SliceSpec
from ork.devices.cpu import CpuDevice

F32 = npt.NDArray[np.float32]


NF4 = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127], np.int8)


class Weight:
    """A dense [N, K] matrix cut into slices that stay alive with this object: f32 or f16 as it is, or codes with one
    scale a channel f32 [N] (int8 unless `codec` says otherwise) and perhaps group scales f16 [N, Kp / group]."""

    def __init__(
        self,
        dense: npt.NDArray,
        scales: F32 | None = None,
        *,
        codec: str | None = None,
        groups: npt.NDArray[np.float16] | None = None,
    ):
        self.dense, self.scales, self.groups = dense, scales, groups
        self.N, self.K = dense.shape
        self.codec = codec or ("f32" if scales is None else "i8")
        Np, Kp = tiles.pad_n(self.N), tiles.pad_k(self.K)
        self.group = 0 if groups is None else Kp // groups.shape[1]
        full = padded(dense, (Np, Kp))
        channel = None if scales is None else padded(scales, (Np,))
        by_group = None if groups is None else padded(groups, (Np, groups.shape[1]))
        self.blobs, self.slices = [], []
        for n0, n1 in tiles.slice_columns(self.codec, self.K, self.N, self.group):
            layout = tiles.slice_layout(self.codec, self.K, n1 - n0, self.group)
            parts = (None if p is None else p[n0:n1] for p in (channel, by_group))
            made = tiles.build_blob(layout, full[n0:n1], *parts)
            blob = aligned(made.nbytes)
            blob[:] = made
            self.blobs.append(blob)
            spec = SliceSpec("w", self.codec, self.K, Kp, layout.ks, n0, n1, self.group)
            self.slices.append(CpuDevice.host_slice(spec, blob))

    @classmethod
    def random(cls, codec: str, N: int, K: int, group: int = 0, seed: int = 0) -> Weight:
        """Every code there is, and scales over some octaves."""
        rng = np.random.default_rng(seed)
        if codec in ("f32", "f16"):
            return cls(rng.standard_normal((N, K)).astype(codec.replace("f", "float")), codec=codec)
        low, high = {"i8": (-128, 128), "i4": (-8, 8), "nf4": (0, 16)}[codec]
        codes = rng.integers(low, high, (N, K)).astype(np.int8)
        groups = np.exp2(rng.uniform(-6, 0, (N, tiles.pad_k(K) // group))).astype(np.float16) if group else None
        return cls(codes, np.exp2(rng.uniform(-9, -5, N)).astype(np.float32), codec=codec, groups=groups)

    def levels(self) -> npt.NDArray:
        """The integers that the codes stand for, or the floats; [N, K]."""
        return NF4[self.dense] if self.codec == "nf4" else self.dense

    def values(self) -> npt.NDArray[np.float64]:
        """The weights [N, K]."""
        out = self.levels().astype(np.float64)
        if self.scales is not None:
            out *= self.scales[:, None]
        if self.groups is not None:
            out *= np.repeat(self.groups.astype(np.float64), self.group, axis=1)[:, : self.K]
        return out

    def times(self, x: F32, rows: native.QuantisedRows | None = None, bias: F32 | None = None) -> F32:
        """x @ W through `native.linear`."""
        given = native.Array.of(x)
        out = native.Array(len(x), self.N)
        held = None if bias is None else native.Array.of(bias.reshape(1, -1))
        count = len(self.slices)
        native.linear(given, rows, self.slices, [out] * count, [held] * count)
        return out.numpy().copy()


def padded(x: npt.NDArray, shape: tuple[int, ...]) -> npt.NDArray:
    out = np.zeros(shape, x.dtype)
    out[tuple(slice(n) for n in x.shape)] = x
    return out


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def hadamard(rows: npt.NDArray, signs: npt.NDArray, block: int) -> npt.NDArray:
    """H_block diag(signs) of each row in the rows' own precision: butterflies (a + b, a - b) of stride 1, 2, 4 ..."""
    x = (rows * signs).reshape(len(rows), -1, block)
    h = 1
    while h < block:
        pairs = x.reshape(len(rows), -1, 2, h)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        h *= 2
    return x.reshape(rows.shape)


def hadamard_matrix(block: int) -> npt.NDArray[np.float64]:
    """Sylvester's construction, symmetric; divided by sqrt(block) it is orthogonal."""
    H = np.ones((1, 1))
    while len(H) < block:
        H = np.block([[H, H], [H, -H]])
    return H


def quantised(rows: F32, limit: int = 127) -> tuple[npt.NDArray[np.int8], F32]:
    """Codes and scales of rows as the specification has them: absmax, half to even."""
    top = np.abs(rows).max(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(limit) / top, np.float32(0)).astype(np.float32)
    return np.rint(rows * inverse[:, None]).astype(np.int8), (top / np.float32(limit)).astype(np.float32)


def rotated(x: npt.NDArray, signs: npt.NDArray, block: int, mix: npt.NDArray | None = None) -> npt.NDArray[np.float64]:
    """Rows [M, K] under the rotation that packs define, float64."""
    y = hadamard(x.astype(np.float64), signs, block).reshape(len(x), -1, block) / np.sqrt(block)
    return (y if mix is None else np.einsum("ij,mjb->mib", mix.astype(np.float64), y)).reshape(x.shape)


def rotated_back(x: npt.NDArray, signs: npt.NDArray, block: int, mix: npt.NDArray | None = None) -> npt.NDArray:
    """The inverse, for an orthogonal `mix`."""
    y = x.astype(np.float64).reshape(len(x), -1, block)
    y = (y if mix is None else np.einsum("ij,mib->mjb", mix.astype(np.float64), y)).reshape(x.shape)
    return hadamard(y, np.ones(x.shape[1]), block) / np.sqrt(block) * signs


def attention(
    q: npt.NDArray,
    k: npt.NDArray,
    v: npt.NDArray,
    heads: int,
    kv_heads: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Causal attention of one whole sequence, float64: q [T, heads * dim], k and v [T, kv_heads * dim]."""
    T = len(q)
    q, k, v = (a.astype(np.float64).reshape(T, n, -1) for a, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    out = np.empty_like(q)
    row, column = np.arange(T)[:, None], np.arange(T)[None]
    seen = column <= row
    if window:
        seen &= column > row - window
    for h in range(heads):
        g = h // (heads // kv_heads)
        scores = q[:, h] @ k[:, g].T * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = p / p.sum(axis=1, keepdims=True) @ v[:, g]
    return out.reshape(T, -1)
