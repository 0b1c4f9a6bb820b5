"""Mutated programs: whatever words a core is given, it ends, says why, stays small, and both engines agree."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

from ork.npu import isa
from ork.npu.registers import REGISTERS
from tests.emulator.programs import FP16, INT4, INT8, INT8_INT8, UNCACHED, Board, matmul

ROUNDS = 3000  # per seed; together about ten seconds
OFFSETS = np.array(sorted(REGISTERS), np.uint64)
EDGES = (0, 1, 0xF, 0x7FFF, 0xFFFF, 0x1FFF1FFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def seeds(base: int) -> list[isa.Words]:
    """Good programs on memory at `base`."""
    shapes = (
        matmul(INT8, 4, 64, 64),
        matmul(INT8, 9, 96, 64, "tile", 20),
        matmul(FP16, 5, 64, 32, "wide"),
        matmul(INT4, 2, 128, 128, "batch"),
        matmul(INT8_INT8, 3, 512, 64),
    )
    places = {0x1070: base, 0x1110: base + 0x4000, 0x4020: base + 0xC000}
    return [isa.assemble({0x4004: 0xE, **registers, **places}) for registers in shapes]


def mutated(rng: np.random.Generator, words: isa.Words) -> isa.Words:
    """A few words with flipped bits, other values, other registers, dropped, doubled or cut off."""
    words = words.copy()
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(len(words)))
        how = rng.integers(7)
        if how <= 2:
            words[at] ^= np.uint64(1) << np.uint64(rng.integers(64) if how else rng.integers(16, 48))
        elif how == 3:
            value = int(rng.choice(EDGES)) if rng.integers(2) else int(rng.integers(1 << 32))
            words[at] = (int(words[at]) & 0xFFFF00000000FFFF) | value << 16
        elif how == 4:
            words[at] = (int(words[at]) & ~0xFFFF) | int(rng.choice(OFFSETS))
        elif how == 5:
            words = np.delete(words, at)
        else:
            words = np.insert(words, at, words[int(rng.integers(len(words)))])
    return words[: rng.integers(1, len(words))] if rng.integers(12) == 0 else words


@pytest.mark.parametrize("seed", range(5))
def test_mutated_programs_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    boards = [Board(engine, strict=bool(seed % 2)) for engine in ("literal", "fast")]
    memory = [board.memory.create(1, 1 << 18, UNCACHED, 0) for board in boards]
    base = memory[0].iova
    programs = seeds(base)
    text = base + 0x30000
    noise = rng.integers(0, 256, 0x30000, np.uint8)
    before, slowest, hangs = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, 0
    for _ in range(ROUNDS):
        words = mutated(rng, programs[int(rng.integers(len(programs)))])
        amount, tasks = int(rng.choice([len(words) - 4, len(words), 0, 500])), int(rng.integers(1, 4))
        following = int(rng.choice([0, text, base, 0x1000]))
        if len(words) > 4 and following:  # a chain: to itself, to data, to nowhere
            words[-4:-2] = isa.word(0x0101, 0x10, following), isa.word(0x0101, 0x14, int(rng.integers(60)))
        seen = []
        for board, buffer in zip(boards, memory):
            buffer.cpu[:0x30000] = noise
            buffer.cpu[0x30000:] = 0
            buffer.cpu[0x30000 : 0x30000 + words.nbytes] = words.view(np.uint8)
            started = time.process_time()
            outcome = board.core.run(board.domain, text, max(amount, 0), tasks)
            slowest = max(slowest, time.process_time() - started)
            assert (outcome.tasks == tasks) == (outcome.hang is None)
            assert outcome.hang is None or board.report.violations
            seen.append((outcome, [str(v) for v in board.report.violations], buffer.dev.tobytes()))
            board.report.clear()
        hangs += seen[0][0].hang is not None
        assert seen[0] == seen[1]
        if rng.integers(20) == 0:  # else registers stay, as on the chip
            for board in boards:
                board.core.reset()
    assert slowest < 20  # nothing runs away; most take a millisecond
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 << 10  # KiB
    assert ROUNDS // 20 < hangs < ROUNDS - ROUNDS // 20  # both kinds of program were tried
