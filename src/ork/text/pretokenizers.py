"""How byte-level BPE vocabularies cut text into words before merging: one row per kind of `tokenizer.ggml.pre`.

The patterns are those that the models were trained with, as their authors publish them (tokenizer.json) and as
llama.cpp lists them per name. Patterns of a row are applied one after another, each to the pieces of the one before;
what a pattern matches and what lies between two matches both become pieces.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class PreTokenizer(NamedTuple):
    names: tuple[str, ...]  # values of `tokenizer.ggml.pre`
    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # when the file does not say


_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)


def _words(digits: str, letters: str = r"\p{L}", suffix: str = _SUFFIX + "|") -> str:
    """The family of Llama 3: contractions, words with one leading sign, runs of digits, signs, line ends, spaces."""
    other = r"\p{L}\p{N}" if letters == r"\p{L}" else r"\p{L}\p{M}\p{N}"
    return rf"{suffix}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{other}]+[\r\n]*|\s*[\r\n]+|" + _SPACES


# Letters with case, as a list of ranges in the authors' file.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATION = r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

TABLE: Final = (
    PreTokenizer(
        ("default", ""),
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    PreTokenizer(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "a.x-4.0", "mellum"),
            *("gigachat", "modern-bert"),
        ),
        (_GPT2,),
    ),
    PreTokenizer(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        (_words(r"\p{N}{1,3}"),),
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer(("dbrx", "smaug-bpe", "chatglm-bpe"), (_words(r"\p{N}{1,3}"),)),
    PreTokenizer(("glm4", "glm5"), (_words(r"\p{N}{1,3}"),), ignore_merges=True),
    PreTokenizer(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        (_words(r"\p{N}"),),
    ),
    PreTokenizer(("qwen35",), (_words(r"\p{N}", letters=r"\p{L}\p{M}"),)),
    PreTokenizer(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    PreTokenizer(  # \s+$ is tried from the first space of a run only: from each, it takes the square of its length
        ("deepseek-llm",),
        (r"[\r\n]", r"\s?[" + _CASED + "]+", _PUNCTUATION, r"(?<!\s)\s+$", _CJK, r"\p{N}+"),
    ),
    PreTokenizer(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    PreTokenizer(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        (
            r"\p{N}{1,3}",
            _KANA,
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
        ),
    ),
    PreTokenizer(
        ("tekken",),
        (_CASED_WORD % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES,),
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer(
        ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
        (
            _CASED_WORD % (_SUFFIX + "?", _SUFFIX + "?")
            + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
            + _SPACES,
        ),
    ),
    PreTokenizer(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]|" + _SPACES,
        ),
    ),
    PreTokenizer(
        ("seed-coder",),
        (_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|" + _SPACES,),
    ),
)

BY_NAME: Final = {name: row for row in TABLE for name in row.names}
