"""Hugging Face folders of mixtures of experts, experts one by one or stacked: the keys and tensors of the same GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ork.build.convert import convert
from ork.errors import SourceError
from ork.pack import Pack
from ork.quant.recipe import builtin
from ork.sources.base import matrices, open_source, read_weight
from tests import tiny

COMMON = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": tiny.VOCAB,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "num_experts_per_tok": tiny.USED, "intermediate_size": 96, "hidden_act": "silu",
}  # fmt: skip
ONE_SIZE = {"intermediate_size": tiny.INNER}
QWEN = {"num_experts": tiny.EXPERTS, "moe_intermediate_size": tiny.INNER, "head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": tiny.EXPERTS, **ONE_SIZE},
    "qwen2moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 56, "norm_topk_prob": False, **QWEN},
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, **QWEN},
    "olmoe": {"model_type": "olmoe", "num_experts": tiny.EXPERTS, "norm_topk_prob": False, **ONE_SIZE},
    "granitemoe": {
        "model_type": "granitemoe", "num_local_experts": tiny.EXPERTS, "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, **ONE_SIZE,
    },
    "lfm2moe": {
        "model_type": "lfm2_moe", "num_experts": tiny.EXPERTS, "moe_intermediate_size": tiny.INNER, "norm_eps": 1e-5,
        "num_dense_layers": 1, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "norm_topk_prob": True,
        "tie_word_embeddings": True, "use_expert_bias": True,
    },
}  # fmt: skip
TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "token_embd_norm": "embedding_norm"}
ATTENTION = {f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"} | {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
SHARED = {f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}
SHARED |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
LFM2 = ATTENTION | {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "exp_probs_b": "feed_forward.expert_bias",
    **{f"shortconv.{p}": f"conv.{p}" for p in ("in_proj", "conv", "out_proj")},
    **{f"ffn_{p}": f"feed_forward.w{n}" for p, n in (("gate", 1), ("down", 2), ("up", 3))},
}
BLOCK = {"mixtral": "block_sparse_moe", "granitemoe": "block_sparse_moe", "lfm2moe": "feed_forward"}


def halves_of_heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs to halves, as checkpoints have them."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def checkpoint(arch: str, tensors: dict[str, np.ndarray], stacked: bool) -> dict[str, np.ndarray]:
    """The same weights under the names of the hub's checkpoints, or `stacked` as newer versions save them."""
    names = LFM2 if arch == "lfm2moe" else ATTENTION | SHARED
    block, w = BLOCK.get(arch, "mlp"), {"gate": "w1", "down": "w2", "up": "w3"}
    out: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        stem, part = name.rsplit(".", 1)
        if not stem.startswith("blk."):
            out["lm_head.weight" if stem == "output" else f"model.{TOP[stem]}.weight"] = values
            continue
        _, layer, role = stem.split(".", 2)
        at = f"model.layers.{layer}."
        if role == "ffn_gate_inp":
            out[f"{at}{block}.{'router.layer' if arch == 'granitemoe' else 'gate'}.weight"] = values
        elif role.endswith("_exps"):
            projection = role.split("_")[1]
            gates = tensors[f"blk.{layer}.ffn_gate_exps.weight"]
            if projection == "gate" and (stacked or arch == "granitemoe"):
                continue  # with up
            if arch == "granitemoe":
                both, down = (f"{at}{block}.{n}_linear.weight" for n in ("input", "output"))
            else:
                both, down = (f"{at}{block}.experts.{n}_proj" for n in ("gate_up", "down"))
            if stacked or arch == "granitemoe":
                up = projection == "up"
                out[both if up else down] = np.concatenate([gates, values], axis=1) if up else values
                continue
            for e, matrix in enumerate(values):
                one = w[projection] if arch in ("mixtral", "lfm2moe") else f"{projection}_proj"
                out[f"{at}{block}.experts.{e}.{one}.weight"] = np.ascontiguousarray(matrix)
        elif role == "exp_probs_b":
            out[at + names[role]] = values
        else:
            out[f"{at}{names[role]}.{part}"] = other(arch, role, values)
    return out


