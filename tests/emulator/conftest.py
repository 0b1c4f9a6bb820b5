from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.emulator.board import Board


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for simulated time: what would block a board for seconds is over at once."""

    def refuse(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s of simulated time")

    monkeypatch.setattr(time, "sleep", refuse)


@pytest.fixture
def board() -> Iterator[Board]:
    """A board with scripted cores, whose threads end with it."""
    board = Board()
    before = set(threading.enumerate())
    yield board
    board.close()
    assert set(threading.enumerate()) <= before
