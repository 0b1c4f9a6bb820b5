"""Hugging Face folders: the metadata and tensors that llama.cpp's converter would write."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ork.errors import SourceError
from ork.sources.base import open_source
from ork.sources.hf_config import BY_MODEL_TYPE
from ork.sources.hf_names import gguf_name
from tests.gguf_writer import payload

GOLDENS = Path(__file__).parents[1] / "goldens"

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "attention_bias": True,
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 7,
    "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 16,
    "query_pre_attn_scalar": 7, "attention_bias": False,
}  # fmt: skip
HEAD_DIM, KV = 8, 2


def shapes(config):
    """A checkpoint's tensors, spelt out."""
    h, ff, q, kv = config["hidden_size"], config["intermediate_size"], 4 * HEAD_DIM, KV * HEAD_DIM
    out = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {at + "self_attn.q_proj.weight": (q, h), at + "self_attn.k_proj.weight": (kv, h)}
        out |= {at + "self_attn.v_proj.weight": (kv, h), at + "self_attn.o_proj.weight": (h, q)}
        out |= {at + "mlp.gate_proj.weight": (ff, h), at + "mlp.up_proj.weight": (ff, h)}
        out |= {at + "mlp.down_proj.weight": (h, ff)}
        out |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,)}
        if config["attention_bias"]:
            out |= {at + "self_attn.q_proj.bias": (q,), at + "self_attn.k_proj.bias": (kv,)}
            out |= {at + "self_attn.v_proj.bias": (kv,), at + "self_attn.o_proj.bias": (h,)}
        if config["model_type"] == "gemma3_text":
            out |= {at + "pre_feedforward_layernorm.weight": (h,), at + "post_feedforward_layernorm.weight": (h,)}
            out |= {at + "self_attn.q_norm.weight": (HEAD_DIM,), at + "self_attn.k_norm.weight": (HEAD_DIM,)}
    return out


def weights(config, dtype=np.float32):
    rng = np.random.default_rng(11)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes(config).items()}


