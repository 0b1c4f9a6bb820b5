"""Experts in a window: the right bytes whatever is routed, no more of them than asked for, loads as the pools say."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.errors import StorageError, UsageError
from ork.residency import expert_cache, experts
from ork.residency.experts import HALF_LIFE, Lfu, Lru, Pool, Visit, plan_experts, plan_parts, profile_of
from ork.residency.stream import Stream
from ork.residency.window import Window
from tests.residency.fakes import EXPERT, ROOM, FakeDevice, FakeSource, expert_layer, right, tensor

LAYERS, EXPERTS = 3, 6
DENSE = 2  # slices a layer


class Model:
    """A window over three layers of six experts each, and what its device and source saw."""

    def __init__(self, slots: int, *, prefetch: bool = True, policy: str = "lru", spare: int = 0, **fakes: Any):
        self.dense = [tensor("output.weight", 1), *(tensor(f"blk.{i}.attn_q.weight", DENSE) for i in range(LAYERS))]
        self.layers = [expert_layer(i) for i in range(LAYERS)]
        every = [t for layer in self.layers for e in range(EXPERTS) for t in layer.tensors(e)]
        self.source = FakeSource([*self.dense, *every], **fakes)
        self.device = FakeDevice()
        slices = 1 + DENSE * LAYERS + slots * EXPERT + spare
        profile = {i: [(e * 7 + i) % EXPERTS for e in range(EXPERTS)] for i in range(LAYERS)}
        self.window = Window(
            self.source,  # type: ignore[arg-type]
            self.device,  # type: ignore[arg-type]
            slices * ROOM,
            prefetch=prefetch,
            expert_policy=policy,
            profile=profile if policy == "pinned" else None,
        )
        self.window.tensors = self.dense
        self.window.expert_layers = self.layers

    def visit(self, layer: int, needed: Sequence[int]) -> list[int]:
        """A pass of a layer, each slice of each expert looked at; the experts in the order in which they came."""
        seen: dict[int, list[tuple[str, int]]] = {}
        for ids, handles in self.window.experts(self.layers[layer], needed):
            assert len(ids) == len(set(ids)) == len(handles)
            for e, roles in zip(ids, handles):
                for held in roles:
                    for handle in held:
                        assert right(handle)
                        seen.setdefault(e, []).append(handle[0])
            assert all(right(h) for roles in handles for held in roles for h in held), "taken while it is computed"
        for e, keys in seen.items():
            assert keys == [(t.name, i) for t in self.layers[layer].tensors(e) for i in range(len(t.slices))]
        assert sorted(seen) == list(needed)
        assert self.window.stats.peak_bytes <= self.window.window
        assert self.device.peak <= self.window.window
        return list(seen)


visits = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1), min_size=1).map(sorted)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(visits=visits, slots=st.integers(2, LAYERS * EXPERTS), policy=st.sampled_from(["lru", "lfu", "pinned"]))
def test_any_routing_finds_the_right_bytes(visits: list[tuple[int, list[int]]], slots: int, policy: str) -> None:
    counts = []
    for prefetch, cached in ((True, False), (True, True), (False, False)):
        model = Model(slots, policy=policy, prefetch=prefetch, cached=cached)
        model.window.reside()
        live = model.device.live
        for layer, needed in visits:
            model.visit(layer, needed)
            assert model.device.live == live, "slots are made once"
        stats = model.window.stats.experts
        assert stats.lookups.total() == sum(len(needed) for _, needed in visits)
        stay = sum(map(len, model.window.expert_plan.stay.values())) if model.window.expert_plan else 0
        assert stats.hits.total() + stats.loads.total() - stay == stats.lookups.total()
        counts.append((stats.lookups, stats.hits, stats.loads, stats.moved_bytes))
        model.window.close()
        assert (model.device.live, model.window.stats.resident_bytes) == (0, 0)
    assert counts[0] == counts[1] == counts[2], "prefetch changes when, not what"


@settings(max_examples=20, deadline=None)
@given(visits=visits, spare=st.integers(1 - DENSE * LAYERS, 6))
def test_in_a_window_that_dense_weights_fill(visits: list[tuple[int, list[int]]], spare: int) -> None:
    """Experts pass whole through two slots, or in slices where there is not even room for two."""
    model = Model(0, spare=spare + 2)
    for layer, needed in visits:
        for t in (model.dense[0], model.dense[1 + layer]):
            for _, handles in model.window.batches([t]):
                assert all(right(h) for h in handles)
        model.visit(layer, needed)
    assert model.window.stats.experts.lookups.total() == sum(len(needed) for _, needed in visits)
    model.window.close()
    assert model.device.live == 0


def test_a_window_for_less_than_that_is_refused() -> None:
    model = Model(0, spare=-DENSE * LAYERS + 2)  # three slices: two of dense weights, one of experts
    with pytest.raises(UsageError, match=r"too small by .* give --window 1M more"):
        model.window.staying()
    assert model.device.live == 0


# --- pools against what policies mean ----------------------------------------------------------------------------


def replay(pool: Pool, visits: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[Visit]:
    """Visits of a pool, with a plain memory beside it: who is in which slot."""
    memory: dict[int, tuple[int, ...]] = {}
    for needed in visits:
        before = set(memory.values())
        visit = pool.visit(needed)
        assert set(visit.hits) == before & set(needed)
        assert sorted([*visit.hits, *(load.item for load in visit.loads)]) == sorted(needed)
        assert all(memory[slot] == item for item, slot in visit.hits.items())
        done = list(visit.hits)
        for i, load in enumerate(visit.loads):
            gone = memory.get(load.slot)
            # it is not needed, or was computed before: with a batch of `most` in hand all the same
            ended = [*done, *(x.item for x in visit.loads[: max(0, i - (visit.most - 1 if pool.slots > 1 else 0))])]
            assert gone not in needed or (gone in ended and load.after == gone)
            assert load.after in (None, gone)
            memory[load.slot] = load.item
        assert len(memory) <= pool.slots
        assert {slot: item for item, slot in pool._held.items()} == memory
        yield visit


items = st.lists(
    st.sets(st.integers(0, 9), min_size=1, max_size=6).map(lambda s: [(0, e) for e in sorted(s)]), max_size=40
)


@settings(max_examples=80, deadline=None)
@given(visits=items, slots=st.integers(1, 9))
def test_no_slot_is_taken_from_an_expert_in_use(visits: list[list[tuple[int, ...]]], slots: int) -> None:
    for policy in (Lru(), Lfu()):
        assert sum(len(v.loads) + len(v.hits) for v in replay(Pool(slots, policy), visits)) == sum(map(len, visits))


@settings(max_examples=40, deadline=None)
@given(sequence=st.lists(st.integers(0, 7), max_size=60), slots=st.integers(1, 8))
def test_one_expert_at_a_time_is_a_textbook_cache(sequence: list[int], slots: int) -> None:
    """LRU against a list."""
    held: list[int] = []
    expected = []
    for e in sequence:
        expected.append(e in held)
        if e in held:
            held.remove(e)
        held = [*held, e][-slots:]
    visits = [[(0, e)] for e in sequence]
    assert [bool(v.hits) for v in replay(Pool(slots, Lru()), visits)] == expected


def test_lfu_keeps_what_is_used_and_lets_go_of_what_was() -> None:
    pool = Pool(2, Lfu())
    for _ in range(5):
        pool.visit([(0, 1)])
    for other in (2, 3, 4):
        pool.visit([(0, other)])
        assert (0, 1) in pool, "an expert that came once takes the slot of another that came once"
    for _ in range(8 * HALF_LIFE):  # what was popular long ago is not for ever
        pool.visit([(0, 5)])
    pool.visit([(0, 6)])
    pool.visit([(0, 5)])
    assert (0, 1) not in pool or (0, 6) in pool


# --- what comes first, and what goes wrong -----------------------------------------------------------------------


def test_present_experts_are_computed_while_the_others_come() -> None:
    model = Model(LAYERS * 4)
    model.visit(0, [1, 2])
    model.source.allowed.clear()  # the disk does not answer
    batches = model.window.experts(model.layers[0], [0, 1, 2, 3])
    ids, _ = next(batches)
    assert ids == [1, 2]
    model.source.allowed.set()
    assert sorted(e for ids, _ in batches for e in ids) == [0, 3]
    model.window.close()


def test_missing_experts_are_asked_for_at_once() -> None:
    """Reads that wait for each other: one after the other they would never end."""
    together = threading.Barrier(3, timeout=20)

    def meet(key: tuple[str, int]) -> None:
        if "gate_exps" in key[0]:
            together.wait()

    model = Model(LAYERS * 4, fail=meet)
    assert model.visit(1, [0, 3, 5]) == [0, 3, 5]
    model.window.close()


def test_what_is_in_memory_is_copied_together_and_computed_in_one_go() -> None:
    model = Model(LAYERS * 4, cached=True)
    model.visit(1, [0, 1])
    before = model.source.copied
    batches = list(model.window.experts(model.layers[1], [0, 1, 2, 4]))
    assert [ids for ids, _ in batches] == [[0, 1, 2, 4]]
    assert model.source.copied - before == 2 * EXPERT
    model.visit(1, [0, 1, 2, 3, 4, 5])  # more than there are slots: some wait for others, and come as always
    model.window.close()
    assert model.device.live == 0


@pytest.mark.parametrize(("prefetch", "cached"), [(True, False), (True, True), (False, False)])
def test_an_expert_that_cannot_be_read(prefetch: bool, cached: bool) -> None:
    """One line, every slot as before, and what can be read still is."""
    broken = {"blk.1.ffn_up_exps.weight#3"}

    def fail(key: tuple[str, int]) -> None:
        if key[0] in broken:
            raise OSError(5, "Input/output error")

    model = Model(LAYERS * 4, prefetch=prefetch, fail=fail, cached=cached)
    model.visit(1, [0, 1])
    with pytest.raises(StorageError, match=r"blk\.1\.ffn_\w+_exps\.weight#[23] .*could not be loaded: OSError"):
        model.visit(1, [0, 2, 3, 4])
    model.visit(1, [0, 2, 4])
    broken.clear()
    model.visit(1, [0, 1, 2, 3, 4, 5])
    model.window.close()
    assert model.device.live == 0


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_pass_that_is_given_up(prefetch: bool) -> None:
    """An op that fails half-way leaves no slot taken; two passes at a time are refused, not mixed up."""
    model = Model(LAYERS * 3, prefetch=prefetch)
    batches = model.window.experts(model.layers[0], [0, 1, 2, 3, 4, 5])
    next(batches)
    with pytest.raises(RuntimeError, match="before another pass was ended"):
        model.visit(1, [0])
    batches.close()  # type: ignore[attr-defined]
    for _ in range(3):
        model.visit(0, [0, 1, 2, 3, 4, 5])
        model.visit(1, [2, 5])
    batches = model.window.experts(model.layers[2], [0, 1, 2, 3, 4, 5])
    next(batches)
    model.window.close()  # with a pass half done
    batches.close()  # type: ignore[attr-defined]
    assert model.device.live == 0


@pytest.mark.parametrize(("prefetch", "cached"), [(True, False), (True, True), (False, False)])
def test_an_interrupt_anywhere(prefetch: bool, cached: bool) -> None:
    """Ctrl-C ends an answer, not the chat: whatever line of the bookkeeping it comes at, the next pass finds the right
    bytes and all slots."""
    watched = {expert_cache.__file__, experts.__file__}

    def interrupted(at: int) -> bool:
        left = at

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in watched:
                return None
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            # no signal is looked for between `finally:` and an assignment, or before a lock is released
            if event == "line" and "run.over = True" not in line and "with self._" not in line:
                left -= 1
                if not left:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            model.visit(1, [0, 1, 4, 5] if at % 2 else [0, 1, 2, 3, 4, 5])
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    model = Model(LAYERS * 4, prefetch=prefetch, cached=cached)
    model.visit(1, [0, 2])
    at = 1
    while interrupted(at) or interrupted(at + 1):
        model.visit(1, [0, 2, 3, 5])
        model.visit(2, [1])
        at += 1
    assert at > 50
    model.visit(1, [0, 1, 2, 3])
    hits = model.window.stats.experts.hits[1]
    model.visit(1, [0, 1, 2, 3])
    assert model.window.stats.experts.hits[1] - hits == 4, "no slot was lost"
    model.window.close()
    assert model.device.live == 0


def test_a_window_that_is_closed_in_a_pass() -> None:
    for prefetch in (True, False):
        model = Model(LAYERS * 3, prefetch=prefetch)
        batches = model.window.experts(model.layers[2], [0, 1, 2, 3, 4, 5])
        next(batches)
        model.window.close()
        with pytest.raises(RuntimeError, match="closed while an op waited for experts"):
            list(batches)
        model.visit(2, [0, 1, 2, 3, 4, 5])  # opened again
        model.window.close()


def test_what_is_not_all_in_memory_is_read_past_the_page_cache() -> None:
    """A guess from one expert would have the others read through it, in turn."""
    model = Model(LAYERS * 4, cached=True)
    asked = model.source.cached
    model.source.cached = lambda name, index: not name.endswith("#4") and asked(name, index)  # type: ignore[method-assign]
    model.visit(1, [0, 4])
    assert model.source.copied == 0
    model.visit(1, [1, 4])
    assert model.source.copied == EXPERT
    model.window.close()


def test_without_a_window_experts_lie_where_they_lie() -> None:
    model = Model(2)
    stream = Stream(model.source, model.device)  # type: ignore[arg-type]
    stream.tensors, stream.expert_layers = model.dense, model.layers
    for _ in range(2):
        ((ids, handles),) = stream.experts(model.layers[1], [1, 4])
        assert ids == [1, 4]
        assert [h[0] for role in handles[1] for h in role] == [
            (t.name, i) for t in model.layers[1].tensors(4) for i in range(len(t.slices))
        ]
    assert list(stream.experts(model.layers[1], [])) == []
    stats = stream.stats.experts
    assert (stats.lookups[1], stats.hits[1], stats.loads[1], stats.hit_rate) == (4, 2, 2, 0.5)
    stream.reside()
    list(stream.experts(model.layers[2], range(EXPERTS)))
    assert stream.stats.lazy == 0
    assert stats.loads.total() == 2 + EXPERTS, "first use of a handle, though it was brought in before"
    stream.close()
    assert model.device.live == 0


# --- plans -------------------------------------------------------------------------------------------------------


def test_plans() -> None:
    layers = [expert_layer(i) for i in range(LAYERS)]

    def mapped(_: object) -> int:
        return ROOM - 5

    size = EXPERT * ROOM
    everything = plan_experts(layers, LAYERS * EXPERTS * size, mapped)
    assert everything is not None
    assert (everything.pools, everything.nbytes) == ((), LAYERS * EXPERTS * size)
    assert everything.reason == "all 18 experts fit"
    half = plan_experts(layers, LAYERS * EXPERTS * size // 2, mapped)
    assert half is not None
    assert [(p.layers, p.slots) for p in half.pools] == [((0,), 3), ((1,), 3), ((2,), 3)]
    assert half.reason.startswith("3 experts a layer, lru")
    more = plan_experts(layers, 11 * size + size // 2, mapped)
    assert more is not None
    assert [p.slots for p in more.pools] == [4, 4, 3], "no room for an expert is left"
    assert more.reason.startswith("3 to 4 experts a layer, lru")
    little = plan_experts(layers, 5 * size, mapped)  # less than two a layer: nothing would be kept to any use
    assert little is not None
    assert [(p.layers, p.slots) for p in little.pools] == [((0, 1, 2), 5)]
    assert little.reason.startswith("5 experts of all layers together, lru")
    assert plan_experts(layers, 2 * size - 1, mapped) is None


def test_room_that_small_experts_leave_goes_to_the_large_ones() -> None:
    """A layer that is stored in fewer bytes has all its experts there before its share is used up."""
    layers = [expert_layer(i) for i in range(LAYERS)]

    def mapped(spec: Any) -> int:
        return ROOM // 2 if spec.tensor.startswith("blk.0.") else 2 * ROOM

    small, large = EXPERT * ROOM // 2, EXPERT * ROOM * 2
    plan = plan_experts(layers, EXPERTS * small + 9 * large + small, mapped)
    assert plan is not None
    assert [p.slots for p in plan.pools] == [EXPERTS, 5, 4]


def test_a_use_is_remembered_for_as_many_passes_of_each_layer_that_shares_the_slots() -> None:
    """Else what 40 layers share would forget within three tokens what was popular."""
    layers, kept = 40, (0, 9)
    pool = Pool(3, experts.make_policy("lfu", layers))
    for _ in range(8):
        pool.visit([kept])
    for token in range(30):
        for layer in range(1, layers):
            pool.visit([(layer, token)])
    assert kept in pool


def test_what_a_profile_says_stays() -> None:
    layers = [expert_layer(i) for i in range(LAYERS)]
    profile = {0: [9, 0, 0, 1, 0, 0], 1: [1, 1, 1, 1, 1, 5], 2: [2, 2, 2, 2, 1, 1]}
    plan = plan_experts(layers, 8 * EXPERT * ROOM, lambda _: ROOM, "pinned", profile)
    assert plan is not None
    assert plan.pools[0].slots == 2
    assert plan.stay == {0: (0,), 1: (5,), 2: (0, 1, 2, 3)}, "by share of the layer's uses"
    with pytest.raises(UsageError, match="needs a routing profile in the pack: `ork skew"):
        plan_experts(layers, 8 * EXPERT * ROOM, lambda _: ROOM, "pinned")
    with pytest.raises(UsageError, match="does not hold 6 experts of layer 2"):
        plan_experts(layers, 8 * EXPERT * ROOM, lambda _: ROOM, "pinned", {**profile, 2: [1, 2]})
    with pytest.raises(UsageError, match="expert policy 'mru': known are lru, lfu, pinned"):
        plan_experts(layers, 8 * EXPERT * ROOM, lambda _: ROOM, "mru")


@pytest.mark.parametrize(
    "note",
    [None, 3, {}, {"counts": []}, {"counts": {}}, {"counts": {"a": [1]}}, {"counts": {"1": 2}}]
    + [{"counts": {"1": [1, wrong]}} for wrong in (-1, True, 0.5, "1", None, 1 << 60)],
)
def test_a_note_that_is_no_profile(note: object) -> None:
    assert profile_of(note) is None


def test_a_note_that_is_one() -> None:
    assert profile_of({"counts": {"1": [1, 2], "12": [0, 3]}, "text": "x"}) == {1: [1, 2], 12: [0, 3]}


def test_experts_that_nothing_is_left_for_are_read_side_by_side() -> None:
    layers = [expert_layer(i, 100) for i in range(LAYERS)]
    size = EXPERT * ROOM
    for experts_of_room, slots in ((200, 8), (64, 8), (40, 5), (17, 2), (2, 2)):
        plan = plan_parts(layers, experts_of_room * size, lambda _: ROOM, 3, "lru")
        assert [(p.slots, p.shared) for p in plan.pools] == [(slots, True)]
        assert not plan.parts
    assert plan_parts(layers, 2 * size - 1, lambda _: ROOM, 3, "lru").parts
