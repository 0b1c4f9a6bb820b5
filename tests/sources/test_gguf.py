"""GGUF files: what good ones say is read as it stands, and every damage is refused in one line."""

import contextlib
import os
import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.errors import SourceError, StorageError
from ork.sources.base import open_source
from ork.sources.dequant import BY_NAME
from ork.sources.gguf import MAX_METADATA, MAX_PAIRS, MAX_TENSORS
from ork.strings import StringTable
from tests.gguf_writer import ARRAY, STRING, Raw, gguf_bytes, random_blocks, string, write_gguf

ARCH = {"general.architecture": "llama"}
VECTOR = ("F32", np.arange(8, dtype=np.float32), (8,))


@pytest.fixture
def refusal(tmp_path):
    """Open these bytes, which must be refused; the message."""

    def refused(data: bytes) -> str:
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(SourceError) as e:
            open_source(path)
        message = str(e.value)
        assert message.startswith(str(path))
        assert "\n" not in message
        return message

    return refused


# --- good files ---


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read_as_written(tmp_path, version):
    scalars = {
        "u8": np.uint8(255), "i8": np.int8(-128), "u16": np.uint16(65535), "i16": np.int16(-32768),
        "u32": np.uint32(2**32 - 1), "i32": np.int32(-(2**31)), "u64": np.uint64(2**64 - 1),
        "i64": np.int64(-(2**63)), "f32": np.float32(0.1), "f64": np.float64(0.1), "yes": True, "no": False,
        "text": "grüße", "empty": "",
    }  # fmt: skip
    arrays = {f"a.{k}": np.array([v, v]) for k, v in scalars.items() if isinstance(v, (np.generic, bool))}
    path = write_gguf(tmp_path / "x.gguf", {**ARCH, **scalars, **arrays, "words": ["a", "", "ç"]}, version=version)
    got = open_source(path).metadata
    assert list(got) == ["general.architecture", *scalars, *arrays, "words"]
    for key, v in scalars.items():
        assert got[key] == v
        assert type(got[key]) is type(v.item() if isinstance(v, np.generic) else v)
    for key, v in arrays.items():
        assert got[key].dtype == v.dtype
        assert np.array_equal(got[key], v)
    assert isinstance(got["words"], StringTable)
    assert list(got["words"]) == ["a", "", "ç"]


def test_a_value_that_is_not_a_number_is_a_value(tmp_path):
    got = open_source(write_gguf(tmp_path / "x.gguf", {"nan": float("nan"), "arr": np.array([np.inf, np.nan])}))
    assert np.isnan(got.metadata["nan"])
    assert np.isnan(got.metadata["arr"][1])


def test_tensors_come_in_file_order_with_numpy_shapes(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {
        "b.weight": ("Q4_K", random_blocks("Q4_K", 6, rng), (3, 512)),
        "a.weight": VECTOR,
        "experts": ("Q8_0", rng.standard_normal((2, 3, 64)).astype(np.float32), (2, 3, 64)),
    }
    source = open_source(write_gguf(tmp_path / "x.gguf", ARCH, tensors, alignment=64))
    assert [(t.name, t.shape, t.kind, t.nbytes) for t in source.tensors.values()] == [
        ("b.weight", (3, 512), "Q4_K", 6 * 144),
        ("a.weight", (8,), "F32", 32),
        ("experts", (2, 3, 64), "Q8_0", 2 * 3 * 2 * 34),
    ]
    assert bytes(source.raw("b.weight")) == tensors["b.weight"][1]
    assert np.array_equal(source.rows("a.weight", 0, 1), VECTOR[1][None])
    q = gguf.quants.quantize(tensors["experts"][1], gguf.GGMLQuantizationType.Q8_0)
    want = gguf.quants.dequantize(q, gguf.GGMLQuantizationType.Q8_0).reshape(6, 64)
    assert np.array_equal(source.rows("experts", 0, 6), want)
    assert np.array_equal(source.rows("experts", 2, 5), want[2:5])


def test_the_reader_of_the_gguf_package_sees_the_same(tmp_path):
    rng = np.random.default_rng(2)
    tensors = {}
    for kind, t in BY_NAME.items():
        tensors[kind] = (kind, random_blocks(kind, 3 * 2, rng), (3, 2 * t.block))
    metadata = {**ARCH, "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"], "x.scores": [0.5, -1.0]}
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    source, other = open_source(path), gguf.GGUFReader(path)
    for t in other.tensors:
        assert source.tensors[t.name].shape == tuple(int(n) for n in reversed(t.shape))
        assert source.raw(t.name) == t.data.tobytes()
        want = gguf.quants.dequantize(t.data, t.tensor_type)
        assert np.array_equal(source.rows(t.name, 0, 3).view(np.uint32), want.view(np.uint32))
    assert other.fields["llama.block_count"].contents() == source.metadata["llama.block_count"]
    assert other.fields["tokenizer.ggml.tokens"].contents() == list(source.metadata["tokenizer.ggml.tokens"])


