"""What `ork skew` says: counts and curves against plain arithmetic, hit rates against runs that are measured."""

from __future__ import annotations

import csv
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ork
from ork.cli.main import main
from ork.cli.skew import dense_bytes
from ork.measure.routing import Routing, belady, coverage, curve, gini, hit_rate, predictions, record
from ork.residency.experts import Item, plan_experts
from tests import tiny
from tests.residency.fakes import EXPERT, ROOM, expert_layer

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want. " * 8
)
CONTEXT = 256


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.moe_gguf(tmp_path_factory.mktemp("moe") / "moe.gguf", experts=8, top_k=2)
    assert main(["convert", str(path)]) == 0
    return path.with_suffix(".orkpack")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def skewed(pack: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What ork skew wrote, with the profile saved in the pack."""
    folder = tmp_path_factory.mktemp("skew")
    arguments = [
        "skew",
        pack,
        "-f",
        text,
        "-c",
        CONTEXT,
        "--save",
        "--json",
        folder / "s.json",
        "--csv",
        folder / "s.csv",
    ]
    assert main([str(a) for a in [*arguments, "--ram", "1M"]]) == 0
    return json.loads((folder / "s.json").read_text()), folder / "s.csv"


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_gini_and_coverage() -> None:
    assert gini([5, 5, 5, 5]) == 0
    assert gini([0, 0, 0, 12]) == 0.75  # one of four takes all: (n - 1) / n
    assert gini([0, 0]) == 0
    x = [3, 1, 4, 1, 5, 9, 2, 6]
    apart = sum(abs(a - b) for a in x for b in x) / (2 * len(x) ** 2 * np.mean(x))
    assert gini(x) == pytest.approx(apart)
    assert coverage([1, 6, 3]).tolist() == [0.6, 0.9, 1.0]
    assert coverage([0, 0]).tolist() == [1.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    visits=st.lists(
        st.sets(st.integers(0, 4), min_size=1, max_size=3).map(lambda s: [(0, e) for e in sorted(s)]), max_size=9
    ),
    slots=st.integers(1, 4),
)
def test_belady_is_the_best_of_all_ways(visits: list[list[Item]], slots: int) -> None:
    """Against every choice of what to keep between two visits."""
    items = [(0, e) for e in range(5)]
    best = {frozenset(kept): 0 for kept in combinations(items, slots)}  # by what is held: hits so far
    for visit in visits:
        after: dict[frozenset[Item], int] = {}
        for held, hits in best.items():
            now = hits + len(held & set(visit))
            for kept in combinations(sorted(held | set(visit)), slots):
                after[frozenset(kept)] = max(now, after.get(frozenset(kept), 0))
        best = after
    assert belady(visits, slots) == max(best.values())


def routing(seed: int, tokens: int = 60, layers: int = 3, experts: int = 8, top_k: int = 2) -> Routing:
    rng = np.random.default_rng(seed)
    chosen = {}
    for layer in range(layers):
        liking = rng.exponential(size=experts)
        rows = [rng.choice(experts, top_k, replace=False, p=liking / liking.sum()) for _ in range(tokens)]
        chosen[layer] = np.sort(np.array(rows, np.int32), axis=1)
    return Routing(chosen, dict.fromkeys(range(layers), experts))


def test_what_one_layer_says_of_the_next() -> None:
    same = routing(0, layers=2)
    copied = Routing({0: same.chosen[0], 1: (same.chosen[0] + 3) % 8}, same.experts)
    (p,) = predictions(copied, copied)
    assert p.across > 0.9, "the second layer follows the first"
    assert p.common < p.across
    apart = predictions(routing(1, 2000), routing(1, 2000).part(1000, 2000))[0]
    assert abs(apart.across - apart.common) < 0.1, "layers that know nothing of each other"
    still = Routing({layer: np.tile(ids[:1], (9, 1)) for layer, ids in same.chosen.items()}, same.experts)
    assert predictions(same, still)[0].before == 1.0


# --- what was counted is what happens -----------------------------------------------------------------------------


def test_counts_are_those_of_the_routes(pack: Path) -> None:
    """Whatever the chunks: the same experts as token by token."""
    with ork.load(pack) as model:
        tokens = model.tokenizer.encode(TEXT)[:200]
        trace = record(model.engine, tokens, 100)
        assert trace.tokens == 200
        assert trace.top_k == 2
        seen: dict[int, list[list[int]]] = {0: [], 1: []}
        model.ops.router = lambda layer, routes: seen[layer].extend(routes.ids().tolist())
        for part in (tokens[:100], tokens[100:]):
            model.logits(part, chunk=1)
    for layer, rows in seen.items():
        assert trace.chosen[layer].tolist() == rows
        assert (np.diff(trace.chosen[layer], axis=1) > 0).all()
        assert trace.counts()[layer].tolist() == [Counter(e for row in rows for e in row)[e] for e in range(8)]


@pytest.mark.parametrize("policy", ["lru", "lfu", "pinned"])
def test_runs_hit_what_the_curve_says(pack: Path, skewed: tuple[dict[str, Any], Path], policy: str) -> None:
    """Token by token through windows of several sizes: within a point, and the text's bits do not change."""
    found, _ = skewed
    start = found["tokens"]["profile"]
    with ork.load(pack, n_ctx=CONTEXT) as model:
        tokens = model.tokenizer.encode(TEXT)[start:]
        parts = [tokens[i : i + CONTEXT] for i in range(0, len(tokens), CONTEXT)]
        want = [model.logits(part) for part in parts]
        dense = dense_bytes(model)
    between = 0
    for i, row in enumerate(found["hit_rates"]):
        assert row[policy] <= row["belady"] + 1e-9
        between += 0.2 < row[policy] < 0.98
        if i % 2:
            continue
        window = dense + row["bytes"]
        with ork.load(pack, n_ctx=CONTEXT, window=window, expert_policy=policy, prefetch=i % 4 == 0) as model:
            for part, logits in zip(parts, want):
                assert np.array_equal(model.logits(part, chunk=1), logits)
            stats = model.stream.stats
            assert abs(stats.experts.hit_rate - row[policy]) <= 0.01
            assert stats.experts.lookups.total() == 2 * 2 * len(tokens)
            assert stats.peak_bytes <= window
    assert between >= 3, "rates that could be wrong"


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), slots=st.integers(2, 24))
def test_no_policy_beats_the_bound(seed: int, slots: int) -> None:
    layers = [expert_layer(i, 8) for i in range(3)]
    train, held = routing(seed), routing(seed + 1)
    (point,) = curve(held, train.profile(), layers, lambda _: ROOM, [slots * EXPERT * ROOM])
    assert max(point.rates.values()) == point.rates["belady"]
    plan = plan_experts(layers, slots * EXPERT * ROOM, lambda _: ROOM)
    assert plan is not None
    assert point.rates["lru"] == hit_rate(held, plan)
    assert point.slots == min(24, sum(p.slots for p in plan.pools) or 24) / 3


