"""What commands may overwrite: their own kind, whatever else is there stays."""

import os
from pathlib import Path

import pytest

from ork.build.imatrix import IMATRIX
from ork.cli.skew import FILES
from ork.emulator.orktrace import RECORDING
from ork.errors import StorageError, UsageError
from ork.files import TRACE, Kind, check_output
from ork.measure.base import BASE
from ork.measure.trace import Trace
from ork.pack.format import PACK

from . import tiny

KINDS = [PACK, IMATRIX, BASE, TRACE, RECORDING, *(kind for kind, _ in FILES.values())]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.mark.parametrize(
    "content", [b"my notes", b'{"mine": 1}', b"\0" * 4096, None], ids=["text", "json", "0", "gguf"]
)
def test_no_other_file_is_overwritten(kind: Kind, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    tiny.write(path, tiny.metadata(), tiny.random_tensors()) if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match=f"x: is there and is no {kind.name}; choose another name or remove it"):
        check_output(path, kind)


def test_folders_and_places_without_one(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"this is a folder; name the {kind.name} to write"):
        check_output(tmp_path, kind)
    with pytest.raises(StorageError, match="there is no folder"):
        check_output(tmp_path / "no" / "x", kind)
    check_output(tmp_path / "x", kind)
    (tmp_path / "x").touch()  # holds nothing that could be lost
    check_output(tmp_path / "x", kind)


def test_only_what_is_written_in_place_may_be_a_device(kind: Kind, tmp_path: Path) -> None:
    """A rename would put a file where the device was."""
    os.mkfifo(tmp_path / "pipe")
    if kind.in_place:
        check_output(tmp_path / "pipe", kind)
        check_output("/dev/null", kind)
    else:
        with pytest.raises(UsageError, match="is there"):
            check_output(tmp_path / "pipe", kind)


def test_a_second_trace_replaces_the_first(tmp_path: Path) -> None:
    Trace().save(tmp_path / "t.json")
    check_output(tmp_path / "t.json", TRACE)
