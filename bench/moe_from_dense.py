"""A mixture of experts made out of a dense model, for tests and measurements where no small one is to be had.

    python bench/moe_from_dense.py MODEL.gguf OUT.gguf --experts 16 --top-k 4 [--text FILE] [--tokens 1024] [--type F16]

The neurons of every feed-forward layer are divided among the experts: those that are strong on the same tokens of a
text go together (balanced k-means on which neurons are among a token's strongest), as MoEfication (Zhang et al. 2021)
does. A layer's router is the least-squares fit, from the layer's input, of the norms of what the experts add.

llama becomes llama with experts (Mixtral's form): weights of the chosen experts add up to 1, so their down projections
are scaled by k. qwen2 becomes qwen2moe: weights are the softmax over all experts, so the scale is n; and its shared
expert, gated by sigmoid(0) = 1/2 and scaled by 2, holds the neurons that are strong most often. Routers are small, so
that each chosen expert counts about as much as it does in the dense model. What does not divide is padded with neurons
that are zero. With k = n routers are zero, every expert counts exactly once, and the model is the dense one.

Needs `gguf`; the text is Botchan (see inputs.py) unless told otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

import ork
from ork.api import LoadedModel
from ork.engine.kvcache import Sequence
from ork.ops import Array, Weight
from ork.sources.gguf import GgufSource
from requantise import Pieces, Tensor, write_tensors

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

STRONG = 0.1  # of a token's neurons
ROUNDS = 10  # of k-means
RIDGE = 0.3  # of the mean square of the router's inputs
LOGITS = 0.1  # standard deviation of router logits
UNITS = (256, 32)  # widths of experts: ggml's blocks, the larger ones if experts are wide enough
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2moe"}
WIDTHS = {"ffn_gate": "N", "ffn_up": "N", "ffn_down": "K"}  # where a tensor has a neuron each


@dataclass(frozen=True)
class Layer:
    """Which neurons each expert has, [E, width] with -1 for none, the shared ones, and the router [E, model width]."""

    experts: Ints
    shared: Ints
    router: F32


# --- which neurons go together ----------------------------------------------------------------------------------------


def widths(ffn: int, experts: int, shared: bool) -> tuple[int, int]:
    """Neurons of an expert and of the shared one (0: there is none). A shared one takes what does not divide."""
    if not shared:
        return -(-ffn // experts // UNITS[-1]) * UNITS[-1], 0
    for unit in UNITS:
        width = (ffn - 1) // experts // unit * unit
        if width:
            return width, -(-(ffn - experts * width) // UNITS[-1]) * UNITS[-1]
    return UNITS[-1], UNITS[-1]


def balanced(likeness: F32, room: int) -> Ints:
    """A cluster for each item, none with more than `room`: items ask the best open cluster, which takes the likest."""
    n, clusters = likeness.shape
    chosen = np.full(n, -1, np.int64)
    left = np.full(clusters, room)
    while (free := np.flatnonzero(chosen < 0)).size:
        open_ = np.where(left > 0, likeness[free], -np.inf)
        wish = open_.argmax(axis=1)
        for cluster in np.unique(wish):
            asking = free[wish == cluster]
            best = asking[np.argsort(-likeness[asking, cluster], kind="stable")[: left[cluster]]]
            chosen[best] = cluster
            left[cluster] -= best.size
    return chosen


def cluster(patterns: F32, clusters: int, room: int, seed: int = 0) -> Ints:
    """Balanced k-means of rows by the cosine of their patterns."""
    rows = patterns / np.maximum(np.linalg.norm(patterns, axis=1, keepdims=True), 1e-9)
    centres = rows[np.random.default_rng(seed).permutation(len(rows))[:clusters]]
    chosen = np.zeros(len(rows), np.int64)
    for _ in range(ROUNDS):
        chosen = balanced(rows @ centres.T, room)
        sums = np.stack([rows[chosen == c].sum(axis=0) for c in range(clusters)])
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    return chosen


def fit_router(x: F32, norms: F32) -> F32:
    """[E, width]: least squares from rows x [T, width] to what each expert has more or less than the mean [T, E]."""
    wanted = norms - norms.mean(axis=1, keepdims=True)
    square = (x.T @ x).astype(np.float64)
    square[np.diag_indices_from(square)] += RIDGE * np.trace(square) / len(square)
    router = np.linalg.solve(square, (x.T @ wanted).astype(np.float64)).T
    return (router * (LOGITS / max(float((x @ router.T).std()), 1e-12))).astype(np.float32)


def split(x: F32, hidden: F32, down: F32, experts: int, top_k: int, *, shared: bool) -> tuple[Layer, str]:
    """A layer from its input x [T, width], the neurons' values [T, ffn] and the norms of their outputs `down` [ffn].

    Also a line of how much of what the experts add (squares of norms) the router's choice has on rows it was not
    fitted to, beside the best choice.
    """
    strength = np.abs(hidden) * down
    ffn = strength.shape[1]
    room, room_shared = widths(ffn, experts, shared)
    least = np.partition(strength, -max(1, int(STRONG * ffn)), axis=1)[:, -max(1, int(STRONG * ffn))]
    patterns = (strength >= least[:, None]).astype(np.float32)
    often = np.argsort(-patterns.sum(axis=0), kind="stable")
    # one that the others need not have room for
    common = often[: max(min(room_shared, ffn), ffn - experts * room) if shared else 0]
    others = np.setdiff1d(np.arange(ffn), common)
    each = -(-others.size // experts)
    chosen = cluster(patterns[:, others].T.copy(), experts, each) if others.size else np.empty(0, np.int64)
    table = np.full((experts, room), -1)
    for e in range(experts):
        mine = others[chosen == e]
        table[e, : mine.size] = mine
    padded = np.full(room_shared, -1)
    padded[: common.size] = np.sort(common)
    if top_k == experts:
        return Layer(table, padded, np.zeros((experts, x.shape[1]), np.float32)), "all experts, no router"
    squares = np.stack([(strength[:, row[row >= 0]] ** 2).sum(axis=1) for row in table], axis=1)
    fitted = len(x) * 3 // 4
    trial = x[fitted:] @ fit_router(x[:fitted], np.sqrt(squares[:fitted])).T
    of_all = [
        np.take_along_axis(squares[fitted:], np.argsort(-by, axis=1)[:, :top_k], axis=1).sum() / squares[fitted:].sum()
        for by in (trial, squares[fitted:])
    ]
    about = f"the router's {top_k} of {experts} add {of_all[0]:.2f} of all, the best {of_all[1]:.2f}"
    return Layer(table, padded, fit_router(x, np.sqrt(squares))), about


# --- a pass over a text -----------------------------------------------------------------------------------------------


def listen(model: LoadedModel, tokens: list[int], heard: Callable[[int, F32, F32], None]) -> None:
    """One pass: `heard(layer, input [T, width], neurons [T, ffn])` for each feed-forward layer."""
    held: dict[int, F32] = {}

    def observe(weights: object, x: Array) -> None:
        assert isinstance(weights, tuple)
        first: Weight = weights[0]
        name = first.tensor.name.split(".")
        if name[0] == "blk" and name[2] == "ffn_gate":
            held[int(name[1])] = x.numpy().copy()
        elif name[0] == "blk" and name[2] == "ffn_down":
            heard(int(name[1]), held.pop(int(name[1])), x.numpy())

    model.ops.observer = observe
    try:
        model.engine.prefill(Sequence(), tokens, chunk=len(tokens))
    finally:
        model.ops.observer = None


def divide(source: GgufSource, path: Path, text: str, tokens: int, experts: int, top_k: int) -> list[Layer]:
    """The layers of the model of `path`, divided by a pass over the text's first tokens."""
    arch = str(source.metadata["general.architecture"])
    layers: list[Layer] = []
    with ork.load(path, device="cpu", n_ctx=tokens) as model:
        begin = model.tokenizer.encode(text[: 16 * tokens])[:tokens]

        def heard(i: int, x: F32, hidden: F32) -> None:
            down = source.rows(f"blk.{i}.ffn_down.weight", 0, source.tensors[f"blk.{i}.ffn_down.weight"].rows)
            norms = np.linalg.norm(down, axis=0)
            layer, about = split(x, hidden, norms, experts, top_k, shared=ARCHITECTURES[arch] == "qwen2moe")
            print(f"layer {i}: {about}", file=sys.stderr, flush=True)
            layers.append(layer)

        listen(model, begin, heard)
    return layers


