"""`ork qerr`: what quantisation changed, tensor by tensor, and where two packs or devices first differ on a text."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.cli.common import add_device, add_model, check_threads, codec_text, progress_bar, resolve
from ork.cli.measuring import add_text, converted, json_text, opened, read_text, tables, whole_names
from ork.cli.recipes import add_first_run
from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.measure.qerr import TensorError, Walk


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    sub.add_argument("--against", metavar="MODEL", help="the source, or another pack; a source is walked in f32")
    add_text(sub, required=False)
    sub.add_argument(
        "--against-device", metavar="DEVICE", help="walk the text on this device too (default: that of --device)"
    )
    sub.add_argument("--kv", choices=("f16", "f32"), default="f32", help="element type of the KV cache (default: f32)")
    add_first_run(sub)
    sub.add_argument("--json", action="store_true", help="one JSON object")
    add_device(sub)


def run(args: argparse.Namespace) -> int:
    check_threads(args.threads)
    if args.file is None:
        _check_no_walk(args)
    if args.chunks is not None:
        raise UsageError("--chunks: one chunk of -c tokens is walked through")
    path = resolve(args.model)
    against = resolve(args.against) if args.against else None
    text = None if args.file is None else read_text(args.file)
    if against is None and args.against_device is None:
        against = _own_source(path)
    tensors = None if against is None else _tensors(args, path, against)
    walked = None if text is None else _walk(args, path, against, text)
    if args.json:
        print(json_text(_record(tensors, walked), indent=1))
        return 0
    if tensors is not None:
        _show_tensors(tensors)
    if walked is not None:
        _show_walk(walked)
    return 0


def _check_no_walk(args: argparse.Namespace) -> None:
    """Raises UsageError for an option that says how a text is walked through, when there is none."""
    given = {
        "--against-device": args.against_device is not None,
        "--device": args.device != "auto",
        "--min-rows": args.min_rows is not None,
        "--kv": args.kv != "f32",
        "-c": args.context != 512,
        "--chunks": args.chunks is not None,
    }
    for option in (option for option, there in given.items() if there):
        raise UsageError(f"{option} is for walking through a text: give one with -f")


def _own_source(path: Path) -> Path:
    """What a model that is converted on the way is compared with: itself. Raises UsageError for a pack."""
    from ork.build.cache import is_pack

    if path.is_file() and is_pack(path):
        raise UsageError(f"{path}: a pack does not hold its source; name it, or another pack, with --against")
    return path


def _tensors(args: argparse.Namespace, path: Path, against: Path) -> list[TensorError]:
    from ork.build.cache import is_pack
    from ork.measure.qerr import PackWeights, SourceWeights, tensor_errors
    from ork.pack.reader import Pack
    from ork.sources.base import open_source

    with contextlib.ExitStack() as stack:
        ours = PackWeights(stack.enter_context(Pack.open(converted(path, args))), args.threads)
        if against.is_file() and is_pack(against):
            theirs: Any = PackWeights(stack.enter_context(Pack.open(against)), args.threads)
        else:
            theirs = SourceWeights(stack.enter_context(contextlib.closing(open_source(against))))
        progress = stack.enter_context(progress_bar("comparing"))
        return list(tensor_errors(ours, theirs, progress))


def _walk(args: argparse.Namespace, path: Path, against: Path | None, text: str) -> Walk:
    from ork.engine.session import CHUNK
    from ork.measure.perplexity import same_text
    from ork.measure.qerr import walk
    from ork.quant.recipe import builtin

    if args.context > CHUNK:
        raise UsageError(f"-c {args.context}: at most {CHUNK} tokens are walked through")
    pack = converted(path, args)
    other = pack if against is None else converted(against, args, builtin("f32"))
    with opened(pack, args) as ours, opened(other, args, device=args.against_device) as theirs:
        chunks = same_text([ours.tokenizer, theirs.tokenizer], text, args.context, 1)
        return walk(ours.engine, theirs.engine, chunks.tokens[0].tolist())


def _record(tensors: list[TensorError] | None, walked: Walk | None) -> dict[str, Any]:
    from ork.measure.qerr import by_layer

    record: dict[str, Any] = {}
    if tensors is not None:
        record |= {"tensors": [t.record() for t in tensors], "layers": by_layer(tensors)}
    if walked is not None:
        first, before = walked.first
        record["walk"] = {
            "layers": [d.record() for d in walked.layers],
            "inputs": [d.record() for d in walked.inputs],
            "first": first.record() if first else None,
            "equal_until": before,
        }
    return record


def _show_tensors(tensors: list[TensorError]) -> None:
    from rich.table import Table

    from ork.measure.qerr import by_layer

    console = tables()
    table = Table(whole_names("tensor", [t.name for t in tensors]), "codec", "bits", "error", "worst row", "at")
    for t in tensors:
        table.add_row(
            t.name, codec_text(t.codec, t.group), f"{t.bits:.3f}", f"{t.error:.6f}", f"{t.worst:.6f}", str(t.worst_row)
        )
    console.print(table)
    layers = Table("layer", "relative error")
    for name, error in by_layer(tensors).items():
        layers.add_row(name, f"{error:.6f}")
    console.print(layers)


def _show_walk(walked: Walk) -> None:
    from rich.table import Table

    console = tables()
    table = Table("hidden rows after", "relative error", "largest difference", "first row")
    for d in walked.layers:
        row = "equal" if d.row < 0 else str(d.row)
        table.add_row(d.place, f"{d.error:.6g}", f"{d.largest:.6g}", row)
    console.print(table)
    first, before = walked.first
    if first is None:
        print(f"no difference to the last bit: {len(walked.inputs)} inputs of linear layers, and the logits")
        return
    reads = "the logits" if first.place == "logits" else f"what {first.place} reads"
    equal = f"equal to the last bit until {before} inclusive" if before else "nothing before it is equal"
    print(f"first difference: {reads}, row {first.row}, relative error {first.error:.6g}; {equal}")
