"""`ork run --trace`: the same text, and a file that viewers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import SAID, Ork


def test_a_run_leaves_a_trace(ork: Ork, pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    code, text, _ = ork("run", pack, "-p", "T", "--device", "emu", "--trace", out)
    assert (code, text) == (0, SAID[1:] + "\n")
    events = json.loads(out.read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"host ops", "products", "NPU core 0"} <= tracks
    heads = [e for e in events if e["name"] == "linear" and e["args"].get("weights") == ["output.weight"]]
    assert len(heads) >= len(SAID) - 1


def test_a_trace_that_cannot_be_written_is_told_before_the_work(refused: Callable[..., str], pack: Path) -> None:
    assert "no-such-folder" in refused("run", pack, "-p", "T", "--trace", "no-such-folder/t.json")
