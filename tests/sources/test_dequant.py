"""Every tensor type expands to the bits that ggml's reference gives."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.sources.dequant import BY_NAME, TYPES, UNREAD, expand
from tests.gguf_writer import random_blocks


def bits(a):
    return np.ascontiguousarray(a, np.float32).view(np.uint32)


def reference(kind, data, shape):
    t = BY_NAME[kind]
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], t.row_bytes(shape[1]))
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(shape)


def test_the_table_agrees_with_ggml():
    for t in TYPES.values():
        assert gguf.GGMLQuantizationType[t.name] == t.id
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(t.id)] == (t.block, t.bytes)
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"} <= set(BY_NAME)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"} <= set(BY_NAME)
    for t in gguf.GGMLQuantizationType:
        assert t in TYPES or UNREAD[t] == t.name


@pytest.mark.parametrize("kind", BY_NAME)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), blocks=st.integers(1, 5))
def test_bits_of_random_blocks(kind, seed, rows, blocks):
    t = BY_NAME[kind]
    data = random_blocks(kind, rows * blocks, np.random.default_rng(seed))
    shape = (rows, blocks * t.block)
    got = expand(kind, memoryview(data), 0, np.empty(shape, np.float32))
    assert np.array_equal(bits(got), bits(reference(kind, data, shape)))


@pytest.mark.parametrize("kind", BY_NAME)
@given(data=st.data())
def test_a_row_range_is_a_slice_of_the_whole(kind, data):
    t = BY_NAME[kind]
    raw = memoryview(random_blocks(kind, 12 * 2, np.random.default_rng(7)))
    whole = expand(kind, raw, 0, np.empty((12, 2 * t.block), np.float32))
    start = data.draw(st.integers(0, 12))
    stop = data.draw(st.integers(start, 12))
    part = expand(kind, raw, start, np.empty((stop - start, 2 * t.block), np.float32))
    assert np.array_equal(bits(part), bits(whole[start:stop]))


def test_every_half_expands_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = expand("F16", memoryview(halves.tobytes()), 0, np.empty((1, 1 << 16), np.float32))[0]
    want = halves.view(np.float16).astype(np.float32)
    finite = ~np.isnan(want)
    assert np.array_equal(bits(got[finite]), bits(want[finite]))
    assert np.isnan(got[~finite]).all()


def test_rows_outside_of_the_data_are_refused():
    data = memoryview(random_blocks("Q4_0", 4, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="range"):
        expand("Q4_0", data, 3, np.empty((2, 32), np.float32))
    with pytest.raises(ValueError, match="range"):
        expand("Q4_0", data[:-1], 3, np.empty((1, 32), np.float32))
