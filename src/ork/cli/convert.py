"""`ork convert`: a model to a pack, with a bar; interrupted, it goes on where it stopped."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

from ork.cli.common import add_model, check_threads, parse_size, progress_bar, resolve, say, size_text
from ork.cli.measuring import evaluate_pack, text_to_evaluate
from ork.cli.recipes import add_recipe, recipe_of


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="the pack (default: beside the model)")
    add_recipe(sub)
    sub.add_argument(
        "--imatrix", type=Path, metavar="FILE", help="importance of inputs, to weigh errors by (ork imatrix)"
    )
    sub.add_argument(
        "--allow-requantize", action="store_true", help="4 bits from a source that has about 4 bits already, at a loss"
    )
    sub.add_argument(
        "--evaluate", type=Path, metavar="TEXT", help="then measure what it cost on this text, and note it in the pack"
    )
    sub.add_argument("--evaluate-chunks", type=int, metavar="N", help="chunks of 512 tokens at most (default: all)")
    sub.add_argument("--max-ram", default="2G", metavar="SIZE", help="memory to use at most (default: 2G)")
    sub.add_argument("--threads", type=int, metavar="N", help="slices to work on at a time (default: all processors)")


def _beside(path: Path) -> Path:
    """model.gguf -> model.orkpack; a folder's name is kept whole, dots and all."""
    return path.parent / f"{path.name if path.is_dir() else path.stem}.orkpack"


def run(args: argparse.Namespace) -> int:
    from ork.build.convert import Aids, convert
    from ork.build.imatrix import read_imatrix
    from ork.sources.base import open_source

    check_threads(args.threads)
    path = resolve(args.model)
    target = args.output or _beside(path.absolute())
    text = text_to_evaluate(args, path)
    aids = Aids(read_imatrix(args.imatrix) if args.imatrix else None)
    start = time.perf_counter()
    with contextlib.closing(open_source(path)) as source, progress_bar(target.name) as progress:
        recipe = recipe_of(args, source)
        convert(
            source,
            target,
            recipe.with_importance() if aids.importance else recipe,
            aids=aids,
            allow_requantize=args.allow_requantize,
            max_ram=parse_size(args.max_ram),
            workers=args.threads,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    size = target.stat().st_size
    say(f"{target}: {size_text(size)} in {seconds:.1f} s ({size_text(size / seconds)}/s), recipe {recipe.name}")
    if text is not None:
        evaluate_pack(args, path, target, text)
    return 0
