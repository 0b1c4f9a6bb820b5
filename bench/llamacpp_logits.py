"""Does ork compute what llama.cpp computes? One GGUF, the same dequantised f32 weights, f32 KV cache, real English.

    python bench/llamacpp_logits.py [MODEL ...] [--tokens 256] [--threads 2]

llama.cpp reads an F32 GGUF written from the rows that ork's reader gives; ork reads the original with the `f32` codec.
Passes if the most likely next token is the same at every position, except where llama.cpp itself prefers it by less
than 1e-3, and if the logits correlate by more than 0.9999 at every position. Exit code 1 if not.
(Gemma's differ more than Llama's: ggml looks its GELU up in a table of f16 values.)
Needs llama.cpp (`python bench/peers.py --setup`); its logits are kept in the cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ork
from inputs import add_models, english, fresh_pack, gguf_file
from peer_env import PEERS, cache_folder, require, run_worker
from requantise import requantised

LEAST_MARGIN = 1e-3
LEAST_CORRELATION = 0.9999

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Verdict:
    """`other_top` positions prefer another token; `widest_margin` is the largest lead llama.cpp's choice has there."""

    positions: int
    other_top: int
    widest_margin: float
    least_correlation: float
    largest_difference: float

    @property
    def passed(self) -> bool:
        return self.widest_margin < LEAST_MARGIN and self.least_correlation > LEAST_CORRELATION


def judge(want: F32, got: F32) -> Verdict:
    """Compare logits [T, vocab], position by position in float64."""
    correlations, margins, difference = [], [], 0.0
    for row, other in zip(want, got, strict=True):
        a, b = row.astype(np.float64), other.astype(np.float64)
        correlations.append(float(np.corrcoef(a, b)[0, 1]))
        difference = max(difference, float(np.abs(a - b).max()))
        if a.argmax() != b.argmax():
            margins.append(float(a.max() - a[b.argmax()]))
    return Verdict(len(want), len(margins), max(margins, default=0.0), min(correlations), difference)


def llamacpp_logits(path: Path, count: int, threads: int) -> tuple[list[int], F32]:
    """The first `count` tokens of the text by llama.cpp's tokenizer and its logits [count, vocab] for them."""
    (llamacpp,) = require(["llama.cpp"])
    folder = cache_folder("peers/logits")
    float_model = requantised(path, "F32", folder)
    tokens = folder / f"{float_model.stem}-{count}-tokens.npy"
    logits = folder / f"{float_model.stem}-{count}-logits.npy"
    if not logits.exists():
        run_worker(llamacpp, "tokens", float_model, english(), tokens, "--chunks", 1, "--length", count)
        run_worker(llamacpp, "logits", float_model, tokens, logits, "--threads", threads)
    return np.load(tokens)[0].tolist(), np.load(logits, mmap_mode="r")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--tokens", type=int, default=256, help="length of the text (default 256, at most 512)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    verdicts = []
    print(f"ork {ork.__version__} beside {PEERS['llama.cpp'].requirement}, f32 weights and f32 KV cache\n")
    print("| model | positions | another top token | its margin there | correlation, least | logits differ by | |")
    print("|---|---|---|---|---|---|---|")
    for path in map(gguf_file, args.models):
        tokens, want = llamacpp_logits(path, args.tokens, args.threads)
        with tempfile.TemporaryDirectory() as folder:
            pack = fresh_pack(path, Path(folder), "--codec", "f32")
            with ork.load(pack, kv="f32", threads=args.threads) as model:
                verdict = judge(want, model.logits(tokens))
        verdicts.append(verdict)
        print(
            f"| {path.stem} | {verdict.positions} | {verdict.other_top} | {verdict.widest_margin:.1e} "
            f"| {verdict.least_correlation:.7f} | {verdict.largest_difference:.1e} "
            f"| {'passed' if verdict.passed else 'FAILED'} |",
            flush=True,
        )
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
