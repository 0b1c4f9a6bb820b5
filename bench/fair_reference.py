"""A float model that lies on nobody's grid: the fair start for comparing quantisers.

The GGUFs at hand are quantised already, so their dequantised rows lie on ggml's own grids, where ggml's quantisers lose
nothing. Here every weight of a quantised block gets uniform noise of +- half the block's own step: what the block's
code stood for before it was rounded. The result is written once as an F16 GGUF from which every quantiser starts.

    python bench/fair_reference.py MODEL.gguf OUT.gguf
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ork.sources.base import TensorInfo
from ork.sources.gguf import GgufSource
from requantise import rewrite, rows_of

SEED = 2026
F16_MAX = 65504.0
# bytes and weights of a block, weights a step counts for, byte of the f16 `d`
SIMPLE = {
    "Q4_0": (18, 32, 0), "Q4_1": (20, 32, 0), "Q5_0": (22, 32, 0), "Q5_1": (24, 32, 0), "Q8_0": (34, 32, 0),
}  # fmt: skip
EXACT = ("F32", "F16", "BF16")  # not quantised: nothing to undo


def steps(kind: str, raw: memoryview | bytes) -> npt.NDArray[np.float32]:
    """The distance between neighbouring levels at every weight, f32 [weights], of whole blocks of `kind`."""
    data = np.frombuffer(raw, np.uint8)
    if kind in SIMPLE:
        nbytes, weights, at = SIMPLE[kind]
        d = data.reshape(-1, nbytes)[:, at : at + 2].copy().view(np.float16).astype(np.float32)
        return np.repeat(np.abs(d[:, 0]), weights)
    if kind in ("Q4_K", "Q5_K"):
        blocks = data.reshape(-1, 144 if kind == "Q4_K" else 176)
        d = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
        s = blocks[:, 4:16].astype(np.uint8)  # eight 6-bit scales, then eight 6-bit minima, ggml's packing
        low = s[:, 0:4] & 63
        high = (s[:, 8:12] & 15) | ((s[:, 0:4] >> 6) << 4)
        return np.repeat(np.abs(d * np.concatenate([low, high], 1)).ravel(), 32)
    if kind == "Q6_K":
        blocks = data.reshape(-1, 210)
        d = blocks[:, 208:210].copy().view(np.float16).astype(np.float32)
        return np.repeat(np.abs(d * blocks[:, 192:208].view(np.int8)).ravel(), 16)
    raise SystemExit(f"the step of {kind} blocks is not known here")


def with_noise(
    source: GgufSource, t: TensorInfo, start: int, rows: npt.NDArray[np.float32], rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Rows of a tensor from `start` on with the noise of their blocks."""
    if t.kind in EXACT:
        return rows
    each = t.nbytes // t.rows
    step = steps(t.kind, source.raw(t.name)[start * each : (start + len(rows)) * each]).reshape(rows.shape)
    return rows + (rng.random(rows.shape, np.float32) - np.float32(0.5)) * step


def fair_reference(path: Path, folder: Path) -> Path:
    """The model's fair F16 file, made once and kept in `folder`."""
    source = GgufSource(path)
    target = folder / f"{path.stem}-fair-{source.digest()[:12]}.gguf"
    source.close()
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        write(path, partial)
        partial.rename(target)
    return target


def noisy_pieces(source: GgufSource, t: TensorInfo) -> Iterator[npt.NDArray[np.float32]]:
    """All of a tensor's rows with their noise, from a seed of its own. Matrices stay within what F16 holds."""
    rng = np.random.default_rng([SEED, zlib.crc32(t.name.encode())])
    at = 0
    for rows in rows_of(source, t):
        noisy = with_noise(source, t, at, rows, rng)
        assert len(t.shape) == 1 or np.abs(noisy).max() <= F16_MAX, t.name
        yield noisy
        at += len(rows)


def write(path: Path, out: Path) -> None:
    """Matrices as F16, vectors as F32; metadata unchanged."""
    kinds = {True: "F16", False: "F32"}
    rewrite(path, out, gguf.LlamaFileType.MOSTLY_F16, lambda t: kinds[len(t.shape) > 1], noisy_pieces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(args.model, args.out)
