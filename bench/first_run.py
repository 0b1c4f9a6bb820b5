"""A first run on a GGUF: from process start to the first token, while the pack is being built and after.

    python bench/first_run.py [smollm2-135m gemma3-270m ...] [--runs 3] [--disk 60]

*running ahead* is `ork run`, which converts while the model computes; *convert, then run* is `ork.load` in one process,
which returns with the finished pack. Both start from an empty cache of packs and a source in the page cache, in turn.
*whole* is when the process has ended, with the pack in place. Medians; the packs must be equal.

Both take the same work; the ratio shows what overlaps: building the tokenizer, the first pass, the disk. `--disk`
makes bringing a batch to the disk last as long as it does at that many MB/s, as on a board's eMMC or card.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ork.sources import hub

PROMPT = "The capital of France is"
MODELS = ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"]
SLOW = """
import sys, threading, time
from ork.pack.writer import PackWriter
sync, one = PackWriter.sync, threading.Lock()
def slow(writer):
    with one:
        time.sleep(writer._pending_bytes / 1e6 / float(sys.argv[3]))
        sync(writer)
if float(sys.argv[3]):
    PackWriter.sync = slow
"""
AHEAD = """
from ork.cli.main import main
sys.exit(main(["run", sys.argv[1], "-p", sys.argv[2], "-n", "2"]))
"""
AFTER = """
import ork
with ork.load(sys.argv[1]) as model:
    for piece in model.generate(sys.argv[2], max_tokens=2):
        sys.stdout.write(piece)
        sys.stdout.flush()
"""


def timed(command: list[str], home: str) -> tuple[float, float, bytes]:
    """Seconds to the first byte of text and to the end, and the hash that the pack says of itself."""
    start = time.perf_counter()
    environment = {**os.environ, "ORK_HOME": home}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    whole = time.perf_counter() - start
    if process.returncode or not first:
        raise SystemExit(errors.decode().strip())
    (pack,) = Path(home, "packs").iterdir()
    from ork.pack.reader import Pack

    with Pack.open(pack) as made:
        return seconds, whole, bytes.fromhex(made.digest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--disk", type=float, default=0, metavar="MB/S", help="pretend that the disk is this slow")
    args = parser.parse_args()
    print("| model | running ahead, s | whole | convert, then run, s | whole | ratio to the first token |")
    print("|---|---:|---:|---:|---:|---:|")
    better = True
    for model in args.models:
        path = str(hub.resolve(model))
        with open(path, "rb") as f:  # into the page cache
            while f.read(1 << 24):
                pass
        ahead, after = (
            [sys.executable, "-c", SLOW + script, path, PROMPT, str(args.disk)] for script in (AHEAD, AFTER)
        )
        rows: dict[str, list[tuple[float, float]]] = {"ahead": [], "after": []}
        digests = set()
        for _ in range(args.runs):
            for name, command in (("ahead", ahead), ("after", after)):
                with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as home:
                    first, whole, digest = timed(command, home)
                rows[name].append((first, whole))
                digests.add(digest)
        if len(digests) != 1:
            raise SystemExit(f"{model}: the packs differ")
        (a, a_whole), (b, b_whole) = (
            (statistics.median(column) for column in zip(*rows[name])) for name in ("ahead", "after")
        )
        better &= a < b
        print(f"| {model} | {a:.2f} | {a_whole:.2f} | {b:.2f} | {b_whole:.2f} | {b / a:.2f} |", flush=True)
    return 0 if better else 1


if __name__ == "__main__":
    sys.exit(main())
