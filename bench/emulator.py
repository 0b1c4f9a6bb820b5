"""How fast the emulated NPU runs a model beside the CPU device: the same pack, one process, rounds in turn.

    python bench/emulator.py [smollm2-135m] [--threads 2] [--rounds 5]

Goals: prefill of 512 tokens at >= 0.5 of the CPU device's rate, decode at >= 0.25. Exit code 1 if missed. The rates
are this machine's; they say nothing about a board.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import ork
from ork.engine.kvcache import Sequence
from ork.measure.bench import tokens
from ork.sources import hub

GOALS = {"pp512": 0.5, "tg64": 0.25}
PREFILL, DECODE = 512, 64


def rates(model: ork.LoadedModel) -> dict[str, float]:
    """Tokens a second of one prefill and one decode from an empty cache."""
    engine, text = model.engine, tokens(PREFILL, model.model.config.vocab)
    seq = Sequence()
    start = time.perf_counter()
    engine.prefill(seq, text)
    prefill = PREFILL / (time.perf_counter() - start)
    engine.pool.truncate(seq, 0)
    start = time.perf_counter()
    for token in text[:DECODE]:
        engine.forward([(seq, [token])])
    decode = DECODE / (time.perf_counter() - start)
    engine.pool.truncate(seq, 0)
    return {"pp512": prefill, "tg64": decode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path = hub.resolve(args.model)
    models = {name: ork.load(path, device=name, threads=args.threads) for name in ("cpu", "emu")}
    samples: dict[str, dict[str, list[float]]] = {name: {test: [] for test in GOALS} for name in models}
    for i in range(args.rounds + 1):  # the first warms up: slices placed, programs prepared
        for name, model in models.items():
            for test, rate in rates(model).items():
                if i:
                    samples[name][test].append(rate)
    good = True
    print("| test | cpu tok/s | emulated tok/s | ratio | goal |")
    print("|---|---:|---:|---:|---:|")
    for test, goal in GOALS.items():
        cpu, emu = (statistics.median(samples[name][test]) for name in ("cpu", "emu"))
        good &= emu >= goal * cpu
        print(f"| {test} | {cpu:.1f} | {emu:.1f} | {emu / cpu:.2f} | {goal} |")
    for model in models.values():
        model.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
