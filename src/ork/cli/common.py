"""What subcommands share: sizes, the model argument, progress on a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.emulator.kernel import EmulatedKernel

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of '512M', '2G', '1.5GiB' or a plain number. Raises UsageError."""
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = body[-1:] if body[-1:] in UNITS and body[-1:] else ""
    try:
        value = float(body.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < 1 << 60:
        raise UsageError(f"size {text!r}: write it like 512M or 2G")
    return int(value)


def size_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def codec_text(codec: str, group: int) -> str:
    return f"{codec} g{group}" if group else codec


def say(text: str) -> None:
    """A line on standard error."""
    print(f"ork: {text}", file=sys.stderr, flush=True)


def add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "model", metavar="MODEL", help="a .orkpack, a .gguf, a Hugging Face folder, a name, or hf:OWNER/REPO"
    )


def add_device(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "emu", "rk3588", "hybrid"),
        help="auto (default): hybrid on a board, else cpu; emu: the chip in software; hybrid: NPU for many rows",
    )
    sub.add_argument("--min-rows", type=int, metavar="N", help="rows from which hybrid uses the NPU (default: 32)")
    sub.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical, big cores)")


def add_fault(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--fault",
        metavar="SPEC",
        help="make the emulated board fail: KIND@NUMBER or KIND:PROBABILITY, separated by commas, seed=N; kinds: "
        "timeout, irq-lost, stale, enomem (by number of submit), create-enomem, create-efault (of buffer)",
    )


@contextmanager
def faulty_board(spec: str | None, device: str) -> Iterator[EmulatedKernel | None]:
    """The emulated board of `--fault`, whose last word goes to standard error; None without the flag."""
    if spec is None:
        yield None
        return
    from ork.emulator.faults import Faults
    from ork.emulator.kernel import EmulatedKernel
    from ork.emulator.summary import summary

    if device != "emu":
        raise UsageError("--fault makes the emulated board fail: it goes with --device emu")
    board = EmulatedKernel(views="sampled", faults=Faults(spec))
    try:
        yield board
    finally:
        say(f"emulated board: {summary(board)}")


def check_threads(count: int | None) -> None:
    """Raises UsageError before any work is done for a number that the kernels would refuse."""
    if count is not None and not 1 <= count <= 256:
        raise UsageError(f"--threads {count}: give a number from 1 to 256")


def resolve(model: str) -> Path:
    """The file or folder that MODEL names: a path, or what `ork pull` has fetched."""
    from ork.sources import hub

    return hub.resolve(model)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, total) in bytes that draws a bar with rate and ETA on a terminal, and nothing elsewhere."""
    with transfer_progress() as update:
        yield lambda done, total: update(label, done, total)


@contextmanager
def step_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, total) in steps that draws a bar with ETA on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def transfer_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback (label, done, total) in bytes, one bar a label."""
    if not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks = {}
    with bars:

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)

        yield update
