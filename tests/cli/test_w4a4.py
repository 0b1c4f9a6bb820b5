"""`--w4a4` and `--unproven`: said, the same text on every device, refused where int4 has nothing to multiply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ork.cli.main import main
from tests.cli.conftest import SAID, Ork


@pytest.fixture(scope="module")
def four_bits(speaking: Path) -> Path:
    path = speaking.with_name("speaking-i4.orkpack")
    assert main(["convert", str(speaking), "--codec", "i4", "--no-rotate", "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("flags", [["--device", "cpu"], ["--device", "emu"], ["--device", "emu", "--unproven"]])
def test_w4a4(ork: Ork, four_bits: Path, flags: list[str]) -> None:
    code, out, err = ork("run", four_bits, "-p", "T", "--w4a4", *flags)
    assert (code, out) == (0, SAID[1:] + "\n")
    assert "the chip multiplies int4 by int4 alone" in err
    about = json.loads(ork("run", four_bits, "-p", "T", "--w4a4", "--json", *flags)[1])
    assert about["text"] == SAID[1:]
    if "emu" in flags:
        assert about["npu_ops"] > 0
        assert about["npu_resets"] == 1  # the precision is entered once


def test_refusals(refused: Callable[..., str], four_bits: Path, pack: Path) -> None:
    assert "no weight of this model is i4" in refused("run", pack, "-p", "T", "--w4a4")
    assert "goes with --w4a4" in refused("run", four_bits, "-p", "T", "--unproven")


def test_hybrid_says_what_it_leaves_to_the_cpu(ork: Ork, speaking: Path, tmp_path: Path) -> None:
    path = tmp_path / "grouped.orkpack"
    assert ork("convert", speaking, "--codec", "nf4", "--group", "32", "-o", path)[0] == 0
    err = ork("run", path, "-p", "T", "--device", "hybrid")[2]
    assert "tensors with scales by group on the CPU: a program a group costs 13 to 283 times one" in err


def test_perplexity_of_w4a4(ork: Ork, four_bits: Path, tmp_path: Path) -> None:
    """Beside the same weights with rows of eight bits: the same on CPU and NPU, and not what those give."""
    text = tmp_path / "text"
    text.write_text(SAID * 30)
    flags = ["-f", text, "-c", "32", "--chunks", "2", "--against", four_bits, "--json"]
    found = [
        json.loads(ork("ppl", four_bits, *flags, *how)[1]) for how in (["--w4a4"], ["--w4a4", "--device", "emu"], [])
    ]
    assert found[0]["perplexity"] == found[1]["perplexity"]
    assert found[0]["kl"] > found[2]["kl"] == 0
