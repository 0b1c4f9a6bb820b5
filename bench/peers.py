"""Speed beside llama.cpp and ik_llama.cpp: the same GGUF, the same threads, one run.

    python bench/peers.py --setup                  # once: builds both in environments of their own (minutes)
    python bench/peers.py [MODEL ...] [--threads 2] [--rounds 3] [--llama-bench PATH] [--json FILE]

Prefill is one batch of 512 tokens from an empty KV cache (llama-bench's pp512), decode 128 tokens one at a time from an
empty cache (tg128), in tokens per second; f16 KV cache, everything else as each program sets it by default. ork runs
its default i8 pack, converted beforehand. Every measurement is a process of its own that loads, warms up and then
times; the programs take turns within a round. Figures are medians over the rounds (of each round's median), with the
least and the largest sample. The machine's read bandwidth is measured in every round: decode cannot exceed it.
A measurement begins when the machine is idle and is repeated if other processes used the processor meanwhile (one busy
core halves everything here and costs ggml's spinning threads up to 90 %); if there is no quiet time, the table says so.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from inputs import add_models, fresh_pack, gguf_file
from peer_env import PEERS, require, run_worker, set_up

PP, TG, REPEATS = 512, 128, 3
PATIENCE = 30.0  # seconds to wait for an idle machine before each measurement
BUSY = 0.10  # of one core: what others may use while we measure
TRIES = 4  # for each measurement, until one is undisturbed
READ_BYTES = 1 << 30

Samples = dict[str, list[float]]  # 'pp' and 'tg', tokens per second


class Others:
    """Processor time that processes other than our children have used since this object was made."""

    def __init__(self) -> None:
        self.start, self.used = time.perf_counter(), self._used()

    @staticmethod
    def _used() -> float:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - children.ru_utime - children.ru_stime

    def cores(self) -> float:
        """In cores, on average."""
        return (self._used() - self.used) / (time.perf_counter() - self.start)


def wait_for_idle() -> None:
    """Wait until the machine is idle, at most PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        others = Others()
        time.sleep(0.5)
        if others.cores() <= BUSY:
            return


def undisturbed(run: Callable[[], Samples]) -> tuple[Samples, float]:
    """The first measurement during which others used less than BUSY cores, or the least disturbed; and that use."""
    best: tuple[Samples, float] | None = None
    for _ in range(TRIES):
        wait_for_idle()
        others = Others()
        samples = run()
        busy = others.cores()
        if best is None or busy < best[1]:
            best = samples, busy
        if busy <= BUSY:
            break
        print(f"others used {busy:.1f} cores", file=sys.stderr)
    assert best is not None
    return best


class ReadBandwidth:
    """Reads 1 GiB with libc's memchr, which is as wide as the processor, one contiguous run for each thread."""

    def __init__(self, threads: int):
        self.threads = threads
        self.data = bytearray(b"\x55") * READ_BYTES
        self.memchr = ctypes.CDLL(None).memchr
        self.memchr.argtypes, self.memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def measure(self) -> float:
        """GB/s, the best of three passes."""
        share = READ_BYTES // self.threads
        best = 0.0
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in range(3):
                start = time.perf_counter()
                list(pool.map(lambda i: self.memchr(self.address + i * share, 0, share), range(self.threads)))
                best = max(best, share * self.threads / (time.perf_counter() - start) / 1e9)
        return best


