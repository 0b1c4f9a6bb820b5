"""What each tensor in each codec adds to the KL divergence of a model's predictions, measured on a text.

A few hundred tokens go through the model in f32, layer by layer. Beside the pass as it is, there are two for every
layer, in which its attention alone, or its feed-forward part alone, is coarsely quantised. Each ends in a KL
divergence, which is shared out by what each tensor of the part does to the layer's own output, to which they all add
(a pass for every tensor takes 2.5 times as long and ends in packs of the same KL within 2 %). A codec's error E at the
tensor's own output (`outputs`) is measured too, and KL grows with E: a tensor in a codec adds KL(coarse) E(codec) /
E(coarse). An embedding has two passes, as a table to look up and as a head. The experts of a
stack are one tensor, whose E is the mean over some of those that rows went to; routers are f32 and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ork import native
from ork.build import outputs
from ork.build.allocate import Measured, Measurements
from ork.build.convert import DEFAULT_MAX_RAM
from ork.build.layerwise import DAMAGED, EMBEDDING, F32, I32, SourceLayers
from ork.build.outputs import Kind
from ork.errors import SourceError, UsageError
from ork.measure.perplexity import cut
from ork.models.layers import State
from ork.ops import Array, Weight
from ork.quant import codecs
from ork.quant.allocation import Option
from ork.quant.recipe import ROUTER
from ork.sources.base import Source
from ork.text.tokenizer import Tokenizer

COARSE: Final = ("i4", 64)  # large enough to be seen, small enough that KL grows with it
EXPERTS: Final = 4  # of a stack, whose E is measured
SEQUENCE: Final = 128  # tokens
SEQUENCES: Final = 2
SCORED: Final = 128  # positions whose predictions are compared
INPUTS: Final = 128  # input rows for E
FIXED_BYTES: Final = 96 << 20  # what is there whatever the model
WORK: Final = 10_000_000_000  # weights x layers, above which one sequence must do

Progress = Callable[[int, int], None]  # (passes through a layer done, in all)


@dataclass
class Branch:
    """A pass in which some tensors are coarse; `shares` say how much of what it does is each one's doing."""

    shares: dict[str, float]
    x: Array


