"""`ork emu replay`: a recording run again, or compared with another one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ork.cli.common import say
from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.emulator.orktrace import Recording
    from ork.emulator.replay import Found


def add(tool: argparse.ArgumentParser) -> None:
    tool.description = (
        "Runs every submit of a recording on the emulated cores and says what comes out otherwise than recorded: "
        "outcomes, broken rules, output bytes. Exit code 1 if anything does."
    )
    tool.add_argument("file", metavar="FILE", type=Path, help="an .orktrace of `ork emu record`")
    tool.add_argument("--engine", default="fast", choices=("fast", "literal"), help="literal: by the book, slow")
    what = tool.add_mutually_exclusive_group()
    what.add_argument("--diff", metavar="OTHER", type=Path, help="run nothing: compare with another recording")
    what.add_argument(
        "--words", metavar="SUBMIT", type=int, help="run nothing: the raw words of that submit's programs to stdout"
    )


def run(args: argparse.Namespace) -> int:
    from ork.emulator.orktrace import Recording
    from ork.emulator.replay import compare, replay

    with ExitStack() as opened:
        one = opened.enter_context(Recording(args.file))
        if args.words is not None:
            return _dump(one, args.words)
        files = [one]
        if args.diff is None:
            found = replay(one, engine=args.engine)
        else:
            files.append(opened.enter_context(Recording(args.diff)))
            found = compare(*files)
        submits, differing = _print(found)
        for file in files:
            if not file.complete:
                say(f"{file.path} has no end: it was cut off, and is good up to there")
    print(f"{submits} submits, {differing} {'differ' if differing != 1 else 'differs'}")
    return int(differing > 0)


def _dump(recording: Recording, number: int) -> int:
    from ork.emulator.replay import chain_image

    for event in recording.submits:
        if event.number == number:
            sys.stdout.buffer.write(chain_image(event, dict(recording.pages(event.before))).tobytes())
            return 0
    raise UsageError(f"{recording.path}: no submit {number} in it")


def _print(found: Iterator[Found]) -> tuple[int, int]:
    submits = differing = 0
    for one in found:
        submits += 1
        differing += bool(one.lines)
        for line in one.lines:
            print(f"submit {one.number}: {line}")
    return submits, differing
