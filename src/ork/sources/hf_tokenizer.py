"""A Hugging Face folder's tokenizer and chat template under GGUF's keys."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ork.errors import SourceError
from ork.sources.base import MetaValue
from ork.sources.hf_config import Config


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def tokenizer_metadata(
    config: Config, tokenizer: bytes | None, template: bytes | None, own: dict[str, Any], generation: dict[str, Any]
) -> dict[str, MetaValue]:
    """GGUF's tokenizer keys, and `tokenizer.huggingface.json`: the whole tokenizer.json.

    `own` is tokenizer_config.json, whose special tokens go before the numbers of config.json and
    generation_config.json (`generation`). If several tokens may end a text, `tokenizer.huggingface.eos_token_ids` has
    them all (i32 array).
    """
    meta: dict[str, MetaValue] = {}
    ids: dict[str, int] = {}
    if tokenizer is not None:
        try:
            meta["tokenizer.huggingface.json"] = tokenizer.decode()
            ids = {t.content: t.id for t in msgspec.json.decode(tokenizer, type=_AddedTokens).added_tokens}
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as e:
            where = config.path.parent / "tokenizer.json"
            raise SourceError(f"{where}: not a tokenizer ({str(e).splitlines()[0]}): download it again") from None
    if template is not None:
        meta["tokenizer.chat_template"] = template.decode("utf-8", "replace")
    elif (found := _template(own.get("chat_template"))) is not None:
        meta["tokenizer.chat_template"] = found

    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        entry = own.get(f"{name}_token")
        content = entry.get("content") if isinstance(entry, dict) else entry
        first = ids.get(content) if isinstance(content, str) else None
        listed = [_ids(c.get(f"{name}_token_id")) for c in (config.values, generation)]
        candidates = [first] if first is not None else [*listed[0], *listed[1]]
        if candidates:
            meta[f"tokenizer.ggml.{key}_token_id"] = candidates[0]
        if name == "eos":
            ends = sorted({*candidates[:1], *listed[0], *listed[1]})
            if len(ends) > 1:
                meta["tokenizer.huggingface.eos_token_ids"] = np.array(ends, np.int32)
        if isinstance(own.get(f"add_{name}_token"), bool):
            meta[f"tokenizer.ggml.add_{name}_token"] = own[f"add_{name}_token"]
    return meta


def _template(value: Any) -> str | None:
    """A chat template, or the default one of a list of named ones."""
    if isinstance(value, list):
        named = {
            t.get("name"): t.get("template") for t in value if isinstance(t, dict) and isinstance(t.get("name"), str)
        }
        value = named.get("default")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and 0 <= v < 1 << 31]
