"""Models in windows smaller than they are, beside the same model resident; and how long a pack takes to be ready.

    python bench/streaming.py [MODEL ...] [--devices cpu,emu] [--threads 2] [--rounds 3] [--only ready|windows]

Ready: the time of `reside` on the emulated board, pack in the page cache and unchecked, over that of a plain copy of
the pack from a fresh mapping into fresh memory (huge pages too) by as many threads. Beside it the conversion, and the
time to make one slice over that to load one. (The older stack: a first run 5.2x a second, a weight packed 8.3x loaded.)

Windows: prefill of 512 tokens and decode through 1/2 and 1/4 of the weights, with prefetch and without, over resident.
The page cache is emptied of the pack first, so that slices come from the disk. No stream is faster than the disk:
where what a pass streams takes longer to read (O_DIRECT in the loaders' block size, the best of one and two threads,
before and after) than the resident pass takes, the figure to compare with is that bound; both are printed.

Every measurement is a process of its own; the logits of all are compared bit for bit. The table says how much of the
processor other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from inputs import fresh_pack, gguf_file
from ork.api import LoadedModel
from ork.measure import bench
from ork.pack.file import aligned
from ork.pack.reader import Pack
from ork.residency.loading import load_slice
from peers import BUSY, Others, processor

MODELS = ["gemma3-270m", "qwen2.5-coder-1.5b"]
BLOCK = 2 << 20  # about a slice
PP = 512
SHARES = (2, 4)  # of the weights: 1/2 and 1/4
DISK_BYTES = 512 << 20  # read to measure the disk
GOALS = {"ready": 1.2, "gemma3-270m": 0.95, "default": 0.90, "bound": 0.95}


# --- measurements, each in a process of its own -----------------------------------------------------------------------


def on_threads(threads: int, size: int, work: Callable[[int, int], object]) -> float:
    """Seconds that `work(start, end)` takes over blocks of [0, size), which threads take one by one."""
    starts = range(0, size, BLOCK)
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda at: work(at, min(size, at + BLOCK)), starts):
            pass
    return time.perf_counter() - begin


def copy_seconds(pack: Path, threads: int, nbytes: int) -> float:
    """A plain copy of so many of the file's bytes: a fresh mapping, fresh memory."""
    begin = time.perf_counter()
    with pack.open("rb") as file:
        source = np.frombuffer(mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ), np.uint8)
    room = mmap.mmap(-1, nbytes)
    room.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(room, np.uint8)
    on_threads(threads, nbytes, lambda a, b: np.copyto(target[a:b], source[a:b]))
    return time.perf_counter() - begin


def load(pack: Path, device: str, threads: int, window: int | None = None, prefetch: bool = True) -> LoadedModel:
    return LoadedModel(
        Pack.open(pack), device=device, threads=threads, context=1024, kv=None, window=window, prefetch=prefetch
    )


def take_memory(nbytes: int) -> None:
    """Touches memory and gives it back. A virtual machine returns what is free to its host within seconds, and whoever
    asks first pays for getting it again, which is neither a copy nor a load."""
    room = mmap.mmap(-1, nbytes)
    room.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(room, np.uint8)[:: mmap.PAGESIZE] = 1


