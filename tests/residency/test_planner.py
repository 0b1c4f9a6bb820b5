"""Placement: whole layers, even in bytes, within the limits, the same every time, refused with the numbers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.devices.base import Capacity, SliceSpec, blob_bytes
from ork.errors import UsageError
from ork.pack.format import align
from ork.residency.cache import plan_window
from ork.residency.planner import Sized, plan_placement, recorded
from ork.residency.stream import TensorSpec

GIB = 1 << 30


def model(layers: int, slices: int, nbytes: int, head: int = 0) -> list[Sized]:
    """Layers of two tensors, and a head of slices of the same size."""
    out: list[Sized] = []
    for layer in range(layers):
        for i in range(slices):
            out.append(((f"blk.{layer}.{'ffn' if i % 2 else 'attn'}", i // 2), nbytes))
    return out + [(("output.weight", i), nbytes) for i in range(head)]


def test_what_fits_one_domain_is_in_one() -> None:
    p = plan_placement(model(4, 4, 1 << 20, head=3), Capacity(16, 4 * GIB))
    assert set(p.domains.values()) == {0}
    assert p.bytes == {0: 19 << 20}


@pytest.mark.parametrize("count", [1, 2, 16])
def test_as_many_domains_as_asked_for_with_whole_layers(count: int) -> None:
    slices = model(32, 6, 1 << 20)
    p = plan_placement(slices, Capacity(16, 4 * GIB), domains=count)
    assert len(p.bytes) == count
    assert max(p.bytes.values()) == min(p.bytes.values()) == 192 * (1 << 20) // count
    homes: dict[str, set[int]] = {}
    for (name, _), domain in p.domains.items():
        homes.setdefault(name.split(".")[1], set()).add(domain)
    assert all(len(h) == 1 for h in homes.values())


@pytest.mark.parametrize(("count", "most"), [(17, 16), (0, 16), (2, 1)])
def test_more_domains_than_there_are(count: int, most: int) -> None:
    with pytest.raises(UsageError, match=f"--domains {count}"):
        plan_placement(model(2, 2, 4096), Capacity(most, 4 * GIB), domains=count)


def test_fewer_layers_than_domains_are_cut() -> None:
    p = plan_placement(model(2, 8, 4096), Capacity(16, 4 * GIB), domains=16)
    assert p.bytes == dict.fromkeys(range(16), 4096)


def test_a_head_larger_than_a_domain_is_cut_and_layers_are_not() -> None:
    p = plan_placement(model(4, 2, 1 << 20, head=20), Capacity(16, 8 << 20))
    assert max(p.bytes.values()) <= 8 << 20
    for layer in range(4):
        assert p.domains[f"blk.{layer}.attn", 0] == p.domains[f"blk.{layer}.ffn", 0]


def test_refused_with_the_numbers() -> None:
    big = model(64, 100, 2 << 20)  # 12.5 GiB
    assert len(plan_placement(big, Capacity(16, 4 * GIB)).bytes) == 4
    with pytest.raises(UsageError, match=r"12\.50 GiB.* 2 domains of 4\.00 GiB.*--window"):
        plan_placement(big, Capacity(16, 4 * GIB), domains=2)
    with pytest.raises(UsageError, match=r"16 domains of 0\.50 GiB"):
        plan_placement(big, Capacity(16, GIB // 2))


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=20),
    st.integers(1, 16),
    st.integers(9, 60),
    st.integers(0, 9),
)
def test_any_model(layers: list[list[int]], count: int, limit: int, slots: int) -> None:
    """In order, within the limit, evenly: no other division into whole units has a smaller largest domain."""
    slices = [((f"blk.{i}.w", j), 4096 * n) for i, unit in enumerate(layers) for j, n in enumerate(unit)]
    capacity = Capacity(16, 4096 * limit)
    try:
        p = plan_placement(slices, capacity, domains=count, slot_bytes=4096 * slots)
    except UsageError:
        assert sum(n for _, n in slices) + 4096 * slots > 4096 * (limit - 9 - max(map(sum, layers))) * count
        return
    order = [p.domains[key] for key, _ in slices]
    assert order == sorted(order)
    assert max(p.bytes.values()) <= 4096 * limit
    assert sum(p.bytes.values()) == sum(n for _, n in slices) + 4096 * slots
    assert sorted(p.bytes) == list(range(len(p.bytes)))
    assert len(p.bytes) <= count
    units = [4096 * sum(u) for u in layers]
    if len(units) >= count and max(units) <= 4096 * limit:
        best = _smallest_largest([*units, *([4096 * slots] if slots else [])], count)
        assert max(p.bytes.values()) == best
    note = json.loads(json.dumps(p.note()))
    again = recorded(note, slices, capacity, domains=count, slot_bytes=4096 * slots)
    assert again is not None
    assert (again.domains, again.bytes, again.slot_domain) == (p.domains, p.bytes, p.slot_domain)


def _smallest_largest(sizes: list[int], count: int) -> int:
    """By dynamic programming."""
    best = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    for _ in range(count - 1):
        best = [min(max(best[j], sum(sizes[j:i])) for j in range(i + 1)) for i in range(len(sizes) + 1)]
    return best[-1]


def test_a_note_of_another_board_or_model_is_not_used() -> None:
    slices, capacity = model(8, 2, 1 << 20), Capacity(16, 6 << 20)
    note = plan_placement(slices, capacity).note()
    note = json.loads(json.dumps(note))
    assert recorded(note, slices, capacity) is not None
    assert recorded(note, slices, Capacity(8, 6 << 20)) is None
    assert recorded(note, slices, capacity, domains=4) is None
    assert recorded(note, slices[1:], capacity) is None
    assert recorded(note, [*slices, (("x", 0), 4096)], capacity) is None
    for broken in (
        None,
        [],
        {"board": note["board"]},
        {**note, "records": [1]},
        {**note, "records": note["records"][1:]},
    ):
        assert recorded(broken, slices, capacity) is None
    moved = json.loads(json.dumps(note))
    moved["records"][0][0] = 5
    assert recorded(moved, slices, capacity) is None
    long = json.loads(json.dumps(note))
    long["records"][0][3] += 1
    assert recorded(long, slices, capacity) is None


def _tensor(name: str, K: int, columns: int) -> TensorSpec:
    """Slices of 64 columns."""
    specs = tuple(SliceSpec(name, "i8", K, K, K, n, n + 64) for n in range(0, columns, 64))
    return TensorSpec(name, "i8", columns, K, 0, 0, specs)


@given(
    st.lists(st.tuples(st.sampled_from([32, 256, 1024, 4096]), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 2400),
    st.booleans(),
)
def test_a_window_keeps_the_first_tensor_and_slices_all_along_the_order(
    shapes: list[tuple[int, int]], cores: int, extra: int, even: bool
) -> None:
    tensors = [_tensor(f"t{i}", K, 64 * n) for i, (K, n) in enumerate(shapes)]
    sizes = {(t.name, i): align(t.blob_bytes(i)) for t in tensors for i in range(len(t.slices))}
    largest = max(sizes.values())
    window = (cores + 1) * largest + 4096 * extra
    plan = plan_window(tensors, window, cores, blob_bytes, even=even)
    assert sorted([*plan.pinned, *plan.streamed]) == sorted(sizes)
    assert sorted(plan.pinned) == list(plan.pinned)
    assert sorted(plan.streamed) == list(plan.streamed)
    assert plan.pinned_bytes == sum(sizes[key] for key in plan.pinned)
    assert plan.mapped_bytes <= window
    if sum(sizes.values()) <= window:
        assert not plan.streamed
        return
    assert plan.slots >= cores + 1
    assert plan.slot_bytes == largest
    assert plan.slots == cores + 1 or plan.slots * largest <= window // 8
    assert cores <= plan.batch < plan.slots
    room = window - plan.slots * largest
    assert plan.pinned_bytes > room - 2 * largest
    head = sum(size for key, size in sizes.items() if key[0] == "t0")
    kept = {key: size for key, size in sizes.items() if key in plan.pinned}
    assert sum(size for key, size in kept.items() if key[0] == "t0") > min(head, room) - largest
    if not even:
        first = next(key for key in sizes if key not in kept)
        assert sum(size for key, size in kept.items() if key < first) > room - largest
        return
    rest, seen = sum(sizes.values()) - head, 0
    for key, size in sizes.items():  # of every stretch of the order as large a part stays as of all of it
        if key[0] != "t0":
            seen += size
            share = max(0, room - head) * seen / rest
            stays = sum(s for k, s in kept.items() if k[0] != "t0" and k <= key)
            assert share - 2 * largest < stays <= share + largest
