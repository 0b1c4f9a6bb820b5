"""The operations a model is written in, on opaque arrays.

A model never sees numpy: it passes `Array`s from one method to the next. Linear layers go to the device; norms,
rotary embedding, attention and gates are computed on the host by the native kernels, equal to the last bit on every
instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Context, Decimal

import numpy as np
import numpy.typing as npt

from ork import native
from ork.devices.base import Device, Handle
from ork.errors import SourceError
from ork.residency.stream import ExpertLayer, Streams, TensorSpec

Array = native.Array
Batch = native.Batch
Routes = native.Routes

GATES = {"silu": 0, "gelu_tanh": 1}
FLOATS = ("f16", "f32")  # codecs whose products take f32 rows


class Weight:
    """A linear layer's weight: its tensor, its rotation (sign vector, mixing matrix) and its bias, if it has them."""

    __slots__ = ("K", "N", "bias", "block", "codec", "mix", "rows", "signs", "tensor")

    def __init__(self, tensor: TensorSpec, signs: Array | None, mix: Array | None, bias: Array | None):
        self.tensor = tensor
        self.N = tensor.N
        self.K = tensor.K
        self.codec = tensor.codec
        self.block = tensor.rotation
        self.signs = signs
        self.mix = mix
        self.bias = bias
        # how the rows that meet it are quantised (rotation block, mix, group); None: they are used as they are
        self.rows = None if self.codec in FLOATS else (tensor.rotation, tensor.mix, tensor.act_group)


_Alike = tuple[Weight, int, list[int], list[TensorSpec]]  # the first, the rows' largest code, places, tensors


class ExpertWeights:
    """The routed experts of a layer: their tensors, and of each projection what they all have in common."""

    __slots__ = ("down", "gate", "layer", "up")

    def __init__(self, layer: ExpertLayer, gate: Weight, up: Weight, down: Weight):
        self.layer = layer
        self.gate = gate
        self.up = up
        self.down = down


