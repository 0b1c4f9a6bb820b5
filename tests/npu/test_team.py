"""Cores that pull from one queue."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from ork.npu.team import Team


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_waits_for_the_chains_that_run(ends: type[BaseException]) -> None:
    """A signal reaches the caller while another core still reads the buffers of its chain."""

    def end(*_: object) -> None:
        raise ends

    begun, ended = threading.Event(), []

    def work(chain: Any, core: int, timeout_ms: int | None) -> None:
        if core == 0:
            assert begun.wait(20)
            return
        begun.set()
        time.sleep(0.05)  # the caller waits for this core by now
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        ended.append(chain)

    before = signal.signal(signal.SIGUSR1, end)
    team = Team(work, 2)
    try:
        with pytest.raises(ends):
            team.run(["a", "b"], 2, None)  # type: ignore[list-item]
        assert len(ended) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        team.stop()