def test_rows_go_where_they_are_told(tmp_path):
    source = open_source(write_gguf(tmp_path / "x.gguf", ARCH, {"w": ("F16", np.eye(4, dtype=np.float32), (4, 4))}))
    out = np.empty((2, 4), np.float32)
    assert source.rows("w", 1, 3, out) is out
    assert np.array_equal(out, np.eye(4)[1:3])
    for bad in (np.empty((2, 4)), np.empty((3, 4), np.float32), np.empty((4, 2), np.float32).T):
        with pytest.raises(ValueError, match="out must be"):
            source.rows("w", 1, 3, bad)
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="rows"):
            source.rows("w", start, stop)
    with pytest.raises(KeyError):
        source.rows("v", 0, 1)


def test_a_whole_vocabulary_is_views(tmp_path):
    words = [f"w{i}" for i in range(50_000)]
    table = open_source(write_gguf(tmp_path / "x.gguf", {"t": words})).metadata["t"]
    assert len(table) == 50_000
    assert table[49_999] == "w49999"
    assert table[7:9] == ["w7", "w8"]


def test_a_closed_source_leaves_its_metadata_valid(tmp_path):
    source = open_source(write_gguf(tmp_path / "x.gguf", {"t": ["a", "b"], "n": [1, 2]}, {"v": VECTOR}))
    raw = source.raw("v")
    source.close()
    assert list(source.metadata["t"]) == ["a", "b"]
    assert list(source.metadata["n"]) == [1, 2]
    assert bytes(raw) == VECTOR[1].tobytes()
    with pytest.raises(ValueError):
        source.rows("v", 0, 1)


def test_the_digest_tells_sources_apart(tmp_path):
    def digest(metadata, tensors, **more):
        return open_source(write_gguf(tmp_path / "x.gguf", metadata, tensors, **more)).digest()

    one = digest(ARCH, {"v": VECTOR})
    assert one == digest(ARCH, {"v": VECTOR})
    assert len(one) == 32
    others = [
        digest({"general.architecture": "qwen2"}, {"v": VECTOR}),
        digest(ARCH, {"w": VECTOR}),
        digest(ARCH, {"v": ("F16", VECTOR[1], (8,))}),
        digest(ARCH, {"v": ("F32", np.arange(16, dtype=np.float32), (8,))}),  # 32 bytes too many at the end
    ]
    assert len({one, *others}) == 5


