"""Error of whole products, weights and activations quantised, against float64: our 4-bit codecs beside ggml's.

    python bench/matmul_error.py [MODEL ...] [--layers 6] [--tokens 512] [--calibrate-tokens 16384] [--json FILE]

Weights are rows (at most 1,024, spread evenly) of all matrices of some layers of a model's fair float reference
(`fair_reference.py`); inputs are what these matrices read in that model, in f32, on Persuasion by Jane Austen. Every
codec gets the same rows and inputs. Ours are the converter's codes and scales multiplied by the native kernels with
int8 activations in the codec's groups; ggml's are its own codes, activations as it quantises them (`ggml_codecs.py`).
GPTQ sees the inputs that another text makes, the one that comes with ork.

The error of a product is ||Y - Y'|| / ||Y|| over all of its rows, once in root mean square over all elements, which the
largest rows decide, and once with every row divided by its own norm first. Tables give medians over the matrices; the
ratios are medians of each matrix's own ratio. Q4_K takes only matrices whose inputs are a multiple of 256.
Goals: `nf4` by 32, rotated, at most 1.0 of Q4_0's error (an older stack published 1.07), with GPTQ at most Q4_K's.
Exit code 1 if one is missed. Needs llama.cpp (`python bench/peers.py --setup`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ggml_codecs as ggml
from fair_reference import fair_reference
from inputs import austen, gguf_file
from ork import native, tiles
from ork.build.convert import blob_of, plan_tensor
from ork.build.importance import calibration_text
from ork.build.layerwise import SourceLayers
from ork.build.outputs import sample_rows
from ork.devices.base import SliceSpec
from ork.measure.perplexity import cut
from ork.models.layers import State
from ork.ops import Array, Weight
from ork.pack.file import aligned
from ork.quant import codecs, gptq, rotation
from ork.quant.recipe import Choice, usual
from ork.sources.gguf import GgufSource
from ork.text.tokenizer import Tokenizer
from ork.text.vocab import build_tokenizer
from peer_env import cache_folder, require

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

MODELS = ["smollm2-135m", "qwen2.5-coder-1.5b"]
SEQUENCE = 512
SAMPLE = 1024  # rows of a weight
OURS: dict[str, Choice] = {
    "nf4 g32": usual("nf4", 32),
    "nf4 g32, GPTQ": usual("nf4", 32, gptq=True),
    "nf4 g32, not mixed": usual("nf4", 32, rotation="block"),
    "nf4 g32, not rotated": usual("nf4", 32, rotation="none"),
    "i4 g32": usual("i4", 32),
    "i4 g32, GPTQ": usual("i4", 32, gptq=True),
    "nf4 g64": usual("nf4", 64),
    "nf4 a channel": usual("nf4"),
    "i8 a channel": usual("i8"),
    "i8 a channel, activations by 32": usual("i8", act_group=32),
}
GOALS = (("nf4 g32", "ggml Q4_0", 1.0), ("nf4 g32, GPTQ", "ggml Q4_K", 1.0))


@dataclass
class Reads:
    """What the matrices of a layer read: inputs [m, K] by tensor, and second moments by the tensors that share them."""

    inputs: dict[str, F32] = field(default_factory=dict)
    hessians: dict[tuple[str, ...], gptq.Hessian] = field(default_factory=dict)

    def test(self, weights: Sequence[Weight], x: Array) -> None:
        for w in weights:
            self.inputs[w.tensor.name] = x.numpy().copy()

    def calibrate(self, pool: Executor) -> Callable[[Sequence[Weight], Array], None]:
        def observe(weights: Sequence[Weight], x: Array) -> None:
            names, K = tuple(w.tensor.name for w in weights), x.cols
            hessian = self.hessians.setdefault(names, gptq.Hessian(K))
            hessian.add(rotation.rotate_rows(x.numpy(), K, usual("nf4").rotation), pool)

        return observe


class Product:
    """One matrix: rows [n, K] of it and inputs [m, K], and the float64 result."""

    def __init__(self, layers: SourceLayers, name: str, weight: F32, x: F32, factor: gptq.Factor | None):
        self.device, self.name, self.weight, self.x, self.factor = layers.device, name, weight, x, factor
        self.exact = x.astype(np.float64) @ weight.astype(np.float64).T

    def ours(self, choice: Choice) -> F64 | None:
        """As a pack of this choice would compute it; None: GPTQ, and the text too short for this K."""
        n, K = self.weight.shape
        rows = rotation.rotate_rows(self.weight, K, choice.rotation)
        plan = plan_tensor(self.name, (n, K), choice)
        if not choice.gptq:
            q = codecs.quantise(choice.codec, rows, plan.group, search=choice.search)
        elif self.factor is None:
            return None
        else:
            q = gptq.gptq(choice.codec, rows, self.factor, plan.group, search=choice.search)
        layout = tiles.slice_layout(choice.codec, K, tiles.pad_n(n), plan.group)
        blob = aligned(layout.nbytes)[: layout.nbytes]
        blob[:] = blob_of(layout, q)
        spec = SliceSpec(self.name, choice.codec, K, layout.K, layout.ks, 0, n, plan.group, plan.act_group)
        signs = native.Array.of(rotation.signs_of(K).astype(np.float32).reshape(1, K)) if plan.rotation else None
        mix = native.Array.of(rotation.mix_of(plan.mix).reshape(1, -1)) if plan.mix else None
        x, y = native.Array.of(self.x), native.Array(len(self.x), n)
        read = native.quantise(x, signs, plan.rotation, plan.act_group, mix)
        self.device.linear([self.device.host_slice(spec, blob)], x, read, [y], [None])
        return y.numpy().astype(np.float64)

    def theirs(self, kind: str) -> F64 | None:
        """As llama.cpp computes it, but for the rounding of f32 sums; None: rows are no whole blocks."""
        if not ggml.fits(kind, self.weight.shape[1]):
            return None
        x, w = ggml.activations(kind, self.x), ggml.weights(kind, self.weight)
        product: F64 = x.astype(np.float64) @ w.astype(np.float64).T
        return product

    def errors(self, y: F64 | None) -> tuple[float, float]:
        """(over all elements, with every row divided by its norm); NaN for no result."""
        if y is None:
            return np.nan, np.nan
        lost, power = np.square(y - self.exact).sum(axis=1), np.square(self.exact).sum(axis=1)
        return float(np.sqrt(lost.sum() / power.sum())), float(np.sqrt(np.mean(lost / power)))


def states_of(layers: SourceLayers, tokenizer: Tokenizer, text: str, tokens: int) -> list[State]:
    """A text's embedded rows, one sequence of 512 tokens each."""
    sequences = cut(tokenizer, text, SEQUENCE, max(1, tokens // SEQUENCE)).tokens
    last = np.array([SEQUENCE - 1], np.int32)
    return [layers.model.begin(layers.rows(s[None], last)) for s in sequences]


def products(path: Path, args: argparse.Namespace, pool: Executor) -> dict[str, dict[str, tuple[float, float]]]:
    """Errors by matrix and codec."""
    source = GgufSource(path)
    layers = SourceLayers(source, args.threads)
    tokenizer = Tokenizer.load(build_tokenizer(source.metadata))
    tests = states_of(layers, tokenizer, austen().read_text(), args.tokens)
    others = states_of(layers, tokenizer, calibration_text(), args.calibrate_tokens)
    depth = layers.model.config.layers
    chosen = set(np.linspace(0, depth - 1, min(args.layers, depth)).astype(int).tolist())
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for i in range(depth):
        print(f"layer {i + 1}/{depth}", file=sys.stderr, end="\r")
        layers.hold(i)
        reads = Reads()
        for states, observe in ((tests, reads.test), (others, reads.calibrate(pool))):
            layers.ops.observer = observe if i in chosen else None
            for at, state in enumerate(states):
                states[at] = layers.model.layer(i, state)
        layers.ops.observer = None
        layers.drop(i)
        while reads.hessians:
            names, hessian = reads.hessians.popitem()
            factor = gptq.factor(hessian, pool) if hessian.rows >= hessian.K else None
            for name in names:
                N = layers.shapes[name][0]
                weight = np.concatenate([layers.read(name, a, b) for a, b in sample_rows(N, SAMPLE)])
                found[name] = errors_of(Product(layers, name, weight, reads.inputs[name], factor))
    source.close()
    return found


def errors_of(product: Product) -> dict[str, tuple[float, float]]:
    theirs = {f"ggml {kind}": product.errors(product.theirs(kind)) for kind in ggml.KINDS}
    return theirs | {f"ork {name}": product.errors(product.ours(choice)) for name, choice in OURS.items()}


def report(found: dict[str, dict[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """By codec: median errors, how many matrices, and ratios to Q4_0 and Q4_K over those that both take."""
    names = list(next(iter(found.values())))
    errors = {name: np.array([row[name] for row in found.values()]) for name in names}
    out = {}
    for name, e in errors.items():
        row = {"matrices": float(np.isfinite(e[:, 0]).sum())}
        for at, how in enumerate(("all", "rows")):
            row[how] = _median(e[:, at])
            for peer in ("Q4_0", "Q4_K"):
                row[f"{how}/{peer}"] = _median(e[:, at] / errors[f"ggml {peer}"][:, at])
        out[name] = row
    return out


def _median(values: npt.NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = [f"{how}{peer}" for how in ("all", "rows") for peer in ("", "/Q4_0", "/Q4_K")]
    lines = [
        "| codec | matrices | error | of Q4_0's | of Q4_K's | by rows | of Q4_0's | of Q4_K's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        values = [("" if np.isnan(r[c]) else f"{r[c]:.5f}" if "/" not in c else f"{r[c]:.3f}") for c in columns]
        lines.append(f"| {name} | {r['matrices']:.0f} | {' | '.join(values)} |")
    return "\n".join(lines)


def verdicts(rows: dict[str, dict[str, float]]) -> list[tuple[bool, str]]:
    """Whether each goal is met, in words; one that no matrix could be measured for is not."""
    out = []
    for name, peer, limit in GOALS:
        for how, said in (("all", "over all elements"), ("rows", "by rows")):
            value = rows[f"ork {name}"][f"{how}/{peer.split()[1]}"]
            out.append((value <= limit, f"ork {name}: {value:.3f} of {peer}'s error {said}, asked for: {limit}"))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help="GGUF files or known names")
    parser.add_argument("--layers", type=int, default=6, help="spread evenly from the first to the last (default: 6)")
    parser.add_argument("--tokens", type=int, default=512, help="of input rows (default: 512)")
    parser.add_argument("--calibrate-tokens", type=int, default=16384, help="that GPTQ sees (default: 16384)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    require(["llama.cpp"])
    everything, failures = [], []
    with gptq.one_blas_thread(), ThreadPoolExecutor(args.threads) as pool:
        for model in map(gguf_file, args.models):
            found = products(fair_reference(model, cache_folder("peers/fair")), args, pool)
            rows = report(found)
            everything.append({"model": model.stem, "rows": rows, "errors": found})
            print(f"\n{model.stem}, fair reference: {len(found)} matrices, {args.tokens} input rows\n\n{table(rows)}")
            for met, line in verdicts(rows):
                print(f"\n{'PASS' if met else 'MISSED'} {line}")
                failures += [] if met else [line]
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
