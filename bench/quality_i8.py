"""What quantisation costs: the default i8 pack against the f32 pack of the same model, over 2,000 tokens of English.

    python bench/quality_i8.py [MODEL ...] [--threads 2]

Printed beside it: i8 without rotation, and ggml's Q8_0 as llama.cpp computes it (its activations quantised too)
against llama.cpp on the F32 weights, both from the same dequantised rows, f32 KV cache, same text.
Passes if the i8 pack keeps the top token at 93 % of the positions, diverges by at most 0.008 nats on average and
changes the perplexity by at most 1 %. Exit code 1 if not. Needs llama.cpp (`python bench/peers.py --setup`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np

import ork
from agreement import Agreement
from inputs import add_models, english, fresh_pack, gguf_file
from peer_env import cache_folder, require, run_worker
from requantise import requantised

CHUNKS, LENGTH = 4, 512
LEAST_TOP1, MOST_KL, MOST_PERPLEXITY = 0.93, 0.008, 0.01
CANDIDATES = {"ork i8": (), "ork i8, not rotated": ("--no-rotate",)}  # options of `ork convert`


def measure(path: Path, threads: int) -> dict[str, dict[str, float]]:
    """The agreement of every candidate with the float model, by name."""
    (llamacpp,) = require(["llama.cpp"])
    kept = cache_folder("peers/logits")
    float_model, q8_model = requantised(path, "F32", kept), requantised(path, "Q8_0", kept)
    chunks = kept / f"{float_model.stem}-{CHUNKS}x{LENGTH}-tokens.npy"
    run_worker(llamacpp, "tokens", float_model, english(), chunks, "--chunks", CHUNKS, "--length", LENGTH)
    results = {name: Agreement() for name in CANDIDATES}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def load(*options: str, kv: str | None = None) -> ork.LoadedModel:
            pack = fresh_pack(path, Path(folder), *options)
            return stack.enter_context(ork.load(pack, kv=kv, threads=threads, n_ctx=LENGTH))

        reference = load("--codec", "f32", kv="f32")
        models = {name: load(*options) for name, options in CANDIDATES.items()}
        for tokens in np.load(chunks):
            want = reference.logits(tokens.tolist())[:-1]
            for name, model in models.items():
                results[name].add(want, model.logits(tokens.tolist())[:-1], tokens[1:])
    rows = {name: agreement.summary() for name, agreement in results.items()}
    rows["ggml Q8_0"] = run_worker(llamacpp, "compare", float_model, q8_model, chunks, "--threads", threads)
    return rows


def passed(row: dict[str, float]) -> bool:
    return row["top1"] >= LEAST_TOP1 and row["kl"] <= MOST_KL and abs(row["perplexity_ratio"] - 1) <= MOST_PERPLEXITY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    good = True
    print("| model | weights | predictions | same top token | mean KL, nats | perplexity | of the float model's | |")
    print("|---|---|---|---|---|---|---|---|")
    for path in map(gguf_file, args.models):
        for name, row in measure(path, args.threads).items():
            verdict = ""
            if name == "ork i8":
                verdict = "passed" if passed(row) else "FAILED"
                good &= passed(row)
            print(
                f"| {path.stem} | {name} | {row['tokens']:.0f} | {row['top1']:.1%} | {row['kl']:.5f} "
                f"| {row['perplexity']:.3f} | {row['perplexity_ratio'] - 1:+.2%} | {verdict} |",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
