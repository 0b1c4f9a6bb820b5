"""The golden models as data: their `config.json`, how their weights are drawn, and what must not go unnoticed.

A golden only guards a feature whose absence changes the logits. Every entry therefore lists `ablations`: changes of the
config or the weights that a wrong implementation might amount to. Each must move the logits by more than 1 % of
their largest magnitude, or nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB = 160  # not a multiple of 64: the head's last slice is partly padding

Config = dict[str, Any]


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
