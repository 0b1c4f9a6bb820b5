"""A draft changes the number of passes and nothing else: texts, ends, sessions, bits, probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ork
from ork.engine.draft import DraftModel
from ork.engine.kvcache import BLOCK, Sequence
from ork.engine.ngram import PromptLookup
from ork.engine.sampling import Sampler, SamplingParams
from ork.engine.session import Session, Stats
from ork.engine.speculative import Drafter, Verifier
from ork.errors import PackDamaged, UsageError
from tests import tiny
from tests.engine.test_sampling import distribution

GREEDY = SamplingParams()
CONTEXT = 300
SAID = "The-wizard's böx"
PROMPTS = ["the quick brown fox jumps over the lazy dog. " * 8, "ab", "in the the in the the in"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ork.LoadedModel]]:
    """`big`; `near`, which often agrees with it; `far`, which does not; `short`, a near one for 100 positions."""
    folder = tmp_path_factory.mktemp("models")
    weights = tiny.random_tensors("qwen3", 0)
    rng = np.random.default_rng(5)
    noisy = {name: a + 0.08 * a.std() * rng.standard_normal(a.shape).astype(np.float32) for name, a in weights.items()}
    made = {
        "big": (tiny.metadata("qwen3"), weights),
        "near": (tiny.metadata("qwen3"), noisy),
        "far": (tiny.metadata("qwen3"), tiny.random_tensors("qwen3", 9)),
        "short": (tiny.metadata("qwen3", **{"qwen3.context_length": 100}), noisy),
    }
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                ork.load(
                    tiny.write(folder / f"{name}.gguf", *parts), n_ctx=100 if name == "short" else 600, sequences=3
                )
            )
            for name, parts in made.items()
        }


def drafter(model: ork.LoadedModel | None, cost: float = 0.02) -> Drafter:
    if model is None:
        return PromptLookup()
    return DraftModel(model.engine, model.tokenizer, vocab=model.tokenizer.n_vocab, cost=cost)


def session(models: dict[str, ork.LoadedModel], draft: str | None, most: int = 8) -> Session:
    """A conversation of `big` with a drafter: a model, 'ngram', or None for none."""
    big = models["big"]
    with_draft = None if draft is None else drafter(None if draft == "ngram" else models[draft])
    return Session(big.engine, big.tokenizer, drafter=with_draft, draft_max=most)


def answer(s: Session, prompt: list[int], limit: int = 60, params: SamplingParams = GREEDY) -> tuple[str, Stats]:
    stats = Stats()
    text = "".join(s.generate(prompt, params, limit=limit, stats=stats))
    assert s.seq.length == len(s.tokens)
    assert 0 <= stats.accepted <= stats.proposed
    return text, stats


DRAFTS = ["big", "near", "far", "short", "ngram"]


# --- the same text


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_is_the_models_own(models: dict[str, ork.LoadedModel], draft: str, most: int) -> None:
    plain, drafted = session(models, None), session(models, draft, most)
    accepted = passes = 0
    for prompt in PROMPTS:
        tokens = models["big"].tokenizer.encode(prompt)
        want, alone = answer(plain, tokens)
        got, stats = answer(drafted, tokens)
        assert got == want
        assert drafted.tokens == plain.tokens
        assert (stats.reason, stats.new_tokens) == (alone.reason, alone.new_tokens)
        assert (stats.prompt_tokens, stats.cached_tokens) == (alone.prompt_tokens, alone.cached_tokens)
        assert stats.passes + stats.accepted >= alone.passes  # each pass gives a token, and one for each right proposal
        assert stats.passes <= alone.passes
        accepted, passes = accepted + stats.accepted, passes + stats.passes
    if draft == "big":
        assert stats.accepted == stats.proposed  # it always agrees with itself
        assert accepted > 1.5 * passes * (most > 1)
    if draft == "near":
        assert accepted > 0
    for s in (plain, drafted):
        s.close()
    assert all(m.engine.pool.used_blocks == 0 for m in models.values())


def test_wrong_and_right_proposals_both_occur(models: dict[str, ork.LoadedModel]) -> None:
    """Without which the tests of this file would show little."""
    s = session(models, "near")
    counts = [answer(s, models["big"].tokenizer.encode(p))[1] for p in PROMPTS]
    s.close()
    right, proposed = sum(c.accepted for c in counts), sum(c.proposed for c in counts)
    assert 0.2 * proposed < right < 0.95 * proposed


def test_texts_that_repeat_take_few_passes(tmp_path: Path) -> None:
    """ngram needs no model: abcdefgh for ever, eight tokens and one a pass."""
    path = tiny.speaking_gguf(tmp_path / "x.gguf", "abcdefgh", tail="a")
    with ork.load(path, n_ctx=CONTEXT, draft="ngram") as model:
        stats = Stats()
        assert "".join(model.generate("abcdefghab", max_tokens=100, stats=stats)) == ("cdefghab" * 13)[:100]
        assert stats.passes <= 12
        assert stats.tokens_per_pass > 8


def test_a_seed_repeats_itself(models: dict[str, ork.LoadedModel]) -> None:
    tokens = models["big"].tokenizer.encode(PROMPTS[0])
    texts = []
    for seed in (1, 1, 2):
        s = session(models, "near")
        texts.append(answer(s, tokens, params=SamplingParams(temperature=1.0, seed=seed, repeat_penalty=1.1))[0])
        s.close()
    assert texts[0] == texts[1] != texts[2]


def test_greedy_with_a_penalty(models: dict[str, ork.LoadedModel]) -> None:
    """The penalty looks back on what is accepted so far, row by row of a pass."""
    params = SamplingParams(repeat_penalty=1.5)
    plain, drafted = session(models, None), session(models, "near")
    for prompt in PROMPTS:
        tokens = models["big"].tokenizer.encode(prompt)
        assert answer(drafted, tokens, params=params)[0] == answer(plain, tokens, params=params)[0]
    plain.close()
    drafted.close()


# --- where a text ends


@pytest.fixture(scope="module", params=["self", "ngram"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model that says SAID after a T and stops: texts without and with a draft, which is always right."""
    path = tiny.speaking_gguf(tmp_path_factory.mktemp("speaking") / "x.gguf", SAID)
    with ork.load(path, n_ctx=CONTEXT) as model:

        def run(drafted: bool, prompt: str, limit: int, stop: tuple[str, ...] = ()) -> tuple[str, list[int], Stats]:
            small = drafter(model, 0.0) if request.param == "self" else PromptLookup()
            s = Session(model.engine, model.tokenizer, drafter=small if drafted else None)
            stats = Stats()
            tokens = model.tokenizer.encode(prompt)
            text = "".join(s.generate(tokens, GREEDY, limit=limit, stop=stop, stats=stats))
            assert s.seq.length == len(s.tokens)
            fed = list(s.tokens)
            s.close()
            return text, fed, stats

        yield run


