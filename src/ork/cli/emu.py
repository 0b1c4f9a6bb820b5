"""`ork emu`: other people's programs for the chip, on the emulated one."""

from __future__ import annotations

import argparse
import importlib

# One module a tool, each with add(subparser) and run(args).
TOOLS = {
    "check": ("name the rules that a dump of programs breaks", "ork.cli.emu_check"),
    "record": ("run a program and write its submits to a file", "ork.cli.emu_record"),
    "replay": ("run a recording again, or compare two", "ork.cli.emu_replay"),
    "exec": ("run a program, its NPU calls answered by the emulator", "ork.cli.emu_exec"),
}


def add(sub: argparse.ArgumentParser) -> None:
    tools = sub.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for name, (text, module) in TOOLS.items():
        tool = tools.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        importlib.import_module(module).add(tool)


def run(args: argparse.Namespace) -> int:
    code: int = importlib.import_module(TOOLS[args.tool][1]).run(args)
    return code
