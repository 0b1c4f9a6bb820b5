"""`ork npu disasm`: raw words and JSON, differences, and one clear line for everything else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ork.cli.main import main
from ork.npu import isa
from ork.npu.disasm import disassemble, text

WORDS = isa.assemble([(0x1040, 0xB1), (0x1034, 32)])


def test_raw_words_and_json_print_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = {
        "a.bin": WORDS.astype("<u8").tobytes(),
        "a.json": json.dumps({"words": [f"0x{w:016x}" for w in WORDS.tolist()]}).encode(),
        "b.json": json.dumps(WORDS.tolist()).encode(),
    }
    for name, data in forms.items():
        (tmp_path / name).write_bytes(data)
        assert main(["npu", "disasm", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == text(disassemble(WORDS)) + "\n"


def test_diff_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(WORDS.tobytes())
    b.write_bytes(isa.assemble([(0x1040, 0x84), (0x1034, 32)]).tobytes())
    assert main(["npu", "disasm", str(a), "--diff", str(a)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["npu", "disasm", str(a), "--diff", str(b)]) == 1
    assert capsys.readouterr().out.split("  ")[-1] == "weight_bank 11 -> 8; data_bank 1 -> 4\n"


GARBAGE = {
    "empty": (b"", "empty"),
    "odd": (WORDS.tobytes()[:-1], "no whole number of 64-bit words"),
    "text": (b"hello, this is a text of 40 characters..", "word 0 .* is no block of the NPU"),
    "late": (WORDS.tobytes() + b"\xff" * 8, r"word 6 \(byte 48 of the words\) is 0xffffffffffffffff"),
    "zeros": (bytes(64), "all 8 words are zero"),
    "huge": (bytes((16 << 20) + 8), "more than 16 MiB"),
    "cut-json": (b'{"words": ["0x1', "neither JSON nor 64-bit"),
    "deep-json": (b"[" * 100_000, "neither JSON nor 64-bit"),
    "other-json": (b'{"body_rows": []}', "only captures with raw words"),
    "no-words": (b'{"words": []}', "only captures with raw words"),
    "bad-word": (b'{"words": ["0x0", "green"]}', r"words\[1\] is 'green'"),
    "long-word": (b'{"words": ["0x10000000000000000"]}', "not a 64-bit number"),
    "negative": (b'{"words": [-1]}', "not a 64-bit number"),
    "null": (b'{"words": [null]}', r"words\[0\] is 'None'"),
    "long-number": (b"[" + b"9" * 5000 + b"]", "neither JSON|not a 64-bit number"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_one_line_and_exit_code_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, why = GARBAGE[name]
    path = tmp_path / name
    path.write_bytes(data)
    good = tmp_path / "good"
    good.write_bytes(WORDS.tobytes())
    for args in ([str(path)], [str(good), "--diff", str(path)]):
        assert main(["npu", "disasm", *args]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1
        assert len(err) < 400
        assert re.search(why, err)
        assert str(path) in err


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing", tmp_path):
        assert main(["npu", "disasm", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