def ready(pack: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds of `reside` on the emulated board and of the copy, by turns; the first turn does not count."""
    ours, copies = [], []
    for _ in range(rounds + 1):
        with load(pack, "emu", threads) as model:
            take_memory(pack.stat().st_size)
            event = model.stream.reside()
        ours.append(event.seconds)
        take_memory(pack.stat().st_size)
        copies.append(copy_seconds(pack, threads, event.nbytes))
    return {"seconds": ours[1:], "copies": copies[1:], "nbytes": event.nbytes, "slices": event.slices}


def one_slice(pack: Path, threads: int) -> dict[str, Any]:
    """Median seconds to bring in one slice of about 2 MiB, checked, into a slot that is there."""
    with load(pack, "emu", threads) as model:
        items = [(t, i) for t in model.stream.tensors for i in range(len(t.slices)) if t.blob_bytes(i) >= BLOCK // 2]
        slot = model.device.make_slot(max(t.blob_bytes(i) for t, i in items) + 4096)
        seconds = []
        for tensor, i in items[:64]:
            start = time.perf_counter()
            load_slice(model.source, model.device, tensor, i, slot)
            seconds.append(time.perf_counter() - start)
        model.device.free_slot(slot)
    return {"seconds": statistics.median(seconds[1:])}


def passes(
    pack: Path, device: str, threads: int, window: int | None, prefetch: bool, tg: int, repeats: int
) -> dict[str, Any]:
    """Rates of prefill and decode, what streaming did meanwhile, and a hash of some logits."""
    with load(pack, device, threads, window, prefetch) as model:
        model.stream.reside()
        if window is not None:
            drop(pack)
        stats = model.stream.stats
        result: dict[str, Any] = {}
        for name, run in (
            ("pp", lambda: bench.prefill(model.engine, PP, repeats)),
            ("tg", lambda: bench.decode(model.engine, tg, repeats)),
        ):
            before = (stats.moved_bytes, stats.transfer_seconds, stats.overlap_seconds)
            rates = run().rates
            moved, transfers, overlap = (
                b - a for a, b in zip(before, (stats.moved_bytes, stats.transfer_seconds, stats.overlap_seconds))
            )
            count = (repeats + 1) * (1 if name == "pp" else tg)
            result[name] = {"rate": statistics.median(rates), "rates": rates, "pass_bytes": moved / count}
            result[name]["overlap"] = overlap / transfers if transfers else None
        logits = model.logits(bench.tokens(8, model.model.config.vocab))
        result["logits"] = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(logits))
        result["peak_bytes"], result["reason"] = stats.peak_bytes, stats.reason
        head = model.stream.tensors[0]  # of a window's cycle
        result["head_bytes"] = sum(head.blob_bytes(i) for i in range(len(head.slices)))
        result["weight_bytes"] = sum(t.blob_bytes(i) for t in model.stream.tensors for i in range(len(t.slices)))
    return result


def drop(path: Path) -> None:
    """Empties the page cache of a file, but for pages that a process has mapped."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def disk_rate(path: Path) -> float:
    """Bytes per second of O_DIRECT reads in blocks of a slice's size, by one, two or four threads: the best."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = min(os.fstat(fd).st_size, DISK_BYTES) // BLOCK * BLOCK
    rates = []
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            rooms = list(pool.map(lambda _: aligned(BLOCK), range(threads)))
        free = list(rooms)

        def read(start: int, end: int, free: list[Any] = free) -> None:
            room = free.pop()
            os.preadv(fd, [room[: end - start]], start)
            free.append(room)

        rates.append(size / on_threads(threads, size, read))
    os.close(fd)
    return max(rates)


WORK: dict[str, Callable[..., Any]] = {"ready": ready, "one_slice": one_slice, "passes": passes}


def apart(work: str, pack: Path, **options: Any) -> tuple[Any, float]:
    """The result of a measurement in a process of its own, and the cores that others used meanwhile."""
    command = [sys.executable, __file__, "--work", json.dumps({"work": work, "pack": str(pack), **options})]
    others = Others()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{work} of {options} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), others.cores()


# --- tables -----------------------------------------------------------------------------------------------------------


def loaded(busy: float) -> str:
    return f"; others used up to {busy:.1f} cores" + (": **not idle, figures are not to be trusted**" * (busy > BUSY))


def ready_row(model: str, pack: Path, threads: int, rounds: int, conversion: float) -> str:
    about, busy = apart("ready", pack, threads=threads, rounds=rounds)
    times, copies = about["seconds"], about["copies"]
    slice_seconds = apart("one_slice", pack, threads=threads)[0]["seconds"]
    took, copied = statistics.median(times), statistics.median(copies)
    per_slice = conversion / about["slices"]
    cells = [
        model,
        f"{about['nbytes'] / 2**20:.0f}",
        f"{took:.3f} ({min(times):.3f})",
        f"{copied:.3f} ({min(copies):.3f})",
        f"{took / copied:.2f} ({min(times) / min(copies):.2f}){_verdict(took / copied <= GOALS['ready'])}",
        f"{(conversion + took) / took:.1f}" if conversion else "",
        f"{1e3 * per_slice:.1f} / {1e3 * slice_seconds:.2f} = {per_slice / slice_seconds:.1f}" if conversion else "",
        f"{busy:.1f}" + " **not idle**" * (busy > BUSY),
    ]
    return f"| {' | '.join(cells)} |"


READY_HEAD = [
    "| model | MiB | ready, s (least) | copy, s (least) | ready / copy (goal 1.2) | first run / second | make / load a "
    "slice, ms | others, cores |",
    "|---|---|---|---|---|---|---|---|",
]


def _verdict(good: bool) -> str:
    return "" if good else " **missed**"


def windows_table(
    name: str, pack: Path, device: str, threads: int, rounds: int, tg: int, shares: Sequence[int]
) -> list[str]:
    disk = disk_rate(pack)
    # resident first and last: a machine that changes its pace shows
    options = {"device": device, "threads": threads, "tg": tg, "repeats": rounds}
    resident, busy = apart("passes", pack, window=None, prefetch=True, **options)
    rows = []
    for share in shares:
        for prefetch in (True, False):
            window = resident["weight_bytes"] // share
            got, used = apart("passes", pack, window=window, prefetch=prefetch, **options)
            if got["logits"] != resident["logits"]:
                raise SystemExit(f"{name} on {device} through {window} bytes: other logits than resident")
            if got["peak_bytes"] > window:
                raise SystemExit(f"{name}: {got['peak_bytes']} bytes were mapped in a window of {window}")
            busy = max(busy, used)
            rows.append((share, prefetch, got))
    again, used = apart("passes", pack, window=None, prefetch=True, **options)
    busy = max(busy, used)
    disk = max(disk, disk_rate(pack))
    base = {test: statistics.median([*resident[test]["rates"], *again[test]["rates"]]) for test in ("pp", "tg")}
    lines = [
        f"{name}, device {device}, {threads} threads, {processor()}; weights {resident['weight_bytes'] / 2**20:.0f} "
        f"MiB; O_DIRECT {disk / 1e9:.2f} GB/s{loaded(busy)}",
        "",
        f"| window | prefetch | pp{PP} tok/s | of resident | of the disk's bound | overlap | tg tok/s | of resident "
        "| of the disk's bound | overlap | MiB a pass |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        f"| resident | | {base['pp']:.1f} | | | | {base['tg']:.2f} | | | | 0 |",
    ]
    notes = [""]
    for share, prefetch, got in rows:
        cells = [f"1/{share}", "yes" if prefetch else "no"]
        for test, tokens in (("pp", PP), ("tg", 1)):
            t = got[test]
            bound = tokens * disk / t["pass_bytes"]  # tokens/s
            of_resident, of_bound = t["rate"] / base[test], t["rate"] / min(bound, base[test])
            verdict = ""
            if prefetch and test == "pp":
                goal = GOALS["bound"] if bound < base[test] else GOALS.get(name, GOALS["default"])
                verdict = _verdict((of_bound if bound < base[test] else of_resident) >= goal)
            limit = f"{of_bound:.2f} of {bound:.1f}" if bound < base[test] else f"(above: {bound:.0f})"
            cells += [f"{t['rate']:.1f}" if test == "pp" else f"{t['rate']:.2f}", f"{of_resident:.2f}{verdict}", limit]
            cells.append(f"{t['overlap']:.2f}" if t["overlap"] is not None else "")
        cells.append(f"{got['pp']['pass_bytes'] / 2**20:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
        exposed = max(0, got["head_bytes"] - resident["weight_bytes"] // share)
        if exposed and prefetch:
            rate = PP / (PP / base["pp"] + exposed / disk)
            notes.append(
                f"1/{share}: the head comes last and is {exposed / 2**20:.0f} MiB larger than the window: nothing of a "
                f"prefill hides those, so that the disk allows {rate:.1f} tok/s, {rate / base['pp']:.2f} of resident."
            )
    return lines + notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help="GGUF files or known names")
    parser.add_argument("--devices", default="cpu,emu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tg", type=int, default=16, help="tokens decoded in each round")
    parser.add_argument("--only", choices=("ready", "windows"))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="windows, as 1/N of the weights")
    parser.add_argument("--pack", type=Path, help="measure this pack, made before, of the only MODEL")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        options = json.loads(args.work)
        print(json.dumps(WORK[options.pop("work")](Path(options.pop("pack")), **options)))
        return
    ready_rows: list[str] = []
    tables: list[list[str]] = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            path = gguf_file(model)
            start = time.perf_counter()
            pack = args.pack or fresh_pack(path, Path(folder))
            conversion = 0.0 if args.pack else time.perf_counter() - start
            if args.only != "windows":
                ready_rows.append(ready_row(path.stem, pack, args.threads, 2 * args.rounds + 1, conversion))
            if args.only != "ready":
                for device in args.devices.split(","):
                    shares = [int(share) for share in args.shares.split(",")]
                    tables.append(windows_table(path.stem, pack, device, args.threads, args.rounds, args.tg, shares))
                    print("\n".join(tables[-1]) + "\n", flush=True)
    if ready_rows:
        print("\n".join([*READY_HEAD, *ready_rows]))


if __name__ == "__main__":
    main()
