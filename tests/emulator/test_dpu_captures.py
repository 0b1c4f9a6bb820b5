"""Captured programs of the output stage beyond plain sums: operands, softmax, SiLU, channel vectors.

The registers are theirs, verbatim; only address registers are ours (the softmax keeps even those). Tables, and the two
programs that the softmax capture lacks, are made here. Skipped without the files.
"""

from __future__ import annotations

import numpy as np
import pytest

from ork.npu import isa
from tests.emulator.elementwise import CAPTURES, FP16, INT8, Array, Operation, capture, cube, from_cube, standalone
from tests.emulator.elementwise import load_tables as table_words
from tests.emulator.programs import FP16_FP16, UNCACHED, Board, matmul, stored_kernels, words
from tests.emulator.programs import INT8 as INT8_MATMUL

pytestmark = pytest.mark.skipif(not CAPTURES, reason="no captured programs: ORK_CAPTURES names their folder")


def shifted(x: Array, shift: int) -> Array:
    return np.rint(np.asarray(x, np.float64) / 2.0**shift)


# --- convolutions whose operands DPU_RDMA reads ---


@pytest.mark.parametrize(
    ("name", "M", "K", "N", "zero", "offset", "scale", "shift"),
    [
        ("i8_linear_mul_m8_k512_n64", 8, 512, 64, 0x75, 17, 0x6CE6, 31),
        ("i8_conv1x1_mul_h8w8_c8_oc8", 64, 8, 8, 0x51, -25, 0x5E2A, 29),
    ],
)
def test_int8_matmul_with_bias_scale_and_product(
    name: str, M: int, K: int, N: int, zero: int, offset: int, scale: int, shift: int
) -> None:
    """Per channel bias, weight zero point and multiplier, then times another cube, then int8."""
    rng = np.random.default_rng(0)
    A, B = np.zeros((M, max(K, 16)), np.int8), np.zeros((max(K, 16), N), np.int8)
    A[:, :K], B[:K] = rng.integers(-128, 128, (M, K)), rng.integers(-128, 128, (K, N))
    stream = np.zeros(N // 4, [("bias", "<i4", 4), ("ow", "<i2", 4), ("mul", "<i2", 4)])
    bias, ow, mul = rng.integers(-20000, 20000, N), rng.integers(-20, 20, N), rng.integers(8000, 16384, N)
    for column, values in zip(("bias", "ow", "mul"), (bias, ow, mul)):
        stream[column] = values.reshape(-1, 4)
    other = rng.integers(-128, 128, (M, N)).astype(np.int8)

    board = Board()
    whole = M * max(N, 32)
    buffers = {
        0x1070: board.buffer(cube(A)),
        0x1110: board.buffer(stored_kernels(B, INT8_MATMUL)),
        0x5020: board.buffer(stream),
        0x5038: board.buffer(cube(other)),
        0x4020: board.buffer(whole + 64, 0x5A),
    }
    program = capture(name)
    for register, buffer in buffers.items():
        assert isa.patch(program, register, buffer.iova)
    outcome = board.core.run(board.domain, board.buffer(program).iova, len(program) - 4, 1)
    assert (outcome.hang, outcome.int_status) == (None, 0x100)
    assert set(board.report.counts) == {"operand-layout"}

    sums = A.astype(np.int64) @ B.astype(np.int64) + A.sum(axis=1, keepdims=True, dtype=np.int64) * ow + bias
    product = shifted(sums * mul, 14) * (other.astype(np.float64) + zero)
    want = (shifted(product * scale, shift) + offset).clip(-128, 127)
    raw = buffers[0x4020].cpu
    assert np.array_equal(from_cube(raw[:whole], M, N, "<i1"), want)
    assert (raw[whole : whole + 64] == 0x5A).all()


# --- element by element ---


def test_fp16_product_of_images() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(64, 64)).astype(np.float16) for _ in range(2))
    op = Operation(capture("sdp_mul_f16_chain_h8w8_c64"), a, b)
    assert np.array_equal(from_cube(op.run()[: a.nbytes], 64, 64, "<f2"), a * b)
    assert not op.board.report.violations