def program_samples(command: list[str], is_prefill: Callable[[dict[str, Any]], bool]) -> Samples:
    """From a program that prints llama-bench's JSON: a list of tests with their `samples_ts`."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    samples: Samples = {"pp" if is_prefill(row) else "tg": row["samples_ts"] for row in json.loads(done.stdout)}
    assert samples.keys() == {"pp", "tg"}
    return samples


TESTS = ["-p", str(PP), "-n", str(TG), "-r", str(REPEATS), "-o", "json"]


def run_ork(pack: Path, threads: int) -> Samples:
    command = [sys.executable, "-m", "ork", "bench", str(pack), *TESTS, "--threads", str(threads)]
    return program_samples(command, lambda row: row["test"] == f"pp{PP}")


def run_llama_bench(program: Path, model: Path, threads: int) -> Samples:
    command = [str(program), "-m", str(model), *TESTS, "-t", str(threads)]
    return program_samples(command, lambda row: row["n_prompt"] > 0)


def run_peer(name: str, model: Path, threads: int) -> Samples:
    options = ["--threads", threads, "--pp", PP, "--tg", TG, "--repeats", REPEATS]
    samples: Samples = run_worker(PEERS[name], "speed", model, *options)
    return samples


def compare(programs: dict[str, Callable[[], Samples]], threads: int, rounds: int) -> dict[str, Any]:
    """All samples by program, one list for each round, and what the machine gave meanwhile."""
    bandwidth = ReadBandwidth(threads)
    result: dict[str, Any] = {"samples": {name: [] for name in programs}, "read_gb_s": [], "others_cores": []}
    for number in range(rounds):
        wait_for_idle()
        result["read_gb_s"].append(bandwidth.measure())
        for name, run in programs.items():
            samples, busy = undisturbed(run)
            result["samples"][name].append(samples)
            result["others_cores"].append(busy)
            pp, tg = (statistics.median(samples[test]) for test in ("pp", "tg"))
            print(f"round {number + 1}/{rounds}: {name}: {pp:.0f} / {tg:.1f}", file=sys.stderr)
    return result


def summarise(result: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Program -> test -> median over rounds, least and largest sample, and `ratio`: ork's median over this one's."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for name, rounds in result["samples"].items():
        summary[name] = {}
        for test in ("pp", "tg"):
            everything = [sample for samples in rounds for sample in samples[test]]
            median = statistics.median(statistics.median(samples[test]) for samples in rounds)
            summary[name][test] = {"median": median, "least": min(everything), "largest": max(everything)}
    for tests in summary.values():
        for test, figures in tests.items():
            figures["ratio"] = summary["ork"][test]["median"] / figures["median"]
    return summary


def markdown(result: dict[str, Any]) -> str:
    """The table of one model."""
    busy, read = max(result["others_cores"]), result["read_gb_s"]
    lines = [
        f"{result['model']}, {result['threads']} threads, {len(read)} rounds, {result['processor']}; read bandwidth "
        f"{statistics.median(read):.1f} GB/s ({min(read):.1f}-{max(read):.1f}); others used up to "
        f"{busy:.2f} cores{': **not idle, figures are not to be trusted**' if busy > BUSY else ''}",
        "",
        f"| program | pp{PP} tok/s | ork is | tg{TG} tok/s | ork is |",
        "|---|---|---|---|---|",
    ]
    for name, tests in result["summary"].items():
        cells = [name]
        for figures in tests.values():
            cells.append(f"{figures['median']:.1f} ({figures['least']:.1f}-{figures['largest']:.1f})")
            cells.append("" if name == "ork" else f"{figures['ratio']:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def processor() -> str:
    """The processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Hardware")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model: what ran where, all samples, and the summary."""
    with tempfile.TemporaryDirectory() as folder:
        pack = fresh_pack(model, Path(folder))
        programs: dict[str, Callable[[], Samples]] = {"ork": partial(run_ork, pack, args.threads)}
        for name in PEERS:
            programs[name] = partial(run_peer, name, model, args.threads)
        if args.llama_bench:
            programs["llama-bench"] = partial(run_llama_bench, args.llama_bench, model, args.threads)
        result = compare(programs, args.threads, args.rounds)
    return {
        "model": model.name,
        "threads": args.threads,
        "processor": processor(),
        "peers": {name: peer.requirement for name, peer in PEERS.items()},
        "summary": summarise(result),
        **result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--setup", action="store_true", help="only make the peers' environments")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="also run this llama-bench program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples and the summary here")
    args = parser.parse_args()
    if args.setup:
        for peer in PEERS.values():
            set_up(peer)
        return
    require(list(PEERS))
    report = []
    for number, model in enumerate(args.models):
        result = measure(gguf_file(model), args)
        report.append(result)
        print(("\n" if number else "") + markdown(result), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