# --- the file ---------------------------------------------------------------------------------------------------------


def tensors_of(source: GgufSource, layers: list[Layer], top_k: int, kind: str) -> Iterator[Tensor]:
    """Every tensor of the file, made when it is written. Vectors and routers are F32."""
    moe = ARCHITECTURES[str(source.metadata["general.architecture"])] == "qwen2moe"
    experts = len(layers[0].experts)
    scale = experts if moe else top_k

    def whole(name: str) -> F32:
        return source.rows(name, 0, source.tensors[name].rows)

    def copied(name: str) -> Pieces:
        t = source.tensors[name]
        step = max(1, (64 << 20) // (4 * t.columns))
        return lambda: (source.rows(name, at, min(at + step, t.rows)) for at in range(0, t.rows, step))

    def stacked(name: str, axis: str, groups: Ints, factor: float) -> Pieces:
        def pieces() -> Iterator[F32]:
            weight = whole(name)
            for group in groups:
                taken = weight[group] if axis == "N" else weight[:, group]
                taken[(group < 0, slice(None)) if axis == "N" else (slice(None), group < 0)] = 0
                yield np.ascontiguousarray(taken) * np.float32(factor)

        return pieces

    for name, t in source.tensors.items():
        parts = name.split(".")
        if parts[0] != "blk" or parts[2] not in WIDTHS:
            typed = kind if len(t.shape) > 1 and t.columns % 32 == 0 else "F32"
            yield name, t.shape, typed, copied(name)
            if name == "token_embd.weight" and moe and "output.weight" not in source.tensors:
                yield "output.weight", t.shape, typed, copied(name)  # llama.cpp's qwen2moe has no tied head
            continue
        if parts[3] != "weight":
            raise SystemExit(f"{name}: a bias of feed-forward layers has no place among experts")
        layer, axis, at = layers[int(parts[1])], WIDTHS[parts[2]], f"blk.{parts[1]}."
        down = parts[2] == "ffn_down"
        width, common = layer.experts.shape[1], len(layer.shared)
        shape = (experts, t.shape[0], width) if down else (experts, width, t.shape[1])
        yield f"{at}{parts[2]}_exps.weight", shape, kind, stacked(name, axis, layer.experts, scale if down else 1)
        if moe:
            shape = (t.shape[0], common) if down else (common, t.shape[1])
            yield f"{at}{parts[2]}_shexp.weight", shape, kind, stacked(name, axis, layer.shared[None], 1 + down)
        if parts[2] == "ffn_gate":
            yield f"{at}ffn_gate_inp.weight", layer.router.shape, "F32", lambda layer=layer: iter([layer.router])
            if moe:
                none = np.zeros(t.shape[1], np.float32)
                yield f"{at}ffn_gate_inp_shexp.weight", none.shape, "F32", lambda none=none: iter([none])


def write_moe(source: GgufSource, path: Path, out: Path, layers: list[Layer], top_k: int, kind: str) -> None:
    """The model as a GGUF: metadata of the dense one under the new architecture's name, and the experts' counts."""
    old = str(source.metadata["general.architecture"])
    new, (experts, width) = ARCHITECTURES[old], layers[0].experts.shape
    writer = gguf.GGUFWriter(out, arch=new)
    for field in gguf.GGUFReader(path).fields.values():
        key = f"{new}.{field.name[len(old) + 1 :]}" if field.name.startswith(f"{old}.") else field.name
        if key.startswith("GGUF.") or key in ("general.architecture", f"{new}.feed_forward_length"):
            continue
        if key == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
        elif field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1])
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    # of an expert for llama, whose experts have no key of their own
    writer.add_feed_forward_length(width if new == "llama" else layers[0].experts.size + len(layers[0].shared))
    writer.add_expert_count(experts)
    writer.add_expert_used_count(top_k)
    if new == "qwen2moe":
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(len(layers[0].shared))
    write_tensors(writer, list(tensors_of(source, layers, top_k, kind)))


def convert(
    path: Path, out: Path, text: str, *, experts: int, top_k: int, tokens: int = 1024, kind: str = "F16"
) -> None:
    """Writes `out`. Ends the program for models, or numbers of experts, that it cannot do."""
    source = GgufSource(path)
    try:
        arch = source.metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise SystemExit(f"{path}: architecture {arch}; known are {', '.join(ARCHITECTURES)}")
        if not 1 <= top_k <= experts:
            raise SystemExit(f"--top-k {top_k} of --experts {experts}: give 1 to {experts}")
        layers = divide(source, path, text, tokens, experts, top_k)
        partial = out.with_name(out.name + ".part")
        write_moe(source, path, partial, layers, top_k, kind)
        partial.rename(out)
    finally:
        source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--text", type=Path, help="what neurons are watched on")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--type", default="F16", choices=("F32", "F16", "Q8_0", "Q4_0"), help="of the matrices")
    args = parser.parse_args()
    if args.text is None:
        from inputs import english

        args.text = english()
    text = args.text.read_text(encoding="utf-8")
    convert(args.model, args.out, text, experts=args.experts, top_k=args.top_k, tokens=args.tokens, kind=args.type)


if __name__ == "__main__":
    main()
