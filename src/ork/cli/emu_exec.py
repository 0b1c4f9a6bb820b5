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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ork.cli.common import add_fault
from ork.errors import OrkError, UsageError

if TYPE_CHECKING:
    from ork.emulator.kernel import EmulatedKernel
    from ork.emulator.record import Recorder

LIBRARY = "libork_preload.so"
SHOWN = 3  # times that one rule or one refusal is told in full
_LISTEN_S = 0.2
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
    add_fault(tool)
    tool.add_argument("--trace", metavar="FILE", type=Path, help="write what the cores did, for chrome://tracing")
    tool.add_argument("--stats", action="store_true", help="print what the program did to stderr when it ends")
    tool.add_argument("command_line", metavar="-- PROGRAM ARGS", nargs=argparse.REMAINDER, help="what to run")


def run(args: argparse.Namespace, recorder: Recorder | None = None) -> int:
    """Exit status of the program. `recorder` is told of every job, and closed by the caller."""
    if sys.platform != "linux":
        raise UsageError("ork emu runs programs on Linux only: it answers Linux system calls")
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise UsageError("no program: say which after --, as in `ork emu exec -- ./program`")
    program = find(command[0])

    from ork.emulator import board
    from ork.emulator.faults import Faults
    from ork.emulator.kernel import HEAPS
    from ork.emulator.server import ServedKernel, Server
    from ork.emulator.summary import summary
    from ork.emulator.trace import Trace
    from ork.files import TRACE, check_output

    faults = Faults(args.fault) if args.fault is not None else None
    trace = None
    if args.trace is not None:
        check_output(args.trace, TRACE)
        args.trace.open("w").close()  # better now than when the program has run for an hour
        trace = Trace()
    sys.setswitchinterval(_SWITCH_S)
    kernel = ServedKernel(
        strict=args.strict,
        profile=args.profile,
        views=args.views,
        nodes=board.NODES,
        faults=faults,
        recorder=recorder,
        trace=trace,
    )
    voice = Voice(kernel)
    version = kernel.soc.drv_version
    with tempfile.TemporaryDirectory(prefix="ork-emu-") as folder:
        board.make(Path(folder), [*board.NODES, *HEAPS], f"{version // 10000}.{version // 100 % 100}.{version % 100}")
        server = Server(kernel, refused=voice.refused, after=voice.listen)
        try:
            code = child(program, command, environment(server.name, folder), voice.listen)
        finally:
            left = server.open_descriptors
            server.close()
            voice.listen()
            if trace is not None:
                trace.save(args.trace)
    if left:
        voice.say(f"{left} descriptors of the NPU were still open in processes that outlived the program")
    if args.stats:
        if not server.calls:
            voice.say("the program never opened a device node")
        voice.say(f"{summary(kernel)}; {server.calls} calls from {len(server.clients)} processes")
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


def child(path: str, argv: list[str], env: dict[str, str], listen: Callable[[], None]) -> int:
    """Run the program to its end; its exit status, or 128 + the signal that ended it. `listen` is called meanwhile."""
    with signals_passed() as to:
        try:
            process = subprocess.Popen(argv, executable=path, env=env)
        except OSError as error:
            raise UsageError(f"{argv[0]}: cannot be run: {error.strerror}: is it made for this machine?") from None
        to(process)
        files_for_buffers()
        while True:
            try:
                code = process.wait(_LISTEN_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                listen()  # what NONBLOCK jobs ran into while the program polls its memory


def files_for_buffers() -> None:
    """Each buffer takes a descriptor here: allow as many as may be. The program has the old limit."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def signals_passed() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """The program decides about signals: those of the terminal reach it too, those sent to us alone are passed on.

    Gives what takes the process once it runs.
    """
    early: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        if running:
            running[0].send_signal(number)
        else:
            early.append(number)

    def started(process: subprocess.Popen[bytes]) -> None:
        running.append(process)
        for number in early:
            process.send_signal(number)

    ours = {signal.SIGINT: lambda *_: None, signal.SIGQUIT: lambda *_: None}
    ours |= {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    if threading.current_thread() is not threading.main_thread():
        ours = {}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
