"""How close the kernels come to what this machine can do, both measured in the same run.

    python bench/kernels.py [--threads 1 2] [--isa avx512 ...] [--json FILE]

GEMM: products at M = 512 and 64 against the processor's integer peak (dot products in registers alone).
GEMV: M = 1 and a few, cycling through more than 1 GiB of weights so that none is in a cache, against a plain read of
the same bytes; group scales are counted as bytes. int8 with one scale a row, and 4-bit codes or groups of K.
Inflation: 4-bit tiles to int8 tiles, in bytes written.
Rounds of kernel and limit alternate, because a virtual machine's bandwidth changes within minutes. --cpu-time counts
the process's own time instead of the wall's: with one thread that is right on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ork import native, tiles
from ork.devices.cpu import CODEC_IDS

GEMM = [(512, 2048, 2048), (512, 576, 1536), (512, 1536, 576), (512, 640, 2048), (64, 2048, 2048), (4, 2048, 2048)]
GEMV = [(2048, 2048), (576, 1536), (1536, 8960), (640, 262144)]
# (codec, group of the weights, group of the rows)
KINDS = [
    ("nf4", 32, 32),
    ("nf4", 64, 64),
    ("i4", 128, 128),
    ("nf4", 0, 0),
    ("i8", 0, 32),
    ("i8", 0, 128),
    ("i8", 32, 32),
]
GROUPED_GEMM = [(512, 2048, 2048), (512, 8960, 1536), (64, 2048, 2048), (8, 2048, 2048)]
GROUPED_GEMV = [(1, 1536, 8960), (1, 8960, 1536), (2, 1536, 8960), (4, 1536, 8960)]
WEIGHT_BYTES = 1200 << 20
ROUNDS = 7


def aligned(nbytes: int) -> np.ndarray:
    """u8 [nbytes], page-aligned, every page touched."""
    raw = np.empty(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    view = raw[start : start + nbytes]
    view.view(np.uint64)[:] = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return view


clocks = [time.perf_counter]  # the last one counts


def seconds(work: Callable[[], object]) -> float:
    start = clocks[-1]()
    work()
    return clocks[-1]() - start


def weights(memory: np.ndarray, codec: str, K: int, N: int, group: int) -> tuple[list[list[native.Slice]], int]:
    """As many weights [N, K] as fill the memory, each cut into slices as in a pack, and the bytes of one."""
    columns = tiles.slice_columns(codec, K, N, group)
    layouts = [tiles.slice_layout(codec, K, n1 - n0, group) for n0, n1 in columns]
    size = sum(-(-s.nbytes // 4096) * 4096 for s in layouts)
    at, made = 0, []
    while at + size <= memory.nbytes:
        parts = []
        for (n0, n1), layout in zip(columns, layouts, strict=True):
            channel, groups = at + layout.channel.offset, at + layout.groups.offset
            memory[channel : channel + layout.channel.nbytes].view(np.float32)[:] = 1e-3
            memory[groups : groups + layout.groups.nbytes].view(np.float16)[:] = 0.5
            base = memory.ctypes.data
            scales = base + groups if group else 0
            parts.append(
                native.Slice(CODEC_IDS[codec], base + at, base + channel, K, layout.ks, n0, n1 - n0, group, scales)
            )
            at += -(-layout.nbytes // 4096) * 4096
        made.append(parts)
    return made, sum(s.nbytes for s in layouts)


def job(M: int, K: int, N: int, parts: list[native.Slice], group: int) -> Callable[[], None]:
    x = native.Array.of(np.random.default_rng(0).standard_normal((M, K), dtype=np.float32))
    rows, out = native.quantise(x, None, 0, group), native.Array(M, N)
    outs, biases = [out] * len(parts), [None] * len(parts)
    return lambda: native.linear(x, rows, parts, outs, biases)


def gemm(M: int, K: int, N: int, memory: np.ndarray, codec: str, group: int, row_group: int) -> tuple[float, float]:
    """(GOP/s of the kernel, GOP/s of the peak), medians of alternating rounds."""
    made, _ = weights(memory[: 2 * K * N + (1 << 20)], codec, K, N, group)
    product = job(M, K, N, made[0], row_group)
    repeat = max(1, int(2e9 // (2 * M * K * N)))
    kernel, peak = [], []
    for _ in range(ROUNDS):
        peak.append(integer_peak())
        kernel.append(2e-9 * M * K * N * repeat / seconds(lambda: [product() for _ in range(repeat)]))
    return statistics.median(kernel), statistics.median(peak)


def integer_peak() -> float:
    """GOP/s (a multiply-add counts as two) of dot products in registers."""
    done: list[int] = []
    took = seconds(lambda: done.append(native.peak(True, 1_000_000)[0]))
    return 2e-9 * done[0] / took


def gemv(M: int, K: int, N: int, memory: np.ndarray, codec: str, group: int, row_group: int) -> tuple[float, float]:
    """(GB/s of the kernel over the weights, GB/s of a plain read), medians of alternating rounds."""
    made, size = weights(memory, codec, K, N, group)
    products = [job(M, K, N, parts, row_group) for parts in made]
    kernel, read = [], []
    for _ in range(ROUNDS):
        read.append(memory.nbytes / seconds(lambda: native.read_memory(memory)) / 1e9)
        kernel.append(size * len(made) / seconds(lambda: [product() for product in products]) / 1e9)
    return statistics.median(kernel), statistics.median(read)


def inflation(memory: np.ndarray) -> float:
    """GB/s of int8 tiles made of 4-bit ones: 2 MiB slices, from all over the memory."""
    size, tiles_in_run = 2 << 20, 64
    out = aligned(2 * size).view(np.int8)
    parts = [memory[at : at + size] for at in range(0, memory.nbytes // 4, size)][:-1]
    rates = []
    for _ in range(ROUNDS):
        took = seconds(lambda: [native.inflate(CODEC_IDS["nf4"], part, out, tiles_in_run) for part in parts])
        rates.append(2e-9 * size * len(parts) / took)
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=[native.isa_names()[0]], choices=native.isa_names())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["i8", "grouped", "inflate"], nargs="+", default=["i8", "grouped", "inflate"])
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        clocks.append(time.process_time)
    memory = aligned(WEIGHT_BYTES)
    results = []
    print("| isa | threads | what | kernel | this machine's limit | ratio |")
    print("|---|---:|---|---:|---:|---:|")

    def report(name: str, unit: str, got: float, limit: float | None) -> None:
        results.append({"isa": isa, "threads": threads, "what": name, "unit": unit, "got": got, "limit": limit})
        ratio = "| |" if limit is None else f"{limit:.1f} | {got / limit:.2f} |"
        print(f"| {isa} | {threads} | {name} | {got:.1f} {unit} | {ratio}", flush=True)

    i8 = [("i8", 0, 0)]
    plan = [(i8, GEMM, [(1, K, N) for K, N in GEMV])] if "i8" in args.only else []
    plan += [(KINDS, GROUPED_GEMM, GROUPED_GEMV)] if "grouped" in args.only else []
    for isa in args.isa:
        native.choose_isa(isa)
        for threads in args.threads:
            native.set_threads(threads)
            for kinds, gemms, gemvs in plan:
                for codec, group, row_group in kinds:
                    kind = f"{codec} groups {group or row_group or '-'}{'' if group or not row_group else ' of rows'}"
                    for M, K, N in gemms:
                        rates = gemm(M, K, N, memory, codec, group, row_group)
                        report(f"GEMM {kind} M={M} K={K} N={N}", "GOP/s", *rates)
                    for M, K, N in gemvs:
                        rates = gemv(M, K, N, memory, codec, group, row_group)
                        report(f"GEMV {kind} M={M} K={K} N={N}", "GB/s", *rates)
            if "inflate" in args.only:
                report("inflation, bytes written", "GB/s", inflation(memory), None)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
