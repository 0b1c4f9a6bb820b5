"""Which experts a text chooses, and what a cache of any size would make of that.

A trace holds the experts of every token in every layer. Routing does not depend on how rows are batched, so a text read
in large chunks shows what decoding it token by token would look up. Hit rates come from the very pools that a run uses
(`residency/experts.py`), so they are what a run then measures. A profile is counted on one half of the text and all
rates are of the other half, from an empty cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ork.engine.kvcache import Sequence as Place
from ork.errors import UsageError
from ork.residency.experts import ExpertPlan, Item, Mapped, Pool, Profile, make_policy, piece_sizes, plan_experts

if TYPE_CHECKING:
    from ork.engine.session import Engine
    from ork.ops import Routes
    from ork.residency.stream import ExpertLayer

CHUNK = 512  # tokens of a pass while a trace is taken
SHARES = (0.5, 0.75, 0.9, 0.99)  # of a layer's lookups: how many experts cover them
POINTS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)  # of the experts' bytes: cache sizes
BOUND = "belady"  # beside the policies of a run
RAM_SHARE = 0.72  # of a board's RAM for weights: what the published planner for these boards takes

I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Routing:
    """The experts of each token, ascending: i32 [tokens, top_k] by layer; and how many there are, by layer."""

    chosen: Mapping[int, I32]
    experts: Mapping[int, int]

    @property
    def tokens(self) -> int:
        return len(next(iter(self.chosen.values()))) if self.chosen else 0

    @property
    def top_k(self) -> int:
        return max((ids.shape[1] for ids in self.chosen.values()), default=0)

    def counts(self) -> dict[int, npt.NDArray[np.int64]]:
        """How often each expert was chosen, by layer."""
        return {layer: np.bincount(ids.ravel(), minlength=self.experts[layer]) for layer, ids in self.chosen.items()}

    def profile(self) -> Profile:
        return {layer: counts.tolist() for layer, counts in self.counts().items()}

    def part(self, start: int, stop: int) -> Routing:
        return Routing({layer: ids[start:stop] for layer, ids in self.chosen.items()}, self.experts)

    def visits(self, layers: Sequence[int]) -> Iterator[list[Item]]:
        """What decoding would look up, layer by layer and token by token, of these layers."""
        # one object an expert: a long text looks up tens of millions
        items = {layer: [(layer, expert) for expert in range(self.experts[layer])] for layer in layers}
        for token in range(self.tokens):
            for layer in layers:
                own = items[layer]
                yield [own[expert] for expert in self.chosen[layer][token].tolist()]


def record(
    engine: Engine, tokens: Sequence[int], context: int, progress: Callable[[int, int], None] | None = None
) -> Routing:
    """Reads a text in sequences of `context` tokens, each on its own, and keeps what was routed where.

    Raises UsageError for a model without routed experts, and what a pass raises.
    """
    ops = engine.ops
    if not ops.expert_layers:
        raise UsageError("this model has no routed experts: there is nothing to count")
    found: dict[int, list[I32]] = {layer.layer: [] for layer in ops.expert_layers}

    def listen(layer: int, routes: Routes) -> None:
        found[layer].append(np.array(routes.ids()))

    ops.router = listen
    try:
        for start in range(0, len(tokens), context):
            place = Place()
            sequence = tokens[start : start + context]
            try:
                for at in range(0, len(sequence), CHUNK):
                    engine.forward([(place, sequence[at : at + CHUNK])])
                    if progress:
                        progress(min(start + at + CHUNK, start + len(sequence)), len(tokens))
            finally:
                engine.pool.truncate(place, 0)
    finally:
        ops.router = None
    chosen = {layer: np.concatenate(parts).astype(np.int32) for layer, parts in found.items()}
    return Routing(chosen, {layer.layer: len(layer) for layer in ops.expert_layers})


# --- skew ----------------------------------------------------------------------------------------------------------


def gini(counts: npt.ArrayLike) -> float:
    """0: all experts are used alike; towards 1: one takes all. Mean absolute difference over twice the mean."""
    x = np.sort(np.asarray(counts, np.float64))
    n, total = len(x), x.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ x / (n * total)) if total else 0.0


def coverage(counts: npt.ArrayLike) -> F64:
    """Share of lookups that the 1, 2, ... most used experts take: f64 [experts], rising to 1."""
    x = np.sort(np.asarray(counts, np.float64))[::-1]
    total = x.sum()
    return np.cumsum(x) / total if total else np.ones(len(x))


def pinned_coverage(train: Profile, held: Routing) -> dict[int, F64]:
    """The same by layer of another text than the one that chose who is most used: what pinning so many would hit."""
    counts = held.counts()
    covered = {}
    for layer, uses in train.items():
        order = np.argsort(-np.asarray(uses), kind="stable")
        covered[layer] = np.cumsum(counts[layer][order]) / max(1, counts[layer].sum())
    return covered


# --- caches --------------------------------------------------------------------------------------------------------


def hit_rate(trace: Routing, plan: ExpertPlan) -> float:
    """Share of the lookups that a run with this plan finds, decoding the trace from an empty cache."""
    lookups = misses = 0
    for pool in plan.pools:
        stay = {(layer, expert) for layer in pool.layers for expert in plan.stay.get(layer, ())}
        slots = Pool(pool.slots, make_policy(plan.policy, len(pool.layers)))
        for visit in trace.visits(pool.layers):
            lookups += len(visit)
            misses += len(slots.visit([item for item in visit if item not in stay]).loads)
    return 1 - misses / lookups if lookups else 1.0


def belady(visits: Sequence[Sequence[Item]], slots: int) -> int:
    """The most hits that any cache of so many slots can have, whatever it holds at first: between two visits it keeps
    what is needed again soonest. (A stay from one use to the next takes a slot; of too many at a time the one that ends
    last is given up.)"""
    uses: dict[Item, list[int]] = {}  # latest first
    for at in range(len(visits) - 1, -1, -1):
        for item in visits[at]:
            uses.setdefault(item, []).append(at)
    due: dict[Item, int] = {}  # of what is kept: its next use
    latest: list[tuple[int, Item]] = []  # a heap of the same, and of what was true once

    def keep(items: Iterable[Item]) -> None:
        for item in items:
            if uses[item]:
                due[item] = uses[item][-1]
                heapq.heappush(latest, (-due[item], item))
        while len(due) > slots:
            when, item = heapq.heappop(latest)
            if due.get(item) == -when:
                del due[item]

    keep(uses)
    hits = 0
    for visit in visits:
        for item in visit:
            hits += due.pop(item, None) is not None
            uses[item].pop()
        keep(visit)
    return hits


@dataclass(frozen=True)
class Point:
    """Hit rates by policy with `nbytes` for experts; `slots` is the mean number a layer has."""

    nbytes: int
    slots: float
    rates: Mapping[str, float]

    @property
    def best(self) -> str:
        """The policy of a run with the most hits; of equals the simplest."""
        return max((name for name in self.rates if name != BOUND), key=lambda name: self.rates[name])


def curve(
    trace: Routing, profile: Profile, layers: Sequence[ExpertLayer], mapped: Mapped, sizes: Sequence[int]
) -> list[Point]:
    """Hit rates on `trace` of every policy and of the bound, by bytes for experts. `profile` is of another text. Sizes
    with no room for two experts are left out."""
    points = []
    visits = list(trace.visits([layer.layer for layer in layers]))
    lookups = max(1, sum(map(len, visits)))
    smallest = min(sum(piece_sizes([layer], mapped)) for layer in layers)
    for nbytes in sizes:
        plans = {name: plan_experts(layers, nbytes, mapped, name, profile) for name in ("lru", "lfu", "pinned")}
        rates = {name: hit_rate(trace, plan) for name, plan in plans.items() if plan is not None}
        plan = plans["lru"]
        if plan is None:
            continue
        rates[BOUND] = belady(visits, nbytes // smallest) / lookups
        slots = sum(p.slots for p in plan.pools) + sum(map(len, plan.stay.values()))
        points.append(Point(nbytes, slots / len(layers), rates))
    return points


def sizes_of(layers: Sequence[ExpertLayer], mapped: Mapped) -> list[int]:
    """POINTS of the experts' bytes, in whole MiB, or as they are of a model of a few MiB."""
    total = expert_bytes(layers, mapped)
    unit = 1 << 20 if total >= 64 << 20 else 1
    return sorted({-(-int(share * total) // unit) * unit for share in POINTS})


def expert_bytes(layers: Sequence[ExpertLayer], mapped: Mapped) -> int:
    """What all experts take in slots."""
    plan = plan_experts(layers, 1 << 62, mapped)
    assert plan is not None
    return plan.nbytes


# --- what one layer says of the next ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Shares of a layer's experts that would have been known before its router: `across` from the experts of the layer
    before, `before` as those of the token before, `common` as the ones most used. Nothing is built on it."""

    layer: int
    across: float
    before: float
    common: float


def predictions(train: Routing, held: Routing) -> list[Prediction]:
    """Of every layer but the first with experts. `across` guesses as many experts as are chosen: those with the largest
    sum, over the experts of the layer before, of how often the two met in `train`, as a share of the former's uses."""
    found = []
    layers = list(held.chosen)
    for first, second in pairwise(layers):
        met = np.zeros((held.experts[first], held.experts[second]))
        ids, then = train.chosen[first], train.chosen[second]
        for i in range(ids.shape[1]):
            for j in range(then.shape[1]):
                np.add.at(met, (ids[:, i], then[:, j]), 1)
        met /= np.maximum(met.sum(axis=1, keepdims=True), 1)
        truth = held.chosen[second]
        guess = np.concatenate([_likely(met, ids, truth.shape[1]) for ids in _some(held.chosen[first])])
        common = np.argsort(-train.counts()[second], kind="stable")[: truth.shape[1]]
        found.append(
            Prediction(
                second,
                _met(guess, truth),
                _met(truth[:-1], truth[1:]) if len(truth) > 1 else 0.0,
                _met(np.broadcast_to(common, truth.shape), truth),
            )
        )
    return found


def _likely(met: F64, ids: I32, count: int) -> npt.NDArray[np.int64]:
    """The experts of the next layer that met those of each row most often: [rows, count]."""
    return np.argsort(-met[ids].sum(axis=1), axis=1, kind="stable")[:, :count]


def _some(ids: I32) -> Iterator[I32]:
    """Rows, so many that a few arrays of as many experts each stay small."""
    return (ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK))


def _met(guess: npt.NDArray[Any], truth: npt.NDArray[Any]) -> float:
    """Mean share of each row of `truth` that is in the same row of `guess`."""
    return float((guess[:, :, None] == truth[:, None, :]).any(axis=1).mean()) if truth.size else 0.0


# --- a board ---------------------------------------------------------------------------------------------------------


def room_for_experts(ram: int, dense: int, kv: int) -> int:
    """What a board of `ram` bytes has for experts beside dense weights and a KV cache; below 0: not even these fit."""
    return int(ram * RAM_SHARE) - dense - kv
