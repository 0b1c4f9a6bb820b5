"""The literal engine: the register machine, chains, both fetch geometries, the output writer."""

from __future__ import annotations

import numpy as np
import pytest

from ork.emulator.core import Core
from ork.emulator.groups import Groups
from ork.emulator.report import Report
from ork.emulator.rounding import shift_round
from ork.npu import isa
from ork.npu.soc import RK3588
from tests.emulator.programs import (
    FP16,
    FP16_FP16,
    INT4,
    INT8,
    INT8_INT8,
    INT8_INT16,
    INT16,
    Board,
    Kind,
    cube,
    from_cube,
    matmul,
    nibbles,
    random_operands,
    stored_kernels,
)

DTYPES = {4: "<i4", 2: "<i2", 1: "<i1"}
ENGINES = pytest.mark.parametrize("engine", ["literal", "fast"])


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


# --- geometries ---


@pytest.mark.parametrize(
    "kind", [INT8, FP16, FP16_FP16, INT16, INT4], ids=["int8", "fp16", "fp16-fp16", "int16", "int4"]
)
@pytest.mark.parametrize(("form", "M"), [("row", 5), ("wide", 5), ("tall", 3), ("tall", 5), ("tall", 9), ("tile", 5)])
def test_matmul_in_every_layout(kind: Kind, form: str, M: int) -> None:
    rng = np.random.default_rng(M)
    K, N, total, first = 96, 2 * kind.group, 11, 4
    A, B = random_operands(rng, kind, total if form == "tile" else M, K, N)
    if kind is INT16:
        A, B = A // 64, B // 64
    dtype = {2: {2: "<f2", 4: "<f4"}}.get(kind.precision, DTYPES)[kind.out_bytes]
    want = product(A, B).astype(dtype)
    board = Board()
    packed = (nibbles(A) if kind is INT4 else A) if form == "row" else cube(A, kind)
    a, w, c = board.buffer(packed), board.buffer(stored_kernels(B, kind)), board.buffer(want.nbytes, 0x77)
    offset = 16 * first if form == "tile" else 0
    registers = matmul(kind, M, K, N, form, total)
    outcome = board.run([board.place(registers, a.iova + offset, w, c.iova + offset)])
    assert outcome.hang is None
    assert set(board.report.counts) <= {"int4-rows"}
    raw = c.cpu[: want.nbytes]
    got = raw.view(dtype).reshape(want.shape) if form == "row" else from_cube(raw, len(want), dtype)
    if form == "tile":
        rest = np.delete(got, np.s_[first : first + M], axis=0)
        assert (rest.view(np.uint8) == 0x77).all()
        got, want = got[first : first + M], want[first : first + M]
    assert np.array_equal(got, want)


