"""Imatrix files: written and read back, as other programs write them, and damaged in every way."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.build.imatrix import read_imatrix
from ork.errors import OrkError, SourceError, StorageError, UsageError
from ork.quant.imatrix import Imatrix
from tests.gguf_writer import write_gguf

SUMS = {"blk.0.attn_q.weight": np.array([[4, 0, 9]], np.float32), "blk.0.ffn_up.weight": np.array([[1, 2]], np.float32)}
COUNTS = {"blk.0.attn_q.weight": np.array([2], np.float32), "blk.0.ffn_up.weight": np.array([4], np.float32)}
WHOLE = Imatrix(SUMS, COUNTS, ("a.txt", "b.txt"), 7, 256)


def legacy(entries: dict[str, tuple[int, np.ndarray]], tail: bytes = b"") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        raw = name.encode()
        out += struct.pack("<i", len(raw)) + raw + struct.pack("<2i", calls, values.size) + values.tobytes()
    return out + tail


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    WHOLE.write(path)
    got = read_imatrix(path)
    assert got.importance("blk.0.attn_q.weight", 3).tolist() == [2, 0, 4.5]
    assert got.importance("blk.0.ffn_up.weight", 2).tolist() == [0.25, 0.5]
    assert (got.datasets, got.chunk_count, got.chunk_size) == (("a.txt", "b.txt"), 7, 256)
    assert got.digest == WHOLE.digest
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    WHOLE.write(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


def test_as_another_program_reads_it(tmp_path: Path) -> None:
    WHOLE.write(tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.chunk_count"].contents() == 7
    assert reader.fields["imatrix.chunk_size"].contents() == 256
    assert reader.fields["imatrix.datasets"].contents() == ["a.txt", "b.txt"]
    tensors = {t.name: (t.shape.tolist(), t.data.reshape(-1).tolist()) for t in reader.tensors}
    assert tensors == {
        "blk.0.attn_q.weight.in_sum2": ([3, 1], [4, 0, 9]),
        "blk.0.attn_q.weight.counts": ([1, 1], [2]),
        "blk.0.ffn_up.weight.in_sum2": ([2, 1], [1, 2]),
        "blk.0.ffn_up.weight.counts": ([1, 1], [4]),
    }


def test_as_another_program_writes_it(tmp_path: Path) -> None:
    """Stacked experts, one of which no row has reached; a tensor of something else beside."""
    sums = np.array([[2, 4], [0, 0], [9, 3]], np.float32)
    tensors = {
        "blk.0.ffn_up_exps.weight.in_sum2": ("F32", sums, sums.shape),
        "blk.0.ffn_up_exps.weight.counts": ("F32", np.array([[2], [0], [3]], np.float32), (3, 1)),
        "blk.0.ffn_up_exps.weight.other": ("F32", np.ones(4, np.float32), (4,)),
    }
    write_gguf(tmp_path / "x.gguf", {"general.type": "imatrix", "imatrix.chunk_size": 512}, tensors)
    got = read_imatrix(tmp_path / "x.gguf")
    assert [got.importance(f"blk.0.ffn_up_exps.weight#{e}", 2).tolist() for e in range(3)] == [[1, 2], [1, 1], [3, 1]]
    with pytest.raises(UsageError, match="has 3 x 2 inputs, not 6"):
        got.importance("blk.0.ffn_up_exps.weight", 6)


def test_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    values = np.array([8, 2], np.float32)
    path.write_bytes(legacy({"a.weight": (4, values), "b.weight": (0, values)}, struct.pack("<2i", 9, 5) + b"a.txt"))
    got = read_imatrix(path)
    assert got.importance("a.weight", 2).tolist() == [2, 0.5]
    assert got.importance("b.weight", 2).tolist() == [1, 1]
    path.write_bytes(legacy({"a.weight": (4, values)}))
    assert "b.weight" not in read_imatrix(path)


@pytest.mark.parametrize(
    "data",
    [
        b"GG",
        b"hello world, this is no imatrix",
        struct.pack("<i", 0),
        struct.pack("<i", -1),
        legacy({"a": (1, np.ones(3, np.float32))})[:-1],
        legacy({"a": (1, np.ones(0, np.float32))}),
        legacy({"": (1, np.ones(3, np.float32))}),
        legacy({"a": (-1, np.ones(3, np.float32))}),
        struct.pack("<i", 2) + legacy({"a": (1, np.ones(3, np.float32))})[4:] * 2,
        struct.pack("<2i", 1, 1 << 30) + bytes(100),
        struct.pack("<2i", 1, -5) + bytes(100),
    ],
)
def test_what_is_no_old_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.dat").write_bytes(data)
    with pytest.raises(UsageError, match=r"x\.dat: .*(imatrix|damaged)"):
        read_imatrix(tmp_path / "x.dat")


def test_what_is_no_imatrix(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    one = ("F32", np.ones((1, 4), np.float32), (1, 4))
    for metadata, tensors in (
        ({"general.architecture": "llama"}, {"a.weight": one}),
        ({"general.type": "model"}, {"a.weight.in_sum2": one, "a.weight.counts": ("F32", np.ones((1, 1)), (1, 1))}),
        ({"general.type": "imatrix"}, {"a.weight.in_sum2": one}),
        ({"general.type": "imatrix"}, {"a.weight.in_sum2": one, "a.weight.counts": one}),
        ({"general.type": "imatrix"}, {"a.weight.in_sum2": ("F16", np.ones((1, 4)), (1, 4))}),
    ):
        write_gguf(path, metadata, tensors)
        with pytest.raises(UsageError, match=r"x\.gguf: .*(not an imatrix|damaged)"):
            read_imatrix(path)
    os.mkfifo(tmp_path / "pipe")  # nobody would ever write into it
    (tmp_path / "empty").write_bytes(b"")
    for name, told in (
        ("nothing", "no such file"),
        (".", "not a regular file"),
        ("pipe", "not a regular file"),
        ("empty", "is empty"),
    ):
        with pytest.raises(SourceError, match=told):
            read_imatrix(tmp_path / name)


@pytest.mark.parametrize("value", [5, True, 1.5, "text.txt", [], np.arange(3, dtype=np.int32), ["a", "b"]])
@pytest.mark.parametrize("key", ["general.type", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"])
def test_metadata_of_any_type(tmp_path: Path, key: str, value: object) -> None:
    """What a text's name or a count should be may be anything in a foreign file."""
    one, count = ("F32", np.ones((1, 4), np.float32), (1, 4)), ("F32", np.ones((1, 1), np.float32), (1, 1))
    write_gguf(tmp_path / "x.gguf", {key: value}, {"a.weight.in_sum2": one, "a.weight.counts": count})
    if key == "general.type":
        with pytest.raises(UsageError, match="not an imatrix"):
            read_imatrix(tmp_path / "x.gguf")
        return
    found = read_imatrix(tmp_path / "x.gguf")
    texts = key == "imatrix.datasets" and isinstance(value, list)
    assert found.datasets == (tuple(value) if texts else ())
    assert found.importance("a.weight", 4).tolist() == [1, 1, 1, 1]


@settings(max_examples=60)
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_harmless(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-imatrix"
    if data.draw(st.booleans()):
        WHOLE.write(path)
        whole = bytearray(path.read_bytes())
    else:
        whole = bytearray(legacy({n: (3, v[0]) for n, v in SUMS.items()}))
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del whole[at:]
    else:
        whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with contextlib.suppress(OrkError):
        got = read_imatrix(path)
        for name in got.sums:
            assert (got.importance(name, got.sums[name].shape[1]) >= 0).all()


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"x\.gguf: No such file"):
        WHOLE.write(tmp_path / "missing" / "x.gguf")
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(StorageError, match=r"x\.gguf: "):
        WHOLE.write(tmp_path / "x.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_old_files_have_one_expert_after_another(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(legacy({"a_exps.weight": (4, np.arange(6, dtype=np.float32))}))
    found = read_imatrix(path)
    assert [found.importance(f"a_exps.weight#{i}", 2).tolist() for i in range(3)] == [[0, 0.25], [0.5, 0.75], [1, 1.25]]
    for name, K in (("a_exps.weight#3", 2), ("a_exps.weight#0", 4), ("a_exps.weight", 2)):
        with pytest.raises(UsageError, match="of another model"):
            found.importance(name, K)
