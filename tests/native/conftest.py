from __future__ import annotations

from collections.abc import Iterator

import pytest

from ork import native


@pytest.fixture(params=native.isa_names())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine in turn."""
    native.choose_isa(request.param)
    yield request.param
    native.choose_isa("best")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = native.threads()
    native.set_threads(2)
    yield
    native.set_threads(before)
