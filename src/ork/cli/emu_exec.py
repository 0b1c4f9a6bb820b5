"""`ork emu exec`: an unmodified program, with the emulated NPU behind its device nodes.

The program runs as a child with a preload library, which takes its calls to this process. What it does wrong on the
chip is told on stderr as it happens; its exit status is ours.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ork.errors import OrkError, UsageError

if TYPE_CHECKING:
    from ork.emulator.kernel import EmulatedKernel
    from ork.emulator.server import Server

LIBRARY = "libork_preload.so"
SHOWN = 3  # times that one rule or one refusal is told in full
_SWITCH_S = 2e-4  # a thread that answers a program is not kept waiting by one that emulates


def add(tool: argparse.ArgumentParser) -> None:
    tool.usage = "ork emu exec [OPTIONS] -- PROGRAM [ARGS]"
    mode = tool.add_mutually_exclusive_group()
    mode.add_argument(
        "--strict",
        dest="strict",
        action="store_true",
        default=True,
        help="what nobody has shown to work on the chip gives wrong results here (the default)",
    )
    mode.add_argument("--lenient", dest="strict", action="store_false", help="it works, and is told")
    tool.add_argument(
        "--profile",
        choices=("stock", "patched"),
        default="stock",
        help="the vendor's kernel driver (default), or one with oRKLLM's patches",
    )
    tool.add_argument(
        "--views",
        choices=("full", "sampled"),
        default="full",
        help="full (default): memory that was not synced is stale, as on the chip; sampled: a third of the memory, "
        "missing syncs found by spot checks",
    )
    tool.add_argument("--stats", action="store_true", help="print what the program did to stderr when it ends")
    tool.add_argument("command_line", metavar="-- PROGRAM ARGS", nargs=argparse.REMAINDER, help="what to run")


def run(args: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise UsageError("emu exec needs Linux: it answers Linux system calls")
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise UsageError("no program: say which after --, as in `ork emu exec -- ./program`")
    program = find(command[0])

    from ork.emulator import board
    from ork.emulator.kernel import HEAPS
    from ork.emulator.server import ServedKernel, Server

    sys.setswitchinterval(_SWITCH_S)
    kernel = ServedKernel(strict=args.strict, profile=args.profile, views=args.views, nodes=board.NODES)
    voice = Voice(kernel)
    version = kernel.soc.drv_version
    with tempfile.TemporaryDirectory(prefix="ork-emu-") as folder:
        board.make(
            Path(folder),
            [*board.NODES, *HEAPS],
            f"{version // 10000}.{version // 100 % 100}.{version % 100}",
        )
        server = Server(kernel, refused=voice.refused, after=voice.listen)
        try:
            code = child([program, *command[1:]], command[0], environment(server.name, folder))
        finally:
            left = server.open_descriptors
            server.close()
            voice.listen()
    if left:
        voice.say(f"{left} descriptors of the NPU were still open in processes that outlived the program")
    voice.finish(args.stats, server)
    return code


# --- the program ---


def find(name: str) -> str:
    """Path of a program that the preload library can reach. Raises UsageError."""
    path = shutil.which(name)
    if path is None:
        there = Path(name)
        why = "a folder" if there.is_dir() else "not executable" if there.exists() else "not found"
        raise UsageError(f"{name}: {why}: give an executable program, by path or by a name in PATH")
    if statically_linked(path):
        raise UsageError(
            f"{name}: statically linked, so no preload library reaches its calls: link it dynamically (without -static)"
        )
    if os.stat(path).st_mode & 0o6000 and os.geteuid():
        raise UsageError(f"{name}: set-user-id, which takes no preload library: run a copy without that bit")
    return path


def statically_linked(path: str) -> bool:
    """Whether an ELF file names no loader. False for scripts and whatever else the system may know to run."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02" or len(head) < 64:
            return False
        at = int.from_bytes(head[32:40], "little")
        size, count = int.from_bytes(head[54:56], "little"), int.from_bytes(head[56:58], "little")
        file.seek(at)
        table = file.read(size * count)
    return not any(table[i * size : i * size + 4] == b"\x03\0\0\0" for i in range(count))  # PT_INTERP


