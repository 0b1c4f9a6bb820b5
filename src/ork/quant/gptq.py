"""GPTQ: rounding that makes up for its own errors, column by column (Frantar et al., 2022, arXiv:2210.17323).

The error of rounding W to Q on inputs X is trace((W - Q) H (W - Q)') with H = X'X. Columns are rounded in order, and
what a column lost is handed to those behind it in the way that leaves the least error: along the rows of U, the upper
Cholesky factor of H^-1. Rows of W do not see each other, so slices are quantised apart and in parallel.

H is of inputs rotated as the weights are. It is summed with the inputs in reverse order: then U is the inverse of a
plain lower factor, read backwards, and everything happens in the one K x K array that held the sum. Every product runs
over tiles of fixed size and one BLAS thread each (`one_blas_thread`), so that codes do not depend on how many threads
there are. They may differ between processors, as BLAS does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ork import native
from ork.quant import codecs
from ork.quant.codecs import BadRow, Quantised

F32 = npt.NDArray[np.float32]

DAMPING = 0.01  # of the mean diagonal, added to it
TILE = 512  # inputs a tile of the Hessian's work has
BLOCK = 128  # columns between two updates of all that lie behind
HALF_MAX = np.float32(65504)  # f16's largest
FLIP = 1 << 20  # elements exchanged at a time


def one_blas_thread() -> AbstractContextManager[Any]:
    """Around everything here: one thread a product, the parallel work being done by those who call."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limits


class Hessian:
    """X'X of inputs [rows, K] that come in pieces. `sum` f32 [K, K] holds its lower half, inputs in reverse order."""

    def __init__(self, K: int):
        self.K = K
        self.rows = 0
        self.sum: F32 = np.zeros((K, K), np.float32)

    def add(self, x: F32, pool: Executor | None = None) -> None:
        """Adds rows [m, K], already rotated."""
        backwards = np.ascontiguousarray(x[:, ::-1])
        self.rows += len(x)

        def tile(at: int) -> None:
            end = at + TILE
            with np.errstate(over="ignore", invalid="ignore"):  # `factor` finds it
                self.sum[at:, at:end] += backwards[:, at:].T @ backwards[:, at:end]

        _each(tile, range(0, self.K, TILE), pool)

    @classmethod
    def of(cls, matrix: npt.NDArray[np.floating[Any]], rows: int) -> Hessian:
        """A given symmetric X'X [K, K] of `rows` rows, inputs in their own order."""
        held = cls(len(matrix))
        held.sum[:] = matrix[::-1, ::-1]
        held.rows = rows
        return held


@dataclass(frozen=True)
class Factor:
    """`upper` f32 [K, K]: U with H^-1 = U'U in its upper half, zeros or rubbish below; `dead` inputs were always 0."""

    upper: F32
    dead: npt.NDArray[np.intp]


def factor(hessian: Hessian, pool: Executor | None = None, *, damping: float = DAMPING) -> Factor:
    """The factor of a Hessian, in its own memory: `hessian` is used up.

    An input that was always 0 gets a diagonal of 1. Raises FloatingPointError if the matrix is not finite, or not
    positive definite in f32.
    """
    a = hessian.sum
    diagonal = np.einsum("ii->i", a)
    if not np.isfinite(diagonal).all():
        raise FloatingPointError("the inputs' second moments are not finite")
    dead = np.flatnonzero(diagonal == 0)
    live = diagonal[diagonal != 0]
    diagonal[dead] = 1
    diagonal += damping * float(live.mean(dtype=np.float64)) if live.size else 0.0
    _cholesky(a, pool)
    _invert_lower(a, pool)
    _flip(a.reshape(-1))
    return Factor(a, hessian.K - 1 - dead[::-1])


