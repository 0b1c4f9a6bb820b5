from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# CI machines are shared and slow: examples are few and repeatable, and none fails for its time.
settings.register_profile("ork", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ork")


@pytest.fixture(scope="session", autouse=True)
def _ork_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packs that tests convert on the way do not end up in the user's cache."""
    before = os.environ.get("ORK_HOME")
    os.environ["ORK_HOME"] = str(tmp_path_factory.mktemp("ork-home"))
    yield
    if before is None:
        del os.environ["ORK_HOME"]
    else:
        os.environ["ORK_HOME"] = before
