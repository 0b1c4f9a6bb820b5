"""What quantisation changed: each tensor's weights against their source, and hidden rows of two models side by side.

Errors are relative: ||a - b|| / ||b|| in Frobenius norms, differences and sums in float64, b the reference. A pack's
weights are read as its embedding look-ups read them: codes times scales, rotated back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ork.devices.cpu import CpuDevice
from ork.engine.kvcache import Sequence as Place
from ork.engine.session import CHUNK, Engine
from ork.errors import UsageError
from ork.models import Rows
from ork.ops import Array, Ops, Weight
from ork.pack.reader import Pack
from ork.residency.source import PackSource
from ork.residency.stream import Stream
from ork.sources.base import Source, finite, matrices, read_weight

F32 = npt.NDArray[np.float32]
STEP_BYTES = 32 << 20  # of f32 rows compared at a time


class Weights(Protocol):
    """Weight matrices by name, rows [start, stop) as f32 [stop - start, K]."""

    name: str

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of every weight."""

    def rows(self, name: str, start: int, stop: int) -> F32: ...


class PackWeights:
    """A pack's weights, dequantised."""

    def __init__(self, pack: Pack, threads: int | None = None):
        self.pack = pack
        self.name = str(pack.path)
        device = CpuDevice(threads)
        self._ops = Ops(Stream(PackSource(pack), device), device)
        self._held: tuple[str, Weight] | None = None

    def shapes(self) -> dict[str, tuple[int, int]]:
        raw = set(self.pack.raw_names())
        described = [self.pack.tensor(name) for name in self.pack.names() if name not in raw]
        return {t.name: (t.N, t.K) for t in described}

    def rows(self, name: str, start: int, stop: int) -> F32:
        if self._held is None or self._held[0] != name:
            t = self.pack.tensor(name)
            self._held = name, self._ops.weight(name, t.N, t.K)
        rows: F32 = self._ops.embed(self._held[1], np.arange(start, stop, dtype=np.int32)).numpy()
        return rows


class SourceWeights:
    """The weights of a GGUF file or a Hugging Face folder, as its own types say. SourceError for one that is none."""

    def __init__(self, source: Source):
        self.source = source
        self.name = str(source.path)

    def shapes(self) -> dict[str, tuple[int, int]]:
        weights = [t for t in self.source.tensors.values() if ".weight" in t.name]
        return {name: shape for t in weights for name, shape in matrices(t).items()}

    def rows(self, name: str, start: int, stop: int) -> F32:
        return finite(self.source, name, read_weight(self.source, name, start, stop))


@dataclass(frozen=True)
class TensorError:
    """`error` relative over the whole tensor, `worst` of its worst row; squares are the sums behind `error`."""

    name: str
    codec: str
    group: int
    N: int
    K: int
    bits: float  # of storage a weight
    error: float
    worst: float
    worst_row: int
    squares: tuple[float, float]  # of differences, of the reference

    def record(self) -> dict[str, Any]:
        record = asdict(self)
        del record["squares"]
        return record


def tensor_errors(
    weights: PackWeights, reference: Weights, progress: Callable[[int, int], None] | None = None
) -> Iterator[TensorError]:
    """One a weight, in the pack's order. `progress(bytes, of all)` counts the reference's f32.

    Raises UsageError where the reference has no such tensor, or one of another shape.
    """
    shapes, theirs = weights.shapes(), reference.shapes()
    total, done = sum(4 * n * k for n, k in shapes.values()), 0
    for name, (N, K) in shapes.items():
        if theirs.get(name) != (N, K):
            found = f"of shape {' x '.join(map(str, theirs[name]))}" if name in theirs else "not there"
            raise UsageError(f"{reference.name}: tensor {name} is {found}, {N} x {K} is expected; is this its source?")
        differences, squares = np.empty(N), np.empty(N)
        step = max(1, STEP_BYTES // (4 * K))
        for start in range(0, N, step):
            at = slice(start, min(start + step, N))
            want = reference.rows(name, at.start, at.stop).astype(np.float64)
            squares[at] = np.einsum("nk,nk->n", want, want)
            want -= weights.rows(name, at.start, at.stop)
            differences[at] = np.einsum("nk,nk->n", want, want)
            done += 4 * K * (at.stop - at.start)
            if progress:
                progress(done, total)
        yield _tensor_error(weights.pack, name, differences, squares)


def _tensor_error(
    pack: Pack, name: str, differences: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]
) -> TensorError:
    t = pack.tensor(name)
    nothing = np.where(differences > 0, np.inf, 0.0)  # relative to a row of zeros
    by_row = np.sqrt(np.divide(differences, squares, out=nothing, where=squares > 0))
    worst = int(by_row.argmax())
    sums = float(differences.sum()), float(squares.sum())
    bits = 8 * sum(s.nbytes for s in t.slices) / (t.N * t.K)
    return TensorError(name, t.codec, t.group, t.N, t.K, bits, relative(*sums), float(by_row[worst]), worst, sums)


