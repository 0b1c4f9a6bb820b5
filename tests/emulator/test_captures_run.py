"""Matmul programs that others captured on boards, run on random data with the result of numpy.

The registers are theirs, verbatim; only the three address registers are ours (the graph keeps even those). Skipped
without the files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork.npu import isa
from ork.npu.disasm import disassemble
from tests.emulator.programs import FP16, INT4, INT8, UNCACHED, Array, Board, cube, from_cube, nibbles, stored_kernels

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("ORK_CAPTURES", ROOT / "../shared/captures"))
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
FOLDS = [name for name in FILES if name.startswith("i8_fold_")]
CONVOLUTIONS = [
    n for n in FILES if n.startswith("f16_conv_live_") and not any(x in n for x in ("rerun", "sweep", "live_c32_h14"))
]
ENGINES = pytest.mark.parametrize("engine", ["literal", "fast"])
pytestmark = pytest.mark.skipif(not FILES, reason="no captured programs: ORK_CAPTURES names their folder")


def load(name: str) -> tuple[dict[str, Any], isa.Words]:
    about = json.loads(FILES[name].read_text())
    return about, np.array([int(w, 16) for w in about["words"]], np.uint64)


def run(board: Board, words: isa.Words, features: int, weights: int, output: int) -> None:
    words = words.copy()
    for offset, address in ((0x1070, features), (0x1110, weights), (0x4020, output)):
        assert isa.patch(words, offset, address)
    program = board.buffer(words)
    outcome = board.core.run(board.domain, program.iova, len(words) - 4, 1)
    assert (outcome.hang, outcome.tasks, outcome.int_status) == (None, 1, 0x100)
    assert not board.report.violations


@ENGINES
@pytest.mark.parametrize("name", FOLDS or ["none"])
def test_int8_cubes(name: str, engine: str) -> None:
    about, words = load(name)
    M, K, N = (about["shape"][axis] for axis in "MKN")
    total = int(found[1]) if (found := re.search(r"M_total=(\d+)", about["notes"])) else M
    row = 7 if total > M else 0  # a tile of a larger surface starts at any of its rows
    rng = np.random.default_rng(M)
    A, B = (rng.integers(-128, 128, shape, np.int8) for shape in ((total, K), (K, N)))
    board = Board(engine)
    a, w, c = board.buffer(cube(A, INT8)), board.buffer(stored_kernels(B, INT8)), board.buffer(total * N * 4, 0x5A)
    run(board, words, a.iova + 16 * row, w.iova, c.iova + 16 * row)
    got = from_cube(c.cpu[: total * N * 4], total, "<i4")
    want = np.full((total, N), 0x5A5A5A5A, np.int32)
    want[row : row + M] = (A.astype(np.float64) @ B.astype(np.float64))[row : row + M]
    assert np.array_equal(got, want)


@ENGINES
def test_int8_rows(engine: str) -> None:
    _, words = load("i8_matmul_m4_k32_n32")
    rng = np.random.default_rng(1)
    A, B = (rng.integers(-128, 128, shape, np.int8) for shape in ((4, 32), (32, 32)))
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(4096, 0x5A)
    run(board, words, a.iova, w.iova, c.iova)
    assert np.array_equal(c.cpu[: 4 * 32 * 4].view("<i4").reshape(4, 32), A.astype(np.int32) @ B.astype(np.int32))
    assert (c.cpu[4 * 32 * 4 :] == 0x5A).all()


@ENGINES
def test_fp16_rows(engine: str) -> None:
    _, words = load("f16_matmul_m4_k32_n16")
    rng = np.random.default_rng(2)
    A, B = (rng.integers(-40, 41, shape).astype(np.float16) for shape in ((4, 32), (32, 16)))
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, FP16)), board.buffer(4096, 0x5A)
    run(board, words, a.iova, w.iova, c.iova)
    assert np.array_equal(c.cpu[: 4 * 16 * 4].view("<f4").reshape(4, 16), A.astype(np.float32) @ B.astype(np.float32))
    assert (c.cpu[4 * 16 * 4 :] == 0x5A).all()


@ENGINES
def test_int4_row(engine: str) -> None:
    _, words = load("i4_matmul_m1of4_k64_n64")
    rng = np.random.default_rng(3)
    A, B = (rng.integers(-8, 8, shape, np.int8) for shape in ((1, 64), (64, 64)))
    board = Board(engine)
    a, w, c = board.buffer(nibbles(A)), board.buffer(stored_kernels(B, INT4)), board.buffer(4096, 0x5A)
    run(board, words, a.iova, w.iova, c.iova)
    assert np.array_equal(c.cpu[:128].view("<i2"), (A.astype(np.int32) @ B.astype(np.int32))[0])
    assert (c.cpu[128:] == 0x5A).all()


def conv_8(line: Array, kernels: Array) -> Array:
    """A window as wide as the image: line [8 columns, 8 channels] with kernels [N, 8, 8]."""
    return np.einsum("wc,nwc->n", line.astype(np.float64), kernels.astype(np.float64))


@ENGINES
def test_fp16_graph(engine: str) -> None:
    """A vendor's graph at the addresses it was captured with: four convolutions as wide as the image around a cube
    matmul, one reusing the weights in the buffer, the last two leaving out most registers."""
    tasks = [load(next(n for n in FILES if n.startswith(f"f16_gemm_graph_task{i}_")))[1] for i in range(1, 7)]
    board = Board(engine)
    memory = board.memory.create(1, 1 << 17, UNCACHED, 0)
    base = memory.iova

    def at(address: int, size: int) -> Array:
        return memory.cpu[address - base : address - base + size]

    rng = np.random.default_rng(4)
    image = rng.integers(-1, 2, (4, 8, 8)).astype(np.float16)  # 4 lines, 8 columns, one atom of channels
    first, second = (rng.integers(-1, 2, (64, 8, 8)).astype(np.float16) for _ in range(2))
    dense = rng.integers(-1, 2, (32, 64)).astype(np.float16)
    at(0xFFFF0480, image.nbytes)[:] = image.view(np.uint8).reshape(-1)
    for address, kernels in ((0xFFFF48C0, first), (0xFFFF20C0, second)):
        # groups of 16 kernels, and in each, column by column: kernel, channel
        order = kernels.reshape(4, 16, 8, 8).transpose(0, 2, 1, 3)
        at(address, kernels.nbytes)[:] = np.ascontiguousarray(order).view(np.uint8).reshape(-1)
    at(0xFFFF1000, dense.nbytes)[:] = stored_kernels(dense, FP16)
    for address, words in zip((0xFFFFAB40, 0xFFFFAEC0, 0xFFFFB240, 0xFFFFB5C0, 0xFFFFB940, 0xFFFFBA00), tasks):
        at(address, words.nbytes)[:] = words.view(np.uint8)

    outcome = board.core.run(board.domain, 0xFFFFAB40, 108, 6)
    assert (outcome.hang, outcome.tasks) == (None, 6)
    # The vendor gives these tiny kernels one weight bank and the first output is read under another shape.
    assert not [v for v in board.report.violations if v.severity == "error"]
    rows = np.stack([conv_8(line, first) for line in image]).astype(np.float16)
    assert np.array_equal(at(0xFFFF0000, rows.nbytes).view("<f2").reshape(4, 64), rows)
    A = rows.reshape(4, 8, 8).transpose(1, 0, 2).reshape(8, 32)  # the same bytes as a cube of 8 rows
    C = (A.astype(np.float64) @ dense.astype(np.float64)).astype(np.float16)
    assert np.array_equal(from_cube(at(0xFFFF0280, C.nbytes), 8, "<f2"), C)
    surfaces = C.reshape(8, 8, 8).transpose(1, 0, 2)
    for surface, result in zip(surfaces[:4], (0xFFFF0680, 0xFFFF0700, 0xFFFF0780, 0xFFFF0800)):
        assert np.array_equal(at(result, 128).view("<f2"), conv_8(surface, second).astype(np.float16))


@pytest.mark.parametrize("name", CONVOLUTIONS or ["none"])
def test_fp16_convolutions(name: str) -> None:
    """A vendor's convolutions, kernels 1x1 and 3x3, as it cuts them into row tiles for one core: the chain that its
    buffer begins with, at its own addresses."""
    about, words = load(name)
    tasks = about["tasks"]
    programs = next(i for i, task in enumerate(tasks) if task["regcfg_amount"] != 108)
    address = int(tasks[0]["regcmd_addr"], 16)
    first = {line.offset: line.value for line in disassemble(words[:112])}
    W, C, N = first[0x1020] >> 16, first[0x1024] & 0xFFFF, first[0x1038] & 0x3FFF
    kernel_w, kernel_h = first[0x1038] >> 24, first[0x1038] >> 16 & 0x1F
    H = ((first[0x1080] + 4 * W) & 0xFFFFFFF) // W
    out_w, out_h, out_pitch = W - kernel_w + 1, H - kernel_h + 1, first[0x4024]

    board = Board("fast")
    memory = board.memory.create(1, 32 << 20, UNCACHED, 0)

    def at(where: int, size: int) -> Array:
        return memory.cpu[where - memory.iova :][:size]

    rng = np.random.default_rng(0)
    image = rng.integers(-2, 3, (C, H, W)).astype(np.float16)
    kernels = rng.integers(-2, 3, (N, C, kernel_h, kernel_w)).astype(np.float16)
    cubed = np.ascontiguousarray(image.reshape(C // 8, 8, H, W).transpose(0, 2, 3, 1))
    blocks = [kernels[n : n + 16, c : c + 32].transpose(2, 3, 0, 1) for n in range(0, N, 16) for c in range(0, C, 32)]
    stored = np.concatenate([block.reshape(-1) for block in blocks])
    for where, data in ((first[0x1070], cubed), (first[0x1110], stored), (address, words)):
        at(where, data.nbytes)[:] = data.view(np.uint8).reshape(-1)
    outcome = board.core.run(board.domain, address, 108, programs)
    assert (outcome.hang, outcome.tasks) == (None, programs)
    assert not board.report.violations

    want = np.zeros((N, out_h, out_w))
    for y in range(kernel_h):
        for x in range(kernel_w):
            window = image[:, y : y + out_h, x : x + out_w].astype(np.float64).reshape(C, -1)
            want += (kernels[:, :, y, x].astype(np.float64) @ window).reshape(want.shape)
    surfaces = at(first[0x4020], N // 8 * out_pitch).reshape(-1, out_pitch)[:, : out_h * out_w * 16]
    got = np.ascontiguousarray(surfaces).view("<f2").reshape(N // 8, out_h, out_w, 8)
    assert np.array_equal(got.transpose(0, 3, 1, 2).reshape(want.shape), want.astype(np.float16))
