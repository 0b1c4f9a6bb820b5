"""Write a GGUF's weights again as F32 or Q8_0, so that every program compared starts from the same numbers.

Rows come dequantised from ork's own reader (bit-equal to ggml's, see tests/sources); metadata is copied unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ork.sources.base import F32, TensorInfo
from ork.sources.gguf import GgufSource

STEP_BYTES = 64 << 20
FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}

Pieces = Callable[[], Iterator[F32 | npt.NDArray[np.uint8]]]  # f32 values, or blocks as they stand in the file
Tensor = tuple[str, tuple[int, ...], str, Pieces]  # name, shape, type


def requantised(source: Path, kind: str, folder: Path) -> Path:
    """The model with all matrices as `kind` ('F32' or 'Q8_0'), made once and kept in `folder`."""
    with_digest = GgufSource(source)
    target = folder / f"{source.stem}-{kind}-{with_digest.digest()[:12]}.gguf"
    with_digest.close()
    if not target.exists():
        part = target.with_suffix(".part")
        write(source, kind, part)
        part.rename(target)
    return target


def write(path: Path, kind: str, out: Path) -> None:
    """Vectors stay F32, and so do matrices whose rows are no whole number of Q8_0 blocks."""

    def kind_of(t: TensorInfo) -> str:
        return kind if kind == "Q8_0" and len(t.shape) > 1 and t.columns % 32 == 0 else "F32"

    rewrite(path, out, FILE_TYPES[kind], kind_of, rows_of)


def rows_of(source: GgufSource, t: TensorInfo) -> Iterator[F32]:
    """A tensor's rows as f32, STEP_BYTES at a time; its pages are let go of at the end."""
    step = max(1, STEP_BYTES // (4 * t.columns))
    for start in range(0, t.rows, step):
        yield source.rows(t.name, start, min(start + step, t.rows))
    source.release(t.name)


def rewrite(
    path: Path,
    out: Path,
    file_type: gguf.LlamaFileType,
    kind_of: Callable[[TensorInfo], str],
    pieces_of: Callable[[GgufSource, TensorInfo], Iterator[F32]],
) -> None:
    """The same model with its tensors stored as `kind_of` says, from the f32 rows that `pieces_of` gives."""
    source, reader = GgufSource(path), gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, arch=str(source.metadata["general.architecture"]))
    copy_metadata(reader, writer, file_type)
    write_tensors(
        writer, [(t.name, t.shape, kind_of(t), partial(pieces_of, source, t)) for t in source.tensors.values()]
    )
    source.close()


def write_tensors(writer: gguf.GGUFWriter, tensors: list[Tensor]) -> None:
    """Header, metadata and tensors, one piece in memory at a time."""
    for name, shape, kind, _ in tensors:
        quantised = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            dtype = np.dtype(np.float32 if kind == "F32" else np.float16)
            writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
        else:
            stored = gguf.quant_shape_to_byte_shape(shape, quantised)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream = writer.fout[0]
    for _, _, kind, pieces in tensors:
        writer.write_padding(stream, stream.tell())
        for piece in pieces():
            raw = piece.dtype == np.uint8
            stream.write((piece if raw else gguf.quants.quantize(piece, gguf.GGMLQuantizationType[kind])).tobytes())
    writer.write_padding(stream, stream.tell())
    writer.close()


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, file_type: gguf.LlamaFileType) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue  # the writer's own
        if field.name == "general.file_type":
            writer.add_file_type(file_type)
        elif field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1])
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
