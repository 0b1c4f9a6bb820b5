"""Plain and slow tokenizers, written from the definitions: the oracle of the tests. No merge table, no library.

BPE: cut into words, spell them in GPT-2's byte alphabet, then join the pair that stands first in the list of merges,
the leftmost if it occurs twice, until none is left. SPM: join the two neighbours whose joined text is the token with
the best score, the leftmost on a tie, until none is left; what is no token becomes its bytes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

CONTROL, USER, BYTE = 3, 4, 6


def letters() -> list[str]:
    """GPT-2's spelling of the 256 byte values."""
    spelled, extra = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            spelled.append(chr(byte))
        else:
            spelled.append(chr(256 + extra))
            extra += 1
    return spelled


LETTERS = letters()


def gpt2_words(text: str) -> Iterator[str]:
    """'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S), and what is left between."""

    def kind(i: int) -> str:
        if i >= len(text):
            return ""
        if text[i].isspace() and not 0x1C <= ord(text[i]) <= 0x1F:  # Python counts four control codes, regexes do not
            return "s"
        return {"L": "l", "N": "n"}.get(unicodedata.category(text[i])[0], "o")

    at = 0
    while at < len(text):
        end = next((at + len(s) for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(s, at)), at)
        if end == at:
            start = at + 1 if text[at] == " " and kind(at + 1) in ("l", "n", "o") else at
            end = start
            while kind(end) == kind(start):
                end += 1
            if kind(start) == "s" and kind(end) and end > start + 1:
                end -= 1  # the last space belongs to the word after it
        yield text[at:end]
        at = end


def smollm_words(text: str) -> Iterator[str]:
    """Every digit alone, the rest as GPT-2."""
    rest = ""
    for c in text:
        if unicodedata.category(c)[0] == "N":
            yield from gpt2_words(rest)
            yield c
            rest = ""
        else:
            rest += c
    yield from gpt2_words(rest)


def bpe(metadata: Mapping[str, Any], text: str) -> list[int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    rank = {tuple(m.split(" ")): i for i, m in reversed(list(enumerate(metadata["tokenizer.ggml.merges"])))}
    words = {"smollm": smollm_words, "gpt-2": gpt2_words}[metadata["tokenizer.ggml.pre"]]
    ids: list[int] = []
    for piece in cut(text, {t: i for i, (t, k) in enumerate(zip(tokens, types)) if k == USER}):
        if isinstance(piece, int):
            ids.append(piece)
            continue
        for word in words(piece):
            parts = [LETTERS[b] for b in word.encode()]
            while True:
                pairs = [(rank[p], i) for i, p in enumerate(pairwise(parts)) if p in rank]
                if not pairs:
                    break
                i = min(pairs)[1]
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [tokens.index(p) for p in parts]
    return ids


def spm(metadata: Mapping[str, Any], text: str) -> list[int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    ids: list[int] = []
    starts = True
    for piece in cut(text, {t: i for i, (t, k) in enumerate(zip(tokens, types)) if k == USER}):
        if isinstance(piece, int):
            ids.append(piece)
            starts = True
            continue
        prefix = " " if starts and metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
        starts = False
        parts = list((prefix + piece).replace(" ", "\u2581"))
        known = {t: scores[i] for i, (t, k) in enumerate(zip(tokens, types)) if k not in (CONTROL, BYTE)}
        while True:
            pairs = [(-known[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]
            if not pairs:
                break
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for part in parts:
            if part in known:
                ids.append(tokens.index(part))
            else:
                ids += [tokens.index(f"<0x{b:02X}>") for b in part.encode()]
    return ids


def cut(text: str, markers: Mapping[str, int]) -> Iterator[str | int]:
    at = start = 0
    while at < len(text):
        found = max((m for m in markers if text.startswith(m, at)), key=len, default="")
        if found:
            if start < at:
                yield text[start:at]
            yield markers[found]
            start = at + len(found)
        at = max(at + 1, start)
    if start < len(text):
        yield text[start:]
