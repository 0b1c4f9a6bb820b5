"""Mixtures of experts: decoding with less memory than the experts have bytes, and prefill of many experts.

    python bench/moe.py [--quick] [--only cap|many] [--threads 2] [--tokens 64] [--seconds 90] [--keep FOLDER]

cap: a dense 1.5B made into 16 experts top 4 (moe_from_dense.py), 4 bits, and room for 25 % and 50 % of the experts'
bytes beside the weights that every token reads, LRU. Each program decodes along the same novel, which the experts were
not made on, in a memory cgroup of ork's window and what an interpreter takes. ork's rate is compared with
1 / (resident time + missed bytes / O_DIRECT rate), with misses read from a pack in memory (tmpfs, outside the cgroup)
with the resident rate, and with llama.cpp's on the same model as Q4_0, mapped (not repacked, which would copy it
into memory), in the same cgroup.

many: prefill of 512 tokens through two layers of Qwen3-30B-A3B's shape (128 experts top 8, hidden 2048, expert 768),
random weights, resident: ork's nf4 with a scale for every 32 inputs (4.5 bits a weight, rotated) beside Q4_0 (4.5) of
llama.cpp and ik_llama.cpp, which both repack it. Programs take turns.

Where no cgroup can be made, cap says so and is left out. Needs the peers' environments (`bench/peers.py --setup`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import moe_from_dense
import moe_shapes
from inputs import austen, english, fresh_pack, gguf_file
from memory_cap import NoCgroup, entering, memory_cgroup, peak
from ork.api import LoadedModel
from ork.engine.kvcache import Sequence
from ork.measure import bench
from ork.pack.reader import Pack
from peer_env import Peer, require, run_worker
from peers import BUSY, Others, processor
from streaming import disk_rate, drop

MODEL = "qwen2.5-coder-1.5b"
EXPERTS, TOP_K = 16, 4
SHARES = (25, 50)  # percent of the experts' bytes
RESERVE = 64 << 20  # of a cap, beside the window: the interpreter, KV cache, activations, the index of the pack
PROMPT = 32  # tokens in one pass, which also fill the cache
ROWS = 512
GOALS = {"bound": 0.85, "ram": {25: 0.5, 50: 0.75}, "llama.cpp": 3.0, "many": {"llama.cpp": 1.5, "ik_llama.cpp": 1.0}}


# --- ork, in a process of its own -------------------------------------------------------------------------------------


def opened(pack: str, threads: int, window: int | None) -> LoadedModel:
    return LoadedModel(Pack.open(Path(pack)), device="cpu", threads=threads, context=1024, kv=None, window=window)


def sizes(pack: str) -> dict[str, int]:
    """Bytes of all experts, and of the other weights that passes multiply with."""
    with opened(pack, 1, None) as model:
        layers = model.stream.expert_layers
        mapped = model.device.mapped_bytes
        routed = [s for layer in layers for e in range(len(layer)) for t in layer.tensors(e) for s in t.slices]
        dense = [s for t in model.stream.tensors for s in t.slices]
        # slots are whole pages
        pages = [-(-mapped(s) // 4096) * 4096 for s in routed]
        return {"experts": sum(pages), "dense": sum(-(-mapped(s) // 4096) * 4096 for s in dense)}


def along(pack: str, tokens: str, threads: int, window: int | None, seconds: float) -> dict[str, Any]:
    """As `along` of peer_worker.py, with what the expert cache did meanwhile and the first logits of the way."""
    text = [int(t) for t in np.load(tokens).reshape(-1)]
    with opened(pack, threads, window) as model:
        model.stream.reside()
        seq, engine, stats = Sequence(), model.engine, model.stream.stats.experts
        engine.prefill(seq, text[:PROMPT])
        before = [c.total() for c in (stats.lookups, stats.hits, stats.moved_bytes)]
        best, count, took = 0, 0, 0.0
        start = time.perf_counter()
        chosen = []
        for token in text[PROMPT:]:
            best = int(engine.forward([(seq, [token])])[0].argmax())
            chosen.append(best)
            count += 1
            took = time.perf_counter() - start
            if took > seconds:
                break
        lookups, hits, moved = (c.total() - b for c, b in zip((stats.lookups, stats.hits, stats.moved_bytes), before))
        return {
            "rate": count / took,
            "tokens": count,
            "hit_rate": hits / lookups,
            "moved": moved / count,
            "chosen": chosen,
            "reason": model.stream.stats.reason,
        }


def prefill(pack: str, threads: int, repeats: int) -> dict[str, Any]:
    with opened(pack, threads, None) as model:
        return {"rates": bench.prefill(model.engine, ROWS, repeats).rates}


WORK = {"sizes": sizes, "along": along, "prefill": prefill}


def apart(work: str, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """A measurement of ork, in a process of its own, in the cgroup `folder`."""
    command = [sys.executable, __file__, "--work", json.dumps({"work": work, **options})]
    done = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=entering(folder))
    if done.returncode:
        raise SystemExit(f"{work} failed with {done.returncode} (-9: over the cap):\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- a cap ------------------------------------------------------------------------------------------------------------


def files(folder: Path, threads: int) -> tuple[Path, Path]:
    """The mixture as a 4-bit pack and as Q4_0, made unless they are in the folder."""
    mixture, pack, q4 = folder / "moe.gguf", folder / "moe.orkpack", folder / "moe-Q4_0.gguf"
    if not pack.exists() or not q4.exists():
        text = english().read_text(encoding="utf-8")
        if not mixture.exists():
            moe_from_dense.convert(gguf_file(MODEL), mixture, text, experts=EXPERTS, top_k=TOP_K)
        made = fresh_pack(mixture, folder, "--recipe", "nf4", "--group", "32")
        made.rename(pack)
        (llama,) = require(["llama.cpp"])
        run_worker(llama, "quantize", mixture, q4, "Q4_0", "--threads", threads)
    return pack, q4


def capped(pack: Path, q4: Path, args: argparse.Namespace, work: Path) -> list[str]:
    (llama,) = require(["llama.cpp"])
    shared = Path("/dev/shm")
    size = apart("sizes", pack=str(pack))
    tokens = work / "tokens.npy"
    with opened(str(pack), 1, None) as model:
        text = model.tokenizer.encode(austen().read_text(encoding="utf-8")[20_000:40_000])
    np.save(tokens, np.array(text[: PROMPT + args.tokens], np.int32))
    options = {"tokens": str(tokens), "threads": args.threads, "seconds": args.seconds}
    others, disk = Others(), disk_rate(pack)
    free = [apart("along", pack=str(pack), window=None, **options)]
    lines, notes = [], []
    for share in SHARES:
        window = size["dense"] + size["experts"] * share // 100
        cap = window + RESERVE
        drop(pack)
        with memory_cgroup(cap) as group:
            ours = apart("along", group, pack=str(pack), window=window, **options)
            used = peak(group)
        disk = max(disk, disk_rate(pack))
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            copy = Path(folder) / pack.name
            copy.write_bytes(pack.read_bytes())
            with memory_cgroup(cap) as group:
                ram = apart("along", group, pack=str(copy), window=window, **options)
        drop(q4)
        with memory_cgroup(cap) as group:
            flags = ("--threads", args.threads, "--skip", PROMPT, "--seconds", args.seconds)
            theirs = run_worker(llama, "along", q4, tokens, *flags, before=entering(group))
        free.append(apart("along", pack=str(pack), window=None, **options))  # again: a machine may change its pace
        for got in (ours, ram):
            if got["chosen"] != free[0]["chosen"][: len(got["chosen"])]:
                raise SystemExit(f"at {share} %: other tokens than without a window")
        for name, got in (("ork", ours), ("from memory", ram), ("llama.cpp", theirs)):
            print(f"{share} %, {name}: {got['rate']:.2f} tok/s", file=sys.stderr, flush=True)
        lines.append((share, window, used, ours, ram, theirs))
        notes.append(f"{share} %: {ours['reason']}")
    resident = statistics.median(f["rate"] for f in free)
    rows = []
    for share, window, used, ours, ram, theirs in lines:
        bound = 1 / (1 / resident + ours["moved"] / disk)
        cells = [
            f"{share} % = {size['experts'] * share // 100 >> 20} MiB",
            f"{window >> 20} MiB, peak {used >> 20}",
            f"{100 * ours['hit_rate']:.1f} %",
            f"{ours['moved'] / 2**20:.1f}",
            f"{ours['rate']:.2f} ({ours['tokens']} tokens)",
            _ratio(ours["rate"] / bound, GOALS["bound"], f" of {bound:.2f}"),
            _ratio(ram["rate"] / resident, GOALS["ram"][share]),
            f"{theirs['rate']:.3f} ({theirs['tokens']} tokens)",
            _ratio(ours["rate"] / theirs["rate"], GOALS["llama.cpp"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return [
        f"{MODEL} as {EXPERTS} experts top {TOP_K}: experts {size['experts'] >> 20} MiB, other weights "
        f"{size['dense'] >> 20} MiB, {q4.name} {q4.stat().st_size >> 20} MiB; {args.threads} threads, {processor()}; "
        f"O_DIRECT {disk / 1e9:.2f} GB/s; resident {resident:.2f} tok/s{_busy(others)}",
        "",
        "| experts in memory | window | hits | MiB missed a token | tok/s | of the disk's bound (goal 0.85) "
        "| misses from memory, of resident (goal 0.5, 0.75) | llama.cpp tok/s | ork is (goal 3) |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *notes,
    ]


def _ratio(value: float, goal: float, about: str = "") -> str:
    return f"{value:.2f}{about}{'' if value >= goal else ' **missed**'}"


def _busy(others: Others) -> str:
    used = others.cores()
    return f"; others used {used:.1f} cores" + (": **not idle, figures are not to be trusted**" * (used > BUSY))


# --- many experts -----------------------------------------------------------------------------------------------------


def many(folder: Path, args: argparse.Namespace) -> list[str]:
    """Prefill by turns; medians of all samples."""
    peers: list[Peer] = require(["llama.cpp", "ik_llama.cpp"])
    shape = moe_shapes.SHAPES["qwen3-30b-a3b"]
    gguf = folder / "qwen3-30b-a3b-2-Q4_0.gguf"
    if not gguf.exists():
        moe_shapes.write(gguf, shape, 2, "Q4_0")
    # speed alone is measured here: what rounding twice costs does not matter
    pack = fresh_pack(gguf, folder, "--recipe", "nf4", "--group", "32", "--allow-requantize")
    others = Others()
    samples: dict[str, list[float]] = {"ork": [], **{peer.name: [] for peer in peers}}
    for _ in range(1 if args.quick else 3):
        samples["ork"] += apart("prefill", pack=str(pack), threads=args.threads, repeats=3)["rates"]
        for peer in peers:
            flags = ("--threads", args.threads, "--pp", ROWS, "--tg", 16, "--repeats", 3)
            samples[peer.name] += run_worker(peer, "speed", gguf, *flags)["pp"]
    medians = {name: statistics.median(rates) for name, rates in samples.items()}
    rows = []
    for name, rates in samples.items():
        ratio = "" if name == "ork" else _ratio(medians["ork"] / medians[name], GOALS["many"][name])
        rows.append(f"| {name} | {medians[name]:.1f} ({min(rates):.1f} to {max(rates):.1f}) | {ratio} |")
    weights = 2 * (shape.experts * 3 * shape.width * shape.expert_ffn)
    return [
        f"2 layers of qwen3-30b-a3b's shape, {weights / 1e6:.0f} M weights in experts: "
        f"pack {pack.stat().st_size >> 20} MiB, GGUF {gguf.stat().st_size >> 20} MiB; "
        f"{args.threads} threads, {processor()}{_busy(others)}",
        "",
        f"| | pp{ROWS} tok/s | ork is (goals 1.5, 1) |",
        "|---|---|---|",
        *rows,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--only", choices=("cap", "many"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=90, help="after which decoding stops")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make files there, and use those that are there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        options = json.loads(args.work)
        print(json.dumps(WORK[options.pop("work")](**options)))
        return
    if args.quick:
        args.tokens, args.seconds = min(args.tokens, 24), min(args.seconds, 20)
    with tempfile.TemporaryDirectory() as folder:
        work = args.keep or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        if args.only != "many":
            try:
                with memory_cgroup(1 << 30):
                    pass
            except NoCgroup as reason:
                print(f"cap skipped: a memory cgroup cannot be made here ({reason})")
            else:
                print("\n".join(capped(*files(work, args.threads), args, Path(folder))), flush=True)
        if args.only != "cap":
            print("\n".join(["", *many(work, args)]))


if __name__ == "__main__":
    main()
