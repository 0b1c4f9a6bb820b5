"""Rotation along K: R = (Q x H_block) diag(signs) / sqrt(block), H_block Hadamard's, Q the identity or orthogonal.

Rotating a weight row and an activation row by the same R leaves their product alone and spreads outliers over a
block, so that one scale serves them better. The block is the largest power of two that divides K (at most 4096); where
it is not all of K, Q may mix the m = K / block blocks (mode "mix"), so that an outlier is spread over the whole row.
There is one sign vector per K and one Q per m, so that all tensors that read the same rows share one quantised input.
"""

from __future__ import annotations

from decimal import Context, Decimal
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ork import native

MAX_BLOCK: Final = 4096
MAX_MIX: Final = 512  # blocks; a K of more (8191 = a prime, say) is rotated in blocks alone
MAX_SIGNS: Final = 1 << 24  # no model's K is longer; a name in a foreign file may say anything
MODES: Final = ("none", "block", "mix")

F32 = npt.NDArray[np.float32]


def block_of(K: int) -> int:
    """Rotation block for `K` input channels: the largest power of two that divides K, at most 4096."""
    return min(K & -K, MAX_BLOCK)


def fields_of(K: int, mode: str) -> tuple[int, int]:
    """(rotation, mix) as a pack's tensor record has them: the block and the number of mixed blocks, 0 for none.

    `mix` is 0 where there is one block, or more than `MAX_MIX`. Raises ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"rotation {mode!r} is not one of {', '.join(MODES)}")
    if mode == "none":
        return 0, 0
    block = block_of(K)
    m = K // block
    return block, m if mode == "mix" and 2 <= m <= MAX_MIX else 0


def signs_name(K: int) -> str:
    """Name of the raw tensor that holds K's sign vector in a pack."""
    return f"rotation.signs.{K}"


def mix_name(m: int) -> str:
    """Name of the raw tensor that holds the mixing matrix of m blocks in a pack."""
    return f"rotation.mix.{m}"


def derived(name: str) -> npt.NDArray[np.generic] | None:
    """The raw tensor of that name, if it is one that follows from its name: i8 [K] signs or an f32 [m, m] matrix."""
    kind, _, digits = name.rpartition(".")
    size = int(digits) if digits.isdecimal() and len(digits) < 10 else 0
    if kind == "rotation.signs" and 1 <= size <= MAX_SIGNS:
        return signs_of(size)
    return mix_of(size) if kind == "rotation.mix" and 2 <= size <= MAX_MIX else None


def signs_of(K: int) -> npt.NDArray[np.int8]:
    """The sign vector of +-1 for K input channels: bit 63 of splitmix64(K * 2^32 + k), so it needs no state."""
    with np.errstate(over="ignore"):
        z = np.uint64(K << 32) + np.arange(K, dtype=np.uint64)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.where(z >> np.uint64(63), -1, 1).astype(np.int8)


@lru_cache(maxsize=16)
def mix_of(m: int) -> F32:
    """Q for m blocks, f32 [m, m], read-only: the discrete Hartley matrix (cos + sin)(2 pi i j / m) / sqrt(m).

    It is orthogonal and symmetric, and no element exceeds sqrt(2 / m), so that every block goes to every other about
    equally. The values come from decimal arithmetic: the same bits on every machine.
    """
    context = Context(prec=40)
    pi = _pi(context)
    norm = context.sqrt(Decimal(m))
    values = []
    for k in range(m):
        angle = context.divide(context.multiply(pi, Decimal(2 * k)), Decimal(m))
        values.append(float(context.divide(_cas(angle, context), norm)))
    i = np.arange(m)
    q: F32 = np.array(values)[i[:, None] * i % m].astype(np.float32)
    q.flags.writeable = False
    return q


def rotate_rows(rows: F32, K: int, mode: str) -> F32:
    """Rows [n, K] rotated, as a new array; what `native.quantise` does to activations before it rounds them."""
    block, m = fields_of(K, mode)
    out = np.array(rows, np.float32, order="C")
    if block:
        native.rotate(out, _signs(K), block, False, _mix(m) if m else None)
    return out


def unrotate_rows(rows: F32, K: int, mode: str) -> F32:
    """The inverse of `rotate_rows`, up to rounding."""
    block, m = fields_of(K, mode)
    out = np.array(rows, np.float32, order="C")
    if block:
        native.rotate(out, _signs(K), block, True, _mix(m) if m else None)
    return out


def rotate_importance(importance: F32, block: int, mix: int = 0) -> F32:
    """Mean square f32 [K] of each input after rotation, from that before it, f32 or f64, inputs taken as uncorrelated.

    A block's inputs share their block's mean; mixing weighs these means with Q's squares, which brings all of them near
    the mean of the row. `block` 0 leaves them as they are.
    """
    given = np.asarray(importance, np.float64)
    if block == 0:
        return given.astype(np.float32)
    means = given.reshape(-1, block).mean(axis=1)
    if mix:
        means = np.square(mix_of(mix).astype(np.float64)) @ means
    return np.repeat(means, block).astype(np.float32)


@lru_cache(maxsize=64)
def _signs(K: int) -> native.Array:
    return native.Array.of(signs_of(K).astype(np.float32).reshape(1, K))


@lru_cache(maxsize=16)
def _mix(m: int) -> native.Array:
    return native.Array.of(mix_of(m).reshape(1, m * m))


def _pi(context: Context) -> Decimal:
    """Machin: pi = 16 atan(1/5) - 4 atan(1/239)."""

    def atan_of_inverse(n: int) -> Decimal:
        total, power, k = Decimal(0), context.divide(Decimal(1), Decimal(n)), 0
        while context.add(total, power) != total:
            term = context.divide(power, Decimal(2 * k + 1))
            total = context.add(total, term if k % 2 == 0 else -term)
            power = context.divide(power, Decimal(n * n))
            k += 1
        return total

    return context.subtract(
        context.multiply(Decimal(16), atan_of_inverse(5)), context.multiply(Decimal(4), atan_of_inverse(239))
    )


def _cas(angle: Decimal, context: Context) -> Decimal:
    """cos + sin of an angle in [0, 2 pi), by their series: sum of (+ + - - + + ...) angle^k / k!."""
    total, term, k = Decimal(0), Decimal(1), 0
    while term.copy_abs() > Decimal("1e-38"):
        total = context.add(total, term if k % 4 < 2 else -term)
        k += 1
        term = context.divide(context.multiply(term, angle), Decimal(k))
    return total
