from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ork.pack.reader import Pack
from tests import tiny
from tests.cli.conftest import Ork

TEXT = "".join(f"the tin thing that they think in {i} {i * i}\n" for i in range(80))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "model.gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_gptq_on_a_text_and_on_the_one_that_comes_with_ork(ork: Ork, gguf: Path, text: Path, tmp_path: Path) -> None:
    packs = {}
    for name, args in {
        "plain": [],
        "own": ["--gptq", "--calibrate", text, "--calibrate-tokens", "1100"],
        "shipped": ["--gptq", "--calibrate-tokens", "1024"],
    }.items():
        path = tmp_path / f"{name}.orkpack"
        code, out, err = ork("convert", gguf, "-o", path, "--recipe", "i4", "--group", "32", *args)
        assert (code, out) == (0, "")
        assert ("GPTQ on" in err) == bool(args)
        assert (str(text) in err) == (name == "own")
        packs[name] = path.read_bytes()
    assert len(set(packs.values())) == 3
    with Pack.open(tmp_path / "own.orkpack") as pack:
        assert pack.recipe["default"]["gptq"] is True
        assert pack.provenance["calibration"]["tokens"] == 1024


def test_a_text_from_a_pipe_serves_both_the_measuring_and_gptq(ork: Ork, gguf: Path, tmp_path: Path) -> None:
    """It can be read once."""
    how = ("--target-bpw", "8.5", "--gptq", "--calibrate-tokens", "512", "--calibrate")
    (tmp_path / "text").write_text(TEXT)
    assert ork("convert", gguf, "-o", tmp_path / "a.orkpack", *how, tmp_path / "text")[0] == 0
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    code, _, err = ork("convert", gguf, "-o", tmp_path / "b.orkpack", *how, f"/dev/fd/{reading}")
    os.close(reading)
    assert code == 0, err
    assert (tmp_path / "a.orkpack").read_bytes() == (tmp_path / "b.orkpack").read_bytes()


def test_tensors_that_the_text_is_too_short_for_are_named(ork: Ork, text: Path, tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    shapes = {"gate": (544, 64), "up": (544, 64), "down": (64, 544)}
    tensors |= {f"blk.{i}.ffn_{n}.weight": tensors["output.weight"].ravel()[: s[0] * s[1] // 64].repeat(64).reshape(s)
                for i in range(2) for n, s in shapes.items()}  # fmt: skip
    wide = tiny.write(tmp_path / "x.gguf", tiny.metadata(**{"llama.feed_forward_length": 544}), tensors)
    code, _, err = ork("convert", wide, "--codec", "i4", "--gptq", "--calibrate", text, "--calibrate-tokens", "512")
    assert code == 0
    assert "blk.0.ffn_down.weight and 1 more: more inputs than the text has tokens" in err


def test_experts_with_few_rows_are_counted(ork: Ork, text: Path, tmp_path: Path) -> None:
    moe = tiny.moe_gguf(tmp_path / "x.gguf", experts=16)
    code, _, err = ork("convert", moe, "--codec", "i4", "--gptq", "--calibrate", text, "--calibrate-tokens", "512")
    assert code == 0
    assert re.search(r"\d+ of 32 experts had fewer rows than inputs, so rounded without GPTQ", err)
    assert re.search(r"ffn_gate_exps, experts by layer: 0: \d+, 1: \d+\n", err)


def test_what_gptq_refuses(refused: Callable[..., str], gguf: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the tin")
    for args, told in (
        (["--codec", "i4", "--gptq", "--calibrate", tmp_path / "none.txt"], "none.txt: No such file"),
        (["--codec", "i4", "--gptq", "--calibrate", text, "--calibrate-tokens", "5"], "--calibrate-tokens 5"),
        (["--codec", "i4", "--calibrate", text], "goes with --gptq"),
        (["--codec", "f32", "--gptq"], "rounds nothing"),
    ):
        assert told in refused("convert", gguf, *args)
    assert not list(tmp_path.glob("*.orkpack*"))
