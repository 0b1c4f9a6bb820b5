"""What fits one program: how C[M, N] = A[M, K] x B[K, N] is cut into tiles. Pure functions, no addresses.

Three limits cut a matmul. K and N have field widths and a longest tried value; the weights of one kernel group
(32 x K bytes in every precision) must fit the banks of the convolution buffer given to weights; and all rows of a
program must fit the banks given to features. The split of the 12 banks follows from the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ork import tiles
from ork.errors import UsageError
from ork.npu.fields import Precision
from ork.npu.soc import RK3588, Soc


class Form(Enum):
    """How rows are laid out for the chip."""

    ROW = "row"  # row-major rows in, row-major rows out
    SINGLE = "single"  # one row as a 1 x 1 cube: the form in which int4 is captured
    BATCH = "batch"  # up to 16 int4 rows as every fourth line of a cube (measured to work)


@dataclass(frozen=True)
class Kind:
    """What a precision fixes: input elements of `bits`, kernel groups of `group` channels, outputs of `out_bytes`."""

    name: str
    precision: Precision
    out_precision: Precision
    bits: int
    group: int
    out_bytes: int
    od_bypass: int  # as captured; without effect, because OW_OP is 0
    weight_banks: int  # at least

    def row_bytes(self, K: int) -> int:
        return K * self.bits // 8

    def entries(self, K: int, soc: Soc = RK3588) -> int:
        """Entries of the convolution buffer that one row takes."""
        return -(-self.row_bytes(K) // soc.entry_bytes)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("int8", Precision.INT8, Precision.INT32, 8, 32, 4, od_bypass=0, weight_banks=1),
        # fp16 with one weight bank and few channels hangs (measured: K 1024, N 16 or 32, 129..176 rows).
        Kind("fp16", Precision.FP16, Precision.FP32, 16, 16, 4, od_bypass=1, weight_banks=4),
        # 11 weight banks in every int4 program that was captured or tried.
        Kind("int4", Precision.INT4, Precision.INT16, 4, 64, 2, od_bypass=1, weight_banks=11),
    )
}


@dataclass(frozen=True)
class MatmulShape:
    """C[M, N] = A[M, K] x B[K, N]. `kind` is a name of KINDS; K is a multiple of 32, N of the kind's group."""

    M: int
    K: int
    N: int
    kind: str = "int8"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"precision {self.kind!r} has no matmul programs: use one of {', '.join(KINDS)}")
        group = KINDS[self.kind].group
        if self.M < 1 or self.K < 32 or self.K % 32 or self.N < 1 or self.N % group:
            raise UsageError(
                f"{self.kind} matmul M={self.M} K={self.K} N={self.N}: "
                f"K must be a multiple of 32, N of {group}, all positive"
            )


@dataclass(frozen=True)
class Tile:
    """Rows [m0, m1), inputs [k0, k1) and channels [n0, n1) of a matmul: one program, and its bank split."""

    kind: str
    form: Form
    m0: int
    m1: int
    k0: int
    k1: int
    n0: int
    n1: int
    data_bank: int
    weight_bank: int

    @property
    def M(self) -> int:
        return self.m1 - self.m0

    @property
    def K(self) -> int:
        return self.k1 - self.k0

    @property
    def N(self) -> int:
        return self.n1 - self.n0


def form_of(kind: str, M: int, *, unproven: bool = False) -> Form:
    """int4 knows rows only as `unproven`; what it does is one row a program, or a batch of rows."""
    if kind != "int4" or unproven:
        return Form.ROW
    return Form.SINGLE if M == 1 else Form.BATCH


def lines(form: Form, M: int) -> int:
    """Feature lines that the chip sees for M rows: in a batch each row comes with three shifted copies of itself."""
    return 4 * M if form is Form.BATCH else M