def gptq(
    codec: str,
    rows: F32,
    made: Factor,
    group: int = 0,
    *,
    search: str = "absmax",
    importance: F32 | None = None,
) -> Quantised:
    """Codes and scales of rows f32 [n, K], rotated already; codec i4, nf4 or i8, and the rest as in `codecs.quantise`.

    A row's scale, without groups, is that of plain rounding. A group's is searched when its first column's turn has
    come, from what the columns before it made of the row; the channel scale is fixed before that and leaves room for
    it, as `codecs` says. Raises SourceError for a value that is not finite.
    """
    n, K = rows.shape
    work = rows.copy()
    work[:, made.dead] = 0
    plain = codecs.quantise(codec, work, group, search=search, importance=importance)
    if plain.channel is None:
        raise ValueError(f"codec {codec} does not round")
    number = codecs.SCHEMES[codec].number
    peaks = np.abs(work).max(axis=1, initial=0)
    codes, groups, scales = np.zeros_like(plain.codes), plain.groups, plain.channel
    for block in range(0, K, BLOCK):
        end = min(block + BLOCK, K)
        errors = np.empty((n, end - block), np.float32)
        for at in range(block, end, group or BLOCK):
            stop = min(at + group, end) if group else end
            if groups is not None:
                part = None if importance is None else importance[at:stop]
                groups[:, at // group] = _group_scales(codec, work[:, at:stop], peaks, plain.channel, search, part)
                scales = groups[:, at // group].astype(np.float32) * plain.channel
            native.gptq_round(number, work, made.upper, scales, codes, errors, block, at, stop)
            bad = np.flatnonzero(~np.isfinite(errors[:, at - block : stop - block]).all(axis=1))
            if bad.size:
                raise BadRow(int(bad[0]), "holds values too large to make up for their errors")
        if end < K:
            with np.errstate(over="ignore", invalid="ignore"):  # found in the errors that follow
                work[:, end:] -= errors @ made.upper[block:end, end:]
    return Quantised(codes, plain.channel, groups)


def _group_scales(
    codec: str, values: F32, peaks: F32, channel: F32, search: str, importance: F32 | None
) -> npt.NDArray[np.float16]:
    """f16 scales [n] of one group's values [n, group], over the channel scales of rows whose absmax was `peaks`.

    A group in front that holds nothing but that absmax makes the search see what it would see in the whole row.
    """
    n, group = values.shape
    both = np.zeros((n, 2 * group), np.float32)
    both[:, 0], both[:, group:] = peaks, values
    doubled = None if importance is None else np.concatenate([importance, importance])
    q = codecs.quantise(codec, both, group, search=search, importance=doubled)
    assert q.channel is not None
    assert q.groups is not None
    grown = np.divide(q.channel, channel, out=np.zeros_like(channel), where=channel > 0)
    return np.clip(q.groups[:, 1].astype(np.float32) * grown, -HALF_MAX, HALF_MAX).astype(np.float16)


def _cholesky(a: F32, pool: Executor | None) -> None:
    """a = L L' in place, the lower half: a panel of columns at a time, from those to its left. Blocks on the diagonal
    hold the inverse of L's: nothing else asks for them."""
    K = len(a)
    for at in range(0, K, TILE):
        end = min(at + TILE, K)
        own, left = a[at:end, at:end], a[at:end, :at].T

        def take(row: int, at: int = at, end: int = end, left: F32 = left) -> None:
            a[row : row + TILE, at:end] -= a[row : row + TILE, :at] @ left

        if at:
            _each(take, range(at, K, TILE), pool)
        try:
            own[:] = np.tril(np.linalg.inv(np.linalg.cholesky(own)))
        except np.linalg.LinAlgError:
            raise FloatingPointError("the inputs' second moments are not positive definite") from None
        inverse = own.T

        def solve(row: int, at: int = at, end: int = end, inverse: F32 = inverse) -> None:
            a[row : row + TILE, at:end] = a[row : row + TILE, at:end] @ inverse

        _each(solve, range(end, K, TILE), pool)


def _invert_lower(a: F32, pool: Executor | None) -> None:
    """What `_cholesky` leaves to L^-1 in place, a panel of rows at a time, from those above it."""
    K = len(a)
    for at in range(TILE, K, TILE):
        end = min(at + TILE, K)
        inverse, row = a[at:end, at:end], a[at:end, :at].copy()

        def fill(left: int, at: int = at, end: int = end, row: F32 = row, inverse: F32 = inverse) -> None:
            right = left + TILE
            a[at:end, left:right] = -(inverse @ (row[:, left:] @ a[left:at, left:right]))

        _each(fill, range(0, at, TILE), pool)


def _flip(flat: F32) -> None:
    """Reverses a flat array in place, which turns a matrix by half a turn."""
    half = len(flat) // 2
    for at in range(0, half, FLIP):
        end = min(at + FLIP, half)
        front = flat[at:end].copy()
        back = flat[len(flat) - end : len(flat) - at]
        flat[at:end] = back[::-1]
        back[:] = front[::-1]


def _each(work: Callable[[int], None], items: Sequence[int] | range, pool: Executor | None) -> None:
    """Calls `work` on every item, in parallel if there is a pool; raises the first error."""
    for _ in map(work, items) if pool is None else pool.map(work, items):
        pass
