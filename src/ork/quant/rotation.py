"""Block Hadamard rotation along K: R = H_block diag(signs) / sqrt(block).

Rotating a weight row and an activation row by the same R leaves their product alone and spreads outliers over a
block, so that one int8 scale a row serves them better. The block is the largest power of two that divides K (at most
4096) and there is one sign vector per K, so that all tensors that read the same rows share one quantised input.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_BLOCK = 4096


def block_of(K: int) -> int:
    """Rotation block for `K` input channels: the largest power of two that divides K, at most 4096."""
    return min(K & -K, MAX_BLOCK)


def signs_name(K: int) -> str:
    """Name of the raw tensor that holds K's sign vector in a pack."""
    return f"rotation.signs.{K}"


def signs_of(K: int) -> npt.NDArray[np.int8]:
    """The sign vector of +-1 for K input channels: bit 63 of splitmix64(K * 2^32 + k), so it needs no state."""
    with np.errstate(over="ignore"):
        z = np.uint64(K << 32) + np.arange(K, dtype=np.uint64)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.where(z >> np.uint64(63), -1, 1).astype(np.int8)
