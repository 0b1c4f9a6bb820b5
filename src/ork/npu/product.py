"""A whole matmul through the driver, from arrays to an array: for tests, probes and experiments, not for speed.

Packs rows and weights into the chip's layouts, runs all tiles, unpacks and adds the partial sums of K slices.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ork import tiles
from ork.npu.buffers import DmaBuffer
from ork.npu.chain import CHAIN_LIMIT, Chain, Step
from ork.npu.driver import Npu
from ork.npu.matmul import program
from ork.npu.plan import INT4_SAFE_K, KINDS, Form, MatmulShape, Tile, int4_slice, plan

Array = npt.NDArray[Any]

CODECS = {"int8": "i8", "fp16": "f16", "int4": "i4"}  # the pack codec whose tiles a kind reads
SUMS: dict[str, Any] = {"int8": np.int32, "fp16": np.float32, "int4": np.int16}  # as programs leave them
TOTALS: dict[str, Any] = {**SUMS, "int4": np.int32}  # of K slices
LINE = 64  # outputs of programs that may run at once start on cache lines of their own


def pack_rows(kind: str, a: Array) -> npt.NDArray[np.uint8]:
    """Rows as the chip reads them, u8[M, bytes]: int8, float16, or int4 (as int8) two a byte, the even one low."""
    if kind != "int4":
        dtype: type[np.generic] = np.int8 if kind == "int8" else np.float16
        return np.ascontiguousarray(a, dtype).view(np.uint8)
    nibbles = np.ascontiguousarray(a, np.int8).view(np.uint8)
    packed: npt.NDArray[np.uint8] = np.bitwise_or(nibbles[:, 0::2] & 15, nibbles[:, 1::2] << 4, dtype=np.uint8)
    return packed


def multiply(
    npu: Npu,
    a: Array,
    b: Array,
    kind: str = "int8",
    *,
    domain: int = 0,
    ks: int | None = None,
    cores: int = 1,
    blocking: bool = True,
    unproven: bool = False,
    timeout_ms: int | None = None,
) -> Array:
    """`a [M, K] @ b [N, K].T` as int32 or float32 [M, N], K slices added in ascending order.

    Values must fit the kind (int8, float16, -8..7). K is padded to 32 and N to 64 with zeros here; `ks` defaults to
    `tiles.ks_of`, and for int4 to what int16 sums of codes within +-7 cannot overflow; if they do overflow in a K slice
    they are unspecified. Raises what `plan` and the driver raise.
    """
    (M, K), N = a.shape, b.shape[0]
    Kp, Np = tiles.pad_k(K), tiles.pad_n(N)
    if ks is None:
        ks = int4_slice(Kp, INT4_SAFE_K) if kind == "int4" else tiles.ks_of(Kp)
    a = np.pad(a, ((0, 0), (0, Kp - K)))
    b = np.pad(b, ((0, Np - N), (0, Kp - K))).astype(tiles.CODECS[CODECS[kind]].dtype)
    todo = plan(MatmulShape(M, Kp, Np, kind), npu.soc, ks=ks, unproven=unproven)
    programs = [program(t, soc=npu.soc) for t in todo]
    # Rows and weights of a K slice lie together, one slice after the other.
    pitch = ks if todo[0].form is Form.BATCH else KINDS[kind].row_bytes(ks)
    rows = np.zeros((Kp // ks, M, pitch), np.uint8)
    for s, k0 in enumerate(range(0, Kp, ks)):
        rows[s, :, : KINDS[kind].row_bytes(ks)] = pack_rows(kind, a[:, k0 : k0 + ks])
    weights = np.concatenate([tiles.pack_codes(CODECS[kind], b[:, k0 : k0 + ks]) for k0 in range(0, Kp, ks)])
    starts = list(accumulate((-(-p.operands["output"].nbytes // LINE) * LINE for p in programs), initial=0))

    chains: list[Chain] = []
    buffers: list[DmaBuffer] = []
    try:
        for nbytes in (rows.nbytes + LINE, weights.nbytes, starts[-1]):  # a batch reads some bytes past its rows
            buffers.append(npu.buffer(nbytes, domain=domain))
        source, stored, target = buffers
        for buffer, data in ((source, rows.reshape(-1)), (stored, weights)):
            buffer.array[: data.nbytes] = data
            buffer.sync_to_device()
        steps = []
        for t, p, at in zip(todo, programs, starts):
            inputs = (t.k0 // ks * M + t.m0) * pitch
            columns = KINDS[kind].row_bytes(t.k0 * Np + t.n0 * ks)
            steps.append(Step(p, {"input": (source, inputs), "weights": (stored, columns), "output": (target, at)}))
        run = min(-(-len(steps) // cores), CHAIN_LIMIT)
        chains += [npu.chain(steps[i : i + run]) for i in range(0, len(steps), run)]
        npu.run(chains, cores=cores, blocking=blocking, timeout_ms=timeout_ms)
        target.sync_from_device()
        out = np.zeros((M, Np), TOTALS[kind])
        for t, p, at in zip(todo, programs, starts):
            raw = target.array[at : at + p.operands["output"].nbytes].view(SUMS[kind])
            out[t.m0 : t.m1, t.n0 : t.n1] += _rows_of(t, raw)
            del raw
        return out[:, :N]
    finally:
        for chain in chains:
            chain.free()
        for buffer in buffers:
            buffer.free()


def _rows_of(tile: Tile, raw: Array) -> Array:
    """The [M, N] of a program's output: of a batch every fourth line of each block of 64 channels."""
    if tile.form is Form.BATCH:
        raw = raw.reshape(tile.N // 64, 4 * tile.M, 64)[:, ::4].transpose(1, 0, 2)
    return raw.reshape(tile.M, tile.N)
