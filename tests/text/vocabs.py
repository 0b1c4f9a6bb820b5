"""The small vocabularies of tiny_vocabs.json as metadata, and their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ork.strings import StringTable
from ork.text.tokenizer import Tokenizer, build_tokenizer

TINY: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_vocabs.json").read_text())


def as_metadata(plain: Mapping[str, Any]) -> dict[str, Any]:
    def value(v: Any) -> Any:
        if not isinstance(v, list):
            return v
        if isinstance(v[0], str):
            return StringTable.of(v)
        return np.array(v, np.float32 if isinstance(v[0], float) else np.int32)

    return {key: value(v) for key, v in plain.items()}


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.load(build_tokenizer(as_metadata(TINY[name]["metadata"])))


def with_keys(name: str, **changes: Any) -> dict[str, Any]:
    """The metadata of `name` with tokenizer.ggml.<key> set, or removed where the value is None."""
    plain = {**TINY[name]["metadata"], **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
    return as_metadata({k: v for k, v in plain.items() if v is not None})