def calibration_tokens(tokenizer: Tokenizer, text: str) -> I32:
    """Sequences [S, T] for `measure`, spread over a text. Raises UsageError if it is too short for one."""
    try:
        tokens = cut(tokenizer, text, SEQUENCE).tokens
    except UsageError:
        raise UsageError(f"the text to calibrate with is too short: give one of {SEQUENCE} tokens or more") from None
    return tokens[[(2 * i + 1) * len(tokens) // (2 * SEQUENCES) for i in range(min(SEQUENCES, len(tokens)))]]


def measure(
    source: Source,
    tokens: I32,
    *,
    mode: str = "mix",
    max_ram: int = DEFAULT_MAX_RAM,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """All tensors of a model on sequences `tokens` [S, T], of which it takes as many as its size allows.

    `mode` is the rotation. Holds one layer in f32 (and what is coarse of it), the head in f16 and two hidden states a
    layer. Raises SourceError for a source that cannot be converted or whose numbers on these tokens are not finite,
    UsageError if `max_ram` bytes are too few.
    """
    layers = SourceLayers(source, threads)
    model, held = layers.model, layers.held
    tokens = tokens[: _affordable(layers)]
    count = tokens.size
    _check_ram(layers, count, max_ram)
    scored = np.unique(np.linspace(count // 8, count - 1, min(SCORED, count)).astype(np.int32))
    rows = layers.rows(tokens, scored)
    probe = Probe(layers, mode)
    done, total = 0, _passes(layers)

    def advance(passes: int) -> None:
        nonlocal done
        done += passes
        if progress:
            progress(done, total)

    state = model.begin(rows)
    held.look_up = probe.coarse_look_up
    branches = [Branch({EMBEDDING: 1.0}, model.begin(rows).x)]
    held.look_up = layers.read
    errors: dict[str, Errors] = {}
    for i in range(model.config.layers):
        layers.hold(i)
        with probe.listening():
            after = model.layer(i, state)
        for branch in branches:
            branch.x = model.layer(i, replace(state, x=branch.x)).x
        advance(1 + len(branches))
        for group in groups_of(layers.names(i)):
            branches.append(probe.branch(i, state, after, group))
            advance(1)
        errors |= {name: probe.output_errors(parts) for name, parts in stacks_of(layers.names(i)).items()}
        layers.drop(i)
        state = after
    held.hold(layers.head, layers.piece(layers.head, "f16"))
    with probe.listening():
        base = model.end(state)
    kls = []
    for branch in branches:
        kls.append(probe.kl(base, model.end(replace(state, x=branch.x))))
        advance(1)
    held.hold(layers.head, layers.piece(layers.head, "f16", probe.coarse))
    head = probe.kl(base, model.end(state))
    held.drop(layers.head)
    parts = [(layers.head, head, probe.output_errors([layers.head]))]
    parts += [(n, kl * share, errors[n]) for b, kl in zip(branches[1:], kls[1:]) for n, share in b.shares.items()]
    parts += [(EMBEDDING, kls[0], probe.look_up_errors(np.unique(tokens)))]
    advance(1)
    stacks = stacks_of(layers.shapes)
    tensors = tuple(
        replace(_measured(n, len(s), layers.shapes[s[0]], parts), reads=probe.reads.get(n, n))
        for n, s in stacks.items()
    )
    for t in tensors:
        if not all(np.isfinite(o.error) for o in t.options):
            raise SourceError(f"{source.path}: tensor {t.name}: its errors on this text are not finite; {DAMAGED}")
    return Measurements(tensors, count, mode)


@dataclass(frozen=True)
class Errors:
    """E of a tensor in the coarse codec, and in every kind that it may be stored in."""

    coarse: float
    kinds: dict[Kind, float]


class Probe:
    """Listens to a pass, makes tensors coarse, compares predictions."""

    def __init__(self, layers: SourceLayers, mode: str):
        self.layers, self.mode = layers, mode
        self.inputs: dict[str, F32] = {}  # a sample of rows by tensor
        self.reads: dict[str, str] = {}  # by tensor or stack, the first that reads the same rows

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keeps rows that tensors read meanwhile; those of the time before are forgotten."""
        self.inputs.clear()
        self.layers.ops.observer = self._observe
        try:
            yield
        finally:
            self.layers.ops.observer = None

    def _observe(self, weights: Sequence[Weight], x: Array) -> None:
        rows = x.numpy()
        sample = rows[np.unique(np.linspace(0, len(rows) - 1, min(INPUTS, len(rows))).astype(int))]
        self.inputs |= {w.tensor.name: sample for w in weights}
        stacks = list(stacks_of(w.tensor.name for w in weights))
        self.reads |= dict.fromkeys(stacks, stacks[0])

    def coarse(self, rows: F32) -> F32:
        K = rows.shape[1]
        return outputs.stored_rows(rows, (COARSE[0], codecs.effective_group(K, COARSE[1])), self.mode)

    def coarse_look_up(self, name: str, start: int, stop: int) -> F32:
        return self.coarse(self.layers.read(name, start, stop))

    def branch(self, i: int, state: State, after: State, names: Sequence[str]) -> Branch:
        """The pass in which layer i's tensors `names` are coarse, behind that layer."""
        layers, stacks = self.layers, stacks_of(names)
        coarse = {name: layers.piece(name, change=self.coarse) for name in names}

        def run(these: Sequence[str]) -> Array:
            with layers.held.changed({name: coarse[name] for name in these}):
                return layers.model.layer(i, state).x

        x = run(names)
        if len(stacks) == 1:
            return Branch(dict.fromkeys(stacks, 1.0), x)
        moved = [outputs.ratio(run(these).numpy() - after.x.numpy(), after.x.numpy()) for these in stacks.values()]
        whole = sum(moved)
        return Branch({n: m / whole if whole else 1 / len(stacks) for n, m in zip(stacks, moved)}, x)

    def output_errors(self, names: Sequence[str]) -> Errors:
        """Of a tensor, or the experts of a stack, as far as their inputs were listened to."""
        seen = [name for name in names if name in self.inputs]
        some = [seen[i] for i in np.unique(np.linspace(0, len(seen) - 1, min(EXPERTS, len(seen))).astype(int))]
        found = [self._output_errors(name) for name in some]
        kinds = outputs.kinds_for(self.layers.shapes[names[0]][1])
        mean = {kind: float(np.mean([e.kinds[kind] for e in found])) if found else 0.0 for kind in kinds}
        return Errors(float(np.mean([e.coarse for e in found])) if found else 0.0, mean)

    def _output_errors(self, name: str) -> Errors:
        layers, x = self.layers, self.inputs[name]
        N, K = layers.shapes[name]
        weight = np.concatenate([layers.read(name, a, b) for a, b in outputs.sample_rows(N)])
        coarse = outputs.output_error(layers.device, x, weight, self.coarse(weight))
        return Errors(coarse, outputs.output_errors(layers.device, x, weight, outputs.kinds_for(K), self.mode))

    def look_up_errors(self, tokens: I32) -> Errors:
        """Of the embedding as a table, for these rows."""
        some = tokens[np.unique(np.linspace(0, len(tokens) - 1, min(outputs.SAMPLE, len(tokens))).astype(int))]
        weight = np.concatenate([self.layers.read(EMBEDDING, t, t + 1) for t in some.tolist()])
        coarse = outputs.ratio(self.coarse(weight) - weight, weight)
        return Errors(coarse, outputs.row_errors(weight, outputs.kinds_for(weight.shape[1]), self.mode))

    @staticmethod
    def kl(base: Array, other: Array) -> float:
        """Mean KL(base || other) of rows of logits, in nats."""
        n = base.rows
        kl = np.empty(n)
        native.compare(base, other, np.zeros(n, np.int32), np.empty((n, 2)), np.empty((n, 2), np.int32), kl)
        return max(float(kl.mean()), 0.0)


def _measured(name: str, count: int, shape: tuple[int, int], parts: Sequence[tuple[str, float, Errors]]) -> Measured:
    """All that a tensor, or a stack of `count` of that shape, does: as an embedding and as a head, if it is both."""
    stacked = count * shape[0], shape[1]
    if name.endswith(ROUTER):
        return Measured(name, stacked, 0.0, (Option("f32", 0, outputs.stored_bytes(shape, ("f32", 0)), 0.0),))
    own = [(kl, errors) for n, kl, errors in parts if n == name]
    options = tuple(
        Option(
            *kind,
            count * outputs.stored_bytes(shape, kind),
            sum(kl * errors.kinds[kind] / errors.coarse for kl, errors in own if errors.coarse > 0),
        )
        for kind in outputs.kinds_for(shape[1])
    )
    return Measured(name, stacked, sum(kl for kl, _ in own), options)


def stacks_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The experts of each stack; other tensors are stacks of one."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        stacks.setdefault(name.partition("#")[0], []).append(name)
    return stacks


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """Names of a layer that share a pass, in order: `attn`, `ffn`, `shortconv`. Routers, which stay as they are, have
    none."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if not name.endswith(ROUTER):
            groups.setdefault(name.split(".")[2].partition("_")[0], []).append(name)
    return list(groups.values())


def _affordable(layers: SourceLayers) -> int:
    inner = sum(N * K for name, (N, K) in layers.shapes.items() if name.startswith("blk."))
    return 1 if inner * layers.model.config.layers > WORK else SEQUENCES


def _check_ram(layers: SourceLayers, tokens: int, max_ram: int) -> None:
    c, shapes = layers.model.config, layers.shapes
    branches = 1 + sum(len(groups_of(layers.names(i))) for i in range(c.layers))
    states = 4 * (branches + 16) * tokens * c.width
    layer = max(sum(4 * shapes[n][0] * shapes[n][1] for n in layers.names(i)) for i in range(c.layers))
    N, K = shapes[layers.head]
    need = FIXED_BYTES + states + max(2 * layer + 16 * 4 * tokens * c.ffn, 2 * N * K + 3 * 4 * N * min(tokens, SCORED))
    if max_ram < need:
        raise UsageError(
            f"--max-ram {max_ram >> 20} MiB is too little: measuring this model takes {(need >> 20) + 1} MiB; "
            "a recipe file needs no measuring"
        )


def _passes(layers: SourceLayers) -> int:
    """Passes through a layer, or the head, of the whole measurement."""
    branches, total = 1, 0
    for i in range(layers.model.config.layers):
        groups = len(groups_of(layers.names(i)))
        total += 1 + branches + groups
        branches += groups
    return total + branches + 1
