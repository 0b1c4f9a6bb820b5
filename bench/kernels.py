"""How close the kernels come to what this machine can do, both measured in the same run.

    python bench/kernels.py [--threads 1 2] [--isa avx512 ...] [--json FILE]

GEMM: int8 products at M = 512 and 64 against the processor's integer peak (dot products in registers alone).
GEMV: M = 1, cycling through more than 1 GiB of weights so that none is in a cache, against a plain read of the same
bytes. Rounds of kernel and limit alternate, because a virtual machine's bandwidth changes within minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ork import native

GEMM = [(512, 2048, 2048), (512, 576, 1536), (512, 1536, 576), (512, 640, 2048), (64, 2048, 2048), (4, 2048, 2048)]
GEMV = [(2048, 2048), (576, 1536), (1536, 8960), (640, 262144)]
WEIGHT_BYTES = 1200 << 20
ROUNDS = 7


def aligned(nbytes: int) -> np.ndarray:
    """u8 [nbytes], page-aligned, every page touched."""
    raw = np.empty(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    view = raw[start : start + nbytes]
    view.view(np.uint64)[:] = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return view


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def slices(memory: np.ndarray, scales: np.ndarray, K: int, N: int) -> list[list[native.Slice]]:
    """As many weights [N, K] as fill the memory, each cut into slices of about 2 MiB as in a pack."""
    n = max(64, min(8192, (2 << 20) // K // 64 * 64))
    at, weights = memory.ctypes.data, []
    while at + K * N <= memory.ctypes.data + memory.nbytes:
        parts = []
        for n0 in range(0, N, n):
            count = min(n, N - n0)
            parts.append(native.Slice(1, at + K * n0, scales.ctypes.data, K, K, n0, count))
        weights.append(parts)
        at += (K * N + 4095) // 4096 * 4096
    return weights


def gemm(M: int, K: int, N: int, memory: np.ndarray, scales: np.ndarray) -> tuple[float, float]:
    """(GOP/s of the kernel, GOP/s of the peak), medians of alternating rounds."""
    rng = np.random.default_rng(0)
    x = native.Array.of(rng.standard_normal((M, K), dtype=np.float32))
    rows, out = native.quantise(x, None, 0), native.Array(M, N)
    weight = slices(memory[: 2 * K * N + 4096], scales, K, N)[0]
    args = (x, rows, weight, [out] * len(weight), [None] * len(weight))
    repeat = max(1, int(2e9 // (2 * M * K * N)))
    kernel, peak = [], []
    for _ in range(ROUNDS):
        peak.append(integer_peak())
        kernel.append(2e-9 * M * K * N * repeat / seconds(lambda: [native.linear(*args) for _ in range(repeat)]))
    return statistics.median(kernel), statistics.median(peak)


def integer_peak() -> float:
    """GOP/s (a multiply-add counts as two) of dot products in registers."""
    done, took = native.peak(True, 1_000_000)
    return 2e-9 * done / took


def gemv(K: int, N: int, memory: np.ndarray, scales: np.ndarray) -> tuple[float, float]:
    """(GB/s of the kernel over the weights, GB/s of a plain read), medians of alternating rounds."""
    x = native.Array.of(np.random.default_rng(0).standard_normal((1, K), dtype=np.float32))
    rows, out = native.quantise(x, None, 0), native.Array(1, N)
    weights = slices(memory, scales, K, N)
    jobs = [(x, rows, w, [out] * len(w), [None] * len(w)) for w in weights]
    nbytes = len(weights) * K * N
    kernel, read = [], []
    for _ in range(ROUNDS):
        read.append(memory.nbytes / seconds(lambda: native.read_memory(memory)) / 1e9)
        kernel.append(nbytes / seconds(lambda: [native.linear(*job) for job in jobs]) / 1e9)
    return statistics.median(kernel), statistics.median(read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=[native.isa_names()[0]], choices=native.isa_names())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    memory = aligned(WEIGHT_BYTES)
    scales = aligned(262144 * 4).view(np.float32)
    scales[:] = 1e-3
    results = []
    print("| isa | threads | what | kernel | this machine's limit | ratio |")
    print("|---|---:|---|---:|---:|---:|")
    for isa in args.isa:
        native.choose_isa(isa)
        for threads in args.threads:
            native.set_threads(threads)
            for M, K, N in GEMM:
                got, limit = gemm(M, K, N, memory, scales)
                results.append({"isa": isa, "threads": threads, "gemm": [M, K, N], "gops": got, "peak": limit})
                name = f"GEMM M={M} K={K} N={N}"
                print(f"| {isa} | {threads} | {name} | {got:.0f} GOP/s | {limit:.0f} | {got / limit:.2f} |", flush=True)
            for K, N in GEMV:
                got, limit = gemv(K, N, memory, scales)
                results.append({"isa": isa, "threads": threads, "gemv": [K, N], "gbs": got, "read": limit})
                name = f"GEMV M=1 K={K} N={N}"
                print(f"| {isa} | {threads} | {name} | {got:.1f} GB/s | {limit:.1f} | {got / limit:.2f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