@pytest.fixture
def folder(tmp_path):
    """Write a folder: config, tensors by file name, further files."""

    def write(config, files=None, **more) -> Path:
        where = tmp_path / "model"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        (where / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        for name, tensors in (files or {"model.safetensors": weights(config)}).items():
            save_file(tensors, where / name)
        for name, content in more.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (where / name.replace("__", ".")).write_text(text)
        return where

    return write


def interleaved(w, heads):
    """Rows (or elements) of each head from halves to pairs, one at a time."""
    out, size = np.empty_like(w), len(w) // heads
    for h in range(heads):
        for i in range(size // 2):
            out[h * size + 2 * i] = w[h * size + i]
            out[h * size + 2 * i + 1] = w[h * size + size // 2 + i]
    return out


# --- names and metadata ---


@pytest.mark.parametrize("model_type", BY_MODEL_TYPE)
def test_names_are_those_of_llama_cpp(model_type):
    arch = BY_MODEL_TYPE[model_type]
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch.name)
    oracle = gguf.get_tensor_name_map(number, 12)
    last = "model.embedding_norm" if model_type == "lfm2_moe" else "model.norm"
    modules = ["model.embed_tokens", last, "lm_head"] + [f"model.layers.11.{m}" for m in arch.layer]
    known = 0
    for module in modules:
        if module.endswith(("q_norm", "k_norm")) and model_type in ("llama", "qwen2"):
            continue  # not in these architectures: the model refuses them later
        for part in (".weight", ".bias"):
            want = oracle.get_name(module.replace(".#", "") + part, try_suffixes=(".weight", ".bias"))
            if want is None and arch.moe:
                continue  # of another architecture of the same table, or renamed before: test_huggingface_moe.py
            assert want is not None
            expert = "#7" if "#" in module else ""
            assert gguf_name(arch.layer, 12, module.replace("#", "7") + part) == want + expert
            known += 1
    assert known >= 22
    for other in ("model.layers.12.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight", "model.x.weight", "norm"):
        assert gguf_name(arch.layer, 12, other) is None


def test_metadata_of_llama(folder):
    meta = open_source(folder(LLAMA)).metadata
    want = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 128, "llama.vocab_size": 96,
        "llama.embedding_length": 32, "llama.feed_forward_length": 48, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.key_length": 8, "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 8, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    assert dict(meta) == want


def test_what_config_leaves_out_has_the_defaults_of_transformers(folder):
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps", "rope_theta")}
    files = {"model.safetensors": {n: w for n, w in weights(LLAMA).items() if "k_proj" not in n}}
    meta = open_source(folder(bare | {"tie_word_embeddings": True}, files)).metadata
    assert meta["llama.attention.head_count_kv"] == 4
    assert meta["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert meta["llama.rope.freq_base"] == 10000.0
    gemma = {k: v for k, v in GEMMA.items() if k not in ("rope_theta", "tie_word_embeddings", "query_pre_attn_scalar")}
    meta = open_source(folder(gemma, {"model.safetensors": weights(GEMMA)})).metadata
    assert meta["gemma3.rope.freq_base"] == 1e6
    assert meta["gemma3.rope.freq_base_swa"] == 1e4
    assert meta["gemma3.attention.scale"] == 256**-0.5
    assert meta["gemma3.attention.sliding_window_pattern"] == 6


LAYERS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, {"rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0, "attention.sliding_window_pattern": 6}),
        ({"sliding_window_pattern": 3}, {"attention.sliding_window_pattern": 3, "attention.sliding_window": 16}),
        ({"layer_types": LAYERS * 3 + LAYERS[:1]}, {"attention.sliding_window_pattern": 2}),
        ({"layer_types": LAYERS[:1] * 7}, {"attention.sliding_window_pattern": 8}),
        ({"layer_types": LAYERS[1:] * 7}, {"attention.sliding_window_pattern": None, "attention.sliding_window": None}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8}}, {"rope.scaling.factor": 8.0}),
        ({"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
        (
            {
                "rope_theta": None,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
            },
            {"rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "rope.scaling.type": "linear"},
        ),
    ],
)
def test_windows_and_ropes_of_gemma(folder, changes, want):
    meta = open_source(folder(GEMMA | changes, {"model.safetensors": weights(GEMMA)})).metadata
    for key, value in want.items():
        assert meta.get(f"gemma3.{key}") == value
    assert meta["gemma3.attention.scale"] == 7**-0.5


def test_an_irregular_pattern_is_a_bool_a_layer(folder):
    kinds = [LAYERS[i] for i in (1, 0, 0, 1, 1, 0, 0)]
    meta = open_source(folder(GEMMA | {"layer_types": kinds}, {"model.safetensors": weights(GEMMA)})).metadata
    pattern = meta["gemma3.attention.sliding_window_pattern"]
    assert pattern.dtype == np.bool_
    assert pattern.tolist() == [False, True, True, False, False, True, True]


def test_a_bidirectional_gemma_is_an_architecture_of_its_own(folder):
    config = GEMMA | {"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]}
    bare = {name.removeprefix("model."): w for name, w in weights(GEMMA).items()}
    source = open_source(folder(config, {"model.safetensors": bare}))
    assert source.metadata["general.architecture"] == "gemma-embedding"
    assert source.metadata["gemma-embedding.attention.causal"] is False
    assert "blk.6.ffn_up.weight" in source.tensors


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_divisors_of_llama3_scaling(folder, spelling):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    if spelling == "rope_parameters":
        config = LLAMA | {"rope_theta": None, spelling: scaling | {"rope_type": "llama3", "rope_theta": 10000.0}}
    else:
        config = LLAMA | {spelling: scaling | {"rope_type": "llama3"}}
    source = open_source(folder(config | {"head_dim": 8}))
    assert source.metadata["llama.rope.freq_base"] == 10000.0
    want = []
    for i in range(4):  # as transformers divides them, in double
        wave = 2 * np.pi * 10000.0 ** (2 * i / 8)
        if wave < 64 / 4:
            want.append(1.0)
        elif wave > 64 / 1:
            want.append(8.0)
        else:
            smooth = (64 / wave - 1.0) / (4.0 - 1.0)
            want.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert 1.0 < want[1] < 8.0
    assert np.allclose(source.rows("rope_freqs.weight", 0, 1)[0], want, rtol=1e-6)
    assert np.array_equal(
        np.frombuffer(source.raw("rope_freqs.weight"), np.float32), source.rows("rope_freqs.weight", 0, 1)[0]
    )


# --- tensors ---


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_of_llama(folder, dtype):
    w = weights(LLAMA, dtype)
    source = open_source(folder(LLAMA, {"model.safetensors": w}))
    assert len(source.tensors) == len(w)
    for i in range(2):
        for part in ("weight", "bias"):
            for name, heads in (("q", 4), ("k", 2)):
                want = interleaved(w[f"model.layers.{i}.self_attn.{name}_proj.{part}"], heads).astype(np.float32)
                got = source.rows(f"blk.{i}.attn_{name}.{part}", 0, len(want) if part == "weight" else 1)
                assert np.array_equal(got, want.reshape(got.shape))
    for name, other in (
        ("blk.1.attn_v.bias", "self_attn.v_proj.bias"),
        ("blk.1.ffn_norm.weight", "post_attention_layernorm.weight"),
    ):
        assert np.array_equal(source.rows(name, 0, 1)[0], w["model.layers.1." + other].astype(np.float32))
        assert source.tensors[name].kind == "F32"
    assert source.tensors["output.weight"].kind == ("F32" if dtype == np.float32 else "F16")


def test_row_ranges_and_raw_bytes_agree_with_the_whole(folder):
    source = open_source(folder(LLAMA, {"model.safetensors": weights(LLAMA, np.float16)}))
    for name, info in source.tensors.items():
        whole = source.rows(name, 0, info.rows)
        kind = np.float16 if info.kind == "F16" else np.float32
        assert len(source.raw(name)) == info.nbytes
        assert np.array_equal(np.frombuffer(source.raw(name), kind).astype(np.float32).reshape(whole.shape), whole)
        for start in range(0, info.rows, 5):
            for stop in {start, min(start + 1, info.rows), min(start + 11, info.rows), info.rows}:
                out = np.full((stop - start, info.columns), np.nan, np.float32)
                assert source.rows(name, start, stop, out) is out
                assert np.array_equal(out, whole[start:stop])
    source.release("blk.0.attn_q.weight", 3, 9)
    source.release("token_embd.weight")
    assert np.isfinite(source.rows("blk.0.attn_q.weight", 0, 32)).all()


def test_norms_of_gemma_are_one_more(folder):
    w = weights(GEMMA)
    source = open_source(folder(GEMMA))
    names = {"attn_norm": "input_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
             "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
             "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
    for to, name in names.items():
        assert np.array_equal(source.rows(f"blk.3.{to}.weight", 0, 1)[0], 1 + w[f"model.layers.3.{name}.weight"])
    assert np.array_equal(source.rows("output_norm.weight", 0, 1)[0], 1 + w["model.norm.weight"])
    assert np.array_equal(source.rows("blk.3.attn_q.weight", 0, 32), w["model.layers.3.self_attn.q_proj.weight"])
    assert "output.weight" not in source.tensors


def test_a_golden_is_the_same_from_both_files():
    """tests/goldens holds one model as a folder and as a GGUF that its own script wrote."""
    folder, file = open_source(GOLDENS / "llama3"), open_source(GOLDENS / "llama3-gguf" / "model.gguf")
    assert set(folder.tensors.values()) == set(file.tensors.values())
    for name, info in file.tensors.items():
        tolerance = 1e-6 if name == "rope_freqs.weight" else 0
        assert np.allclose(folder.rows(name, 0, info.rows), file.rows(name, 0, info.rows), rtol=tolerance, atol=0)
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            assert folder.metadata[key] == pytest.approx(value, rel=1e-6)


def test_bf16_and_a_head_that_is_tied_though_stored():
    source = open_source(GOLDENS / "qwen2")
    assert source.tensors["token_embd.weight"].kind == "BF16"
    got = source.rows("token_embd.weight", 0, 160)
    assert bytes(source.raw("token_embd.weight")) == payload("BF16", got)


def test_shards(folder):
    w = weights(LLAMA)
    names = sorted(w)
    parts = {"m-1.safetensors": names[::2], "m-2.safetensors": names[1::2]}
    files = {f: {n: w[n] for n in held} for f, held in parts.items()}
    weight_map = {n: f for f, held in parts.items() for n in held}
    one = open_source(folder(LLAMA))
    whole = {n: one.rows(n, 0, t.rows) for n, t in one.tensors.items()}
    source = open_source(
        folder(LLAMA, files, model__safetensors__index__json={"metadata": {}, "weight_map": weight_map})
    )
    assert set(source.tensors) == set(whole)
    assert all(np.array_equal(source.rows(n, 0, t.rows), whole[n]) for n, t in source.tensors.items())

    def refused(index):
        where = folder(LLAMA, files, model__safetensors__index__json=index)
        with pytest.raises(SourceError) as e:
            open_source(where)
        return str(e.value)

    assert "weight_map" in refused({"weight_map": 3})
    assert "not the name of a file of this folder" in refused({"weight_map": dict.fromkeys(names, "../m.safetensors")})
    assert "no such file" in refused({"weight_map": weight_map | {"more": "m-3.safetensors"}})
    assert "does not place tensor" in refused({"weight_map": weight_map | {names[0]: "m-2.safetensors"}})
    assert "tensor 'more' is not in m-1.safetensors" in refused(
        {"weight_map": weight_map | {"more": "m-1.safetensors"}}
    )


# --- tokenizer ---


def test_tokenizer_and_special_tokens(folder):
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 7, "content": "<|end|>"}, {"id": 3, "content": "<s>"}],
        "model": {},
    }
    source = open_source(
        folder(
            LLAMA | {"eos_token_id": [2, 9]},
            tokenizer__json=tokenizer,
            tokenizer_config__json={
                "eos_token": {"content": "<|end|>"}, "bos_token": "<s>", "add_bos_token": True, "pad_token": None,
                "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ x }}"}],
            },
            generation_config__json={"eos_token_id": [2, 8], "pad_token_id": 0},
        )
    )  # fmt: skip
    meta = source.metadata
    assert json.loads(meta["tokenizer.huggingface.json"]) == tokenizer
    assert meta["tokenizer.chat_template"] == "{{ x }}"
    assert meta["tokenizer.ggml.eos_token_id"] == 7
    assert meta["tokenizer.ggml.bos_token_id"] == 3
    assert meta["tokenizer.ggml.padding_token_id"] == 0
    assert meta["tokenizer.ggml.add_bos_token"] is True
    assert meta["tokenizer.huggingface.eos_token_ids"].tolist() == [2, 7, 8, 9]


