"""Write a GGUF's weights again as F32 or Q8_0, so that every program compared starts from the same numbers.

Rows come dequantised from ork's own reader (bit-equal to ggml's, see tests/sources); metadata is copied unchanged.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from ork.sources.gguf import GgufSource

STEP_BYTES = 64 << 20
FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def requantised(source: Path, kind: str, folder: Path) -> Path:
    """The model with all matrices as `kind` ('F32' or 'Q8_0'), made once and kept in `folder`."""
    with_digest = GgufSource(source)
    target = folder / f"{source.stem}-{kind}-{with_digest.digest()[:12]}.gguf"
    with_digest.close()
    if not target.exists():
        partial = target.with_suffix(".part")
        write(source, kind, partial)
        partial.rename(target)
    return target


def write(path: Path, kind: str, out: Path) -> None:
    """Vectors stay F32, and so do matrices whose rows are no whole number of Q8_0 blocks."""
    source, reader = GgufSource(path), gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, arch=str(source.metadata["general.architecture"]))
    copy_metadata(reader, writer, FILE_TYPES[kind])
    quantised = {
        name for name, t in source.tensors.items() if kind == "Q8_0" and len(t.shape) > 1 and t.columns % 32 == 0
    }
    for name, tensor in source.tensors.items():
        if name in quantised:
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, gguf.GGMLQuantizationType.Q8_0)
            size, q8 = int(np.prod(shape)), gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, raw_dtype=q8)
        else:
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), 4 * tensor.rows * tensor.columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream = writer.fout[0]
    for name, tensor in source.tensors.items():
        writer.write_padding(stream, stream.tell())
        step = max(1, STEP_BYTES // (4 * tensor.columns))
        for start in range(0, tensor.rows, step):
            rows = source.rows(name, start, min(start + step, tensor.rows))
            if name in quantised:
                rows = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
            stream.write(rows.tobytes())
        source.release(name)
    writer.write_padding(stream, stream.tell())
    writer.close()
    source.close()


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
