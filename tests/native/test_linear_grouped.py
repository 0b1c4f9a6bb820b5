"""4-bit codes, and groups along K with scales of their own: exact sums, floats within rounding, paths alike."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native, tiles
from ork.devices.base import SliceSpec
from ork.devices.cpu import CODEC_IDS, CpuDevice
from tests.native.oracles import F32, aligned

ISAS = native.isa_names()
NF4 = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127])
RANGES = {"i4": (-8, 8), "nf4": (0, 16), "i8": (-128, 128)}


class Grouped:
    """A random [N, K] weight with scales per channel and, if group > 0, per group; its slices; its integers."""

    def __init__(self, codec: str, N: int, K: int, group: int, rng: np.random.Generator, cuts: tuple[int, ...] = ()):
        self.codec, self.N, self.K, self.group = codec, N, K, group
        Np, Kp = tiles.pad_n(N), tiles.pad_k(K)
        codes = np.full((Np, Kp), 7 if codec == "nf4" else 0, np.int8)  # level 0
        codes[:N, :K] = rng.integers(*RANGES[codec], (N, K))
        self.integers = NF4[codes] if codec == "nf4" else codes.astype(np.int64)
        self.channel = np.zeros(Np, np.float32)
        self.channel[:N] = rng.uniform(0.01, 0.03, N)
        self.groups = None
        if group:
            self.groups = rng.uniform(0.2, 1.5, (Np, Kp // group)).astype(np.float16)
        self.blobs, self.slices = [], []
        columns = list(pairwise((0, *cuts, Np))) if cuts else tiles.slice_columns(codec, Kp, N, group)
        for n0, n1 in columns:
            layout = tiles.slice_layout(codec, Kp, n1 - n0, group)
            parts = None if self.groups is None else self.groups[n0:n1]
            blob = aligned(layout.nbytes)
            blob[:] = tiles.build_blob(layout, codes[n0:n1], self.channel[n0:n1], parts)
            self.blobs.append(blob)
            spec = SliceSpec("w", codec, K, Kp, layout.ks, n0, n1, group=group)
            self.slices.append(CpuDevice.host_slice(spec, blob))

    def sums(self, rows: native.QuantisedRows) -> npt.NDArray[np.int32]:
        """[M, groups, padded N] through `native.accumulate`."""
        M, groups = rows.rows, rows.width // rows.group if rows.group else 1
        out = np.zeros((M * groups, tiles.pad_n(self.N)), np.int32)
        for s in self.slices:
            native.accumulate(rows, s, out)
        return out.reshape(M, groups, -1)

    def exact(self, codes: npt.NDArray[np.int8], group: int) -> npt.NDArray[np.int64]:
        """The same from numpy's integers."""
        M, Kp = codes.shape
        a = codes.astype(np.int64).reshape(M, -1, group or Kp).transpose(1, 0, 2)
        w = self.integers.astype(np.int64).reshape(len(self.integers), -1, group or Kp).transpose(1, 2, 0)
        return (a.astype(np.float64) @ w.astype(np.float64)).astype(np.int64).transpose(1, 0, 2)  # below 2^53: exact

    def times(self, x: F32, rows: native.QuantisedRows, bias: F32 | None = None) -> F32:
        out = native.Array(len(x), self.N)
        held = None if bias is None else native.Array.of(bias.reshape(1, -1))
        count = len(self.slices)
        native.linear(native.Array.of(x), rows, self.slices, [out] * count, [held] * count)
        return out.numpy().copy()

    def close(self, rows: native.QuantisedRows, bias: F32 | None) -> tuple[npt.NDArray, npt.NDArray]:
        """(the product in f64, how far float rounding may lead away from it)"""
        a = np.asarray(rows.scales(), np.float64).reshape(rows.rows, -1, 1)
        terms = self.exact(np.asarray(rows.codes()), rows.group) * a
        if self.groups is not None:
            terms = terms * self.groups.astype(np.float64).T
        terms = terms * self.channel.astype(np.float64)
        b = 0 if bias is None else np.pad(bias, (0, len(self.channel) - self.N)).astype(np.float64)
        bound = (np.abs(terms).sum(axis=1) + np.abs(b)) * (terms.shape[1] + 4) * 2.0**-24
        return (terms.sum(axis=1) + b)[:, : self.N], bound[:, : self.N]