# --- the command --------------------------------------------------------------------------------------------------


def test_files_hold_what_was_found(pack: Path, skewed: tuple[dict[str, Any], Path]) -> None:
    found, table = skewed
    total = sum(found["tokens"].values())
    assert [len(layer["counts"]) for layer in found["layers"]] == [8, 8]
    for layer in found["layers"]:
        assert sum(layer["counts"]) + sum(layer["held_out_counts"]) == 2 * total
        assert layer["coverage"][-1] == layer["held_out_coverage"][-1] == 1.0
        assert layer["cover"]["0.5"] <= layer["cover"]["0.9"]
    assert found["hit_rates"][-1]["lru"] == found["hit_rates"][-1]["belady"] == 1.0
    budget = found["budget"]
    assert budget["room_for_experts"] == int(0.72 * (1 << 20)) - found["dense_bytes"] - budget["kv_bytes"]
    assert budget["all_fit"] == (budget["room_for_experts"] >= found["expert_bytes"])
    with table.open() as f:
        rows = list(csv.DictReader(f))
    counts = [int(r["value"]) for r in rows if (r["what"], r["layer"], r["name"]) == ("count", "1", "profile")]
    assert counts == found["layers"][1]["counts"]
    assert {r["what"] for r in rows} == {"count", "gini", "coverage", "hit_rate", "predicted"}
    with ork.load(pack) as model:
        assert model.profile() == {layer["layer"]: layer["counts"] for layer in found["layers"]}


