"""The slots against a plain model: whatever ops ask for, in any order, they read the right bytes in bounded room."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.errors import NpuError, OrkError, PackDamaged, StorageError, UsageError
from ork.residency import cache
from ork.residency.cache import Key
from ork.residency.prefetch import JUDGED, Loader
from ork.residency.stream import Stream, TensorSpec
from ork.residency.window import Window
from tests.residency.fakes import BLOB, ROOM, FakeDevice, FakeSource, right, tensor

DEADLINE = 20.0  # seconds after which a test says that something hangs


def window(
    tensors: list[TensorSpec], slices: int, *, cores: int = 1, prefetch: bool = True, **source: Any
) -> tuple[Window, FakeSource, FakeDevice]:
    """A window of so many slices."""
    made, device = FakeSource(tensors, **source), FakeDevice(cores)
    w = Window(made, device, slices * ROOM, prefetch=prefetch)  # type: ignore[arg-type]
    w.tensors = tensors
    return w, made, device


def run(w: Window, op: list[TensorSpec], stop: int = 1 << 30) -> int:
    """An op that reads its slices and checks them; it gives up before batch number `stop`. How many it read."""
    seen: list[tuple[int, Key]] = []
    for number, (indices, handles) in enumerate(w.batches(op)):
        assert len(handles) >= 1
        assert all(right(h) for h in handles)
        time.sleep(0)  # loaders run
        assert all(right(h) for h in handles)
        seen += [(i, h[0]) for i, h in zip(indices, handles)]
        if number >= stop:
            return len(seen)
    assert seen == [(i, (t.name, s)) for i, t in enumerate(op) for s in range(len(t.slices))]
    return len(seen)


def within(seconds: float, act: Callable[[], None]) -> None:
    """Fails instead of hanging."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "hangs"
    if failed:
        raise failed[0]


class Plain:
    """The same slots without threads: on a miss the slice goes whose turn on the cycle comes last."""

    def __init__(self, order: list[Key], slots: int):
        self.order, self.slots = order, slots
        self.held: list[Key] = []
        self.loads = self.hits = self.evictions = 0

    def op(self, keys: list[Key], cores: int) -> None:
        hand: list[Key] = []
        for key in keys:
            if len(hand) >= cores or key not in self.held:
                hand = []
            at = self.order.index(key)
            if key in self.held:
                self.hits += 1
            else:
                if len(self.held) == self.slots:
                    turns = {k: (self.order.index(k) - at) % len(self.order) for k in self.held if k not in hand}
                    self.held.remove(max(turns, key=lambda k: turns[k]))
                    self.evictions += 1
                self.held.append(key)
                self.loads += 1
            hand.append(key)


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=6)
orders = st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 6)), max_size=12)


@settings(max_examples=60)
@given(sizes, orders, st.integers(1, 3), st.integers(0, 8), st.booleans(), st.sampled_from([1, 2, 8]))
def test_any_order_of_ops(
    sizes: list[int], ops: list[tuple[list[int], int]], cores: int, more: int, prefetch: bool, share: int
) -> None:
    """Out of order, repeated, given up half-way: the bytes are right, the room is kept to, the counts add up."""
    tensors = [tensor(f"t{i}", n) for i, n in enumerate(sizes)]
    w, source, device = window(tensors, cores + 1 + more, cores=cores, prefetch=prefetch)

    def act() -> None:
        asked = 0
        for picks, stop in ops:
            asked += run(w, [tensors[p % len(tensors)] for p in picks], stop)
        w.reside()
        assert w.plan is not None
        assert device.peak == w.stats.peak_bytes == w.plan.mapped_bytes <= w.window
        assert device.made == len(w.plan.pinned) + w.plan.slots
        w.close()
        assert asked == w.stats.hits + w.stats.waits
        assert w.stats.loads == len(source.reads)
        assert w.stats.moved_bytes == w.stats.loads * BLOB

    with mock.patch.object(cache, "SLOTS_SHARE", share):  # what windows of hundreds of slices have
        within(DEADLINE, act)
    assert device.live == w.stats.resident_bytes == 0