def padded(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    return np.pad(codes, ((0, 0), (0, tiles.pad_k(codes.shape[1]) - codes.shape[1])))


# (codec, weight group, group of the rows) of all kinds that a pack can ask for; None: the group itself is drawn
CASES = [("i4", True, True), ("nf4", True, True), ("i8", True, True), ("i4", False, False), ("nf4", False, False)]
CASES += [("i8", False, True), ("i4", False, True)]


def drawn(case: tuple[str, bool, bool], tilewise: int, group: int) -> tuple[str, int, int, int]:
    codec, weights, rows = case
    K = group * tilewise if rows else 32 * tilewise
    return codec, K, group if weights else 0, group if rows else 0


@given(
    st.sampled_from(CASES),
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from([32, 64, 96, 128, 640]),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sums_are_exact(
    case: tuple[str, bool, bool], M: int, count: int, group: int, N: int, seed: int, extreme: bool
) -> None:
    codec, K, weight_group, row_group = drawn(case, count, group)
    rng = np.random.default_rng(seed)
    w = Grouped(codec, N, K, weight_group, rng)
    codes = rng.choice(np.array([-128, 127, 0] if extreme else range(-127, 128), np.int8), (M, K))
    want = w.exact(codes, row_group)
    for name in ISAS:
        native.choose_isa(name)
        assert np.array_equal(w.sums(native.QuantisedRows.of(codes, row_group)), want), name
    native.choose_isa("best")


@given(
    st.sampled_from(CASES),
    st.integers(1, 20),
    st.integers(1, 12),
    st.sampled_from([32, 64, 128, 640]),
    st.integers(1, 150),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_floats(
    case: tuple[str, bool, bool], M: int, count: int, group: int, N: int, seed: int, with_bias: bool
) -> None:
    codec, K, weight_group, row_group = drawn(case, count, group)
    rng = np.random.default_rng(seed)
    w = Grouped(codec, N, K, weight_group, rng)
    bias = rng.standard_normal(N).astype(np.float32) if with_bias else None
    x = rng.standard_normal((M, K)).astype(np.float32) * rng.choice([0.0, 1.0, 30.0], (M, 1)).astype(np.float32)
    rows = native.quantise(native.Array.of(x), None, 0, row_group)
    want, bound = w.close(rows, bias)
    first = None
    for name in ISAS:
        native.choose_isa(name)
        got = w.times(x, rows, bias)
        assert (np.abs(got - want) <= bound).all(), name
        first = got if first is None else first
        assert np.array_equal(got, first), name
    native.choose_isa("best")


@pytest.mark.parametrize(("codec", "K", "weight_group", "row_group"), [
    ("i4", 8960, 128, 128), ("nf4", 8960, 0, 0), ("nf4", 11008, 32, 32),
    ("i8", 8960, 0, 128), ("i4", 40, 0, 0), ("i4", 100, 0, 0),
])  # fmt: skip
@pytest.mark.parametrize("M", [1, 2, 9])
def test_k_slices_and_padding(isa: str, codec: str, K: int, weight_group: int, row_group: int, M: int) -> None:
    """Longer than a K slice (8960 with groups of 128 in int8: some groups lie in two), and not a multiple of 32."""
    rng = np.random.default_rng(K)
    w = Grouped(codec, 70, K, weight_group, rng)
    codes = padded(rng.integers(-128, 128, (M, K)).astype(np.int8))
    assert np.array_equal(w.sums(native.QuantisedRows.of(codes, row_group)), w.exact(codes, row_group))
    x = rng.standard_normal((M, K)).astype(np.float32)
    rows = native.quantise(native.Array.of(x), None, 0, row_group)
    want, bound = w.close(rows, None)
    assert (np.abs(w.times(x, rows) - want) <= bound).all()


@pytest.mark.parametrize(("codec", "weight_group", "row_group"), [
    ("i4", 32, 32), ("nf4", 128, 128), ("nf4", 0, 0), ("i8", 0, 64), ("i8", 64, 64),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_batch(codec: str, weight_group: int, row_group: int, threads: int) -> None:
    native.set_threads(threads)
    rng = np.random.default_rng(2)
    w = Grouped(codec, 460, 1152, weight_group, rng, cuts=(192, 256))  # of three widths
    x = rng.standard_normal((67, 1152)).astype(np.float32)

    def product(part: F32) -> F32:
        return w.times(part, native.quantise(native.Array.of(part), None, 0, row_group))

    whole = product(x)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 5), slice(3, 10), slice(11, 36)):
        assert np.array_equal(product(np.ascontiguousarray(x[rows])), whole[rows])


def test_codecs_side_by_side() -> None:
    """One call with weights of several codecs over the same rows, as in a mixed recipe: each as if alone."""
    rng = np.random.default_rng(4)
    weights = [
        Grouped(c, n, 256, g, rng) for c, n, g in (("i4", 200, 64), ("i8", 130, 0), ("nf4", 64, 64), ("i8", 64, 64))
    ]
    for M in (1, 5, 20):
        x = rng.standard_normal((M, 256)).astype(np.float32)
        rows = native.quantise(native.Array.of(x), None, 0, 64)
        outs = [native.Array(M, w.N) for w in weights]
        parts = [(s, out) for w, out in zip(weights, outs, strict=True) for s in w.slices]
        native.linear(native.Array.of(x), rows, [s for s, _ in parts], [o for _, o in parts], [None] * len(parts))
        for w, out in zip(weights, outs, strict=True):
            assert np.array_equal(out.numpy(), w.times(x, rows))


@pytest.mark.parametrize("codec", ["i4", "nf4", "i8"])
@pytest.mark.parametrize("M", [1, 4])
def test_padding_is_zero(codec: str, M: int) -> None:
    rng = np.random.default_rng(3)
    w = Grouped(codec, 70, 64, 32, rng)
    x = rng.standard_normal((M, 64)).astype(np.float32)
    out = native.Array(M, 128)
    native.linear(native.Array.of(x), native.quantise(native.Array.of(x), None, 0, 32), w.slices, [out], [None])
    assert out.numpy()[:, :70].any()
    assert not out.numpy()[:, 70:].any()


@pytest.mark.parametrize("codec", ["i4", "nf4"])
def test_inflated_codes_are_int8_tiles(isa: str, codec: str) -> None:
    rng = np.random.default_rng(5)
    n, K = 192, 288
    codes = rng.integers(*RANGES[codec], (n, K)).astype(np.int8)
    levels = NF4[codes].astype(np.int8) if codec == "nf4" else codes
    out = np.empty(n * K, np.int8)
    native.inflate(CODEC_IDS[codec], tiles.pack_codes(codec, codes), out, K // 32)
    assert np.array_equal(out.view(np.uint8), tiles.pack_codes("i8", levels))
