"""Programs that others captured on boards: read, listed and built again, word for word. Skipped without the files."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork.cli.main import main
from ork.npu import isa
from ork.npu.disasm import disassemble, reassemble, text

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("ORK_CAPTURES", ROOT / "../shared/captures"))
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.json")) if not path.name.startswith("decoded_")}
pytestmark = pytest.mark.skipif(not FILES, reason="no captured programs: ORK_CAPTURES names their folder")
CAPTURES = pytest.mark.parametrize("name", FILES or ["none"])


def load(name: str) -> tuple[dict[str, Any], isa.Words]:
    about = json.loads(FILES[name].read_text())
    return about, np.array([int(w, 16) for w in about["words"]], np.uint64)


def cut(words: isa.Words) -> list[isa.Words]:
    """The programs of a dump: up to each op-enable word, without the zero words between programs."""
    ends = np.flatnonzero((words >> np.uint64(48)) == isa.ENABLE_TARGET) + 1
    parts = [words[a:b] for a, b in pairwise([0, *ends.tolist()])]
    return [part[np.flatnonzero(part)[0] :] for part in parts]


@CAPTURES
def test_every_word_is_known_and_comes_back(name: str) -> None:
    _, words = load(name)
    lines = disassemble(words)
    assert not [line for line in lines if line.kind == "foreign"]
    assert not [line for line in lines if "reserved" in line.fields]
    assert np.array_equal(reassemble(lines), words)


@CAPTURES
def test_programs_are_assembled_again_from_their_fields(name: str) -> None:
    _, words = load(name)
    for program in cut(words):
        writes = []
        for w in program[:-4].tolist():
            _, value, offset = isa.split(w)
            writes.append((offset, isa.encode(offset, **isa.decode(offset, value))))
        _, address, _ = isa.split(int(program[-4]))
        _, amount, _ = isa.split(int(program[-3]))
        _, enable, _ = isa.split(int(program[-1]))
        linked = address and amount
        again = isa.assemble(
            writes,
            next_address=address if linked else 0,
            next_amount=amount & 0xFFFF if linked else 0,
            enable=enable,
        )
        # The vendor's multi-core chains also set bits 17:16 of the amount, which our assembler never does.
        again[-3] |= np.uint64((amount & 0x30000) << 16)
        assert np.array_equal(again, program)


@CAPTURES
def test_tasks_and_links_agree_with_the_amounts(name: str) -> None:
    about, words = load(name)
    if "tasks" not in about:
        assert sum(about["task"]["regcfg_amount"] + isa.REGCFG_EXTRA == len(p) for p in cut(words)) == 1
        return
    tasks = {int(t["regcmd_addr"], 16): t for t in about["tasks"]}
    first = min(tasks)
    for address, task in tasks.items():
        start, body = (address - first) // 8, task["regcfg_amount"]
        target, value, offset = isa.split(int(words[start + body + 3]))
        assert (target, value, offset) == (isa.ENABLE_TARGET, int(task["enable_mask"], 16), 8)
        follows, amount = (isa.split(int(w))[1] for w in words[start + body : start + body + 2])
        if follows:
            assert amount & 0xFFFF == isa.fetch_amount(tasks[follows]["regcfg_amount"])


@CAPTURES
def test_the_command_prints_what_the_library_lists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = load(name)
    assert main(["npu", "disasm", str(FILES[name])]) == 0
    assert capsys.readouterr().out == text(disassemble(words)) + "\n"


CONV = "f16_conv_live_"
SAME = [
    (CONV + "conv2d_target_160x40_320x3x3_1504w", CONV + "rerun_20260524_122116_1504w"),
    (CONV + "conv2d_target_160x40_320x3x3_1504w", CONV + "sweep_live_regcmd_1504w"),
    (CONV + "b1_c32_h14_w14_oc128_wic32_k3x3_g1_832w", CONV + "c32_h14_live_regcmd_20260524_1304_832w"),
    ("softmax_f16_task0_rowmax_128rows_c64", "softmax_f16_task1_rowmax_second_half"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_captures_of_one_graph_have_one_key(a: str, b: str) -> None:
    one, two = (load(name)[1] for name in (a, b))
    assert not np.array_equal(one, two)
    assert isa.mask_addresses(one) == isa.mask_addresses(two)
