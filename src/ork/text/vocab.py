"""From a model's metadata to the ready tokenizer, once, when the model is converted.

Facts about GGUF's tokenizer keys, token types and defaults per kind are llama.cpp's (llama-vocab.cpp) and the GGUF
specification's; tokenizer.json is the format of Hugging Face's `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork import native
from ork.errors import SourceError
from ork.sources.base import MetaValue
from ork.strings import StringTable
from ork.text import pretokenizers
from ork.text.pipeline import LINES, library_parts, split_by
from ork.text.ready import BYTE, BYTES, CONTROL, NORMAL, SPACES, UNKNOWN, UNUSED, USER, VERSION, Ready, pack, text_hash

HUGGINGFACE: Final = "tokenizer.huggingface.json"
KINDS: Final = "gpt2 (byte-level BPE), llama (SentencePiece BPE), gemma4"
OTHER_KINDS: Final = {
    "bert": "WordPiece",
    "t5": "unigram",
    "rwkv": "RWKV's greedy trie",
    "plamo2": "PLaMo-2's",
    "hybriddna": "a DNA k-mer",
    "whitespace": "a whitespace",
    "no_vocab": "no",
    "none": "no",
}
# Texts that end a generation wherever a vocabulary has them (llama.cpp collects the same) ...
EOG_TEXTS: Final = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|eom_id|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<｜end▁of▁sentence｜>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    )
)
# ... and those that only do where the file marks them as control tokens: some vocabularies have them as plain text.
EOG_CONTROL_TEXTS: Final = frozenset(("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["))
SPACE_MARK: Final = "\u2581"


Kinds = npt.NDArray[np.uint8]
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


@dataclass(frozen=True)
class _Vocabulary:
    """The texts of all tokens, as bytes in one piece and as Python's strings."""

    table: StringTable
    texts: list[str]
    characters: npt.NDArray[np.int64]  # of each text

    @classmethod
    def of(cls, tokens: StringTable) -> _Vocabulary:
        table = tokens.utf8()
        return cls(table, *table.decoded())

    @property
    def arrays(self) -> Arrays:
        """Bytes, starts and lengths, as native calls take them."""
        return _arrays(self.table)


def _arrays(table: StringTable) -> Arrays:
    return np.frombuffer(table.data, np.uint8), table.starts, table.lengths


def _mergeable(kinds: Kinds) -> npt.NDArray[np.uint8]:
    """1 for tokens that merging may make: never a control or byte token, however it is typed."""
    return np.isin(kinds, (NORMAL, USER, UNUSED)).astype(np.uint8)


def build_tokenizer(metadata: Mapping[str, MetaValue]) -> bytes:
    """The bytes that `Tokenizer.load` reads, from GGUF keys or from `tokenizer.huggingface.json`.

    Raises SourceError, naming the key, for a vocabulary that is missing, inconsistent or of a kind not handled.
    """
    if HUGGINGFACE in metadata:
        return pack(_from_huggingface(metadata))
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise SourceError("tokenizer.ggml.model is missing: the model file has no tokenizer")
    if model in OTHER_KINDS:
        raise SourceError(
            f"tokenizer.ggml.model is {model!r}: {OTHER_KINDS[model]} tokenizer is not supported; known are {KINDS}"
        )
    if model not in ("gpt2", "llama", "gemma4"):
        raise SourceError(f"tokenizer.ggml.model is {model!r}, which is unknown; known are {KINDS}")
    return pack(_from_gguf(model, metadata))


# --- GGUF -----------------------------------------------------------------------------------------------------------


