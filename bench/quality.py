"""Bytes, perplexity, KL divergence, top-1 agreement and speed of our recipes beside ggml's Q8_0, Q4_0 and Q4_K_M.

    python bench/quality.py [MODEL ...] [--chunks 80] [--threads 2] [--on-grid] [--sweep] [--no-speed] [--json FILE]

Every quantiser starts from the same float model: the GGUF with the noise its own rounding took (`fair_reference.py`),
in F16; with `--on-grid`, from the GGUF itself, whose weights lie on ggml's grids: there ggml's quantisers find their
own codes again. The reference is that float model in ork (products in f32), which all programs are compared with,
token by token, on the same text: Persuasion by Jane Austen, in chunks of 512 whose second halves are scored. KV caches
are f32. ggml's files are made and run by llama.cpp, its activations quantised as it does. Recipes that calibrate do so
on the text that ork brings along, which is another one. With `--against-source` the reference is the GGUF itself: a
quantiser that finds its grid again under the noise, as ggml's own do, has less KL there than the float model's and its
own come to. `--sweep` adds `--target-bpw` from 4.25 to 8.5.

`bytes` are those of all matrices with their scales, over whose weights bpw is counted. Speed is prefill of 512
and decode of 128 tokens as in `peers.py`, by turns on an idle machine.
Goals: int8 at most 1.5 of Q8_0's KL, with activation scales per 32 inputs at most 1.0; mixed at most Q4_K_M's bytes, KL
and excess of perplexity. Exit code 1 if one is missed. Needs llama.cpp (`python bench/peers.py --setup`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ork
from fair_reference import fair_reference
from inputs import add_models, austen, fresh_pack, gguf_file
from ork import native
from ork.measure.compare import comparison
from ork.measure.perplexity import Chunks, Logits, Running, cut
from ork.pack.verify import inspect
from ork.sources.gguf import GgufSource
from peer_env import PEERS, WORKER, cache_folder, require, run_worker
from peers import compare, run_ork, run_peer

CONTEXT = 512
GGML = ("Q8_0", "Q4_0", "Q4_K_M")
ORK: dict[str, tuple[str, ...]] = {  # options of `ork convert`
    "int8": ("--recipe", "int8"),
    "int8, activations by 32": ("--recipe", "int8", "--act-group", "32"),
    "mixed": ("--recipe", "mixed"),
    "mixed, GPTQ": ("--recipe", "mixed", "--gptq"),
    "small": ("--recipe", "small"),
}
TARGETS = (4.25, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 8.5)
SWEEP = {f"{bpw} bpw": ("--target-bpw", str(bpw)) for bpw in TARGETS}


@dataclass
class Candidate:
    """A quantised model: who runs it, its file, bytes of weights, bits a weight, seconds of making it."""

    name: str
    file: Path
    nbytes: int
    bpw: float
    seconds: float
    peer: bool


class Follower:
    """llama.cpp as a source of logits: a process that computes the chunk it is asked for."""

    def __init__(self, model: Path, chunks: Chunks, folder: Path, threads: int):
        peer = PEERS["llama.cpp"]
        tokens, self.out = folder / "tokens.npy", folder / f"{model.stem}.npy"
        np.save(tokens, chunks.tokens)
        command = [peer.python, WORKER, peer.module, "follow", model, tokens, self.out, "--threads", threads]
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.first = chunks.first
        self._answer("ready")
        self.logits = np.load(self.out, mmap_mode="r")
        self.vocab = self.logits.shape[1]

    def _answer(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise SystemExit(f"llama.cpp ended before it said {word}")

    def chunk(self, i: int) -> Generator[native.Array, None, None]:
        assert self.process.stdin is not None
        self.process.stdin.write("next\n")
        self.process.stdin.flush()
        self._answer("done")
        yield native.Array.of(np.ascontiguousarray(self.logits[self.first : -1]))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def weights_of_gguf(path: Path) -> tuple[int, float]:
    """Bytes of all matrices, and bits a weight."""
    source = GgufSource(path)
    matrices = [t for t in source.tensors.values() if len(t.shape) > 1]
    nbytes = sum(t.nbytes for t in matrices)
    bits = 8 * nbytes / sum(t.rows * t.columns for t in matrices)
    source.close()
    return nbytes, bits


def weights_of_pack(path: Path) -> tuple[int, float]:
    about = inspect(path)
    return sum(c["bytes"] for c in about["codecs"].values()), about["bits_per_weight"]


def recorded(record: Path) -> Candidate | None:
    """One that was made before, if its file is still there."""
    if not record.exists():
        return None
    about = json.loads(record.read_text())
    found = Candidate(**{**about, "file": Path(about["file"])})
    return found if found.file.exists() else None


def keep(record: Path, made: Candidate) -> Candidate:
    record.write_text(json.dumps({**vars(made), "file": str(made.file)}))
    return made


def candidates(
    float_model: Path, recipes: dict[str, tuple[str, ...]], folder: Path, extra: tuple[str, ...]
) -> list[Candidate]:
    """Everything made from the float model; ggml's files are kept beside it, packs in `folder`, and there a record of
    how each was made: what is there is taken as it is."""
    found = []
    for name, options in recipes.items():
        record = folder / f"{float_model.stem}-{name}.json"
        if before := recorded(record):
            found.append(before)
            continue
        start = time.perf_counter()
        # one measurement serves the whole sweep
        shared = ("--measurements", str(folder / "measurements.json")) if name in SWEEP else ()
        pack = fresh_pack(float_model, folder, *options, *shared, *extra)
        seconds = time.perf_counter() - start
        found.append(keep(record, Candidate(f"ork {name}", pack, *weights_of_pack(pack), seconds, peer=False)))
        print(f"{found[-1].name}: {found[-1].seconds:.1f} s", file=sys.stderr)
    kept = cache_folder("peers/fair")
    for kind in GGML:
        file, record = kept / f"{float_model.stem}-{kind}.gguf", folder / f"{float_model.stem}-{kind}.json"
        if before := recorded(record):
            found.append(before)
            continue
        partial_file = file.with_suffix(".part")
        seconds = run_worker(PEERS["llama.cpp"], "quantize", float_model, partial_file, kind)["seconds"]
        partial_file.rename(file)
        found.append(keep(record, Candidate(f"ggml {kind}", file, *weights_of_gguf(file), seconds, peer=True)))
    return found


def quality(reference: Path, found: list[Candidate], chunks: int, threads: int) -> dict[str, dict[str, Any]]:
    """Comparison of every candidate with the float model, by name; the model runs once, all follow chunk by chunk."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def load(path: Path) -> ork.LoadedModel:
            return stack.enter_context(ork.load(path, kv="f32", threads=threads, n_ctx=CONTEXT, device="cpu"))

        base = load(reference)
        text = cut(base.tokenizer, austen().read_text(), CONTEXT, chunks)
        rows = text.scored  # at once: all programs hand out the same parts
        followers: dict[str, Logits] = {}
        for c in found:
            if c.peer:
                follower = Follower(c.file, text, Path(folder), threads)
                stack.callback(follower.close)
                followers[c.name] = follower
            else:
                followers[c.name] = Running(load(c.file).engine, text, rows)
        count = len(text) * rows
        nll = {name: np.empty((count, 2)) for name in followers}
        kl = {name: np.empty(count) for name in followers}
        top = {name: np.empty((count, 2), np.int32) for name in followers}
        ours = Running(base.engine, text, rows)
        for i in range(len(text)):
            here = slice(i * rows, (i + 1) * rows)
            (want,) = ours.chunk(i)
            for name, follower in followers.items():
                (got,) = follower.chunk(i)
                native.compare(want, got, text.targets(i), nll[name][here], top[name][here], kl[name][here])
                del got
            print(f"chunk {i + 1}/{len(text)}", file=sys.stderr, end="\r")
        return {
            name: comparison(nll[name], kl[name], top[name][:, 0] == top[name][:, 1]).record() for name in followers
        }


