"""Mixture-of-experts goldens as GGUF files, named, shaped and permuted as llama.cpp's converters write them.

A weight of `transformers` becomes one or two GGUF tensors: stacked gate-and-up projections are split, the taps of a
short convolution lose their middle dimension.
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import torch

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "lfm2_moe": "lfm2moe",
}
INTERLEAVED = {"llama", "granitemoe"}  # whose query and key rows go from halves to pairs
TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
# module below model.layers.N. -> names below blk.N., each for an equal share of the rows of a matrix or of each expert
MODULES = {
    "input_layernorm": ["attn_norm"],
    "operator_norm": ["attn_norm"],
    "post_attention_layernorm": ["ffn_norm"],
    "ffn_norm": ["ffn_norm"],
    "self_attn.q_proj": ["attn_q"],
    "self_attn.k_proj": ["attn_k"],
    "self_attn.v_proj": ["attn_v"],
    "self_attn.o_proj": ["attn_output"],
    "self_attn.out_proj": ["attn_output"],
    "self_attn.q_norm": ["attn_q_norm"],
    "self_attn.k_norm": ["attn_k_norm"],
    "self_attn.q_layernorm": ["attn_q_norm"],
    "self_attn.k_layernorm": ["attn_k_norm"],
    "mlp.gate": ["ffn_gate_inp"],
    "feed_forward.gate": ["ffn_gate_inp"],
    "block_sparse_moe.router": ["ffn_gate_inp"],
    "mlp.experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps"],
    "mlp.experts.down_proj": ["ffn_down_exps"],
    "feed_forward.experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps"],
    "feed_forward.experts.down_proj": ["ffn_down_exps"],
    "block_sparse_moe.experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps"],
    "block_sparse_moe.experts.down_proj": ["ffn_down_exps"],
    "mlp.shared_expert.gate_proj": ["ffn_gate_shexp"],
    "mlp.shared_expert.up_proj": ["ffn_up_shexp"],
    "mlp.shared_expert.down_proj": ["ffn_down_shexp"],
    "mlp.shared_expert_gate": ["ffn_gate_inp_shexp"],
    "shared_mlp.input_linear": ["ffn_gate_shexp", "ffn_up_shexp"],
    "shared_mlp.output_linear": ["ffn_down_shexp"],
    "feed_forward.expert_bias": ["exp_probs_b"],
    "feed_forward.w1": ["ffn_gate"],
    "feed_forward.w2": ["ffn_down"],
    "feed_forward.w3": ["ffn_up"],
    "conv.in_proj": ["shortconv.in_proj"],
    "conv.conv": ["shortconv.conv"],
    "conv.out_proj": ["shortconv.out_proj"],
}


def metadata(c: Config) -> Config:
    """GGUF's keys without the architecture's name."""
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    layers = c.get("layer_types")
    meta: Config = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv if layers is None else [kv if kind != "conv" else 0 for kind in layers],
        "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps", c.get("norm_eps")),
        "rope.freq_base": c["rope_parameters"]["rope_theta"],
        "expert_count": c.get("num_experts", c.get("num_local_experts")),
        "expert_used_count": c["num_experts_per_tok"],
    }
    if "head_dim" in c:
        meta |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
        meta["rope.dimension_count"] = c["head_dim"]
    else:
        meta["rope.dimension_count"] = c["hidden_size"] // heads
    for key, name in {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
        "num_dense_layers": "leading_dense_block_count",
        "conv_L_cache": "shortconv.l_cache",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "routed_scaling_factor": "expert_weights_scale",
    }.items():
        if key in c:
            meta[name] = c[key]
    if c["model_type"] == "lfm2_moe":
        meta["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    return meta


def tensors(c: Config, weights: Weights) -> dict[str, np.ndarray]:
    arch, out = ARCHITECTURES[c["model_type"]], {}
    heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]} if arch in INTERLEAVED else {}
    for name, tensor in weights.items():
        values = tensor.numpy()
        stem, part = re.fullmatch(r"(.*?)(?:\.(weight|bias))?", name).groups()
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
        names = [f"blk.{layer[1]}.{n}" for n in MODULES[layer[2]]] if layer else [TOP[stem]]
        part = "bias" if stem.endswith("expert_bias") else part or "weight"
        if (values.ndim == 3 and values.shape[1] == 1) or values.shape[0] == 1:
            values = values.squeeze()
        for to, share in zip(names, np.split(values, len(names), axis=max(0, values.ndim - 2))):
            piece, kind = share, to.split(".")[-1]
            if kind in heads:
                piece = piece.reshape(heads[kind], 2, -1, piece.shape[1]).swapaxes(1, 2).reshape(piece.shape)
            # as the converters: vectors, routers and taps in f32
            exact = piece.ndim == 1 or kind == "ffn_gate_inp" or ".shortconv.conv" in to
            out[f"{to}.{part}"] = np.ascontiguousarray(piece, np.float32 if exact else np.float16)
    return out


def fill(writer: gguf.GGUFWriter, c: Config, weights: Weights) -> None:
    """Keys and tensors of a mixture of experts; the tokenizer's keys are the caller's."""
    arch = ARCHITECTURES[c["model_type"]]
    for key, value in metadata(c).items():
        name = f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, values in tensors(c, weights).items():
        writer.add_tensor(name, values)
