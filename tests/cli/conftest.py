from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ork.cli.main import main
from tests import tiny

SAID = "The-wizard's böx"
Ork = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ork(capsys: pytest.CaptureFixture[str]) -> Ork:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(ork: Ork) -> Callable[..., str]:
    """Runs a command that has to end with exit code 2 and one clear line, which is returned without its mark."""

    def run(*args: object) -> str:
        code, out, err = ork(*args)
        return one_line(code, out, err)

    return run


def one_line(code: int, out: str, err: str) -> str:
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("ork: ")
    assert err.endswith("\n")
    assert "Traceback" not in err
    return err[5:-1]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def speaking(folder: Path) -> Path:
    """A GGUF that says SAID after a T and stops."""
    return tiny.speaking_gguf(folder / "speaking.gguf", SAID)


@pytest.fixture(scope="session")
def pack(speaking: Path) -> Path:
    assert main(["convert", str(speaking)]) == 0
    return speaking.with_suffix(".orkpack")


@pytest.fixture(scope="session")
def endless(folder: Path) -> Path:
    """A pack that says abcdefgh for ever, as far as a million positions."""
    path = tiny.speaking_gguf(folder / "endless.gguf", "abcdefgh", tail="a", **{"llama.context_length": 1 << 20})
    assert main(["convert", str(path)]) == 0
    return path.with_suffix(".orkpack")
