"""`--window`, `--no-prefetch`, `--preload`, `--domains`: the same text, and a report that adds up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ork.residency.stream import Stream
from tests.cli.conftest import SAID, Ork

SMALL = "128K"  # of the model's 164 KiB
COUNTS = ("loads", "hits", "waits", "evictions", "moved_bytes", "overlap", "peak_resident_bytes", "scratch_bytes")


@pytest.mark.parametrize("flags", [[], ["--no-prefetch"], ["--preload"], ["--device", "emu", "--domains", "2"]])
def test_run_through_a_window(ork: Ork, pack: Path, flags: list[str]) -> None:
    code, out, err = ork("run", pack, "-p", "T", "--window", SMALL, *flags)
    assert (code, out) == (0, SAID[1:] + "\n")
    line = next(line for line in err.splitlines() if "loads" in line)
    assert re.search(
        r"window 0\.1 MiB: \d+ slices .* stay, \d+ pass through [234] slots of .*; \d+ loads, \d+ hits, \d+ waits of "
        r"[\d.]+ s, \d+ evictions, .* moved, \d+ % of it under computation; peak .* of scratch",
        line,
    )
    assert ("ready: " in err) == ("--preload" in flags or "--domains" in flags)
    assert "ended by stop" in err.splitlines()[-1]


def test_the_report_in_json(ork: Ork, pack: Path) -> None:
    code, out, err = ork("run", pack, "-p", "T", "--window", SMALL, "--json", "--preload", "--device", "emu")
    about = json.loads(out)
    assert (code, err, about["text"]) == (0, "", SAID[1:])
    assert all(about[key] >= 0 for key in COUNTS)
    assert about["loads"] > about["evictions"] > 0
    assert about["peak_resident_bytes"] <= 128 << 10
    assert about["scratch_bytes"] >= 80 << 20  # rows and sums of a domain
    assert 0 <= about["overlap"] <= 1
    assert about["window_reason"].startswith("window 0.1 MiB: ")
    assert sum(about["ready"]["domains"].values()) == about["ready"]["bytes"] == about["weight_bytes"]


def test_the_report_of_a_model_that_fits(ork: Ork, pack: Path) -> None:
    about = json.loads(ork("run", pack, "-p", "T", "--json", "--preload")[1])
    assert (about["evictions"], about["waits"]) == (0, 0)
    assert about["loads"] == about["ready"]["slices"]
    assert about["window_reason"].startswith("no window")
    about = json.loads(ork("run", pack, "-p", "T", "--json", "--window", "1G")[1])
    assert "all" in about["window_reason"]
    assert (about["evictions"], "ready" in about) == (0, False)


def test_preload_says_what_is_where(ork: Ork, pack: Path) -> None:
    err = ork("run", pack, "-p", "T", "--preload", "--device", "emu", "--domains", "2")[2]
    assert re.search(r"ready: \d+ slices, .* \(domain 0 .*, domain 1 .*\) in [\d.]+ s, before the first op", err)
    assert re.search(r"placement: .*2 .*domains", err)


def test_bench_preloads_through_a_window(ork: Ork, pack: Path) -> None:
    code, out, err = ork("bench", pack, "-p", "8", "-n", "2", "-r", "1", "-o", "json", "--window", SMALL)
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert rows[0]["ready"]["slices"] > 0
    assert rows[0]["loads"] > rows[0]["ready"]["slices"]
    code, out, err = ork("bench", pack, "-p", "8", "-n", "0", "-r", "1", "--window", SMALL)
    assert (code, "ready: " in err, "loads" in err) == (0, True, True)


def test_bench_refuses_to_time_the_loading_of_a_slice(
    refused: Callable[..., str], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Stream.reside

    def forgetful(self: Stream) -> object:
        self.tensors = self.tensors[1:]
        return whole(self)

    monkeypatch.setattr(Stream, "reside", forgetful)
    assert "1 slices were loaded in timed runs" in refused("bench", pack, "-p", "8", "-n", "0", "-r", "1", "-o", "json")


@pytest.mark.parametrize("command", [["run", "-p", "T"], ["bench"]])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--window", "4096"], r"window of 4,096 bytes is too small: [23] slices .* take [\d,]+ bytes: give --window"),
        (["--window", "4096", "--device", "emu"], r"too small: 4 slices \(3 being computed, one being filled\)"),
        (["--window", "much"], "'much'"),
        (["--no-prefetch"], "goes with --window"),
        (["--domains", "2"], "--domains 2: this device has one address space"),
        (["--domains", "17", "--device", "emu"], "--domains 17: this device has domains 1 to 16"),
        (["--domains", "0", "--device", "emu"], "--domains 0"),
    ],
)
def test_refused(refused: Callable[..., str], pack: Path, command: list[str], flags: list[str], said: str) -> None:
    assert re.search(said, refused(command[0], pack, *command[1:], *flags))