@pytest.mark.parametrize("limit", [-1, 0, 1, 2, 3, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("stop", [(), ("wiz",), ("iz", "wizard"), ("d's b",), ("böx!",), ("h",), ("ö",)])
def test_ends_are_the_same(pair: Any, limit: int, stop: tuple[str, ...]) -> None:
    """End tokens, limits and stop texts within a run of right proposals, in the middle of a character too."""
    prompt = SAID + "\n" + "T"  # seen before, for the look-up
    text, tokens, alone = pair(False, prompt, limit, stop)
    got, fed, stats = pair(True, prompt, limit, stop)
    assert (got, fed, stats.reason, stats.new_tokens) == (text, tokens, alone.reason, alone.new_tokens)
    if limit in (-1, 17) and not stop:
        assert stats.reason == ("stop" if limit == -1 else alone.reason)
        assert stats.passes < alone.passes / 2


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("before", [590, 597, 598, 599, 600])
def test_a_full_context_ends_it(models: dict[str, ork.LoadedModel], draft: str, before: int) -> None:
    tokens = [3 + i % 7 for i in range(before)]
    plain, drafted = session(models, None), session(models, draft)
    want, alone = answer(plain, tokens, -1)
    got, stats = answer(drafted, tokens, -1)
    assert (got, stats.reason, stats.new_tokens) == (want, alone.reason, alone.new_tokens)
    assert drafted.tokens == plain.tokens
    plain.close()
    drafted.close()


@pytest.mark.parametrize("before", [95, 99, 100, 101])
def test_a_drafts_own_context_only_ends_the_draft(models: dict[str, ork.LoadedModel], before: int) -> None:
    tokens = [3 + i % 90 for i in range(before)]
    plain, drafted = session(models, None), session(models, "short")
    want, _ = answer(plain, tokens, 40)
    got, stats = answer(drafted, tokens, 40)
    assert got == want
    assert (stats.proposed > 0) == (before + 1 <= 100)
    assert stats.proposed <= sum(range(100 - before + 1))  # with each pass one token less fits
    plain.close()
    drafted.close()


@pytest.mark.parametrize("draft", ["big", "near", "ngram"])
@pytest.mark.parametrize("taken", [1, 3, 4, 9, 20])
def test_a_generation_that_is_left(models: dict[str, ork.LoadedModel], draft: str, taken: int) -> None:
    tokens = models["big"].tokenizer.encode(PROMPTS[2])
    left = []
    for name in (None, draft):
        s = session(models, name)
        stats = Stats()
        pieces = s.generate(tokens, GREEDY, limit=40, stats=stats)
        shown = list(islice(pieces, taken))
        pieces.close()  # type: ignore[attr-defined]
        assert s.seq.length == len(s.tokens)
        left.append((shown, list(s.tokens), stats.reason))
        more, _ = answer(s, [*s.tokens, 70, 71])
        left.append(more)
        s.close()
    assert left[:2] == left[2:]
    assert left[0][2] == "interrupted"


@pytest.mark.parametrize("who", ["big", "near"])
def test_an_interrupt_within_a_pass(
    models: dict[str, ork.LoadedModel], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Ctrl-C between two operations of either model: the session is whole, and goes on as if nothing had happened."""
    tokens = models["big"].tokenizer.encode(PROMPTS[0])
    want = answer(fresh := session(models, None), tokens)[0]
    fresh.close()
    s = session(models, "near")
    ends = models[who].model.ends  # type: ignore[attr-defined]
    real = ends.logits
    for passes in (1, 2, 3, 5):
        left = passes

        def interrupting(x: object, rows: object) -> object:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return real(x, rows)

        monkeypatch.setattr(ends, "logits", interrupting)
        with pytest.raises(KeyboardInterrupt):
            answer(s, tokens)
        monkeypatch.undo()
        assert s.seq.length == len(s.tokens)
        assert answer(s, tokens)[0] == want
        s.close()


def test_an_old_generation_let_go_does_not_disturb_the_next(models: dict[str, ork.LoadedModel]) -> None:
    tokens = models["big"].tokenizer.encode(PROMPTS[0])
    s = session(models, "near")
    old = s.generate(tokens, GREEDY, limit=60)
    next(old)
    new = s.generate(tokens, GREEDY, limit=60)
    pieces = [next(new)]
    del old
    pieces += new
    s.close()
    fresh = session(models, None)
    assert "".join(pieces) == answer(fresh, tokens)[0]
    fresh.close()


def test_chats_with_a_draft(models: dict[str, ork.LoadedModel], tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "big.gguf", tiny.metadata("qwen3"), tiny.random_tensors("qwen3", 0))
    talks = []
    for draft in (None, path, "ngram"):
        with ork.load(path, n_ctx=600, draft=draft, draft_max=4) as model:
            chat = model.chat()
            stats = Stats()
            talks.append([list(chat.send(text, max_tokens=30, stats=stats)) for text in ("hello there", "and then?")])
            assert stats.cached_tokens > 30
            del chat
            assert model.engine.pool.used_blocks == 0
            if isinstance(model.draft, ork.LoadedModel):
                assert model.draft.engine.pool.used_blocks == 0
    assert ["".join(t) for t in talks[0]] == ["".join(t) for t in talks[1]] == ["".join(t) for t in talks[2]]


def test_a_draft_stays_while_the_model_streams(tmp_path: Path) -> None:
    """Through a window of two thirds of the model: the same text, and with fewer passes fewer bytes moved a token."""
    path = tiny.write(tmp_path / "big.gguf", tiny.metadata("qwen3"), tiny.random_tensors("qwen3", 0))
    with ork.load(path, n_ctx=600) as model:
        want = "".join(model.generate(PROMPTS[2], max_tokens=60))
        window = model.stream.stats.resident_bytes * 2 // 3
    moved = []
    for draft in (None, path):
        with ork.load(path, n_ctx=600, threads=1, window=window, draft=draft) as model:
            before = model.stream.stats.moved_bytes
            assert "".join(model.generate(PROMPTS[2], max_tokens=60)) == want
            moved.append(model.stream.stats.moved_bytes - before)
            if isinstance(model.draft, ork.LoadedModel):
                assert model.draft.stream.stats.evictions == 0
    assert moved[1] < 0.7 * moved[0]


# --- the same bits


@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("before", [7, BLOCK - 3, BLOCK])
def test_rows_that_are_cut_off_leave_no_trace(models: dict[str, ork.LoadedModel], before: int, kept: int) -> None:
    """Wrong rows computed and forgotten, within a block and across its edge: all later logits are the fresh ones."""
    engine = models["big"].engine
    text = np.random.default_rng(3).integers(3, 259, before + 12).tolist()
    fresh = engine.logits(text)
    seq = Sequence()
    engine.prefill(seq, text[:before])
    rows = engine.forward([(seq, [*text[before : before + kept], 250, 251, 252, 253])], every=True)
    assert np.array_equal(rows[:kept], fresh[before : before + kept])
    engine.pool.truncate(seq, before + kept)
    rest = engine.forward([(seq, text[before + kept :])], every=True)
    assert np.array_equal(rest.view(np.uint32), fresh[before + kept :].view(np.uint32))
    engine.pool.truncate(seq, 0)


# --- the same probabilities


class Table:
    """An engine whose logits depend on the last token only."""

    def __init__(self, logits: np.ndarray):
        self.logits, self.context, self.pool = logits, 100, self
        self.model = SimpleNamespace(config=SimpleNamespace(vocab=len(logits)))

    def truncate(self, seq: Sequence, length: int) -> None:
        assert 0 <= length <= seq.length
        seq.length = length

    def forward(self, parts: list[tuple[Sequence, list[int]]], *, every: bool = False) -> np.ndarray:
        ((seq, tokens),) = parts
        seq.length += len(tokens)
        return self.logits[tokens] if every else self.logits[tokens[-1:]]

    def prefill(self, seq: Sequence, tokens: list[int]) -> np.ndarray:
        return self.forward([(seq, tokens)])[0]


SYMBOLS, LENGTH, RUNS = 6, 3, 5000
BIG = (np.random.default_rng(1).standard_normal((SYMBOLS, SYMBOLS)) * 1.3).astype(np.float32)
SMALL = (0.6 * BIG + np.random.default_rng(2).standard_normal((SYMBOLS, SYMBOLS)) * 0.7).astype(np.float32)
SPELLING = SimpleNamespace(eog=frozenset(), stream=lambda: SimpleNamespace(push=str, flush=str))
START = [5]  # a text of the large model's own, so that what followed once may follow again
_rng = np.random.default_rng(3)
for _ in range(24):
    START.append(int(np.argmax(BIG[START[-1]] + _rng.gumbel(size=SYMBOLS))))
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def probabilities(penalty: float, **filters: Any) -> np.ndarray:
    """Of every text of LENGTH tokens after START, in float64 from the definitions of the filters."""
    out = np.zeros([SYMBOLS] * LENGTH)
    for text in product(range(SYMBOLS), repeat=LENGTH):
        p, before = 1.0, list(START)
        for token in text:
            row = BIG[before[-1]].copy()
            seen = sorted(set(before))
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
            p *= distribution(row, **filters)[token]
            before.append(token)
        out[text] = p
    return out


@pytest.mark.parametrize("draft", ["model", "ngram"])
@pytest.mark.parametrize(
    ("changes", "penalty"),
    [
        ({}, 1.0),
        ({"temperature": 0.6}, 1.0),
        ({"top_k": 3}, 1.0),
        ({"top_p": 0.8}, 1.0),
        ({"min_p": 0.2}, 1.0),
        ({"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.05}, 1.4),
    ],
)
def test_texts_come_as_often_as_without_a_draft(draft: str, changes: dict[str, Any], penalty: float) -> None:
    """Chi-square over whole texts: the statistic of n cells has mean n - 1 and deviation sqrt(2 (n - 1))."""
    filters = OFF | changes
    want = probabilities(penalty, **filters)
    assert abs(want.sum() - 1) < 1e-9
    drawn: Counter[tuple[int, ...]] = Counter()
    accepted = proposed = 0
    for seed in range(RUNS):
        small = DraftModel(Table(SMALL), SPELLING, vocab=SYMBOLS, cost=0.0)  # type: ignore[arg-type]
        s = Session(Table(BIG), SPELLING, drafter=small if draft == "model" else PromptLookup())  # type: ignore[arg-type]
        stats = Stats()
        params = SamplingParams(seed=seed, repeat_penalty=penalty, **filters)
        text = "".join(s.generate(START, params, limit=LENGTH, stats=stats))
        drawn[tuple(int(c) for c in text)] += 1
        accepted, proposed = accepted + stats.accepted, proposed + stats.proposed
    assert 0.1 < accepted / proposed < 0.97
    assert all(want[text] > 0 for text in drawn)
    cells = np.argwhere(want * RUNS >= 5)
    expected = np.array([want[tuple(c)] for c in cells]) * RUNS
    observed = np.array([drawn[tuple(c.tolist())] for c in cells], float)
    if expected.sum() < RUNS - 5:  # the rare ones together
        expected, observed = np.append(expected, RUNS - expected.sum()), np.append(observed, RUNS - observed.sum())
    freedom = len(expected) - 1
    assert freedom >= 10
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5


def test_a_proposal_is_never_kept_that_the_filters_exclude() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    mine = ([2, 5], [0.75, 0.25])
    drawn = Counter(sampler.verify(mine, 7, ([7], [1.0])) for _ in range(400))
    assert set(drawn) == {2, 5}
    assert 250 < drawn[2] < 350


# --- which models go together


PADDED = {
    "tokenizer.ggml.tokens": [*tiny.TOKENS, *(f"[PAD{i}]" for i in range(20))],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (tiny.VOCAB - 3), *[5] * 20],
}


def padded_gguf(path: Path, seed: int) -> Path:
    """A model with 20 more tokens that have no text, and whose head wants to say nothing else."""
    tensors = tiny.random_tensors("llama", seed, rows=tiny.VOCAB + 20)
    tensors["output.weight"][tiny.VOCAB :] *= 50
    return tiny.write(path, tiny.metadata(**PADDED), tensors)


def test_a_drafts_padding_is_never_proposed(tmp_path: Path) -> None:
    big = tiny.random_gguf(tmp_path / "big.gguf")
    small = padded_gguf(tmp_path / "small.gguf", 0)
    with ork.load(big) as alone, ork.load(big, draft=small, draft_max=3) as both:
        want = "".join(alone.generate(PROMPTS[0], max_tokens=40))
        stats = Stats()
        assert "".join(both.generate(PROMPTS[0], max_tokens=40, stats=stats)) == want
        assert stats.proposed > 0


def test_tokens_that_the_draft_does_not_know(tmp_path: Path) -> None:
    """The large model says its own padding: the draft falls silent, the text is the model's."""
    big = padded_gguf(tmp_path / "big.gguf", 0)
    small = tiny.random_gguf(tmp_path / "small.gguf")
    with ork.load(big, kv="f32") as alone, ork.load(big, kv="f32", draft=small) as both:
        texts = []
        for model in (alone, both):
            s = model.session()
            text, _ = answer(s, [5, 6, 7], 20)
            texts.append((text, list(s.tokens)))
            s.close()
        assert texts[0] == texts[1]
        assert max(texts[0][1]) >= tiny.VOCAB


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.tokens": [*tiny.TOKENS[:-1], "Ġthen"]},
        {"tokenizer.ggml.merges": ["h e", "t h", "i n", "Ġ the"]},
        {"tokenizer.ggml.pre": "qwen2"},
        {"tokenizer.ggml.token_type": [3, 3, 3, *[1] * (tiny.VOCAB - 4), 4]},
    ],
)
def test_other_vocabularies_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    big = tiny.random_gguf(tmp_path / "big.gguf")
    small = tiny.random_gguf(tmp_path / "small.gguf", **changes)
    with pytest.raises(UsageError, match=r"small.*cannot draft for .*big.*vocabularies differ"):
        ork.load(big, draft=small)


def test_what_begins_and_ends_a_text_may_differ(tmp_path: Path) -> None:
    big = tiny.speaking_gguf(tmp_path / "big.gguf", SAID)
    small = tiny.speaking_gguf(tmp_path / "small.gguf", SAID, **{"tokenizer.ggml.eos_token_id": 2})
    with ork.load(big, draft=small) as model:
        assert "".join(model.generate("T")) == SAID[1:]


def test_bounds_of_draft_max(tmp_path: Path) -> None:
    path = tiny.speaking_gguf(tmp_path / "x.gguf", SAID)
    for bad in (0, -1, 65):
        with pytest.raises(UsageError, match="draft-max"):
            ork.load(path, draft="ngram", draft_max=bad)


def test_a_draft_whose_logits_are_no_numbers_is_named(models: dict[str, ork.LoadedModel]) -> None:
    small = DraftModel(Table(np.full((8, 8), np.nan, np.float32)), SPELLING, vocab=8, cost=0.0)  # type: ignore[arg-type]
    with pytest.raises(PackDamaged, match="the draft: the logits are not numbers"):
        small.propose([1, 2], 3, Sampler(GREEDY))


def test_a_pass_is_only_made_when_a_token_is_not_known_yet(models: dict[str, ork.LoadedModel]) -> None:
    """The verifier alone: after a pass over k right proposals the next k + 1 steps need no other."""
    s = session(models, "big")
    prompt = models["big"].tokenizer.encode(PROMPTS[0])
    token = int(np.argmax(s.engine.prefill(s.seq, prompt)))
    s.tokens += prompt
    stats = Stats()
    assert s.drafter is not None
    verifier = Verifier(s, Sampler(GREEDY), s.drafter, stats, 4)
    k = None
    for _ in range(3):
        token = verifier.step(token, 4)
        k = k or stats.proposed
        assert stats.passes == 1
    assert k is not None
    assert k >= 2
    s.forget()
    s.close()
