"""Text to tokens and back.

Encoding is the `tokenizers` library's, decoding is ours: a piece is a slice of the vocabulary, so that a stream of
tokens becomes text without the library and without looking back.

Building the library's BPE object of a large vocabulary takes most of a second (262,144 tokens: 0.4 s on a fast core,
four times that on the board), yet a text can only ever become tokens that are substrings of it. So the first few
thousand characters are encoded with an object that holds just those tokens, made in milliseconds; only who encodes more
gets the whole. Both give the same tokens.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import models

from ork.errors import OrkError, PackDamaged, UsageError
from ork.text import blocks
from ork.text.pipeline import cuts_rests_alike, library_parts, without_prefix
from ork.text.ready import BYTE, BYTES, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Ready, lookup, u32, unpack
from ork.text.vocab import SPACE_MARK, build_tokenizer

__all__ = ["Decoder", "Tokenizer", "build_tokenizer"]

WHOLE_FROM: Final = 8192  # characters encoded so far, after which the whole vocabulary is loaded
START, LATER, WITHIN = range(3)  # a text, one behind a marker, the rest of either: where prefixes go


class Tokenizer:
    """`bos` and `eos` are ids or None; `eog` are the ids that end a generation. Safe to share between threads."""

    def __init__(self, ready: Ready):
        self._ready = ready
        self._texts = ready.texts()
        self._kinds = ready.kinds
        self._byte_level = ready.spelling == BYTES
        self._encoded = 0  # characters so far
        self._lock = threading.Lock()
        self.n_vocab = ready.n_vocab
        self.bos = ready.bos
        self.eos = ready.eos
        self.eog = frozenset(ready.eog)
        self.add_bos = ready.add_bos
        self.piece_bytes = lru_cache(maxsize=4096)(self._piece_bytes)

    @classmethod
    def load(cls, data: bytes | memoryview) -> Tokenizer:
        """From the bytes that `build_tokenizer` made, read in place. Raises PackDamaged."""
        return cls(unpack(data))

    def shared_with(self, other: Tokenizer) -> int:
        """How many ids, from 0 on, mean the same to both; 0 if the vocabularies differ.

        Texts, kinds, merges, markers and the way text is cut must agree on all ids that both have. One may be longer:
        heads of a family are often padded differently. What begins or ends a text is each model's own choice.
        """
        n = min(self.n_vocab, other.n_vocab)
        return n if _meaning(self._ready, n) == _meaning(other._ready, n) else 0

    # --- text to tokens

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Tokens of `text`.

        special: markers such as <|im_start|> in the text become their tokens; else they are plain text, as they must
        be in text from a stranger. User-defined tokens (runs of spaces, tags) are found either way.
        bos: start with the model's BOS token; None: as the model wants it, unless `text` itself starts with it.
        Raises UsageError for bos=True with a model that has none.
        """
        text = _valid(text)
        ids: list[int] = []
        starts = True  # text here gets the space prefix, if the model has one
        first = True
        for piece in self._markers(special).split(text):
            if isinstance(piece, int):
                ids.append(piece)
                starts = True
            else:
                prefixed = " " + piece if starts and self._ready.space_prefix else piece
                ids += self._encode_plain(prefixed, first)
                starts = False
            first = False
        if bos is None:
            bos = self.add_bos and ids[:1] != [self.bos]
        if bos and self.bos is None:
            raise UsageError("the model has no BOS token; leave bos out")
        return [self.bos, *ids] if bos and self.bos is not None else ids

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        self._encoded += len(text)
        try:
            whole = self._encoded > WHOLE_FROM
            model = self._whole if whole else self._restricted(self._words(text, first))
            start, rest = (self._library(model, place) for place in (START if first else LATER, WITHIN))
            return blocks.encode(text, start, rest, self._apart if self._cuts_rests else None)
        except OrkError:
            raise
        except BaseException as error:  # the library has no error class of its own; damage is the only cause
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                told = f"the tokenizer in the pack is inconsistent ({error}); convert the model again"
                raise PackDamaged(told) from None
            raise

    def _apart(self, left: int, right: int) -> bool:
        """Whether no token has the last character of one and the first of the other side by side."""
        return self._texts[left][-1:] + self._texts[right][:1] not in self._pairs

    @cached_property
    def _cuts_rests(self) -> bool:
        return cuts_rests_alike(self._ready.pipeline["pre_tokenizer"])

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Characters that stand side by side in tokens that merging can make."""
        texts = self._texts[:]
        return blocks.pairs_of([texts[i] for i in u32(self._ready.index_ids).tolist()])

    def _library(self, model: models.BPE, place: int) -> tokenizers.Tokenizer:
        library = tokenizers.Tokenizer(model)
        normalizer, pre_tokenizer = self._pipelines[place]
        if normalizer is not None:
            library.normalizer = normalizer
        if pre_tokenizer is not None:
            library.pre_tokenizer = pre_tokenizer
        return library

    @cached_property
    def _pipelines(self) -> list[tuple[Any, Any]]:
        """(normalizer, pre-tokenizer) for each of START, LATER, WITHIN."""
        pipeline = self._ready.pipeline
        places = (pipeline, without_prefix(pipeline), without_prefix(pipeline, everywhere=True))
        return [library_parts(p) for p in places]

    def _words(self, text: str, first: bool) -> set[str]:
        normalizer, pre_tokenizer = self._pipelines[START if first else LATER]
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        if pre_tokenizer is None:
            return {text}
        return {word for word, _ in pre_tokenizer.pre_tokenize_str(text)}

    def _restricted(self, words: Iterable[str]) -> models.BPE:
        """The library's model with only those tokens that `words` can contain."""
        longest = self._ready.longest
        parts = {w[i:j] for w in words for i in range(len(w)) for j in range(i + 1, min(i + longest, len(w)) + 1)}
        vocab = dict(lookup(self._ready, list(parts)))
        which = self._merge_of[np.fromiter(vocab.values(), np.int64, len(vocab))]
        return self._model(vocab, np.sort(which[which >= 0]))

    @property
    def _whole(self) -> models.BPE:
        with self._lock:
            return self._whole_once

    @cached_property
    def _whole_once(self) -> models.BPE:
        ids = u32(self._ready.index_ids).tolist()
        texts = self._texts[:]
        return self._model({texts[i]: i for i in ids}, np.arange(len(self._ready.merge_result) // 4))

    def _model(self, vocab: dict[str, int], which: Any) -> models.BPE:
        ready, texts = self._ready, self._texts
        if ready.byte_fallback:
            vocab |= self._byte_tokens
        name = {i: text for text, i in vocab.items()}
        left, right = (u32(view)[which].tolist() for view in (ready.merge_left, ready.merge_right))
        merges = [(name[a], name[b]) for a, b in zip(left, right)]
        options: dict[str, Any] = {}
        if ready.unk is not None:
            vocab[texts[ready.unk]] = ready.unk
            options["unk_token"] = texts[ready.unk]
        return models.BPE(
            vocab,
            merges,
            byte_fallback=ready.byte_fallback,
            ignore_merges=ready.ignore_merges,
            fuse_unk=ready.fuse_unk,
            **options,
        )

    @cached_property
    def _byte_tokens(self) -> dict[str, int]:
        return {self._texts[int(i)]: int(i) for i in np.flatnonzero(np.frombuffer(self._kinds, "u1") == BYTE)}

    @cached_property
    def _merge_of(self) -> Any:
        """The number of the merge that makes a token, -1 if none does: i64 [n_vocab]."""
        merge = np.full(self.n_vocab, -1, np.int64)
        result = u32(self._ready.merge_result)
        merge[result] = np.arange(len(result))
        return merge

    def _markers(self, special: bool) -> Markers:
        return self._all_markers if special else self._user_markers

    @cached_property
    def _all_markers(self) -> Markers:
        return Markers(self._ready, (CONTROL, USER, UNKNOWN))

    @cached_property
    def _user_markers(self) -> Markers:
        return Markers(self._ready, (USER,))

    # --- tokens to text

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`, in the middle of a text: SPM's space prefix is not removed, so that with such a model
        decode(encode(text, bos=False)) is " " + text. Bytes that are not UTF-8 become U+FFFD.

        special: markers are spelled out; else control tokens are silent. An id past the vocabulary (heads are often
        padded) is silent too.
        """
        return b"".join(self._bytes(i, special) for i in ids).decode("utf-8", "replace")

    def stream(self, special: bool = False) -> Decoder:
        """For one token at a time; the pushed texts and the flush together are what `decode` gives."""
        return Decoder(self, special)

    def piece(self, token: int) -> str:
        """How one token reads, control tokens included; a part of a character reads as U+FFFD."""
        return self.piece_bytes(token).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        return 0 <= token < self.n_vocab and self._kinds[token] in (CONTROL, UNKNOWN)

    def _bytes(self, token: int, special: bool) -> bytes:
        return b"" if not special and self.is_control(token) else self.piece_bytes(token)

    def _piece_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            return b""
        raw, kind = self._texts.raw(token), self._kinds[token]
        if kind == BYTE and (byte := re.fullmatch(rb"<0x([0-9A-Fa-f]{2})>", raw)):
            return bytes([int(byte[1], 16)])
        if kind not in (NORMAL, UNUSED):
            return raw
        if self._byte_level:
            return b"".join(_BYTE_OF.get(c) or c.encode() for c in raw.decode("utf-8", "replace"))
        return raw.replace(SPACE_MARK.encode(), b" ")


class Decoder:
    """Turns tokens into text as they come; an incomplete character is held back until its last byte is there."""

    def __init__(self, tokenizer: Tokenizer, special: bool):
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer._bytes(token, self._special))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; afterwards the decoder is as new."""
        return self._utf8.decode(b"", final=True)


class Markers:
    """Cuts text at tokens that are found before anything else, at each place the longest."""

    def __init__(self, ready: Ready, kinds: tuple[int, ...]):
        pairs = zip(ready.marker_texts, ready.marker_ids)
        self._ids = {text: i for text, i in pairs if ready.kinds[i] in kinds}
        self._left, self._right = set(ready.strip_left), set(ready.strip_right)
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}
        self._starts = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of text (never empty) and marker ids, in order."""
        done = at = 0
        strip = False  # the last marker swallows whitespace after it
        while self._starts and (candidate := self._starts.search(text, at)):
            at = candidate.start()
            marker = self._match(text, at)
            if marker is None:
                at += 1
                continue
            before = text[done:at].lstrip() if strip else text[done:at]
            token = self._ids[marker]
            if token in self._left:
                before = before.rstrip()
            if before:
                yield before
            yield token
            strip = token in self._right
            done = at = at + len(marker)
        rest = text[done:].lstrip() if strip else text[done:]
        if rest:
            yield rest

    def _match(self, text: str, at: int) -> str | None:
        for length in self._lengths[text[at]]:
            if text[at : at + length] in self._ids:
                return text[at : at + length]
        return None


def _meaning(ready: Ready, n: int) -> tuple[object, ...]:
    """All that says what the first n ids stand for, to compare."""
    texts = int(u32(ready.text_lengths)[:n].sum(dtype=np.uint64))
    merges = u32(ready.merge_result) < n
    listed = np.stack([u32(ready.merge_left), u32(ready.merge_right), u32(ready.merge_result)])[:, merges]
    markers = [pair for pair in zip(ready.marker_ids, ready.marker_texts) if pair[0] < n]
    return (
        *(ready.spelling, ready.pipeline, ready.space_prefix, ready.byte_fallback, ready.ignore_merges),
        bytes(ready.text_bytes[:texts]),
        bytes(ready.text_lengths[: 4 * n]),
        bytes(ready.kinds[:n]),
        listed.tobytes(),
        sorted(markers),
    )


def _valid(text: str) -> str:
    """Lone surrogates (undecodable bytes of an argument, halves from JSON) as U+FFFD: the library takes UTF-8 only."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(0x100 + i): bytes([b]) for i, b in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()
