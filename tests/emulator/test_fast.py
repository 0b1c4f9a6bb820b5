"""The fast engine equals the literal one: every byte of memory, every report, every register, for any chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from ork.emulator.fast import rows_of
from tests.emulator.programs import (
    FP16,
    FP16_FP16,
    INT4,
    INT8,
    INT8_INT8,
    INT8_INT16,
    INT16,
    UNCACHED,
    Board,
    Kind,
    matmul,
    random_operands,
    stored_kernels,
)

SIZE = 1 << 16  # of each operand's buffer
KINDS = (INT8, INT8, INT8, FP16, FP16_FP16, INT4, INT4, INT8_INT8, INT8_INT16, INT16)


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[int, int], list[int]]:
    """Registers, and where the operands lie: offsets into the board's memory (features, weights, output)."""
    kind = draw(st.sampled_from(KINDS))
    form = draw(st.sampled_from(["row", "row", "wide", "tall", "tile", *(["batch", "batch"] if kind is INT4 else [])]))
    M, total = draw(st.integers(1, 9)), 12
    K, N = 32 * draw(st.integers(1, 5)), kind.group * draw(st.integers(1, 3))
    registers = matmul(kind, M, K, N, form, total)
    if form == "row" and draw(st.booleans()):
        registers[0x107C] += draw(st.integers(0, 3))  # features of a wider matrix
        registers[0x4038] = (registers[0x4038] & 0x1FFF) * 0x10001 + draw(st.integers(0, 9)) * 0x10001
    if draw(st.booleans()) and kind in (INT8_INT8, INT8_INT16):
        registers |= {
            0x4084: draw(st.integers(0, 0xFFFF)),
            0x4088: draw(st.integers(0, 40)) | draw(st.booleans()) << 30,
        }
        registers[0x4080] = draw(st.integers(0, 0xFFFFFFFF))
    for wrong, likely in (
        ({0x1038: 0x01010000 | (N - 4), 0x1030: (N - 4) * K * kind.bits // 8}, 8),  # a short last group
        ({0x1040: draw(st.sampled_from([0x0B, 0xB1, 0x1B, 0x30B1, 0x20B1, 0x10B1]))}, 5),
        ({0x405C: draw(st.integers(0, 3)) << 16 | draw(st.integers(0, 3))}, 8),  # the writer's counters wrap elsewhere
        ({0x4024: 16 * draw(st.integers(0, 40))}, 8),
        ({0x40C0: 16 * draw(st.integers(0, 80))}, 8),
        ({draw(st.sampled_from(sorted(registers))): draw(st.integers(0, 0xFFFFFFFF))}, 8),
    ):
        if draw(st.integers(1, likely)) == 1:
            registers |= wrong
    places = [
        draw(st.integers(0, 40)) * 64,
        SIZE + draw(st.integers(0, 8)) * 64,
        2 * SIZE + draw(st.integers(0, 9)) * 16,
    ]
    if draw(st.integers(1, 6)) == 1:  # an output over its features or weights, or at the end of memory
        places[2] = draw(st.sampled_from([places[0], places[1], places[0] + 512, 3 * SIZE - 512, 3 * SIZE - 48]))
    return registers, places


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[dict[int, int], list[int]]]:
    chain = draw(st.lists(programs(), min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 2))):  # again, elsewhere; with registers left out; reusing weights
        registers, places = chain[draw(st.integers(0, len(chain) - 1))]
        registers = dict(registers)
        if draw(st.booleans()):
            kept = draw(st.sets(st.sampled_from(sorted(matmul(INT8, 1, 32, 32)))))
            registers = {offset: value for offset, value in registers.items() if offset in kept}
        elif draw(st.booleans()) and 0x1040 in registers:
            registers[0x1040] |= 1 << 13
        chain.append((registers, [places[0], places[1], 2 * SIZE + draw(st.integers(0, 9)) * 16]))
    return chain


def run(engine: str, chain: list[tuple[dict[int, int], list[int]]], split: bool, strict: bool) -> dict[str, Any]:
    """Everything that can be seen afterwards. `split`: the operands' memory is two buffers that touch."""
    board = Board(engine, strict)
    sizes = (2 * SIZE + 4096, SIZE - 4096) if split else (3 * SIZE,)
    buffers = [board.memory.create(1, size, UNCACHED, 0) for size in reversed(sizes)]
    base = buffers[-1].iova
    noise = np.random.default_rng(0)
    for buffer in buffers:
        buffer.cpu[:] = noise.integers(0, 256, buffer.size, np.uint8)
    listed = []
    for registers, places in chain:
        addresses = dict(zip((0x1070, 0x1110, 0x4020), (base + p for p in places)))
        listed.append({0x4004: 0xE, **{o: addresses.get(o, v) for o, v in registers.items()}})
    outcomes = [board.run(listed), board.run(listed)]
    return {
        "outcomes": outcomes,
        "memory": [buffer.dev.tobytes() for buffer in buffers],
        "report": [str(v) for v in board.report.violations],
        "groups": {
            name: (block.groups, block.pointer, block.executer, block.pointer_pp, block.executer_pp)
            for name, block in board.core.groups.blocks.items()
        },
    }


