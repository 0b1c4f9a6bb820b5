"""Converting a model: seconds and memory beside llama.cpp's quantiser, and what a killed conversion becomes.

    python bench/conversion.py [MODEL] [--resume-model MODEL] [--rounds 3] [--threads 2] [--max-ram 2G]
                               [--only speed|resume] [--recipes NAME ...] [--json FILE]

All start from the model's fair F16 file (`fair_reference.py`), which is read into the page cache before each run.
ork's seconds are those of the process `ork convert`, from its start until the pack is on the disk (it is fsynced);
llama.cpp's are those of `llama_model_quantize` alone, which leaves its file to the page cache. Programs take turns
within a round; medians, with the least and the largest. A run begins when the machine is idle, if it becomes so within
half a minute; what others used of the processor meanwhile is in the table, and times on a busy machine mean little:
there the seconds of processor time, of the whole process, say more. What `mixed` takes before it writes is mostly
measuring the model.

Memory is polled every 10 ms over the process and its children: `own` is the peak of RssAnon + RssShmem, all that is not
a mapped file; `--max-ram` bounds it, for it is meant beyond the mapped source. `whole` is the kernel's own peak, VmHWM,
mapped pages included.

Resuming: `ork convert` is killed (SIGKILL) three times, each time at a random moment of the next third of the work: the
first counted from the start (of `mixed`, that is while it measures), the others while the pack is being written. The
fourth run ends. Its file must have the bytes of a conversion that nobody disturbed. int8 and mixed on MODEL, mixed with
GPTQ on the other (default: qwen2.5-coder-0.5b).

Goals: int8 at most the time of Q8_0, mixed without GPTQ at most 3 times that of Q4_K_M, own memory at most --max-ram
and 10 %, equal bytes. Exit code 1 if one is missed. Needs llama.cpp (`python bench/peers.py --setup`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fair_reference import fair_reference
from inputs import gguf_file
from ork.cli.common import parse_size
from peer_env import PEERS, WORKER, cache_folder, require
from peers import BUSY, Others, wait_for_idle

MODEL, RESUMED_MODEL = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
KILLS = 3
SEED = 6
POLL_SECONDS = 0.01
BLOCK = 16 << 20
ORK: dict[str, tuple[str, ...]] = {
    "int8": ("--recipe", "int8"),
    "mixed": ("--recipe", "mixed"),
    "mixed, GPTQ": ("--recipe", "mixed", "--gptq"),
}
GPTQ = "mixed, GPTQ"
GGML = {"int8": "Q8_0", "mixed": "Q4_K_M"}  # what each is compared with
GOALS = (("ork int8", "ggml Q8_0", 1.0), ("ork mixed", "ggml Q4_K_M", 3.0))
SLACK = 1.1  # of --max-ram


@dataclass
class Run:
    """One process: seconds, and of processor time, peaks in bytes, what others used meanwhile in cores, when the pack's
    part appeared."""

    seconds: float = 0.0
    cpu: float = 0.0
    own: int = 0
    whole: int = 0
    others: float = 0.0
    writing: float = 0.0
    output: str = field(default="", repr=False)


# --- one process


def status(pid: int) -> dict[str, int]:
    """Bytes by name of /proc/PID/status; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        children = [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except (OSError, ProcessLookupError):
        return
    for child in children:
        yield from family(int(child))


def watched(command: list[str], part: Path | None = None) -> Run:
    """Runs a program to its end. Ends this one if it fails."""
    run, others, before, start = Run(), Others(), cpu_of_children(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                seen = [status(pid) for pid in family(process.pid)]
                run.own = max(run.own, sum(s.get("RssAnon", 0) + s.get("RssShmem", 0) for s in seen))
                run.whole = max(run.whole, sum(s.get("VmHWM", 0) for s in seen))
                if part is not None and not run.writing and part.exists():
                    run.writing = time.perf_counter() - start

        watcher = threading.Thread(target=watch)
        watcher.start()
        run.output, errors = process.communicate()
        run.seconds = time.perf_counter() - start
        ended.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    run.cpu, run.others = cpu_of_children() - before, others.cores()
    return run


def cpu_of_children() -> float:
    """Seconds that those which have ended used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_of(model: Path, pack: Path, options: tuple[str, ...], args: argparse.Namespace) -> list[str]:
    ork = [sys.executable, "-m", "ork", "convert", str(model), "-o", str(pack), *options]
    return [*ork, "--threads", str(args.threads), "--max-ram", args.max_ram]


def part_of(pack: Path) -> Path:
    return Path(f"{pack}.part")


def convert(model: Path, pack: Path, options: tuple[str, ...], args: argparse.Namespace) -> Run:
    pack.unlink(missing_ok=True)
    return watched(command_of(model, pack, options, args), part_of(pack))


def quantise(model: Path, file: Path, kind: str, threads: int) -> Run:
    """llama.cpp's; its seconds are its own count."""
    peer = PEERS["llama.cpp"]
    command = [peer.python, WORKER, peer.module, "quantize", model, file, kind, "--threads", threads]
    run = watched(list(map(str, command)))
    run.seconds = json.loads(run.output.splitlines()[-1])["seconds"]
    return run


# --- speed and memory


def read_in(path: Path) -> None:
    with path.open("rb") as f:
        while f.read(BLOCK):
            pass


def speed(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, list[Run]]:
    programs: dict[str, Callable[[], Run]] = {}
    for name in args.recipes:
        programs[f"ork {name}"] = partial(convert, model, folder / f"{name}.orkpack", ORK[name], args)
        if name in GGML:
            kind = GGML[name]
            programs[f"ggml {kind}"] = partial(quantise, model, folder / f"{kind}.gguf", kind, args.threads)
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    for i in range(args.rounds):
        for name, program in programs.items():
            read_in(model)
            wait_for_idle()
            runs[name].append(program())
            print(f"round {i + 1}, {name}: {runs[name][-1].seconds:.1f} s", file=sys.stderr)
    return runs


def seconds_of(runs: list[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def table(runs: dict[str, list[Run]]) -> str:
    lines = [
        "| conversion | seconds | least - largest | before writing | of ggml's | goal | processor, s | own memory, MiB "
        "| whole, MiB | others, cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    goals = {name: (peer, limit) for name, peer, limit in GOALS}
    for name, r in runs.items():
        seconds = [run.seconds for run in r]
        ratio = goal = ""
        if name in goals:
            peer, limit = goals[name]
            ratio, goal = f"{seconds_of(r) / seconds_of(runs[peer]):.2f}", f"{limit:g}"
        before = statistics.median(run.writing for run in r)
        lines.append(
            f"| {name} | {seconds_of(r):.1f} | {min(seconds):.1f} - {max(seconds):.1f} "
            f"| {f'{before:.1f}' if before else ''} | {ratio} | {goal} | {statistics.median(run.cpu for run in r):.1f} "
            f"| {max(run.own for run in r) >> 20} | {max(run.whole for run in r) >> 20} "
            f"| {max(run.others for run in r):.1f} |"
        )
    return "\n".join(lines)


def missed_speed(runs: dict[str, list[Run]], max_ram: int) -> list[str]:
    missed = []
    for name, peer, limit in GOALS:
        ratio = seconds_of(runs[name]) / seconds_of(runs[peer]) if name in runs else 0.0
        if ratio > limit:
            missed.append(f"{name}: {ratio:.2f} of the time of {peer}, more than {limit:g}")
    for name, r in runs.items():
        own = max(run.own for run in r)
        if name.startswith("ork") and own > SLACK * max_ram:
            missed.append(f"{name}: {own >> 20} MiB of memory with --max-ram {max_ram >> 20} MiB")
    return missed


# --- killed and resumed


def digest(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as f:
        for block in iter(partial(f.read, BLOCK), b""):
            state.update(block)
    return state.hexdigest()


def killed(command: list[str], part: Path, seconds: float, *, writing: bool) -> float | None:
    """Kills the program after `seconds`, counted with `writing` from when it writes the pack; when that was, counted
    from its start. None if it ended before."""
    start = time.perf_counter()
    before = part.stat().st_mtime_ns if part.exists() else None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while writing and process.poll() is None:
            if part.exists() and part.stat().st_mtime_ns != before:
                break
            time.sleep(POLL_SECONDS)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return time.perf_counter() - start
    return None


def resumed(name: str, model: Path, folder: Path, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Whether the bytes are those of an undisturbed conversion, and when it was killed."""
    options = ORK[name]
    whole, pack = folder / "whole.orkpack", folder / "killed.orkpack"
    pack.unlink(missing_ok=True)
    undisturbed = convert(model, whole, options, args)
    moments = []
    for kill in range(KILLS):
        span = undisturbed.seconds - (undisturbed.writing if kill else 0.0)
        at = killed(
            command_of(model, pack, options, args), part_of(pack), rng.uniform(0, span / KILLS), writing=kill > 0
        )
        moments.append(at)
        if at is None:  # what was left took less than the moment waited for
            break
    last = watched(command_of(model, pack, options, args)) if not pack.exists() else Run()
    equal = digest(whole) == digest(pack)
    for file in (whole, pack):
        file.unlink()
    return {
        "recipe": name,
        "model": model.stem,
        "seconds": undisturbed.seconds,
        "killed": [m for m in moments if m is not None],
        "last": last.seconds,
        "equal": equal,
    }


def resume_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| conversion | of | undisturbed, s | killed after, s | the run that ended, s | bytes |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        moments = ", ".join(f"{m:.1f}" for m in r["killed"])
        lines.append(
            f"| ork {r['recipe']} | {r['model']} | {r['seconds']:.1f} | {moments} | {r['last']:.1f} "
            f"| {'equal' if r['equal'] else 'DIFFERENT'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL, help=f"a GGUF file or known name (default: {MODEL})")
    parser.add_argument("--resume-model", default=RESUMED_MODEL, help="the one that GPTQ is interrupted on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-ram", default="2G", help="as ork convert takes it (default: 2G)")
    parser.add_argument("--only", choices=("speed", "resume"))
    parser.add_argument("--recipes", nargs="+", choices=ORK, default=list(ORK), metavar="NAME", help="only these")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments of killing")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    require(["llama.cpp"])
    kept = cache_folder("peers/fair")
    model = fair_reference(gguf_file(args.model), kept)
    report: dict[str, Any] = {"model": model.stem, "max_ram": args.max_ram}
    missed = []
    with tempfile.TemporaryDirectory(dir=cache_folder("peers")) as name:
        folder = Path(name)
        if args.only != "resume":
            runs = speed(model, folder, args)
            report["speed"] = {name: [vars(run) | {"output": ""} for run in r] for name, r in runs.items()}
            print(f"\n{model.stem}, {args.threads} threads, --max-ram {args.max_ram}\n\n{table(runs)}")
            if max(run.others for r in runs.values() for run in r) > BUSY:
                print("\nOthers used the processor meanwhile: the times are not to be relied on.")
            missed += missed_speed(runs, parse_size(args.max_ram))
            for file in folder.iterdir():
                file.unlink()
        if args.only != "speed":
            rng = random.Random(args.seed)
            other = gguf_file(args.resume_model) if GPTQ in args.recipes else None
            models = {name: fair_reference(other, kept) if other and name == GPTQ else model for name in args.recipes}
            rows = [resumed(recipe, source, folder, args, rng) for recipe, source in models.items()]
            report["resume"] = rows
            print(f"\n{resume_table(rows)}")
            missed += [f"ork {r['recipe']}: resumed, the bytes differ" for r in rows if not r["equal"]]
    for line in missed:
        print(f"\nMISSED {line}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