def library() -> Path:
    """The preload library, which is installed where the extension is. Raises OrkError."""
    from ork.native import _core

    path = Path(_core.__file__).parent.parent / "emulator" / "preload" / LIBRARY
    if not path.exists():
        raise OrkError(f"{path}: not there: build ork again; the preload library is built with its extension on Linux")
    return path


def environment(server: str, folder: str) -> dict[str, str]:
    from ork.emulator import wire

    others = os.environ.get("LD_PRELOAD")
    preload = f"{library()}:{others}" if others else str(library())
    return {**os.environ, "LD_PRELOAD": preload, wire.SERVER: server, wire.ROOT: folder}


def child(argv: list[str], name: str, env: dict[str, str]) -> int:
    """Run the program to its end; its exit status, or 128 + the signal that ended it."""
    # The terminal's signals reach the program too, and it decides; those sent to us alone are passed on.
    try:
        process = subprocess.Popen([name, *argv[1:]], executable=argv[0], env=env)
    except OSError as error:
        raise UsageError(f"{name}: cannot be run: {error.strerror}: is it made for this machine?") from None
    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for ignored in (signal.SIGINT, signal.SIGQUIT):
            before[ignored] = signal.signal(ignored, signal.SIG_IGN)
        for passed in (signal.SIGTERM, signal.SIGHUP):
            before[passed] = signal.signal(passed, lambda got, _: process.send_signal(got))
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    return code if code >= 0 else 128 - code


# --- what is told ---


class Voice:
    """Tells broken rules and refused calls on stderr, each a few times. Safe for threads."""

    def __init__(self, kernel: EmulatedKernel) -> None:
        self._kernel = kernel
        self._heard = 0
        self._told: Counter[str] = Counter()
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        print(f"ork emu: {text}", file=sys.stderr, flush=True)

    def listen(self) -> None:
        """Tell what was reported since the last time."""
        found = self._kernel.report.violations
        if len(found) == self._heard:
            return
        with self._lock:
            new = found[self._heard :]
            self._heard += len(new)
            for violation in new:
                self._tell(violation.rule, str(violation))

    def refused(self, call: str, error: int, reason: str) -> None:
        self.listen()  # the rule first, then what came of it
        with self._lock:
            self._tell(f"{call} {reason}", f"{call} fails with {errno.errorcode.get(error, error)}: {reason}")

    def _tell(self, key: str, text: str) -> None:
        self._told[key] += 1
        if self._told[key] <= SHOWN:
            self.say(text + (" (no more of these are shown)" if self._told[key] == SHOWN else ""))

    def finish(self, stats: bool, server: Server) -> None:
        counts, rules = self._kernel.stats, self._kernel.report.counts
        if stats:
            self.say(
                f"{counts.submits} submits, {counts.programs} programs, {counts.creates} buffers "
                f"({counts.created_bytes / 2**20:.1f} MiB), {counts.imports} imports, {counts.syncs} syncs, "
                f"{counts.timeouts} time-outs, {counts.resets} resets, {counts.switches} domain switches; "
                f"{self._kernel.clock_ns / 1e6:.3f} ms of simulated time; {server.calls} calls from "
                f"{len(server.clients)} processes"
            )
            if counts.live_buffers or counts.leaked_bytes:
                self.say(f"leaked: {counts.live_buffers} buffers, {counts.leaked_bytes} bytes of address space")
            if not server.calls:
                self.say("the program never opened a device node")
        if rules and stats:
            self.say("rules broken: " + ", ".join(f"{rule} ({n})" for rule, n in sorted(rules.items())))
        elif stats:
            self.say("no rule was broken")
