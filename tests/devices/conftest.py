"""A board for tests of devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ork.emulator.kernel import EmulatedKernel


@pytest.fixture
def kernel() -> Iterator[EmulatedKernel]:
    """A strict board; afterwards no rule was broken and nothing is left."""
    board = EmulatedKernel()
    yield board
    assert not board.report.violations
    assert board.stats.live_buffers == 0
    assert board.stats.live_files == 0
