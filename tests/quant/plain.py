"""Quantising as docs/recipes.md says it, in plain numpy, one group at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

# nf4's 16 levels in units of absmax / 127, from the published table of the codebook.
NF4 = np.round(
    127
    * np.array(
        [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
         -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
         0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1]
    )
)  # fmt: skip
TOP = {"i8": 127, "i4": 7, "nf4": 127}


def scales_of(codec: str, rows: F32, group: int) -> tuple[F32, F32 | None]:
    """absmax's (channel f32 [n], groups f16 [n, K / group] or None); no value may be as small as 2^-80."""
    top = np.float32(TOP[codec])
    if not group:
        return np.abs(rows).max(axis=1) / top, None
    peaks = np.abs(rows).max(axis=1)
    # absmax of a row over its channel scale is 2^18 up to 2^19, of an i4 row 2^14 up to 2^15
    channel = np.exp2(
        np.floor(np.log2(peaks, where=peaks > 0, out=np.zeros_like(peaks))) - (14 if codec == "i4" else 18)
    )
    channel = np.where(peaks > 0, channel, 0).astype(np.float32)
    own = np.abs(rows.reshape(len(rows), -1, group)).max(axis=2) / top
    safe = np.where(channel > 0, channel, 1)[:, None]
    return channel, (own / safe).astype(np.float16)


def stored_scales(channel: F32, groups: npt.NDArray[np.float16] | None, K: int) -> F32:
    """The scale f32 [n, K] of every weight."""
    if groups is None:
        return np.repeat(channel[:, None], K, axis=1)
    return np.repeat(groups.astype(np.float32) * channel[:, None], K // groups.shape[1], axis=1)


def codes_of(codec: str, rows: F32, scales: F32) -> npt.NDArray[np.int8]:
    """The nearest codes i8 [n, K] under the stored scales f32 [n, K]."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    t = rows * inverse
    if codec != "nf4":
        return np.clip(np.rint(t), -TOP[codec], TOP[codec]).astype(np.int8)
    middles = (NF4[1:] + NF4[:-1]) / 2
    return (t[:, :, None] >= middles.astype(np.float32)).sum(axis=2).astype(np.int8)


def values_of(codec: str, codes: npt.NDArray[np.int8], scales: F32) -> F32:
    """What codes and stored scales mean, f32 [n, K]."""
    return (NF4[codes] if codec == "nf4" else codes).astype(np.float32) * scales


def relative_error(want: F32, got: F32) -> float:
    difference = want.astype(np.float64) - got
    return float(np.sqrt((difference**2).sum() / (want.astype(np.float64) ** 2).sum()))
