from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import ork
from tests import tiny

Load = Callable[..., ork.LoadedModel]
LETTERS = "the wizard in the thin hat thinks of things; nothing is within. "


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.random_gguf(tmp_path_factory.mktemp("measure") / "tiny.gguf")


@pytest.fixture(scope="module")
def load(gguf: Path) -> Iterator[Load]:
    """Loads the tiny model (or another file) on the CPU, with the options of `ork.load`."""
    with ExitStack() as stack:

        def open_it(path: Path = gguf, **options: object) -> ork.LoadedModel:
            how = {"device": "cpu", "threads": 2, "kv": "f32", "n_ctx": 64} | options
            return stack.enter_context(ork.load(path, **how))  # type: ignore[arg-type]

        yield open_it