def test_a_template_of_its_own_file_goes_first(folder):
    where = folder(LLAMA, tokenizer_config__json={"chat_template": "old"}, chat_template__jinja="{{ new }}")
    assert open_source(where).metadata["tokenizer.chat_template"] == "{{ new }}"


def test_the_digest_covers_what_the_folder_says(folder):
    digests = {
        open_source(folder(LLAMA)).digest(),
        open_source(folder(LLAMA | {"rope_theta": 5e5})).digest(),
        open_source(folder(LLAMA, {"model.safetensors": weights(LLAMA, np.float16)})).digest(),
        open_source(folder(LLAMA, tokenizer__json={"added_tokens": []})).digest(),
    }
    assert len(digests) == 4
    assert open_source(folder(LLAMA)).digest() in digests


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; supported are llama, qwen2, qwen3, gemma3_text",
        ),
        ({"model_type": None}, "model_type 'None'"),
        ({"hidden_size": 0}, "'hidden_size': 0 is not a whole number from 1"),
        ({"hidden_size": 32.5}, "'hidden_size'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers'"),
        ({"num_hidden_layers": None}, "'num_hidden_layers': None"),
        ({"vocab_size": "96"}, "'vocab_size'"),
        ({"num_attention_heads": -4}, "'num_attention_heads'"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps'"),
        ({"rope_theta": 0}, "'rope_theta'"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings'"),
        ({"hidden_act": "relu"}, "'relu' is not supported for llama, 'silu' is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported (linear and llama3 are)"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor': 0 is not a positive number"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "is not supported"),
        ({"rope_scaling": 8}, "not an object"),
        ({"rope_parameters": {"full_attention": 8}}, "not an object for each kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "a sliding window is not supported for llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "a quantised checkpoint"),
        ({"num_hidden_layers": 1}, "tensor 'model.layers.1."),
        ({"num_attention_heads": 3}, "32 rows are not 3 heads of even size"),
        ({"num_attention_heads": 32}, "32 rows are not 32 heads of even size"),
    ],
)
def test_configs(folder, changes, message):
    where = folder(LLAMA | changes, {"model.safetensors": weights(LLAMA)})
    with pytest.raises(SourceError) as e:
        open_source(where)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_gemma_layer_types(folder):
    for kinds in (["full_attention"], ["full_attention"] * 6 + ["chunked"], "full", [[]] * 7):
        with pytest.raises(SourceError, match="'layer_types': not a list"):
            open_source(folder(GEMMA | {"layer_types": kinds}, {"model.safetensors": weights(GEMMA)}))


def test_folders_that_lack_something(folder, tmp_path):
    def refused(where):
        with pytest.raises(SourceError) as e:
            open_source(where)
        return str(e.value)

    (tmp_path / "empty").mkdir()
    assert "config.json: no such file" in refused(tmp_path / "empty")
    where = folder(LLAMA)
    (where / "model.safetensors").unlink()
    assert "there are none" in refused(where)
    w = weights(LLAMA)
    assert "there are 2 without" in refused(folder(LLAMA, {"a.safetensors": w, "b.safetensors": w}))
    assert len(open_source(folder(LLAMA, {"a.safetensors": w})).tensors) == len(w)
    assert "no output.weight" in refused(
        folder(LLAMA, {"m.safetensors": {n: t for n, t in w.items() if n != "lm_head.weight"}})
    )
    assert "is not part of a llama model" in refused(folder(LLAMA, {"m.safetensors": w | {"extra.weight": np.ones(3)}}))
    name = "model.layers.0.mlp.up_proj.weight"
    assert "dtype F64 is not supported" in refused(folder(LLAMA, {"m.safetensors": w | {name: np.ones((48, 32))}}))
    assert "neither a vector" in refused(folder(LLAMA, {"m.safetensors": w | {name: np.ones((4, 12, 32), np.float32)}}))
    assert "given twice" in refused(folder(LLAMA, {"m.safetensors": w | {"norm.weight": w["model.norm.weight"]}}))
    assert "tokenizer.json: not a tokenizer" in refused(folder(LLAMA, tokenizer__json='{"added_tokens": 3}'))
    assert "tokenizer.json: not a tokenizer" in refused(
        folder(LLAMA, tokenizer__json='{"added_tokens": ' + "[" * 100000)
    )
    assert "config.json: the file is not JSON" in refused(folder("{", {"m.safetensors": w}))


def test_buffers_of_old_checkpoints_are_ignored(folder):
    w = weights(LLAMA)
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    assert len(open_source(folder(LLAMA, {"m.safetensors": w | more})).tensors) == len(w)
    tied = LLAMA | {"tie_word_embeddings": True}
    assert "output.weight" not in open_source(folder(tied, {"m.safetensors": w})).tensors


def test_the_goldens_open():
    for where in sorted(GOLDENS.glob("*/config.json")):
        source = open_source(where.parent)
        stored = load_file(where.parent / "model.safetensors") if "llama3" in where.parent.name else None
        assert stored is None or len(source.tensors) == len(stored) + 1  # rope_freqs
        assert all(np.isfinite(source.rows(n, 0, t.rows)).all() for n, t in source.tensors.items())
