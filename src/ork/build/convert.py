"""Converts a model to a pack, one slice at a time.

A slice's rows are read from the source, dequantised, rotated, quantised, tiled and written; its source pages are
dropped. So the memory in use is a few slices, whatever the model's size.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ork import models, tiles
from ork.build.check import check_model
from ork.errors import SourceError, UsageError
from ork.files import check_output
from ork.pack.format import PACK
from ork.pack.plan import PackPlan, RawPlan, TensorPlan
from ork.pack.writer import PackWriter
from ork.quant import rotation
from ork.quant.codecs import BadRow, Quantised, effective_group, quantise
from ork.quant.imatrix import Imatrix
from ork.quant.recipe import Choice, Recipe
from ork.sources.base import Source, TensorInfo, finite, matrices, read_weight
from ork.text.vocab import build_tokenizer

Progress = Callable[[int, int], None]  # (bytes done, bytes in all) of the pack

DEFAULT_MAX_RAM = 2 << 30
WORKING_COPIES = 3  # of a slice as f32: rows as read, rotated, and what tiling needs
SAMPLE_BYTES = 4096
RAW_LIMIT = 1 << 22  # elements of a tensor that is stored as it is
CONVERTER = 2  # counts the changes of what a conversion makes of the same source
EXPERT = re.compile(r"blk\.\d{1,5}\.ffn_(gate|up|down)_exps\.weight(?:#(\d{1,5}))?")
ROLES = {"gate": 0, "up": 1, "down": 2}  # the order in which an expert's tensors lie in a pack
SMALL = (".shortconv.conv.weight", ".ffn_gate_inp_shexp.weight")  # stored as they are, whatever their shape
INT8_BITS = 5.0  # from here on a source's matrix is worth int8, below it has about 4 bits
UNLISTED = ("token_embd.weight", "output.weight")  # no imatrix has look-ups, and most leave out the head


@dataclass(frozen=True)
class Aids:
    """What quantising takes beside the source and the recipe."""

    importance: Imatrix | None = None
    calibration: Mapping[str, object] | None = None  # what the pack records of the text that GPTQ looks at


NO_AIDS: Final = Aids()


def plan_pack(source: Source, recipe: Recipe, *, tokenizer: bytes | None = None, aids: Aids = NO_AIDS) -> PackPlan:
    """Every tensor, size and offset of the pack. Raises SourceError for what cannot be converted, UsageError for an
    imatrix that is missing, of another model or of no use.

    `tokenizer` is the ready one, built here if it is not given: what takes longest of a plan.
    """
    models.check_architecture(source.metadata.get("general.architecture"))
    tensors, raws = [], []
    for t in source.tensors.values():
        if is_weight(t):
            _check_stack(source, t)
            tensors += [plan_tensor(name, shape, recipe.choose(name)) for name, shape in matrices(t).items()]
        else:
            raws.append(_raw_plan(source, t))
    widths, mixes = {t.shape[1] for t in tensors if t.rotation}, {t.mix for t in tensors if t.mix}
    raws += [RawPlan(rotation.signs_name(K), "i8", (K,)) for K in sorted(widths)]
    raws += [RawPlan(rotation.mix_name(m), "f32", (m, m)) for m in sorted(mixes)]
    provenance: dict[str, object] = {
        "converter": CONVERTER,
        "source": source.digest(),
        "data": _data_sample(source),
        "tensors": len(source.tensors),
    }
    _check_importance(tensors, recipe, aids.importance)
    if aids.importance is not None:
        provenance["imatrix"] = aids.importance.digest
    if aids.calibration is not None:
        provenance["calibration"] = dict(aids.calibration)
    elif any(recipe.choose(t.name).gptq for t in tensors):
        raise UsageError(
            f"recipe {recipe.name} rounds by GPTQ, which looks at a text: use `ork convert --calibrate FILE`"
        )
    return PackPlan(
        tensors,
        raws,
        metadata=source.metadata,
        tokenizer=build_tokenizer(source.metadata) if tokenizer is None else tokenizer,
        chat_template=str(source.metadata.get("tokenizer.chat_template", "")),
        recipe=recipe.record(),
        provenance=provenance,
    )


def is_weight(t: TensorInfo) -> bool:
    """Whether a tensor is stored as slices: a matrix, or a stack of experts; norms, biases, the few taps of a short
    convolution stay as they are."""
    if t.name.endswith(SMALL):
        return False
    return EXPERT.fullmatch(t.name) is not None if len(t.shape) == 3 else len(t.shape) == 2 and ".weight" in t.name


def _check_stack(source: Source, t: TensorInfo) -> None:
    """Raises SourceError for a stack of other than as many experts as the metadata say."""
    key = f"{source.metadata.get('general.architecture')}.expert_count"
    count = source.metadata.get(key)
    if len(t.shape) == 3 and t.shape[0] != count:
        raise SourceError(f"{source.path}: tensor {t.name}: {t.shape[0]} experts, and {key} is {str(count)[:40]}")


def plan_tensor(name: str, shape: tuple[int, int], choice: Choice) -> TensorPlan:
    """How a matrix is stored under a choice, whose groups are what is asked for at most."""
    N, K = shape
    expert = EXPERT.fullmatch(name)
    block, mix = rotation.fields_of(K, choice.rotation)
    group = effective_group(K, choice.group)
    act_group = group or effective_group(tiles.pad_k(K), choice.act_group)
    return TensorPlan(
        name,
        choice.codec,
        (N, K),
        rotation=block,
        mix=mix,
        group=group,
        act_group=act_group,
        layer=_layer(name),
        expert=int(expert[2]) if expert and expert[2] else -1,
        role_order=ROLES[expert[1]] if expert else 0,
    )


def _check_importance(tensors: list[TensorPlan], recipe: Recipe, imatrix: Imatrix | None) -> None:
    searched = [t for t in tensors if recipe.choose(t.name).search == "importance"]
    if imatrix is None:
        if searched:
            raise UsageError(
                f"recipe {recipe.name} weighs errors by importance: use `ork convert --imatrix FILE`, which `ork "
                "imatrix` makes"
            )
        return
    if not searched:
        raise UsageError(f"{imatrix.where}: of no use to recipe {recipe.name}, which searches no scales")
    deepest = max((t.layer for t in tensors), default=-1)
    for name in imatrix.sums:
        if _layer(name) > deepest:
            raise UsageError(f"{imatrix.where}: lists {name}, a layer that is not there: it is of another model")
    stacks: dict[str, None] = {}  # left out by programs that saw some of their experts alone
    for t in searched:
        if t.expert >= 0 and t.name not in imatrix:
            stacks[t.name.partition("#")[0]] = None
        elif t.name in imatrix or t.name not in UNLISTED:
            imatrix.importance(t.name, t.shape[1])
    if stacks:
        some = ", ".join([*stacks][:3]) + (" ..." if len(stacks) > 3 else "")
        warnings.warn(f"{imatrix.where}: lists no {some}: these experts' scales are searched by mse", stacklevel=2)


def _data_sample(source: Source) -> str:
    """xxh3-128 over the first 4 KiB of every tensor: tells apart sources of equal headers, a fine-tune say, without
    reading them whole, so that a resumed conversion never mixes two."""
    state = xxhash.xxh3_128()
    for name in source.tensors:
        state.update(source.raw(name)[:SAMPLE_BYTES])
    return state.hexdigest()


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d{1,5})\.", name)
    return int(found[1]) if found else -1


def _raw_plan(source: Source, t: TensorInfo) -> RawPlan:
    if len(t.shape) > 2 or int(np.prod(t.shape)) > RAW_LIMIT:
        raise SourceError(f"{source.path}: tensor {t.name} of shape {t.shape} has no place in a pack of this version")
    return RawPlan(t.name, "f32", t.shape)


def make_blob(plan: PackPlan, source: Source, entry: int, aids: Aids = NO_AIDS) -> npt.NDArray[np.uint8]:
    """The bytes of one entry of the pack, from the source's rows. Raises SourceError for a value that is none."""
    item, n0, n1 = plan.item(entry)
    if isinstance(item, RawPlan):
        return _raw_blob(item, source)
    N, K = item.shape
    stop = min(n1, N)
    choice = recipe_of(plan).choose(item.name)
    rows = read_weight(source, item.name, n0, stop)
    if item.rotation:
        rows = rotation.rotate_rows(rows, K, choice.rotation)
    importance, search = importance_of(item, choice, aids), choice.search
    if search == "importance" and importance is None:
        search = "mse"
    try:
        q = quantise(item.codec, rows, item.group, search=search, importance=importance)
    except BadRow as bad:
        raise SourceError(f"{source.path}: tensor {item.name}, row {n0 + bad.row} {bad.why}") from None
    return blob_of(plan.layout(entry), q)


