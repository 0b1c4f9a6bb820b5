"""Safetensors files: what the reference library writes is read, every attack on the header is refused in one line."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ork.errors import SourceError
from ork.sources.safetensors import MAX_HEADER, MAX_PARTS, SafetensorsFile, parse_json

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_bytes(header, data=bytes(32)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def but(name, **changes):
    return {**GOOD, name: {**GOOD[name], **changes}}


@pytest.fixture
def refusal(tmp_path):
    def refused(data: bytes) -> str:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(data)
        with pytest.raises(SourceError) as e:
            SafetensorsFile(path)
        message = str(e.value)
        assert message.startswith(str(path))
        assert "\n" not in message
        return message

    return refused


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    dtype=st.sampled_from(["f4", "f2", "i8", "u1", "?"]),
)
def test_what_the_reference_library_writes_is_read(tmp_path_factory, shapes, dtype):
    path = tmp_path_factory.getbasetemp() / "good.safetensors"
    rng = np.random.default_rng(3)
    tensors = {f"t{i}": rng.integers(0, 2, s).astype(dtype) for i, s in enumerate(shapes)}
    save_file(tensors, path, metadata={"format": "np"})
    file = SafetensorsFile(path)
    assert set(file.entries) == set(tensors)
    for name, t in tensors.items():
        assert file.entries[name].shape == t.shape
        assert file.bytes_of(name) == t.tobytes()
    starts = [e.start for e in file.entries.values()]
    assert starts == sorted(starts)


def test_the_template_of_the_attacks_is_good(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(json.dumps(GOOD).encode() + b"   "))
    assert list(SafetensorsFile(path).entries) == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"1234567", "no room for a header"),
        (struct.pack("<Q", 0) + bytes(8), "not a JSON object"),
        (struct.pack("<Q", 2**64 - 1) + bytes(8), "not a safetensors file"),
        (struct.pack("<Q", MAX_HEADER + 1) + bytes(8), "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "the file ends at 10, its header needs 108"),
        (file_bytes(b"[1, 2]"), "not a JSON object"),
        (file_bytes(b'{"a": '), "not JSON"),
        (file_bytes(b'{"a": \xff\xff}'), "not JSON"),
        (file_bytes(b'{"a":' * 5000), "not JSON"),
        (file_bytes(b'{"a":' + b"[" * 100_000), "not JSON"),
        (file_bytes(b'{"a":' + b"9" * 100_000 + b"}"), "more than 20 digits"),
        (file_bytes(b'{"a": [' + b"0," * (MAX_PARTS + 1) + b"0]}"), "damaged"),
    ],
)
def test_headers(refusal, data, message):
    assert message in refusal(data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (but("b", data_offsets=[20, 28]), "tensor 'b' at offset"),
        (but("b", data_offsets=[20, 28]), "overlaps"),
        (but("b", data_offsets=[0, 8]), "overlaps"),
        ({"a": GOOD["a"], "b": {**GOOD["a"]}}, "overlaps"),
        (but("b", data_offsets=[26, 34]), "the file ends at"),
        (but("b", data_offsets=[2**62, 2**62 + 8]), "the file ends at"),
        (but("a", shape=[2, 2], data_offsets=[0, 16]), "leaves a hole of 8 bytes"),
        (but("a", shape=[2, 2], data_offsets=[8, 24]), "leaves a hole of 8 bytes"),
        ({"a": GOOD["a"]}, "8 bytes from offset"),
        (but("a", shape=[2, 4]), "F32 [2, 4] takes 32 bytes, its data_offsets hold 24"),
        (but("a", shape=[2**62, 2**62, 2**62]), "its data_offsets hold 24"),
        (but("a", dtype="F33"), "unknown dtype 'F33'"),
        (but("a", dtype=3), "unknown dtype '3'"),
        (but("a", shape=[-2, -3]), "shape"),
        (but("a", shape=[2.0, 3]), "shape"),
        (but("a", shape="23"), "shape"),
        (but("a", shape=[True, 6]), "shape"),
        (but("a", shape=[1] * 100), "shape"),
        (but("a", data_offsets=[24, 0]), "data_offsets"),
        (but("a", data_offsets=[-24, 0]), "data_offsets"),
        (but("a", data_offsets=[0]), "data_offsets"),
        (but("a", data_offsets=[0, 10**19]), "data_offsets"),
        (but("a", extra=1), "not described by"),
        ({**GOOD, "c": 5}, "not described by"),
        ({**GOOD, "": GOOD["a"]}, "a name of 0 characters"),
        (b'{"a": %b, "a": %b}' % ((json.dumps(GOOD["a"]).encode(),) * 2), "gives 'a' twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "gives 'dtype' twice"),
    ],
)
def test_entries(refusal, header, message):
    assert message in refusal(file_bytes(header))


def test_a_cut_file_is_refused_wherever_it_is_cut(refusal):
    whole = file_bytes(GOOD)
    for size in range(len(whole)):
        refusal(whole[:size])


def test_json_that_is_no_object(tmp_path):
    with pytest.raises(SourceError, match="not an object"):
        parse_json(tmp_path / "config.json", b"[]")


def test_damaged_headers_are_refused_or_read(tmp_path):
    rng = np.random.default_rng(17)
    good = np.frombuffer(file_bytes(GOOD), np.uint8)
    path = tmp_path / "x.safetensors"
    refused = 0
    for _ in range(1000):
        bad = good.copy()
        at = rng.integers(0, len(bad) - 32, rng.integers(1, 4))
        bad[at] = rng.integers(0, 256, len(at)) if rng.random() < 0.5 else bad[rng.permutation(at)] ^ 1
        path.write_bytes(bad.tobytes())
        try:
            SafetensorsFile(path)
        except SourceError as e:
            refused += "\n" not in str(e)
    assert 500 < refused <= 1000