def test_int4_batch_is_every_fourth_line_and_its_copies() -> None:
    """Lines 4j + i are row j shifted by i atoms, over the end into the next row."""
    M, K, N = 3, 96, 128
    rng = np.random.default_rng(0)
    rows, B = rng.integers(0, 256, (M * K + 48,), np.uint8), rng.integers(-8, 8, (K, N), np.int8)
    board = Board()
    a, w, c = board.buffer(rows), board.buffer(stored_kernels(B, INT4)), board.buffer(4 * M * N * 2)
    assert board.run([board.place(matmul(INT4, M, K, N, "batch"), a, w, c)]).hang is None
    got = c.cpu[: 4 * M * N * 2].view("<i2").reshape(N // 64, 4 * M, 64)
    for line in range(4 * M):
        at = line // 4 * K + line % 4 * 16
        values = np.stack([rows[at : at + K // 2] << 4, rows[at : at + K // 2]], 1).reshape(-1).view(np.int8) >> 4
        assert np.array_equal(got[:, line].reshape(-1), values.astype(np.int32) @ B.astype(np.int32))


@ENGINES
def test_short_last_kernel_group_is_stored_dense(engine: str) -> None:
    rng = np.random.default_rng(0)
    M, K, N = 3, 48, 44  # 32 + 12 kernels, 32 + 16 channels
    A, B = random_operands(rng, INT8, M, K, N)
    board = Board(engine)
    registers = matmul(INT8, M, K, 64)  # outputs are whole groups
    registers |= {0x1038: 0x01010000 | N, 0x1030: K * N}
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(M * 64 * 4)
    assert board.run([board.place(registers, a, w, c)]).hang is None
    got = c.cpu[: M * 64 * 4].view("<i4").reshape(M, 64)
    assert np.array_equal(got[:, :N], product(A, B))


def test_rows_of_a_wider_output_leave_the_rest_alone() -> None:
    rng = np.random.default_rng(0)
    M, K, N, pitch = 4, 64, 32, 5 * 128
    A, B = random_operands(rng, INT8, M, K, N)
    board = Board()
    registers = matmul(INT8, M, K, N)
    registers[0x4038] = (pitch // 16 - 1) * 0x10001
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(M * pitch, 0x77)
    assert board.run([board.place(registers, a, w, c)]).hang is None
    got = c.cpu[: M * pitch].reshape(M, pitch)
    assert np.array_equal(np.ascontiguousarray(got[:, : N * 4]).view("<i4"), product(A, B))
    assert (got[:, N * 4 :] == 0x77).all()


@ENGINES
def test_task_base_moves_every_operand(engine: str) -> None:
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 2, 32, 32)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(256)
    low = min(x.iova for x in (a, w, c))
    registers = board.place(matmul(INT8, 2, 32, 32), a.iova - low, w.iova - low, c.iova - low)
    address = board.chain([registers])
    assert board.core.run(board.domain, address, len(registers), 1, task_base=low).hang is None
    assert np.array_equal(c.cpu[:256].view("<i4").reshape(2, 32), product(A, B))


# --- the output converter ---


@ENGINES
@pytest.mark.parametrize("kind", [INT8_INT8, INT8_INT16], ids=["int8", "int16"])
def test_requantised_output(kind: Kind, engine: str) -> None:
    rng = np.random.default_rng(0)
    M, K, N, scale, shift, offset = 3, 512, 64, 0x5A31, 25, -3
    A, B = random_operands(rng, kind, M, K, N)
    board = Board(engine)
    registers = matmul(kind, M, K, N) | {0x4084: scale, 0x4088: shift, 0x4080: offset & 0xFFFFFFFF}
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, kind)), board.buffer(M * N * kind.out_bytes)
    assert board.run([board.place(registers, a, w, c)]).hang is None
    limit = 1 << 8 * kind.out_bytes - 1
    want = (np.rint(product(A, B) * scale / 2.0**shift) + offset).clip(-limit, limit - 1)
    assert np.array_equal(c.cpu[: want.size * kind.out_bytes].view(DTYPES[kind.out_bytes]).reshape(M, N), want)


def test_shift_rounds_halves_to_even_or_up() -> None:
    x = np.arange(-12, 13)
    assert np.array_equal(shift_round(x, 2, half_up=False), np.rint(x / 4))
    assert np.array_equal(shift_round(x, 2, half_up=True), np.floor(x / 4 + 0.5))
    assert np.array_equal(shift_round(x, 0, half_up=True), x)
    assert not shift_round(x, 63, half_up=True).any()
    assert not shift_round(x, 4095, half_up=False).any()


# --- groups, chains ---


def test_pointers_move_when_their_block_runs_and_only_then() -> None:
    groups = Groups()
    groups.commit(2)
    cna, dpu = groups.blocks["CNA"], groups.blocks["DPU"]
    cna.write(0x1020, 1)
    groups.ran(isa.MATMUL)
    assert (cna.pointer, cna.executer) == (1, 1)
    assert (dpu.pointer, dpu.executer) == (0, 0)  # nobody turned ping-pong on for DPU
    dpu.write(0x4004, 0xE)
    groups.ran(isa.Enable.DPU)
    assert (cna.pointer, dpu.pointer, dpu.executer) == (1, 1, 1)
    cna.write(0x1020, 2)
    groups.ran(isa.MATMUL)
    assert groups.running("CNA") == {0x1020: 1}
    cna.write(0x1004, 0x30)  # both pointers cleared, ping-pong off
    groups.ran(isa.MATMUL)
    assert (cna.pointer, cna.executer) == (0, 0)
    cna.write(0x1004, 0x1)  # without ping-pong, bit 0 is the pointer
    assert cna.pointer == 1


@ENGINES
def test_delta_programs_inherit_from_two_programs_before(engine: str) -> None:
    rng = np.random.default_rng(0)
    K, N = 64, 32
    first, second = (random_operands(rng, INT8, M, K, N) for M in (1, 2))
    board = Board(engine)
    buffers = [[board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(2048)] for A, B in (first, second)]
    full = [board.place(matmul(INT8, M, K, N), *b) for M, b in zip((1, 2), buffers)]
    deltas = [{0x4004: 0xE, 0x4020: b[2].iova + 1024} for b in buffers]
    assert board.run([*full, *deltas]).tasks == 4
    for (A, B), b in zip((first, second), buffers):
        for at in (0, 1024):
            assert np.array_equal(b[2].cpu[at : at + A.shape[0] * N * 4].view("<i4").reshape(-1, N), product(A, B))


@ENGINES
def test_registers_outlive_submits_and_a_reset_clears_them(engine: str) -> None:
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 1, 32, 32)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(1024)
    whole = board.place(matmul(INT8, 1, 32, 32), a, w, c)
    assert board.run([whole, whole]).int_status == 0x200
    board.run([{0x4004: 0xE, 0x4020: c.iova + 512}])
    assert np.array_equal(c.cpu[512 : 512 + 128].view("<i4"), product(A, B)[0])
    assert not board.report.counts["never-written"]
    board.core.reset()
    assert board.run([{0x4004: 0xE, 0x4020: c.iova + 512}]).hang
    assert board.report.counts["never-written"] == 1


@ENGINES
def test_a_program_reads_what_the_one_before_wrote(engine: str) -> None:
    rng = np.random.default_rng(0)
    K, N = 32, 32
    A, B = random_operands(rng, INT8, 2, K, N)
    board = Board(engine)
    a, w, c, d = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(256), board.buffer(512)
    again = board.place(matmul(INT8, 1, 64, 32), c, board.buffer(stored_kernels(np.tile(B, (2, 1)), INT8)), d)
    board.run([board.place(matmul(INT8, 2, K, N), a, w, c), again])
    codes = c.cpu[:64].view(np.int8)[None]
    assert np.array_equal(c.cpu[:256].view("<i4").reshape(2, N), product(A, B))
    assert np.array_equal(d.cpu[:128].view("<i4"), product(codes, np.tile(B, (2, 1)))[0])


@ENGINES
def test_words_after_the_op_enable_word_do_nothing(engine: str) -> None:
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 1, 32, 32)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(128)
    registers = board.place(matmul(INT8, 1, 32, 32), a, w, c)
    spoiler = {0x4010: 0, 0x1070: 0, 0x4004: 0x30}
    board.report.clear()
    address = board.chain([registers, spoiler])
    outcome = board.core.run(board.domain, address, 2 * len(registers), 1)
    assert (outcome.hang, outcome.tasks) == (None, 1)
    assert np.array_equal(c.cpu[:128].view("<i4"), product(A, B)[0])


