"""Tensor types of GGUF files, and their expansion to f32 by the native table (`native/dequant.cpp`)."""

from __future__ import annotations

from typing import NamedTuple

from ork import native
from ork.sources.base import F32


class TensorType(NamedTuple):
    id: int  # enum ggml_type
    name: str
    block: int  # elements in a block
    bytes: int  # bytes of a block

    def row_bytes(self, columns: int) -> int:
        return columns // self.block * self.bytes


TYPES = {t.id: t for t in (TensorType(*row) for row in native.tensor_types)}
BY_NAME = {t.name: t for t in TYPES.values()}

# Types of ggml that we do not read, by name, so that the refusal can name them (ggml.h, enum ggml_type).
UNREAD = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip


def expand(kind: str, data: memoryview, start: int, out: F32) -> F32:
    """Rows [start, start + out.shape[0]) of `data` (rows of out.shape[1] elements of type `kind`) into `out`, as f32.

    Equal bit for bit to ggml's reference. ValueError if the rows do not lie inside `data`.
    """
    t = BY_NAME[kind]
    native.dequantise(t.id, data, out.reshape(-1), start * (out.shape[1] // t.block))
    return out
