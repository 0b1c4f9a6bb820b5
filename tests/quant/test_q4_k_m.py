"""llama.cpp's own Q4_K_M files as oracle: the types it gave to models of these shapes."""

from __future__ import annotations

from collections import Counter

import pytest

from ork.quant import q4_k_m


def shapes(layers: int, width: int, ffn: int, q: int, kv: int, vocab: int, *, tied: bool) -> dict[str, tuple[int, int]]:
    out = {"token_embd.weight": (vocab, width)} | ({} if tied else {"output.weight": (vocab, width)})
    for i in range(layers):
        block = {"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q)}
        block |= {"ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
        out |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return out


# What `llama-quantize ... Q4_K_M` wrote for these models, counted by shape and type.
FILES = {
    "gemma-3-270m": (
        shapes(18, 640, 2048, 1024, 256, 262144, tied=True),
        {
            ((2048, 640), "Q5_0"): 36,
            ((256, 640), "Q5_0"): 27,
            ((256, 640), "Q8_0"): 9,
            ((640, 1024), "Q4_K"): 18,
            ((1024, 640), "Q5_0"): 18,
            ((640, 2048), "Q6_K"): 9,
            ((640, 2048), "Q4_K"): 9,
            ((262144, 640), "Q8_0"): 1,
        },
    ),
    "qwen2.5-coder-0.5b": (
        shapes(24, 896, 4864, 896, 128, 151936, tied=False),
        {
            ((4864, 896), "Q5_0"): 48,
            ((896, 896), "Q5_0"): 48,
            ((128, 896), "Q5_0"): 36,
            ((128, 896), "Q8_0"): 12,
            ((896, 4864), "Q6_K"): 12,
            ((896, 4864), "Q4_K"): 12,
            ((151936, 896), "Q8_0"): 1,
            ((151936, 896), "Q5_0"): 1,
        },
    ),
    "qwen2.5-coder-1.5b": (
        shapes(28, 1536, 8960, 1536, 256, 151936, tied=False),
        {
            ((8960, 1536), "Q4_K"): 56,
            ((1536, 1536), "Q4_K"): 56,
            ((256, 1536), "Q4_K"): 42,
            ((256, 1536), "Q6_K"): 14,
            ((1536, 8960), "Q6_K"): 14,
            ((1536, 8960), "Q4_K"): 14,
            ((151936, 1536), "Q6_K"): 1,
            ((151936, 1536), "Q4_K"): 1,
        },
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_types_that_llama_cpp_chose(name: str) -> None:
    given, want = FILES[name]
    chosen = q4_k_m.types(given)
    assert Counter((given[n], kind) for n, kind in chosen.items()) == Counter(want)


def test_an_untied_embedding_is_not_the_head() -> None:
    chosen = q4_k_m.types(FILES["qwen2.5-coder-1.5b"][0])
    assert (chosen["output.weight"], chosen["token_embd.weight"]) == ("Q6_K", "Q4_K")


def test_eight_experts_have_finer_attention() -> None:
    """As Mixtral's files have it; other numbers of experts have not."""
    for experts, want in ((8, ("Q8_0", "Q8_0", "Q5_K", "Q4_K")), (64, ("Q4_K", "Q6_K", "Q4_K", "Q4_K"))):
        given = shapes(8, 512, 512, 512, 256, 1000, tied=False)
        given |= {f"blk.{i}.ffn_gate_inp.weight": (experts, 512) for i in range(8)}
        chosen = q4_k_m.types(given)
        roles = ("attn_k", "attn_v", "attn_output", "attn_q")
        assert tuple(chosen[f"blk.0.{role}.weight"] for role in roles) == want
        assert chosen["blk.0.ffn_gate_inp.weight"] == "F32"
    assert q4_k_m.total_bytes({"blk.0.attn_output.weight": (2, 64), "blk.0.ffn_gate_inp.weight": (8, 64)}) == (
        2 * 2 * 24 + 4 * 8 * 64
    )


def test_layers_without_attention_do_not_count_for_its_values() -> None:
    """LFM2, say, whose other layers are short convolutions."""
    given = {n: s for n, s in shapes(16, 512, 512, 512, 256, 1000, tied=True).items() if ".attn_" not in n}
    given |= {f"blk.{i}.attn_v.weight": (256, 512) for i in (2, 6, 10, 13)}
    six = [n for n, kind in q4_k_m.types(given).items() if "attn_v" in n and kind == "Q6_K"]
    assert six == ["blk.10.attn_v.weight", "blk.13.attn_v.weight"]  # the third of four, and the last eighth


def test_bytes_are_blocks() -> None:
    assert q4_k_m.total_bytes({"token_embd.weight": (10, 512)}) == 10 * 2 * 210
    assert q4_k_m.total_bytes({"output.weight": (4, 64), "token_embd.weight": (4, 64)}) == 4 * 2 * (34 + 22)
    assert q4_k_m.total_bytes({"output.weight": (4, 40)}) == 4 * 40 * 2
