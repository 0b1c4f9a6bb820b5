"""What GGUF calls the tensors of Hugging Face checkpoints. The names are those of llama.cpp's converters."""

from __future__ import annotations

import re
from collections.abc import Mapping

TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "embedding_norm": "token_embd_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# A number below `experts` is written #: that expert's matrix, `ffn_up_exps.weight#3`. Some checkpoints have stacks.
ROUTED = {
    "gate": "ffn_gate_inp",
    "experts.#.gate_proj": "ffn_gate_exps",
    "experts.#.up_proj": "ffn_up_exps",
    "experts.#.down_proj": "ffn_down_exps",
    "experts.#.w1": "ffn_gate_exps",
    "experts.#.w3": "ffn_up_exps",
    "experts.#.w2": "ffn_down_exps",
    "experts.down_proj": "ffn_down_exps",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
}
ATTENTION = {module: to for module, to in LAYER.items() if not module.startswith("mlp.")}


def routed(*blocks: str) -> dict[str, str]:
    return ATTENTION | {f"{block}.{module}": to for block in blocks for module, to in ROUTED.items()}


GRANITE_LAYER = ATTENTION | {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
LFM2_LAYER = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.expert_bias": "exp_probs_b",
} | {f"feed_forward.{module}": to for module, to in ROUTED.items()}
# Tensors whose rows (or those of each matrix of a stack) are two GGUF tensors, half and half.
HALVES = {
    "experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
}
BARE = (".experts.gate_up_proj", ".experts.down_proj")  # stacks without ".weight" behind their names
UNUSED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")  # buffers of older checkpoints


def gguf_name(layer: Mapping[str, str], layers: int, name: str) -> str | None:
    """The GGUF name of a tensor of a checkpoint of so many `layers`, or None if there is none; `layer` is one of the
    tables above."""
    module, part = _parted(name)
    if module in TOP:
        return f"{TOP[module]}.{part}"
    if (below := _below(module, layers)) is None:
        return None
    number, module = below
    expert = re.search(r"\.experts\.(0|[1-9]\d{0,4})\.", module)
    if expert:
        module = module.replace(expert[0], ".experts.#.")
    to = layer.get(module)
    return to and f"blk.{number}.{to}.{part}" + (f"#{expert[1]}" if expert else "")


def gguf_halves(layers: int, name: str) -> tuple[str, str] | None:
    """The GGUF names of the two halves of a checkpoint's tensor that holds gates and what they open."""
    below = _below(_parted(name)[0], layers)
    if below is None:
        return None
    for module, (first, second) in HALVES.items():
        if below[1] == module or below[1].endswith("." + module):
            return f"blk.{below[0]}.{first}.weight", f"blk.{below[0]}.{second}.weight"
    return None


def _parted(name: str) -> tuple[str, str]:
    """(module, weight or bias); stacks of experts and their bias have no suffix."""
    name = name.removeprefix("model.")
    module, _, part = name.rpartition(".")
    if part in ("weight", "bias"):
        return module, part
    if part == "expert_bias":
        return name, "bias"
    return (name, "weight") if name.endswith(BARE) else ("", "")


def _below(module: str, layers: int) -> tuple[str, str] | None:
    """(number of the layer, module below it)."""
    m = re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(.+)", module)
    return (m[1], m[2]) if m and int(m[1]) < layers else None
