"""Codecs: codes and scales of every shape against plain numpy, what a search gains, the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native, tiles
from ork.quant import codecs
from ork.quant.codecs import BadRow, dequantise, effective_group, quantise
from tests.quant import plain
from tests.quant.plain import relative_error

QUANTISED = ["i8", "i4", "nf4"]


def random_rows(n: int, K: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, one of them zero, one with a group of zeros and an outlier."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, K)) * np.exp2(rng.integers(-20, 20, (n, 1)))
    rows[n // 2] = 0
    rows[-1, : K // 2] = 0
    rows[-1, -1] = 300
    return rows.astype(np.float32)


# --- codes and scales


@pytest.mark.parametrize("codec", QUANTISED)
@settings(max_examples=25)
@given(n=st.integers(1, 9), K=st.integers(1, 260), asked=st.sampled_from([0, 32, 64, 128]), seed=st.integers(0, 99))
def test_absmax_is_that_of_a_plain_quantiser(codec: str, n: int, K: int, asked: int, seed: int) -> None:
    rows, group = random_rows(n, K, seed), effective_group(K, asked)
    q = quantise(codec, rows, group)
    channel, groups = plain.scales_of(codec, rows, group)
    assert np.array_equal(q.channel, channel)
    assert (q.groups is None) == (groups is None)
    if groups is not None:
        assert np.array_equal(q.groups, groups)
    scales = plain.stored_scales(channel, groups, K)
    codes = plain.codes_of(codec, rows, scales)
    assert np.array_equal(q.codes[:, :K], codes)
    assert q.codes.shape == (n, tiles.pad_k(K))
    assert not q.codes[:, K:].any()
    assert np.array_equal(dequantise(codec, q, K), plain.values_of(codec, codes, scales))


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("K", [96, 100, 256])
def test_searched_codes_are_the_nearest_under_the_stored_scale(codec: str, K: int) -> None:
    rows = random_rows(50, K)
    importance = np.random.default_rng(1).random(K).astype(np.float32)
    for group in {0, effective_group(K, 64)}:
        for search in ("mse", "importance"):
            q = quantise(codec, rows, group, search=search, importance=importance if search == "importance" else None)
            scales = plain.stored_scales(q.channel, q.groups, K)
            assert np.array_equal(q.codes[:, :K], plain.codes_of(codec, rows, scales))
            assert codec == "nf4" or (scales >= 0).all()  # a symmetric codec needs no negative scale


@pytest.mark.parametrize("codec", QUANTISED)
def test_a_group_scale_keeps_what_f16_has(codec: str) -> None:
    """Groups of 2^-10 of a row's absmax are still scaled to 11 bits, and rows of any size have the same codes."""
    rows = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    rows[:, :128] *= np.float32(2**-10)
    q = quantise(codec, rows, 32)
    for size in (2.0**-90, 2.0**100):
        other = quantise(codec, rows * np.float32(size), 32)
        assert np.array_equal(other.codes, q.codes)
        assert np.array_equal(other.groups, q.groups)
        assert np.array_equal(other.channel, q.channel * np.float32(size))
    error = relative_error(rows[:, :128], dequantise(codec, q, 256)[:, :128])
    assert error == pytest.approx(relative_error(rows[:, 128:], dequantise(codec, q, 256)[:, 128:]), rel=0.15)
    assert np.array_equal(codecs.channel_scales(codec, np.abs(rows).max(axis=1)), q.channel)
    assert q.groups.max() < 65504 / 8  # room for scales that grow


def test_groups_are_the_largest_that_divide() -> None:
    assert [effective_group(K, 128) for K in (1536, 960, 576, 32, 100, 8960)] == [128, 64, 64, 32, 0, 128]
    assert [effective_group(1536, asked) for asked in (128, 127, 64, 33, 32, 31, 0)] == [128, 64, 64, 32, 32, 0, 0]


@pytest.mark.parametrize(("codec", "dtype"), [("f16", np.float16), ("f32", np.float32)])
def test_floats_are_kept(codec: str, dtype: type) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 50)).astype(np.float32)
    q = quantise(codec, rows)
    assert q.channel is None
    assert q.groups is None
    assert q.codes.dtype == dtype
    assert np.array_equal(q.codes[:, :50], rows.astype(dtype))
    assert not q.codes[:, 50:].any()
    assert np.array_equal(dequantise(codec, q, 50), rows.astype(dtype))


