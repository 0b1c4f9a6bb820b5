"""One pack, one input: the same logits to the last bit on every path that the computation can take.

Each architecture with int8 weights and 640 tokens: three KV blocks, and several chunks of the attention's tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ork
from ork import native
from ork.build.convert import convert
from ork.engine.kvcache import Sequence
from ork.quant.recipe import Choice, Recipe, builtin
from ork.sources import open_source
from tests import tiny

ARCHS = ["llama", "qwen2", "qwen3", "gemma3"]
ISAS = native.isa_names()
LENGTH = 640
TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, 4 * LENGTH).tolist()
TEXTS = [TOKENS[:LENGTH], TOKENS[LENGTH : LENGTH + 257], TOKENS[-3:], TOKENS[100:500]]  # four sequences

Bits = np.ndarray
Models = dict[tuple[str, str], ork.LoadedModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("same-bits")
    out = {}
    for arch in ARCHS:
        path = tiny.random_gguf(folder / f"{arch}.gguf", arch)
        for kv in ("f16", "f32"):
            out[arch, kv] = ork.load(path, kv=kv, n_ctx=1024, sequences=4)
    return out


@pytest.fixture(scope="module")
def expected(models: Models) -> dict[tuple[str, str], list[Bits]]:
    """Each text alone, in one chunk, on one thread, on the instruction set that is the definition."""
    with path_of("portable", 1):
        return {key: [model.logits(text, chunk=1024) for text in TEXTS] for key, model in models.items()}


class path_of:
    """A context in which the kernels run on this instruction set and so many threads."""

    def __init__(self, isa: str, threads: int):
        self.isa, self.threads = isa, threads

    def __enter__(self) -> None:
        native.choose_isa(self.isa)
        native.set_threads(self.threads)

    def __exit__(self, *_: object) -> None:
        native.choose_isa("best")
        native.set_threads(1)


def feed(model: ork.LoadedModel, texts: list[list[int]], steps: Iterator[list[int]]) -> list[Bits]:
    """Logits of every position, where the i-th pass takes steps[i][s] more tokens of text s (all 0: the rest)."""
    seqs = [Sequence() for _ in texts]
    out: list[list[Bits]] = [[] for _ in texts]
    try:
        while any(s.length < len(t) for s, t in zip(seqs, texts)):
            left = [len(t) - s.length for s, t in zip(seqs, texts)]
            step = [min(a, b) for a, b in zip(left, next(steps))]
            step = step if any(step) else left
            chosen = [i for i, n in enumerate(step) if n]
            parts = [(seqs[i], texts[i][seqs[i].length : seqs[i].length + step[i]]) for i in chosen]
            logits = model.engine.forward(parts, every=True)
            at = 0
            for i in chosen:
                out[i].append(logits[at : at + step[i]].copy())
                at += step[i]
    finally:
        for seq in seqs:
            model.engine.pool.truncate(seq, 0)
    return [np.concatenate(parts) for parts in out]


def equal(got: list[Bits], want: list[Bits]) -> bool:
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("arch", ARCHS)
def test_instruction_sets_and_threads(models: Models, expected: dict, arch: str, isa: str, threads: int) -> None:
    for kv in ("f16", "f32"):
        with path_of(isa, threads):
            assert equal([models[arch, kv].logits(TEXTS[0], chunk=1024)], expected[arch, kv][:1])


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("arch", ARCHS)
def test_seven_chunks(models: Models, expected: dict, arch: str, kv: str) -> None:
    sizes = iter([[1], [255], [1], [60], [3], [200], [0]])  # over block boundaries, and right at one
    with path_of("best", 2):
        assert equal(feed(models[arch, kv], TEXTS[:1], sizes), expected[arch, kv][:1])


@pytest.mark.parametrize("arch", ARCHS)
def test_four_sequences_at_once(models: Models, expected: dict, arch: str) -> None:
    with path_of("best", 2):
        assert equal(feed(models[arch, "f16"], TEXTS, iter([[0, 0, 0, 0]])), expected[arch, "f16"])


def test_prefill_then_decode(models: Models, expected: dict) -> None:
    for arch in ARCHS:
        with path_of("best", 2):
            got = feed(models[arch, "f16"], TEXTS[:1], iter([[620], *[[1]] * 20]))
        assert equal(got, expected[arch, "f16"][:1])


@given(
    st.sampled_from(ARCHS),
    st.sampled_from(["f16", "f32"]),
    st.sampled_from(ISAS),
    st.integers(1, 3),
    st.lists(st.tuples(*[st.sampled_from([0, 1, 5, 64, 255, 256, 300])] * 4).map(list), max_size=6),
)
@settings(max_examples=12)
def test_any_chunks_and_batches(
    models: Models, expected: dict, arch: str, kv: str, isa: str, threads: int, steps: list[list[int]]
) -> None:
    def endless() -> Iterator[list[int]]:
        yield from steps
        while True:
            yield [0, 0, 0, 0]

    with path_of(isa, threads):
        assert equal(feed(models[arch, kv], TEXTS, endless()), expected[arch, kv])


RECIPES = {
    "i4": builtin("i4"),
    "i4 of 32, mixed": builtin("i4", group=32).rotated("mix"),
    "nf4, mixed": builtin("nf4").rotated("mix"),
    "nf4 of 64": builtin("nf4", group=64),
    "i8 of 32": builtin("int8", group=32),
    "i8, rows of groups": builtin("int8", act_group=32),
    "f16": builtin("f16"),
    "all": Recipe(
        "all",
        Choice("nf4", 32),
        (
            ("attn_q", Choice("i8")),
            ("attn_k", Choice("i4", rotation="mix")),
            ("attn_v", Choice("f16")),
            ("up", Choice("i4")),
        ),
    ),
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_codec_on_every_path(tmp_path: Path, name: str) -> None:
    """Instruction sets, threads, chunks and company change nothing, whatever the weights are stored as."""
    source = open_source(tiny.random_gguf(tmp_path / "m.gguf", "llama"))
    text = TEXTS[1][:70]
    with ork.load(convert(source, tmp_path / "m.orkpack", RECIPES[name]), n_ctx=1024, sequences=2) as model:
        with path_of("portable", 1):
            want = [model.logits(text, chunk=1024), model.logits(TEXTS[2])]
        assert np.isfinite(want[0]).all()
        assert len(set(want[0].argmax(axis=1).tolist())) > 5
        for isa in ISAS:
            for threads, steps in ((1, [[1, 0], [69, 3]]), (3, [[30, 1], [1, 1], [0, 0]])):
                with path_of(isa, threads):
                    assert equal(feed(model, [text, TEXTS[2]], iter(steps)), want), (isa, threads)


def test_the_weights_have_a_say(models: Models, expected: dict) -> None:
    """What is compared above is not a constant: positions differ, and so do the two kinds of KV cache."""
    for arch in ARCHS:
        first = expected[arch, "f16"][0]
        assert np.isfinite(first).all()
        assert len(set(first.argmax(axis=1).tolist())) > 20
        assert not np.array_equal(first, expected[arch, "f32"][0])
        other = models[arch, "f16"].logits([TEXTS[0][0] ^ 1, *TEXTS[0][1:]])
        assert not np.array_equal(other[90], first[90])  # behind the first tiles, inside of the window
