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

def read_parts(fd: int, offsets: Sequence[int], arrays: Sequence[npt.NDArray[np.uint8]]) -> bool:
    """Fill each array from the file at its offset, by all threads; whether every byte came."""

def scan_strings(
    src: memoryview | npt.NDArray[np.uint8],
    offset: int,
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> tuple[int, int]:
    """Walk the u64-length-prefixed strings from `offset`, as many as `starts` has room for; fill both arrays.

    Returns (their count, offset behind the last), or (index of the first that does not lie inside `src`, its offset).
    """

def distinct_texts(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    mergeable: npt.NDArray[np.uint8],
) -> npt.NDArray[np.uint32]:
    """The first token of each text among the mergeable ones that are not empty, ascending."""

def merges_by_score(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    mergeable: npt.NDArray[np.uint8],
    scores: npt.NDArray[np.float64],
) -> npt.NDArray[np.uint32]:
    """[n, 3] left, right, result: SentencePiece's merges of these texts, best first. ValueError outside of `data`."""

def merges_as_listed(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    mergeable: npt.NDArray[np.uint8],
    listed: npt.NDArray[np.uint8],
    listed_starts: npt.NDArray[np.uint64],
    listed_lengths: npt.NDArray[np.uint64],
    cuts: npt.NDArray[np.uint64] | None,
) -> npt.NDArray[np.uint32]:
    """[n, 3] left, right, result: the listed merges "left right" of tokens, one a token, in the order of the list.

    `cuts` says where each left part ends; None: at the first space behind its first character.
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
    """int8 rows [rows, width] with one scale and one code sum each, or one for every `group` codes; width is K padded
    to 32."""

    rows: int
    width: int
    group: int
    @staticmethod
    def of(codes: npt.NDArray[np.int8], group: int = 0) -> QuantisedRows:
        """Given codes with scale 1; all of [-128, 127] allowed. ValueError unless the group is a multiple of 32 that
        divides the width."""
    def codes(self) -> npt.NDArray[np.int8]: ...
    def scales(self) -> npt.NDArray[np.float32]:
        """[rows], with groups [rows, width / group]."""

class Slice:
    """Columns [n0, n0 + n) of a weight tensor at addresses that the caller keeps alive.

    Codecs are 0 f32, 1 i8, 2 i4, 3 nf4, 4 f16. `group_scales` is given where `group` > 0, which divides ks.
    """

    n0: int
    n: int
    group: int
    scales_address: int
    def __init__(
        self,
        codec: int,
        codes: int,
        scales: int,
        Kp: int,
        ks: int,
        n0: int,
        n: int,
        group: int = 0,
        group_scales: int = 0,
    ) -> None: ...

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
def accumulate(rows: QuantisedRows, slice: Slice, out: npt.NDArray[np.int32]) -> None:
    """Exact sums of the slice's columns into `out` i32 [M * groups, N]: row m's groups follow each other, one group
    being all of K where the rows have no groups."""

def accumulate_at(a: int, pitch: int, M: int, K: int, w: int, N: int, out: int, out_pitch: int) -> None:
    """Exact sums i32 [M, N] at `out`, rows `out_pitch` elements apart, of int8 rows [M, K] at `a`, `pitch` bytes
    apart, with a weight block [N/32][K/32][32][32] at `w`: for the emulator, which checks the addresses."""

def copy_codes(rows: QuantisedRows, to: int, begin: int = 0, end: int | None = None) -> None:
    """Copies the int8 rows [begin, end) of [rows, width] to an address that the caller owns."""

def quantise(
    x: Array, signs: Array | None, block: int, group: int = 0, mix: Array | None = None, limit: int = 127
) -> QuantisedRows:
    """Rows rotated (see `rotate`) and rounded to int8 within +-limit, half to even: scale = absmax / limit of each row,
    or of each `group` of its inputs."""

def rotate(
    x: npt.NDArray[np.float32], signs: Array, block: int, inverse: bool = False, mix: Array | None = None
) -> None:
    """Rows [M, K], in place: signs, Hadamard on blocks, then with `mix` [1, m * m] (m = K / block) an orthogonal matrix
    across the blocks, then 1 / sqrt(block); `inverse` undoes it."""

def inflate(codec: int, src: memoryview | npt.NDArray[np.uint8], dst: npt.NDArray[np.int8], tiles: int = 0) -> None:
    """4-bit tiles [runs][tiles][64][32] (1 KiB each; `tiles` 0: one run) as int8 tiles [2 * runs][tiles][32][32]; nf4
    codes become their levels. So a slice's codes turn into those of an i8 slice, with tiles = ks / 32."""

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
    slices: list[Slice],
    ids: npt.NDArray[np.int32],
    K: int,
    N: int,
    signs: Array | None,
    block: int,
    mix: Array | None = None,
) -> Array:
    """Rows `ids` of a tensor of any codec: codes times scales, rotated back. [len(ids), K]"""

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

