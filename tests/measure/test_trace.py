"""A trace tells what happened when, and its overlap is the one that the statistics tell."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.api import LoadedModel, load
from ork.errors import StorageError
from ork.measure.trace import DOMAINS, HOST, PRODUCTS, SWITCH, TRANSFER, Trace, intersection, length, union
from tests import tiny

WINDOW = 96 << 10  # of about 200 KiB of slices
TOKENS = [(7 * i) % tiny.VOCAB for i in range(8)]


def slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same call on slower hardware: times that dwarf what the interpreter takes between two clocks."""

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return call(*args)

    return slow


def run(model: LoadedModel, passes: int = 3) -> None:
    model.logits(TOKENS)
    for _ in range(passes - 1):
        model.logits(TOKENS[:1])


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_overlap_is_that_of_the_statistics(tmp_path: Path, device: str, prefetch: bool) -> None:
    path = tiny.random_gguf(tmp_path / "m.gguf")
    with load(path, device=device, threads=1, window=WINDOW, prefetch=prefetch) as model:
        source, dev = model.source, model.device
        source.read_into = slowed(source.read_into, 2e-3)  # type: ignore[method-assign]
        dev.linear = slowed(dev.linear, 2e-3)  # type: ignore[method-assign]
        trace = Trace()
        trace.attach(model.ops)
        model.stream.reside()
        run(model)
        stats = model.stream.stats
        assert stats.transfer_seconds > 0
        assert abs(trace.overlap - stats.overlap) < 0.05
        assert (trace.overlap > 0.2) == prefetch
        transfers = [e for e in trace.events if e.kind in (TRANSFER, "load")]
        assert abs(len(transfers) - stats.loads) <= 2  # those that end after the last pass are on their way


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_the_file_has_a_track_for_everything(tmp_path: Path, device: str) -> None:
    path = tiny.random_gguf(tmp_path / "m.gguf")
    with load(path, device=device, threads=1, window=WINDOW) as model:
        trace = Trace()
        trace.attach(model.ops)
        run(model)
    out = tmp_path / "trace.json"
    trace.save(out)
    data = json.loads(out.read_text())
    events = data["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_track: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for e in events:
        if e["ph"] == "X":
            by_track[names[e["tid"]]].append(e)
    assert {e["name"] for e in by_track[HOST]} >= {"embed", "linear", "norm", "rope", "attention", "gate"}
    heads = [e for e in by_track[HOST] if e["name"] == "linear" and e["args"]["weights"] == ["output.weight"]]
    assert len(heads) == 3  # one a pass
    assert by_track[PRODUCTS]
    assert any(name.startswith("transfer: ork-loader") for name in by_track)
    assert ("NPU core 0" in by_track) == (device == "emu")
    for (
        track
    ) in by_track.values():  # bars of one track follow each other or lie within each other, or viewers lose them
        open_until = [float("inf")]
        for e in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while open_until[-1] <= e["ts"] + 1e-2:
                open_until.pop()
            assert e["ts"] + e["dur"] <= open_until[-1] + 1e-2
            open_until.append(e["ts"] + e["dur"])
    assert data["otherData"]["dropped"] == 0


def test_a_product_lies_within_its_op_and_submits_within_their_product(tmp_path: Path) -> None:
    with load(tiny.random_gguf(tmp_path / "m.gguf"), device="emu", threads=1) as model:
        trace = Trace()
        trace.attach(model.ops)
        run(model, passes=1)

    def inside(inner: str, outer: str) -> bool:
        spans = union((e.start, e.end) for e in trace.events if e.track.startswith(outer))
        small = union((e.start, e.end) for e in trace.events if e.track.startswith(inner))
        return bool(small) and intersection(small, spans) == small

    assert inside("NPU core", PRODUCTS)
    assert inside(PRODUCTS, HOST)


def test_a_change_of_domain_is_told_once(tmp_path: Path) -> None:
    trace = Trace()

    class Chain:
        kind = "int8"

        def __init__(self, domain: int):
            self.domain = domain

        def __len__(self) -> int:
            return 1

    for at, domain in enumerate([0, 0, 3, 3, 0]):
        trace._submit((Chain(domain), 0, None), float(at), at + 0.5)
    assert [(e.track, e.name, e.start) for e in trace.events if e.kind == SWITCH] == [
        (DOMAINS, "0 -> 3", 2.0),
        (DOMAINS, "3 -> 0", 4.0),
    ]


def test_bits_are_the_same_and_a_detached_trace_hears_nothing(tmp_path: Path) -> None:
    with load(tiny.random_gguf(tmp_path / "m.gguf"), device="cpu", threads=1) as model:
        want = model.logits(TOKENS)
        trace = Trace()
        trace.attach(model.ops)
        got = model.logits(TOKENS)
        trace.detach()
        heard = len(trace.events)
        assert heard
        assert (want.view(np.uint32) == got.view(np.uint32)).all()
        model.logits(TOKENS)
        assert len(trace.events) == heard
        touched = (model.ops, model.device, model.source, model.stream)
        assert not any(callable(value) for target in touched for value in vars(target).values())


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no/such"):
        Trace().save(tmp_path / "no" / "such" / "t.json")


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda s: (float(s[0]), float(s[0] + s[1]))))


@given(spans, spans)
def test_unions_and_intersections_against_sets_of_instants(a: list[Any], b: list[Any]) -> None:
    def points(s: list[Any]) -> set[float]:
        return {start + i + 0.5 for start, end in s for i in range(int(end - start))}

    ua, ub = union(a), union(b)
    assert points(ua) == points(a)
    assert length(ua) == len(points(a))
    assert points(intersection(ua, ub)) == points(a) & points(b)