def speed(found: list[Candidate], threads: int, rounds: int) -> dict[str, Any]:
    programs = {
        c.name: partial(run_peer, "llama.cpp", c.file, threads) if c.peer else partial(run_ork, c.file, threads)
        for c in found
    }
    return compare(programs, threads, rounds)


def goals(rows: dict[str, dict[str, Any]]) -> list[str]:
    """What was asked and is missed, a line each."""
    missed = []

    def most(name: str, key: str, limit: float, said: str) -> None:
        if name in rows and rows[name][key] > limit:
            missed.append(f"{name}: {key} {rows[name][key]:.5g} > {limit:.5g} ({said})")

    q8, q4 = rows["ggml Q8_0"], rows["ggml Q4_K_M"]
    most("ork int8", "kl", 1.5 * q8["kl"], "1.5 x Q8_0")
    most("ork int8, activations by 32", "kl", q8["kl"], "Q8_0")
    for name in ("ork mixed", "ork mixed, GPTQ"):
        most(name, "bytes", q4["bytes"], "Q4_K_M")
        most(name, "kl", q4["kl"], "Q4_K_M")
        most(name, "ratio", q4["ratio"], "Q4_K_M")
    sweep = [rows[f"ork {name}"]["kl"] for name in SWEEP if f"ork {name}" in rows]
    if sweep != sorted(sweep, reverse=True):
        missed.append(f"--target-bpw is not monotone: {', '.join(f'{kl:.5f}' for kl in sweep)}")
    return missed


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| weights | bytes | bpw | perplexity | of float | KL, nats | KL 99.9 % | top-1 | pp512 | tg128 | made in |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        rate = [f"{r[test]:.0f}" if test in r else "" for test in ("pp", "tg")]
        lines.append(
            f"| {name} | {r['bytes']:,} | {r['bpw']:.2f} | {r['perplexity']:.3f} ± {r['error']:.3f} "
            f"| {100 * (r['ratio'] - 1):+.2f} ± {100 * r['ratio_error']:.2f} % "
            f"| {r['kl']:.5f} ± {r['kl_error']:.5f} | {r['kl_999']:.3f} "
            f"| {100 * r['top1']:.2f} % | {rate[0]} | {rate[1]} | {r['seconds']:.1f} s |"
        )
    return "\n".join(lines)


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    recipes = {**({} if args.only_sweep else ORK), **(SWEEP if args.sweep or args.only_sweep else {})}
    if args.recipes:
        recipes = {name: options for name, options in recipes.items() if name in args.recipes}
    float_model = model if args.on_grid else fair_reference(model, cache_folder("peers/fair"))
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory(dir=cache_folder("peers")))
        extra = ("--allow-requantize",) if args.on_grid else ()
        found = candidates(float_model, recipes, Path(folder), extra)
        if args.no_quality:
            return {"model": model.stem, "rows": {}}
        if args.only_speed:
            (rows,) = (r["rows"] for r in json.loads(args.only_speed.read_text()) if r["model"] == model.stem)
        else:
            reference = fresh_pack(float_model, Path(folder), "--recipe", "f32" if args.on_grid else "f16")
            if args.against_source:
                noisy = Candidate("float model", reference, *weights_of_pack(reference), 0.0, peer=False)
                found.insert(0, noisy)
                reference = fresh_pack(model, Path(folder), "--recipe", "f32", "--allow-requantize")
            rows = quality(reference, found, args.chunks, args.threads)
            for c in found:
                rows[c.name] |= {"bytes": c.nbytes, "bpw": c.bpw, "seconds": c.seconds}
        if not (args.no_speed or args.against_source):
            for name, rounds in speed(found, args.threads, args.rounds)["samples"].items():
                for test in ("pp", "tg"):
                    rows[name][test] = float(np.median([np.median(samples[test]) for samples in rounds]))
    return {"model": model.stem, "on_grid": args.on_grid, "tokens": args.chunks * CONTEXT, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--chunks", type=int, default=40, help="of 512 tokens (default: 40, 20,480 tokens)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of speed")
    parser.add_argument("--on-grid", action="store_true", help="start from the GGUF itself")
    parser.add_argument(
        "--against-source", action="store_true", help="compare with the GGUF itself, not with the fair file"
    )
    parser.add_argument("--sweep", action="store_true", help="--target-bpw from 4.25 to 8.5 too")
    parser.add_argument("--only-sweep", action="store_true", help="--target-bpw alone")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these of ours")
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument(
        "--only-speed", type=Path, metavar="FILE", help="quality is in the --json of a run with --no-speed"
    )
    parser.add_argument("--no-quality", action="store_true", help="only make the packs, into --folder")
    parser.add_argument("--folder", type=Path, help="keep packs here, and go on with those of an earlier run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    require(["llama.cpp"])
    report, missed = [], []
    for model in map(gguf_file, args.models):
        result = measure(model, args)
        report.append(result)
        if args.no_quality:
            continue
        first = next(iter(result["rows"].values()))
        what = (
            "on grid" if args.on_grid else "fair files against the source" if args.against_source else "fair reference"
        )
        print(
            f"\n{result['model']}, {what}, {result['tokens']:,} tokens "
            f"({first['tokens']:,} scored), perplexity {first['reference']:.3f} ± {first['reference_error']:.3f}\n"
        )
        print(table(result["rows"]))
        for line in [] if args.against_source else goals(result["rows"]):
            missed.append(line)
            print(f"\nMISSED {line}")
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
