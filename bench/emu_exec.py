"""What `ork emu exec` costs a program: a matmul beside the native kernel alone, and one call.

    python bench/emu_exec.py [--rounds 5]

The program is the C client of the tests: int8, M = 512, K = N = 2048, as a chain of four programs with its syncs; the
native kernel multiplies the same shapes in this process. Goals: at most 3 times the kernel's time, and less than
100 us a call. Exit code 1 if missed.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ork import native

CLIENTS = Path(__file__).parent.parent / "tests" / "clients"
M, K, N, ROWS = 512, 2048, 2048, 128
GOAL_RATIO, GOAL_CALL_S = 3.0, 100e-6


def build(folder: Path) -> Path:
    client = folder / "client"
    sources = sorted(map(str, CLIENTS.glob("*.c")))
    subprocess.run(["cc", "-O2", "-o", str(client), *sources, "-lpthread", "-lm"], check=True)
    return client


def under_exec(client: Path, test: str) -> float:
    """The seconds that the client prints."""
    line = [sys.executable, "-m", "ork.cli.main", "emu", "exec", "--", str(client), test]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    found = re.search(r"([0-9.]+) seconds", said)
    assert found is not None, said
    return float(found[1])


def alone() -> float:
    """The best of a few: the kernel that the emulator's cores use, on the same tiles."""
    a, w, c = np.full((M, K), 3, np.int8), np.full(K * N, 5, np.int8), np.empty((M, N), np.int32)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        for row in range(0, M, ROWS):
            native.accumulate_at(a[row:].ctypes.data, K, ROWS, K, w.ctypes.data, N, c[row:].ctypes.data, N)
        times.append(time.perf_counter() - start)
    assert (c == 15 * K).all()
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        client = build(Path(folder))
        pairs = [(under_exec(client, "speed"), alone()) for _ in range(rounds)]
        call = statistics.median(under_exec(client, "calls") for _ in range(rounds))
    program, kernel = (statistics.median(times) for times in zip(*pairs))
    ratio = program / kernel
    print("| what | under emu exec | native kernel alone | ratio | goal |")
    print("|---|---:|---:|---:|---:|")
    print(
        f"| int8 matmul {M} x {K} x {N}, ms | {program * 1e3:.2f} | {kernel * 1e3:.2f} | {ratio:.2f} | {GOAL_RATIO} |"
    )
    print(f"| one ioctl, us | {call * 1e6:.1f} | | | {GOAL_CALL_S * 1e6:.0f} |")
    return 0 if ratio <= GOAL_RATIO and call < GOAL_CALL_S else 1


if __name__ == "__main__":
    sys.exit(main())
