"""What a conversion cost, measured and noted in the pack: perplexity and KL divergence against the source.

The reference is the source's own weights in f32, as a pack of its own for the time of the measurement: a pack is
mapped, so memory stays bounded, but the disk needs 4 bytes a weight meanwhile, beside the target. It loses its name as
soon as it is open, so that nothing is left of it whatever ends the measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ork.build.convert import Progress, convert, plan_pack
from ork.devices.base import Device
from ork.devices.choose import open_device
from ork.engine.session import Engine
from ork.errors import StorageError
from ork.files import check_output
from ork.measure.compare import Comparison
from ork.measure.perplexity import Chunks, Running, compare, cut
from ork.models import build as build_model
from ork.ops import Ops
from ork.pack.format import PACK
from ork.pack.notes import write_note
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.residency.source import PackSource
from ork.residency.stream import Stream
from ork.sources.base import Source
from ork.text.tokenizer import Tokenizer, build_tokenizer

NOTE = "quality"


def reference_of(target: Path) -> Path:
    """Where the f32 pack is while `target` is evaluated."""
    return target.with_name(f"{target.name}.reference")


def check(
    source: Source, target: Path, text: str, *, context: int = 512, chunks: int | None = None, made: bool = False
) -> Chunks:
    """The text's chunks, before anything is converted (or, `made`, when the target has been).

    Raises UsageError if the text is too short, or what is no pack stands where the reference will be; StorageError if
    the disk has no room for that and for a target of 8 bits.
    """
    found = cut(Tokenizer.load(build_tokenizer(source.metadata)), text, context, chunks)
    reference = reference_of(target)
    check_output(reference, PACK)  # nothing but what is made here may be removed at the end
    plan = plan_pack(source, builtin("f32"), tokenizer=b"")
    need = plan.file_bytes
    if not made:
        need += plan_pack(source, builtin("int8"), tokenizer=b"").file_bytes
    try:
        free = shutil.disk_usage(target.absolute().parent).free
    except OSError as error:
        raise StorageError(f"{target.parent}: {error.strerror}") from None
    if free < need:
        what = (
            "the f32 reference to evaluate with takes"
            if made
            else "the pack and the f32 reference to evaluate with take"
        )
        raise StorageError(
            f"{reference}: {what} {need:,} bytes, the disk has {free:,}; make room, or leave --evaluate out"
        )
    return found


def evaluate(
    source: Source,
    target: Path,
    text: str,
    *,
    command: str,
    context: int = 512,
    chunks: int | None = None,
    max_ram: int,
    threads: int | None = None,
    converting: Progress | None = None,
    progress: Callable[[int, int, Comparison], None] | None = None,
) -> dict[str, Any]:
    """Runs the pack `target` beside its source on the CPU, chunk by chunk, and writes the note `quality`, which is
    returned: the text's digest, what `Comparison` has, and `command`, which finds
    it again. `progress(chunks, done, figures so far)`.

    The KV cache is f32 for both, so that weights and activations alone are judged. Raises UsageError for a text too
    short, StorageError where the disk has no room for the reference, and the errors of `convert`.
    """
    cut_text = check(source, target, text, context=context, chunks=chunks, made=True)
    reference = reference_of(target)
    with contextlib.ExitStack() as stack:
        packs = [stack.enter_context(Pack.open(target))]
        try:
            convert(source, reference, builtin("f32"), max_ram=max_ram, workers=threads, progress=converting)
            packs.append(stack.enter_context(Pack.open(reference)))
        finally:
            for suffix in ("", ".part", ".journal"):
                reference.with_name(reference.name + suffix).unlink(missing_ok=True)
        device, _ = open_device("cpu", threads=threads)
        stack.callback(device.close)
        ours, theirs = (Running(_engine(pack, device, context), cut_text) for pack in packs)
        found = compare(theirs, ours, cut_text, progress and partial(progress, len(cut_text))).summary()
    note = {
        "text": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
        "context": context,
        "chunks": len(cut_text),
        **found.record(),
        "command": command,
    }
    write_note(target, NOTE, note)
    return note


def _engine(pack: Pack, device: Device, context: int) -> Engine:
    ops = Ops(Stream(PackSource(pack), device), device)
    return Engine(ops, build_model(ops), context=context, half=False)