@pytest.mark.filterwarnings("error")
@settings(max_examples=250)
@given(chains(), st.booleans(), st.booleans())
def test_fast_equals_literal(chain: list[tuple[dict[int, int], list[int]]], split: bool, strict: bool) -> None:
    literal, fast = (run(engine, chain, split, strict) for engine in ("literal", "fast"))
    for what, seen in literal.items():
        assert seen == fast[what], what


@pytest.mark.parametrize(
    ("kind", "form", "M", "K", "N"),
    [
        *((INT8, "row", M, K, N) for M in (1, 2, 64) for K, N in ((576, 1536), (1536, 576), (640, 2048))),
        *((INT8, "wide", M, 256, 96) for M in (1, 5, 33)),
        (INT8, "tile", 5, 256, 96),
        (INT4, "wide", 1, 256, 128),
        *((INT4, "batch", M, 768, 128) for M in (1, 2, 16)),
        (FP16, "row", 7, 512, 64),
        (FP16, "tall", 7, 64, 32),
        (INT8_INT8, "row", 3, 512, 64),
    ],
)
def test_usual_matmuls_run_natively(
    kind: Kind, form: str, M: int, K: int, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes that models use never take the long way, and give the same bytes."""
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, kind, 64, K, N)
    outputs = []
    for engine in ("literal", "fast"):
        if engine == "fast":
            monkeypatch.setattr("ork.emulator.convolve.run", lambda *_: pytest.fail("the long way"))
        board = Board(engine)
        a, w = board.buffer(A), board.buffer(stored_kernels(B, kind))
        c = board.buffer(64 * 4 * N * 4, 0x33)
        assert board.run([board.place(matmul(kind, M, K, N, form, 12), a, w, c)]).hang is None
        outputs.append(c.dev.tobytes())
    assert outputs[0] == outputs[1]


def test_rows_in_rows_out_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int8 row program is one call of the native kernel on the device's own memory."""
    calls = []
    monkeypatch.setattr(native, "accumulate_at", lambda *args: calls.append(args))
    board = Board("fast")
    M, K, N = 3, 64, 96
    a, w, c = board.buffer(M * K), board.buffer(K * N), board.buffer(M * N * 4)
    board.run([board.place(matmul(INT8, M, K, N), a, w, c)])
    assert calls == [(a.dev_address, K, M, K, w.dev_address, N, c.dev_address, N)]


@pytest.mark.parametrize("engine", ["literal", "fast"])
def test_operands_without_a_sync_are_stale_and_named(engine: str) -> None:
    """What the CPU wrote into cacheable memory and did not sync, the device does not see; programs included."""
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 2, 64, 64)
    board = Board(engine)
    a, w = (board.memory.create(i, 4096, 0x403, 0) for i in (1, 2))
    c = board.buffer(512, 0x33)
    for buffer, data in ((a, A), (w, stored_kernels(B, INT8))):
        buffer.cpu[: data.size] = data.reshape(-1).view(np.uint8)
    registers = board.place(matmul(INT8, 2, 64, 64), a, w, c)
    assert board.run([registers]).hang is None
    assert not c.dev[:512].any()
    seen = [(v.rule, v.program, v.values["handle"], v.values["bytes"]) for v in board.report.violations]
    assert seen == [("missing-sync", 0, 1, 128), ("missing-sync", 0, 2, 4096)]
    for buffer in (a, w):
        buffer.pages.to_device(0, 4096)
    board.report.clear()
    board.run([registers])
    assert np.array_equal(c.dev[:512].view("<i4").reshape(2, 64), A.astype(np.int32) @ B.astype(np.int32))
    assert not board.report.violations


def test_a_known_text_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that differ in addresses alone are decoded once."""
    board = Board("fast")
    a, w, c = board.buffer(4096), board.buffer(4096), board.buffer(4096)
    registers = board.place(matmul(INT8, 2, 32, 32), a, w, c)
    board.run([registers])
    monkeypatch.setattr("ork.emulator.images.parse", lambda *_: pytest.fail("decoded again"))
    monkeypatch.setattr("ork.emulator.core.parse", lambda *_: pytest.fail("decoded again"))
    for offset in (0, 64, 128):
        assert board.run([{**registers, 0x4020: c.iova + offset}]).hang is None


def test_memory_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ork.emulator.images._KEPT", 8)
    board = Board("fast")
    a, w, c = board.buffer(4096), board.buffer(4096), board.buffer(1 << 16)
    for M in range(1, 40):
        assert board.run([board.place(matmul(INT8, M, 32, 32), a, w, c)]).hang is None
    assert board.core._images is not None
    assert len(board.core._images) <= 16


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9), st.integers(0, 200), st.integers(0, 2000))
def test_rows_hold_every_atom_in_its_place(pixels: int, atoms: int, step: int, pitch: int, start: int) -> None:
    offsets = 16 * (start + np.arange(pixels)[:, None] * pitch + np.arange(atoms) * step)
    rows = rows_of(offsets, distinct=False)
    if rows is None:
        return
    places = (rows.start + np.arange(rows.count)[:, None] * rows.pitch + np.arange(0, rows.size, 16)).reshape(-1)
    found = places if rows.order is None else places[rows.order]
    assert np.array_equal(found, offsets.reshape(-1))
    assert len(np.unique(places)) == len(places)