def other(arch: str, role: str, values: np.ndarray) -> np.ndarray:
    if arch in ("mixtral", "granitemoe") and role in ("attn_q", "attn_k"):
        return halves_of_heads(values, 4 if role == "attn_q" else 2)
    if role == "shortconv.conv":
        return values[:, None]
    return values[None] if role == "ffn_gate_inp_shexp" else values


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("arch", tiny.MOE)
def test_the_same_model_as_from_a_gguf(tmp_path: Path, arch: str, stacked: bool) -> None:
    tensors = tiny.random_tensors(arch)
    gguf = open_source(tiny.write(tmp_path / "m.gguf", tiny.metadata(arch), tensors))
    folder = write(tmp_path / "hf", COMMON | CONFIGS[arch], checkpoint(arch, tensors, stacked))
    source = open_source(folder)
    name = tiny.architecture(arch)
    for key, value in gguf.metadata.items():
        if key.startswith(f"{name}."):
            assert np.allclose(source.metadata[key], value, rtol=1e-7), key  # GGUF's floats are f32
    weights = {n: shape for t in gguf.tensors.values() for n, shape in matrices(t).items()}
    assert {n: shape for t in source.tensors.values() for n, shape in matrices(t).items()} == weights
    for n, (rows, _) in weights.items():
        assert np.array_equal(read_weight(source, n, 0, rows), read_weight(gguf, n, 0, rows)), n
        assert np.array_equal(read_weight(source, n, 3, rows - 2), read_weight(gguf, n, 3, rows - 2)), n
    for n, t in gguf.tensors.items():
        if len(t.shape) == 1:
            assert np.array_equal(source.rows(n, 0, 1), gguf.rows(n, 0, 1)), n
    for n in source.tensors:
        assert bytes(source.raw(n)) == source.rows(n, 0, source.tensors[n].rows).tobytes()


@pytest.mark.parametrize("arch", ["mixtral", "granitemoe"])
def test_packs_hold_the_same_bytes(tmp_path: Path, arch: str) -> None:
    tensors = tiny.random_tensors(arch)
    gguf = open_source(tiny.write(tmp_path / "m.gguf", tiny.metadata(arch), tensors))
    folder = write(tmp_path / "hf", COMMON | CONFIGS[arch], checkpoint(arch, tensors, False))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    recipe = builtin("nf4", group=32)
    first = convert(gguf, tmp_path / "a.orkpack", recipe)
    second = convert(open_source(folder), tmp_path / "b.orkpack", recipe)
    with Pack.open(first) as a, Pack.open(second) as b:
        assert sorted(a.names()) == sorted(b.names())
        assert all(a.content(n) == b.content(n) for n in a.names())


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "model": {
        "type": "BPE",
        "vocab": {t: i for i, t in enumerate(tiny.TOKENS)},
        "merges": [list(m) for m in tiny.MERGES],
    },
}


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("qwen3moe", "decoder_sparse_step", 2),
        ("qwen3moe", "mlp_only_layers", [0]),
        ("qwen3moe", "num_experts", 0),
        ("qwen3moe", "norm_topk_prob", "yes"),
        ("qwen2moe", "moe_intermediate_size", "wide"),
        ("olmoe", "clip_qkv", 8.0),
        ("mixtral", "sliding_window", 4096),
        ("granitemoe", "residual_multiplier", 0),
        ("lfm2moe", "conv_bias", True),
        ("lfm2moe", "layer_types", ["conv"]),
        ("lfm2moe", "layer_types", ["conv", "mamba"]),
        ("lfm2moe", "conv_L_cache", 1),
    ],
)
def test_configs_of_other_models_are_refused(tmp_path: Path, arch: str, key: str, value: object) -> None:
    tensors = checkpoint(arch, tiny.random_tensors(arch), False)
    with pytest.raises(SourceError, match=key) as e:
        open_source(write(tmp_path / "hf", COMMON | CONFIGS[arch] | {key: value}, tensors))
    assert "\n" not in str(e.value)


def test_stacks_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = checkpoint("qwen3moe", tiny.random_tensors("qwen3moe"), True)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for i, shape in enumerate([(8, 81, 64), (80,), (2, 8, 80, 64)]):
        wrong = tensors | {name: np.ones(shape, np.float32)}
        with pytest.raises(SourceError, match=name):
            open_source(write(tmp_path / str(i), COMMON | CONFIGS["qwen3moe"], wrong))