def test_what_a_board_has_for_experts(
    pack: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its RAM: everything, a part, too little; and the window that is told is one that a run takes."""
    out = tmp_path / "s.json"

    def ask(ram: int) -> tuple[str, dict[str, Any]]:
        capsys.readouterr()
        assert (
            main(["skew", str(pack), "-f", str(text), "-c", str(CONTEXT), "--ram", str(ram), "--json", str(out)]) == 0
        )
        return capsys.readouterr().out.splitlines()[-1], json.loads(out.read_text())

    told, found = ask(1 << 30)
    assert told == "a board with 1.0 GiB of RAM: all experts fit, no --window is needed"
    beside = found["dense_bytes"] + found["budget"]["kv_bytes"]
    told, _ = ask(beside)
    assert told.endswith("and the KV cache: too little")
    told, found = ask(int((beside + found["expert_bytes"] // 2) / 0.72))
    budget = found["budget"]
    assert f"--window {budget['window']} --expert-policy" in told, "to the byte: the rates are of that window"
    assert budget["hit_rates"][budget["policy"]] == max(budget["hit_rates"][p] for p in ("lru", "lfu", "pinned"))
    with ork.load(pack, window=budget["window"], n_ctx=CONTEXT) as model:
        assert model.stream.stats.peak_bytes <= budget["window"]


def test_a_run_tells_of_its_experts(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ork.load(pack) as model:
        dense = dense_bytes(model)
        half = plan_experts(model.stream.expert_layers, 1 << 40, model.device.mapped_bytes).nbytes // 2  # type: ignore[union-attr]
    capsys.readouterr()
    assert main(["run", str(pack), "-p", "the in", "-n", "5", "--window", str(dense + half), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    experts = facts["experts"]
    assert (experts["layers"], experts["total"]) == (2, 16)
    assert 0 < experts["hits"] < experts["lookups"] == experts["hits"] + experts["loads"]
    assert sum(layer["loads"] for layer in experts["by_layer"].values()) == experts["loads"]
    assert main(["run", str(pack), "-p", "the in", "-n", "5", "--window", str(dense + half)]) == 0
    told = capsys.readouterr()
    assert f"experts: loaded {experts['loads']} / packed 0 of 16; {experts['lookups']} lookups" in told.err
    assert main(["run", str(pack), "-p", "the in", "-n", "5"]) == 0
    whole = capsys.readouterr()
    assert whole.out == told.out
    assert "experts: loaded" in whole.err


def test_what_cannot_be_asked_for(pack: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = tiny.random_gguf(tmp_path / "dense.gguf")
    assert main(["convert", str(dense)]) == 0
    short = tmp_path / "short.txt"
    short.write_text("a")
    cases = [
        (["skew", dense.with_suffix(".orkpack"), "-f", text], "no routed experts"),
        (["skew", pack, "-f", text, "--cache-mib", "1,x"], "--cache-mib 1,x: give sizes in MiB"),
        (["skew", pack, "-f", text, "--cache-mib", "0.001"], "none of these sizes has room for two experts"),
        (["skew", pack, "-f", text, "--chunks", "1"], "--chunks 1: at least 2"),
        (["skew", pack, "-f", short], "tokens are too few"),
        (["skew", pack, "-f", text, "--csv", tmp_path / "no" / "x.csv"], "there is no folder"),
        (["run", pack, "-p", "a", "--expert-policy", "lfu"], "it goes with --window"),
    ]
    for arguments, says in cases:
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert err.startswith("ork: ")
        assert says in err


def test_pinned_wants_a_profile(tmp_path: Path) -> None:
    path = tiny.moe_gguf(tmp_path / "moe.gguf")
    with ork.load(path) as model:
        window = dense_bytes(model) + 100_000
    with pytest.raises(ork.errors.UsageError, match="needs a routing profile in the pack: `ork skew"):
        ork.load(path, window=window, expert_policy="pinned")
    with pytest.raises(ork.errors.UsageError, match="expert policy 'mru'"):
        ork.load(path, expert_policy="mru")


def test_a_plot_without_matplotlib(
    pack: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["skew", str(pack), "-f", str(text), "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == "ork: --plot needs matplotlib: pip install 'ork-npu[plot]'\n"


def test_a_plot(pack: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "skew.png"
    assert main(["skew", str(pack), "-f", str(text), "-c", str(CONTEXT), "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    capsys.readouterr()
    assert main(["skew", str(pack), "-f", str(text), "-c", str(CONTEXT), "--plot", str(tmp_path / "skew.xyz")]) == 2
    assert "--plot" in capsys.readouterr().err
