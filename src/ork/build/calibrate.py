"""Conversion with GPTQ: layer by layer, on a text, each layer seeing what the layers before it became.

A layer is run twice. With the source's weights in f32, to see its inputs: each distinct input has one Hessian, which
the tensors that read it share. And, when its tensors have been rounded and are in the pack, with these and the int8
rows that the model will have, to make the next layer's input. Between layers all hidden rows of the text are kept, and
nothing else: a layer whose entries are all in the pack already, from a run that was interrupted, is only run the second
way, to the same bits.

Each routed expert has Hessians of its own, of the rows that the layer's router sends there: one for gate and up, one
for down. They do not fit in memory together, so that the layer is run with the source's weights as often as it takes,
each time with the gate and up projections of those experts alone whose down projections are listened to.

What GPTQ does not round is converted first and as always: small tensors, the embedding (tied or not), tensors whose
recipe does not ask for it, and those with more inputs than the text has rows, whose Hessian would say nothing. So are
experts that get fewer rows than they have inputs, when the layer's first run has counted them.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ork.build.check import PlannedSource, check_model
from ork.build.convert import (
    DEFAULT_MAX_RAM,
    NO_AIDS,
    Aids,
    Progress,
    blob_of,
    check_recipe,
    importance_of,
    in_parallel,
    make_blob,
    plan_pack,
)
from ork.build.layerwise import HEAD, I32, Layers, SourceLayers
from ork.build.workload import SEQUENCE, TOGETHER, Input, Plain, Work, within
from ork.errors import SourceError, UsageError
from ork.files import check_output
from ork.measure.perplexity import cut
from ork.models.layers import State
from ork.ops import Array, Routes, Weight
from ork.pack.file import SliceFile, aligned
from ork.pack.format import PACK
from ork.pack.plan import PackPlan, TensorPlan
from ork.pack.writer import PackWriter
from ork.quant import gptq, rotation
from ork.quant.codecs import BadRow
from ork.quant.recipe import Recipe
from ork.residency.stream import Stream
from ork.sources.base import Source
from ork.text.tokenizer import Tokenizer
from ork.text.vocab import build_tokenizer

MANY = 8  # Hessians, of experts: one thread each; of fewer, all threads share each one's tiles
HEAD_ROWS = 64  # of the last rows, that look at the head in one go: it makes room for their logits
DEFAULT_TOKENS = 16384

Bytes = npt.NDArray[np.uint8]


def tokens_of(tokenizer: Tokenizer, text: str, tokens: int = DEFAULT_TOKENS) -> I32:
    """The beginning of a text as sequences [S, 512] of at most `tokens` in all. UsageError if it is too short."""
    if tokens < SEQUENCE:
        raise UsageError(f"--calibrate-tokens {tokens}: one sequence takes {SEQUENCE}")
    try:
        return cut(tokenizer, text, SEQUENCE, tokens // SEQUENCE).tokens
    except UsageError:
        raise UsageError(f"the text to calibrate with is too short: GPTQ takes {SEQUENCE} tokens or more") from None


def convert_calibrated(
    source: Source,
    target: str | os.PathLike[str],
    recipe: Recipe,
    text: str,
    *,
    tokens: int = DEFAULT_TOKENS,
    aids: Aids = NO_AIDS,
    allow_requantize: bool = False,
    max_ram: int = DEFAULT_MAX_RAM,
    workers: int | None = None,
    progress: Progress | None = None,
    announce: Callable[[], None] | None = None,
) -> Plain:
    """Writes the pack `target` as `convert` does, tensors whose choice says `gptq` calibrated on `text`.

    Interrupted, it goes on at the first layer with an entry missing and ends with the same bytes, whatever `workers`
    and `max_ram` are. Returns what was rounded plainly because `text` has too few rows for it. `progress` counts bytes
    of the pack that GPTQ rounds. Raises SourceError, PackError, StorageError, UsageError.
    """
    check_output(target, PACK)
    check_recipe(source, recipe, allow_requantize=allow_requantize)
    tokenizer = build_tokenizer(source.metadata)
    sequences = tokens_of(Tokenizer.load(tokenizer), text, tokens)
    seen = {"sequence": SEQUENCE, "tokens": sequences.size, "digest": xxhash.xxh3_128_hexdigest(sequences.tobytes())}
    plan = plan_pack(source, recipe, aids=replace(aids, calibration=seen), tokenizer=tokenizer)
    check_model(plan, source)
    layers = SourceLayers(source, workers or os.cpu_count() or 1)
    work = Work.of(plan, recipe, layers.model.config, sequences, max_ram, layers.device.threads)
    if announce:
        announce()
    with gptq.one_blas_thread(), ThreadPoolExecutor(work.threads) as pool, PackWriter.open(target, plan) as writer:
        with contextlib.closing(_Run(layers, work, writer, pool, aids, progress)) as run:
            run.everything()
        writer.finish()
    return work.plain


class _Run:
    """One conversion under way."""

    def __init__(
        self,
        layers: SourceLayers,
        work: Work,
        writer: PackWriter,
        pool: Executor,
        aids: Aids,
        progress: Progress | None,
    ):
        self.float, self.source = layers, layers.source
        self.work, self.writer, self.pool, self.aids = work, writer, pool, aids
        self.progress = progress
        self.missing = set(writer.missing())
        self.entries = {name: [s.entry for s in work.plan.entries(name)] for name in work.names}
        self.calibrated = {entry for entries in self.entries.values() for entry in entries}
        self.total = sum(map(work.plan.nbytes, self.calibrated))
        self.done = sum(map(work.plan.nbytes, self.calibrated - self.missing))
        self.part = _Part(work.plan, self.source, Path(writer.path))
        self.rounded = Layers(self.part, Stream(self.part, self.float.device), self.float.device)

    def to_do(self, name: str) -> list[int]:
        """Entries of a tensor that are not in the pack yet."""
        return [entry for entry in self.entries[name] if entry in self.missing]

    def everything(self) -> None:
        plainly = sorted(self.missing - self.calibrated)
        self.each(lambda e: self.writer.write(e, make_blob(self.work.plan, self.source, e, self.aids)), plainly)
        layers = [i for i in range(self.rounded.model.config.layers) if self.has_to_see(i)]
        head = [name for name in self.work.names if name == HEAD and self.to_do(name)]
        if not layers and not head:
            return
        states = self.begin()
        for i in range(self.rounded.model.config.layers if head else layers[-1] + 1):
            if i in layers:
                self.round_layer(i, states)
            with self.part.held(self.rounded):
                self.writer.sync()
                for at, state in enumerate(states):
                    states[at] = self.rounded.model.layer(i, state)
        if head:
            self.round_head(states)

    def has_to_see(self, i: int) -> bool:
        """Whether a layer's inputs are to be seen: for what is missing, or to say which experts have few rows."""
        return any("#" in name or self.to_do(name) for name in self.rounded.names(i) if name in self.work.names)

    def begin(self) -> list[State]:
        """The text's embedded rows, as the pack's own embedding gives them."""
        groups = [self.work.sequences[at : at + TOGETHER] for at in range(0, len(self.work.sequences), TOGETHER)]
        every = [self.rounded.rows(g, np.arange(g.size, dtype=np.int32)) for g in groups]
        self.float.ops.cache, self.float.ops.conv = self.rounded.ops.cache, self.rounded.ops.conv
        with self.part.held(self.rounded):
            return [self.rounded.model.begin(rows) for rows in every]

    def round_layer(self, i: int, states: Sequence[State]) -> None:
        """GPTQ for the layer's tensors that are missing, from its inputs with the source's weights."""
        calls = self.calls(i)
        inputs = [part for call in calls for part in self.inputs_of(call) if any(map(self.to_do, part.names))]
        feeding = [name for call in calls[:-1] for name in call]  # what comes last makes no input of this layer
        experts = self.experts_of(i)
        rows: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        for some in list(within(inputs, self.work.room)) or [[]]:
            rows = self.listen(i, states, feeding, some)
        enough = []
        for expert, part in experts:
            if rows[expert] < part.K:
                self.plainly(part)
            elif any(map(self.to_do, part.names)):
                enough.append(part)
        for some in within(enough, self.work.room):
            self.listen(i, states, feeding, some)

    def listen(
        self, i: int, states: Sequence[State], feeding: Sequence[str], inputs: Sequence[Input]
    ) -> npt.NDArray[np.int64]:
        """Sums up some inputs of a layer and rounds what reads them; the rows [E] that each expert gets."""
        hessians = {part: gptq.Hessian(part.K) for part in inputs}
        experts = self.float.model.config.experts
        rows = np.zeros(experts.count if experts else 0, np.int64)

        def count(layer: int, routes: Routes) -> None:
            rows[:] += np.diff(routes.offsets())

        for name in dict.fromkeys([*feeding, *(name for part in inputs for name in part.behind)]):
            self.float.held.hold(name, self.float.piece(name))
        self.float.ops.router = count
        with self.observed(hessians):
            for state in states:
                self.float.model.layer(i, state)
        self.float.ops.router = None
        self.float.drop(i)
        self.round(hessians)
        return rows

    def plainly(self, part: Input) -> None:
        """Rounds an expert's tensors as they would be without GPTQ, and notes it."""
        for name in part.names:
            self.work.plain.add(name)
        entries = [entry for name in part.names for entry in self.to_do(name)]
        self.each(lambda e: self.writer.write(e, make_blob(self.work.plan, self.source, e, self.aids)), entries)

    def round_head(self, states: Sequence[State]) -> None:
        (part,) = self.inputs_of([HEAD])
        hessians = {part: gptq.Hessian(part.K)}
        with self.observed(hessians):
            for state in states:
                for wanted in np.array_split(state.rows.wanted, -(-len(state.rows.wanted) // HEAD_ROWS)):
                    self.float.model.end(replace(state, rows=replace(state.rows, wanted=wanted)))
        self.round(hessians)

    def calls(self, i: int) -> list[list[str]]:
        """The weights of each call of `Ops.linear` in a layer, in order: seen on one row that meets no weights. Routed
        experts make a call of none."""
        seen: list[list[str]] = []
        self.float.ops.observer = lambda weights, x: seen.append(
            [w.tensor.name for w in weights if "#" not in w.tensor.name]
        )
        model, one = self.float.model, np.zeros(1, np.int32)
        model.layer(i, model.begin(self.rounded.rows(one.reshape(1, 1), one)))
        self.float.ops.observer = None
        return seen

    def inputs_of(self, call: Sequence[str]) -> list[Input]:
        """A call's inputs: one, unless its tensors are rotated in different ways."""
        by_way: dict[tuple[int, str], list[str]] = {}
        for name in call:
            if name in self.work.names:
                item = self.part.tensors[name]
                by_way.setdefault((item.shape[1], self.work.recipe.choose(name).rotation), []).append(name)
        return [Input(tuple(names), K, mode) for (K, mode), names in by_way.items()]

    def experts_of(self, i: int) -> list[tuple[int, Input]]:
        """The inputs of a layer's routed experts with their numbers: what gate and up read, what down reads."""
        found: list[tuple[int, Input]] = []
        for layer in self.float.ops.expert_layers:
            for e in range(len(layer)) if layer.layer == i else ():
                gate, up, down = layer.tensors(e)
                behind, nbytes = (gate.name, up.name), 4 * (gate.N * gate.K + up.N * up.K)
                found += [(e, part) for part in self.inputs_of(behind)]
                found += [
                    (e, replace(part, behind=behind, behind_bytes=nbytes)) for part in self.inputs_of([down.name])
                ]
        return found

    @contextmanager
    def observed(self, hessians: Mapping[Input, gptq.Hessian]) -> Iterator[None]:
        """Meanwhile the f32 model's inputs are summed up."""

        readers: dict[str, list[Input]] = defaultdict(list)
        for part in hessians:
            readers[part.names[0]].append(part)

        def observe(weights: Sequence[Weight], x: Array) -> None:
            for part in [part for w in weights for part in readers.get(w.tensor.name, ())]:
                hessians[part].add(rotation.rotate_rows(x.numpy(), part.K, part.mode), self.pool)

        self.float.ops.observer = observe
        try:
            yield
        finally:
            self.float.ops.observer = None

    def round(self, hessians: dict[Input, gptq.Hessian]) -> None:
        """Uses the Hessians up: factors, in parallel within one or of many, then all slices that need them."""

        def factor(part: Input, pool: Executor | None) -> gptq.Factor:
            try:
                return gptq.factor(hessians[part], pool)
            except FloatingPointError as error:
                raise SourceError(f"{self.source.path}: tensor {part.names[0]}: on this text {error}") from None

        if len(hessians) > MANY:
            factors = list(self.pool.map(lambda part: factor(part, None), hessians))
        else:
            factors = [factor(part, self.pool) for part in hessians]
        made = {e: f for part, f in zip(hessians, factors) for name in part.names for e in self.to_do(name)}
        self.each(lambda e: self.round_slice(made[e], e), list(made))

    def round_slice(self, made: gptq.Factor, entry: int) -> None:
        item, n0, n1 = self.work.plan.item(entry)
        assert isinstance(item, TensorPlan)
        choice = self.work.recipe.choose(item.name)
        N, K = item.shape
        rows = rotation.rotate_rows(self.float.read(item.name, n0, min(n1, N)), K, choice.rotation)
        importance = importance_of(item, choice, self.aids)
        search = "mse" if choice.search == "importance" and importance is None else choice.search
        try:
            q = gptq.gptq(item.codec, rows, made, item.group, search=search, importance=importance)
        except BadRow as bad:
            raise SourceError(f"{self.source.path}: tensor {item.name}, row {n0 + bad.row} {bad.why}") from None
        self.writer.write(entry, blob_of(self.work.plan.layout(entry), q))

    def each(self, work: Callable[[int], None], entries: list[int]) -> None:
        """Calls `work` on entries, in parallel. The first error, or an interrupt, ends it."""
        for entry in in_parallel(self.work.workers, entries, work):
            if entry in self.calibrated:
                self.done += self.work.plan.nbytes(entry)
            if self.progress:
                self.progress(self.done, self.total)

    def close(self) -> None:
        self.part.close()


class _Part(PlannedSource):
    """The pack as far as it is written, as a source of slices; `held` bounds how long they stay in memory."""

    def __init__(self, plan: PackPlan, source: Source, path: Path):
        super().__init__(plan, source)
        self.plan = plan
        self._file = SliceFile(f"{path}.part", os.open(f"{path}.part", os.O_RDONLY | os.O_CLOEXEC))
        self._blobs: list[Bytes] = []

    def blob(self, name: str, index: int) -> Bytes:
        info = self.plan.entries(name)[index]
        memory = aligned(info.nbytes)
        self._file.read_part(info.offset, memory[: info.nbytes])
        self._blobs.append(memory)
        return memory[: info.nbytes]

    @contextmanager
    def held(self, layers: Layers) -> Iterator[None]:
        """What `layers` reads stays until the end."""
        try:
            yield
        finally:
            layers.stream.close()
            self._blobs.clear()

    def close(self) -> None:
        self._file.close()
