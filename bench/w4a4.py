"""4-bit weights with 4-bit activations: what rotation, groups, GPTQ and 8-bit activations are worth.

    python bench/w4a4.py [MODEL] [--chunks 20] [--threads 2] [--json FILE]

Perplexity by `ork ppl`, with and without `--w4a4`, of i4 packs made from the model's fair float reference
(`fair_reference.py`), beside that reference, on Persuasion by Jane Austen, in chunks of 512 whose second halves are
scored. Every matrix is i4, the head too; the embedding is looked up, so that it meets no activations.

The ordering that others measured must be found: rotation rescues scales a channel, groups of 32 are better still, and
activations of 8 bits better than both; likewise with GPTQ, which is better than plain rounding. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fair_reference import fair_reference
from inputs import austen, fresh_pack, gguf_file
from peer_env import cache_folder

MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Case:
    """Options of `ork convert`, and whether activations have four bits."""

    name: str
    options: tuple[str, ...]
    w4a4: bool = True


CHANNEL, GROUPS = ("--recipe", "i4"), ("--recipe", "i4", "--group", "32")
PLAIN = Case("W4A4, a channel, not rotated", (*CHANNEL, "--no-rotate"))
ROTATED = Case("W4A4, a channel, rotated", CHANNEL)
GROUPED_PLAIN = Case("W4A4, groups of 32, not rotated", (*GROUPS, "--no-rotate"))
GROUPED = Case("W4A4, groups of 32, rotated", GROUPS)
CHANNEL_A8 = Case("W4A8, a channel, rotated", CHANNEL, w4a4=False)
GROUPED_A8 = Case("W4A8, groups of 32, rotated", GROUPS, w4a4=False)
ROTATED_GPTQ = Case("W4A4, a channel, rotated, GPTQ", (*CHANNEL, "--gptq"))
GROUPED_GPTQ = Case("W4A4, groups of 32, rotated, GPTQ", (*GROUPS, "--gptq"))
CASES = (PLAIN, ROTATED, GROUPED_PLAIN, GROUPED, ROTATED_GPTQ, GROUPED_GPTQ, CHANNEL_A8, GROUPED_A8)
WORSE_TO_BETTER = (
    (PLAIN, ROTATED, GROUPED, GROUPED_A8),
    (ROTATED, CHANNEL_A8, GROUPED_A8),
    (ROTATED_GPTQ, GROUPED_GPTQ),
    (ROTATED, ROTATED_GPTQ),
    (GROUPED, GROUPED_GPTQ),
)


def ppl(pack: Path, reference: Path, text: Path, args: argparse.Namespace, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ork", "ppl", str(pack), "-f", str(text), "--against", str(reference)]
    command += ["--chunks", str(args.chunks), "--threads", str(args.threads), "--kv", "f32", "--json", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(model: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of every case by name; packs are made once for all that share their options."""
    found = {}
    with tempfile.TemporaryDirectory(dir=cache_folder("peers")) as folder:
        reference = fresh_pack(model, Path(folder), "--recipe", "f16")
        packs = {options: fresh_pack(model, Path(folder), *options) for options in {c.options for c in CASES}}
        for case in CASES:
            options = ("--w4a4",) if case.w4a4 else ()
            found[case.name] = ppl(packs[case.options], reference, austen(), args, *options)
            print(f"{case.name}: {found[case.name]['perplexity']:.3f}", file=sys.stderr)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    first = next(iter(found.values()))
    lines = ["| weights and activations | perplexity | of float | KL, nats | top-1 |", "|---|---|---|---|---|"]
    lines.append(f"| float | {first['reference']:.3f} ± {first['reference_error']:.3f} | | | |")
    for name, f in found.items():
        lines.append(
            f"| {name} | {f['perplexity']:.3f} ± {f['error']:.3f} | {f['ratio']:.3f} x "
            f"| {f['kl']:.4f} ± {f['kl_error']:.4f} | {100 * f['top1']:.1f} % |"
        )
    return "\n".join(lines)


def out_of_order(found: dict[str, dict[str, Any]]) -> list[str]:
    """Neighbours of an ordering of which the one that should be better is not, by KL divergence or perplexity."""
    wrong = []
    for order in WORSE_TO_BETTER:
        for worse, better in pairwise(order):
            for key in ("kl", "perplexity"):
                a, b = found[worse.name][key], found[better.name][key]
                if a <= b:
                    wrong.append(f"{better.name}: {key} {b:.4f}, not below {a:.4f} of {worse.name}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL, help=f"a GGUF file or known name (default: {MODEL})")
    parser.add_argument("--chunks", type=int, default=20, help="of 512 tokens (default: 20, 5,100 predictions)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    model = fair_reference(gguf_file(args.model), cache_folder("peers/fair"))
    found = measure(model, args)
    print(f"\n{model.stem}, {args.chunks * 512:,} tokens\n\n{table(found)}")
    wrong = out_of_order(found)
    for line in wrong:
        print(f"\nMISSED {line}")
    if not wrong:
        print("\nThe published ordering is found.")
    if args.json:
        args.json.write_text(json.dumps({"model": model.stem, "rows": found}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
