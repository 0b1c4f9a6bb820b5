"""What a draft brings: a model alone, with a small one of its family, with prompt look-up; the text is the same.

    python bench/draft.py [--big MODEL] [--small MODEL] [--window SIZE|PERCENT] [-n 128] [--rounds 3] [--json FILE]

Greedy decode of three prompts: code to complete, code to change (an answer in chat that repeats much of the question)
and prose. The ways take turns within a round and all run in one process on the same loaded model; a run in which the
text differs ends the program. Rates are medians over the rounds and contain all that the draft costs, its own pass over
the prompt too; loading and a warm-up are not timed.
`bytes a token` is what one pass reads of the large model's weights, divided by the tokens that a pass gave; with
--window (a size, or a share of the large pack such as 50%) also what was moved into it.
The second table is what a row more costs in a pass, the constant ROW_COST of src/ork/engine/speculative.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ork
from inputs import fresh_pack, gguf_file
from ork.cli.common import parse_size, size_text
from ork.engine.kvcache import Sequence
from ork.engine.session import Stats
from ork.pack.reader import Pack
from peers import ReadBandwidth, processor

CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
"""
PROMPTS = {
    "complete": ("text", '"""A binary search tree."""\n\n\nclass Node:\n'),
    "change": ("chat", f"Add type hints to this class and change nothing else:\n\n```python\n{CODE}```"),
    "prose": ("text", "The history of the steam engine begins"),
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17)


def generate(model: ork.LoadedModel, kind: str, prompt: str, n: int, stats: Stats) -> Iterator[str]:
    if kind == "text":
        return model.generate(prompt, max_tokens=n, stats=stats)
    return model.chat().send(prompt, max_tokens=n, stats=stats)


def pass_bytes(pack: Pack) -> int:
    """Weight bytes that a pass over one row reads: all slices, without an embedding that is only looked up."""
    tied = "output.weight" not in pack
    names = [n for n in pack.names() if n not in set(pack.raw_names()) and (tied or n != "token_embd.weight")]
    return sum(s.nbytes for name in names for s in pack.tensor(name).slices)


def moved(model: ork.LoadedModel) -> int:
    """Bytes of the large model that were brought into its window so far."""
    stats = getattr(model.stream, "stats", None)
    return stats.moved_bytes if stats else 0


def one(model: ork.LoadedModel, kind: str, prompt: str, n: int) -> tuple[str, dict[str, float]]:
    """The text of one run, and its figures."""
    stats, before = Stats(), moved(model)
    text = "".join(generate(model, kind, prompt, n, stats))
    return text, {
        "rate": stats.decode_rate,
        "new": stats.new_tokens,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "passes": stats.passes,
        "tokens_per_pass": stats.tokens_per_pass,
        "moved_per_token": (moved(model) - before) / max(1, stats.new_tokens),
    }


def compare(model: ork.LoadedModel, ways: dict[str, Any], n: int, rounds: int) -> dict[str, dict[str, list[Any]]]:
    """Samples by prompt and way."""
    samples: dict[str, dict[str, list[Any]]] = {name: {way: [] for way in ways} for name in PROMPTS}
    for name, (kind, prompt) in PROMPTS.items():
        for round_ in range(rounds):
            said = None
            for way, draft in ways.items():
                model.draft = draft
                text, figures = one(model, kind, prompt, n)
                said = text if said is None else said
                if text != said:
                    raise SystemExit(f"{name}: with {way} the text differs:\n{text}\n--- alone ---\n{said}")
                samples[name][way].append(figures)
                print(f"{name} {round_ + 1}/{rounds} {way}: {figures['rate']:.1f} tok/s", flush=True)
    return samples


def row_costs(model: ork.LoadedModel, rounds: int) -> dict[int, float]:
    """Seconds of a pass over so many rows behind a text of 256 tokens, medians; the row counts take turns."""
    engine, seq = model.engine, Sequence()
    engine.prefill(seq, list(range(100, 356)))
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(3 * rounds + 1):
        for rows in ROWS:
            start = time.perf_counter()
            engine.forward([(seq, list(range(100, 100 + rows)))], every=True)
            seconds[rows].append(time.perf_counter() - start)
            engine.pool.truncate(seq, 256)
    engine.pool.truncate(seq, 0)
    return {rows: statistics.median(s[1:]) for rows, s in seconds.items()}


