"""ggml's own quantisers, of weights and of activations, as values: from the library that llama.cpp's environment has.

A product of theirs is emulated as its definition: dequantised weights times dequantised activations, which llama.cpp
quantises in blocks of 32 (Q8_0) for Q4_0 and Q8_0 weights, and of 256 (Q8_K) for Q4_K.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from ork import native
from peer_env import PEERS

F32 = npt.NDArray[np.float32]

TYPES = {name: (number, block, nbytes) for number, name, block, nbytes in native.tensor_types}
KINDS = ("Q8_0", "Q4_0", "Q4_K")
Q8_K = np.dtype([("d", "<f4"), ("codes", "i1", 256), ("sums", "<i2", 16)])  # block_q8_K; the sums serve minima
COMPANION = {"Q8_0": "Q8_0", "Q4_0": "Q8_0", "Q4_K": "Q8_K"}  # what activations become for the weights of a kind


@cache
def _library(name: str) -> ctypes.CDLL:
    (path,) = PEERS["llama.cpp"].folder.glob(f"lib/python3*/site-packages/llama_cpp/lib/libggml-{name}.so")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def fits(kind: str, K: int) -> bool:
    """Whether rows of K inputs are whole blocks."""
    return K % TYPES[kind][1] == 0


def bits(kind: str) -> float:
    """Bits a weight, scales included."""
    _, block, nbytes = TYPES[kind]
    return 8 * nbytes / block


def weights(kind: str, rows: F32) -> F32:
    """Weight rows f32 [n, K] after rounding by ggml's quantiser without an imatrix, as llama-quantize calls it."""
    number, block, nbytes = TYPES[kind]
    n, K = rows.shape
    rows = np.ascontiguousarray(rows)
    packed = np.empty(n * K // block * nbytes, np.uint8)
    call = _library("base").ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    written = call(number, rows.ctypes.data, packed.ctypes.data, 0, n, K, None)
    assert written == packed.size, (kind, written, packed.size)
    return _values(number, packed, rows.shape)


def activations(kind: str, rows: F32) -> F32:
    """Input rows f32 [m, K] as the CPU products with weights of `kind` take them."""
    _library("base")  # which the CPU's library needs
    rows = np.ascontiguousarray(rows)
    companion = COMPANION[kind]
    call = getattr(_library("cpu"), f"quantize_row_{companion.lower().replace('_k', '_K')}")
    call.restype = None
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    if companion == "Q8_K":
        blocks = np.empty(rows.size // 256, Q8_K)
        call(rows.ctypes.data, blocks.ctypes.data, rows.size)
        values: F32 = blocks["codes"].astype(np.float32) * blocks["d"][:, None]
        return values.reshape(rows.shape)
    number, block, nbytes = TYPES[companion]
    packed = np.empty(rows.size // block * nbytes, np.uint8)
    call(rows.ctypes.data, packed.ctypes.data, rows.size)
    return _values(number, packed, rows.shape)


def _values(number: int, packed: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> F32:
    out = np.empty(shape, np.float32)
    native.dequantise(number, packed, out.reshape(-1))
    return out
