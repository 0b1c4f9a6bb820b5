"""Converts a model to a pack, one slice at a time.

A slice's rows are read from the source, dequantised, rotated, quantised, tiled and written; its source pages are
dropped. So the memory in use is a few slices, whatever the model's size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ork import models, tiles
from ork.build.check import check_model
from ork.errors import SourceError, StorageError, UsageError
from ork.pack.format import MAGIC
from ork.pack.plan import PackPlan, RawPlan, TensorPlan
from ork.pack.writer import PackWriter
from ork.quant import int8, rotation
from ork.quant.recipe import Recipe
from ork.sources.base import Source, TensorInfo
from ork.text.vocab import build_tokenizer

Progress = Callable[[int, int], None]  # (bytes done, bytes in all) of the pack

DEFAULT_MAX_RAM = 2 << 30
WORKING_COPIES = 3  # of a slice as f32: rows as read, rotated, and what tiling needs
SAMPLE_BYTES = 4096
RAW_LIMIT = 1 << 22  # elements of a tensor that is stored as it is


def plan_pack(source: Source, recipe: Recipe, *, tokenizer: bytes | None = None) -> PackPlan:
    """Every tensor, size and offset of the pack. Raises SourceError for what cannot be converted.

    `tokenizer` is the ready one, built here if it is not given: what takes longest of a plan.
    """
    models.check_architecture(source.metadata.get("general.architecture"))
    tensors, raws, widths = [], [], set()
    for t in source.tensors.values():
        if len(t.shape) == 2 and t.name.endswith(".weight"):
            N, K = t.shape
            choice = recipe.choose(t.name)
            block = rotation.block_of(K) if choice.rotate else 0
            if block:
                widths.add(K)
            tensors.append(TensorPlan(t.name, choice.codec, (N, K), rotation=block, layer=_layer(t.name)))
        else:
            raws.append(_raw_plan(source, t))
    raws += [RawPlan(rotation.signs_name(K), "i8", (K,)) for K in sorted(widths)]
    return PackPlan(
        tensors,
        raws,
        metadata=source.metadata,
        tokenizer=build_tokenizer(source.metadata) if tokenizer is None else tokenizer,
        chat_template=str(source.metadata.get("tokenizer.chat_template", "")),
        recipe=recipe.record(),
        provenance={"source": source.digest(), "data": _data_sample(source), "tensors": len(source.tensors)},
    )


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


def make_blob(plan: PackPlan, source: Source, entry: int) -> npt.NDArray[np.uint8]:
    """The bytes of one entry of the pack, from the source's rows."""
    item, n0, n1 = plan.item(entry)
    if isinstance(item, RawPlan):
        return _raw_blob(item, source)
    N, K = item.shape
    stop = min(n1, N)
    rows = source.rows(item.name, n0, stop)
    source.release(item.name, n0, stop)
    layout = plan.layout(entry)
    n = layout.n
    if item.codec == "f32":
        if not np.isfinite(rows).all():
            raise SourceError(f"{source.path}: tensor {item.name} holds a value that is not finite")
        padded = np.zeros((n, tiles.pad_k(K)), np.float32)
        padded[: stop - n0, :K] = rows
        return tiles.build_blob(layout, padded)
    try:
        codes, scales = int8.quantise_rows(rows, rotation.signs_of(K) if item.rotation else None, item.rotation)
    except SourceError as error:
        raise SourceError(f"{source.path}: tensor {item.name}, rows {n0} to {stop}: {error}") from None
    full_codes, full_scales = np.zeros((n, tiles.pad_k(K)), np.int8), np.zeros(n, np.float32)
    full_codes[: stop - n0], full_scales[: stop - n0] = codes, scales
    return tiles.build_blob(layout, full_codes, full_scales)


def _raw_blob(item: RawPlan, source: Source) -> npt.NDArray[np.uint8]:
    if item.name.startswith("rotation.signs."):
        return rotation.signs_of(item.shape[0]).view(np.uint8)
    values = source.rows(item.name, 0, item.shape[0] if len(item.shape) == 2 else 1)
    if not np.isfinite(values).all():
        raise SourceError(f"{source.path}: tensor {item.name} holds a value that is not finite")
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def convert(
    source: Source,
    target: str | os.PathLike[str],
    recipe: Recipe,
    *,
    max_ram: int = DEFAULT_MAX_RAM,
    workers: int | None = None,
    progress: Progress | None = None,
    announce: Callable[[], None] | None = None,
) -> Path:
    """Writes the pack `target`; a conversion that was interrupted goes on where it stopped, with the same bytes.

    `announce` is called when the source has been found good, before the first byte is written.
    Holds at most `max_ram` bytes beyond the mapped source. Raises SourceError, PackError, StorageError, UsageError.
    """
    check_target(Path(target))
    plan = plan_pack(source, recipe)
    check_model(plan, source)
    count = workers_within(plan, max_ram, workers)
    total = sum(plan.nbytes(e) for e in range(len(plan)))
    if announce:
        announce()
    with PackWriter.open(target, plan) as writer:
        todo = list(writer.missing())
        done = total - sum(plan.nbytes(e) for e in todo)
        for entry in _in_parallel(count, todo, lambda e: writer.write(e, make_blob(plan, source, e))):
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


def check_target(target: Path) -> None:
    """Nothing but a pack is ever overwritten, the source least of all."""
    try:
        if target.is_dir():
            raise UsageError(f"{target}: this is a folder; name the pack to write")
        if not target.exists():
            return
        if target.is_file():
            with target.open("rb") as f:
                if f.read(len(MAGIC)) == MAGIC:
                    return
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror}") from None
    raise UsageError(f"{target}: this file exists and is not a pack; choose another name or remove it")


def _in_parallel(count: int, entries: list[int], work: Callable[[int], None]) -> Iterator[int]:
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
