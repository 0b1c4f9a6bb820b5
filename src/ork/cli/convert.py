"""`ork convert`: a model to a pack, with a bar; interrupted, it goes on where it stopped."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

from ork.cli.common import add_model, check_threads, parse_size, progress_bar, resolve, say, size_text


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="the pack (default: beside the model)")
    sub.add_argument("--codec", default="i8", choices=("i8", "f32"), help="how weights are stored (default: i8)")
    sub.add_argument("--no-rotate", action="store_true", help="plain int8 without the Hadamard rotation, to compare")
    sub.add_argument("--max-ram", default="2G", metavar="SIZE", help="memory to use at most (default: 2G)")
    sub.add_argument("--threads", type=int, metavar="N", help="slices to work on at a time (default: all processors)")


def _beside(path: Path) -> Path:
    """model.gguf -> model.orkpack; a folder's name is kept whole, dots and all."""
    return path.parent / f"{path.name if path.is_dir() else path.stem}.orkpack"


def run(args: argparse.Namespace) -> int:
    from ork.build.convert import convert
    from ork.quant.recipe import builtin
    from ork.sources.base import open_source

    check_threads(args.threads)
    path = resolve(args.model)
    target = args.output or _beside(path.absolute())
    recipe = builtin(args.codec, rotate=not args.no_rotate)
    start = time.perf_counter()
    with contextlib.closing(open_source(path)) as source, progress_bar(target.name) as progress:
        convert(source, target, recipe, max_ram=parse_size(args.max_ram), workers=args.threads, progress=progress)
    seconds = time.perf_counter() - start
    size = target.stat().st_size
    say(f"{target}: {size_text(size)} in {seconds:.1f} s ({size_text(size / seconds)}/s), recipe {recipe.name}")
    return 0
