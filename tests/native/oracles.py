"""Plain numpy for what the kernels compute, and dense matrices as slices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.devices.base import SliceSpec
from ork.devices.cpu import CpuDevice

F32 = npt.NDArray[np.float32]


class Weight:
    """A dense [N, K] matrix, int8 with one scale a channel or f32, cut into slices that stay alive with this object."""

    def __init__(self, dense: npt.NDArray, scales: F32 | None = None):
        self.dense, self.scales = dense, scales
        self.N, self.K = dense.shape
        self.codec = "f32" if scales is None else "i8"
        Np, Kp = tiles.pad_n(self.N), tiles.pad_k(self.K)
        full = np.zeros((Np, Kp), dense.dtype)
        full[: self.N, : self.K] = dense
        channel = np.zeros(Np, np.float32)
        if scales is not None:
            channel[: self.N] = scales
        self.blobs, self.slices = [], []
        for n0, n1 in tiles.slice_columns(self.codec, self.K, self.N):
            layout = tiles.slice_layout(self.codec, self.K, n1 - n0)
            made = tiles.build_blob(layout, full[n0:n1], None if scales is None else channel[n0:n1])
            blob = aligned(made.nbytes)
            blob[:] = made
            self.blobs.append(blob)
            spec = SliceSpec("w", self.codec, self.K, Kp, layout.ks, n0, n1)
            self.slices.append(CpuDevice.host_slice(spec, blob))

    def times(self, x: F32, rows: native.QuantisedRows | None = None, bias: F32 | None = None) -> F32:
        """x @ W through `native.linear`."""
        given = native.Array.of(x)
        out = native.Array(len(x), self.N)
        held = None if bias is None else native.Array.of(bias.reshape(1, -1))
        count = len(self.slices)
        native.linear(given, rows, self.slices, [out] * count, [held] * count)
        return out.numpy().copy()


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


def quantised(rows: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Codes and scales of rows as the specification has them: absmax, half to even."""
    top = np.abs(rows).max(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0)).astype(np.float32)
    return np.rint(rows * inverse[:, None]).astype(np.int8), (top / np.float32(127)).astype(np.float32)


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
