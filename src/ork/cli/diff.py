"""`ork diff`: what two packs have and have not in common: recipe, codecs, bytes, tensors, measured quality."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ork.cli.common import codec_text, size_text
from ork.cli.measuring import json_text, tables, whole_names

LAYOUT = ("codec", "shape", "group", "act_group", "rotation", "mix")  # what makes two tensors alike but for content


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("a", metavar="A", type=Path)
    sub.add_argument("b", metavar="B", type=Path)
    sub.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from ork.pack.verify import inspect

    found = compare(inspect(args.a), inspect(args.b))
    if args.json:
        print(json_text(found, indent=1))
    else:
        _show(found)
    return 0


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of two results of `pack.verify.inspect`: values as [a, b], tensors that differ in layout or content."""
    ours, theirs = ({t["name"]: t for t in x["tensors"]} for x in (a, b))
    raw = tuple({t["name"]: t for t in x["raw"]} for x in (a, b))
    tensors = []
    for name in dict.fromkeys([*ours, *theirs]):
        pair = [ours.get(name), theirs.get(name)]
        if pair[0] is None or pair[1] is None:
            why = "only in " + ("A" if pair[1] is None else "B")
        elif changed := [key for key in LAYOUT if pair[0].get(key) != pair[1].get(key)]:
            why = ", ".join(changed)
        elif pair[0]["content"] != pair[1]["content"]:
            why = "content"
        else:
            continue
        tensors.append({"name": name, "differs": why, "tensors": pair})
    keys = ("path", "bytes", "weight_bytes", "bits_per_weight", "digest", "architecture", "codecs")
    return {
        **{key: [a[key], b[key]] for key in keys},
        "recipe": [a["recipe"], b["recipe"]],
        "quality": [x["notes"].get("quality") for x in (a, b)],
        "same": not tensors and raw[0] == raw[1] and a["metadata"] == b["metadata"],
        "tensors": tensors,
        "equal_tensors": len(ours.keys() | theirs.keys()) - len(tensors),
        "raw": sorted(n for n in raw[0].keys() | raw[1].keys() if raw[0].get(n) != raw[1].get(n)),
        "metadata": sorted(
            k for k in a["metadata"].keys() | b["metadata"].keys() if a["metadata"].get(k) != b["metadata"].get(k)
        ),
    }


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from ork.cli.inspect import quality_rows, recipe_rows

    console = tables()
    about = Table("", "A", "B")
    about.add_row("pack", *map(str, found["path"]))
    about.add_row("bytes", *(f"{n:,} ({size_text(n)})" for n in found["bytes"]))
    about.add_row("bits/weight", *(f"{x:.3f}" for x in found["bits_per_weight"]))
    about.add_row("recipe", *(str(r.get("name")) for r in found["recipe"]))
    for codec in dict.fromkeys([*found["codecs"][0], *found["codecs"][1]]):
        about.add_row(
            codec, *(f"{c[codec]['tensors']} tensors, {size_text(c[codec]['bytes'])}" if codec in c else "-"
                     for c in found["codecs"])
        )  # fmt: skip
    rows = [quality_rows(q) for q in found["quality"]]
    for key in dict.fromkeys([*rows[0], *rows[1]]):
        about.add_row(key, *(r.get(key, "-") for r in rows))
    console.print(about)
    recipes = [recipe_rows(r) for r in found["recipe"]]
    if changed := [row for row in dict.fromkeys([*recipes[0], *recipes[1]]) if not all(row in r for r in recipes)]:
        table = Table("recipe", "A", "B")
        for which, how in changed:
            table.add_row(which, *(how if (which, how) in r else "-" for r in recipes))
        console.print(table)
    if found["tensors"]:
        names = whole_names("tensor", [t["name"] for t in found["tensors"]])
        table = Table(names, "differs in", "A", "B")
        for t in found["tensors"]:
            table.add_row(t["name"], t["differs"], *map(_tensor, t["tensors"]))
        console.print(table)
    for key in ("raw", "metadata"):
        if found[key]:
            console.print(f"{key} that differs: {', '.join(found[key])}")
    equal = f"{found['equal_tensors']} tensors are equal, {len(found['tensors'])} differ"
    console.print("the same weights, tensors and metadata" if found["same"] else equal)


def _tensor(t: dict[str, Any] | None) -> str:
    if t is None:
        return "-"
    return f"{codec_text(t['codec'], t['group'])} {t['bits_per_weight']:.2f} b {size_text(t['bytes'])}"
