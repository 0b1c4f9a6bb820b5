"""`ork emu exec`: an unmodified program, with the emulated NPU behind its device nodes."""

from __future__ import annotations

import argparse

from ork.errors import UsageError


def add(tool: argparse.ArgumentParser) -> None:
    tool.add_argument("command_line", metavar="-- PROGRAM ARGS", nargs=argparse.REMAINDER, help="what to run")


def run(args: argparse.Namespace) -> int:
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise UsageError("no program: say which after --, as in `ork emu exec -- ./program`")
    raise UsageError(f"{command[0]}: the preload library is not built")
