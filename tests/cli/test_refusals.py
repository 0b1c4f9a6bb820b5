"""Whatever is wrong with a file, a flag or the machine: one line that says so, exit code 2, nothing half-done."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ork.cli.main import main
from ork.pack.format import HASH_AT, SECTIONS, hash_of
from ork.pack.reader import Pack
from tests import tiny
from tests.cli.conftest import one_line
from tests.gguf_writer import write_gguf

Refused = Callable[..., str]


# --- files


@pytest.mark.parametrize("command", ["run", "convert", "bench", "inspect", "verify"])
def test_a_missing_file(refused: Refused, tmp_path: Path, command: str) -> None:
    path = tmp_path / "nothing.gguf"
    more = ["-p", "x"] if command == "run" else []
    assert "nothing.gguf" in refused(command, path, *more)


def test_an_unknown_name_names_the_known(refused: Refused) -> None:
    for command in (["run", "-p", "x"], ["convert"], ["bench"], ["pull"]):
        line = refused(command[0], "smollm3", *command[1:])
        assert "'smollm3'" in line
        assert "smollm2-135m" in line


def test_a_known_name_that_is_not_here_says_how_to_get_it(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "home"))
    assert "ork pull smollm2-135m" in refused("run", "smollm2-135m", "-p", "x")


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"hello " * 100, b"\x89PNG\r\n\x1a\n" + bytes(200)])
def test_no_gguf(refused: Refused, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert "x.gguf" in refused("run", path, "-p", "x")
    assert "x.gguf" in refused("convert", path)


def test_a_cut_gguf(refused: Refused, tmp_path: Path, speaking: Path) -> None:
    whole = speaking.read_bytes()
    path = tmp_path / "x.gguf"
    for size in (10, 100, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "x.gguf" in refused("run", path, "-p", "x")
    assert not list((tmp_path).glob("*.orkpack*"))


def test_an_unknown_architecture_names_the_known(refused: Refused, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "x.gguf", tiny.metadata("mamba"), tiny.random_tensors())
    for command in (["run", path, "-p", "x"], ["convert", path], ["bench", path]):
        line = refused(*command)
        assert "'mamba'" in line
        assert "llama, qwen2, qwen3, gemma3" in line


def test_an_unsupported_tensor_type_is_named(refused: Refused, tmp_path: Path) -> None:
    iq2_xxs = 16
    tensors = {"token_embd.weight": (iq2_xxs, bytes(66 * tiny.VOCAB), (tiny.VOCAB, 256))}
    path = write_gguf(tmp_path / "x.gguf", tiny.metadata(), tensors)
    line = refused("run", path, "-p", "x")
    assert "token_embd.weight" in line
    assert "IQ2_XXS" in line


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("tokenizer.ggml.model", "t5", "tokenizer.ggml.model"),
        ("tokenizer.ggml.pre", "nonsense", "tokenizer.ggml.pre"),
        ("llama.rope.scaling.type", "yarn", "'yarn'"),
        ("llama.attention.head_count", 0, "llama.attention.head_count"),
    ],
)
def test_metadata_that_make_no_model(refused: Refused, tmp_path: Path, key: str, value: object, named: str) -> None:
    path = tmp_path / "x.gguf"
    tiny.speaking_gguf(path, "abc", **{key: value})
    assert named in refused("convert", path)
    assert not path.with_suffix(".orkpack").exists()
    assert named in refused("run", path, "-p", "x")


def test_a_folder_that_is_no_model(refused: Refused, tmp_path: Path) -> None:
    assert "config.json" in refused("run", tmp_path, "-p", "x")
    assert "config.json" in refused("convert", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(refused: Refused, tmp_path: Path, speaking: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(speaking.read_bytes())
    path.chmod(0)
    assert "x.gguf" in refused("run", path, "-p", "x")


def test_a_name_that_is_no_text(refused: Refused, tmp_path: Path) -> None:
    assert refused("run", tmp_path / "two\nlines\x1b[31m.gguf", "-p", "x").isprintable()


def test_a_pipe_instead_of_a_file(refused: Refused, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    assert "regular file" in refused("run", tmp_path / "x.gguf", "-p", "x")


# --- packs


@pytest.mark.parametrize(
    "where", ["header", "metadata", "tokenizer", "tensors", "token_embd.weight", "blk.1.ffn_up.weight", "output.weight"]
)
def test_a_flipped_byte_is_found_before_it_is_used(refused: Refused, tmp_path: Path, pack: Path, where: str) -> None:
    data = bytearray(pack.read_bytes())
    with Pack.open(pack) as whole:
        if where == "header":
            at = 30
        elif where in SECTIONS:
            at = whole.section_span(where)[0] + 9
        else:
            at = whole.tensor(where).slices[-1].offset + 1000
    data[at] ^= 0x10
    path = tmp_path / "x.orkpack"
    path.write_bytes(data)
    for line in (refused("run", path, "-p", "T"), refused("verify", path)):
        assert "x.orkpack" in line
        assert "offset" in line


def test_verify_before_running_finds_what_running_does_not_touch(
    refused: Refused, tmp_path: Path, pack: Path, ork: Callable[..., tuple[int, str, str]]
) -> None:
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1  # in the notes, which no run reads
    path = tmp_path / "x.orkpack"
    path.write_bytes(data)
    assert ork("run", path, "-p", "T")[0] == 0
    assert "notes" in refused("run", path, "-p", "T", "--verify")


def test_a_pack_of_a_newer_version(refused: Refused, tmp_path: Path, pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[8:12] = (7).to_bytes(4, "little")
    path = tmp_path / "x.orkpack"
    data[HASH_AT : HASH_AT + 16] = hash_of(bytes(data[:HASH_AT]))  # whole, as a newer ork would write it
    path.write_bytes(data)
    for command in (["run", path, "-p", "T"], ["inspect", path], ["verify", path]):
        assert "version 7" in refused(*command)


def test_a_cut_pack(refused: Refused, tmp_path: Path, pack: Path) -> None:
    whole = pack.read_bytes()
    path = tmp_path / "x.orkpack"
    for size in (0, 3, 4096, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "x.orkpack" in refused("run", path, "-p", "T")


def test_inspect_wants_a_pack(refused: Refused, speaking: Path) -> None:
    assert "speaking.gguf" in refused("inspect", speaking)


# --- flags


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-n", "-2"], "-n -2"),
        (["-n", "many"], "-n"),
        (["-c", "0"], "-c 0"),
        (["-c", "-5"], "-c -5"),
        (["-c", "2049"], "2048"),
        (["--temp", "-1"], "--temp"),
        (["--temp", "nan"], "--temp"),
        (["--top-k", "-1"], "--top-k"),
        (["--top-k", "1.5"], "--top-k"),
        (["--top-p", "1.01"], "--top-p"),
        (["--min-p", "-0.1"], "--min-p"),
        (["--repeat-penalty", "0"], "--repeat-penalty"),
        (["--seed", "x"], "--seed"),
        (["--threads", "0"], "--threads"),
        (["--threads", "1000"], "--threads"),
        (["--device", "gpu"], "--device"),
        (["--kv", "i8"], "--kv"),
        (["--codec", "i2"], "--codec"),
        (["--max-ram", "lots"], "lots"),
        (["--max-ram", "0"], "'0'"),
        (["--chat", "--chat-template", "vicuna"], "vicuna"),
        (["-f", "x"], "-f"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_flags_that_make_no_sense(refused: Refused, pack: Path, flags: list[str], named: str) -> None:
    if flags[0] == "--max-ram":
        pack = pack.with_suffix(".gguf")
    assert named in refused("run", pack, "-p", "T", *flags)


def test_flags_are_refused_before_anything_is_converted(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "home"))
    path = tiny.random_gguf(tmp_path / "x.gguf", seed=3)
    for flags in (["--temp", "-1"], ["--threads", "0"], ["-n", "-2"], ["--max-ram", "1M"], ["--max-ram", "x"]):
        refused("run", path, "-p", "x", *flags)
    refused("convert", path, "--threads", "-1")
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"x.gguf"}


def test_commands_that_there_are_not(refused: Refused) -> None:
    assert "COMMAND" in refused()
    assert "sing" in refused("sing")
    assert "MODEL" in refused("run")
    assert "PACK" in refused("verify")
    assert "name a model" in refused("pull")


@pytest.mark.parametrize("flags", [["-p", "0", "-n", "0"], ["-p", "-1"], ["-r", "0"], ["-o", "xml"], ["-p", "5000"]])
def test_benchmarks_of_nothing(refused: Refused, pack: Path, flags: list[str]) -> None:
    refused("bench", pack, *flags)


def test_an_unknown_instruction_set(refused: Refused, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORK_ISA", "sse9")
    line = refused("run", pack, "-p", "T")
    assert "ORK_ISA=sse9" in line
    assert "portable" in line


# --- prompts


def test_a_prompt_longer_than_the_context(refused: Refused, pack: Path) -> None:
    line = refused("run", pack, "-p", "xyz" * 20, "-c", "50")
    assert "60 tokens" in line
    assert "context of 50" in line
    assert "-c" in line


def test_an_empty_prompt(refused: Refused, pack: Path, tmp_path: Path) -> None:
    assert "prompt is empty" in refused("run", pack, "-p", "")
    (tmp_path / "empty").write_bytes(b"")
    assert "prompt is empty" in refused("run", pack, "-f", tmp_path / "empty")


def test_a_prompt_file_that_is_none(refused: Refused, pack: Path, tmp_path: Path) -> None:
    assert "nothing.txt" in refused("run", pack, "-f", tmp_path / "nothing.txt")
    assert "directory" in refused("run", pack, "-f", tmp_path)


def test_a_model_without_a_chat_template(refused: Refused, tmp_path: Path) -> None:
    path = tiny.speaking_gguf(tmp_path / "x.gguf", "abc", **{"tokenizer.chat_template": ""})
    pack = tmp_path / "x.orkpack"
    assert main(["convert", str(path)]) == 0
    assert "chatml, gemma, llama3" in refused("run", pack, "--chat", "-p", "hi")


def test_a_broken_model_is_not_believed(refused: Refused, tmp_path: Path) -> None:
    """Weights whose sums overflow: no text comes out of logits that are no numbers."""
    tensors = tiny.speaking_tensors("abc")
    tensors["output_norm.weight"][:] = 3e38
    path = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    assert main(["convert", str(path)]) == 0
    assert "not numbers" in refused("run", tmp_path / "x.orkpack", "-p", "a")


# --- the machine


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.parametrize("command", ["convert", "run"])
def test_a_full_disk_leaves_nothing_under_the_name(tmp_path: Path, speaking: Path, command: str) -> None:
    target = tmp_path / "x.orkpack"
    args = ["convert", speaking, "-o", target] if command == "convert" else ["run", speaking, "-p", "T"]
    done = subprocess.run(
        [sys.executable, "-m", "ork", *map(str, args)],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=limited,
        env={**os.environ, "ORK_HOME": str(tmp_path / "home")},
    )
    told = "ork: converting "  # what a first run says before it does
    err = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith(told))
    assert "no room" in one_line(done.returncode, done.stdout, err)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", [["run", "-p", "T"], ["inspect", "--json"], ["inspect"], ["verify"]])
def test_output_that_cannot_be_written(pack: Path, command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ork", command[0], str(pack), *command[1:]],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert "No space left" in one_line(done.returncode, "", done.stderr)
