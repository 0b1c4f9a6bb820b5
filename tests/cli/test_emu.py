"""`ork emu` and the emulated board under `ork run`: right, or one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SAID, Ork

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