@pytest.mark.parametrize("codec", [*QUANTISED, "f16", "f32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_none_is_named(codec: str, bad: float) -> None:
    rows = np.ones((70, 64), np.float32)
    rows[66, 63] = bad
    with pytest.raises(BadRow, match="row 66 holds a value that is not finite") as e:
        quantise(codec, rows, 32 if codec in QUANTISED else 0)
    assert e.value.row == 66


def test_f16_has_an_end() -> None:
    with pytest.raises(BadRow, match="row 1 holds a value beyond f16's range: store it as f32"):
        quantise("f16", np.array([[1.0], [70000.0]], np.float32))


# --- searches


def test_gaussian_weights() -> None:
    """Relative errors per channel at K = 2048; published for absmax: 0.1102 and 0.1581."""
    rows = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)

    def error(codec: str, group: int, search: str) -> float:
        return relative_error(rows, dequantise(codec, quantise(codec, rows, group, search=search), 2048))

    assert error("nf4", 0, "mse") <= 0.108
    assert error("i4", 0, "mse") <= 0.151
    assert error("nf4", 0, "mse") < 0.1  # and what this search reaches
    assert error("i4", 0, "mse") < 0.115
    assert error("nf4", 32, "mse") < 0.076
    for codec in QUANTISED:
        for search in ("absmax", "mse"):
            errors = [error(codec, group, search) for group in (0, 128, 64, 32)]
            assert errors == sorted(errors, reverse=True)
        for group in (0, 128, 64, 32):
            assert error(codec, group, "mse") < error(codec, group, "absmax")


def test_importance_gives_up_outliers_that_do_not_matter() -> None:
    """Every 128th input ten times as large and of importance 1e-4: at least six times less weighted error."""
    rows = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    importance = np.ones(1024, np.float32)
    rows[:, ::128] *= 10
    importance[::128] = 1e-4
    coarse = np.array([0.92, 0.85, 0.78, 0.70, 0.62, 0.55], np.float32)  # published ratios
    for codec in ("i4", "nf4"):

        def error(q: codecs.Quantised, codec: str = codec) -> float:
            return float((importance * (rows - dequantise(codec, q, 1024)).astype(np.float64) ** 2).sum())

        plainly = error(quantise(codec, rows))
        ours = error(quantise(codec, rows, search="importance", importance=importance))
        seven = error(quantise(codec, rows, search="importance", importance=importance, ratios=coarse, refine=0))
        assert plainly / ours > 6
        assert plainly > seven > ours


@pytest.mark.parametrize("codec", QUANTISED)
def test_a_search_takes_the_best_of_what_it_tries(codec: str) -> None:
    """No ratio of the grid does better in any group, in float64, and no row is worse off than with absmax."""
    rows = random_rows(40, 256)
    importance = np.random.default_rng(1).random(256).astype(np.float32) ** 4
    found = quantise(codec, rows, 64, search="importance", importance=importance)

    def errors(q: codecs.Quantised) -> np.ndarray:
        squares = (rows.astype(np.float64) - dequantise(codec, q, 256)) ** 2 * importance
        return squares.reshape(40, 4, 64).sum(axis=2)

    best = errors(found)
    assert (best <= errors(quantise(codec, rows, 64)) * (1 + 1e-5)).all()
    one = [np.array([ratio], np.float32) for ratio in codecs.SCHEMES[codec].ratios]
    for ratio in one:
        tried = quantise(codec, rows, 64, search="importance", importance=importance, ratios=ratio, refine=0)
        assert (best <= errors(tried) * (1 + 1e-5)).all()


def test_importance_that_says_nothing_is_plain_mse() -> None:
    rows = random_rows(20, 128)
    want = quantise("nf4", rows, 32, search="mse")
    for value in (0, 3):
        got = quantise("nf4", rows, 32, search="importance", importance=np.full(128, value, np.float32))
        assert np.array_equal(got.codes, want.codes)
        assert np.array_equal(got.groups, want.groups)
    with pytest.raises(ValueError, match="importance goes with the search of that name"):
        quantise("nf4", rows, 32, search="importance")
    with pytest.raises(ValueError, match="importance goes with the search of that name"):
        quantise("nf4", rows, 32, search="mse", importance=np.ones(128, np.float32))


# --- the same bytes


@pytest.mark.parametrize("codec", QUANTISED)
def test_every_instruction_set_gives_the_same_bytes(codec: str) -> None:
    rows = random_rows(30, 200)
    importance = np.random.default_rng(1).random(200).astype(np.float32)
    before = native.isa()
    seen = set()
    try:
        for isa in native.isa_names():
            native.choose_isa(isa)
            made = b""
            for cut in (200, 192, 37):
                group = effective_group(cut, 64)
                part = np.ascontiguousarray(rows[:, :cut])
                for search, weight in (("mse", None), ("importance", importance[:cut])):
                    q = quantise(codec, part, group, search=search, importance=weight)
                    made += q.codes.tobytes() + q.channel.tobytes() + (b"" if q.groups is None else q.groups.tobytes())
            seen.add(made)
    finally:
        native.choose_isa(before)
    assert len(native.isa_names()) > 1
    assert len(seen) == 1


@settings(max_examples=10)
@given(seed=st.integers(0, 99), cut=st.integers(1, 19))
def test_a_row_is_quantised_alike_in_any_company(seed: int, cut: int) -> None:
    """Slices can be cut and resumed anywhere: a row's codes are its own."""
    rows = random_rows(20, 96, seed)
    whole = quantise("nf4", rows, 32, search="mse")
    parts = [quantise("nf4", rows[a:b], 32, search="mse") for a, b in ((0, cut), (cut, 20))]
    assert np.array_equal(whole.codes, np.concatenate([p.codes for p in parts]))
    assert np.array_equal(whole.groups, np.concatenate([p.groups for p in parts]))
