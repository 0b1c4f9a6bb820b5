"""Entry point of `ork`: parses, dispatches, and turns every expected error into one line and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from ork import __version__
from ork.errors import OrkError, UsageError

COMMANDS = {
    "run": "generate text or chat with a model",
    "convert": "make a .orkpack from a GGUF file or a Hugging Face folder",
    "imatrix": "measure how much each input of each weight matters on a text",
    "pull": "fetch a model by name, from a hub, or check a path",
    "bench": "measure prefill and decode speed",
    "inspect": "show what a pack holds",
    "verify": "check every hash of a pack",
    "ppl": "measure perplexity on a text, and KL divergence from a reference",
    "qerr": "measure what quantisation changed: by tensor, and where two models first differ",
    "skew": "measure which experts a text chooses, and what a cache of them would hit",
    "diff": "show how two packs differ: recipe, codecs, bytes, quality",
    "npu": "work on programs of the NPU: disassemble, compare",
    "emu": "run other programs of the chip on the emulated one",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    top = Parser(
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
    """Runs one command. Exit codes: 0 done, 2 an error that was explained, 130 interrupted, 143 terminated."""
    _standard_streams()
    if argv is None:  # a program of its own, no part of one
        signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _warn  # type: ignore[assignment]  # it needs the message alone
    try:
        args = parser().parse_args(argv)
        code = importlib.import_module(f"ork.cli.{args.command}").run(args)
        sys.stdout.flush()
        return int(code or 0)
    except OrkError as error:
        return _explain(str(error), 2)
    except KeyboardInterrupt:
        return _explain("interrupted", 130)
    except BrokenPipeError:
        _drop_output()  # the reader went away: nothing to say
        return 0
    except MemoryError:
        return _explain("not enough memory: close other programs or take a smaller model", 2)
    except OSError as error:
        if error.filename is None:
            _drop_output()
        return _explain(f"{error.filename or 'standard output'}: {error.strerror or error}", 2)


def _terminate(number: int, _: FrameType | None) -> None:
    """Files half written are removed and the chip's memory is given back on the way out; a second one ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _warn(message: Warning | str, *_: object) -> None:
    _explain(f"warning: {message}", 0)


def _explain(text: str, code: int) -> int:
    """One line whatever is in the text; what a file made up reaches no terminal as a control character."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    print(f"ork: {line}", file=sys.stderr)
    return code


def _standard_streams() -> None:
    """Closed ones lead nowhere; text that a terminal cannot show does not end the program."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and name == "stdout":
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """What is still buffered would fail again when the interpreter flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