def score(
    logits: Array, targets: npt.NDArray[np.int32], nll: npt.NDArray[np.float64], top: npt.NDArray[np.int32]
) -> None:
    """Fills nll [M] with -ln softmax(row)[target] in nats and top [M] with each row's likeliest token (the first)."""

def compare(
    base: Array,
    other: Array,
    targets: npt.NDArray[np.int32],
    nll: npt.NDArray[np.float64],
    top: npt.NDArray[np.int32],
    kl: npt.NDArray[np.float64],
) -> None:
    """`score` of two models' rows, nll and top [M, 2], and kl [M] = KL(base || other) in nats. Sums in float64."""

def quantise_weights(
    codec: int,
    rows: npt.NDArray[np.float32],
    group: int,
    weight: npt.NDArray[np.float32] | None,
    ratios: npt.NDArray[np.float32],
    refine: int,
    headroom: int,
    codes: npt.NDArray[np.int8],
    channel: npt.NDArray[np.float32],
    groups: npt.NDArray[np.uint16] | None,
) -> int:
    """Fills codes [n, Kp], channel [n] and groups [n, K / group] from weight rows [n, K]; codecs as in `Slice`.

    Squared errors are weighted by weight [K]; ratios and refine as in `QuantWeights` (kernels.h), 2^headroom is the
    quotient of a grouped row's own scale and its channel scale. Returns -1, or the first row that is not finite.
    """

def top_k(logits: npt.NDArray[np.float32], row: int, k: int) -> tuple[list[int], list[float]]:
    """The k largest of a row (0: all), best first, equal values by index: (indices, values)."""

def softmax(x: list[float], inv_temperature: float) -> list[float]: ...

# --- end of kernels ---

# --- GPTQ ---
def gptq_round(
    codec: int,
    work: npt.NDArray[np.float32],
    upper: npt.NDArray[np.float32],
    scales: npt.NDArray[np.float32],
    codes: npt.NDArray[np.int8],
    errors: npt.NDArray[np.float32],
    block: int,
    begin: int,
    end: int,
) -> None:
    """Rounds columns [begin, end) of work [n, K] in order, with scales [n], into codes [n, Kp], and hands each error on
    to the columns up to the end of the block along upper [K, K]; errors [n, columns of the block from `block` on]."""

# --- end of GPTQ ---

# --- experts and short convolutions ---
EXPERTS_MAX: int
TAPS_MAX: int

class Routes:
    """Which experts each row goes to. Gathered rows lie by expert ascending, then by row."""

    rows: int
    experts: int
    top_k: int
    def ids(self) -> npt.NDArray[np.int32]:
        """[rows, top_k], ascending."""
    def weights(self) -> npt.NDArray[np.float32]:
        """[rows, top_k] of these."""
    def sources(self) -> npt.NDArray[np.int32]:
        """[rows * top_k]: the row that each gathered one is a copy of."""
    def offsets(self) -> list[int]:
        """[experts + 1]: the gathered rows of each expert."""
    def active(self) -> list[int]:
        """The experts that have rows, ascending."""