def resident(path: Path) -> int:
    """KiB of the file that this process has mapped in."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc/self/smaps")
def test_released_rows_leave_memory_and_can_be_read_again(tmp_path):
    w = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    path = write_gguf(tmp_path / "x.gguf", ARCH, {"w": ("F32", w, w.shape), "v": VECTOR})
    source = open_source(path)
    source.rows("w", 0, 1024)
    before = resident(path)
    source.release("w", 0, 512)
    halfway = resident(path)
    source.release("w")
    assert before >= 4096
    assert halfway <= before - 1900
    assert resident(path) <= 300
    assert np.array_equal(source.rows("w", 0, 1024), w)


# --- refusals: one line, with what, where and the remedy ---


def test_files_that_are_no_gguf(tmp_path, refusal):
    with pytest.raises(SourceError, match="no such file"):
        open_source(tmp_path / "none.gguf")
    with pytest.raises(SourceError, match="no such file"):
        open_source(write_gguf(tmp_path / "x.gguf", ARCH) / "below")
    with pytest.raises(SourceError, match="name the folder"):
        open_source(write_gguf(tmp_path / "model.safetensors", ARCH))
    assert "the file is empty" in refusal(b"")
    assert "not a GGUF file: it starts with b'PK" in refusal(b"PK\x03\x04" + bytes(100))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        open_source(tmp_path / "pipe")
    with pytest.raises(StorageError):
        open_source("nul\0byte")


def test_versions(refusal):
    good = gguf_bytes(ARCH)
    assert "big-endian" in refusal(good[:4] + struct.pack(">I", 3) + good[8:])
    assert "version 1 is not supported (2 and 3 are)" in refusal(gguf_bytes(ARCH, version=1))
    assert "version 9 is not supported (2 and 3 are): written by a newer program" in refusal(
        gguf_bytes(ARCH, version=9)
    )


def test_a_cut_file_is_refused_wherever_it_is_cut(refusal):
    tensors = {"v": VECTOR, "w": ("Q4_0", np.ones((3, 64), np.float32), (3, 64))}
    whole = gguf_bytes({**ARCH, "t": ["a", "bc"], "n": [1.0, 2.0], "flag": True}, tensors)
    for size in range(len(whole)):
        message = refusal(whole[:size])
        assert (
            "not a GGUF" in message or "empty" in message
            if size < 4
            else "download it again" in message or "cut" in message
        )
    last = refusal(whole[:-1])
    assert f"the file ends at {len(whole) - 1}, tensor 'w' needs {len(whole)}" in last


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, MAX_PAIRS + 1), "metadata count at offset 16"),
        ((0, 2**63), "metadata count at offset 16"),
        ((MAX_TENSORS + 1, 1), "tensor count at offset 8"),
        ((10**9, 1), "tensor count at offset 8"),
        ((2**64 - 1, 1), "tensor count at offset 8"),
        ((100, 1), "100 do not fit"),
        ((0, 2), "metadata key 1"),
    ],
)
def test_counts(refusal, counts, message):
    assert message in refusal(gguf_bytes(ARCH, counts=counts))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", 1), ("a", 2)], "metadata key 'a' at offset"),
        ([("", 1)], "a length of 0"),
        ([("k" * 2000, 1)], "a length of 2000"),
        ([(b"\xff\xfe", 1)], "not UTF-8"),
        ([("b", Raw(7, b"\2"))], "a bool of 2, not 0 or 1"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", 7, 3) + b"\0\1\3"))], "a bool of 3"),
        ([("b", Raw(13, bytes(8)))], "unknown value type 13"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", 99, 1) + bytes(8)))], "unknown array type 99"),
        ([("b", Raw(ARRAY, struct.pack("<IQIQ", ARRAY, 1, 4, 0)))], "an array of arrays"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", 12, 2**60)))], "needs 9223372036854775808 bytes"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", 0, 2**64 - 1)))], "needs 18446744073709551615 bytes"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", STRING, 2**60)))], "strings do not fit"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + struct.pack("<Q", 2**63)))], "string 1"),
        ([("b", Raw(ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 2**64 - 8)))], "string 0"),
        ([("b", Raw(STRING, struct.pack("<Q", 2**64 - 1)))], "needs 18446744073709551615 bytes"),
    ],
)
def test_metadata(refusal, pairs, message):
    assert message in refusal(gguf_bytes([*ARCH.items(), *pairs]) + bytes(4))


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 40, -32, "32", 32.0, True])
def test_alignments(refusal, alignment):
    message = refusal(gguf_bytes({"general.alignment": alignment}, {"v": VECTOR}))
    assert "general.alignment" in message
    assert "power of two" in message


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"dims": {"v": []}}, "0 dimensions"),
        ({"dims": {"v": [8, 1, 1, 1, 1]}}, "5 dimensions"),
        ({"dims": {"v": [0]}}, "empty or too large"),
        ({"dims": {"v": [8, 0]}}, "empty or too large"),
        ({"dims": {"v": [2**32, 2**32]}}, "empty or too large"),
        ({"dims": {"v": [2**63, 2, 2**63, 4]}}, "empty or too large"),
        ({"dims": {"v": [2**40]}}, "download it again"),
        ({"offsets": {"v": 4}}, "no multiple of the alignment 32"),
        ({"offsets": {"v": 2**63}}, "download it again"),
        ({"offsets": {"v": 2**64 - 32}}, "download it again"),
        ({"offsets": {"w": 0}}, "tensor 'w' at offset"),
    ],
)
def test_tensor_places(refusal, lies, message):
    tensors = {"v": VECTOR, "w": ("F32", np.ones(64, np.float32), (64,))}
    assert message in refusal(gguf_bytes(ARCH, tensors, **lies))


def test_tensors_that_overlap_by_a_row(refusal):
    tensors = {"v": ("F32", np.ones(16, np.float32), (16,)), "w": VECTOR}
    message = refusal(gguf_bytes(ARCH, tensors, offsets={"w": 32}))
    assert "tensor 'w'" in message
    assert "overlaps that of 'v'" in message


def test_tensor_names(refusal):
    assert "tensor 'v' at offset" in refusal(gguf_bytes(ARCH, [("v", VECTOR), ("v", VECTOR)]))
    assert "a length of 300" in refusal(gguf_bytes(ARCH, {"v" * 300: VECTOR}))


def test_tensor_types(refusal):
    message = refusal(gguf_bytes(ARCH, {"blk.0.ffn": (29, bytes(56), (256,))}))
    assert "tensor 'blk.0.ffn'" in message
    assert "type IQ1_M is not supported" in message
    assert "Q4_K" in message
    assert "type 77, unknown here," in refusal(gguf_bytes(ARCH, {"v": (77, bytes(56), (256,))}))
    assert "type Q4_2" in refusal(gguf_bytes(ARCH, {"v": (4, bytes(56), (256,))}))
    message = refusal(gguf_bytes(ARCH, {"v": ("Q4_K", bytes(144), (2, 128))}))
    assert "128 columns are no multiple of Q4_K's block of 256" in message


def test_split_files(refusal):
    message = refusal(gguf_bytes({**ARCH, "split.count": np.uint16(3), "split.no": np.uint16(0)}))
    assert "part 1 of 3 of a split GGUF" in message
    assert "merge" in message


def test_a_header_cannot_ask_for_more_memory_than_the_limit(tmp_path):
    """A sparse file of zeros is an array of a hundred million empty strings, or of numbers without end."""
    path = tmp_path / "x.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, n in ((STRING, MAX_METADATA // 8), (12, MAX_METADATA // 4), (7, MAX_METADATA + 1)):
        path.write_bytes(gguf_bytes({"b": Raw(ARRAY, struct.pack("<IQ", kind, n))}))
        os.truncate(path, 4 << 30)
        with pytest.raises(SourceError, match="over the limit"):
            open_source(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@given(data=st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_refused_or_read(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + data)
    with contextlib.suppress(SourceError):
        open_source(path)
