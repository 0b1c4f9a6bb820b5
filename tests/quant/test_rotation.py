"""Rotations: orthogonal, the same on every machine, and worth their name on rows with outliers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from ork.pack.format import MIX_MAX, check_rotation
from ork.quant import rotation
from ork.quant.rotation import MODES, fields_of, mix_of, rotate_importance, rotate_rows, unrotate_rows

WIDTHS = st.sampled_from([1, 5, 8, 20, 63, 576, 896, 1152, 1536, 2048, 4864, 8192])


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 9, 19, 35, 107, 299, 512])
def test_mixing_matrices_are_orthogonal_and_symmetric(m: int) -> None:
    q = mix_of(m).astype(np.float64)
    assert np.abs(q @ q.T - np.eye(m)).max() < 1e-6
    assert np.array_equal(q, q.T)
    assert np.abs(q).max() <= np.sqrt(2 / m) * (1 + 1e-6)  # no block keeps an outlier to itself
    angle = 2 * np.pi * (np.outer(np.arange(m), np.arange(m)) % m) / m
    assert np.abs(q - (np.cos(angle) + np.sin(angle)) / np.sqrt(m)).max() < 1e-7
    assert not mix_of(m).flags.writeable


def test_mixing_matrices_have_the_same_bits_everywhere() -> None:
    """Packs made on different machines must be equal; the hash was taken once."""
    digest = hashlib.sha256(b"".join(mix_of(m).astype("<f4").tobytes() for m in (3, 7, 9, 19, 35, 299)))
    assert digest.hexdigest() == "5d54201035fd83905308f6abf503c5411fe49e1238655c3d5d1a2ca3f5c78973"


@given(WIDTHS, st.sampled_from(MODES))
def test_fields_fit_the_pack(K: int, mode: str) -> None:
    block, m = fields_of(K, mode)
    check_rotation(K, block, m, 0, 0, "i8")
    assert (block > 0) == (mode != "none")
    assert (m > 0) == (mode == "mix" and 2 <= K // rotation.block_of(K) <= MIX_MAX)


def test_modes_that_do_not_apply() -> None:
    assert fields_of(4096, "mix") == (4096, 0)  # one block
    assert fields_of(8191, "mix") == (1, 0)  # too many
    assert rotation.MAX_MIX == MIX_MAX
    with pytest.raises(ValueError, match="'turn' is not one of none, block, mix"):
        fields_of(64, "turn")


@given(WIDTHS, st.sampled_from(MODES), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_products_and_rows_survive(K: int, mode: str, n: int) -> None:
    rng = np.random.default_rng(K + n)
    x, w = (rng.standard_normal((n, K)).astype(np.float32) for _ in range(2))
    before = x.copy()
    turned = rotate_rows(x, K, mode)
    assert np.array_equal(x, before)
    size = np.linalg.norm(x, axis=1).max()
    product = turned.astype(np.float64) @ rotate_rows(w, K, mode).astype(np.float64).T
    assert (
        np.abs(product - x.astype(np.float64) @ w.astype(np.float64).T).max()
        < 3e-6 * size * np.linalg.norm(w, axis=1).max()
    )
    assert np.abs(unrotate_rows(turned, K, mode) - x).max() < 2e-6 * size


@pytest.mark.parametrize("K", [576, 896, 4864])
def test_mixing_spreads_what_a_block_keeps(K: int) -> None:
    x = np.random.default_rng(0).standard_normal((64, K)).astype(np.float32)
    x[:, K // 3] = 100
    peak = {mode: np.abs(rotate_rows(x, K, mode)).max(axis=1).mean() for mode in MODES}
    assert peak["mix"] < 0.7 * peak["block"] < 0.3 * peak["none"]


def test_quantising_activations_rotates_them_as_weights_are() -> None:
    K = 896
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    for mode in ("block", "mix"):
        block, m = fields_of(K, mode)
        signs = native.Array.of(rotation.signs_of(K).astype(np.float32).reshape(1, K))
        mix = native.Array.of(mix_of(m).reshape(1, -1)) if m else None
        q = native.quantise(native.Array.of(x), signs, block, 0, mix)
        assert np.abs(q.codes() * q.scales()[:, None] - rotate_rows(x, K, mode)).max() < 0.51 * q.scales().max()


@pytest.mark.parametrize("mode", MODES)
def test_importance_after_rotation(mode: str) -> None:
    """The mean squares that uncorrelated inputs have once rotated."""
    K = 96
    rng = np.random.default_rng(2)
    importance = rng.uniform(0.1, 4, K).astype(np.float32)
    x = rng.standard_normal((100_000, K)).astype(np.float32) * np.sqrt(importance)
    measured = np.square(rotate_rows(x, K, mode).astype(np.float64)).mean(axis=0)
    expected = rotate_importance(importance, *fields_of(K, mode))
    assert np.abs(expected / measured - 1).max() < 0.03
    assert expected.dtype == np.float32
    assert np.isclose(expected.sum(), importance.sum(), rtol=1e-5)


def test_names() -> None:
    assert rotation.derived("blk.0.attn_q.weight") is None
    assert rotation.derived("rotation.signs.x") is None
    signs, mix = rotation.derived(rotation.signs_name(96)), rotation.derived(rotation.mix_name(3))
    assert signs is not None
    assert np.array_equal(signs, rotation.signs_of(96))
    assert mix is not None
    assert np.array_equal(mix, mix_of(3))
    for name in ("rotation.mix.1", "rotation.mix.513", "rotation.signs.0", "rotation.signs." + "9" * 30):
        assert rotation.derived(name) is None, "a foreign file's tensor may be called so"
