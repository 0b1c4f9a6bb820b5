"""Codecs: f32 rows to codes and scales, and back.

    i4   codes -7..7, scale absmax / 7          i8   codes -127..127, scale absmax / 127
    nf4  codes 0..15, which mean NF4_LEVELS     f16, f32   the values themselves

One scale a row, or one a group of 32, 64 or 128 inputs: float(f16) x the row's f32. That f32 is a power of two, so that
the product is exact, and places the row's largest group scale well inside f16's range: 13 octaves below keep f16's
full precision, 3 above are room for scales that grow while a row is being quantised (GPTQ). Codes are chosen with the
scale that is stored: code = round half to even of row x (1 / scale), the nearest level for nf4.

A scale is searched from absmax's: of the clip ratios tried, the one with strictly the lowest sum of squared errors
(weighted by importance, if given), then least squares for the codes it led to, while that helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork import tiles
from ork.errors import SourceError

NF4_LEVELS: Final = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127], np.int8)
TOP: Final = {"i8": 127, "i4": 7, "nf4": 127}  # the level that absmax becomes
GROUPS: Final = (128, 64, 32)
SEARCHES: Final = ("absmax", "mse", "importance")
HEADROOM: Final = {"i8": 18, "i4": 14, "nf4": 18}  # log2 of row scale over channel scale, see `channel_scale`
SMALLEST: Final = np.float32(2.0**-100)  # a row of nothing larger is zero

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Quantised:
    """Rows as stored. Padding of `codes` beyond K holds zeros."""

    codes: npt.NDArray[Any]  # i8 [n, Kp]; of f16 and f32 the floats
    channel: F32 | None  # [n]; None: f16, f32
    groups: npt.NDArray[np.float16] | None  # [n, Kp / group]; None: one scale a row


def effective_group(K: int, asked: int) -> int:
    """The largest of 128, 64 and 32 that divides K and is not above `asked`; 0 if there is none."""
    return next((g for g in GROUPS if g <= asked and K % g == 0), 0)


def channel_scale(codec: str, peaks: F32) -> F32:
    """The channel scales f32 [n] of grouped rows whose absmax is `peaks` f32 [n]: powers of two, 0 for a zero row.

    Absmax / top of the row over it lies in [2048, 4681]; f16 ends at 65504.
    """
    _, exponent = np.frexp(peaks)
    return np.where(peaks < SMALLEST, 0, np.ldexp(np.float32(1), exponent - 1 - HEADROOM[codec])).astype(np.float32)


GRID: Final = tuple(np.float32(r) for r in (1, *np.arange(0.98, 0.09, -0.02), 1.05, 1.1))


def quantise(
    codec: str,
    rows: F32,
    group: int,
    *,
    search: str = "absmax",
    importance: F32 | None = None,
) -> Quantised:
    n, K = rows.shape
    Kp = tiles.pad_k(K)
    peaks = np.abs(rows).max(axis=1)
    bad = np.flatnonzero(~np.isfinite(peaks))
    if bad.size:
        raise SourceError(f"row {bad[0]} holds a value that is not finite: the source is damaged or not a model")
    if codec in ("f16", "f32"):
        codes = np.zeros((n, Kp), tiles.CODECS[codec].dtype)
        codes[:, :K] = rows
        return Quantised(codes, None, None)
    _, exponent = np.frexp(peaks)
    y = np.ldexp(np.where((peaks < SMALLEST)[:, None], 0, rows), 1 - exponent[:, None]).astype(np.float32)
    size = group or K
    y = y.reshape(n, K // size, size)
    weight = np.float32(1) if importance is None else (importance / importance.max()).reshape(1, -1, size)
    base = np.abs(y).max(axis=2) / np.float32(TOP[codec])
    unit = np.float32(2.0 ** HEADROOM[codec])

    def stored(s: F32) -> F32:
        return ((s * unit).astype(np.float16).astype(np.float32) / unit) if group else s.astype(np.float32)

    def level(s: F32) -> npt.NDArray[Any]:
        with np.errstate(divide="ignore"):
            inv = np.where(s == 0, np.float32(0), np.float32(1) / s)[:, :, None]
        t = y * inv
        if codec == "nf4":
            mids = (NF4_LEVELS[:-1].astype(np.float32) + NF4_LEVELS[1:]) / 2
            return NF4_LEVELS[np.searchsorted(mids, t, side="right")].astype(np.float32)
        return np.clip(np.rint(t), -TOP[codec], TOP[codec])

    def error(s: F32) -> F32:
        return (weight * (y - s[:, :, None] * level(s)) ** 2).sum(axis=2)

    best = stored(base)
    if search != "absmax":
        least = error(best)
        for ratio in GRID[1:]:
            s = stored(base * ratio)
            e = error(s)
            best, least = np.where(e < least, s, best), np.minimum(e, least)
        for _ in range(3):
            q = level(best)
            den = (weight * q * q).sum(axis=2)
            s = stored(np.where(den > 0, (weight * y * q).sum(axis=2) / np.where(den > 0, den, 1), best))
            e = error(s)
            best, least = np.where(e < least, s, best), np.minimum(e, least)
    q = level(best).reshape(n, K)
    codes = np.zeros((n, Kp), np.int8)
    codes[:, :K] = np.searchsorted(NF4_LEVELS, q.astype(np.int8)) if codec == "nf4" else q
    if group:
        channel = channel_scale(codec, peaks)
        return Quantised(codes, channel, (best * unit).astype(np.float16))
    return Quantised(codes, np.ldexp(best[:, 0], exponent - 1).astype(np.float32), None)


def dequantise(codec: str, q: Quantised, K: int) -> F32:
    """f32 [n, K] of what is stored: level x (f16 x channel), the product of scales first."""
    if q.channel is None:
        return np.ascontiguousarray(q.codes[:, :K], np.float32)
    levels = (NF4_LEVELS[q.codes[:, :K]] if codec == "nf4" else q.codes[:, :K]).astype(np.float32)
    if q.groups is None:
        return levels * q.channel[:, None]
    scales = q.groups.astype(np.float32) * q.channel[:, None]
    return (levels.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(levels.shape)