def test_fp16_product_with_a_vector_of_channels() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 8)).astype(np.float16), rng.normal(size=8).astype(np.float16)
    op = Operation(capture("sdp_mul_perchannel_f16_notch_m8_c8of64"), a, b)
    assert np.array_equal(op.run()[:128].view("<f2").reshape(8, 8), a * b)
    assert not op.board.report.violations


# --- tables ---


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def test_int8_silu() -> None:
    step, unit = 0.05, 16668 / 256  # of one int8 number: in reals, and in the table's index
    scale = 32767 / silu(16384 / unit * step)
    board = Board()
    scratch = board.buffer(4096)
    loading = standalone(INT8, 1, 16) | {0x5018: scratch.iova, 0x4020: scratch.iova}
    program = table_words(loading, lambda index: np.rint(silu(index / unit * step) * scale))
    assert board.core.run(board.domain, board.buffer(program).iova, len(program) - 4, 1).hang is None

    a = np.arange(512).astype(np.uint8).view(np.int8).reshape(8, 64)
    source, target = board.buffer(cube(a)), board.buffer(a.nbytes)
    program = capture("sdp_silu_i8_lut_m8_n64")
    isa.patch(program, 0x5018, source.iova)
    isa.patch(program, 0x4020, target.iova)
    assert board.core.run(board.domain, board.buffer(program).iova, len(program) - 4, 1).hang is None
    assert not board.report.violations
    want = np.rint(silu((a - 2.0) * step) * scale * 0x7AD3 / 2**21 - 104).clip(-128, 127)
    assert np.abs(from_cube(target.cpu[:512], 8, 64, "<i1") - want).max() <= 1


def test_fp16_softmax() -> None:
    """A vendor's graph of nine programs at its own addresses: row maxima in two halves, broadcast by an image of one
    channel, difference, tables, exp, sum, broadcast, quotient. Three of them leave out most registers."""
    board = Board()
    memory = board.memory.create(1, 1 << 19, UNCACHED, 0)

    def at(address: int, size: int) -> Array:
        return memory.cpu[address - memory.iova :][:size]

    def put(address: int, data: Array) -> None:
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        at(address, raw.size)[:] = raw

    captured = {int(name[16]): capture(name) for name in CAPTURES if name.startswith("softmax_f16_task")}
    tables = table_words(
        standalone(FP16, 1, 8) | {0x5018: memory.iova, 0x4020: memory.iova},
        lambda index: np.rint(np.exp((index - 16380) / 3276) * 32768) - 1,
        following=(0xFFFFD600, 0x24),
    )
    image = matmul(FP16_FP16, 256, 8, 64, "wide")  # as 16 x 16 pixels
    image |= {0x1020: 0x100010, 0x1028: 16, 0x1080: 0xC0, 0x107C: 64, 0x1044: 4, 0x3014: 0xF000F}
    image |= {0x4030: 15, 0x4034: 15, 0x405C: 0xF000F}
    image |= {0x1070: 0xFFFC6000, 0x1110: 0xFFFFA680, 0x4020: 0xFFFC8000}
    programs = {
        **{0xFFFFAB00: captured[0], 0xFFFFAD80: captured[1], 0xFFFFB000: captured[2], 0xFFFFB280: captured[3]},
        **{0xFFFFB380: tables, 0xFFFFD600: captured[5], 0xFFFFD880: captured[6]},
        **{0xFFFFDC00: words(image, 0xFFFFE000, 15), 0xFFFFE000: captured[8]},
    }
    x = (np.random.default_rng(0).normal(size=(256, 64)) * 2).astype(np.float16)
    first_channel = np.zeros((64, 8), np.float16)
    first_channel[:, 0] = 1
    data = {0xFFFB6000: cube(x), 0xFFFFA680: first_channel, 0xFFFFAA80: np.ones(64, np.float16)}
    for address, content in {**programs, **data}.items():
        put(address, content)

    outcome = board.core.run(board.domain, 0xFFFFAB00, 69, 9)
    assert (outcome.hang, outcome.tasks) == (None, 9)
    assert not board.report.violations
    got = from_cube(at(0xFFFAE000, x.nbytes), 256, 64, "<f2").astype(np.float64)
    power = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    assert np.abs(got - power / power.sum(axis=1, keepdims=True)).max() < 1e-3
