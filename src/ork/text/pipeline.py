"""The part of a tokenizer.json that spells a text and cuts it into words before merging, as data.

`{"normalizer": ..., "pre_tokenizer": ...}`, each a step of Hugging Face's `tokenizers` (`{"type": ...}`, a Sequence
holds several) or None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers

LINES: Final = r"[^\n]+|[\n]+"  # how gemma4 cuts text


def split_by(patterns: Sequence[str], byte_level: bool = False) -> dict[str, Any]:
    """Pre-tokenizer whose words are what each pattern in turn matches and leaves; byte_level: in GPT-2's spelling."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns
    ]
    if byte_level:
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False})
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def library_parts(pipeline: Mapping[str, Any]) -> tuple[Any, Any]:
    """(normalizer, pre-tokenizer), or None for one that is not there. Raises Exception, as `tokenizers` does."""
    document = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **pipeline}
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    return library.normalizer, library.pre_tokenizer


def without_prefix(pipeline: dict[str, Any], everywhere: bool = False) -> dict[str, Any]:
    """The same pipeline for text that does not start the input: `Metaspace` may prefix only the first piece.

    everywhere: for text in the middle of a piece, which nothing is put before.
    """

    def changed(node: Any) -> Any:
        if isinstance(node, list):
            return [changed(child) for child in node]
        if not isinstance(node, dict):
            return node
        kind = node.get("type")
        if kind == "Metaspace" and (everywhere or node.get("prepend_scheme") == "first"):
            return {**node, "prepend_scheme": "never", "add_prefix_space": False}
        if kind == "ByteLevel" and everywhere:
            return {**node, "add_prefix_space": False}
        if kind == "Prepend" and everywhere:
            return {"type": "Sequence", "normalizers": []}
        return {key: changed(child) for key, child in node.items()}

    rest: dict[str, Any] = changed(pipeline)
    return rest


def cuts_rests_alike(step: Any) -> bool:
    """Whether a pre-tokenizer cuts the rest of a text as it cut the whole, even if that rest begins within a word."""
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(cuts_rests_alike, step["pretokenizers"]))
    if step["type"] == "Split":
        pattern = step["pattern"]
        return bool(pattern.get("Regex") == LINES or len(pattern.get("String", "")) == 1)
    return bool(step["type"] == "Metaspace")