@given(sizes, orders, st.integers(1, 3), st.booleans(), st.sets(st.integers(0, 60), max_size=12))
def test_reads_that_fail_now_and_then(
    sizes: list[int], ops: list[tuple[list[int], int]], cores: int, prefetch: bool, bad: set[int]
) -> None:
    """An op reads the right bytes or raises; what follows finds the window whole."""
    numbers = itertools.count()

    def fail(key: Key) -> None:
        if next(numbers) in bad:
            raise StorageError(f"no {key}")

    tensors = [tensor(f"t{i}", n) for i, n in enumerate(sizes)]
    w, _, device = window(tensors, cores + 1, cores=cores, prefetch=prefetch, fail=fail)

    def act() -> None:
        for picks, stop in ops:
            with contextlib.suppress(StorageError):
                run(w, [tensors[p % len(tensors)] for p in picks], stop)
        bad.clear()
        run(w, tensors)
        assert device.peak <= w.window
        w.close()

    within(DEADLINE, act)
    assert device.live == w.stats.resident_bytes == 0


@given(sizes, orders, st.integers(1, 3))
def test_without_prefetch_the_counts_are_the_plain_models(
    sizes: list[int], ops: list[tuple[list[int], int]], cores: int
) -> None:
    tensors = [tensor(f"t{i}", n) for i, n in enumerate(sizes)]
    w, _, _ = window(tensors, cores + 1, cores=cores, prefetch=False)
    w.reside()
    assert w.plan is not None
    if not w.plan.streamed:
        return
    plain = Plain([(t.name, i) for t in tensors for i in range(len(t.slices))], cores + 1)
    for picks, _stop in ops:
        op = [tensors[p % len(tensors)] for p in picks]
        run(w, op)
        plain.op([(t.name, i) for t in op for i in range(len(t.slices))], cores)
    assert (w.stats.loads, w.stats.hits, w.stats.evictions) == (plain.loads, plain.hits, plain.evictions)
    w.close()


def test_passes_in_order_wait_for_nothing_when_loads_are_fast() -> None:
    """After the first slice of the first pass every slice is there before it is asked for."""
    tensors = [tensor(f"t{i}", 3) for i in range(4)]
    w, source, _ = window(tensors, 4, cores=3)
    order = [(t.name, i) for t in tensors for i in range(3)]

    def act() -> None:
        for _ in range(3):
            for t in tensors:
                for _, handles in w.batches([t]):
                    assert all(right(h) for h in handles)
                    assert w._loader is not None
                    following = order[(order.index(handles[-1][0]) + 1) % len(order)]
                    while not w._loader.ready(following):
                        time.sleep(0.0005)

    within(DEADLINE, act)
    assert w.stats.waits <= 1  # the loader may be there before the first op
    assert w.stats.hits + w.stats.waits == 3 * 12
    w.close()
    assert source.reads[:36] == order * 3


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_large_window_has_more_slots_and_hands_out_half_of_them_at_a_time(prefetch: bool) -> None:
    tensors = [tensor("a", 50), tensor("b", 50)]
    w, _, _ = window(tensors, 64, cores=2, prefetch=prefetch)
    w.reside()
    assert w.plan is not None
    assert (w.plan.slots, w.plan.batch) == (8, 4)
    stay = set(w.plan.pinned)
    most = 0

    def act() -> None:
        nonlocal most
        for _ in range(3):
            for _, handles in w.batches(tensors):
                time.sleep(0.001)  # loads are faster than that
                assert all(right(h) for h in handles)
                most = max(most, sum(h[0] not in stay for h in handles))
        w.close()

    within(DEADLINE, act)
    assert most == 4 if prefetch else 1 <= most <= 4


def test_everything_fits() -> None:
    tensors = [tensor("a", 2), tensor("b", 3)]
    w, _, device = window(tensors, 5)
    assert run(w, tensors) == run(w, tensors) == 5
    assert (w.stats.loads, w.stats.hits, w.stats.waits, device.made) == (5, 10, 0, 5)
    assert w.stats.reason.endswith("all 5 slices fit")
    w.close()


