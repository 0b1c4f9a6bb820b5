"""Make the golden models: tiny random `transformers` models with the logits that `transformers` computes from them.

Each golden is a Hugging Face folder in miniature (`config.json`, `model.safetensors`, `tokenizer.json`) and
`golden.npz` (`tokens` int32 [T], `logits` float32 [T, vocab], computed in float64 from exactly the stored weights).
One of them is also written as a GGUF, so that both source paths lead to the same logits.

Weights come from numpy's PCG64 with fixed seeds, so they are the same bytes everywhere. `transformers` keeps softmax,
norms and the rotary angles in float32 whatever the model's dtype, so logits made with another torch build or
instruction set may differ in the last bits (about 1e-6 of the largest logit; the test allows 1e-4).

A golden only guards a feature whose absence changes the logits. Every entry therefore lists `ablations`: changes of the
config or the weights that a wrong implementation might amount to. Each must move the logits by more than 1 % of
their largest magnitude, or nothing is written.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import moe_gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).parent
VOCAB = 160  # not a multiple of 64: the head's last slice is partly padding
LIMIT_BYTES = 300_000
MOVED = 1e-2  # an ablation must move the logits by this share of their largest magnitude; the test allows 1e-4

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Golden:
    """One golden: the `config.json` as written, how its weights are drawn, and what must not go unnoticed."""

    config: Config
    seed: int
    dtype: torch.dtype = torch.bfloat16  # as stored
    tokens: int = 64
    spread: float = 1.5  # standard deviation of a matrix's outputs for a normalised input
    ablations: dict[str, Config] = field(default_factory=dict)
    as_gguf: bool = False
    moe: bool = False  # a mixture of experts: as a GGUF alone


COMMON: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # wavelengths of 8 to 32 positions are blended, longer ones stretched
}

GEMMA3: Config = {
    **COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 7,
    "sliding_window": 16,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def gemma_layers(count: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer sees everything, the others a window."""
    return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]