def route(
    logits: Array,
    top_k: int,
    sigmoid: bool,
    normalise: bool,
    scale: float,
    bias: Array | None,
    groups: int,
    used: int,
) -> Routes | int:
    """The `top_k` experts of each row of logits [M, E]: scores are their softmax, or the sigmoid of each; `bias` [1, E]
    is added for the choice alone, from the `used` of `groups` runs of experts whose two best scores add up to most.
    Equal scores go to the lower number. Or the first row that holds a logit that is not finite."""

def gather_rows(rows: QuantisedRows, routes: Routes) -> QuantisedRows: ...
def gather_floats(x: Array, routes: Routes) -> Array: ...
def linear_experts(
    x: Array,
    rows: QuantisedRows | None,
    slices: Sequence[Slice],
    ranges: npt.NDArray[np.int32],
    outs: Sequence[Array],
) -> None:
    """`linear` of rows [begin, end) = ranges[i] with slice i into outs[i], all in one parallel section."""

def empty_rows(rows: int, cols: int, group: int) -> QuantisedRows:
    """Rows that `gate_experts` fills."""

def gate_experts(
    kind: int,
    g: Array,
    u: Array,
    ranges: npt.NDArray[np.int32],
    out: QuantisedRows | None,
    signs: Array | None,
    block: int,
    mix: Array | None,
    limit: int,
) -> None:
    """g = act(g) * u of the rows in `ranges` [n, 2], in place, and with `out` quantised into it as `quantise` does."""

def weighted_sum(y: Array, routes: Routes) -> Array:
    """[M, N]: the gathered rows of each row, times their weights, added up by expert ascending, fma from 0."""

def gate_rows(x: Array, weight: Array, y: Array) -> None:
    """y times the sigmoid of x . weight, row by row, in place."""

class ConvCache:
    """The inputs of short convolutions by KV slot, f16 if `half` else f32. MemoryError if too large."""

    def __init__(self, layers: int, width: int, blocks: int, half: bool) -> None: ...
    def block_bytes(self) -> int: ...
    def cold_bytes(self, rows: int) -> int:
        """Bytes at most of a block of which `cool` kept its last `rows`."""

    def cool(self, block: int, rows: int) -> None:
        """Gives back the memory of a block but for its last `rows` positions: the others are zero or as they were."""

def short_conv(cache: ConvCache, layer: int, batch: Batch, bcx: Array, taps: Array) -> Array:
    """Rows [b | c | x] -> c * (causal convolution of b * x with taps [T, width], the last for the row itself)."""

# --- end of experts ---

# --- npu ---
def retile(
    codec: int, src: npt.NDArray[np.uint8], n: int, Kp: int, ks: int, run: int, dst: npt.NDArray[np.uint8]
) -> None:
    """Codes [Kp/ks][n/G][ks/32][G][32] of a slice to K slices of `run` inputs; where `dst` has room for a byte a code,
    4-bit codes become the int8 codes that they stand for, in int8 tiles. On the caller's thread alone."""

def least_int4(codes: npt.NDArray[np.uint8]) -> int:
    """The least of i4 codes, two a byte."""

def pack_int4(rows: QuantisedRows, ks: int, pitch: int, to: int) -> None:
    """Rows as int4 programs read them, at the address `to`: [K/ks][M] runs of ks codes, `pitch` bytes apart, two codes
    a byte. ValueError for a code outside of -8..7."""

def scale_partial_sums(
    parts: Sequence[int],
    half: bool,
    row: int,
    block: int,
    m0: int,
    m1: int,
    rows: QuantisedRows,
    slice: Slice,
    out: Array,
    bias: Array | None,
) -> None:
    """What `linear` makes of sums [m1 - m0, slice.n] of the rows from m0 on that were made elsewhere.

    `parts` are addresses, as many for each group of the rows, which are added up; element (m, c) of a part lies
    `(m - m0) * row + c // 64 * block + c % 64` int32 (`half`: int16) behind its address."""

# --- end of npu ---
