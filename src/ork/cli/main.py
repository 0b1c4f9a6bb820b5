"""Entry point of `ork`: parses, dispatches, and turns every expected error into one line and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ork import __version__
from ork.errors import OrkError

COMMANDS = {
    "run": "generate text or chat with a model",
    "convert": "make a .orkpack from a GGUF file or a Hugging Face folder",
    "pull": "fetch a model by name, from a hub, or check a path",
    "bench": "measure prefill and decode speed",
    "inspect": "show what a pack or a source holds",
    "verify": "check every hash of a pack",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="ork",
        description="Large language models on RK3588 boards and on any CPU.",
        epilog="`ork COMMAND --help` has the details. Models: a path, hf:OWNER/REPO[:QUANT], or a name (`ork pull`).",
    )
    top.add_argument("--version", action="version", version=f"ork {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        importlib.import_module(f"ork.cli.{name}").add(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 2 an error that was explained, 130 interrupted."""
    try:
        args = parser().parse_args(argv)
        code = importlib.import_module(f"ork.cli.{args.command}").run(args)
        sys.stdout.flush()
        return int(code or 0)
    except OrkError as error:
        print(f"ork: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ork: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing to say
        return 0
    except MemoryError:
        print("ork: not enough memory: close other programs or take a smaller model", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