@ENGINES
def test_unknown_registers_and_padding_are_ignored(engine: str) -> None:
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 1, 32, 32)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(128)
    raw = isa.assemble(board.place(matmul(INT8, 1, 32, 32), a, w, c))
    odd = np.array([isa.word(0x8001, 0x7038, 5), isa.word(0x0801, 0x3030, 7), 0, 1 << 48], np.uint64)
    words = np.concatenate([odd, raw])
    program = board.buffer(words)
    assert board.core.run(board.domain, program.iova, len(words) - 4, 1).hang is None
    assert np.array_equal(c.cpu[:128].view("<i4"), product(A, B)[0])
    assert not board.report.violations


@ENGINES
def test_a_body_followed_by_the_op_enable_word_alone_is_a_program(engine: str) -> None:
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 1, 32, 32)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(128)
    raw = isa.assemble(board.place(matmul(INT8, 1, 32, 32), a, w, c))
    program = board.buffer(np.concatenate([raw[:-4], raw[-1:]]))
    assert board.core.run(board.domain, program.iova, len(raw) - 4, 1).hang is None
    assert np.array_equal(c.cpu[:128].view("<i4"), product(A, B)[0])


@ENGINES
def test_weights_reused_from_the_buffer_are_those_that_were_loaded(engine: str) -> None:
    """The first program's output lands on the weights in memory; the buffer still holds the old ones."""
    rng = np.random.default_rng(0)
    K, N = 32, 32
    A, B = random_operands(rng, INT8, 2, K, N)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(256)
    onto_weights = board.place(matmul(INT8, 2, K, N), a, w, w)
    reusing = board.place(matmul(INT8, 2, K, N), a, w, c)
    reusing[0x1040] |= 1 << 13
    assert board.run([onto_weights, reusing]).hang is None
    assert np.array_equal(w.cpu[:256].view("<i4").reshape(2, N), product(A, B))
    assert np.array_equal(c.cpu[:256].view("<i4").reshape(2, N), product(A, B))
    assert not board.report.counts["weight-reuse"]


