"""What the measuring commands share: a text, models opened for it, a line that changes on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.cli.common import parse_size, progress_bar, say
from ork.cli.recipes import first_run_recipe
from ork.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column

    from ork.api import LoadedModel
    from ork.measure.compare import Comparison
    from ork.quant.recipe import Recipe

TEXT_LIMIT = 64 << 20
WIDE = 160  # characters of a table in a file or a pipe


def add_text(sub: argparse.ArgumentParser, *, required: bool = True) -> None:
    sub.add_argument("-f", "--file", type=Path, required=required, metavar="TEXT", help="the text, UTF-8")
    sub.add_argument("-c", "--context", type=int, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    sub.add_argument("--chunks", type=int, metavar="N", help="chunks at most (default: all)")


def converted(path: Path, args: argparse.Namespace, recipe: Recipe | None = None) -> Path:
    """The pack of a model, in the cache if `path` is none; `recipe` instead of the one asked for."""
    from ork.build.cache import cached_pack

    with progress_bar("converting") as progress:
        return cached_pack(
            path,
            recipe or first_run_recipe(args, path),
            max_ram=parse_size(args.max_ram),
            progress=progress,
            announce=say,
        )


def read_text(path: Path) -> str:
    """A text file. Raises UsageError if it cannot be read, is larger than TEXT_LIMIT or not UTF-8."""
    try:
        with path.open("rb") as f:
            data = f.read(TEXT_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(data) > TEXT_LIMIT:
        raise UsageError(f"{path}: the text is larger than {TEXT_LIMIT >> 20} MiB; cut it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; give a text file") from None


@contextlib.contextmanager
def opened(
    pack: Path, args: argparse.Namespace, *, device: str | None = None, options: dict[str, Any] | None = None
) -> Iterator[LoadedModel]:
    """A pack's model with a KV cache for one chunk, on `device` or that of --device; `options` are a window's."""
    from ork.api import LoadedModel
    from ork.pack.reader import Pack

    name = device or args.device
    with LoadedModel(
        Pack.open(pack),
        device=name,
        threads=args.threads,
        context=args.context,
        kv=args.kv,
        min_rows=args.min_rows if name == args.device else None,
        **(options or {}),
    ) as model:
        yield model


def json_text(record: Any, indent: int | None = None) -> str:
    """As JSON, which has no infinity and no NaN: null instead (the error of a single prediction, say)."""
    return json.dumps(_finite(record), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables() -> Console:
    """A console for tables of what files say: names are shown as they are, whatever brackets and colons they have, and
    no control character reaches a terminal. As wide as its tables where it is no terminal, unless COLUMNS says."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
            return super().render_str(shown, **how)

    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Plain(highlight=False, markup=False, emoji=False, width=None if told else WIDE)


def whole_names(header: str, names: Sequence[str]) -> Column:
    """A table's first column, as wide as its longest name: what is cut cannot be looked up."""
    from rich.table import Column

    return Column(header, no_wrap=True, min_width=max(map(len, names), default=0))


class Ticker:
    """One line on a terminal that every chunk overwrites; nothing elsewhere."""

    def __init__(self, total: int):
        self.total = total
        self.start = time.perf_counter()
        self.shown = sys.stderr.isatty()

    def __call__(self, done: int, text: str) -> None:
        if not self.shown:
            return
        left = (time.perf_counter() - self.start) / done * (self.total - done)
        sys.stderr.write(f"\r\x1b[Kchunk {done}/{self.total}: {text}, {left // 60:.0f}:{left % 60:02.0f} left")
        sys.stderr.write("\r\x1b[K" if done == self.total else "")
        sys.stderr.flush()


def text_to_evaluate(args: argparse.Namespace, path: Path, target: Path) -> str | None:
    """The text of `ork convert --evaluate`, None without it; what would keep it from being used is told here, before
    the conversion."""
    from ork.build.evaluate import check
    from ork.sources.base import open_source

    if args.evaluate is None:
        if args.evaluate_chunks is not None:
            raise UsageError("--evaluate-chunks bounds what a pack is evaluated on: it goes with --evaluate")
        return None
    if args.evaluate_chunks is not None and args.evaluate_chunks < 1:
        raise UsageError(f"--evaluate-chunks {args.evaluate_chunks}: give a number of chunks, 1 or more")
    text = read_text(args.evaluate)
    with contextlib.closing(open_source(path)) as source:
        check(source, target, text, chunks=args.evaluate_chunks)
    return text


def evaluate_pack(args: argparse.Namespace, path: Path, target: Path, text: str) -> None:
    """Measures the pack that was just made of `path` beside it, notes and says what was found."""
    from ork.build.evaluate import evaluate
    from ork.sources.base import open_source

    number = [] if args.evaluate_chunks is None else ["--chunks", str(args.evaluate_chunks)]
    command = ["ork", "ppl", target.name, "--against", path.name, "-f", args.evaluate.name, "--kv", "f32", *number]
    tick: list[Ticker] = []

    def beside(total: int, done: int, c: Comparison) -> None:
        if not tick:
            tick.append(Ticker(total))
        tick[0](done, f"perplexity {c.perplexity:.4f}, KL {c.kl:.5f}")

    with contextlib.closing(open_source(path)) as source, progress_bar("f32 reference") as converting:
        note = evaluate(
            source,
            target,
            text,
            command=shlex.join(command),
            chunks=args.evaluate_chunks,
            max_ram=parse_size(args.max_ram),
            threads=args.threads,
            converting=converting,
            progress=beside,
        )
    say(
        f"{target}: perplexity {note['perplexity']:.4f} ± {note['error']:.4f}, the source's {note['reference']:.4f}; "
        f"KL {note['kl']:.6f} ± {note['kl_error']:.6f}, same top token {100 * note['top1']:.2f} %; noted in the pack"
    )
