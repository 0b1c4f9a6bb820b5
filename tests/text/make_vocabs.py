"""Derive the two small vocabularies of the tests, and what the plain reference makes of some texts: tiny_vocabs.json.

Run by hand: `python -m tests.text.make_vocabs`. The corpus is the project's licence and a few lines in other scripts.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.text import reference

HERE = Path(__file__).parent
SAMPLES = [
    *("", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "a", "the", " the", "the the", "Hello world"),
    *(" Hello, World!", "w048 7tuijk dsdfhu", "1234567890", "3", "33", "333", "it's I'll we've you'd", "' era"),
    *("the Software is", "copyright notice\nand this permission", "THE SOFTWARE", "x" * 40, " " * 23 + "end"),
    *("нещо на Български", "我想在apple工作1314151天～", "កាន់តែពិសេស", "🚀 (normal) 😶‍🌫️ ✅", "\u2581\u2581", "e\u0301é"),
    *("<|user|> hi <tag></tag><s>", "<tag><tag >", "\x00\x1c\x85\u2028\u3000x", "<0x41>", "a\r\nb \r\n c", "½²٣"),
]


def corpus() -> str:
    licence = (HERE.parent.parent / "LICENSE").read_text()
    return licence + "\nнещо на Български. 我想在 it's 12 the the 3,5\n    if x == 1:\n        return\n" * 3


def merge_pairs(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    """Byte-pair training: join the most frequent pair, again and again."""
    merges = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        best = max(sorted(pairs), key=pairs.__getitem__)
        merges.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, n in words.items():
            parts, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    parts.append(word[i] + word[i + 1])
                    i += 2
                else:
                    parts.append(word[i])
                    i += 1
            joined[tuple(parts)] += n
        words = joined
    return merges


def byte_level(size: int = 600) -> dict[str, Any]:
    words = Counter(tuple(reference.LETTERS[b] for b in w.encode()) for w in reference.smollm_words(corpus()))
    special = ["<|end|>", "<|user|>", "<tag>"]
    merges = merge_pairs(words, size - 256 - len(special))
    tokens = reference.LETTERS + [a + b for a, b in merges]
    known = set(tokens)
    # Every other way to split a token too, as some files have it: most can never happen, and none may change a text.
    rest = [(t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in known and t[i:] in known]
    merges += [pair for pair in rest if pair not in set(merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*special, *tokens],
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * len(tokens)],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def sentencepiece(size: int = 600) -> dict[str, Any]:
    text = "\u2581" + corpus().replace(" ", "\u2581")
    lines = Counter(tuple("\u2581" + w) for w in text.split("\u2581") if w)
    runs = ["\u2581" * n for n in range(2, 9)]
    letters = sorted(set(text))
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<tag>"]
    made = [a + b for a, b in merge_pairs(lines, size - 256 - len(letters) - len(runs) - len(special))]
    made = list(dict.fromkeys(made))
    letters = [c for c in letters if c not in made]
    normal = [*made, *runs, *letters]
    scores = [*(-float(i) for i in range(len(made))), *[-1e9] * len(runs), *(-1000.0 - i for i in range(len(letters)))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *(f"<0x{b:02X}>" for b in range(256)), *normal],
        "tokenizer.ggml.scores": [*[0.0] * (len(special) + 256), *scores],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 4, *[6] * 256, *[1] * len(normal)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def main() -> None:
    both = {}
    for name, metadata, encode in (("bpe", byte_level(), reference.bpe), ("spm", sentencepiece(), reference.spm)):
        both[name] = {"metadata": metadata, "golden": [[text, encode(metadata, text)] for text in SAMPLES]}
    text = json.dumps(both, ensure_ascii=True, separators=(",", ":"))
    (HERE / "tiny_vocabs.json").write_text(text.replace('],["', '],\n["') + "\n")


if __name__ == "__main__":
    main()
