"""`ork emu exec`: programs that know nothing of the emulator, in C and Python, on the emulated board.

`tests/clients` holds them. Each exits with 0 only if what the chip computed is what the program computes itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
CLIENTS = Path(__file__).parent.parent / "clients"
PYTHON_CLIENT = [sys.executable, str(CLIENTS / "client.py")]


def compiled(out: Path, *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    # Fortified, as distributions build programs: open and readlink are other symbols then.
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", *flags]
    sources = sorted(map(str, CLIENTS.glob("*.c")))
    subprocess.run([compiler, *options, "-o", str(out), *sources, "-lpthread", "-lm"], check=True)
    return out


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("client") / "client")


def ork_exec(*command: str | Path, options: tuple[str, ...] = (), **more: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ork.cli.main", "emu", "exec", *options, "--", *map(str, command)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, **more)  # type: ignore[call-overload]


def passes(done: subprocess.CompletedProcess[str], test: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"ok {test}"


def each(client: Path, tests: list[str]) -> str:
    """Run tests one after the other as processes on one board; what was said of them."""
    script = 'client=$1; shift; for test; do "$client" $test || echo "bad $test"; done'
    done = ork_exec("sh", "-c", script, "sh", client, *tests, options=("--stats",))
    ran = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "bad "))]
    assert sorted(set(ran)) == sorted(f"ok {test}" for test in tests), done.stderr
    return done.stderr


def test_programs_compute(client: Path) -> None:
    said = each(client, ["int8", "fp16", "int4", "uncached", "conv", "add", "pool", "silu"])
    assert "left behind: nothing" in said
    assert "error" not in said


def test_programs_use_the_driver_as_on_a_board(client: Path) -> None:
    tests = "version nonblock domains import export processes fork threads exec lifetime reopen errors closefrom passed"
    said = each(client, [*tests.split(), "old", "killed"])
    assert "left behind: nothing" in said
    assert "error domain-range" in said


def test_there_may_be_more_buffers_than_open_files(client: Path) -> None:
    line = [sys.executable, "-m", "ork.cli.main", "emu", "exec", "--", str(client), "many"]
    limited = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", *line]
    passes(subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False), "many")


# A register's wrong value, the rule that names it, and how the program ends: 1 wrong results, 3 a failed submit.
BROKEN = [
    ("int8", "0x1034=0x50", "error weight-size", "CNA.WEIGHT_SIZE0", 1),
    ("int8", "0x1110=0x1000", "error unmapped-address", "CNA.DCOMP_ADDR0", 3),
    ("fp16", "0x4010=0x80000000", "error precision-mix", "DPU.DATA_FORMAT", 3),
    ("int4", "0x3018=31", "error output-size", "DPU.DATA_CUBE_CHANNEL", 3),
    ("conv", "0x1028=7", "error output-size", "CNA.DATA_SIZE3", 3),
    ("add", "0x5034=1", "error operand-missing", "DPU_RDMA.RDMA_ERDMA_CFG", 3),
    ("pool", "0x6018=9", "error pool-size", "PPU.DATA_CUBE_OUT_WIDTH", 3),
    ("silu", "0x5018=0x1000", "error unmapped-address", "DPU_RDMA.RDMA_SRC_BASE_ADDR", 3),
    ("nonblock", "0x4010=0x48000002", "error precision-mix", "DPU.DATA_FORMAT", 1),
]


@pytest.mark.parametrize(("test", "change", "rule", "register", "code"), BROKEN)
def test_one_wrong_register_is_named(client: Path, test: str, change: str, rule: str, register: str, code: int) -> None:
    done = ork_exec(client, test, "--break", change)
    assert rule in done.stderr
    assert register in done.stderr
    assert done.returncode == code


def test_every_node_that_programs_have_written_down_is_the_npu(client: Path) -> None:
    nodes = [f"/dev/dri/{name}" for name in ("card0", "card1", "card2", "renderD128", "renderD129", "renderD130")]
    done = ork_exec("sh", "-c", "client=$1; shift; for node; do $client int8 $node || exit; done", "sh", client, *nodes)
    assert done.stdout.splitlines() == ["ok int8"] * len(nodes)
    assert done.stderr.count("unproven render-node") == 3


@pytest.mark.parametrize("test", ["matmul", "files"])
def test_python_programs_run(test: str) -> None:
    done = ork_exec(*PYTHON_CLIENT, test)
    passes(done, test)
    assert not done.stderr


def test_a_wrong_register_of_a_python_program_is_named() -> None:
    done = ork_exec(*PYTHON_CLIENT, "matmul", "0x1034=0x50")
    assert done.returncode == 1
    assert "error weight-size" in done.stderr
    assert "CNA.WEIGHT_SIZE0" in done.stderr


def test_ork_itself_runs_under_it_as_on_a_board() -> None:
    """The same probe through Linux's calls and through the emulated kernel in its own process says the same."""
    probe = [sys.executable, "-m", "ork.cli.main", "npu", "probe", "persist", "--device"]
    done = ork_exec(*probe, "rk3588", options=("--stats",))
    assert done.returncode == 0, done.stderr
    alone = subprocess.run([*probe, "emu"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == alone.stdout
    assert "left behind: nothing" in done.stderr


def test_scripts_and_programs_with_an_empty_environment_reach_the_chip(client: Path) -> None:
    passes(ork_exec("sh", "-c", f"env -i {client} int8"), "int8")
    passes(ork_exec(sys.executable, "-c", f"import os; os.execve('{client}', ['client', 'int8'], {{}})"), "int8")


def test_the_exit_status_is_the_programs() -> None:
    assert ork_exec("sh", "-c", "kill -SEGV $$").returncode == 128 + signal.SIGSEGV
    done = ork_exec("sh", "-c", "cat; echo err >&2; exit 7", input="through")
    assert (done.returncode, done.stdout, done.stderr) == (7, "through", "err\n")


def test_a_signal_to_us_is_the_programs() -> None:
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    line = [sys.executable, "-m", "ork.cli.main", "emu", "exec", "--", "sh", "-c", script]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "got\n"
    assert process.returncode == 5


def test_what_is_left_open_is_told_and_survivors_get_an_error(client: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = (
        "import fcntl, os, sys, time\n"
        "npu = os.open('/dev/dri/card1', os.O_RDWR)\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "deadline = time.monotonic() + 60\n"
        "error = 0\n"
        "while not error and time.monotonic() < deadline:\n"
        "    time.sleep(0.02)\n"
        "    try: fcntl.ioctl(npu, 0xC0086440, b'\\1' + bytes(7))\n"
        "    except OSError as failed: error = failed.errno\n"
        f"open('{said}.part', 'w').write(str(error)); os.rename('{said}.part', '{said}')\n"
    )
    line = [sys.executable, "-m", "ork.cli.main", "emu", "exec", "--", sys.executable, "-c", script]
    with (tmp_path / "err").open("w") as err:
        assert subprocess.run(line, stderr=err, stdout=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
    assert "1 descriptors of the NPU were still open" in (tmp_path / "err").read_text()
    deadline = time.monotonic() + 60
    while not said.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said.read_text() == "19"  # ENODEV


def test_strict_and_lenient(client: Path) -> None:
    # Weights of another size than the registers say: poisoned in strict mode, computed as written in lenient mode.
    assert ork_exec(client, "int8", "--break", "0x1030=0x100").returncode == 1
    done = ork_exec(client, "int8", "--break", "0x1030=0x100", options=("--lenient",))
    passes(done, "int8")
    assert "weight-size" in done.stderr


def test_a_sync_that_is_missing_is_named(client: Path) -> None:
    script = CLIENTS / "client.py"
    text = script.read_text().replace("for buffer in (a, b, c):\n        buffer.sync(1)", "c.sync(1)")
    for views in ("full", "sampled"):
        done = ork_exec(sys.executable, "-c", text, "matmul", options=("--views", views))
        assert done.returncode == 1
        assert "error missing-sync" in done.stderr


def test_profile_faults_and_trace(client: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    done = ork_exec(client, "int8", options=("--trace", str(trace), "--profile", "patched"))
    passes(done, "int8")
    assert any(event["name"].startswith("submit") for event in json.loads(trace.read_text())["traceEvents"])
    done = ork_exec(client, "int8", options=("--fault", "timeout@1", "--stats"))
    assert done.returncode == 3
    assert "Connection timed out" in done.stderr
    assert "faults: timeout 1" in done.stderr
    assert "left behind: nothing" in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "no program"),
        (["/no/such/program"], "not found"),
        ([str(CLIENTS)], "a folder"),
        ([str(CLIENTS / "client.c")], "not executable"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(command: list[str], says: str) -> None:
    done = ork_exec(*command)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_static_programs_and_wrong_machines_are_refused(tmp_path: Path) -> None:
    static = compiled(tmp_path / "static", "-static")
    done = ork_exec(static, "int8")
    assert done.returncode == 2
    assert "statically linked" in done.stderr
    foreign = tmp_path / "foreign"
    raw = bytearray(Path(sys.executable).resolve().read_bytes()[:4096])
    raw[18:20] = (0x1234).to_bytes(2, "little")
    foreign.write_bytes(raw)
    foreign.chmod(0o755)
    done = ork_exec(foreign)
    assert done.returncode == 2
    assert "is it made for this machine" in done.stderr


def test_nothing_stays_behind(client: Path, tmp_path: Path) -> None:
    passes(ork_exec(client, "int8", env={**os.environ, "TMPDIR": str(tmp_path)}), "int8")
    assert list(tmp_path.iterdir()) == []
