"""Random slices in every codec, for devices to be compared on."""

from __future__ import annotations

import numpy as np

from ork import tiles
from ork.devices.base import SliceSpec

NF4 = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127], np.int8)
LOWEST = {"i8": -127, "i4": -7, "nf4": 0}
HIGHEST = {"i8": 127, "i4": 7, "nf4": 15}


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy on a boundary of 64 bytes."""
    room = np.zeros(data.nbytes + 64, np.uint8)
    out = room[-room.ctypes.data % 64 :][: data.nbytes]
    out[:] = data
    return out


def random_slice(
    codec: str, n: int, K: int, seed: int, *, group: int = 0, act_group: int = 0, n0: int = 0, least: int | None = None
) -> tuple[SliceSpec, np.ndarray, np.ndarray]:
    """(spec, blob, the integers [n, Kp] that its codes stand for). K is padded here, as packs have it."""
    rng = np.random.default_rng(seed)
    Kp = tiles.pad_k(K)
    codes = np.zeros((n, Kp), np.int8) if codec != "nf4" else np.full((n, Kp), 7, np.int8)
    codes[:, :K] = rng.integers(LOWEST[codec] if least is None else least, HIGHEST[codec] + 1, (n, K), dtype=np.int8)
    layout = tiles.slice_layout(codec, K, n, group)
    channel = rng.random(n, dtype=np.float32) * 1e-3
    groups = (rng.random((n, Kp // group)) + 0.5).astype(np.float16) if group else None
    blob = aligned(tiles.build_blob(layout, codes, channel, groups))
    spec = SliceSpec("w", codec, K, Kp, tiles.ks_of(Kp, group), n0, n0 + n, group, group or act_group)
    return spec, blob, NF4[codes] if codec == "nf4" else codes
