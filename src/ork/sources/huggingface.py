"""A Hugging Face folder as a `Source`: its tensors under GGUF names, arranged as llama.cpp's converter writes them.

Query and key rows of llama are interleaved per head for its rope, Gemma's norms are stored as 1 + w, vectors are f32,
`rope_freqs.weight` holds llama3's divisors, a tied head is absent (conversion/{base,llama,gemma}.py of llama.cpp).
Rows are rearranged when they are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from ork.errors import SourceError
from ork.sources.base import F32, MappedFile, MetaValue, TensorInfo, check_range
from ork.sources.dequant import BY_NAME, expand
from ork.sources.hf_config import Config, rope_divisors, to_metadata
from ork.sources.hf_names import UNUSED, gguf_halves, gguf_name
from ork.sources.hf_tokenizer import tokenizer_metadata
from ork.sources.safetensors import Entry, SafetensorsFile, parse_json

MAX_CONFIG = 16 << 20
MAX_TOKENIZER = 128 << 20
READ = ("F32", "F16", "BF16")  # safetensors calls them as ggml does


@dataclass(frozen=True)
class Stored:
    """Where a GGUF tensor comes from: a tensor of a file, or an array (`made`), and what is done to it."""

    file: SafetensorsFile | None
    name: str
    dtype: str
    head: int = 0  # rows of one head, if the rows of each go from halves to pairs
    shift: float = 0.0
    made: F32 | None = None
    half: int | None = None  # 0 or 1: the first or second half of the rows (of each matrix of a stack)


def _shape(to: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a GGUF has: taps of a convolution and the one row of a gate lose a dimension."""
    if to.endswith(".shortconv.conv.weight") and len(shape) == 3 and shape[1] == 1:
        return shape[0], shape[2]
    if to.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 2 and shape[0] == 1:
        return shape[1:]
    return shape


def _stored(
    config: Config, file: SafetensorsFile, name: str, entry: Entry, to: str, shape: tuple[int, ...], half: int | None
) -> Stored:
    """How GGUF tensor `to` is made of `entry`."""
    where = f"{file.path}: tensor {name!r}"
    if entry.dtype not in READ:
        raise SourceError(f"{where}: dtype {entry.dtype} is not supported; supported are {' '.join(READ)}")
    if not 1 <= len(shape) <= (3 if "_exps." in to and "#" not in to else 2) or not entry.nbytes:
        raise SourceError(f"{where}: shape {list(entry.shape)} is neither a vector nor a matrix")
    if half is not None:
        if len(shape) < 2 or shape[-2] % 2:
            raise SourceError(f"{where}: shape {list(entry.shape)} does not divide into two halves")
        return Stored(file, name, entry.dtype, half=half)
    module, head = to.split(".")[-2], 0
    if module in config.arch.interleaved:
        heads = config.heads if module == "attn_q" else config.kv_heads
        head = entry.shape[0] // heads
        if entry.shape[0] % heads or head % 2:
            raise SourceError(f"{where}: {entry.shape[0]} rows are not {heads} heads of even size")
    return Stored(file, name, entry.dtype, head, config.arch.norm_shift if module.endswith("norm") else 0.0)