def recipe_of(plan: PackPlan) -> Recipe:
    return _recipe(plan.sections["recipe"])


@lru_cache(maxsize=16)
def _recipe(record: bytes) -> Recipe:
    return Recipe.of(json.loads(record))


def importance_of(item: TensorPlan, choice: Choice, aids: Aids) -> npt.NDArray[np.float32] | None:
    """Importance f32 [K] of a tensor's inputs as they are after rotation; None: unweighted."""
    imatrix = aids.importance
    if choice.search != "importance" or imatrix is None or item.name not in imatrix:
        return None
    return rotation.rotate_importance(imatrix.importance(item.name, item.shape[1]), item.rotation, item.mix)


def blob_of(layout: tiles.SliceLayout, q: Quantised) -> npt.NDArray[np.uint8]:
    """A slice's bytes of its rows: a last slice's are fewer than its columns, which are padded."""
    n = layout.n - len(q.codes)

    def padded(a: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        return a if a is None or not n else np.concatenate([a, np.zeros((n, *a.shape[1:]), a.dtype)])

    codes = padded(q.codes)
    assert codes is not None
    return tiles.build_blob(layout, codes, padded(q.channel), padded(q.groups))


def _raw_blob(item: RawPlan, source: Source) -> npt.NDArray[np.uint8]:
    derived = rotation.derived(item.name)
    if derived is not None:
        return np.ascontiguousarray(derived).reshape(-1).view(np.uint8)
    values = finite(source, item.name, source.rows(item.name, 0, item.shape[0] if len(item.shape) == 2 else 1))
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def effective_bits(t: TensorInfo) -> float:
    """Bits a weight, scales included."""
    return 8 * t.nbytes / (t.rows * t.columns)


def check_recipe(source: Source, recipe: Recipe, *, allow_requantize: bool = False) -> None:
    """Warns of rules that name no matrix of the source; UsageError as `check_requantising`."""
    for pattern in recipe.idle(t.name for t in source.tensors.values() if is_weight(t)):
        warnings.warn(f"recipe {recipe.name}: match {pattern!r} names no matrix of {source.path}", stacklevel=2)
    if not allow_requantize:
        check_requantising(source, recipe)


def check_requantising(source: Source, recipe: Recipe) -> None:
    """Raises UsageError if a matrix that has about 4 bits already were to be rounded to 4 bits again."""
    coarse = [t for t in source.tensors.values() if is_weight(t) and effective_bits(t) < INT8_BITS]
    again = [t for t in coarse if recipe.choose(t.name).four_bit]
    if again:
        more = f" and {len(again) - 1} more have" if len(again) > 1 else " has"
        raise UsageError(
            f"{source.path}: {again[0].name}{more} about 4 bits already ({again[0].kind}): rounding twice costs "
            "quality (published: perplexity 12.48, not 11.33); take a 16-bit file or int8, or `ork convert "
            "--allow-requantize`"
        )


def convert(
    source: Source,
    target: str | os.PathLike[str],
    recipe: Recipe,
    *,
    aids: Aids = NO_AIDS,
    allow_requantize: bool = False,
    max_ram: int = DEFAULT_MAX_RAM,
    workers: int | None = None,
    progress: Progress | None = None,
    announce: Callable[[], None] | None = None,
) -> Path:
    """Writes the pack `target`; a conversion that was interrupted goes on where it stopped, with the same bytes.

    `announce` is called when the source has been found good, before the first byte is written.
    Holds at most `max_ram` bytes beyond the mapped source. Raises SourceError, PackError, StorageError, UsageError.
    """
    check_output(target, PACK)
    check_recipe(source, recipe, allow_requantize=allow_requantize)
    plan = plan_pack(source, recipe, aids=aids)
    check_model(plan, source)
    count = workers_within(plan, max_ram, workers)
    total = sum(plan.nbytes(e) for e in range(len(plan)))
    if announce:
        announce()
    with PackWriter.open(target, plan) as writer:
        todo = list(writer.missing())
        done = total - sum(plan.nbytes(e) for e in todo)
        for entry in in_parallel(count, todo, lambda e: writer.write(e, make_blob(plan, source, e, aids))):
            done += plan.nbytes(entry)
            if progress:
                progress(done, total)
        writer.finish()
    return Path(target)


def workers_within(plan: PackPlan, max_ram: int, workers: int | None = None) -> int:
    """Threads that may convert at a time. Raises UsageError if not even one fits."""
    largest = max(
        (plan.layout(s.entry).n * t.shape[1] * 4 for t in plan.tensors for s in plan.entries(t.name)), default=0
    )
    fixed = 2 * sum(map(len, plan.sections.values())) + (32 << 20)
    each = WORKING_COPIES * largest
    if max_ram < fixed + each:
        raise UsageError(
            f"--max-ram {max_ram >> 20} MiB is too little: this model needs {(fixed + each >> 20) + 1} MiB"
        )
    return max(1, min(workers or os.cpu_count() or 1, (max_ram - fixed) // max(each, 1)))


def in_parallel(count: int, entries: list[int], work: Callable[[int], None]) -> Iterator[int]:
    """Runs `work` on every entry, `count` at a time, in order; yields each when done. The first error stops it."""
    with ThreadPoolExecutor(count) as pool:
        running: dict[Future[None], int] = {}
        queue = iter(entries)
        try:
            while True:
                while len(running) < count and (entry := next(queue, None)) is not None:
                    running[pool.submit(work, entry)] = entry
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    yield running.pop(future)
        finally:
            for future in running:
                future.cancel()
