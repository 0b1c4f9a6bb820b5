"""`ork convert`: a model to a pack, with a bar; interrupted, it goes on where it stopped."""

from __future__ import annotations

import argparse
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ork.cli.calibration import add_allocation, calibration, gptq_tokens, measured, measured_recipe
from ork.cli.common import add_model, check_threads, parse_size, progress_bar, resolve, say, size_text
from ork.cli.measuring import evaluate_pack, text_to_evaluate
from ork.cli.recipes import add_recipe, recipe_of
from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.build.convert import Aids, Progress
    from ork.quant.recipe import Recipe
    from ork.sources.base import Source


class _Options(TypedDict):
    """What both ways to convert take."""

    aids: Aids
    allow_requantize: bool
    max_ram: int
    workers: int | None
    progress: Progress


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="the pack (default: beside the model)")
    add_recipe(sub)
    add_allocation(sub)
    sub.add_argument(
        "--imatrix", type=Path, metavar="FILE", help="importance of inputs, to weigh errors by (ork imatrix)"
    )
    sub.add_argument(
        "--allow-requantize", action="store_true", help="4 bits from a source that has about 4 bits already, at a loss"
    )
    sub.add_argument(
        "--gptq", action="store_true", help="round each column to make up for the errors of those before it, on a text"
    )
    sub.add_argument(
        "--calibrate", type=Path, metavar="TEXT", help="the text for that (default: the one that comes with ork)"
    )
    sub.add_argument(
        "--calibrate-tokens", type=int, metavar="N", help="tokens of it to look at (default: 16384; more: slower)"
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
    from ork.build.cache import is_pack
    from ork.build.convert import Aids, convert
    from ork.build.imatrix import read_imatrix
    from ork.build.measurements import beside
    from ork.files import check_output
    from ork.pack.format import PACK
    from ork.sources.base import open_source

    check_threads(args.threads)
    path = resolve(args.model)
    if path.is_file() and is_pack(path):
        raise UsageError(f"{path}: is a pack, which stays as it was made; convert the model that it was made of")
    target = args.output or _beside(path.absolute())
    check_output(target, PACK)
    max_ram = parse_size(args.max_ram)
    text = text_to_evaluate(args, path, target)
    seen = calibration(args.calibrate)  # read once: it may be a pipe
    aids = Aids(read_imatrix(args.imatrix) if args.imatrix else None)
    start = time.perf_counter()
    by_measuring = measured(args)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(open_source(path)))
        waiting = stack.enter_context(beside(target))
        recipe = measured_recipe(args, source, aids, seen, waiting) if by_measuring else recipe_of(args, source)
        progress = stack.enter_context(progress_bar(target.name))
        if args.gptq:
            recipe = recipe.with_gptq()
        if aids.importance:
            recipe = recipe.with_importance()
        options = _Options(
            aids=aids,
            allow_requantize=args.allow_requantize,
            max_ram=max_ram,
            workers=args.threads,
            progress=progress,
        )
        if recipe.calibrated:
            plain = _calibrated(args, source, target, recipe, seen[0], options)
        elif args.gptq:
            raise UsageError(f"recipe {recipe.name} rounds nothing, so that --gptq has nothing to make up for")
        elif args.calibrate_tokens is not None or (args.calibrate and not by_measuring):
            raise UsageError(f"recipe {recipe.name} looks at no text: --calibrate goes with --gptq")
        else:
            convert(source, target, recipe, **options)
            plain = []
    seconds = time.perf_counter() - start
    size = target.stat().st_size
    say(f"{target}: {size_text(size)} in {seconds:.1f} s ({size_text(size / seconds)}/s), recipe {recipe.name}")
    for line in plain:
        say(line)
    if text is not None:
        evaluate_pack(args, path, target, text)
    return 0


def _calibrated(
    args: argparse.Namespace, source: Source, target: Path, recipe: Recipe, text: str, options: _Options
) -> list[str]:
    """Converts with GPTQ; lines on what the text was too short for."""
    from ork.build.calibrate import convert_calibrated

    told = f"GPTQ on {args.calibrate or 'the text that comes with ork; --calibrate takes one nearer to your use'}"
    announce = partial(say, told)
    return convert_calibrated(
        source, target, recipe, text, tokens=gptq_tokens(args), announce=announce, **options
    ).lines()
