"""The error that a codec brings to a tensor's output: E = ||X (W - Q)'||^2 / ||X W'||^2, with real input rows X.

It is the mean over input rows of each row's own ratio, because what follows a product scales rows (norms, softmax): a
row of huge values counts like any other. A sample of the weight's rows is enough, for they are quantised one by one.
Inputs are quantised too, as the codec's products do it: their error, which is independent of the weight's, is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ork import native, tiles
from ork.build.layerwise import F32, Piece
from ork.devices.cpu import CpuDevice
from ork.pack.format import align
from ork.quant import codecs, rotation
from ork.quant.recipe import usual

Kind = tuple[str, int]  # codec, group

KINDS: tuple[Kind, ...] = tuple((codec, group) for codec in ("nf4", "i4", "i8") for group in (0, 128, 64, 32))
SAMPLE = 256  # of a weight's rows
TINY = 1e-30  # below which a row's output is nothing to compare with


def kinds_for(K: int, kinds: Sequence[Kind] = KINDS) -> list[Kind]:
    """Those that K inputs allow: a group must divide them."""
    return [(codec, group) for codec, group in kinds if not group or codecs.effective_group(K, group) == group]


def sample_rows(N: int, count: int = SAMPLE) -> list[tuple[int, int]]:
    """Ranges of rows, spread evenly over N: at most `count` in all, in runs of 64 at most, that are read at once."""
    run = min(64, count)
    if count >= N:
        return [(0, N)]
    return [(int(at), int(at) + run) for at in np.linspace(0, N - run, count // run)]


def output_errors(device: CpuDevice, x: F32, weight: F32, kinds: Sequence[Kind], mode: str) -> dict[Kind, float]:
    """E of each kind, the weight's part and the inputs': x [r, K] input rows, weight [n, K] rows, both as they are
    before rotation."""
    K = x.shape[1]
    rows, turned = rotation.rotate_rows(x, K, mode), rotation.rotate_rows(weight, K, mode)
    y = _product(device, rows, turned)
    inputs = {
        group: ratio(_product(device, rounded_rows(rows, group) - rows, turned), y) for group in {g for _, g in kinds}
    }
    with ThreadPoolExecutor(device.threads) as pool:
        stored = list(pool.map(lambda kind: _stored(turned, kind, usual(kind[0]).search), kinds))
    return {
        kind: ratio(_product(device, rows, other - turned), y) + inputs[kind[1]] for kind, other in zip(kinds, stored)
    }


def output_error(device: CpuDevice, x: F32, weight: F32, other: F32) -> float:
    """E of any other weight rows in the place of `weight`."""
    return ratio(_product(device, x, other - weight), _product(device, x, weight))


def row_errors(weight: F32, kinds: Sequence[Kind], mode: str) -> dict[Kind, float]:
    """E of rows that are looked up, not multiplied with: the mean over rows of ||w - q||^2 / ||w||^2."""
    K = weight.shape[1]
    turned = rotation.rotate_rows(weight, K, mode)
    return {kind: ratio(_stored(turned, kind, usual(kind[0]).search) - turned, turned) for kind in kinds}


def stored_rows(weight: F32, kind: Kind, mode: str) -> F32:
    """Weight rows [n, K] as a codec without a search would give them back."""
    K = weight.shape[1]
    return rotation.unrotate_rows(_stored(rotation.rotate_rows(weight, K, mode), kind, "absmax"), K, mode)


def _stored(rows: F32, kind: Kind, search: str) -> F32:
    codec, group = kind
    return codecs.dequantise(codec, codecs.quantise(codec, rows, group, search=search), rows.shape[1])


def rounded_rows(rows: F32, group: int) -> F32:
    """Input rows [r, K], rotated already, as int8 products take them."""
    K = rows.shape[1]
    q = native.quantise(native.Array.of(np.ascontiguousarray(rows)), None, 0, group, None)
    codes, scales = q.codes().astype(np.float32), q.scales()
    if not group:
        return codes[:, :K] * scales.reshape(-1, 1)
    grouped: F32 = codes.reshape(len(codes), -1, group) * scales.reshape(len(codes), -1, 1)
    return grouped.reshape(codes.shape)[:, :K]


def _product(device: CpuDevice, x: F32, weight: F32) -> F32:
    """x @ weight' by the native f32 kernel: faster here than BLAS, and the same on every machine."""
    held = Piece(device, "sample", weight.shape, lambda a, b: weight[a:b])
    out = native.Array(len(x), len(weight))
    rows = native.Array.of(np.ascontiguousarray(x))
    device.linear(held.slices, rows, None, [out] * len(held.slices), [None] * len(held.slices))
    return out.numpy()


def ratio(error: F32, y: F32) -> float:
    """The mean over rows of ||error||^2 / ||y||^2, rows of nothing left out."""
    power = np.square(y, dtype=np.float64).sum(axis=1)
    whole = power > TINY
    lost = np.square(error, dtype=np.float64).sum(axis=1)
    return float(np.mean(lost[whole] / power[whole])) if whole.any() else 0.0


def stored_bytes(shape: tuple[int, int], kind: Kind) -> int:
    """Bytes of a tensor in a pack, whose slices begin on pages."""
    (N, K), (codec, group) = shape, kind
    sizes = (tiles.slice_layout(codec, K, b - a, group).nbytes for a, b in tiles.slice_columns(codec, K, N, group))
    return sum(map(align, sizes))
