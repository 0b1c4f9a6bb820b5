"""From process start to the first token: a second start, with the pack already converted.

    python bench/startup.py [smollm2-135m gemma3-270m ...] [--runs 7]

Times `ork run MODEL -p PROMPT` from fork to the first byte of text on standard output, after one run that converts and
warms the page cache. The prompt has five words. Medians, least and largest; the limits are issue A's goals.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROMPT = "The capital of France is"
GOALS = {"smollm2-135m": 1.0, "gemma3-270m": 2.0}  # seconds


def first_token(model: str) -> float:
    """Seconds until the first byte of text."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "ork", "run", model, "-p", PROMPT, "-n", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    if process.returncode or not first:
        raise SystemExit(f"{model}: {errors.decode().strip()}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(GOALS))
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    good = True
    print("| model | to the first token, s | least | largest | goal |")
    print("|---|---:|---:|---:|---:|")
    for model in args.models:
        first_token(model)
        times = [first_token(model) for _ in range(args.runs)]
        goal = GOALS.get(model)
        good &= goal is None or statistics.median(times) < goal
        print(f"| {model} | {statistics.median(times):.3f} | {min(times):.3f} | {max(times):.3f} | {goal or ''} |")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
