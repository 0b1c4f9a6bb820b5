"""Decoding with less memory than the model has bytes: ork in a window beside llama.cpp's mmap, under the same cap.

    python bench/memory_cap.py [MODEL] [--shares 60,30] [--threads 2] [--tokens 16] [--seconds 60] [--pack FILE]

Each program runs in a memory cgroup of 60 % and 30 % of the pack's bytes (v1 or v2, made for the run and removed; where
that is not permitted the bench says so and ends). ork's window is the cap less what the interpreter, the KV cache and
the activations take. llama.cpp runs the same weights as Q8_0, which is as many bytes, mapped as it does by default. The
page cache is emptied of both files first. Decoding is greedy after one prompt; rates are tokens per second without the
prompt's pass; ork's text must be the text without a cap. Needs the peers' environments (`bench/peers.py --setup`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inputs import fresh_pack, gguf_file
from peer_env import cache_folder, require, run_worker
from peers import BUSY, Others, processor
from requantise import requantised
from streaming import disk_rate, drop, load

MODEL = "qwen2.5-coder-1.5b"
PROMPT = "def quicksort(items):\n    "
RESERVE = 224 << 20  # of a cap: the interpreter, KV cache, activations, the pack's index
GOAL = 3.0
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class NoCgroup(Exception):
    """Why none can be made."""


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup that may use `limit` bytes, page cache included. Raises NoCgroup."""
    first = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if first else V2) / f"ork-bench-{os.getpid()}"
    try:
        if not first and "memory" not in (V2 / "cgroup.controllers").read_text().split():
            raise NoCgroup("no memory controller")
        folder.mkdir()
    except OSError as error:
        raise NoCgroup(f"{error.filename}: {error.strerror}") from None
    try:
        try:
            (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
        except OSError as error:
            raise NoCgroup(f"{error.filename}: {error.strerror}") from None
        yield folder
    finally:
        folder.rmdir()


def entering(folder: Path | None) -> Callable[[], None] | None:
    """What a process calls to be in the cgroup."""
    if folder is None:
        return None
    return lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None


def peak(folder: Path) -> int:
    """The most bytes that were charged to the cgroup."""
    name = "memory.max_usage_in_bytes" if folder.parent == V1 else "memory.peak"
    file = folder / name
    return int(file.read_text()) if file.exists() else 0


def ork_decode(pack: str, window: int | None, threads: int, count: int, seconds: float) -> dict[str, Any]:
    """As `greedy` of peer_worker.py."""
    text, passed, first = "", 0, 0.0
    with load(Path(pack), "cpu", threads, window) as model:
        model.stream.reside()
        for piece in model.generate(PROMPT, max_tokens=count + 1):
            now = time.perf_counter()
            first = first or now
            text += piece
            passed += 1
            if now - first > seconds:
                break
        stats = model.stream.stats
        rate = (passed - 1) / (now - first)
        return {"text": text, "rate": rate, "tokens": passed - 1, "overlap": stats.overlap, "reason": stats.reason}


def run_ork(folder: Path | None, **options: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", json.dumps(options)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=entering(folder))
    if done.returncode:
        raise SystemExit(f"ork failed with {done.returncode} (-9: over the cap):\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(pack: Path, gguf: Path, shares: list[int], args: argparse.Namespace) -> list[str]:
    (llama,) = require(["llama.cpp"])
    size, disk = pack.stat().st_size, disk_rate(pack)
    options = {"threads": args.threads, "count": args.tokens, "seconds": args.seconds}
    others = Others()
    free = run_ork(None, pack=str(pack), window=None, **options)
    lines = []
    for share in shares:
        cap = size * share // 100
        window = cap - RESERVE
        drop(pack), drop(gguf)
        with memory_cgroup(cap) as folder:
            ours = run_ork(folder, pack=str(pack), window=window, **options)
            used = peak(folder)
        if not free["text"].startswith(ours["text"]) and not ours["text"].startswith(free["text"]):
            raise SystemExit(f"at {share} %: other text than without a cap:\n{ours['text']!r}\n{free['text']!r}")
        with memory_cgroup(cap) as folder:
            flags = [f for key, value in options.items() for f in (f"--{key}", value)]
            theirs = run_worker(llama, "greedy", gguf, PROMPT, *flags, before=entering(folder))
        drop(gguf)
        ratio = ours["rate"] / theirs["rate"]
        bound = disk / (size - window)
        lines.append(
            f"| {share} % = {cap >> 20} MiB | {window >> 20} MiB | {ours['rate']:.2f} ({ours['tokens']} tokens, "
            f"peak {used >> 20} MiB) | {theirs['rate']:.3f} ({theirs['tokens']} tokens) | {ratio:.1f}x"
            f"{'' if ratio >= GOAL else ' **missed**'} | {bound:.2f} | same |"
        )
    busy = others.cores()
    head = [
        f"{pack.name} {size >> 20} MiB, {gguf.name} {gguf.stat().st_size >> 20} MiB; {args.threads} threads, "
        f"{processor()}; O_DIRECT {disk / 1e9:.2f} GB/s; ork without a cap {free['rate']:.2f} tok/s; others used "
        f"{busy:.1f} cores{': **not idle, figures are not to be trusted**' if busy > BUSY else ''}",
        "",
        "| cap | ork's window | ork tok/s | llama.cpp tok/s | ork is (goal 3x) | disk's bound | ork's text |",
        "|---|---|---|---|---|---|---|",
    ]
    return head + lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--shares", default="60,30", help="caps, in percent of the pack's bytes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=60, help="after which decoding stops, whatever was reached")
    parser.add_argument("--pack", type=Path, help="use this pack of the model, made before")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(ork_decode(**json.loads(args.work))))
        return
    try:
        with memory_cgroup(1 << 30):
            pass
    except NoCgroup as reason:
        print(f"skipped: a memory cgroup cannot be made here ({reason})")
        return
    model = gguf_file(args.model)
    with tempfile.TemporaryDirectory() as folder:
        pack = args.pack or fresh_pack(model, Path(folder))
        gguf = requantised(model, "Q8_0", cache_folder("models"))
        print("\n".join(compare(pack, gguf, [int(s) for s in args.shares.split(",")], args)))


if __name__ == "__main__":
    main()
