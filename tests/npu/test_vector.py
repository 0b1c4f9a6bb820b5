"""Our own programs of the output side, through the whole driver on the emulated chip, against their formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import tiles
from ork.emulator.kernel import EmulatedKernel
from ork.errors import NpuError, UsageError
from ork.npu import curves, isa, vector
from ork.npu.chain import Step
from ork.npu.curves import CURVES, Curve
from ork.npu.driver import Npu
from ork.npu.matmul import MatmulShape, plan
from ork.npu.plan import Tile
from ork.npu.trial import execute as run
from ork.npu.trial import load as loaded
from ork.npu.vector import Affine, Mantissa

Array = npt.NDArray[Any]


@pytest.fixture
def kernel() -> Iterator[EmulatedKernel]:
    made = EmulatedKernel()
    yield made
    assert not [v for v in made.report.violations if v.severity == "error"]
    assert (made.stats.live_buffers, made.stats.live_maps, made.stats.live_files) == (0, 0, 0)


@pytest.fixture
def npu(kernel: EmulatedKernel) -> Iterator[Npu]:
    with Npu.open(kernel) as opened:
        yield opened


def integers(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Array:
    limits = np.iinfo(vector.DTYPES[kind])
    return rng.integers(limits.min, limits.max + 1, shape).astype(vector.DTYPES[kind])


def requantised(x: Array, m: Mantissa, out: Affine, kind: str) -> Array:
    """The last rounding, in exact arithmetic."""
    limits = np.iinfo(vector.DTYPES[kind])
    scaled = x.astype(object) * m.value
    floor = scaled >> m.shift
    rest = scaled - (floor << m.shift)
    half = (1 << m.shift) // 2 if m.shift else 1
    rounded = floor + ((rest > half) | ((rest == half) & (floor % 2 == 1)))
    return np.clip((rounded + out.zero).astype(np.float64), limits.min, limits.max)


scales = st.floats(0.001, 1.0)


@pytest.mark.parametrize("kind", ["int8", "int16"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_integer_sums_and_products(kind: str, data: st.DataObject) -> None:
    zero = st.integers(-100, 100)
    a, b, out = (data.draw(st.builds(Affine, scales, zero)) for _ in range(3))
    M, C = data.draw(st.integers(1, 40)), 16 * data.draw(st.integers(1, 5))
    rng = np.random.default_rng(M)
    x, y = integers(rng, kind, (M, C)), integers(rng, kind, (M, C))
    A, B = x.astype(np.int64) - a.zero, y.astype(np.int64) - b.zero
    with Npu.open(EmulatedKernel(views="sampled")) as npu:
        program = vector.add(kind, M, C, a, b, out)
        got = vector.rows(run(npu, program, input=vector.cube(x), other=vector.cube(y)), M, kind)
        fa, fb, m = vector.add_factors(kind, a, b, out)
        assert np.array_equal(got, requantised(A * fa + B * fb, m, out, kind))
        real = np.rint((A * a.scale + B * b.scale) / out.scale + out.zero)
        limits = np.iinfo(vector.DTYPES[kind])
        unit = max(fa, fb)  # of 14 or 13 bits, so each input is off by half of one step of it
        steps = 1 + (np.abs(A) + np.abs(B)) / 2 / unit * max(a.scale, b.scale) / out.scale + np.abs(real) / 2**15
        assert (np.abs(got - real.clip(limits.min, limits.max)) <= steps).all()

        program = vector.mul(kind, M, C, a, b, out)
        got = vector.rows(run(npu, program, input=vector.cube(x), other=vector.cube(y)), M, kind)
        assert np.array_equal(got, requantised(A * B, vector.mul_factor(a, b, out), out, kind))


def test_fp16_sums_and_products(npu: Npu, kernel: EmulatedKernel) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(1000, 72)).astype(np.float16) for _ in range(2))
    for program, want in ((vector.add("fp16", 1000, 72), x + y), (vector.mul("fp16", 1000, 72), x * y)):
        raw = run(npu, program, input=vector.cube(x), other=vector.cube(y))
        assert np.array_equal(vector.rows(raw, 1000, "fp16"), want)
    assert not kernel.report.violations


def test_programs_without_zero_points_run_in_chains(npu: Npu, kernel: EmulatedKernel) -> None:
    """(x * y) + z in one submit: an int16 product whose BS stage is bypassed does not hang there."""
    rng = np.random.default_rng(0)
    M, C = 16, 32
    x, y = (rng.integers(-100, 101, (M, C)).astype(np.int16) for _ in range(2))
    program = vector.mul("int16", M, C, out=Affine(4.0))
    buffers = [npu.buffer(M * C * 2) for _ in range(4)]
    for buffer, data in zip(buffers, (x, y)):
        buffer.array[: M * C * 2] = vector.cube(data)
        buffer.sync_to_device()
    a, b, c, d = ((buffer, 0) for buffer in buffers)
    steps = [{"input": a, "other": b, "output": c}, {"input": c, "other": b, "output": d}]
    chain = npu.chain([Step(program, operands) for operands in steps])
    npu.submit(chain)
    buffers[3].sync_from_device()
    got = vector.rows(buffers[3].array[: M * C * 2], M, "int16")
    once = np.rint(x.astype(float) * y / 4)
    assert np.array_equal(got, np.rint(once * y / 4).clip(-32768, 32767))
    chain.free()
    for buffer in buffers:
        buffer.free()


# --- curves ---


def sample(curve: Curve, count: int) -> Array:
    """Inputs over the range and, where the curve goes on as a line, beyond it."""
    beyond = (curve.high - curve.low) / 4 if curve.slopes[1] else 0
    return np.linspace(curve.low, curve.high + beyond, count)


@pytest.mark.parametrize("name", CURVES)
def test_curves_in_fp16(name: str, npu: Npu, kernel: EmulatedKernel) -> None:
    curve = CURVES[name]
    x = sample(curve, 64 * 40).astype(np.float16).reshape(64, 40)
    loaded(npu, curve)
    got = vector.rows(run(npu, curves.apply(curve, "fp16", 64, 40), input=vector.cube(x)), 64, "fp16")
    exact = curve.function(x.astype(np.float64))
    resolution = 1 / curve.scale + np.abs(exact) / 1024
    assert np.abs(got - curve.value(x)).max() <= resolution.max()
    assert (np.abs(got - exact) <= 2 * resolution + 2e-3 * (name == "rsqrt")).all()
    assert not kernel.report.violations


@pytest.mark.parametrize("kind", ["int8", "int16"])
@pytest.mark.parametrize("name", CURVES)
def test_curves_in_integers(name: str, kind: str, npu: Npu, kernel: EmulatedKernel) -> None:
    curve = CURVES[name]
    levels = np.iinfo(vector.DTYPES[kind]).max
    a = Affine((curve.high - curve.low) / (2 * levels), round(-curve.middle * 2 * levels / (curve.high - curve.low)))
    top = float(np.abs(curve.function(np.linspace(curve.low, curve.high, 1000))).max())
    out = Affine(top / levels, -3)
    x = np.linspace(-levels, levels, 64 * 48).astype(vector.DTYPES[kind]).reshape(64, 48)
    loaded(npu, curve)
    raw = run(npu, curves.apply(curve, kind, 64, 48, a, out), input=vector.cube(x))
    got = vector.rows(raw, 64, kind)
    want = np.rint(curve.function((x.astype(np.float64) - a.zero) * a.scale) / out.scale) + out.zero
    bound = 2 if kind == "int8" else 40  # of published measurements: 2 LSB, tens of LSB
    assert np.abs(got - want.clip(-levels - 1, levels)).max() <= bound
    assert not kernel.report.violations


def test_tables_are_loaded_without_the_ping_pong_flag() -> None:
    assert not curves.load(CURVES["silu"]).ping_pong
    assert vector.add("int8", 1, 16).ping_pong
    assert len(curves.load(CURVES["exp"]).words) == 1097 + 4  # as the vendor's


# --- matmuls to int8 ---


def operands(M: int, K: int, N: int) -> tuple[Tile, Array, Array, dict[str, Array]]:
    (tile,) = plan(MatmulShape(M, K, N, "int8"))
    rng = np.random.default_rng(M)
    a, codes = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((M, K), (N, K)))
    data = {"input": a.view(np.uint8).reshape(-1), "weights": tiles.pack_codes("i8", codes).view(np.uint8).reshape(-1)}
    return tile, a.astype(np.int64) @ codes.astype(np.int64).T, a, data


@pytest.mark.parametrize(("M", "K", "N"), [(1, 512, 64), (7, 1024, 128), (64, 576, 64)])
def test_requantised_matmul(M: int, K: int, N: int, npu: Npu, kernel: EmulatedKernel) -> None:
    tile, sums, _, data = operands(M, K, N)
    factor, zero = 1 / 4321, 5
    got = run(npu, vector.requantised(tile, factor, zero), **data).view(np.int8).reshape(M, N)
    assert np.array_equal(got, requantised(sums, Mantissa.of(factor), Affine(zero=zero), "int8"))
    assert not kernel.report.violations


def test_fused_silu(npu: Npu, kernel: EmulatedKernel) -> None:
    curve, M, N = CURVES["silu"], 24, 128
    tile, sums, _, data = operands(M, 1024, N)
    scale = 8.0 / np.abs(sums).max()
    out = Affine(8.0 / 127)
    loaded(npu, curve)
    got = run(npu, curves.fused(curve, tile, scale, out), **data).view(np.int8).reshape(M, N)
    assert np.abs(got - np.rint(curve.function(sums * scale) / out.scale)).max() <= 1
    assert len(np.unique(got)) > 60
    assert not kernel.report.violations


# --- what is refused ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: vector.add("bf16", 1, 16),
        lambda: vector.add("int8", 0, 16),
        lambda: vector.add("int8", 8177, 16),
        lambda: vector.add("int8", 1, 24),
        lambda: vector.add("fp16", 1, 12),
        lambda: vector.mul("int16", 1, 8200),
        lambda: vector.add("int8", 1, 16, Affine(0.0)),
        lambda: vector.add("int8", 1, 16, out=Affine(-1.0)),
        lambda: vector.mul("int8", 1, 16, out=Affine(1e-30)),
        lambda: vector.mul("int16", 1, 16, Affine(1.0, 32767), Affine(1.0, 32767)),
        lambda: vector.add("fp16", 1, 16, Affine(0.5)),
        lambda: curves.apply(CURVES["exp"], "fp16", 1, 16, Affine(0.5)),
        lambda: curves.apply(CURVES["exp"], "int16", 1, 16, Affine(1e-9)),
        lambda: curves.load(Curve("flat", np.zeros_like, 0.0, 1.0)),
        lambda: vector.requantised(plan(MatmulShape(1, 64, 64, "int8"))[0], 0.1),
        lambda: vector.requantised(plan(MatmulShape(1, 512, 64, "fp16"))[0], 0.1),
        lambda: vector.requantised(plan(MatmulShape(1, 512, 64, "int8"))[0], float("nan")),
    ],
)
def test_what_the_chip_cannot_do_is_refused(make: Any) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_int8_results_cannot_be_polled_for(npu: Npu) -> None:
    program = vector.add("int8", 1, 16)
    buffer = npu.buffer(64)
    chain = npu.chain([Step(program, dict.fromkeys(program.operands, (buffer, 0)))])
    npu.submit(chain)
    with pytest.raises(NpuError, match="blocking"):
        npu.run([chain], blocking=False)
    chain.free()
    buffer.free()


@given(st.floats(2.0**-40, 2.0**14))
def test_mantissas_are_the_nearest(factor: float) -> None:
    m = Mantissa.of(factor)
    assert 0 < m.value < 1 << 15
    assert m.value / 2**m.shift == pytest.approx(factor, rel=2**-15)


def test_programs_disassemble_to_themselves() -> None:
    sum_of = vector.add("int16", 8, 64, Affine(0.1, 3), Affine(0.2, -4), Affine(0.3, 5))
    for program in (sum_of, curves.load(CURVES["exp"])):
        pairs = [(offset, value) for _, value, offset in map(isa.split, program.words[: program.body].tolist())]
        assert np.array_equal(isa.assemble(pairs, enable=program.enable), program.words)
