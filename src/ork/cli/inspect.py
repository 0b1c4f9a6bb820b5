"""`ork inspect`: what a pack holds, as a table or JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ork.cli.common import size_text


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("pack", metavar="PACK", type=Path)
    sub.add_argument("--json", action="store_true", help="everything, as JSON")
    sub.add_argument("--tensors", action="store_true", help="a row per tensor")


def run(args: argparse.Namespace) -> int:
    from ork.pack.verify import inspect

    about = inspect(args.pack)
    if args.json:
        print(json.dumps(about, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
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
    if args.tensors:
        rows = Table("tensor", "codec", "N x K", "rotation", "slices", "bytes")
        for t in about["tensors"]:
            shape = " x ".join(map(str, t["shape"]))
            rows.add_row(t["name"], t["codec"], shape, str(t["rotation"]), str(t["slices"]), size_text(t["bytes"]))
        console.print(rows)
    notes = {key: value for key, value in about["notes"].items() if key != "quality"}
    if measured := quality_rows(about["notes"].get("quality")):
        table = Table("measured", "")
        for key, text in measured.items():
            table.add_row(key, text)
        console.print(table)
    for key, held in (("provenance", about["provenance"]), ("notes", notes)):
        if held:
            console.print(f"{key}: {json.dumps(held)}", markup=False)
    return 0


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