@pytest.mark.parametrize("cores", [1, 3])
def test_the_smallest_window_is_a_slice_a_core_and_one(cores: int) -> None:
    tensors = [tensor("a", 9)]
    w, _, _ = window(tensors, cores + 1, cores=cores)
    assert run(w, tensors) == 9
    w.close()
    small = Window(FakeSource(tensors), FakeDevice(cores), (cores + 1) * ROOM - 1)  # type: ignore[arg-type]
    small.tensors = tensors
    for _ in range(2):  # and again: nothing is left half-made
        with pytest.raises(UsageError, match=f"too small.* {(cores + 1) * ROOM:,} bytes") as refused:
            run(small, tensors)
        assert "\n" not in str(refused.value)
    small.close()


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PackDamaged("p: slice 3 is damaged"), PackDamaged),
        (OSError(5, "EIO"), StorageError),
        (MemoryError(), StorageError),
    ],
)
def test_an_error_is_one_line_and_the_window_goes_on(prefetch: bool, error: Exception, kind: type[OrkError]) -> None:
    bad = {("a", 3)}

    def fail(key: Key) -> None:
        if key in bad:
            raise error

    tensors = [tensor("a", 6), tensor("b", 2)]
    w, _, device = window(tensors, 2, prefetch=prefetch, fail=fail)

    def act() -> None:
        for _ in range(3):
            with pytest.raises(kind) as said:
                run(w, tensors)
            assert "\n" not in str(said.value)
            assert kind is PackDamaged or "slice 3 of a" in str(said.value)
            assert run(w, [tensors[1]]) == 2
        bad.clear()
        assert run(w, tensors) == 8
        w.close()

    within(DEADLINE, act)
    assert device.live == 0


@pytest.mark.parametrize("bad", [("a", 0), ("a", 2)])
def test_an_error_while_what_stays_is_read_leaves_nothing(bad: Key) -> None:
    broken = {bad}

    def fail(key: Key) -> None:
        if key in broken:
            raise StorageError("no")

    tensors = [tensor("a", 8)]
    w, _, device = window(tensors, 5, fail=fail)
    with pytest.raises(StorageError):
        w.reside()
    assert device.live == w.stats.resident_bytes == 0
    broken.clear()
    assert run(w, tensors) == 8
    w.close()


def test_a_device_without_room_leaves_nothing() -> None:
    class Full(FakeDevice):
        def make_slot(self, nbytes: int, domain: int = 0) -> Any:
            if self.made == 3:
                raise NpuError("no room")
            return super().make_slot(nbytes, domain)

    device = Full()
    w = Window(FakeSource([tensor("a", 8)]), device, 5 * ROOM)  # type: ignore[arg-type]
    w.tensors = [tensor("a", 8)]
    with pytest.raises(NpuError, match="no room"):
        w.reside()
    assert device.live == 0


def test_close_while_a_slot_is_being_filled() -> None:
    w, source, device = window([tensor("a", 9)], 3)
    run(w, w.tensors)
    source.allowed.clear()
    for _ in w.batches([w.tensors[0]]):
        break
    threading.Timer(0.05, source.allowed.set).start()
    within(DEADLINE, w.close)
    assert device.live == 0
    w.close()  # again: nothing happens


def test_close_while_an_op_waits() -> None:
    w, source, device = window([tensor("a", 9)], 3)
    w.reside()
    source.allowed.clear()
    ended: list[BaseException] = []

    def op() -> None:
        try:
            run(w, w.tensors)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=op, daemon=True)
    thread.start()
    time.sleep(0.05)
    threading.Timer(0.05, source.allowed.set).start()
    within(DEADLINE, w.close)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert device.live == 0
    # what it had read by then was whole; it then ended with a word, unless it was through
    assert not ended or isinstance(ended[0], RuntimeError)


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_op_that_is_kept_half_used_is_named_instead_of_a_hang(prefetch: bool) -> None:
    w, _, _ = window([tensor("a", 9), tensor("b", 1)], 2, prefetch=prefetch)
    kept = [w.batches(w.tensors) for _ in range(2)]
    next(kept[0])
    for _ in range(2):
        next(kept[1])

    def act() -> None:
        with pytest.raises(RuntimeError, match="were not ended"):
            next(w.batches([w.tensors[1]]))
        kept.clear()
        gc.collect()
        assert run(w, w.tensors) == 10
        w.close()

    within(DEADLINE, act)


