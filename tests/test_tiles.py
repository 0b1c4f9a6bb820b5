"""Weight layouts against a formula evaluated element by element."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import tiles

SCALED = [c.name for c in tiles.CODECS.values() if c.scaled]


def ks_oracle(K: int, group: int) -> int:
    """The definition, by trying everything."""
    if K <= 4096:
        return K
    return max(d for d in range(1, 4097) if K % d == 0 and d % 32 == 0 and (group == 0 or d % group == 0))


def code_at(codec: str, packed: bytes, at: tuple[int, int], shape: tuple[int, int], ks: int) -> float:
    """Code (n, k) read straight from the address formula of the chip's order."""
    (n, k), (columns, K) = at, shape
    if codec == "f32":
        (value,) = np.frombuffer(packed, "<f4", 1, 4 * ((n // 16) * K * 16 + k * 16 + n % 16))
        return float(value)
    G = {"i8": 32, "i4": 64, "nf4": 64, "f16": 16}[codec]
    index = (k // ks) * columns * ks + (n // G) * ks * G + (k % ks // 32) * G * 32 + (n % G) * 32 + k % 32
    if codec == "f16":
        return float(np.frombuffer(packed, "<f2", 1, 2 * index)[0])
    if codec == "i8":
        return packed[index] - 256 * (packed[index] > 127)
    nibble = packed[index // 2] >> (4 if index % 2 else 0) & 15
    return nibble - 16 * (nibble > 7) if codec == "i4" else nibble


def random_codes(codec: str, n: int, K: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if codec in ("f16", "f32"):
        return rng.standard_normal((n, K)).astype(tiles.CODECS[codec].dtype)
    low, high = {"i8": (-128, 128), "i4": (-8, 8), "nf4": (0, 16)}[codec]
    return rng.integers(low, high, (n, K)).astype(np.int8)


shapes = st.tuples(
    st.sampled_from(sorted(tiles.CODECS)),
    st.integers(1, 4),  # columns / 64
    st.sampled_from([32, 64, 96, 576, 1536, 4096, 4128, 4160, 4864, 8192, 8960, 11008]),
    st.sampled_from([0, 32, 64, 128]),
    st.integers(0, 2**32 - 1),
).map(lambda t: (*t[:3], t[3] if t[0] in SCALED and t[2] % max(t[3], 1) == 0 else 0, t[4]))


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_codes_lie_where_the_formula_says_and_come_back(case: tuple[str, int, int, int, int]) -> None:
    codec, blocks, K, group, seed = case
    n = 64 * blocks
    codes = random_codes(codec, n, K, seed)
    packed = tiles.pack_codes(codec, codes, group)
    assert packed.nbytes == n * K * tiles.CODECS[codec].bits // 8
    ks = ks_oracle(K, group)
    rng = np.random.default_rng(seed)
    raw = packed.tobytes()
    for i, k in zip(rng.integers(0, n, 200).tolist(), rng.integers(0, K, 200).tolist()):
        assert code_at(codec, raw, (i, k), (n, K), ks) == codes[i, k]
    np.testing.assert_array_equal(tiles.unpack_codes(codec, packed, n, K, group), codes)


@pytest.mark.parametrize("codec", sorted(tiles.CODECS))
def test_every_element_of_a_small_tile(codec: str) -> None:
    codes = random_codes(codec, 64, 96, 7)
    raw = tiles.pack_codes(codec, codes).tobytes()
    assert [[code_at(codec, raw, (n, k), (64, 96), 96) for k in range(96)] for n in range(64)] == codes.tolist()


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_a_blob_splits_into_what_it_was_built_from(case: tuple[str, int, int, int, int]) -> None:
    codec, blocks, K, group, seed = case
    n = 64 * blocks
    rng = np.random.default_rng(seed)
    layout = tiles.slice_layout(codec, K, n, group)
    codes = random_codes(codec, n, K, seed)
    channel = rng.random(n).astype(np.float32) if codec in SCALED else None
    groups = rng.random((n, K // group)).astype(np.float16) if group else None
    blob = tiles.build_blob(layout, codes, channel, groups)
    parts = [layout.codes, layout.channel, layout.groups]
    assert all(p.offset % 64 == 0 for p in parts)
    assert layout.nbytes == blob.nbytes == sum(p.nbytes for p in parts)
    for got, want in zip(tiles.unpack_blob(layout, blob.tobytes()), (codes, channel, groups)):
        assert (got is None) == (want is None)
        if want is not None:
            np.testing.assert_array_equal(got, want)
    if group and groups is not None:
        G = tiles.CODECS[codec].G
        tiled = tiles.split_blob(layout, blob)[2]
        assert tiled is not None
        for i, g in zip(rng.integers(0, n, 50), rng.integers(0, K // group, 50)):
            assert tiled[i // G, g, i % G] == groups[i, g]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1500), st.sampled_from([0, 32, 64, 96, 128, 256]))
def test_k_slices_are_the_largest_that_the_rule_allows(units: int, group: int) -> None:
    K = units * (group or 32)
    assert tiles.ks_of(K, group) == ks_oracle(K, group)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(tiles.CODECS)), st.integers(1, 70_000), st.integers(1, 300_000))
def test_slices_cover_the_padded_columns_in_pieces_of_about_two_mib(codec: str, K: int, N: int) -> None:
    columns = tiles.slice_columns(codec, K, N)
    assert columns[0][0] == 0
    assert columns[-1][1] == tiles.pad_n(N)
    assert N <= tiles.pad_n(N) < N + 64
    assert all(a[1] == b[0] for a, b in pairwise(columns))
    widths = [n1 - n0 for n0, n1 in columns]
    assert all(w % 64 == 0 for w in widths)
    assert max(widths) <= 8192
    assert min(widths[:-1], default=widths[0]) == widths[0] >= widths[-1] > 0
    per_column = tiles.pad_k(K) * tiles.CODECS[codec].bits / 8
    assert widths[0] * per_column <= 2 << 20 or widths[0] == 64
    if len(widths) > 1:
        assert (widths[0] + 64) * per_column > 2 << 20 or widths[0] == 8192


@pytest.mark.parametrize(
    ("K", "n", "group", "codec"),
    [
        (64, 63, 0, "i8"),
        (64, 8256, 0, "i8"),
        (96, 64, 64, "i8"),
        (64, 64, 48, "i8"),
        (64, 64, 32, "f16"),
        (0, 64, 0, "i8"),
    ],
)
def test_a_geometry_that_the_layout_cannot_hold_is_refused(K: int, n: int, group: int, codec: str) -> None:
    with pytest.raises(ValueError):
        tiles.slice_layout(codec, K, n, group)


def test_wrong_codes_and_scales_are_refused() -> None:
    layout = tiles.slice_layout("i8", 64, 64)
    codes = np.zeros((64, 64), np.int8)
    with pytest.raises(ValueError, match="scales"):
        tiles.build_blob(layout, codes)
    with pytest.raises(ValueError, match="shape"):
        tiles.build_blob(layout, codes[:, :32], np.ones(64, np.float32))
    with pytest.raises(ValueError, match="takes int8"):
        tiles.pack_codes("i8", codes.astype(np.int16))
    with pytest.raises(ValueError, match="bytes"):
        tiles.split_blob(layout, bytes(10))
