"""One program through the driver, from arrays to bytes; and a trial of everything `vector` and `curves` can make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ork import tiles
from ork.npu import curves, vector
from ork.npu.buffers import DmaBuffer
from ork.npu.chain import Chain, Step
from ork.npu.curves import CURVES, Curve
from ork.npu.driver import Npu
from ork.npu.matmul import MatmulShape, plan
from ork.npu.program import Program
from ork.npu.vector import Affine

Array = npt.NDArray[Any]

M, C, K = 64, 128, 512
Trial = tuple[str, str, float, float]  # what, kind, largest error and the largest that is right, in steps of the result


def execute(npu: Npu, program: Program, **operands: Array) -> npt.NDArray[np.uint8]:
    """Run a program on these bytes (u8, by role), in buffers of its own; the bytes of its output."""
    buffers: dict[str, DmaBuffer] = {}
    chain: Chain | None = None
    try:
        for role, operand in program.operands.items():
            buffers[role] = npu.buffer(operand.nbytes)
        for role, data in operands.items():
            with buffers[role].fill(0, data.size) as view:
                view[:] = data.tobytes()
        chain = npu.chain([Step(program, {role: (buffer, 0) for role, buffer in buffers.items()})])
        npu.submit(chain)
        buffers["output"].sync_from_device()
        result: npt.NDArray[np.uint8] = buffers["output"].array[: program.operands["output"].nbytes].copy()
        return result
    finally:
        if chain is not None:
            chain.free()
        for buffer in buffers.values():
            buffer.free()


def load(npu: Npu, curve: Curve) -> None:
    """Fill the tables of core 0."""
    execute(npu, curves.load(curve), input=np.zeros(16, np.uint8))


def trials(npu: Npu) -> Iterator[Trial]:
    """Each operation on random numbers, against numpy."""
    rng = np.random.default_rng(0)
    a, b, out = Affine(0.02, 3), Affine(0.03, -5), Affine(0.05, 1)
    for kind in ("int8", "int16", "fp16"):
        scales = () if kind == "fp16" else (a, b, out)
        x, y = (_numbers(rng, kind) for _ in range(2))
        for name, make, of in (("add", vector.add, np.add), ("mul", vector.mul, np.multiply)):
            raw = execute(npu, make(kind, M, C, *scales), input=vector.cube(x), other=vector.cube(y))
            real = of(_real(x, kind, a), _real(y, kind, b))
            yield (
                name,
                kind,
                _error(raw, kind, real, out),
                0.0 if kind == "fp16" else {"int8": 1.0, "int16": 40.0}[kind],
            )
    for name, curve in CURVES.items():
        load(npu, curve)
        wide = np.linspace(curve.low, curve.high, M * C).reshape(M, C)
        for kind, bound in (("int8", 2.0), ("int16", 40.0), ("fp16", 2.0)):
            most = float(np.abs(curve.function(wide)).max())
            source, target = _spread(kind, curve), Affine(most / _levels(kind))
            x = _stored(wide, kind, source)
            program = curves.apply(curve, kind, M, C, *(() if kind == "fp16" else (source, target)))
            raw = execute(npu, program, input=vector.cube(x))
            unit = Affine(max(1 / curve.scale, most / 1024)) if kind == "fp16" else target
            yield name, kind, _error(raw, kind, curve.function(_real(x, kind, source)), unit), bound
    yield from _matmuls(npu, rng)


def _matmuls(npu: Npu, rng: np.random.Generator) -> Iterator[Trial]:
    (tile,) = plan(MatmulShape(M, K, C, "int8"))
    x, codes = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((M, K), (C, K)))
    weights = tiles.pack_codes("i8", codes).view(np.uint8).reshape(-1)
    sums = x.astype(np.int64) @ codes.astype(np.int64).T
    data = {"input": x.view(np.uint8).reshape(-1), "weights": weights}
    unit, curve = Affine(float(np.abs(sums).max()) / 127), CURVES["silu"]
    raw = execute(npu, vector.requantised(tile, 1 / unit.scale), **data)
    yield "matmul", "int8", float(np.abs(raw.view(np.int8).reshape(M, C) - np.rint(sums / unit.scale)).max()), 1.0
    load(npu, curve)
    scale, target = 8.0 / float(np.abs(sums).max()), Affine(8.0 / 127)
    raw = execute(npu, curves.fused(curve, tile, scale, target), **data)
    want = np.rint(curve.function(sums * scale) / target.scale)
    yield "matmul + silu", "int8", float(np.abs(raw.view(np.int8).reshape(M, C) - want).max()), 2.0


def _levels(kind: str) -> int:
    return 1 if kind == "fp16" else int(np.iinfo(vector.DTYPES[kind]).max)


def _spread(kind: str, curve: Curve) -> Affine:
    """Integers over the range of a curve."""
    scale = (curve.high - curve.low) / (2 * _levels(kind))
    return Affine(scale, round(-curve.middle / scale))


def _numbers(rng: np.random.Generator, kind: str) -> Array:
    if kind == "fp16":
        return rng.normal(size=(M, C)).astype(np.float16)
    return rng.integers(-_levels(kind), _levels(kind) + 1, (M, C)).astype(vector.DTYPES[kind])


def _stored(x: Array, kind: str, how: Affine) -> Array:
    if kind == "fp16":
        return x.astype(np.float16)
    return (np.rint(x / how.scale) + how.zero).clip(-_levels(kind), _levels(kind)).astype(vector.DTYPES[kind])


def _real(x: Array, kind: str, how: Affine) -> Array:
    return x.astype(np.float64) if kind == "fp16" else (x.astype(np.float64) - how.zero) * how.scale


def _error(raw: npt.NDArray[np.uint8], kind: str, real: Array, how: Affine) -> float:
    """The largest, in steps of the result."""
    got = vector.rows(raw, M, kind).astype(np.float64)
    if kind == "fp16":
        return float(np.abs(got - real.astype(np.float16)).max() / how.scale)
    limits = np.iinfo(vector.DTYPES[kind])
    return float(np.abs(got - (np.rint(real / how.scale) + how.zero).clip(limits.min, limits.max)).max())
