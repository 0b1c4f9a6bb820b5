"""What the commands print, and where: text on standard output and nothing else there."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ork import __version__
from ork.pack.verify import verify
from tests.cli.conftest import SAID, Ork
from tests.models.test_goldens import GOLDENS

TEXT = SAID[1:] + "\n"
DEADLINE = 60.0  # seconds until a test gives up on a process


def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
    def heeding() -> None:  # a shell's background jobs are born ignoring Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    every = {"preexec_fn": heeding, **pipes, **options}
    return subprocess.Popen([sys.executable, "-m", "ork", *map(str, args)], **every)  # type: ignore[call-overload, no-any-return]


# --- run


def test_run_streams_the_text_and_nothing_else(ork: Ork, speaking: Path, pack: Path) -> None:
    for model in (pack, speaking):
        code, out, err = ork("run", model, "-p", "T")
        assert (code, out) == (0, TEXT)
        lines = err.splitlines()
        assert all(line.startswith("ork: ") for line in lines)
        (report,) = [line for line in lines if "peak RSS" in line]
        assert re.search(r"prefill 1 tokens at [\d.]+ tok/s, decode 16 at [\d.]+ tok/s, ended by stop", report)
    assert ork("run", speaking, "-p", "T")[2].count("\n") == 1  # converted once


def test_prompts_from_a_file_and_from_standard_input(
    ork: Ork, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text("say it: T")
    assert ork("run", pack, "-f", tmp_path / "prompt")[1] == TEXT
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff say it: T")))
    assert ork("run", pack)[1] == TEXT


def test_limits_and_stops(ork: Ork, pack: Path) -> None:
    assert ork("run", pack, "-p", "T", "-n", "0")[1] == "\n"
    assert ork("run", pack, "-p", "T", "-n", "4")[1] == "he-w\n"
    assert ork("run", pack, "-p", "T", "-n", "-1")[1] == TEXT
    assert ork("run", pack, "-p", "T", "--stop", "nothing", "--stop", "'s b")[1] == "he-wizard\n"


def test_json(ork: Ork, pack: Path) -> None:
    code, out, err = ork("run", pack, "-p", "T", "--json", "--threads", "2")
    assert (code, err) == (0, "")
    about = json.loads(out)
    assert about["text"] == SAID[1:]
    assert (about["prompt_tokens"], about["new_tokens"], about["end"]) == (1, 16, "stop")
    assert (about["device"], about["threads"], about["kv"]) == ("cpu", 2, "f16")
    assert about["kv_bytes"] == 2 * 2 * 2 * 16 * 256 * 2  # a block: keys and values, 2 layers, 2 heads of 16, f16
    assert about["pack"] == str(pack)
    assert 0 < about["weight_bytes"] < about["peak_rss_bytes"]


def test_sampling_repeats_with_a_seed(ork: Ork, speaking: Path) -> None:
    hot = ["run", speaking, "-p", "T", "-n", "40", "--temp", "50", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    first = ork(*hot, "--seed", "4")[1]
    assert ork(*hot, "--seed", "4")[1] == first
    assert ork(*hot, "--seed", "5")[1] != first
    assert ork("run", speaking, "-p", "T", "--temp", "50", "--top-k", "1")[1] == TEXT


@pytest.mark.parametrize(
    "flags",
    [["--kv", "f32"], ["--codec", "f32"], ["--no-rotate"], ["--threads", "1"], ["--device", "cpu"], ["-c", "300"]],
)
def test_ways_to_compute_the_same_text(ork: Ork, speaking: Path, flags: list[str]) -> None:
    code, out, _ = ork("run", speaking, "-p", "T", "--json", *flags)
    about = json.loads(out)
    assert (code, about["text"]) == (0, SAID[1:])
    assert about["kv"] == ("f32" if "f32" in flags else "f16")


def test_chat_with_one_message(ork: Ork, pack: Path) -> None:
    """The template ends in a line feed, after which comes the first letter."""
    code, out, _ = ork("run", pack, "--chat", "-p", "hello")
    assert (code, out) == (0, SAID + "\n")


def test_a_hugging_face_folder(ork: Ork) -> None:
    code, out, err = ork("run", GOLDENS / "qwen3", "-p", "the", "-n", "3", "--json")
    assert code == 0
    assert json.loads(out)["new_tokens"] == 3
    assert "converting qwen3 once" in err


def test_a_terminal_without_unicode(pack: Path) -> None:
    process = start("run", pack, "-p", "T", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert out.decode("ascii") == TEXT.replace("ö", "?")


def test_closed_standard_streams(pack: Path) -> None:
    command = f'"{sys.executable}" -m ork run "{pack}" '
    done = subprocess.run(["sh", "-c", command + "-p T <&- >&-"], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert "ended by stop" in done.stderr
    done = subprocess.run(["sh", "-c", command + "<&-"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("ork: no prompt")


# --- interruptions


def test_a_reader_that_goes_away_is_no_error(endless: Path) -> None:
    command = f'"{sys.executable}" -m ork run "{endless}" -p a -n -1 -c 100000 | head -c 5'
    done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.stderr) == ("bcdef", "")


@pytest.mark.parametrize("command", [["run", "-p", "T"], ["inspect", "--json"], ["verify"]])
def test_a_reader_that_was_never_there(pack: Path, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command[0], pack, *command[1:], stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, b"")


def test_ctrl_c_keeps_the_text_so_far(endless: Path) -> None:
    process = start("run", endless, "-p", "a", "-n", "-1", "-c", "300000")
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 20)  # a buffered read would take more, and keep it from `communicate`
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=DEADLINE)
    text = (first + rest).decode()
    assert process.returncode == 130, err
    assert text.endswith("\n")
    assert text[:-1] == ("bcdefgha" * len(text))[: len(text) - 1]
    assert "ended by interrupted" in err.decode()
    assert "Traceback" not in err.decode()


def test_a_terminated_measurement_leaves_nothing_behind(endless: Path, tmp_path: Path) -> None:
    text, base = tmp_path / "text", tmp_path / "base"
    text.write_text("abcdefgh" * 50_000)
    process = start("ppl", endless, "-f", text, "-c", "64", "--save-base", base)
    part, end = base.with_name("base.part"), time.monotonic() + DEADLINE
    while not part.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.terminate()
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out) == (128 + signal.SIGTERM, b""), err
    assert b"Traceback" not in err
    assert not part.exists()
    assert not base.exists()


def test_ctrl_c_ends_the_answer_not_the_chat(endless: Path) -> None:
    controller, terminal = pty.openpty()
    process = start("run", endless, "--chat", "-n", "-1", "-c", "300000", stdin=terminal)
    os.close(terminal)
    assert process.stdout is not None
    assert process.stderr is not None
    said = b""

    def until(fd: int, enough: Callable[[bytes], object]) -> bytes:
        got, end = b"", time.monotonic() + DEADLINE
        while not enough(got):
            assert time.monotonic() < end, got
            if select.select([fd], [], [], 1)[0]:
                part = os.read(fd, 65536)
                assert part, (got, said)
                got += part
        return got

    out, err = process.stdout.fileno(), process.stderr.fileno()
    try:
        until(err, lambda got: got.endswith(b"> "))
        for _ in range(2):
            os.write(controller, b"hello\n")
            said += until(out, lambda got: len(got) > 10)
            process.send_signal(signal.SIGINT)
            said += until(out, lambda got: got.endswith(b"\n"))
            assert b"ended by interrupted" in until(err, lambda got: got.endswith(b"> "))
        os.write(controller, b"\n")
        rest, problems = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        os.close(controller)
    assert process.returncode == 0
    assert (rest, problems) == (b"", b"")
    answers = said.decode().splitlines()
    assert len(answers) == 2
    for answer in answers:
        assert answer == ("abcdefgh" * len(answer))[: len(answer)]


# --- the other commands


def test_convert(ork: Ork, speaking: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / "a.orkpack", tmp_path / "b.orkpack"]
    for output in outputs:
        code, out, err = ork("convert", speaking, "-o", output, "--threads", "3")
        assert (code, out) == (0, "")
        assert err.count("\n") == 1
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert ork("convert", speaking, "-o", tmp_path / "plain.orkpack", "--no-rotate")[0] == 0
    assert (tmp_path / "plain.orkpack").read_bytes() != outputs[0].read_bytes()


def test_convert_writes_beside_the_model(ork: Ork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Model-1.5-0.5B"
    folder.mkdir()
    for file in (GOLDENS / "qwen2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert ork("convert", folder)[0] == 0
    assert verify(tmp_path / "Model-1.5-0.5B.orkpack")
    (tmp_path / "Model-1.5-0.5B.orkpack").unlink()
    monkeypatch.chdir(folder)
    assert ork("convert", ".")[0] == 0
    assert verify(tmp_path / "Model-1.5-0.5B.orkpack")


def test_verify_and_inspect(ork: Ork, pack: Path) -> None:
    code, out, err = ork("verify", pack)
    assert (code, err) == (0, "")
    assert verify(pack) in out
    code, out, err = ork("inspect", pack, "--json")
    about = json.loads(out)
    assert (code, err) == (0, "")
    assert about["architecture"] == "llama"
    assert about["digest"] == verify(pack)
    assert set(about["codecs"]) == {"i8"}
    assert {t["name"] for t in about["tensors"]} >= {"token_embd.weight", "blk.1.ffn_down.weight"}
    code, out, _ = ork("inspect", pack, "--tensors")
    assert code == 0
    assert "blk.1.ffn_down.weight" in out
    assert about["digest"] in out.replace("\n", "")


def test_bench(ork: Ork, pack: Path) -> None:
    code, out, err = ork("bench", pack, "-p", "8", "-n", "4", "-r", "3", "-o", "json", "--threads", "1")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["test"] for row in rows] == ["pp8", "tg4"]
    for row in rows:
        assert len(row["samples_ts"]) == 3
        assert min(row["samples_ts"]) <= row["avg_ts"] <= max(row["samples_ts"])
        assert row["avg_ts"] > 0
        assert (row["arch"], row["codec"], row["threads"]) == ("llama", "int8", 1)
    code, out, _ = ork("bench", pack, "-p", "8", "-n", "0", "-r", "1")
    lines = out.splitlines()
    assert lines[0] == "| model | size | codec | device | threads | test | t/s |"
    assert len(lines) == 3
    assert re.search(r"\| pp8 \| [\d.]+ ± 0\.00 \|$", lines[2])


def test_pull_lists_and_knows_paths(ork: Ork, pack: Path) -> None:
    code, out, _ = ork("pull", "--list")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} >= {"smollm2-135m", "gemma3-270m"}
    assert ork("pull", pack) == (0, f"{pack}\n", "")


# --- help


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["run", "--help"], ["convert", "--help"]])
def test_help_needs_no_library(args: list[str]) -> None:
    heavy = ("numpy", "tokenizers", "ork.native", "rich", "jinja2", "huggingface_hub", "msgspec")
    script = f"""
import sys
from ork.cli.main import main
try:
    main({args!r})
except SystemExit as end:
    assert not end.code
print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert __version__ in done.stdout or "usage: ork" in done.stdout