def relative(difference: float, reference: float) -> float:
    """From sums of squares; of a reference that is all zero: 0 where nothing differs, else infinite."""
    if reference == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / reference)


def by_layer(errors: Sequence[TensorError]) -> dict[str, float]:
    """Relative error over all weights of a layer ('blk.0', ...); what is in no layer stands alone."""
    sums: dict[str, tuple[float, float]] = {}
    for e in errors:
        parts = e.name.split(".")
        key = ".".join(parts[:2]) if parts[0] == "blk" else e.name
        a, b = sums.get(key, (0.0, 0.0))
        sums[key] = a + e.squares[0], b + e.squares[1]
    return {key: relative(*s) for key, s in sums.items()}


# --- two models on the same tokens -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Rows [M, n] of two models at the same place: relative error, the first row that differs (-1: none to the last
    bit), the largest absolute difference."""

    place: str
    error: float
    row: int
    largest: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


def difference(place: str, ours: F32, theirs: F32) -> Difference:
    """Of f32 rows [M, n]; `theirs` is the reference. NaN equals itself here: bits are compared."""
    unequal = np.flatnonzero((ours.view(np.uint32) != theirs.view(np.uint32)).any(axis=1))
    if not unequal.size:
        return Difference(place, 0.0, -1, 0.0)
    b = theirs.astype(np.float64)
    d = ours - b
    return Difference(
        place, relative(float((d * d).sum()), float((b * b).sum())), int(unequal[0]), float(np.abs(d).max())
    )


@dataclass(frozen=True)
class Walk:
    """`layers`: the rows after the embedding, each layer, and the logits. `inputs`: what each group of linear layers
    reads, in the order of the pass."""

    layers: list[Difference]
    inputs: list[Difference]

    @property
    def first(self) -> tuple[Difference | None, str]:
        """The first place that differs, and the last one before it that is equal to the last bit ('' if none)."""
        before = ""
        for d in self.inputs:
            if d.row >= 0:
                return d, before
            before = d.place
        logits = self.layers[-1]
        return (logits if logits.row >= 0 else None), before


def walk(ours: Engine, theirs: Engine, tokens: Sequence[int]) -> Walk:
    """Both models over one sequence, layer by layer in step; `theirs` is the reference.

    Raises UsageError if they differ in layers, width or vocabulary, or the sequence is longer than CHUNK or a context.
    """
    a, b = ours.model.config, theirs.model.config
    for what in ("layers", "width", "vocab"):
        if getattr(a, what) != getattr(b, what):
            raise UsageError(f"the models cannot be compared: {what} {getattr(a, what)} and {getattr(b, what)}")
    if not 0 < len(tokens) <= CHUNK or max(tokens) >= a.vocab:
        raise UsageError(f"give 1 to {CHUNK} tokens of the vocabulary to walk through")
    heard: list[tuple[str, F32]] = []
    layers: list[Difference] = []
    inputs: list[Difference] = []

    def listen(weights: Sequence[Weight], x: Array) -> None:
        heard.append((_names(weights), x.numpy().copy()))

    def compare(weights: Sequence[Weight], x: Array) -> None:
        name, before = heard.pop(0)
        if name != _names(weights):
            raise UsageError(f"the models cannot be compared: one reads {name} where the other reads {_names(weights)}")
        inputs.append(difference(name, before, x.numpy()))

    with _observed(ours, listen, tokens) as one, _observed(theirs, compare, tokens) as other:
        x, y = ours.model.begin(one), theirs.model.begin(other)
        layers.append(difference("embedding", x.x.numpy(), y.x.numpy()))
        for i in range(a.layers):
            x, y = ours.model.layer(i, x), theirs.model.layer(i, y)
            layers.append(difference(f"blk.{i}", x.x.numpy(), y.x.numpy()))
        layers.append(difference("logits", ours.model.end(x).numpy(), theirs.model.end(y).numpy()))
    return Walk(layers, inputs)


@contextlib.contextmanager
def _observed(
    engine: Engine, observer: Callable[[Sequence[Weight], Array], None], tokens: Sequence[int]
) -> Iterator[Rows]:
    """The rows of a sequence of its own, all wanted from the middle on, with somebody who listens to the pass."""
    place, before = Place(), engine.ops.observer
    engine.ops.observer = observer
    try:
        rows = engine.pool.rows([(place, tokens)], every=True)
        yield replace(rows, wanted=rows.wanted[len(tokens) // 2 :])
    finally:
        engine.ops.observer = before
        engine.pool.truncate(place, 0)


def _names(weights: Sequence[Weight]) -> str:
    return ", ".join(w.tensor.name.removesuffix(".weight") for w in weights)