class Ops:
    """What models call. One instance per loaded model; `cache` is the KV cache its attention reads and writes, `conv`
    that of short convolutions."""

    def __init__(self, stream: Streams, device: Device):
        self.stream = stream
        self.source = stream.source
        self.device = device
        self.cache: native.KvCache | None = None
        self.conv: native.ConvCache | None = None
        self.used: set[str] = set()  # names that the model asked for
        self.weights: list[TensorSpec] = []  # in the order in which they were asked for, without routed experts
        self.expert_layers: list[ExpertLayer] = []
        # called with the weights that are multiplied and the f32 rows they read: how calibration listens to a pass
        self.observer: Callable[[Sequence[Weight], Array], None] | None = None
        self.router: Callable[[int, Routes], None] | None = None  # called with a layer's number and where its rows go
        self._vectors: dict[str, Array] = {}
        self._calls: dict[tuple[Weight, ...], list[_Alike]] = {}

    # --- weights: looked up once, when the model is built ----------------------------------------------------

    def vector(self, name: str, n: int) -> Array:
        """A raw tensor of `n` f32 values: a norm's weight, a bias. Raises SourceError if it is not that."""
        self.used.add(name)
        raw = self.source.raw(name)
        if raw.size != n:
            raise SourceError(f"tensor {name}: {raw.size} values where the metadata asks for {n}")
        return Array.of(np.ascontiguousarray(raw, np.float32).reshape(1, n))

    def weight(self, name: str, N: int, K: int, bias: str | None = None) -> Weight:
        """The weight `name` of shape [N, K], with the bias vector `bias` if the model has one of that name."""
        tensor = self._spec(name, N, K)
        self.weights.append(tensor)
        return self._weight(tensor, self.vector(bias, N) if bias and bias in self.source else None)

    def experts_of(self, layer: int, count: int, width: int, ffn: int) -> ExpertWeights:
        """The routed experts of a layer, tensors `blk.L.ffn_{gate,up,down}_exps.weight#E`. Raises SourceError naming
        the one that is missing, of another shape, or stored in another way than its neighbours."""
        projections = []
        for part, n, k in (("gate", ffn, width), ("up", ffn, width), ("down", width, ffn)):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            specs = tuple([self._spec(f"{name}#{e}", n, k) for e in range(count)])
            kinds = {(t.codec, t.rotation, t.mix, t.act_group, _cuts(t)): t.name for t in specs}
            if len(kinds) > 1:
                raise SourceError(
                    f"tensor {sorted(kinds.values())[0]}: the experts of a layer are stored in several ways"
                )
            projections.append(specs)
        experts = ExpertLayer(layer, *projections)
        self.expert_layers.append(experts)
        return ExpertWeights(experts, *[self._weight(specs[0], None) for specs in projections])

    def taps(self, name: str, width: int, count: int) -> Array:
        """The weights of a short convolution, stored [width, count], as [count, width]."""
        values = self.vector(name, width * count).numpy().reshape(width, count)
        return Array.of(np.ascontiguousarray(values.T))

    def _spec(self, name: str, N: int, K: int) -> TensorSpec:
        self.used.add(name)
        tensor = self.source.spec(name)
        if (tensor.N, tensor.K) != (N, K):
            raise SourceError(f"tensor {name}: shape {tensor.N} x {tensor.K} where the metadata asks for {N} x {K}")
        return tensor

    def _weight(self, tensor: TensorSpec, bias: Array | None) -> Weight:
        signs = self._shared(f"rotation.signs.{tensor.K}", tensor.K) if tensor.rotation else None
        mix = self._shared(f"rotation.mix.{tensor.mix}", tensor.mix**2) if tensor.mix else None
        return Weight(tensor, signs, mix, bias)

    def _shared(self, name: str, n: int) -> Array:
        if name not in self._vectors:
            self._vectors[name] = self.vector(name, n)
        return self._vectors[name]

    # --- rows ------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: npt.NDArray[np.int32]) -> Array:
        """Rows [M, K] of the embedding: row n un-tiled, scaled, rotated back."""
        with self.stream.rows(table.tensor, tokens) as slices:
            return native.gather(slices, tokens, table.K, table.N, table.signs, table.block, table.mix)

    def linear(self, x: Array, *weights: Weight) -> list[Array]:
        """x @ W for weights that read the same rows; the rows are quantised (and rotated) once for all that agree."""
        if self.observer is not None:
            self.observer(weights, x)
        results = [Array(x.rows, w.N) for w in weights]
        if self.observer is not None:  # weights may not be held where inputs are all that is asked for
            for out in results:
                out.numpy()[:] = 0
        for first, limit, places, tensors in self._alike(weights):
            how = first.rows
            rows = native.quantise(x, first.signs, first.block, how[2], first.mix, limit) if how else None
            for indices, handles in self.stream.batches(tensors):
                outs = [results[places[i]] for i in indices]
                biases = [weights[places[i]].bias for i in indices]
                self.device.linear(handles, x, rows, outs, biases)
        return results

    def _alike(self, weights: tuple[Weight, ...]) -> list[_Alike]:
        """The weights of a call, those together that read the same quantised rows; worked out once."""
        held = self._calls.get(weights)
        if held is None:
            kinds = [(w.rows, self.device.activation_limit(w.codec) if w.rows else 0) for w in weights]
            held = self._calls[weights] = []
            for kind in dict.fromkeys(kinds):
                places = [i for i, k in enumerate(kinds) if k == kind]
                held.append((weights[places[0]], kind[1], places, [weights[i].tensor for i in places]))
        return held

    # --- mixture of experts -----------------------------------------------------------------------------------

    def route(
        self,
        layer: int,
        logits: Array,
        top_k: int,
        *,
        kind: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias: Array | None = None,
        groups: tuple[int, int] = (1, 1),
    ) -> Routes:
        """Where each row of router logits [M, experts] goes: `top_k` experts and their weights.

        Scores are softmax or sigmoid of the logits; `bias` is added for the choice alone; of `groups` (n, used), the
        `used` with the largest sum of two best scores are chosen from; equal scores go to the lower number.
        `normalise`: weights add up to `scale`. Raises SourceError for logits that are not finite.
        """
        routes = native.route(logits, top_k, kind == "sigmoid", normalise, scale, bias, *groups)
        if isinstance(routes, int):
            raise SourceError(
                f"blk.{layer}.ffn_gate_inp.weight: the router's logits of row {routes} are not finite: the model is "
                "damaged, or its activations overflow"
            )
        if self.router is not None:
            self.router(layer, routes)
        return routes

    def experts(self, x: Array, routes: Routes, experts: ExpertWeights, act: str) -> Array:
        """The weighted sum over each row's experts of down(act(gate(x)) * up(x)). [M, width]

        Rows are quantised once and gathered by expert; the experts that are there together are computed in one
        parallel section a projection. A row's result depends on that row alone.
        """
        return _ExpertPass(self, x, routes, experts, act).run()

    def gate_rows(self, x: Array, weight: Array, y: Array) -> Array:
        """y times the sigmoid of x . weight, row by row, in place."""
        native.gate_rows(x, weight, y)
        return y

    def short_conv(self, layer: int, batch: Batch, x: Array, taps: Array) -> Array:
        """Rows [b | c | x] -> c * conv(b * x): causal, of each channel by itself; b * x goes to the layer's cache."""
        if self.conv is None:
            raise RuntimeError("the engine sets Ops.conv before a forward pass")
        return native.short_conv(self.conv, layer, batch, x, taps)

    # --- rows, again ------------------------------------------------------------------------------------------

    def norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm of each row."""
        return native.rms_norm(x, weight, eps)

    def head_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm of each head's part of each row, in place."""
        native.head_norm(x, weight, eps)
        return x

    def add(self, x: Array, y: Array) -> Array:
        return native.add(x, y)

    def gate(self, kind: str, g: Array, u: Array) -> Array:
        """act(g) * u with act 'silu' or 'gelu_tanh'."""
        return native.gate(GATES[kind], g, u)

    def scale(self, x: Array, factor: float) -> Array:
        """x times a constant, in place."""
        native.scale(x, factor)
        return x

    def softcap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap), in place."""
        native.softcap(x, cap)
        return x

    def take(self, x: Array, rows: npt.NDArray[np.int32]) -> Array:
        """The given rows of x; x itself when that is all of them."""
        return x if len(rows) == x.rows else native.take(x, rows)

    # --- positions and attention -----------------------------------------------------------------------------

    def rope_table(self, batch: Batch, inv_freq: list[float], magnitude: float = 1.0) -> Array:
        """cos and sin of position * inv_freq for the batch's rows."""
        return native.rope_table(batch, inv_freq, magnitude)

    def rope(self, x: Array, head_dim: int, table: Array, *, halves: bool) -> Array:
        """Rotary embedding in place: pairs (i, i + dim/2) with `halves`, else (2i, 2i + 1)."""
        native.rope(x, head_dim, halves, table)
        return x

    def attention(
        self,
        layer: int,
        batch: Batch,
        q: Array,
        k: Array,
        v: Array,
        heads: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Array:
        """Appends k and v to the layer's cache and attends causally; window 0 sees everything before."""
        if self.cache is None:
            raise RuntimeError("the engine sets Ops.cache before a forward pass")
        return native.attention(self.cache, layer, batch, q, k, v, heads, scale, window, softcap)


def _cuts(tensor: TensorSpec) -> tuple[int, ...]:
    """The columns and group of its slices."""
    return tuple([n for s in tensor.slices for n in (s.n0, s.n1, s.group)])


class _ExpertPass:
    """One call of `Ops.experts`: what lies between the gathered rows and their weighted sum."""

    def __init__(self, ops: Ops, x: Array, routes: Routes, experts: ExpertWeights, act: str):
        self.ops, self.routes, self.experts, self.act = ops, routes, experts, GATES[act]
        self.offsets = routes.offsets()
        self.gathered = ops.observer is not None  # as f32 rows, whatever the products take
        self.x, self.read = self._gather(x)
        count = routes.rows * routes.top_k
        self.g, self.u = Array(count, experts.gate.N), Array(count, experts.up.N)
        self.y = Array(count, experts.down.N)
        how = experts.down.rows
        self.limit = ops.device.activation_limit(experts.down.codec) if how else 0
        self.rows = native.empty_rows(count, experts.down.K, how[2]) if how else None

    def run(self) -> Array:
        ops, needed = self.ops, self.routes.active()
        if ops.observer is not None:
            for e in needed:
                self._observe(self.x, e, self.experts.layer.gate[e], self.experts.layer.up[e])
        gated: set[int] = set()
        made: set[int] = set()
        for numbers, handles in ops.stream.experts(self.experts.layer, needed):
            ranges = self._ranges(numbers)
            gate, up, down = zip(*handles)
            self._up(ranges, gate, up)
            fresh = [e for e, held in zip(numbers, down) if held and e not in gated]
            if fresh:
                self._gate(sorted(fresh))
                gated.update(fresh)
            self._linear(self.g, self.rows, ranges, down, [self.y] * len(down))
            if ops.observer is not None:
                made.update(e for e, g, u in zip(numbers, gate, up) if g and u)
        if made - gated:  # held without their down projections, for what those would read
            self._gate(sorted(made - gated))
        return native.weighted_sum(self.y, self.routes)

    def _gather(self, x: Array) -> tuple[Array, list[native.QuantisedRows | None]]:
        """The gathered rows as f32 (where anything reads them so) and as the gate and up projections read them."""
        ops, routes = self.ops, self.routes
        pair = (self.experts.gate, self.experts.up)
        kinds = [(w.rows, ops.device.activation_limit(w.codec) if w.rows else 0) for w in pair]
        made: dict[object, native.QuantisedRows | None] = {}
        for w, kind in zip(pair, kinds):
            how, limit = kind
            if how is not None and kind not in made:
                rows = native.quantise(x, w.signs, w.block, how[2], w.mix, limit)
                made[kind] = native.gather_rows(rows, routes)
        if self.gathered or any(how is None for how, _ in kinds):
            x = native.gather_floats(x, routes)
        return x, [made.get(kind) for kind in kinds]

    def _ranges(self, numbers: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array([(self.offsets[e], self.offsets[e + 1]) for e in numbers], np.int32).reshape(-1, 2)

    def _up(self, ranges: npt.NDArray[np.int32], gate: Sequence[list[Handle]], up: Sequence[list[Handle]]) -> None:
        (first, second), g, u = self.read, [self.g] * len(gate), [self.u] * len(up)
        if first is second:
            self._linear(self.x, first, np.concatenate((ranges, ranges)), [*gate, *up], g + u)
        else:
            self._linear(self.x, first, ranges, gate, g)
            self._linear(self.x, second, ranges, up, u)

    def _gate(self, numbers: Sequence[int]) -> None:
        w = self.experts.down
        native.gate_experts(
            self.act, self.g, self.u, self._ranges(numbers), self.rows, w.signs, w.block, w.mix, self.limit
        )
        if self.ops.observer is not None:
            for e in numbers:
                self._observe(self.g, e, self.experts.layer.down[e])

    def _linear(
        self,
        x: Array,
        rows: native.QuantisedRows | None,
        ranges: npt.NDArray[np.int32],
        held: Sequence[list[Handle]],
        outs: Sequence[Array],
    ) -> None:
        """outs[i][b:e] = x[b:e] @ the slices held[i], with (b, e) = ranges[i]."""
        counts = [len(slices) for slices in held]
        if counts.count(1) != len(counts):
            ranges = ranges.repeat(counts, axis=0)
            outs = [out for out, count in zip(outs, counts) for _ in range(count)]
        if outs:
            self.ops.device.linear_experts([h for slices in held for h in slices], ranges, x, rows, outs)

    def _observe(self, x: Array, expert: int, *tensors: TensorSpec) -> None:
        ops = self.ops
        assert ops.observer is not None
        rows = np.arange(self.offsets[expert], self.offsets[expert + 1], dtype=np.int32)
        ops.observer([ops._weight(t, None) for t in tensors], native.take(x, rows))


def inverse_frequencies(base: float, dim: int) -> list[float]:
    """base^(-2i/dim) for i in [0, dim/2), through decimal arithmetic: the same doubles on every machine."""
    context = Context(prec=30)
    b = Decimal(base)
    return [float(context.power(b, context.divide(Decimal(-2 * i), Decimal(dim)))) for i in range(dim // 2)]