def test_several_windows_at_once() -> None:
    windows = [window([tensor("a", 7), tensor("b", 5)], 3 + i, cores=1 + i % 2)[0] for i in range(4)]

    def body(w: Window) -> None:
        for _ in range(5):
            run(w, w.tensors)
        w.close()

    threads = [threading.Thread(target=within, args=(DEADLINE, lambda w=w: body(w))) for w in windows]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(w.stats.hits + w.stats.waits == 60 and w.stats.resident_bytes == 0 for w in windows)


@pytest.mark.parametrize(("delay", "more"), [(0.002, True), (0.0, False)])
def test_more_loaders_join_when_one_cannot_keep_up(delay: float, more: bool) -> None:
    """Loads that outlast their compute; and compute that outlasts its loads."""
    w, _, _ = window([tensor("a", 16)], 4, cores=3, delay=delay)

    def act() -> None:
        for _ in range(JUDGED):
            for _batch in w.batches(w.tensors):
                if not more:
                    time.sleep(0.004)

    within(DEADLINE, act)
    assert w._loader is not None
    assert (w._loader.loaders > 1) == more
    assert w._loader.loaders <= 3
    w.close()


def test_overlap_is_transfer_time_under_computation() -> None:
    for prefetch in (True, False):
        w, _, _ = window([tensor("a", 6)], 2, prefetch=prefetch, delay=0.002)
        for _batch in w.batches(w.tensors):
            time.sleep(0.004)
        w.close()
        assert (w.stats.overlap > 0) == prefetch
        assert 0 <= w.stats.overlap_seconds <= w.stats.transfer_seconds


def test_a_stream_counts_too_and_names_what_comes_late() -> None:
    tensors = [tensor("a", 2), tensor("b", 3)]
    late = tensor("late", 1)
    device = FakeDevice()
    s = Stream(FakeSource([*tensors, late]), device)  # type: ignore[arg-type]
    s.tensors = tensors
    ready = s.reside()
    assert (ready.slices, ready.nbytes, ready.domains) == (5, 5 * BLOB, {0: 5 * BLOB})
    assert s.reside() is ready
    for _ in range(2):
        list(s.batches(tensors))
    assert (s.stats.loads, s.stats.hits, s.stats.waits, s.stats.lazy) == (5, 10, 0, 0)
    list(s.batches([late]))
    assert (s.stats.loads, s.stats.waits, s.stats.lazy) == (6, 1, 1)
    s.close()
    assert device.live == s.stats.resident_bytes == 0
    assert np.all(list(s.stats.domains.values()) == [0])


def test_a_slice_that_cannot_be_read_ahead_is_not_tried_again_before_it_is_asked_for() -> None:
    def fail(key: Key) -> None:
        if key == ("a", 3):
            raise StorageError("no")

    w, source, _ = window([tensor("a", 6)], 4, cores=3, fail=fail)
    batches = w.batches(w.tensors)
    end = time.monotonic() + DEADLINE
    next(batches)
    while ("a", 3) not in source.reads and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)
    assert source.reads.count(("a", 3)) == 1
    with pytest.raises(StorageError):
        list(batches)
    time.sleep(0.05)
    assert source.reads.count(("a", 3)) == 2  # nor after the op was told
    with pytest.raises(StorageError):
        list(w.batches(w.tensors))
    assert source.reads.count(("a", 3)) == 3
    w.close()


def test_an_interrupt_behind_a_slice_leaves_no_slot_pinned() -> None:
    """Ctrl-C ends an answer, not the chat: as often as it comes, the slots serve the next op."""
    op = [tensor("a", 8)]
    w, _, device = window(op, 3)
    run(w, op)
    take = Loader.take

    for at in range(1, 5):
        left = [at]

        def interrupted(loader: Loader, key: Key, left: list[int] = left) -> Any:
            handle = take(loader, key)
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return handle

        with mock.patch.object(Loader, "take", interrupted), pytest.raises(KeyboardInterrupt):
            run(w, op)
        within(DEADLINE, lambda: run(w, op) and None)
    w.close()
    assert device.live == 0
