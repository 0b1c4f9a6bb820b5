"""`ork inspect`: what a pack holds, as a table or JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from ork.cli.common import codec_text, size_text
from ork.cli.measuring import json_text, tables, whole_names

TENSOR = ("codec", "N x K", "rotation", "slices", "bytes")


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("pack", metavar="PACK", type=Path)
    sub.add_argument("--json", action="store_true", help="everything, as JSON")
    sub.add_argument("--tensors", action="store_true", help="a row per tensor")


def run(args: argparse.Namespace) -> int:
    from ork.pack.verify import inspect

    about = inspect(args.pack)
    if args.json:
        print(json_text(about, indent=1))
        return 0
    from rich.table import Table

    console = tables()
    console.print(f"{about['path']}: {size_text(about['bytes'])}, format {about['version']}, {about['digest']}")
    console.print(
        f"{about['architecture']}, {about['weights'] / 1e6:.1f}M weights at {about['bits_per_weight']:.2f} bits, "
        f"recipe {about['recipe'].get('name')}"
    )
    codecs = Table("codec", "tensors", "weights", "bytes", "bits/weight")
    for name, c in about["codecs"].items():
        codecs.add_row(
            name, str(c["tensors"]), f"{c['weights'] / 1e6:.1f}M", size_text(c["bytes"]), f"{c['bits_per_weight']:.2f}"
        )
    console.print(codecs)
    if rules := recipe_rows(about["recipe"]):
        recipe = Table("recipe", "as")
        for tensors, how in rules:
            recipe.add_row(tensors, how)
        console.print(recipe)
    if args.tensors:
        costs = {name: f"{cost:.3g}" for name, cost in _costs(about["recipe"]).items()}
        names = whole_names("tensor", [t["name"] for t in about["tensors"]])
        rows = Table(names, *TENSOR, *([whole_names("KL", [*costs.values()])] if costs else []))
        for t in about["tensors"]:
            shape = " x ".join(map(str, t["shape"]))
            rotation = f"{t['rotation']} mix {t['mix']}" if t["mix"] else str(t["rotation"])
            cost = [costs.get(t["name"].partition("#")[0], "0")] if costs else []
            codec = codec_text(t["codec"], t["group"])
            rows.add_row(t["name"], codec, shape, rotation, str(t["slices"]), size_text(t["bytes"]), *cost)
        console.print(rows)
    notes = {key: value for key, value in about["notes"].items() if key != "quality"}
    if measured := quality_rows(about["notes"].get("quality")):
        table = Table("measured", "")
        for key, text in measured.items():
            table.add_row(key, text)
        console.print(table)
    for key, held in (("provenance", about["provenance"]), ("notes", notes)):
        if held:
            console.print(f"{key}: {json.dumps(held)}")
    return 0


def recipe_rows(recipe: Any) -> list[tuple[str, str]]:
    """(which tensors, how) of a pack's recipe, rules that name one tensor each taken together; what it was measured
    from. Nothing for a pack that records none, or an odd one."""
    from ork.errors import UsageError
    from ork.quant.recipe import Recipe, exactly

    try:
        read = Recipe.of(recipe)
    except (UsageError, AttributeError, TypeError):
        return []
    rules = [(pattern, _how(asdict(choice))) for pattern, choice in read.rules]
    rows: list[tuple[str, str]] = []
    for names_one, run in groupby(rules, lambda rule: rule[0] == exactly(rule[0][1:-1].replace("\\", ""))):
        if names_one:
            rows += [(f"{count} by name", how) for how, count in Counter(how for _, how in run).most_common()]
        else:
            rows += [(f"match {pattern}", how) for pattern, how in run]
    rows.append(("all others" if rows else "all", _how(asdict(read.default))))
    figures = [f"{key} {read.figures[key]:,}" for key in ("tokens", "bytes") if type(read.figures.get(key)) is int]
    if type(kl := read.figures.get("kl")) is float:
        figures.append(f"expected KL {kl:.4g} nats")
    return rows + ([("by measurement", ", ".join(figures))] if figures else [])


def _how(choice: dict[str, Any]) -> str:
    """A choice in words: what is 0, false or absmax goes without saying."""
    said = [f"{key} {choice[key]}" for key in ("act_group", "rotation", "search") if choice[key] not in (0, "absmax")]
    return ", ".join([codec_text(choice["codec"], choice["group"]), *said, *(["gptq"] if choice["gptq"] else [])])


def _costs(recipe: Any) -> dict[str, float]:
    """What each tensor adds to the KL divergence, of a recipe that was found by measuring."""
    tensors = (recipe.get("figures") or {}).get("tensors") if isinstance(recipe, dict) else None
    return {k: v for k, v in tensors.items() if isinstance(v, float | int)} if isinstance(tensors, dict) else {}


def quality_rows(note: Any) -> dict[str, str]:
    """The note of `ork convert --evaluate` as lines of a table; nothing for a pack that has none, or an odd one."""
    try:
        return {
            "perplexity": f"{note['perplexity']:.4f} ± {note['error']:.4f}",
            "of the source": f"{note['reference']:.4f} ± {note['reference_error']:.4f}",
            "ratio": f"{note['ratio']:.5f} ± {note['ratio_error']:.5f}",
            "KL": f"{note['kl']:.6f} ± {note['kl_error']:.6f} nats, 99.9 %: {note['kl_999']:.4f}",
            "same top token": f"{100 * note['top1']:.2f} ± {100 * note['top1_error']:.2f} %",
            "on": f"{note['tokens']} predictions, chunks of {note['context']}, text {str(note['text'])[:19]}",
        }
    except (KeyError, TypeError, ValueError):  # notes are what somebody wrote
        return {}
