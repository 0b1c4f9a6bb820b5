"""Codecs: f32 rows to codes and scales, and back.

    i4   codes -7..7, scale absmax / 7          i8   codes -127..127, scale absmax / 127
    nf4  codes 0..15, which mean NF4_LEVELS     f16, f32   the values themselves

One scale a row, or one a group of 32, 64 or 128 inputs: float(f16) x the row's f32. That f32 is a power of two, so that
the product is exact, and places the row's largest group scale well inside f16's range: 24 octaves below it are left
before a scale is lost, and 3 above for scales that grow while a row is being quantised (GPTQ).

Codes are chosen with the scale that is stored: code = round half to even of value x (1 / scale); for nf4 the nearest
level, the upper one half-way. A row is first multiplied by the power of two that brings its absmax into [1, 2), and a
row of nothing from 2^-100 on is zero.

A scale is searched from absmax's: of the clip ratios tried, the one with strictly the lowest sum of squared errors
(weighted by importance, if given), the earlier of equals; then least squares for the codes that it leads to, while that
lowers the error. nf4's levels are not symmetric, so its search also tries negative scales. Loops and bits:
native/kernels_quant.inl, which gives the same codes on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork import native, tiles
from ork.errors import SourceError

F32 = npt.NDArray[np.float32]

NF4_LEVELS: Final = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127], np.int8)
GROUPS: Final = (128, 64, 32)
SEARCHES: Final = ("absmax", "mse", "importance")
REFINE: Final = 3  # rounds of least squares at most
SMALLEST: Final = 2.0**-100
NOT_FINITE: Final = "holds a value that is not finite: the source is damaged or not a model"

_STEPS = np.arange(19, 1, -1) / 20  # 0.95, 0.90 ... 0.10
_ABOVE = np.arange(21, 31) / 20  # 1.05 ... 1.50: a small group's largest weight may fit the next smaller level


def _ratios(*parts: npt.NDArray[np.float64]) -> F32:
    ratios = np.concatenate(parts).astype(np.float32)
    ratios.flags.writeable = False
    return ratios


@dataclass(frozen=True)
class Scheme:
    """What a quantised codec is to the search: its number for `native`, the level that absmax becomes, clip ratios to
    try besides 1, and log2 of a grouped row's own scale (its absmax rounded down to a power of two) over its channel's.
    """

    number: int
    top: int
    ratios: F32
    headroom: int


_BOTH_SIGNS = np.concatenate([-np.ones(1), *([r, -r] for r in _STEPS[:6]), *([r, -r] for r in _ABOVE)])

SCHEMES: Final = MappingProxyType(
    {
        "i8": Scheme(1, 127, _ratios(_STEPS, _ABOVE[:4]), 18),
        "i4": Scheme(2, 7, _ratios(_STEPS, _ABOVE[:4]), 14),
        "nf4": Scheme(3, 127, _ratios(_BOTH_SIGNS, _STEPS[6:]), 18),
    }
)


class BadRow(SourceError):
    """Row `row` of those given cannot be quantised; `why` follows its number in a sentence."""

    def __init__(self, row: int, why: str):
        super().__init__(f"row {row} {why}")
        self.row, self.why = row, why


@dataclass(frozen=True)
class Quantised:
    """Rows as stored; what pads `codes` beyond K is zero."""

    codes: npt.NDArray[Any]  # i8 [n, Kp]; of f16 and f32 the values
    channel: F32 | None  # [n]; None: f16, f32
    groups: npt.NDArray[np.float16] | None  # [n, K / group]; None: one scale a row


def effective_group(K: int, asked: int) -> int:
    """The largest of 128, 64 and 32 that divides K and is not above `asked`; 0 if there is none."""
    return next((g for g in GROUPS if g <= asked and K % g == 0), 0)


def channel_scales(codec: str, peaks: F32) -> F32:
    """The channel scales f32 [n] that grouped rows of absmax `peaks` f32 [n] get; 0 for a zero row.

    A group's f16 is its scale over this: at most 4681 where no group's scale is above absmax / top, of 65504.
    """
    _, exponent = np.frexp(peaks)
    scales: F32 = np.ldexp(np.ones_like(peaks), exponent - 1 - SCHEMES[codec].headroom)
    scales[peaks < SMALLEST] = 0
    return scales


def quantise(
    codec: str,
    rows: F32,
    group: int = 0,
    *,
    search: str = "absmax",
    importance: F32 | None = None,
    ratios: F32 | None = None,
    refine: int = REFINE,
) -> Quantised:
    """Codes and scales of f32 rows [n, K], rotated already if they are to be; `group` as `effective_group` gives it.

    `importance` f32 [K], finite and not negative, weighs squared errors in the search of that name. `ratios` and
    `refine` replace the codec's own search, for comparisons. Raises BadRow for a value that is not finite or, with
    f16, too large.
    """
    n, K = rows.shape
    rows = np.ascontiguousarray(rows, np.float32)
    if codec not in SCHEMES:
        return _floats(codec, rows)
    if search not in SEARCHES or (search == "importance") != (importance is not None):
        raise ValueError(f"search {search!r} of {', '.join(SEARCHES)}; importance goes with the search of that name")
    scheme = SCHEMES[codec]
    if search == "absmax":
        ratios = np.empty(0, np.float32)
    codes, channel = np.empty((n, tiles.pad_k(K)), np.int8), np.empty(n, np.float32)
    groups = np.empty((n, K // group), np.float16) if group else None
    bad = native.quantise_weights(
        scheme.number,
        rows,
        group,
        None if importance is None else _weight(importance),
        scheme.ratios if ratios is None else ratios,
        refine,
        scheme.headroom,
        codes,
        channel,
        None if groups is None else groups.view(np.uint16),
    )
    if bad >= 0:
        raise BadRow(bad, NOT_FINITE)
    return Quantised(codes, channel, groups)


def dequantise(codec: str, q: Quantised, K: int) -> F32:
    """f32 [n, K] of what is stored: level x (f16 x channel), the product of the scales first."""
    if q.channel is None:
        return np.ascontiguousarray(q.codes[:, :K], np.float32)
    levels = (NF4_LEVELS[q.codes[:, :K]] if codec == "nf4" else q.codes[:, :K]).astype(np.float32)
    if q.groups is None:
        return levels * q.channel[:, None]
    scales = q.groups.astype(np.float32) * q.channel[:, None]
    return (levels.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(levels.shape)


def _floats(codec: str, rows: F32) -> Quantised:
    """f16 and f32: the values, padded."""
    n, K = rows.shape
    values = np.zeros((n, tiles.pad_k(K)), tiles.CODECS[codec].dtype)
    with np.errstate(over="ignore"):
        values[:, :K] = rows
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        finite = np.isfinite(rows[bad[0]]).all()
        raise BadRow(int(bad[0]), "holds a value beyond f16's range: store it as f32" if finite else NOT_FINITE)
    return Quantised(values, None, None)


def _weight(importance: F32) -> F32 | None:
    """Importance as weights of at most 1; None where no input matters."""
    top = float(importance.max())
    return np.ascontiguousarray(importance / np.float32(top), np.float32) if top > 0 else None
