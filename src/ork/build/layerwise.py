"""A model's pass, stopped between layers; with the source's own weights in f32, one layer's at a time in memory.

Weights are rows put into the CPU kernels' tiles. Whoever drives the pass holds a layer's, calls `Model.layer` for as
many rows as it likes, and drops them; a weight may be held in a changed form, to see what the change does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ork import models, native, tiles
from ork.build.check import PlannedSource, check_model
from ork.build.convert import plan_pack
from ork.devices.base import Device, SliceSpec
from ork.devices.cpu import CpuDevice
from ork.engine.kvcache import BLOCK, KvPool
from ork.engine.kvcache import Sequence as Place
from ork.models import Rows
from ork.ops import Ops
from ork.pack.file import aligned
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.residency.source import PackSource
from ork.residency.stream import (
    Batch,
    ExpertBatch,
    ExpertLayer,
    Ready,
    SliceSource,
    Stream,
    Streams,
    StreamStats,
    TensorSpec,
)
from ork.sources.base import Source, finite, read_weight

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
RowsOf = Callable[[str, int, int], F32]  # (tensor, start, stop): rows of a weight

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
DAMAGED = "the model's weights overflow, or are damaged"  # where a text brings what is not finite


class Layers:
    """A model whose layers are run one by one. `hold(i)` makes layer i's weights ready, `drop(i)` lets them go."""

    def __init__(self, source: SliceSource, stream: Streams, device: CpuDevice):
        self.stream, self.device = stream, device
        self.ops = Ops(stream, device)
        self.model = models.build(self.ops)
        stream.tensors, stream.expert_layers = models.cycle(self.ops), self.ops.expert_layers
        self.head = HEAD if HEAD in source else EMBEDDING
        self.shapes = {t.name: (t.N, t.K) for t in models.order_of_pass(self.ops)}
        self._pool: KvPool | None = None

    def names(self, layer: int) -> list[str]:
        """The weights of a layer in the order of a pass."""
        return [name for name in self.shapes if name.startswith(f"blk.{layer}.")]

    def hold(self, layer: int) -> None:
        """A pack's weights are always there."""

    def drop(self, layer: int) -> None:
        """Nothing to let go."""

    def held_bytes(self, layer: int) -> int:
        """Memory that `hold` takes: none for what is mapped."""
        return 0

    def rows(self, tokens: I32, wanted: I32) -> Rows:
        """The batch of sequences `tokens` [S, T], each on its own; the flat rows `wanted` get logits. One batch at a
        time: the next one takes its place in the KV cache."""
        sequences, length = tokens.shape
        positions = sequences * -(-length // BLOCK) * BLOCK
        if self._pool is None or self._pool.positions < positions:
            self._pool = KvPool.of(self.model.config, positions, half=False)
            self._pool.serve(self.ops)
        places = [Place() for _ in range(sequences)]
        batch = self._pool.rows([(p, t) for p, t in zip(places, tokens.tolist())], every=True)
        for place in places:
            self._pool.truncate(place, 0)
        return Rows(batch.tokens, batch.batch, wanted)


class PackLayers(Layers):
    """Of a pack, in the codecs that it has."""

    def __init__(self, pack: Pack, threads: int | None = None):
        device = CpuDevice(threads)
        source = PackSource(pack)
        super().__init__(source, Stream(source, device), device)


class SourceLayers(Layers):
    """Of a source, in f32. Raises SourceError for what could not be converted either."""

    def __init__(self, source: Source, threads: int | None = None):
        plan = plan_pack(source, builtin("f32"), tokenizer=b"")
        check_model(plan, source)
        self.source = source
        device = CpuDevice(threads)
        self.held = Held(PlannedSource(plan, source), device, self.read)
        super().__init__(self.held.source, self.held, device)

    def read(self, name: str, start: int, stop: int) -> F32:
        """Rows of a weight; its mapped pages are dropped. Raises SourceError where a value is not finite."""
        return finite(self.source, name, read_weight(self.source, name, start, stop))

    def piece(self, name: str, codec: str = "f32", change: Callable[[F32], F32] | None = None) -> Piece:
        """A weight of the source, its rows changed if asked for; f16 takes half the memory."""

        def rows(start: int, stop: int) -> F32:
            given = self.read(name, start, stop)
            return given if change is None else change(given)

        return Piece(self.device, name, self.shapes[name], rows, codec)

    def hold(self, layer: int) -> None:
        for name in self.names(layer):
            self.held.hold(name, self.piece(name))

    def drop(self, layer: int) -> None:
        self.held.drop(*self.names(layer))

    def held_bytes(self, layer: int) -> int:
        return sum(4 * N * K for N, K in map(self.shapes.__getitem__, self.names(layer)))


class Held:
    """The weights that are held, and embedding rows as they are asked for: the `Streams` of a pass by layers."""

    def __init__(self, source: SliceSource, device: CpuDevice, read: RowsOf):
        self.source = source
        self.stats = StreamStats(reason="one layer at a time")
        self.tensors: list[TensorSpec] = []
        self.expert_layers: list[ExpertLayer] = []
        self.look_up = read  # where embedding rows come from
        self.device: Device = device
        self._held: dict[str, Piece] = {}

    def hold(self, name: str, piece: Piece) -> None:
        """Products with `name` take this weight from now on."""
        self._held[name] = piece

    def drop(self, *names: str) -> None:
        for name in names:
            self._held.pop(name, None)

    @contextmanager
    def changed(self, weights: Mapping[str, Piece]) -> Iterator[None]:
        """Other weights for a while."""
        before = {name: self._held[name] for name in weights}
        self._held |= weights
        try:
            yield
        finally:
            self._held |= before

    def batches(self, tensors: Sequence[TensorSpec]) -> Iterator[Batch]:
        """A weight that is not held has no slices: its products stay zeros, for those who look at inputs alone."""
        held = [self._held[t.name].slices if t.name in self._held else [] for t in tensors]
        if handles := [s for slices in held for s in slices]:
            yield [i for i, slices in enumerate(held) for _ in slices], handles

    def experts(self, layer: ExpertLayer, needed: Sequence[int]) -> Iterator[ExpertBatch]:
        """All that are held; products of others are not made."""

        def slices(tensor: TensorSpec) -> list[native.Slice]:
            return self._held[tensor.name].slices if tensor.name in self._held else []

        yield list(needed), [(slices(g), slices(u), slices(d)) for g, u, d in map(layer.tensors, needed)]

    @contextmanager
    def rows(self, tensor: TensorSpec, columns: I32) -> Iterator[list[native.Slice]]:
        width = tiles.N_ALIGN
        starts = sorted({int(c) // width * width for c in columns if 0 <= c < tensor.N})
        pieces = []
        for at in starts:
            rows = self.look_up(tensor.name, at, min(at + width, tensor.N))
            pieces.append(_looked_up(self.device, tensor.name, rows, at))
        yield [s for piece in pieces for s in piece.slices]

    def staying(self) -> tuple[list[tuple[str, int]], int]:
        return [], 0

    def place(self, placement: Mapping[tuple[str, int], int], slot_domain: int) -> None:
        """There is one memory."""

    def reside(self) -> Ready:
        return Ready(0, 0, {}, 0.0)

    def close(self) -> None:
        self._held.clear()


def _looked_up(device: Device, name: str, rows: F32, n0: int) -> Piece:
    return Piece(device, name, (len(rows), rows.shape[1]), lambda a, b: rows[a:b], n0=n0)


class Piece:
    """A weight's rows as slices in memory of their own, f32 or f16; `n0` is the column number of the first row.

    `rows(start, stop)` gives f32 [stop - start, K]; it is called for a slice at a time, from several threads.
    """

    def __init__(
        self,
        device: Device,
        name: str,
        shape: tuple[int, int],
        rows: Callable[[int, int], F32],
        codec: str = "f32",
        n0: int = 0,
    ):
        N, K = shape
        Kp, dtype = tiles.pad_k(K), tiles.CODECS[codec].dtype
        columns = tiles.slice_columns(codec, K, N)
        layouts = [tiles.slice_layout(codec, K, b - a) for a, b in columns]
        starts = list(accumulate((layout.nbytes for layout in layouts), initial=0))
        self.memory = aligned(starts[-1])

        def make(i: int) -> native.Slice:
            (a, b), layout = columns[i], layouts[i]
            stop = min(b, N)
            codes = rows(a, stop).astype(dtype, copy=False)
            if codes.shape != (b - a, Kp):
                padded = np.zeros((b - a, Kp), dtype)
                padded[: stop - a, :K] = codes
                codes = padded
            blob = self.memory[starts[i] : starts[i + 1]]
            tiles.pack_codes(codec, codes, 0, blob)
            return device.host_slice(SliceSpec(name, codec, K, Kp, layout.ks, n0 + a, n0 + b), blob)

        if len(columns) == 1:
            self.slices = [make(0)]
        else:
            with ThreadPoolExecutor(device.threads) as pool:
                self.slices = list(pool.map(make, range(len(columns))))