@ENGINES
def test_features_reused_from_the_buffer(engine: str) -> None:
    rng = np.random.default_rng(0)
    K, N = 32, 32
    A, B = random_operands(rng, INT8, 2, K, N)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(256)
    programs = [board.place(matmul(INT8, 2, K, N), a, w, c), board.place(matmul(INT8, 2, K, N), a, w, c)]
    programs[1][0x1040] |= 1 << 12
    programs[0][0x4020] = a.iova  # the features in memory are overwritten
    assert board.run(programs).hang is None
    assert np.array_equal(c.cpu[:256].view("<i4").reshape(2, N), product(A, B))
    assert board.report.counts == {"data-reuse-used": 1}


def test_simulated_time_counts_tasks_and_weights_and_can_be_limited() -> None:
    board = Board()
    a, w, c = board.buffer(1024), board.buffer(32 * 1024), board.buffer(4096)
    registers = board.place(matmul(INT8, 1, 1024, 32), a, w, c)
    whole = board.run([registers] * 3)
    assert whole.hw_ns == 3 * (4400 + int(32768 / 10.8))
    address = board.chain([registers] * 3)
    cut = board.core.run(board.domain, address, len(registers), 3, limit_ns=whole.hw_ns // 2)
    assert cut.tasks == 2
    assert cut.hang


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="exact"):
        Core(0, RK3588, Report(), "exact")


def test_convolution_with_stride_padding_and_dilation() -> None:
    """A 3x3 convolution of an 8-channel image against its definition, element by element."""
    rng = np.random.default_rng(0)
    W, H, C, N, pad, stride, dilation = 9, 8, 16, 32, 2, 2, 2
    image, kernels = rng.integers(-128, 128, (H, W, C), np.int8), rng.integers(-128, 128, (N, 3, 3, C), np.int8)
    out_w, out_h, zero = 5, 4, -7
    board = Board()
    registers = matmul(INT8, 1, C, N) | {
        0x100C: 0,
        0x1014: dilation << 21 | dilation << 16 | stride << 3 | stride,
        0x1020: W << 16 | H,
        0x1028: out_w,
        0x102C: out_w * out_h,
        0x1030: N * 9 * C,
        0x1034: 9 * C,
        0x1038: 3 << 24 | 3 << 16 | N,
        0x1044: -(-W * C // 64),
        0x1068: pad << 4 | pad,
        0x107C: 4 * W,
        0x1080: (H - 4) * W,
        0x1184: zero & 0xFF,
        0x3014: (out_h - 1) << 16 | (out_w - 1),
        0x4024: 16 * out_w * out_h,
        0x4030: out_w - 1,
        0x4034: out_h - 1,
        0x4038: 0,
        0x405C: (out_h - 1) << 16 | (out_w - 1),
        0x40C0: 8 * 16 * out_w * out_h,
    }
    # one group of 32 kernels, one block of 16 channels: row, column, kernel, channel
    a, w = board.buffer(cube(image.reshape(-1, C), INT8)), board.buffer(kernels.transpose(1, 2, 0, 3))
    c = board.buffer(out_w * out_h * N * 4)
    assert board.run([board.place(registers, a, w, c)]).hang is None
    assert board.report.counts == {"padding": 1}  # dilation
    got = from_cube(c.cpu[: out_w * out_h * N * 4], out_w * out_h, "<i4").reshape(out_h, out_w, N)
    for y in range(out_h):
        for x in range(out_w):
            want = np.zeros(N, np.int64)
            for ky in range(3):
                for kx in range(3):
                    iy, ix = y * stride + ky * dilation - pad, x * stride + kx * dilation - pad
                    inside = 0 <= iy < H and 0 <= ix < W
                    pixel = image[iy, ix].astype(np.int64) if inside else np.full(C, zero)
                    want += kernels[:, ky, kx].astype(np.int64) @ pixel
            assert np.array_equal(got[y, x], want)