GOLDENS: dict[str, Golden] = {
    # Llama 3: grouped heads, its rope scaling, an untied head; also as a GGUF.
    "llama3": Golden(
        seed=1,
        dtype=torch.float16,
        as_gguf=True,
        config={
            **COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": LLAMA3_ROPE,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        ablations={
            "no rope scaling": {"rope_scaling": None},
            "linear instead": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "another theta": {"rope_theta": 500000.0},
        },
    ),
    # Llama 2 style: linear scaling, tied, one key head, biases, sizes that fill no tile, an explicit head size.
    "llama-linear": Golden(
        seed=2,
        config={
            **COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 72,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 40,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},  # the older spelling, as hubs still hold it
            "attention_bias": True,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        ablations={"no rope scaling": {"rope_scaling": None}, "no biases": {"attention_bias": False}},
    ),
    # Qwen2: query, key and value biases, tied; a window that the config names and switches off.
    "qwen2": Golden(
        seed=3,
        config={
            **COMMON,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "intermediate_size": 112,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 16,
            "max_window_layers": 1,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        ablations={
            "window switched on": {"use_sliding_window": True},
            "another theta": {"rope_theta": 10000.0},
            "another epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    # Qwen3: normalised queries and keys, heads wider than hidden / heads, untied; config as transformers 5 writes it.
    "qwen3": Golden(
        seed=4,
        config={
            **COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "attention_bias": False,
            "sliding_window": None,
            "max_window_layers": 2,
            "use_sliding_window": False,
            "layer_types": ["full_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
        ablations={
            "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "another gate": {"hidden_act": "gelu_pytorch_tanh"},
        },
    ),
    # Gemma 3 as published: five windowed layers to each full one, two rope bases, its own attention scale, tied.
    "gemma3": Golden(
        seed=5,
        tokens=80,
        config={**GEMMA3, "num_hidden_layers": 7, "layer_types": gemma_layers(7, 6)},
        ablations={
            "no window": {"sliding_window": 512},
            "window of one more": {"sliding_window": 17},
            "windows everywhere": {"layer_types": ["sliding_attention"] * 7},
            "one rope base": {"rope_local_base_freq": 1000000.0},
            "scale by head size": {"query_pre_attn_scalar": 16},
            "another gate": {"hidden_activation": "silu"},
        },
    ),
    # The larger Gemma 3s stretch the rope of their full layers; the final soft-cap is Gemma 2's.
    # (transformers' Gemma 3 reads attn_logit_softcapping and then never passes it on, so it cannot be a golden.)
    "gemma3-softcap": Golden(
        seed=6,
        tokens=80,
        config={
            **GEMMA3,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "layer_types": gemma_layers(4, 3),
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 100.0,
            "final_logit_softcapping": 5.0,
        },
        ablations={
            "no final soft-cap": {"final_logit_softcapping": None},
            "no rope scaling": {"rope_scaling": None},
            "pattern of six": {"layer_types": gemma_layers(4, 6)},
        },
    ),
}


ROUTED: Config = {**COMMON, "hidden_size": 48, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
MOE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

GOLDENS |= {
    # Mixtral: Llama with experts, normalised weights, a feed-forward length that is an expert's.
    "mixtral": Golden(
        seed=11,
        dtype=torch.float16,
        moe=True,
        config={
            **ROUTED,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rope_parameters": MOE_ROPE,
            "sliding_window": None,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
        ablations={"one expert a row": {"num_experts_per_tok": 1}, "three a row": {"num_experts_per_tok": 3}},
    ),
    # Qwen2-MoE: biases, experts whose weights are not normalised, a gated shared expert of another width.
    "qwen2moe": Golden(
        seed=12,
        dtype=torch.float16,
        moe=True,
        config={
            **ROUTED,
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "intermediate_size": 96,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 52,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rope_parameters": MOE_ROPE,
            "use_sliding_window": False,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
        },
        ablations={"normalised": {"norm_topk_prob": True}, "two experts a row": {"num_experts_per_tok": 2}},
    ),
    # Qwen3-MoE: query and key norms, heads wider than hidden / heads, normalised weights.
    "qwen3moe": Golden(
        seed=13,
        dtype=torch.float16,
        moe=True,
        config={
            **ROUTED,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "use_sliding_window": False,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        ablations={"not normalised": {"norm_topk_prob": False}, "four experts a row": {"num_experts_per_tok": 4}},
    ),
    # OLMoE: norms over the whole width of queries and keys, weights not normalised.
    "olmoe": Golden(
        seed=14,
        dtype=torch.float16,
        moe=True,
        config={
            **ROUTED,
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "rope_parameters": MOE_ROPE,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
        ablations={"normalised": {"norm_topk_prob": True}},
    ),
    # Granite MoE with a shared expert: four constants, a softmax over the chosen logits alone.
    "granitemoe": Golden(
        seed=15,
        dtype=torch.float16,
        moe=True,
        config={
            **ROUTED,
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "intermediate_size": 36,
            "shared_intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rope_parameters": MOE_ROPE,
            "attention_bias": False,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
        ablations={
            "embedding as it is": {"embedding_multiplier": 1.0},
            "residual as it is": {"residual_multiplier": 1.0},
            "scores by head size": {"attention_multiplier": 0.25},
            "logits as they are": {"logits_scaling": 1.0},
        },
    ),
    # LFM2-MoE: short convolutions around one layer of attention, a dense layer first, sigmoid routing with a bias.
    "lfm2moe": Golden(
        seed=16,
        dtype=torch.float16,
        moe=True,
        config={
            **COMMON,
            "architectures": ["Lfm2MoeForCausalLM"],
            "model_type": "lfm2_moe",
            "hidden_size": 40,
            "intermediate_size": 72,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "conv_bias": False,
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
        ablations={
            "no scaling": {"routed_scaling_factor": 1.0},
            "not normalised": {"norm_topk_prob": False},
            "three experts a row": {"num_experts_per_tok": 3},
        },
    ),
}


def weight_names(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of this config holds, without a tied head."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", config)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return dict(sorted(shapes.items()))


def draw(golden: Golden) -> Weights:
    """Random weights, rounded to the stored dtype: attention far from uniform, norm weights far from neutral."""
    rng = np.random.Generator(np.random.PCG64(golden.seed))
    neutral = 0.0 if golden.config["model_type"].startswith("gemma") else 1.0  # Gemma scales by 1 + weight
    weights = {}
    for name, shape in weight_names(golden.config).items():
        if "norm" in name:
            values = neutral + rng.uniform(-0.6, 0.6, shape)
        elif name.endswith("expert_bias"):
            values = rng.normal(0.0, 0.3, shape)  # the scores that it is added to lie between 0 and 1
        elif name.endswith("bias"):
            values = rng.normal(0.0, 0.8, shape)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            values = rng.normal(0.0, 0.3, shape)
        else:
            values = rng.normal(0.0, golden.spread / math.sqrt(shape[-1]), shape)
        weights[name] = torch.from_numpy(values).to(golden.dtype)
    return weights


def logits_of(config: Config, weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, vocab] that `transformers` computes in float64 from a folder holding this config and these weights."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", config)
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        plain = {"attn_implementation": "eager"}
        if "num_experts_per_tok" in config:
            plain["experts_implementation"] = "eager"  # the others know no float64
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain).eval()
    loaded = {name: tensor for name, tensor in model.state_dict().items() if name in weights}
    assert all(torch.equal(loaded[name], weights[name].double()) for name in weights)
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()


def check_ablations(golden: Golden, weights: Weights, tokens: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """How far each ablation moves the logits, as a share of their largest magnitude; raises if one hardly does."""
    trials: dict[str, Callable[[], np.ndarray]] = {}
    for what, change in golden.ablations.items():
        trials[what] = lambda change=change: logits_of({**golden.config, **change}, weights, tokens)
    neutral = 0.0 if golden.config["model_type"].startswith("gemma") else 1.0
    for kind in sorted({name.split(".")[-2] for name in weights if "norm" in name}):
        flat = {n: torch.full_like(w, neutral) if n.split(".")[-2] == kind else w for n, w in weights.items()}
        trials[f"{kind} ignored"] = lambda flat=flat: logits_of(golden.config, flat, tokens)
    for kind in sorted({".".join(name.split(".")[-2:]) for name in weights if name.endswith("bias")}):
        zero = {n: torch.zeros_like(w) if n.endswith(kind) else w for n, w in weights.items()}
        trials[f"{kind} ignored"] = lambda zero=zero: logits_of(golden.config, zero, tokens)
    moved = {what: float(np.abs(run() - logits).max() / np.abs(logits).max()) for what, run in trials.items()}
    if weak := {what: share for what, share in moved.items() if share < MOVED}:
        raise SystemExit(f"these changes would go unnoticed: {weak}")
    return moved


def tokenizer() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE over ASCII: enough for a pack to be whole, irrelevant to the logits."""
    special = ["<unk>", "<bos>", "<eos>"]
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    merges = ["Ġ t", "h e", "Ġ a", "i n", "r e", "Ġt he", "o n", "Ġ s", "e r", "a t", "Ġ w", "o u", "e n", "Ġ b"]
    tokens = special + letters + [m.replace(" ", "") for m in merges]
    return tokens + [f"<unused{i}>" for i in range(VOCAB - len(tokens))], merges


def tokenizer_json() -> Config:
    """The same as a `tokenizer.json` of the `tokenizers` library."""
    tokens, merges = tokenizer()
    added = [(i, t) for i, t in enumerate(tokens) if t.startswith("<") and len(t) > 1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in added],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {**model, "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [m.split(" ") for m in merges]},
    }


def write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(folder: Path, golden: Golden, weights: Weights) -> None:
    """The Hugging Face folder."""
    names = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    write_json(folder / "config.json", {**golden.config, "torch_dtype": names[golden.dtype]})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "tokenizer.json", tokenizer_json())
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": False}
    write_json(folder / "tokenizer_config.json", {**special, "tokenizer_class": "PreTrainedTokenizerFast"})


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def llama3_rope_factors(config: Config) -> np.ndarray:
    """`rope_freqs.weight`: by what each of a head's frequencies is divided.

    Llama 3's rule as `transformers.modeling_rope_utils._compute_llama3_parameters` has it.
    """
    rope, dim = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / (smooth + (1 - smooth) / rope["factor"]))
    return np.array(factors, np.float32)


def write_gguf(path: Path, config: Config, weights: Weights) -> None:
    """The llama golden as llama.cpp's converter would write it: pairs of a head interleaved, norms in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_tokenizer(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in weights.items():
        values, kind = tensor.numpy(), name.split(".")[-2]
        if kind in heads:
            values = values.reshape(heads[kind], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(
            gguf_name(name), values.astype(np.float32) if values.ndim == 1 else np.ascontiguousarray(values)
        )
    writer.add_tensor("rope_freqs.weight", llama3_rope_factors(config))
    finish(writer)


def write_moe(path: Path, config: Config, weights: Weights) -> None:
    """A mixture of experts as llama.cpp's converters write it."""
    writer = gguf.GGUFWriter(path, moe_gguf.ARCHITECTURES[config["model_type"]])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_tokenizer(writer, config)
    moe_gguf.fill(writer, config, weights)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, config: Config) -> None:
    tokens, merges = tokenizer()
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if t.startswith("<") and len(t) > 1 else normal for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def make(name: str, golden: Golden, target: Path) -> None:
    """Compute one golden and put it (and its GGUF twin) under `target`."""
    config = copy.deepcopy(golden.config)
    weights = draw(golden)
    tokens = np.random.Generator(np.random.PCG64(golden.seed + 1000)).integers(3, VOCAB, golden.tokens, dtype=np.int32)
    logits = logits_of(config, weights, tokens)
    moved = check_ablations(golden, weights, tokens, logits)
    folders = [target / (f"{name}-gguf" if golden.moe else name)]
    folders += [target / f"{name}-gguf"] if golden.as_gguf else []
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        np.savez(folder / "golden.npz", tokens=tokens, logits=logits.astype(np.float32))
    if golden.moe:
        write_moe(folders[0] / "model.gguf", config, weights)
    else:
        write_folder(folders[0], golden, weights)
        stored = load_file(folders[0] / "model.safetensors")
        assert all(torch.equal(stored[n], w) for n, w in weights.items())
    if golden.as_gguf:
        write_gguf(folders[1] / "model.gguf", config, weights)
    print(f"{name}: logits of spread {logits.std():.2f}, largest {np.abs(logits).max():.1f}; moved by")
    for what, share in moved.items():
        print(f"    {what}: {share:.3f}")
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"    {folder.name}: {size:,} bytes")
        if size > LIMIT_BYTES:
            raise SystemExit(f"{folder.name} has {size:,} bytes, more than {LIMIT_BYTES:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Remake the golden models.")
    parser.add_argument("-o", "--out", type=Path, default=HERE, help="where to write them (default: beside this file)")
    parser.add_argument("names", nargs="*", choices=[[], *GOLDENS], default=[], help="which ones (default: all)")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in args.names or GOLDENS:
        make(name, GOLDENS[name], args.out)


if __name__ == "__main__":
    main()
