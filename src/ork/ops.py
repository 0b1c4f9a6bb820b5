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
from ork.devices.base import Device
from ork.errors import SourceError
from ork.residency.stream import Streams, TensorSpec

Array = native.Array
Batch = native.Batch

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


class Ops:
    """What models call. One instance per loaded model; `cache` is the KV cache its attention reads and writes."""

    def __init__(self, stream: Streams, device: Device):
        self.stream = stream
        self.source = stream.source
        self.device = device
        self.cache: native.KvCache | None = None
        self.used: set[str] = set()  # names that the model asked for
        self.weights: list[TensorSpec] = []  # in the order in which they were asked for
        # called in `linear` with the weights and the f32 rows they read: how calibration listens to a pass
        self.observer: Callable[[Sequence[Weight], Array], None] | None = None
        self._vectors: dict[str, Array] = {}

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
        self.used.add(name)
        tensor = self.source.spec(name)
        if (tensor.N, tensor.K) != (N, K):
            raise SourceError(f"tensor {name}: shape {tensor.N} x {tensor.K} where the metadata asks for {N} x {K}")
        self.weights.append(tensor)
        signs = self._shared(f"rotation.signs.{K}", K) if tensor.rotation else None
        mix = self._shared(f"rotation.mix.{tensor.mix}", tensor.mix**2) if tensor.mix else None
        return Weight(tensor, signs, mix, self.vector(bias, N) if bias and bias in self.source else None)

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
        kinds = [(w.rows, self.device.activation_limit(w.codec) if w.rows else 0) for w in weights]
        for kind in dict.fromkeys(kinds):
            alike = [(w, out) for w, out, k in zip(weights, results, kinds) if k == kind]
            first, (how, limit) = alike[0][0], kind
            rows = native.quantise(x, first.signs, first.block, how[2], first.mix, limit) if how else None
            for indices, handles in self.stream.batches([w.tensor for w, _ in alike]):
                outs = [alike[i][1] for i in indices]
                biases = [alike[i][0].bias for i in indices]
                self.device.linear(handles, x, rows, outs, biases)
        return results

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


def inverse_frequencies(base: float, dim: int) -> list[float]:
    """base^(-2i/dim) for i in [0, dim/2), through decimal arithmetic: the same doubles on every machine."""
    context = Context(prec=30)
    b = Decimal(base)
    return [float(context.power(b, context.divide(Decimal(-2 * i), Decimal(dim)))) for i in range(dim // 2)]
