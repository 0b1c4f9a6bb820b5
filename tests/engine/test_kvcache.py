"""The pool of KV blocks against a plain list of who owns what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ork.engine.kvcache import BLOCK, KvPool, Sequence
from ork.errors import UsageError

BLOCKS = 7
PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 100, 255, 256, 257, 600])), min_size=1, max_size=4
)


class Pool(RuleBasedStateMachine):
    """Four sequences share seven blocks; `model` is the length each should have."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(1, 1, 16, BLOCKS * BLOCK, half=True)
        self.seqs = [Sequence() for _ in range(4)]
        self.model = [0] * 4

    @rule(pieces=PIECES, every=st.booleans())
    def append(self, pieces: list[tuple[int, int]], every: bool) -> None:
        pieces = list(dict(pieces).items())
        after = list(self.model)
        for s, n in pieces:
            after[s] += n
        tables = [list(seq.blocks) for seq in self.seqs]
        parts = [(self.seqs[s], list(range(n))) for s, n in pieces]
        if sum(-(-n // BLOCK) for n in after) > BLOCKS:
            with pytest.raises(UsageError, match="KV cache is full"):
                self.pool.rows(parts, every=every)
            assert [list(seq.blocks) for seq in self.seqs] == tables  # nothing was taken
            return
        rows = self.pool.rows(parts, every=every)
        self.model = after
        for seq, table in zip(self.seqs, tables):
            assert seq.blocks[: len(table)] == table  # what is written stays where it is
        assert rows.tokens.tolist() == [t for _, n in pieces for t in range(n)]
        ends = np.cumsum([n for _, n in pieces])
        assert rows.wanted.tolist() == (list(range(ends[-1])) if every else (ends - 1).tolist())

    @rule(s=st.integers(0, 3), share=st.floats(0, 1))
    def truncate(self, s: int, share: float) -> None:
        self.model[s] = int(self.model[s] * share)
        self.pool.truncate(self.seqs[s], self.model[s])

    @rule(s=st.integers(0, 3))
    def refuse_nonsense(self, s: int) -> None:
        for length in (-1, self.model[s] + 1):
            with pytest.raises(ValueError):
                self.pool.truncate(self.seqs[s], length)

    @invariant()
    def no_block_is_shared_or_lost(self) -> None:
        assert [s.length for s in self.seqs] == self.model
        assert [len(s.blocks) for s in self.seqs] == [-(-n // BLOCK) for n in self.model]
        held = [b for s in self.seqs for b in s.blocks]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(BLOCKS))
        assert self.pool.used_blocks == len(held)

    @invariant()
    def all_the_rest_is_to_be_had(self) -> None:
        rest = Sequence()
        free = BLOCKS - self.pool.used_blocks
        self.pool.grow(rest, free * BLOCK)
        with pytest.raises(UsageError):
            self.pool.grow(rest, free * BLOCK + 1)
        rest.length = free * BLOCK
        self.pool.truncate(rest, 0)


Pool.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestPool = Pool.TestCase


def test_positions_are_rounded_up_to_blocks() -> None:
    assert KvPool(1, 1, 16, 1, half=True).positions == BLOCK
    assert KvPool(1, 1, 16, BLOCK + 1, half=True).positions == 2 * BLOCK


def test_bytes() -> None:
    """Keys and values of two layers with three heads of 16, f16 or f32."""
    values = 2 * 2 * 3 * 16 * BLOCK
    assert KvPool(2, 3, 16, 1, half=True).nbytes(BLOCK) == 2 * values
    assert KvPool(2, 3, 16, 1, half=False).nbytes(BLOCK) == 4 * values


def test_a_cache_larger_than_the_address_space() -> None:
    with pytest.raises(UsageError, match="smaller -c"):
        KvPool(1000, 1000, 1000, 1 << 40, half=False)
