"""`ork emu record`: an unmodified program on the emulated NPU, with every submit written to a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ork.cli import emu_exec
from ork.cli.common import say, size_text


def add(tool: argparse.ArgumentParser) -> None:
    tool.description = (
        "Runs a program as `ork emu exec` does and writes each of its submits, with the memory it read and wrote, to a "
        "file for `ork emu replay`. Jobs run one at a time."
    )
    tool.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("program.orktrace"), help="default: program.orktrace"
    )
    emu_exec.add(tool)
    tool.usage = "ork emu record [-o FILE] [OPTIONS] -- PROGRAM [ARGS]"


def run(args: argparse.Namespace) -> int:
    """Exit status of the program."""
    from ork.emulator.orktrace import RECORDING
    from ork.emulator.record import Recorder
    from ork.files import check_output

    check_output(args.output, RECORDING)
    recorder = Recorder(args.output)
    try:
        return emu_exec.run(args, recorder)
    finally:
        recorder.close()
        if recorder.submits:
            say(f"{args.output}: {recorder.submits} submits, {size_text(args.output.stat().st_size)}")