class HuggingFaceSource:
    """config.json, *.safetensors and the tokenizer's files of one folder as a `Source`.

    SourceError if a file is missing, damaged, or of a model that is not supported.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._hash = xxhash.xxh3_128()
        self._files: list[SafetensorsFile] = []
        self._stored: dict[str, Stored] = {}
        config = Config(self.path / "config.json", self._json("config.json", required=True))
        metadata = to_metadata(config)
        metadata |= tokenizer_metadata(
            config,
            self._text("tokenizer.json", MAX_TOKENIZER),
            self._text("chat_template.jinja", MAX_CONFIG),
            self._json("tokenizer_config.json"),
            self._json("generation_config.json"),
        )
        tensors: dict[str, TensorInfo] = {}
        try:
            self._open_files()
            self._find_tensors(config, tensors)
        except BaseException:
            self.close()
            raise
        self.metadata: Mapping[str, MetaValue] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    # --- reading the folder; everything read is hashed ---

    def _text(self, name: str, most: int, required: bool = False) -> bytes | None:
        where = self.path / name
        if not required and not where.exists():
            return None
        file = MappedFile(where)
        try:
            if len(file.data) > most:
                raise SourceError(f"{where}: {len(file.data)} bytes are over the limit of {most}")
            self._hash.update(file.data)
            return bytes(file.data)
        finally:
            file.close()

    def _json(self, name: str, required: bool = False) -> dict[str, Any]:
        text = self._text(name, MAX_CONFIG, required)
        return {} if text is None else parse_json(self.path / name, text)

    def _open_files(self) -> None:
        index = self.path / "model.safetensors.index.json"
        owner: dict[str, str] = {}
        if index.exists():
            parts = self._json(index.name).get("weight_map")
            if not isinstance(parts, dict) or not all(isinstance(f, str) for f in parts.values()):
                raise SourceError(f"{index}: 'weight_map' is not an object of file names")
            owner = parts
            names = sorted(set(owner.values()))
        elif (self.path / "model.safetensors").exists():
            names = ["model.safetensors"]
        else:
            names = sorted(f.name for f in self.path.glob("*.safetensors"))
            if len(names) != 1:
                found = "none" if not names else f"{len(names)} without model.safetensors.index.json"
                raise SourceError(f"{self.path}: needs a model.safetensors; of *.safetensors there are {found}")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors", name):
                raise SourceError(f"{index}: {name[:200]!r} is not the name of a file of this folder")
            file = SafetensorsFile(self.path / name)
            self._files.append(file)
            self._hash.update(file.header)
            self._hash.update(len(file.file.data).to_bytes(8, "little"))
            if owner and (strays := [n for n in file.entries if owner.get(n) != name]):
                raise SourceError(f"{file.path}: {index.name} does not place tensor {strays[0]!r} here")
        held = {n for file in self._files for n in file.entries}
        if lost := [n for n in owner if n not in held]:
            raise SourceError(f"{index}: tensor {lost[0]!r} is not in {owner[lost[0]]}: download it again")

    def _find_tensors(self, config: Config, tensors: dict[str, TensorInfo]) -> None:
        arch, tied = config.arch, config.flag("tie_word_embeddings")
        divisors = rope_divisors(config)
        if divisors is not None:
            self._stored["rope_freqs.weight"] = Stored(None, "rope_freqs.weight", "F32", made=divisors)
            tensors["rope_freqs.weight"] = TensorInfo("rope_freqs.weight", divisors.shape, "F32", divisors.nbytes)
        for file in self._files:
            for name, entry in file.entries.items():
                if name.endswith(UNUSED) or (tied and name == "lm_head.weight"):
                    continue
                halves = gguf_halves(config.layers, name) if arch.moe else None
                names = halves or (gguf_name(arch.layer, config.layers, name),)
                for i, to in enumerate(names):
                    if to is None:
                        of = f"a {arch.name} model of {config.layers} layers"
                        raise SourceError(f"{file.path}: tensor {name!r} is not part of {of}")
                    if to in tensors:
                        raise SourceError(f"{file.path}: tensor {name!r} is given twice")
                    shape = _shape(to, entry.shape)
                    self._stored[to] = _stored(config, file, name, entry, to, shape, i if halves else None)
                    if halves:
                        shape = (*shape[:-2], shape[-2] // 2, shape[-1])
                    kind = "F32" if len(shape) == 1 else entry.dtype
                    tensors[to] = TensorInfo(to, shape, kind, math.prod(shape) * BY_NAME[kind].bytes)
        needed = ["token_embd.weight", arch.norm] + ([] if tied else ["output.weight"])
        for to in needed:
            if to not in tensors:
                raise SourceError(f"{self.path}: the model has no {to} (of {sum(len(f.entries) for f in self._files)})")

    # --- Source ---

    def rows(self, name: str, start: int, stop: int, out: F32 | None = None) -> F32:
        info, s = self.tensors[name], self._stored[name]
        out = check_range(info, start, stop, out)
        if s.made is not None:
            out[:] = s.made[None, :][start:stop]
            return out
        assert s.file is not None
        data = s.file.bytes_of(s.name)
        if s.head and len(info.shape) == 1:
            expand(s.dtype, data, start, out)
            out[:] = out[:, _pairs(np.arange(info.columns), s.head)]
        elif s.head:
            first = start // s.head * s.head  # whole heads, then the rows asked for
            last = min(-(-stop // s.head) * s.head, info.rows)
            whole = expand(s.dtype, data, first, np.empty((last - first, info.columns), np.float32))
            np.take(whole, _pairs(np.arange(start, stop), s.head) - first, axis=0, out=out)
        elif s.half is not None:
            at = start
            while at < stop:  # a matrix of the stack at a time
                count = min(info.shape[-2] - at % info.shape[-2], stop - at)
                expand(s.dtype, data, _whole(info, s.half, at), out[at - start : at - start + count])
                at += count
        else:
            expand(s.dtype, data, start, out)
        if s.shift:
            out += np.float32(s.shift)
        return out

    def raw(self, name: str) -> memoryview:
        """The bytes a GGUF would hold: a view of the file where it has them, else a copy of the whole tensor."""
        info, s = self.tensors[name], self._stored[name]
        if s.file is None or s.dtype != info.kind or s.shift or (s.head and len(info.shape) == 1):
            return memoryview(self.rows(name, 0, info.rows).tobytes())
        data = s.file.bytes_of(s.name)
        if s.half is not None:
            halves = np.frombuffer(data, np.uint8).reshape(info.rows // info.shape[-2], 2, -1)
            return memoryview(halves[:, s.half].tobytes())
        if not s.head:
            return data
        rows = np.frombuffer(data, np.uint8).reshape(info.rows, -1)
        return memoryview(rows[_pairs(np.arange(info.rows), s.head)].tobytes())

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        info, s = self.tensors[name], self._stored[name]
        check_range(info, start, start, None)
        stop = info.rows if stop is None else max(start, min(stop, info.rows))
        if s.file is not None and start < stop:
            entry = s.file.entries[s.name]
            row = entry.nbytes // (info.rows * (1 if s.half is None else 2))
            if s.half is not None:
                start, stop = _whole(info, s.half, start), _whole(info, s.half, stop - 1) + 1
            s.file.file.release(entry.start + start * row, entry.start + stop * row)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        for file in self._files:
            file.file.close()


def _whole(info: TensorInfo, half: int, row: int) -> int:
    """The stored row of a row of a half."""
    matrix, i = divmod(row, info.shape[-2])
    return (2 * matrix + half) * info.shape[-2] + i


def _pairs(rows: Any, head: int) -> Any:
    """The stored row of each row: element 2 j + b of a head is stored as b * head / 2 + j."""
    base, i = rows // head * head, rows % head
    return base + i % 2 * (head // 2) + i // 2
