"""What `bind.cpp` exports, for the type checker; sections as there."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# --- sources ---
tensor_types: tuple[tuple[int, str, int, int], ...]  # (enum ggml_type, name, elements in a block, bytes of a block)

def dequantise(
    type: int, src: memoryview | npt.NDArray[np.uint8], out: npt.NDArray[np.float32], first: int = 0
) -> None:
    """Expand blocks [first, first + out.size / block) of `src` into the flat `out`. ValueError outside of `src`."""

def scan_strings(
    src: memoryview | npt.NDArray[np.uint8],
    offset: int,
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> tuple[int, int]:
    """Walk the u64-length-prefixed strings from `offset`, as many as `starts` has room for; fill both arrays.

    Returns (their count, offset behind the last), or (index of the first that does not lie inside `src`, its offset).
    """

# --- end of sources ---

# --- kernels ---
KV_BLOCK: int  # positions per block of the KV cache

def isa_names() -> list[str]:
    """Instruction sets that this processor runs, best first: avx512, avxvnni, avx2, neondot, neon, portable."""

def isa() -> str: ...
def choose_isa(name: str) -> None:
    """Use `name` from now on ('best' for the default; the variable ORK_ISA sets it too). ValueError if not runnable."""

def threads() -> int: ...
def set_threads(n: int) -> None: ...

class Array:
    """f32 [rows, cols], opaque to models; rows are padded to 64 columns with zeros."""

    rows: int
    cols: int
    def __init__(self, rows: int, cols: int) -> None: ...
    @staticmethod
    def of(x: npt.NDArray[np.float32]) -> Array:
        """A copy of a C-contiguous [rows, cols] array."""
    def numpy(self) -> npt.NDArray[np.float32]:
        """A view that keeps the array alive."""

class QuantisedRows:
    """int8 rows [rows, width] with one scale and one code sum each; width is K padded to 32."""

    rows: int
    width: int
    @staticmethod
    def of(codes: npt.NDArray[np.int8]) -> QuantisedRows:
        """Given codes with scale 1; all of [-128, 127] allowed."""
    def codes(self) -> npt.NDArray[np.int8]: ...
    def scales(self) -> npt.NDArray[np.float32]: ...

class Slice:
    """Columns [n0, n0 + n) of a weight tensor at an address that the caller keeps alive. Codec 0 is f32, 1 is i8."""

    n0: int
    n: int
    scales_address: int
    def __init__(self, codec: int, codes: int, scales: int, Kp: int, ks: int, n0: int, n: int) -> None: ...

class Batch:
    """Positions and KV slots i32 [M]; runs i32 [R, 4] of (row, count, sequence, first position); block table [S, B]."""

    def __init__(
        self,
        positions: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        runs: npt.NDArray[np.int32],
        table: npt.NDArray[np.int32],
    ) -> None: ...

class KvCache:
    """Keys and values of all layers in blocks of 256 positions, f16 if `half` else f32. MemoryError if too large."""

    blocks: int
    def __init__(self, layers: int, heads: int, dim: int, blocks: int, half: bool) -> None: ...
    def block_bytes(self) -> int: ...

def linear(
    x: Array,
    rows: QuantisedRows | None,
    slices: Sequence[Slice],
    outs: Sequence[Array],
    biases: Sequence[Array | None],
) -> None: ...
def accumulate(rows: QuantisedRows, slice: Slice, out: npt.NDArray[np.int32]) -> None: ...
def accumulate_at(a: int, pitch: int, M: int, K: int, w: int, N: int, out: int, out_pitch: int) -> None:
    """Exact sums i32 [M, N] at `out`, rows `out_pitch` elements apart, of int8 rows [M, K] at `a`, `pitch` bytes
    apart, with a weight block [N/32][K/32][32][32] at `w`: for the emulator, which checks the addresses."""

def scale_sums(parts: list[int], pitch: int, rows: QuantisedRows, slice: Slice, out: Array, bias: Array | None) -> None:
    """What `linear` does with its sums, for i32 [M, n] at the addresses `parts`, which are added up first."""

def copy_codes(rows: QuantisedRows, to: int) -> None:
    """Copies the int8 rows [rows, width] to an address that the caller owns."""

def quantise(x: Array, signs: Array | None, block: int) -> QuantisedRows: ...
def rotate(x: npt.NDArray[np.float32], signs: Array, block: int, inverse: bool = False) -> None: ...
def rms_norm(x: Array, weight: Array, eps: float) -> Array: ...
def head_norm(x: Array, weight: Array, eps: float) -> None: ...
def rope_table(batch: Batch, inv_freq: list[float], magnitude: float) -> Array: ...
def rope(x: Array, dim: int, halves: bool, table: Array) -> None: ...
def gate(kind: int, g: Array, u: Array) -> Array: ...
def add(a: Array, b: Array) -> Array: ...
def scale(x: Array, factor: float) -> None: ...
def softcap(x: Array, cap: float) -> None: ...
def take(x: Array, rows: npt.NDArray[np.int32]) -> Array: ...
def gather(
    slices: list[Slice], ids: npt.NDArray[np.int32], K: int, N: int, signs: Array | None, block: int
) -> Array: ...
def attention(
    cache: KvCache,
    layer: int,
    batch: Batch,
    q: Array,
    k: Array,
    v: Array,
    heads: int,
    scale: float,
    window: int,
    softcap: float,
) -> Array: ...
def peak(integers: bool, iterations: int) -> tuple[int, float]:
    """(multiply-adds done in registers by all threads, seconds): the processor's own limit, for benchmarks."""

def read_memory(x: npt.NDArray[np.uint8]) -> None:
    """Reads all of x with all threads, contiguous halves: the memory's own limit, for benchmarks."""

def top_k(logits: npt.NDArray[np.float32], row: int, k: int) -> tuple[list[int], list[float]]:
    """The k largest of a row (0: all), best first, equal values by index: (indices, values)."""

def softmax(x: list[float], inv_temperature: float) -> list[float]: ...

# --- end of kernels ---
