"""A float model that lies on nobody's grid: the fair start for comparing quantisers.

The GGUFs at hand are quantised already, so their dequantised rows lie on ggml's own grids, where ggml's quantisers lose
nothing. Here every weight of a quantised block gets uniform noise of +- half the block's own step: what the block's
code stood for before it was rounded. The result is written once as an F16 GGUF from which every quantiser starts.

    python bench/fair_reference.py MODEL.gguf OUT.gguf
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ork.sources.gguf import GgufSource
from requantise import STEP_BYTES, copy_metadata

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


def noisy_rows(
    source: GgufSource, name: str, start: int, stop: int, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Rows [start, stop) with the noise of their blocks."""
    info = source.tensors[name]
    rows = source.rows(name, start, stop)
    if info.kind in EXACT:
        return rows
    each = info.nbytes // info.rows
    step = steps(info.kind, source.raw(name)[start * each : stop * each]).reshape(rows.shape)
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


def write(path: Path, out: Path) -> None:
    """Matrices as F16, vectors as F32; metadata unchanged."""
    source, reader = GgufSource(path), gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, arch=str(source.metadata["general.architecture"]))
    copy_metadata(reader, writer, gguf.LlamaFileType.MOSTLY_F16)
    for name, t in source.tensors.items():
        dtype = np.dtype(np.float16 if len(t.shape) > 1 else np.float32)
        writer.add_tensor_info(name, t.shape, dtype, dtype.itemsize * t.rows * t.columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream = writer.fout[0]
    for name, t in source.tensors.items():
        rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
        writer.write_padding(stream, stream.tell())
        step = max(1, STEP_BYTES // (4 * t.columns))
        for start in range(0, t.rows, step):
            rows = noisy_rows(source, name, start, min(start + step, t.rows), rng)
            if len(t.shape) > 1:
                assert np.abs(rows).max() <= F16_MAX, name
                rows = rows.astype(np.float16)
            stream.write(rows.tobytes())
        source.release(name)
    writer.write_padding(stream, stream.tell())
    writer.close()
    source.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(args.model, args.out)