def weight_banks(kind: str, K: int, soc: Soc = RK3588) -> int:
    """The fewest weight banks: a kernel group must be resident whole. Fewer is unproven and never emitted."""
    return max(KINDS[kind].weight_banks, -(-32 * K // soc.bank_bytes))


def rows_limit(kind: str, form: Form, K: int, soc: Soc = RK3588) -> int:
    """The most rows of one program. Raises UsageError for a K whose weights or first row do not fit."""
    if form is Form.SINGLE:
        rows = 1
    elif form is Form.BATCH:
        # Measured: 22 rows at K 768, 4 at 2560 (7 now and then wrong), 4 at 3072..4096, 5 at 3072 hangs. 12288 / K is
        # below all of them; 16384 / K, the quicker rule in use elsewhere, is not.
        rows = min(16, 12288 // K)
    elif kind == "int4":  # unproven in any case, so it does not keep the 11 weight banks of the other forms
        rows = (soc.cbuf_banks - -(-32 * K // soc.bank_bytes)) * soc.entries_per_bank // KINDS[kind].entries(K, soc)
    else:
        banks = soc.cbuf_banks - weight_banks(kind, K, soc)
        rows = banks * soc.entries_per_bank // KINDS[kind].entries(K, soc)
    if rows < 1 or soc.max_k < K:
        raise UsageError(
            f"{kind} with K={K} does not fit one {soc.name} program: cut K into slices (at most {soc.max_k})"
        )
    return min(rows, soc.max_m_field)


def bank_split(kind: str, form: Form, M: int, K: int, soc: Soc = RK3588) -> tuple[int, int]:
    """(data banks, weight banks): as many for features as M rows need, the rest, with its prefetch, for weights."""
    need = -(-lines(form, M) * KINDS[kind].entries(K, soc) // soc.entries_per_bank)
    data = min(max(need, 1), soc.cbuf_banks - 1)
    return data, soc.cbuf_banks - data


INT16_MAX = (1 << 15) - 1  # the chip stores int4 sums as int16
INT4_LEAST = -7  # the least code that our own quantisers make; the format's is -8
INT4_SAFE_K = INT16_MAX // (7 * 7) // 32 * 32  # 640: no sum of so many products of codes within +-7 overflows


def int4_slice(unit: int, longest: int, least: int = INT4_LEAST) -> int:
    """The longest K slice, up to `longest`, into which `unit` inputs (all of K, or a group) divide in whole tiles.

    With `least` = -8 as the least weight code that occurs, `longest` is cut to what then cannot overflow either.
    """
    if longest <= INT4_SAFE_K:
        longest = min(longest, INT16_MAX // (-least * 7) // tiles.K_ALIGN * tiles.K_ALIGN)
    return next(ks for ks in range(min(longest, unit), 0, -tiles.K_ALIGN) if unit % ks == 0)


def cuts(total: int, most: int, step: int = 1) -> Iterator[tuple[int, int]]:
    """[0, total) in runs of at most `most`, a multiple of `step`."""
    width = max(most // step * step, step)
    return ((at, min(at + width, total)) for at in range(0, total, width))


def plan(shape: MatmulShape, soc: Soc = RK3588, *, ks: int | None = None, unproven: bool = False) -> list[Tile]:
    """The programs of a matmul, K slices outermost, then channels, then rows, so that neighbours share weights.

    `ks` is the length of a K slice, of which the weights hold one after another (default `tiles.ks_of(K)`, as packs
    store them); each K slice yields partial sums of its own, which the caller adds. `unproven` uses row mode for int4.
    Raises UsageError if `ks` does not fit a program.
    """
    ks = tiles.ks_of(shape.K) if ks is None else ks
    if ks < 32 or ks % 32 or shape.K % ks:
        raise UsageError(f"a K slice of {ks} is not a multiple of 32 that divides K={shape.K}")
    kind, form = shape.kind, form_of(shape.kind, shape.M, unproven=unproven)
    rows = rows_limit(kind, form, ks, soc)
    return [
        Tile(kind, form, m0, m1, k0, k1, n0, n1, *bank_split(kind, form, m1 - m0, ks, soc))
        for k0, k1 in cuts(shape.K, ks)
        for n0, n1 in cuts(shape.N, soc.max_n, KINDS[kind].group)
        for m0, m1 in cuts(shape.M, rows)
    ]