def median(samples: list[dict[str, float]], key: str) -> float:
    return statistics.median(s[key] for s in samples)


def table(samples: dict[str, dict[str, list[Any]]], nbytes: int) -> Iterator[str]:
    yield "| prompt | draft | tok/s | to alone | right | tokens a pass | bytes a token | moved a token |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for prompt, ways in samples.items():
        alone = median(ways["none"], "rate")
        for way, runs in ways.items():
            rates = [r["rate"] for r in runs]
            proposed = median(runs, "proposed")
            right = f"{100 * median(runs, 'accepted') / proposed:.0f} % of {proposed:.0f}" if proposed else ""
            per_pass = median(runs, "tokens_per_pass")
            moved_bytes = median(runs, "moved_per_token")
            yield (
                f"| {prompt} | {way} | {median(runs, 'rate'):.1f} ({min(rates):.1f}-{max(rates):.1f}) | "
                f"{median(runs, 'rate') / alone:.2f}x | {right} | {per_pass:.2f} | {size_text(nbytes / per_pass)} | "
                f"{size_text(moved_bytes) if moved_bytes else ''} |"
            )


def window_bytes(text: str, pack: Path) -> int:
    if text.endswith("%"):
        return int(pack.stat().st_size * float(text[:-1]) / 100)
    return parse_size(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", default="qwen2.5-coder-1.5b", metavar="MODEL")
    parser.add_argument("--small", default="qwen2.5-coder-0.5b", metavar="MODEL")
    parser.add_argument("--window", metavar="SIZE|PERCENT", help="stream the large model through so many bytes")
    parser.add_argument("--draft-max", type=int, default=8, metavar="K")
    parser.add_argument("-n", type=int, default=128, metavar="N", help="tokens of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples here")
    args = parser.parse_args()
    bandwidth = ReadBandwidth(args.threads).measure
    read: list[float] = [bandwidth()]
    with tempfile.TemporaryDirectory() as folder:
        big, small = (fresh_pack(gguf_file(name), Path(folder)) for name in (args.big, args.small))
        more = {"window": window_bytes(args.window, big)} if args.window else {}
        with ork.load(big, threads=args.threads, n_ctx=2048, **more) as model:
            model.use_draft(Pack.open(small), most=args.draft_max, threads=args.threads)
            ways = {"none": None, args.small: model.draft, "ngram": "ngram"}
            for draft in ways.values():  # warm-up: hashes checked, pages there
                model.draft = draft
                one(model, *PROMPTS["prose"], 16)
            samples = compare(model, ways, args.n, args.rounds)
            model.draft = ways[args.small]
            costs = row_costs(model, args.rounds)
            nbytes = pass_bytes(model.pack)
    read.append(bandwidth())
    print()
    through = f", streamed through {size_text(more['window'])}" if more else ""
    print(
        f"{args.big} ({size_text(nbytes)} a pass){through}, {args.threads} threads, {args.rounds} rounds of {args.n} "
        f"tokens, up to {args.draft_max} proposals; {processor()}; read bandwidth {min(read):.1f}-{max(read):.1f} GB/s"
    )
    print("", *table(samples, nbytes), "", sep="\n")
    print("| rows in a pass | ms | to one row | a further row |")
    print("|---:|---:|---:|---:|")
    for rows, seconds in costs.items():
        ratio = seconds / costs[1]
        further = f"{(ratio - 1) / (rows - 1):.3f}" if rows > 1 else ""
        print(f"| {rows} | {1000 * seconds:.1f} | {ratio:.2f} | {further} |")
    if args.json:
        about = {"arguments": vars(args) | {"json": str(args.json)}, "processor": processor(), "read_gb_s": read}
        args.json.write_text(json.dumps({**about, "samples": samples, "row_seconds": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
