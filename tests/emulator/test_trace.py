"""Traces: each submit and program once, on its core, nothing twice at a time, in the format that viewers read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ork.emulator import trace as trace_module
from ork.emulator.faults import Faults
from ork.emulator.kernel import EmulatedKernel
from ork.emulator.trace import Trace
from ork.errors import StorageError
from ork.npu.driver import Npu
from tests.emulator.test_record import products


def traced(path: Path, *, blocking: bool = False, **options: Any) -> tuple[list[dict[str, Any]], EmulatedKernel]:
    trace = Trace()
    kernel = EmulatedKernel(trace=trace, **options)
    with Npu.open(kernel) as npu:
        products(blocking=blocking)(npu)
    trace.save(path)
    return json.loads(path.read_text())["traceEvents"], kernel


def bars(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"].startswith(kind)]


def test_every_submit_and_program_is_there_once(tmp_path: Path) -> None:
    events, kernel = traced(tmp_path / "t.json")
    assert len(bars(events, "submit")) == kernel.stats.submits
    assert len(bars(events, "program")) == kernel.stats.programs
    assert {event["tid"] for event in bars(events, "submit")} == {0, 1, 2}
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"NPU, simulated time", "core 0", "core 1", "core 2"}


def test_a_core_does_one_thing_at_a_time_and_its_programs_lie_in_their_submit(tmp_path: Path) -> None:
    events, kernel = traced(tmp_path / "t.json")
    for core in range(3):
        submits = sorted((e for e in bars(events, "submit") if e["tid"] == core), key=lambda e: e["ts"])
        for one, two in pairwise(submits):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6
        for submit in submits:
            inside = [
                e
                for e in bars(events, "program")
                if e["tid"] == core and submit["ts"] <= e["ts"] < submit["ts"] + submit["dur"]
            ]
            assert len(inside) == submit["args"]["programs"] == submit["args"]["tasks"]
            assert sum(e["dur"] for e in inside) == pytest.approx(submit["dur"])
    assert max(e["ts"] + e["dur"] for e in bars(events, "submit")) <= kernel.clock_ns / 1000 + 1e-6


def test_a_timeout_shows_as_long_as_it_took_and_so_does_the_reset(tmp_path: Path) -> None:
    events, _ = traced(tmp_path / "t.json", blocking=True, faults=Faults("timeout@2"))
    (failed,) = [e for e in bars(events, "submit") if "error" in e["args"]]
    assert failed["name"] == "submit 2: ETIMEDOUT"
    assert failed["dur"] >= 6_000_000
    assert [e["ph"] for e in events if e["name"] == "reset"] == ["i", "i"]  # the kernel's and the driver's


def test_a_long_trace_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 5)
    events, kernel = traced(tmp_path / "t.json")
    assert len([e for e in events if e["ph"] == "X"]) == 5
    dropped = json.loads((tmp_path / "t.json").read_text())["otherData"]["dropped"]
    assert dropped == kernel.stats.submits + kernel.stats.programs - 5


def test_a_full_disk_is_one_error() -> None:
    with pytest.raises(StorageError, match="/dev/full: No space left on device"):
        Trace().save(Path("/dev/full"))
