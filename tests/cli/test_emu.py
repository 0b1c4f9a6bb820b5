"""`ork emu` and the emulated board under `ork run`: right, or one clear line."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.cli.main import main, parser
from ork.emulator.faults import KINDS
from ork.emulator.review import review
from ork.emulator.rules import RULES
from ork.npu import isa
from tests.cli.conftest import SAID, Ork
from tests.emulator.programs import FP16, INT4, INT8, Board, Kind, matmul, words
from tests.emulator.test_captures_run import FILES, ROOT
from tests.emulator.test_record import products, record

# --- ork run --fault ---


@pytest.mark.filterwarnings("ignore:the NPU did not answer")
@pytest.mark.parametrize("spec", ["timeout@12,stale@3,enomem@40,irq-lost@7", "timeout:0.3,seed=2", "stale@1"])
def test_a_failing_board_still_says_it(ork: Ork, pack: Path, spec: str) -> None:
    code, out, err = ork("run", pack, "-p", "T", "--device", "emu", "--fault", spec)
    assert (code, out) == (0, SAID[1:] + "\n")
    last = err.splitlines()[-1]
    assert last.startswith("ork: emulated board: ")
    assert "left behind: nothing" in last
    assert "faults: " in last


def test_a_board_without_memory_ends_in_one_line(ork: Ork, pack: Path) -> None:
    code, out, err = ork("run", pack, "-p", "T", "--device", "emu", "--fault", "create-efault@4")
    board, why = err.splitlines()
    assert (code, out) == (2, "")
    assert "left behind: nothing" in board
    assert "the address space of the domain is full (errno 14)" in why


def test_faults_need_the_emulated_board(refused: Callable[..., str], pack: Path) -> None:
    assert "--device emu" in refused("run", pack, "-p", "T", "--fault", "timeout@1")
    assert "write KIND@NUMBER" in refused("run", pack, "-p", "T", "--device", "emu", "--fault", "timeout")


# --- ork emu check ---


def programs_dump(*registers: dict[int, int], base: int = 0x8000_0000, amount: int | None = None) -> bytes:
    """A chain as it lies in memory, each program on 64 bytes."""
    sizes = [-(-(len(r) + 4) // 8) * 8 for r in registers]
    raw = np.zeros(sum(sizes), np.uint64)
    at = 0
    for i, (body, size) in enumerate(zip(registers, sizes)):
        last = i + 1 == len(registers)
        following = 0 if last else base + 8 * (at + size)
        fetch = 0 if last else amount or isa.fetch_amount(len(registers[i + 1]))
        raw[at : at + len(body) + 4] = words(body, following, fetch)
        at += size
    return raw.tobytes()


def test_a_good_chain_breaks_nothing(ork: Ork, tmp_path: Path) -> None:
    dump = tmp_path / "chain.bin"
    dump.write_bytes(programs_dump(*[matmul(INT8, m, 96, 64) for m in (1, 4, 33)]))
    assert ork("emu", "check", dump) == (0, "3 programs, 0 errors, 0 other findings\n", "")


BROKEN = {
    "bank-split": {0x1040: 0xCC},
    "weight-size": {0x1034: 95},
    "output-size": {0x4034: 7},
    "precision-mix": {0x3010: 0x201},
    "n-limit": {0x1038: 0x01010000 | 8224, 0x3018: 8223, 0x403C: 8223 << 16 | 8223, 0x4058: 8223, 0x1030: 96 * 8224},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_register_is_named(ork: Ork, tmp_path: Path, rule: str) -> None:
    dump = tmp_path / "chain.bin"
    good = matmul(INT8, 4, 96, 64)
    dump.write_bytes(programs_dump(good, good | BROKEN[rule], good))
    code, out, err = ork("emu", "check", dump)
    errors = [line for line in out.splitlines() if line.startswith("error ")]
    assert (code, err) == (1, "")
    assert errors
    assert all(f"error {rule}: " in line and "[program 1]" in line for line in errors)
    code, out, _ = ork("emu", "check", dump, "--json")
    found = json.loads(out)
    assert code == 1
    assert {(v["rule"], v["program"]) for v in found if v["severity"] == "error"} == {(rule, 1)}


def test_links_that_lead_elsewhere_or_fetch_too_little_are_named(ork: Ork, tmp_path: Path) -> None:
    good, dump = matmul(INT8, 4, 96, 64), tmp_path / "chain.bin"
    raw = np.frombuffer(programs_dump(good, good, good, good), np.uint64).copy()
    link = int(isa.positions(raw, 0x0010)[1])
    raw[link] = isa.word(0x0101, 0x0010, 0x8000_0000)
    dump.write_bytes(raw.tobytes())
    code, out, _ = ork("emu", "check", dump)
    assert code == 1
    assert "error next-address: " in out
    assert "[program 1] [PC.BASE_ADDRESS]" in out
    dump.write_bytes(programs_dump(good, good, amount=5))
    code, out, _ = ork("emu", "check", dump)
    assert code == 1
    assert "error missing-op-enable: " in out
    assert "[program 1] [PC.REGISTER_AMOUNTS] [fetched = 12, words = " in out


def test_task_entries_of_a_captured_json_are_checked(ork: Ork, tmp_path: Path, refused: Callable[..., str]) -> None:
    body = matmul(INT8, 4, 96, 64)
    listed = [hex(w) for w in words(body).tolist()]
    dump = tmp_path / "one.json"

    def check(**task: object) -> str:
        dump.write_text(json.dumps({"words": listed, "task": task}))
        return ork("emu", "check", dump)[1]

    assert check(int_mask="0x300", regcfg_amount=len(body)).startswith("1 program, 0 errors")
    assert check(int_mask="0xc00").startswith("error int-mask: ")
    assert check(regcfg_amount=20).startswith("error missing-op-enable: ")
    dump.write_text(json.dumps({"words": listed, "tasks": [{}, {}]}))
    assert "2 tasks for 1 programs" in refused("emu", "check", dump)
    dump.write_text(json.dumps({"words": listed, "task": {"int_mask": "mask"}}))
    assert "int_mask of task 0 is 'mask'" in refused("emu", "check", dump)


def test_a_dump_comes_from_standard_input_too(ork: Ork, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = programs_dump(matmul(FP16, 4, 96, 32))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(dump)))
    assert ork("emu", "check", "-")[:2] == (0, "1 program, 0 errors, 0 other findings\n")


def test_no_dump_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, this is a text of 40 characters..")
    assert "no block of the NPU" in refused("emu", "check", tmp_path / "text")
    assert "missing" in refused("emu", "check", tmp_path / "missing")
    (tmp_path / "many").write_bytes(np.full(20_000, isa.word(0x0081, 8, 0xD), np.uint64).tobytes())
    assert "20000 programs: at most 16384" in refused("emu", "check", tmp_path / "many")


@given(
    kind=st.sampled_from([INT8, FP16, INT4]),
    M=st.integers(1, 9),
    register=st.sampled_from(sorted(matmul(INT8, 1, 64, 64))),
    bit=st.integers(0, 31),
)
@settings(max_examples=60, deadline=None)
def test_a_review_finds_what_running_finds(kind: Kind, M: int, register: int, bit: int) -> None:
    """One bit of a register flipped: the rules a program breaks on the literal core, but for those about memory."""
    body = matmul(kind, M, 64, 64, "wide")
    body[register] ^= 1 << bit
    board = Board()
    board.memory.create(1, 0xF000_0000, 0x401, 0)  # nearly everything is mapped
    body = board.place(body, 0x2000_0000, 0x3000_0000, 0x4000_0000)
    if register in (0x1070, 0x1110, 0x4020):
        body[register] ^= 1 << bit & 0x0FFF_FFFF
    board.run([body])
    run = {(v.rule, v.register) for v in board.report.violations}
    found = {(v.rule, v.register) for v in review(words(body))}
    if not any(rule == "unmapped-address" for rule, _ in run):
        assert found == run


@pytest.mark.skipif(not FILES, reason="no captured programs: ORK_CAPTURES names their folder")
def test_captured_programs_break_no_rule_of_severity_error(ork: Ork) -> None:
    """But for those that rely on what programs left which the capture does not hold."""
    raw = [name for name, path in FILES.items() if '"words"' in path.read_text()]
    for name in raw:
        code, out, err = ork("emu", "check", FILES[name])
        assert err == ""
        assert code == 0 or re.search("warning never-written|error weight-reuse|error lut-unloaded", out), (name, out)


# --- docs/emulator.md ---


def test_the_page_names_only_rules_and_faults_that_exist() -> None:
    page = (ROOT / "docs/emulator.md").read_text()
    unproven = page.split("## What is `unproven`")[1].split("## ")[0]
    for row in re.findall(r"^\| (.*?) \|", unproven, re.MULTILINE):
        assert set(re.findall(r"`([a-z0-9-]+)`", row)) <= RULES.keys()
    faults = page.split("## Faults")[1].split("## ")[0]
    assert {
        name for row in re.findall(r"^\| (`.*?) \|", faults, re.MULTILINE) for name in row.strip("`").split("`, `")
    } == (KINDS.keys())
    for block in re.findall(r"^    (?:\$ )?ork (emu|run|npu) (.*)$", page, re.MULTILINE):
        command = shlex.split(" ".join(block).split("#")[0].split(" > ")[0].split(" | ")[0].replace("MODEL", "m"))
        parser().parse_args(command)


# --- ork emu replay ---


def test_a_recording_replays_and_compares(ork: Ork, tmp_path: Path) -> None:
    a, b, cut = (tmp_path / f"{name}.orktrace" for name in ("a", "b", "cut"))
    record(a, products(cores=1))
    record(b, products(cores=1, M=6))
    count = 5  # a warm-up and four
    for engine in ("fast", "literal"):
        assert ork("emu", "replay", a, "--engine", engine) == (0, f"{count} submits, 0 differ\n", "")
    assert ork("emu", "replay", a, "--diff", a) == (0, f"{count} submits, 0 differ\n", "")
    code, out, err = ork("emu", "replay", a, "--diff", b)
    assert (code, err) == (1, "")
    assert f"\n{count} submits, {count} differ\n" in out
    assert re.search(r"^submit 3: program 0 .* CNA.DATA_SIZE0 .*height 5 -> 6$", out, re.MULTILINE)
    cut.write_bytes(a.read_bytes()[:-100])
    code, out, err = ork("emu", "replay", cut)
    assert code == 0
    assert "has no end" in err


def test_the_words_of_a_recorded_submit(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bytes that `ork emu check -` and `ork npu disasm` read."""
    path = tmp_path / "a.orktrace"
    record(path, products(cores=1))
    assert main(["emu", "replay", str(path), "--words", "2"]) == 0
    raw = capfdbinary.readouterr().out
    assert len(isa.positions(np.frombuffer(raw, np.uint64), 0x1020)) == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert main(["emu", "check", "-"]) == 0
    assert main(["emu", "replay", str(path), "--words", "77"]) == 2
    assert b"no submit 77 in it" in capfdbinary.readouterr().err


