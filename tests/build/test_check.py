"""What does not fit the architecture is named before a byte of the pack is written."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ork.build.convert import convert
from ork.errors import SourceError
from ork.quant.recipe import builtin
from ork.sources import open_source
from ork.strings import StringTable
from tests import tiny
from tests.gguf_writer import write_gguf


def tensors(path: Path) -> tuple[dict, dict]:
    """Metadata and tensors of a tiny llama, to be spoilt."""
    tiny.random_gguf(path, "llama")
    with contextlib.closing(open_source(path)) as source:
        read = {t.name: source.rows(t.name, 0, t.rows).reshape(t.shape) for t in source.tensors.values()}
        metadata = {k: list(v) if isinstance(v, StringTable) else v for k, v in source.metadata.items()}
        return metadata, read


def refusal(path: Path, metadata: dict, held: dict[str, np.ndarray]) -> str:
    write_gguf(path, metadata, {name: ("F32", x, x.shape) for name, x in held.items()})
    target = path.with_suffix(".orkpack")
    with contextlib.closing(open_source(path)) as source, pytest.raises(SourceError) as error:
        convert(source, target, builtin("i8"))
    assert not target.exists()
    assert not target.with_name(target.name + ".part").exists()
    return str(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    metadata, held = tensors(tmp_path / "m.gguf")
    del held["blk.1.ffn_up.weight"]
    assert "blk.1.ffn_up.weight is missing" in refusal(tmp_path / "x.gguf", metadata, held)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    metadata, held = tensors(tmp_path / "m.gguf")
    held["blk.0.attn_q.weight"] = held["blk.0.attn_q.weight"][:-1]
    text = refusal(tmp_path / "x.gguf", metadata, held)
    assert "blk.0.attn_q.weight" in text
    assert "where the metadata asks for" in text


def test_a_tensor_that_the_architecture_does_not_use_is_named(tmp_path: Path) -> None:
    metadata, held = tensors(tmp_path / "m.gguf")
    held["blk.0.attn_q_norm.weight"] = np.ones(8, np.float32)
    text = refusal(tmp_path / "x.gguf", metadata, held)
    assert "blk.0.attn_q_norm.weight has no place in the architecture llama" in text