def _from_gguf(model: str, metadata: Mapping[str, MetaValue]) -> Ready:
    tokens = _table(metadata, "tokens")
    if tokens is None or not len(tokens):
        raise SourceError("tokenizer.ggml.tokens is missing: the model file has no vocabulary")
    vocabulary = _Vocabulary.of(tokens)
    n = len(tokens)
    specials = {key: _id(metadata, key, n) for key in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    kinds = _kinds(metadata, n, specials.values())
    if model == "llama":
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
        specials |= {k: v for k, v in defaults.items() if specials[k] is None and v < n}
        merges = _merges_by_score(vocabulary, kinds, _scores(metadata, n))
        pipeline: dict[str, Any] = {"pre_tokenizer": None}
        spelling, ignore_merges, add_bos = SPACES, False, True
    else:
        pre = "gemma4" if model == "gemma4" else metadata.get("tokenizer.ggml.pre", "")
        if pre == "gemma4":  # SPM's spelling with explicit merges; lines are merged one by one
            pipeline, spelling, ignore_merges, add_bos = split_by([LINES]), SPACES, False, True
        else:
            row = pretokenizers.BY_NAME.get(str(pre))
            if row is None:
                known = ", ".join(sorted(name for name in pretokenizers.BY_NAME if name))
                raise SourceError(f"tokenizer.ggml.pre is {pre!r}, which is unknown; known are {known}, gemma4")
            pipeline, spelling = split_by(row.patterns, byte_level=True), BYTES
            ignore_merges, add_bos = row.ignore_merges, row.add_bos
        listed = _table(metadata, "merges")
        if listed is None:
            raise SourceError("tokenizer.ggml.merges is missing: a BPE vocabulary cannot be used without")
        merges = _merges_as_listed(vocabulary, kinds, listed)
    if spelling == SPACES:
        space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
        pipeline = {"normalizer": space, **pipeline}
    ready = _ready(
        vocabulary,
        kinds,
        merges,
        spelling=spelling,
        pipeline={"normalizer": None, **pipeline},
        bos=specials["bos"],
        eos=specials["eos"],
        unk=specials["unknown"] if spelling == SPACES else None,
        also_eog=(specials["eot"], specials["eom"]),
    )
    ready.byte_fallback = spelling == SPACES
    ready.ignore_merges = ignore_merges
    ready.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and ready.bos is not None
    ready.space_prefix = model == "llama" and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if "phi-3" in str(metadata.get("general.name", "")).lower():  # its markers swallow what follows; GGUF cannot say so
        keep = {"<unk>", "<s>", "<|endoftext|>"}
        ready.strip_right = [i for t, i in zip(ready.marker_texts, ready.marker_ids) if t not in keep]
    return ready


def _table(metadata: Mapping[str, MetaValue], key: str) -> StringTable | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and not isinstance(value, StringTable):
        raise SourceError(f"tokenizer.ggml.{key} is not an array of strings")
    return value


def _id(metadata: Mapping[str, MetaValue], key: str, n: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n:
        raise SourceError(f"tokenizer.ggml.{key}_token_id is {value}, outside of the vocabulary of {n} tokens")
    return value


def _numbers(metadata: Mapping[str, MetaValue], key: str, n: int) -> npt.NDArray[np.float64] | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf" or len(value) != n:
        raise SourceError(f"tokenizer.ggml.{key} is not an array of {n} numbers, one for each token")
    return value.astype(np.float64)


def _kinds(metadata: Mapping[str, MetaValue], n: int, specials: Iterable[int | None]) -> Kinds:
    numbers = _numbers(metadata, "token_type", n)
    if numbers is None:
        kinds = np.full(n, NORMAL, np.uint8)
        kinds[[i for i in specials if i is not None]] = CONTROL
        return kinds
    return np.where((numbers >= NORMAL) & (numbers <= BYTE), numbers, UNUSED).astype(np.uint8)


def _scores(metadata: Mapping[str, MetaValue], n: int) -> npt.NDArray[np.float64]:
    scores = _numbers(metadata, "scores", n)
    if scores is None:
        raise SourceError("tokenizer.ggml.scores is missing: a SentencePiece vocabulary cannot be used without")
    if not np.isfinite(scores).all():
        raise SourceError("tokenizer.ggml.scores holds numbers that are not finite")
    return scores


# --- tokenizer.json -------------------------------------------------------------------------------------------------


def _from_huggingface(metadata: Mapping[str, MetaValue]) -> Ready:
    try:
        doc = json.loads(str(metadata[HUGGINGFACE]))
        return _from_document(doc, metadata)
    except SourceError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"tokenizer.json is damaged: {type(error).__name__}: {error}") from None


def _from_document(doc: dict[str, Any], metadata: Mapping[str, MetaValue]) -> Ready:
    model = doc["model"]
    if model.get("type") != "BPE":
        raise SourceError(f"tokenizer.json: a {model.get('type')} tokenizer is not supported; known is BPE")
    for odd in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(odd):
            raise SourceError(f"tokenizer.json: model.{odd} is not supported")
    added = doc.get("added_tokens") or []
    if any(token.get("single_word") for token in added):
        raise SourceError("tokenizer.json: an added token with single_word is not supported")
    by_id = {int(i): str(text) for text, i in model["vocab"].items()} | {int(t["id"]): t["content"] for t in added}
    n = max(by_id) + 1
    if min(by_id) < 0 or n > 2 * len(by_id) + 4096:
        raise SourceError("tokenizer.json: the token numbers have holes")
    texts = [by_id.get(i, "") for i in range(n)]
    kinds = np.array([NORMAL if i in by_id else UNUSED for i in range(n)], np.uint8)
    fallback = bool(model.get("byte_fallback"))
    if fallback:
        for i, text in enumerate(texts):
            if _is_byte(text):
                kinds[i] = BYTE
    for token in added:
        kinds[token["id"]] = CONTROL if token.get("special") else USER
    pipeline = {"normalizer": doc.get("normalizer"), "pre_tokenizer": doc.get("pre_tokenizer")}
    try:
        library_parts(pipeline)
    except Exception as error:  # the library has no error class of its own
        raise SourceError(f"tokenizer.json: normalizer or pre_tokenizer is not supported: {error}") from None
    bos = _template_bos(doc.get("post_processor"))
    vocabulary = _Vocabulary.of(StringTable.of(texts))
    ready = _ready(
        vocabulary,
        kinds,
        _merges_as_listed(vocabulary, kinds, *_listed(model["merges"])),
        spelling=BYTES if '"ByteLevel"' in json.dumps(pipeline) else SPACES,
        pipeline=pipeline,
        bos=bos if bos is not None else _id(metadata, "bos", n),
        eos=_id(metadata, "eos", n),
        unk=texts.index(model["unk_token"]) if model.get("unk_token") in texts else None,
        also_eog=(_id(metadata, "eot", n), _id(metadata, "eom", n), *_ends(metadata, n)),
    )
    ready.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", bos is not None)) and ready.bos is not None
    ready.byte_fallback = fallback
    ready.ignore_merges = bool(model.get("ignore_merges"))
    ready.fuse_unk = bool(model.get("fuse_unk"))
    ready.strip_left = [t["id"] for t in added if t.get("lstrip")]
    ready.strip_right = [t["id"] for t in added if t.get("rstrip")]
    return ready


def _ends(metadata: Mapping[str, MetaValue], n: int) -> list[int]:
    """The several tokens that generation_config.json may name as ends."""
    value = metadata.get("tokenizer.huggingface.eos_token_ids")
    ids: list[int] = value.tolist() if isinstance(value, np.ndarray) else []
    if any(not 0 <= i < n for i in ids):
        raise SourceError(f"eos_token_id is {ids}, outside of the vocabulary of {n} tokens")
    return ids


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _template_bos(post: dict[str, Any] | None) -> int | None:
    """The token that tokenizer.json's template puts before a single text."""
    for step in [post] if post and post["type"] != "Sequence" else (post or {}).get("processors", []):
        if step["type"] == "TemplateProcessing" and step["single"] and "SpecialToken" in step["single"][0]:
            return int(step["special_tokens"][step["single"][0]["SpecialToken"]["id"]]["ids"][0])
    return None


# --- merges ---------------------------------------------------------------------------------------------------------

Merges = npt.NDArray[np.uint32]  # [n, 3]: left, right, result; best first


def _listed(merges: Sequence[Any]) -> tuple[StringTable, npt.NDArray[np.uint64]]:
    """The merges of a tokenizer.json, each "left right" or [left, right], and the bytes of their left parts."""
    pairs = [m if isinstance(m, list) else _pair(m) for m in merges]
    pairs = [pair for pair in pairs if len(pair) == 2]
    lines = StringTable.of(f"{left} {right}" for left, right in pairs)
    return lines, np.array([len(left.encode()) for left, _ in pairs], np.uint64)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the left part may itself be or start with a space
    return merge[:1] + left, right


def _merges_by_score(vocabulary: _Vocabulary, kinds: Kinds, scores: npt.NDArray[np.float64]) -> Merges:
    """SPM joins any two neighbours whose joined text is a token, the best score first, the leftmost on a tie.

    Among equal scores the longer text goes first: then a run of one character (the only case of ties in vocabularies
    of this kind: spaces, line ends) grows from its left end as it does when the leftmost pair is taken each time.
    Tokens whose letters are not all tokens are left out: SentencePiece makes none.
    """
    return native.merges_by_score(*vocabulary.arrays, _mergeable(kinds), scores)


def _merges_as_listed(
    vocabulary: _Vocabulary, kinds: Kinds, listed: StringTable, cuts: npt.NDArray[np.uint64] | None = None
) -> Merges:
    """One merge a token. Of the pairs that make the same token only one ever does: the last merge of its own text.

    While a token forms inside a longer text, no merge crosses its ends (else it would not form), and the best merge
    of all that lies inside is the best of those inside. So the same merges happen in the same order as if the token's
    text stood alone, and the last one is always the same pair. Tokens that do not form alone never form.
    Vocabularies that list every way to split a token lose half of their merges by this, and start faster.

    Without `cuts` the left part of a listed merge ends at the first space behind its first character.
    """
    table = listed.utf8()
    return native.merges_as_listed(*vocabulary.arrays, _mergeable(kinds), *_arrays(table), cuts)


# --- what both have in common ---------------------------------------------------------------------------------------


def _ready(
    vocabulary: _Vocabulary,
    kinds: Kinds,
    merges: Merges,
    *,
    spelling: str,
    pipeline: dict[str, Any],
    bos: int | None,
    eos: int | None,
    unk: int | None,
    also_eog: Iterable[int | None],
) -> Ready:
    texts = vocabulary.texts
    ends = [i for i, t in enumerate(texts) if t in EOG_TEXTS and kinds[i] in (NORMAL, USER)]
    kinds = kinds.copy()
    kinds[ends] = CONTROL
    markers = {texts[i]: i for i in np.flatnonzero(np.isin(kinds, (CONTROL, USER, UNKNOWN))).tolist() if texts[i]}
    made = native.distinct_texts(*vocabulary.arrays, _mergeable(kinds))
    hashes = np.array([text_hash(texts[i].encode()) for i in made.tolist()], np.uint64)
    index = np.argsort(hashes, kind="stable")
    blob, lengths = vocabulary.table.packed()
    left, right, result = merges.T

    def view(array: Any, dtype: str) -> memoryview:
        return memoryview(np.ascontiguousarray(array, dtype).tobytes())

    return Ready(
        version=VERSION,
        spelling=spelling,
        text_bytes=memoryview(blob),
        text_lengths=view(lengths, "<u4"),
        kinds=view(kinds, "u1"),
        merge_left=view(left, "<u4"),
        merge_right=view(right, "<u4"),
        merge_result=view(result, "<u4"),
        index_hashes=view(hashes[index], "<u8"),
        index_ids=view(made[index], "<u4"),
        marker_texts=list(markers),
        marker_ids=list(markers.values()),
        eog=_eog(texts, kinds, (eos, *also_eog)),
        longest=int(vocabulary.characters[made].max(initial=1)) if len(made) else 1,
        pipeline=pipeline,
        bos=bos,
        eos=eos,
        unk=unk,
    )


def _eog(texts: Sequence[str], kinds: Kinds, named: Iterable[int | None]) -> list[int]:
    control = np.flatnonzero(kinds == CONTROL).tolist()
    found = {texts[i]: i for i in control if texts[i] in EOG_TEXTS or texts[i] in EOG_CONTROL_TEXTS}
    if "<|end|>" in found and (
        {"<|return|>", "<|call|>"} <= found.keys() or {"<|calls|>", "<|flush|>"} <= found.keys()
    ):
        del found["<|end|>"]  # there it ends a part of the answer, not the answer
    return sorted({*found.values(), *(i for i in named if i is not None)})
