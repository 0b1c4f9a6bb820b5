"""Metadata that make no sense are refused before a model is built from them, naming the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ork
from ork.errors import OrkError, SourceError
from ork.models import ARCHITECTURES, check_architecture, traits
from ork.models.config import Config, read_config
from tests import tiny


def read(arch: str = "llama", **changes: Any) -> Config:
    """The config of the tiny model; a change to None leaves the key out."""
    values = {k: v for k, v in {**tiny.metadata(arch), **changes}.items() if v is not None}
    return read_config(values, vocab=tiny.VOCAB, tied=False, **traits(ARCHITECTURES[tiny.architecture(arch)]))


def test_what_a_complete_model_says() -> None:
    c = read()
    assert (c.layers, c.width, c.ffn, c.heads, c.kv_heads, c.head_dim) == (2, 64, 96, 4, 2, 16)
    assert (c.vocab, c.context, c.rope_dim, c.window) == (tiny.VOCAB, 2048, 16, 0)
    assert c.attention_scale == 0.25


NEEDED = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_a_missing_key_is_named(arch: str, key: str) -> None:
    with pytest.raises(SourceError, match=rf"{arch}\.{key} is missing"):
        read(arch, **{f"{arch}.{key}": None})


BAD = {
    "block_count": [0, -1, 1025, 2**40, 1.5, "2", True, np.array([1, 2])],
    "embedding_length": [0, 2**21],
    "feed_forward_length": [0, -3, np.array([96, 128])],
    "context_length": [0, 2**31],
    "attention.head_count": [0, 1025, 1e300],
    "attention.head_count_kv": [0, 5, 3],
    "attention.key_length": [0, 1025],
    "attention.value_length": [17],
    "attention.layer_norm_rms_epsilon": [float("nan"), float("inf"), -1e-5, "x"],
    "attention.sliding_window": [-1],
    "attention.scale": [-1.0, float("nan")],
    "attn_logit_softcapping": [-30.0],
    "final_logit_softcapping": [-30.0],
    "rope.dimension_count": [1, 17, 0],
    "rope.freq_base": [0.0, -1.0, float("inf")],
    "rope.freq_base_swa": [0.0],
    "rope.scale_linear": [0.0, -2.0],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_nonsense_is_named(key: str, value: Any) -> None:
    with pytest.raises(SourceError) as e:
        read(**{f"llama.{key}": value})
    assert key in str(e.value) or "key heads" in str(e.value)
    assert "\n" not in str(e.value)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(SourceError, match="4 query heads cannot share 3 key heads"):
        read(**{"llama.attention.head_count_kv": 3})
    with pytest.raises(SourceError, match="64 does not divide into 5 heads"):
        read(
            **{"llama.attention.head_count": 5, "llama.attention.head_count_kv": 5, "llama.attention.key_length": None}
        )


def test_an_array_whose_layers_agree_is_a_number() -> None:
    assert read(**{"llama.attention.head_count_kv": np.array([2, 2], np.uint32)}).kv_heads == 2


@pytest.mark.parametrize("kind", ["yarn", "longrope", "su", 7])
def test_rope_scaling_is_named(kind: Any) -> None:
    with pytest.raises(SourceError, match=rf"rope scaling '{kind}' is not supported; known are none, linear"):
        read(**{"llama.rope.scaling.type": kind})


def test_linear_scaling() -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert read(**scaling).rope_scaling.factor == 4
    assert read(**{"llama.rope.scale_linear": 4.0}).rope_scaling.factor == 4
    with pytest.raises(SourceError, match=r"rope\.scaling\.factor"):
        read(**{**scaling, "llama.rope.scaling.factor": 0.0})


def test_window_patterns() -> None:
    window = {"gemma3.block_count": 7, "gemma3.attention.sliding_window": 100}

    def pattern(value: Any, default: int = 6) -> list[bool]:
        values = {**tiny.metadata("gemma3"), **window, "gemma3.attention.sliding_window_pattern": value}
        values = {k: v for k, v in values.items() if v is not None}
        return list(read_config(values, vocab=9, tied=True, default_pattern=default).window_pattern)

    assert pattern(None) == [True] * 5 + [False, True]
    assert pattern(3) == [True, True, False, True, True, False, True]
    listed = np.array([0, 1, 1, 0, 1, 1, 0], bool)
    assert pattern(listed) == listed.tolist()
    with pytest.raises(SourceError, match="names 3 of 7 layers"):
        pattern(listed[:3])
    for bad in ("6", -6, True, 1.5):
        with pytest.raises(SourceError, match="sliding_window_pattern"):
            pattern(bad)


@pytest.mark.parametrize("arch", ["mamba", "", None, 3, "Llama"])
def test_unknown_architecture_names_the_known(arch: Any) -> None:
    with pytest.raises(SourceError, match="known are llama, qwen2, qwen3, gemma3, qwen2moe"):
        check_architecture(arch)


VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.booleans(), st.text(max_size=5), st.just(np.arange(3))
)
KEYS = sorted({*NEEDED, *BAD, "rope.scaling.type", "rope.scaling.factor", "attention.sliding_window_pattern"})


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_anything_is_a_config_or_a_refusal(changes: dict[str, Any]) -> None:
    try:
        c = read("gemma3", **{f"gemma3.{k}": v for k, v in changes.items()})
    except OrkError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert c.heads % c.kv_heads == 0
    assert len(c.window_pattern) == c.layers
    assert c.rope_base > 0
    assert c.rope_scaling.factor > 0
    assert c.eps >= 0


# --- tensors that do not fit the metadata


def load(path: Path, tensors: dict[str, np.ndarray], arch: str = "llama", **changes: Any) -> ork.LoadedModel:
    return ork.load(tiny.write(path, tiny.metadata(arch, **changes), tensors))


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_up.weight", "blk.0.attn_norm.weight", "output_norm.weight", "token_embd.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = tiny.random_tensors()
    del tensors[name]
    with pytest.raises(OrkError, match=name):
        load(tmp_path / "x.gguf", tensors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("blk.1.ffn_up.weight", (96, 65)), ("blk.0.attn_norm.weight", (63,)), ("blk.0.attn_k.weight", (64, 64))],
)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = tiny.random_tensors() | {name: np.ones(shape, np.float32)}
    with pytest.raises(OrkError, match=name):
        load(tmp_path / "x.gguf", tensors)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_rope_divisors_that_are_none(tmp_path: Path, bad: float) -> None:
    divisors = np.ones(8, np.float32)
    divisors[3] = bad
    with pytest.raises(OrkError, match=r"rope_freqs\.weight"):
        load(tmp_path / "x.gguf", tiny.random_tensors() | {"rope_freqs.weight": divisors})