def test_no_recording_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    assert "no .orktrace recording" in refused("emu", "replay", tmp_path / "text")
    assert "No such file" in refused("emu", "replay", tmp_path / "missing")


# --- ork emu record ---


@pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
def test_a_program_is_recorded_and_runs_again(ork: Ork, tmp_path: Path) -> None:
    """One that knows nothing of ork, and then with a register that breaks a rule: the recordings tell which."""
    client = [sys.executable, str(ROOT / "tests/clients/client.py"), "matmul"]
    good, bad = tmp_path / "good.orktrace", tmp_path / "bad.orktrace"
    code, _, err = ork("emu", "record", "-o", good, "--", *client)
    assert code == 0
    assert f"ork: {good}: 1 submits, " in err
    assert ork("emu", "replay", good) == (0, "1 submits, 0 differ\n", "")
    code, _, err = ork("emu", "record", "-o", bad, "--", *client, "0x1034=0x50")
    assert code == 1
    assert "error weight-size" in err
    assert ork("emu", "replay", bad) == (0, "1 submits, 0 differ\n", "")
    code, out, _ = ork("emu", "replay", good, "--diff", bad)
    assert code == 1
    assert "submit 1: rules {} -> {'weight-size': 1}" in out
    assert re.search("submit 1: program 0 .* CNA.WEIGHT_SIZE1 .* weight_bytes_per_kernel 64 -> 80", out)


def test_nothing_is_recorded_of_no_program(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "not found" in refused("emu", "record", "-o", tmp_path / "x", "--", "/no/such/program")
    assert not (tmp_path / "x").exists()
    assert "there is no folder" in refused(
        "emu", "record", "-o", tmp_path / "no" / "x", "--", sys.executable, "-c", "0"
    )
