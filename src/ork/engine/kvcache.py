"""The KV cache: a pool of blocks of 256 positions, and a block table per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from ork import native
from ork.errors import UsageError
from ork.models import Config, Rows
from ork.ops import Ops

BLOCK = native.KV_BLOCK
WARM = 4  # blocks, at most, that hold all inputs of convolutions: a chunk of prefill in two or three, and one before


class Sequence:
    """A sequence's place in the pool: its blocks, and how many positions they hold. Of the first `cold` blocks there
    are only those inputs of convolutions that the next block looks back at."""

    __slots__ = ("blocks", "cold", "length")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.cold = 0
        self.length = 0


class KvPool:
    """Blocks for any number of sequences, `positions` in all (rounded up to whole blocks)."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        positions: int,
        *,
        half: bool,
        conv: tuple[int, int, int] | None = None,
    ):
        """`conv`: layers, width and taps of short convolutions, whose inputs are kept by block too: all of them of a
        sequence's last block or two, so that it can be cut there anywhere, and what its next block looks back at of the
        others. Raises UsageError."""
        count = -(-positions // BLOCK)
        try:
            self.cache = native.KvCache(layers, kv_heads, head_dim, count, half)
            self.conv = native.ConvCache(*conv[:2], count, half) if conv else None
        except MemoryError:
            raise UsageError(
                f"a KV cache of {positions} positions does not fit the address space: give a smaller -c"
            ) from None
        self._back = conv[2] - 1 if conv else 0  # positions that one looks back over
        self._free = list(range(count - 1, -1, -1))
        self.positions = count * BLOCK

    @classmethod
    def of(cls, c: Config, positions: int, *, half: bool) -> KvPool:
        """For a model of this shape."""
        conv = (c.conv_layers, c.width, c.taps) if c.conv_layers else None
        return cls(c.attention_layers, c.kv_heads, c.head_dim, positions, half=half, conv=conv)

    def serve(self, ops: Ops) -> None:
        """Makes this the cache of a model's passes."""
        ops.cache, ops.conv = self.cache, self.conv

    def nbytes(self, positions: int) -> int:
        """What a sequence of so many positions takes, at most."""
        blocks = -(-positions // BLOCK)
        nbytes = blocks * self.cache.block_bytes()
        if self.conv:
            warm = min(blocks, WARM)
            nbytes += warm * self.conv.block_bytes() + (blocks - warm) * self.conv.cold_bytes(self._back)
        return nbytes

    @property
    def used_blocks(self) -> int:
        return self.cache.blocks - len(self._free)

    def grow(self, seq: Sequence, length: int) -> None:
        """Gives `seq` blocks for `length` positions. Raises UsageError when the pool is empty."""
        need = -(-length // BLOCK) - len(seq.blocks)
        self._check(need)
        for _ in range(need):
            seq.blocks.append(self._free.pop())

    def _check(self, need: int) -> None:
        if need > len(self._free):
            raise UsageError(f"the KV cache is full at {self.positions} positions: give a larger -c")

    def truncate(self, seq: Sequence, length: int) -> None:
        """Forgets positions from `length` on and takes back whole blocks behind it. In a block whose inputs of
        convolutions are gone it cuts at the block's beginning: `seq.length` says."""
        if not 0 <= length <= seq.length:
            raise ValueError(f"cannot cut a sequence of {seq.length} to {length}")
        if length // BLOCK < seq.cold:
            seq.cold = length // BLOCK
            length = seq.cold * BLOCK
        seq.length = length
        keep = -(-length // BLOCK)
        if self.conv:
            for block in seq.blocks[keep:]:
                self.conv.cool(block, 0)
        self._free.extend(reversed(seq.blocks[keep:]))
        del seq.blocks[keep:]

    def _cool(self, seq: Sequence) -> None:
        """Before a pass: drafts that were wrong, or a pass that was given up, cut no farther back than this block's
        beginning, or than the one before."""
        while self.conv and seq.cold < seq.length // BLOCK - 1:
            self.conv.cool(seq.blocks[seq.cold], self._back)
            seq.cold += 1

    def rows(self, parts: Seq[tuple[Sequence, Seq[int]]], *, every: bool) -> Rows:
        """The flat batch that appends tokens to sequences, and wants `every` row or the last of each part."""
        tokens, positions, slots, runs, wanted = [], [], [], [], []
        row = 0
        lengths: dict[int, tuple[Sequence, int]] = {}
        for seq, part in parts:
            lengths[id(seq)] = seq, lengths.get(id(seq), (seq, seq.length))[1] + len(part)
        self._check(sum(-(-length // BLOCK) - len(seq.blocks) for seq, length in lengths.values()))  # all or nothing
        for seq, _ in parts:
            self._cool(seq)
        for i, (seq, part) in enumerate(parts):
            n, start = len(part), seq.length
            self.grow(seq, start + n)
            at = np.arange(start, start + n, dtype=np.int32)
            tokens.append(np.asarray(part, np.int32))
            positions.append(at)
            slots.append(np.asarray(seq.blocks, np.int32)[at // BLOCK] * np.int32(BLOCK) + at % BLOCK)
            runs.append((row, n, i, start))
            wanted.append(np.arange(row, row + n) if every else np.array([row + n - 1]))
            row += n
            seq.length += n
        table = np.zeros((len(parts), max(len(s.blocks) for s, _ in parts)), np.int32)
        for i, (seq, _) in enumerate(parts):
            table[i, : len(seq.blocks)] = seq.blocks
        batch = native.Batch(
            np.concatenate(positions), np.concatenate(slots), np.array(runs, np.int32), np.ascontiguousarray(table)
        )
        return Rows(np.concatenate(tokens), batch, np.concatenate(wanted).astype(np.int32))
