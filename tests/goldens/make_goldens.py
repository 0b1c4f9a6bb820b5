"""Make the golden models: tiny random `transformers` models with the logits that `transformers` computes from them.

Each golden is a Hugging Face folder in miniature (`config.json`, `model.safetensors`, `tokenizer.json`) and
`golden.npz` (`tokens` int32 [T], `logits` float32 [T, vocab], computed in float64 from exactly the stored weights).
One of them is also written as a GGUF, so that both source paths lead to the same logits.

Weights come from numpy's PCG64 with fixed seeds, so they are the same bytes everywhere. `transformers` keeps softmax,
norms and the rotary angles in float32 whatever the model's dtype, so logits made with another torch build or
instruction set may differ in the last bits (about 1e-6 of the largest logit; the test allows 1e-4).

`golden_configs.py` lists them, and what each guards.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import moe_gguf
import numpy as np
import torch
from golden_configs import GOLDENS, VOCAB, Config, Golden
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).parent
LIMIT_BYTES = 300_000
MOVED = 1e-2  # an ablation must move the logits by this share of their largest magnitude; the test allows 1e-4

Weights = dict[str, torch.Tensor]


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
