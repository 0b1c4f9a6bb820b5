"""`ork npu`: tools for people who work on the chip's programs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.errors import SourceError

if TYPE_CHECKING:
    from ork.npu.isa import Words

MAX_BYTES = 16 << 20  # the longest chain, 4095 programs, is under 4 MiB


def add(sub: argparse.ArgumentParser) -> None:
    tools = sub.add_subparsers(dest="tool", metavar="TOOL", required=True)
    disasm = tools.add_parser("disasm", help="print a register-command program as the datasheet would")
    disasm.add_argument("file", metavar="FILE", type=Path, help="little-endian 64-bit words, or a captured JSON")
    disasm.add_argument(
        "--diff", metavar="OTHER", type=Path, help="show only the registers that differ; exit code 1 if any does"
    )
    probe = tools.add_parser(
        "probe",
        help="what the NPU can do, and where it breaks",
        description="Runs into the limits of the NPU's memory on purpose: on a board, stop everything else that uses "
        "the NPU first. `import` loses 4 MiB of address space of domain 1 until reboot on a stock kernel.",
    )
    probe.add_argument("what", choices=PROBES, help="; ".join(f"{name}: {text}" for name, text in PROBES.items()))
    probe.add_argument("--device", default="emu", choices=("emu", "rk3588"), help="the emulated chip or this board's")


PROBES = {
    "dma": "buffers until a domain is full",
    "stream": "whether freed address space comes back",
    "persist": "whether a reloaded weight is the packed one",
    "import": "sizes and numbers of dma-heap imports that work",
    "vector": "whether element-wise operations, tables and int8 results are right",
}


def run(args: argparse.Namespace) -> int:
    return {"disasm": disasm, "probe": probe}[args.tool](args)


def probe(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ork.cli.common import say
    from ork.emulator.kernel import EmulatedKernel
    from ork.npu import probe as probes
    from ork.npu.kernel import LinuxKernel

    emulated = EmulatedKernel(views="sampled") if args.device == "emu" else None
    console = Console(highlight=False)
    for found in probes.run(args.what, emulated or LinuxKernel()):
        table = Table(*found.header, title=found.title, title_justify="left")
        for row in found.rows:
            table.add_row(*row)
        console.print(table)
        console.print(found.finding, markup=False)
    if emulated and emulated.report.counts:
        say("rules met: " + ", ".join(f"{rule} {n}" for rule, n in sorted(emulated.report.counts.items())))
    return 0


def disasm(args: argparse.Namespace) -> int:
    from ork.npu.disasm import diff, lines, listing

    words = read_words(args.file)
    if args.diff is None:
        for row in listing(lines(words)):
            print(row)
        return 0
    differs = False
    for found in diff(words, read_words(args.diff)):
        print(found)
        differs = True
    return int(differs)


def read_words(path: Path) -> Words:
    """Words of a raw or JSON dump. Raises SourceError for a file that holds anything else."""
    return words_of(*read_dump(str(path)))


def read_dump(name: str) -> tuple[str, bytes]:
    """What messages call it, and the bytes of a file or, for "-", of standard input. Raises SourceError."""
    try:
        if name == "-":
            name, file = "standard input", sys.stdin.buffer
            data = file.read(MAX_BYTES + 1)
        else:
            with open(name, "rb") as opened:
                data = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SourceError(f"{name}: {getattr(error, 'strerror', None) or error}: give a file of words") from None
    if not data or len(data) > MAX_BYTES:
        raise SourceError(f"{name}: {'empty' if not data else 'more than 16 MiB'}: give a dump of command words")
    return name, data


def words_of(path: str, data: bytes) -> Words:
    """Words in the bytes of a raw or JSON dump; `path` is for messages. Raises SourceError."""
    import numpy as np

    from ork.npu.isa import BLOCKS, ENABLE_TARGET, MARKER_TARGET, NO_TARGETS

    if data.lstrip()[:1] in (b"{", b"["):
        words = _json_words(path, data)
    elif len(data) % 8:
        raise SourceError(f"{path}: {len(data)} bytes are no whole number of 64-bit words")
    else:
        words = np.frombuffer(data, dtype="<u8").astype(np.uint64)
    known = {*NO_TARGETS, MARKER_TARGET, ENABLE_TARGET, *(block.target for block in BLOCKS.values())}
    bad = np.flatnonzero(~np.isin(words >> np.uint64(48), list(known)))
    if len(bad):
        first = int(bad[0])
        raise SourceError(
            f"{path}: word {first} (byte {8 * first} of the words) is {int(words[first]):#018x}, whose target "
            f"{int(words[first]) >> 48:#06x} is no block of the NPU: give little-endian register-command words"
        )
    if not words.any():
        raise SourceError(f"{path}: all {len(words)} words are zero: there is no program in it")
    return words


def _json_words(path: str, data: bytes) -> Words:
    import numpy as np

    try:
        about: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise SourceError(f"{path}: neither JSON nor 64-bit command words") from None
    listed = about.get("words") if isinstance(about, dict) else about
    if not isinstance(listed, list) or not listed:
        raise SourceError(f'{path}: no list "words" in it: only captures with raw words can be disassembled')
    words = np.zeros(len(listed), np.uint64)
    for i, item in enumerate(listed):
        try:
            words[i] = value = item if type(item) is int else int(item, 16)
            if not 0 <= value < 1 << 64:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise SourceError(f"{path}: words[{i}] is {str(item)[:40]!r}, not a 64-bit number in hex") from None
    return words
