"""Mutated programs of the output side: whatever a core is given, it ends and says why, and both engines agree."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from ork.npu import isa
from tests.emulator import test_fuzz_programs as words_of
from tests.emulator.elementwise import FP16, INT8, INT16, load_tables, standalone, two_inputs
from tests.emulator.programs import INT8_INT8, UNCACHED, Board, matmul
from tests.emulator.test_lut import LOOK_UP, curve
from tests.emulator.test_ppu import AVERAGE, MAX, Shape, registers

ROUNDS = 800  # per seed


def seeds(base: int) -> list[isa.Words]:
    """Good programs of every kind on memory at `base`."""
    places = {0x1070: base, 0x1110: base + 0x4000, 0x4020: base + 0xC000, 0x5018: base, 0x5038: base + 0x2000}
    places |= {0x5020: base + 0x4000, 0x502C: base + 0x4000, 0x701C: base, 0x6070: base + 0xC000}

    def of(program: dict[int, int], enable: int) -> isa.Words:
        return isa.assemble(program | {o: v for o, v in places.items() if o in program}, enable=enable)

    fused = two_inputs(INT8, 2 << 16 | 0xC0, 1, 32, 4)
    fused = matmul(INT8_INT8, 4, 64, 32) | {o: v for o, v in fused.items() if o >= 0x5000 or o in {0x4070, 0x4078}}
    fused |= {0x4040: 0x20140, 0x4048: 0xE01, 0x4010: 0xE0, 0x501C: 0xE, 0x5044: 0x7800}
    extremes = {0x400C: 0x020001E5 | 2 << 9, 0x4034: 7 << 22}
    tables = load_tables(standalone(INT16, 8, 16) | LOOK_UP | {o: places[o] for o in (0x5018, 0x4020)}, curve)
    return [
        of(two_inputs(INT8, 2 << 16 | 0xC0, 8, 32), 0x18),
        of(two_inputs(INT16, 0xC4, 8, 16, 2), 0x18),
        of(two_inputs(FP16, 3 << 16 | 0xC0, 8, 24), 0x18),
        of(standalone(FP16, 16, 16) | LOOK_UP, 0x18),
        of(standalone(FP16, 16, 24) | extremes, 0x18),
        of(fused, 0x1D),
        of(registers(Shape(MAX, 5, 6, 16, (3, 2), (2, 1))), 0x60),
        of(registers(Shape(AVERAGE, 4, 4, 8)), 0x60),
        tables,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_mutated_programs_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    boards = [Board(engine, strict=bool(seed % 2)) for engine in ("literal", "fast")]
    memory = [board.memory.create(1, 1 << 18, UNCACHED, 0) for board in boards]
    base = memory[0].iova
    programs = seeds(base)
    text = base + 0x30000
    noise = rng.integers(0, 256, 0x30000, np.uint8)
    before, hangs = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(ROUNDS):
        words = words_of.mutated(rng, programs[int(rng.integers(len(programs)))])
        seen = []
        for board, buffer in zip(boards, memory):
            buffer.cpu[:0x30000] = noise
            buffer.cpu[0x30000:] = 0
            buffer.cpu[0x30000 : 0x30000 + words.nbytes] = words.view(np.uint8)
            outcome = board.core.run(board.domain, text, max(len(words) - 4, 0), 1)
            assert (outcome.tasks == 1) == (outcome.hang is None)
            assert outcome.hang is None or board.report.violations
            seen.append((outcome, [str(v) for v in board.report.violations], buffer.dev.tobytes()))
            board.report.clear()
        hangs += seen[0][0].hang is not None
        assert seen[0] == seen[1]
        if rng.integers(10) == 0:
            for board in boards:
                board.core.reset()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB
    assert ROUNDS // 20 < hangs < ROUNDS - ROUNDS // 20  # both kinds of program were tried
