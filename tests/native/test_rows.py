"""Kernels on rows against numpy, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ork import native
from ork.quant import rotation
from tests.native.oracles import Weight, hadamard, hadamard_matrix, quantised, rotated, rotated_back

ISAS = native.isa_names()
Array = native.Array


def rows_of(seed: int, M: int, K: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((M, K)) * scale).astype(np.float32)


def signs_of(K: int) -> Array:
    return Array.of(rotation.signs_of(K).astype(np.float32).reshape(1, -1))


def on_every_isa(compute) -> np.ndarray:
    """The result, equal to the last bit on every instruction set."""
    results = []
    for name in ISAS:
        native.choose_isa(name)
        results.append(np.asarray(compute()).copy())
    native.choose_isa("best")
    for name, result in zip(ISAS, results):
        assert np.array_equal(result.view(np.uint8), results[0].view(np.uint8)), name
    return results[0]


# --- rotation and quantisation


@pytest.mark.parametrize("K", [1, 2, 6, 8, 16, 32, 48, 64, 96, 128, 576, 1152, 2048, 4096, 8192, 12288])
def test_rotated_codes_are_as_specified(isa: str, K: int) -> None:
    """Butterflies in f32 in the order of their strides, absmax, half to even: the same bits as numpy step by step."""
    block = rotation.block_of(K)
    x = rows_of(K, 3, K)
    signs = rotation.signs_of(K).astype(np.float32)
    q = native.quantise(Array.of(x), signs_of(K), block)
    turned = hadamard(x, signs, block)
    codes, scales = quantised(turned)
    assert q.width % 32 == 0
    assert np.array_equal(q.codes()[:, :K], codes)
    assert not q.codes()[:, K:].any()
    norm = np.float32(1) / np.sqrt(np.float32(block))
    assert np.array_equal(q.scales(), scales * norm)


def test_rotation_is_the_orthogonal_hadamard() -> None:
    for K in (8, 48, 64, 96, 640, 4096):
        block = rotation.block_of(K)
        x = rows_of(K, 2, K)
        H = hadamard_matrix(block) / np.sqrt(block)
        want = ((x.astype(np.float64) * rotation.signs_of(K)).reshape(2, -1, block) @ H).reshape(2, K)
        got = x.copy()
        native.rotate(got, signs_of(K), block)
        assert np.allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
        native.rotate(got, signs_of(K), block, inverse=True)
        assert np.allclose(got, x, rtol=0, atol=3e-6)


def mix_of(m: int, seed: int) -> np.ndarray:
    """Two reflections: orthogonal, and not symmetric, so that a transposition shows."""
    a, b = (
        v / np.linalg.norm(v) for v in np.random.default_rng(seed).uniform(0.5, 2, (2, m)) * [[1], [-1]] + [[0], [1]]
    )
    return ((np.eye(m) - 2 * np.outer(a, a)) @ (np.eye(m) - 2 * np.outer(b, b))).astype(np.float32)


ROTATED = st.sampled_from([(16, 1), (4, 3), (4, 5), (32, 3), (64, 9), (128, 7), (32, 43), (1, 5), (512, 3), (256, 19)])


@given(ROTATED, st.booleans(), st.sampled_from([0, 32, 64, 96]), st.integers(1, 3), st.sampled_from([127, 7, 1]))
@settings(max_examples=40, deadline=None)
def test_rotated_groups(shape: tuple[int, int], mixed: bool, group: int, M: int, limit: int) -> None:
    """Code x scale is the rotated row to half a code of its group; the same bits on every path, alone or in company."""
    block, m = shape
    K, Kp = block * m, -(-block * m // 32) * 32
    group = group if group and Kp % group == 0 else 0
    x = rows_of(K + M, M, K)
    x[:, ::7] *= 20
    q = mix_of(m, K) if mixed else None
    held = None if q is None else Array.of(q.reshape(1, -1))
    made = lambda rows: native.quantise(Array.of(rows), signs_of(K), block, group, held, limit)  # noqa: E731
    codes = on_every_isa(lambda: made(x).codes())
    scales = on_every_isa(lambda: made(x).scales())
    assert scales.shape == ((M, Kp // group) if group else (M,))
    assert np.abs(codes.astype(int)).max() == limit
    want = rotated(x, rotation.signs_of(K), block, q)
    by_code = np.repeat(scales.reshape(M, -1), group or Kp, axis=1)[:, :K]
    error = np.abs(codes[:, :K] * by_code.astype(np.float64) - want)
    assert (error <= by_code * 0.5 + 1e-6 * np.linalg.norm(x, axis=1)[:, None]).all()
    alone = made(x[-1:])
    assert np.array_equal(alone.codes()[0], codes[-1])
    assert np.array_equal(alone.scales()[0], scales[-1])


@given(st.integers(1, 5), st.sampled_from([1, 31, 64, 96, 100, 1000]), st.sampled_from([0, 32, 64, 96]), st.integers())
@settings(max_examples=30, deadline=None)
def test_codes_of_groups(M: int, K: int, group: int, seed: int) -> None:
    """Without rotation: each group to the bit as if it were a row."""
    Kp = -(-K // 32) * 32
    group = group if group and Kp % group == 0 else Kp
    x = rows_of(seed % 2**32, M, K)
    x[0] = 0
    for limit in (127, 7):
        padded = np.zeros((M, Kp), np.float32)
        padded[:, :K] = x
        codes, scales = quantised(padded.reshape(-1, group), limit)
        q = native.quantise(Array.of(x), None, 0, group, None, limit)
        assert q.group == group
        assert np.array_equal(q.codes().reshape(-1, group), codes)
        assert np.array_equal(q.scales().ravel(), scales)


@pytest.mark.parametrize("group", [32, 64])
def test_a_value_that_is_none_spoils_its_group_alone(isa: str, group: int) -> None:
    x = rows_of(1, 2, 128)
    x[0, 70] = np.nan
    x[1, 127] = -np.inf
    q = native.quantise(Array.of(x), None, 0, group)
    bad = np.zeros((2, 128 // group), bool)
    bad[0, 70 // group] = bad[1, -1] = True
    assert np.array_equal(np.isnan(q.scales()), bad)
    assert not q.codes().reshape(2, -1, group)[bad].any()
    assert q.codes().reshape(2, -1, group)[~bad].any(axis=1).all()


def test_mixing_there_and_back(isa: str) -> None:
    for block, m in ((1, 5), (4, 3), (64, 9), (128, 7), (32, 43), (16, 511)):
        K = block * m
        x, q = rows_of(K, 3, K), mix_of(m, K)
        got = x.copy()
        native.rotate(got, signs_of(K), block, mix=Array.of(q.reshape(1, -1)))
        size = np.linalg.norm(x, axis=1).max()
        assert np.abs(got - rotated(x, rotation.signs_of(K), block, q)).max() < 1e-6 * size
        native.rotate(got, signs_of(K), block, inverse=True, mix=Array.of(q.reshape(1, -1)))
        assert np.abs(got - x).max() < 1e-6 * size


@given(st.integers(1, 8), st.integers(1, 100), st.integers(0, 2**32 - 1), st.integers(-30, 30))
@settings(max_examples=30)
def test_plain_codes(M: int, K: int, seed: int, exponent: int) -> None:
    x = rows_of(seed, M, K, 10.0**exponent)
    codes, scales = quantised(x)
    got = on_every_isa(lambda: native.quantise(Array.of(x), None, 0).codes())
    assert np.array_equal(got[:, :K], codes)
    assert np.array_equal(native.quantise(Array.of(x), None, 0).scales(), scales)


def test_special_rows(isa: str) -> None:
    x = np.zeros((6, 40), np.float32)
    x[1, 39] = np.inf
    x[2, 5] = np.nan
    x[3] = 1e-42  # has no reciprocal in f32: as good as zero
    x[4, 0] = -3.0e38
    x[5] = [0.5 * 127 / 127 * (-1) ** k for k in range(40)]
    q = native.quantise(Array.of(x), None, 0)
    assert np.isnan(q.scales()).tolist() == [False, True, True, False, False, False]
    assert not q.codes()[:4].any()
    assert q.scales()[0] == q.scales()[3] == 0
    assert q.codes()[4, 0] == -127
    assert set(q.codes()[5, :40].tolist()) == {127, -127}


@given(hnp.arrays(np.uint32, (2, 50)))
@settings(max_examples=50)
def test_any_bits_give_codes_without_minus_128(bits: np.ndarray) -> None:
    q = native.quantise(Array.of(bits.view(np.float32)), None, 0)
    assert q.codes().min() >= -127
    finite = np.isfinite(bits.view(np.float32)).all(axis=1)
    assert np.array_equal(np.isnan(q.scales()), ~finite)


# --- norms, gates, element-wise


@pytest.mark.parametrize(("M", "K"), [(1, 1), (3, 15), (4, 16), (2, 100), (5, 640), (300, 576)])
def test_rms_norm(M: int, K: int) -> None:
    x, w = rows_of(K, M, K, 3), rows_of(K + 1, 1, K)
    got = on_every_isa(lambda: native.rms_norm(Array.of(x), Array.of(w), 1e-5).numpy())
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * w
    assert np.allclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 40), (4, 64), (2, 256), (5, 7)])
def test_head_norm(heads: int, dim: int) -> None:
    x, w = rows_of(dim, 6, heads * dim), rows_of(dim + 1, 1, dim)

    def compute() -> np.ndarray:
        a = Array.of(x)
        native.head_norm(a, Array.of(w), 1e-6)
        return a.numpy()

    wide = x.astype(np.float64).reshape(6, heads, dim)
    want = (wide / np.sqrt((wide**2).mean(axis=2, keepdims=True) + 1e-6) * w[0]).reshape(x.shape)
    assert np.allclose(on_every_isa(compute), want, rtol=1e-6, atol=0)


def test_silu_and_gelu() -> None:
    g = np.concatenate([rows_of(0, 4, 100, 4), np.linspace(-120, 120, 400, dtype=np.float32).reshape(4, 100)])
    u = rows_of(1, 8, 100)
    wide = g.astype(np.float64)
    with np.errstate(over="ignore"):
        silu = wide / (1 + np.exp(-wide)) * u
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) * u
    for kind, want in ((0, silu), (1, gelu)):
        got = on_every_isa(lambda kind=kind: native.gate(kind, Array.of(g), Array.of(u)).numpy())
        assert np.allclose(got, want, rtol=1e-5, atol=1e-30 if kind == 0 else 1e-6)


def test_softcap() -> None:
    x = np.concatenate([rows_of(0, 3, 70, 40), rows_of(1, 3, 70, 1e-3), np.full((1, 70), 1e30, np.float32)])

    def compute() -> np.ndarray:
        a = Array.of(x)
        native.softcap(a, 30.0)
        return a.numpy()

    got = on_every_isa(compute)
    assert np.allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6, atol=0)
    assert np.abs(got).max() <= 30


def test_add_scale_take() -> None:
    x, y = rows_of(0, 5, 33), rows_of(1, 5, 33)
    assert np.array_equal(native.add(Array.of(x), Array.of(y)).numpy(), x + y)
    a = Array.of(x)
    native.scale(a, 0.1)
    assert np.array_equal(a.numpy(), x * np.float32(0.1))
    assert np.array_equal(native.take(Array.of(x), np.array([4, 0, 4], np.int32)).numpy(), x[[4, 0, 4]])


def test_nan_is_not_lost() -> None:
    """A broken number reaches the logits instead of turning into a plausible one."""
    x = np.ones((1, 32), np.float32)
    x[0, 7] = np.nan
    one = Array.of(np.ones((1, 32), np.float32))
    assert np.isnan(native.rms_norm(Array.of(x), one, 1e-6).numpy()).all()
    for kind in (0, 1):
        assert np.isnan(on_every_isa(lambda kind=kind: native.gate(kind, Array.of(x), one).numpy())[0, 7])
    a = Array.of(x)
    native.softcap(a, 5.0)
    assert np.isnan(a.numpy()[0, 7])


# --- rotary embedding


def batch_of(positions: list[int]) -> native.Batch:
    at = np.array(positions, np.int32)
    return native.Batch(at, np.zeros(len(at), np.int32), np.zeros((0, 4), np.int32), np.zeros((1, 1), np.int32))


POSITIONS = [0, 1, 2, 255, 256, 4095, 131071, 1_000_000]


@pytest.mark.parametrize("base", [10000.0, 1e6])
def test_rope_table(base: float) -> None:
    freqs = [base ** (-2 * i / 128) for i in range(64)]
    got = on_every_isa(lambda: native.rope_table(batch_of(POSITIONS), freqs, 1.5).numpy())
    angle = np.array(POSITIONS)[:, None] * np.array(freqs)
    assert np.allclose(got, 1.5 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (64, 32), (40, 40), (256, 256), (20, 12)])
@pytest.mark.parametrize("halves", [False, True])
def test_rope(dim: int, rotated: int, halves: bool) -> None:
    x = rows_of(dim, len(POSITIONS), 3 * dim)
    freqs = [10000.0 ** (-2 * i / rotated) for i in range(rotated // 2)]

    def compute() -> np.ndarray:
        a = Array.of(x)
        native.rope(a, dim, halves, native.rope_table(batch_of(POSITIONS), freqs, 1.0))
        return a.numpy()

    heads = x.astype(np.float64).reshape(len(POSITIONS), 3, dim).copy()
    part = heads[..., :rotated]
    z = part[..., : rotated // 2] + 1j * part[..., rotated // 2 :] if halves else part[..., ::2] + 1j * part[..., 1::2]
    z = z * np.exp(1j * np.array(POSITIONS)[:, None, None] * np.array(freqs))
    if halves:
        part[...] = np.concatenate([z.real, z.imag], axis=-1)
    else:
        part[..., ::2], part[..., 1::2] = z.real, z.imag
    assert np.allclose(on_every_isa(compute), heads.reshape(x.shape), rtol=0, atol=3e-6)


# --- look-up and sampling


@pytest.mark.parametrize(("N", "K"), [(100, 96), (1000, 40), (70, 5000), (600, 4096)])
def test_gather_i8(N: int, K: int) -> None:
    """A looked-up row is the codes times their scale, rotated back."""
    rng = np.random.default_rng(N)
    w = Weight(rng.integers(-127, 128, (N, K)).astype(np.int8), rng.random(N, np.float32))
    ids = np.array([0, N - 1, N // 2, 0, 63 % N], np.int32)
    plain = w.dense[ids].astype(np.float32) * w.scales[ids, None]
    assert np.array_equal(on_every_isa(lambda: native.gather(w.slices, ids, K, N, None, 0).numpy()), plain)
    block = rotation.block_of(K)
    got = on_every_isa(lambda: native.gather(w.slices, ids, K, N, signs_of(K), block).numpy())
    H = hadamard_matrix(block) / np.sqrt(block)
    want = (plain.astype(np.float64).reshape(len(ids), -1, block) @ H).reshape(plain.shape) * rotation.signs_of(K)
    assert np.allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@given(
    st.sampled_from(["i8", "i4", "nf4", "f16", "f32"]),
    st.sampled_from([(1, 5), (4, 5), (64, 1), (32, 3), (64, 9), (4096, 2), (256, 35)]),
    st.sampled_from([0, 32, 64]),
    st.sampled_from(["none", "block", "mix"]),
)
@settings(max_examples=60, deadline=None)
def test_gather(codec: str, shape: tuple[int, int], group: int, mode: str) -> None:
    """A looked-up row of any codec is what its codes and scales stand for, rotated back."""
    block, m = shape
    N, K = 130, block * m
    group = group if codec[0] != "f" and -(-K // 32) * 32 % (group or 1) == 0 else 0
    w = Weight.random(codec, N, K, group, K)
    mode = "none" if codec[0] == "f" else mode
    q = mix_of(m, K) if mode == "mix" else None
    how = () if mode == "none" else (signs_of(K), block, None if q is None else Array.of(q.reshape(1, -1)))
    ids = np.array([0, N - 1, 64, 31, 0], np.int32)
    got = on_every_isa(lambda: native.gather(w.slices, ids, K, N, *(how or (None, 0))).numpy())
    plain = w.values()[ids]
    want = plain if mode == "none" else rotated_back(plain, rotation.signs_of(K), block, q)
    tolerance = 0 if codec[0] == "f" else 1e-6 * np.linalg.norm(plain, axis=1).max()
    assert np.abs(got - want).max() <= tolerance


def test_gather_f32() -> None:
    w = Weight(rows_of(0, 700, 1000))
    assert len(w.slices) > 1
    ids = np.array([699, 0, 520, 64], np.int32)
    got = on_every_isa(lambda: native.gather(w.slices, ids, 1000, 700, None, 0).numpy())
    assert np.array_equal(got, w.dense[ids])


@given(hnp.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([-1.5, 0.0, -0.0, 2.0, 3.5, np.inf])))
@settings(max_examples=50)
def test_top_k_breaks_ties_by_index(x: np.ndarray) -> None:
    order = np.argsort(-x, kind="stable")
    for k in (0, 1, 3, len(x)):
        ids, values = native.top_k(x.reshape(1, -1), 0, min(k, len(x)))
        count = k if 0 < k < len(x) else len(x)
        assert ids == order[:count].tolist()
        assert values == x[order[:count]].tolist()


def test_top_k_of_numbers_that_are_none() -> None:
    """NaN sorts last, wherever it stands, and harms nothing."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((1, 3000)).astype(np.float32)
        x[0, rng.random(3000) < rng.random()] = np.nan
        for k in (1, 40, 3000):
            ids, _ = native.top_k(x, 0, k)
            assert sorted(set(ids)) == sorted(ids)
            numbers = int(np.isfinite(x).sum())
            want = np.argsort(-x[0], kind="stable")[: min(k, numbers)]
            assert ids[: len(want)] == want.tolist()


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=70), st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=50)
def test_softmax(x: list[float], inverse_temperature: float) -> None:
    got = on_every_isa(lambda: np.array(native.softmax(x, inverse_temperature), np.float32))
    wide = np.array(x) * inverse_temperature
    p = np.exp(wide - wide.max())
    assert np.allclose(got, p / p.sum(), rtol=3e-6, atol=1e-35)
