"""Products through the whole driver on the emulated chip, against numpy's int64: equal to the last bit."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.emulator.kernel import EmulatedKernel
from ork.errors import SubmitFailed
from ork.npu.chain import Step
from ork.npu.driver import Npu
from ork.npu.jobs import Int4Job, Int8Job
from ork.npu.matmul import MatmulShape, plan, program
from ork.npu.plan import KINDS
from ork.npu.product import multiply, pack_rows

Array = npt.NDArray[Any]

# (K, N) of every linear of the models, the heads apart, which are slow to check against numpy.
SMOLLM2 = [(576, 576), (576, 192), (576, 1536), (1536, 576)]
GEMMA3_270M = [(640, 1024), (640, 256), (1024, 640), (640, 2048), (2048, 640)]
QWEN3_0_6B = [(1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024)]
QWEN3_1_7B = [(2048, 2048), (2048, 1024), (2048, 6144), (6144, 2048)]
HEADS = [(576, 49152), (640, 262144), (1024, 151936), (2048, 151936)]
ROWS = (1, 2, 7, 64, 129, 512)
SLICE_BYTES = 2 << 20


@pytest.fixture
def kernel() -> Iterator[EmulatedKernel]:
    made = EmulatedKernel()
    yield made
    assert made.report.violations == []
    stats = made.stats
    assert (stats.live_buffers, stats.live_maps, stats.live_files, stats.leaked_bytes) == (0, 0, 0, 0)
    assert stats.creates == stats.destroys


@pytest.fixture
def npu(kernel: EmulatedKernel) -> Iterator[Npu]:
    with Npu.open(kernel) as opened:
        yield opened


def codes(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """int8 of the whole range, -128 among them, and some rows at the ends of it."""
    made = rng.integers(-128, 128, shape, dtype=np.int8)
    made.flat[:: max(made.size // 97, 1)] = -128
    made[0] = -128
    return made


def exact(a: Array, b: Array) -> npt.NDArray[np.int64]:
    """a @ b.T without rounding: each product of halves stays below 2^24, so float32 holds it."""
    wide = np.zeros((len(a), len(b)), np.int64)
    for k in range(0, a.shape[1], 1024):  # 1024 * 128 * 128 = 2^24
        wide += (a[:, k : k + 1024].astype(np.float32) @ b[:, k : k + 1024].astype(np.float32).T).astype(np.int64)
    return wide


def tiled(b: npt.NDArray[np.int8], ks: int) -> bytes:
    """Weights [N, K] as the chip reads them, written down from the layout: k fastest, then 32 channels."""
    N, K = b.shape
    return b"".join(
        np.ascontiguousarray(
            b[:, k : k + ks].reshape(N // 32, 32, ks // 32, 32).transpose(0, 2, 1, 3)
        ).tobytes()
        for k in range(0, K, ks)
    )  # fmt: skip


def ks_for(K: int) -> int:
    return K if K <= 4096 else next(ks for ks in range(4096, 0, -32) if K % ks == 0)


class Linear:
    """One weight on the NPU in slices of columns as packs have them, and rows and results beside it."""

    def __init__(self, npu: Npu, b: npt.NDArray[np.int8], rows: int) -> None:
        self.npu, (self.N, self.K) = npu, b.shape
        self.ks = ks_for(self.K)
        width = min(max(SLICE_BYTES // self.K // 64 * 64, 64), 8192)
        self.columns = [(n, min(n + width, self.N)) for n in range(0, self.N, width)]
        self.weights = npu.buffer(b.size)
        self.weights.array[: b.size] = np.frombuffer(
            b"".join(tiled(b[n0:n1], self.ks) for n0, n1 in self.columns), np.uint8
        )
        self.weights.sync_to_device()
        self.a = npu.buffer(rows * self.K)
        self.parts = self.K // self.ks
        self.out = npu.buffer(self.parts * rows * self.N * 4)

    def __call__(self, a: npt.NDArray[np.int8], **how: Any) -> npt.NDArray[np.int32]:
        M = len(a)
        self.a.array[: a.size] = a.reshape(-1).view(np.uint8)
        self.a.sync_to_device(0, a.size)
        chains = []
        for n0, n1 in self.columns:
            at = self.parts * M * n0 * 4
            one = Int8Job(self.a, self.weights, self.out, M, self.K, n1 - n0, self.ks,
                          weights_offset=n0 * self.K, out_offset=at)  # fmt: skip
            chains.append(self.npu.prepare([one]).chain)
        self.npu.run(chains, **how)
        self.out.sync_from_device()
        total = np.empty((M, self.N), np.int32)
        for chain, (n0, n1) in zip(chains, self.columns):
            at, size = self.parts * M * n0 * 4, self.parts * M * (n1 - n0) * 4
            block = self.out.array[at : at + size].view(np.int32).reshape(self.parts, M, n1 - n0)
            total[:, n0:n1] = block.sum(0, dtype=np.int64)
            chain.free()
        return total

    def free(self) -> None:
        for buffer in (self.a, self.weights, self.out):
            buffer.free()


@pytest.mark.parametrize(("K", "N"), SMOLLM2 + GEMMA3_270M + QWEN3_0_6B + QWEN3_1_7B)
def test_accumulators_of_the_models_are_exact(npu: Npu, K: int, N: int) -> None:
    rng = np.random.default_rng(K * N)
    b, a = codes(rng, (N, K)), codes(rng, (ROWS[-1], K))
    expected = exact(a, b)
    linear = Linear(npu, b, ROWS[-1])
    for M in ROWS:
        assert np.array_equal(linear(a[:M], cores=1 + M % 3), expected[:M]), M


@pytest.mark.slow
@pytest.mark.parametrize(("K", "N"), HEADS)
def test_accumulators_of_the_heads_are_exact(npu: Npu, K: int, N: int) -> None:
    rng = np.random.default_rng(K)
    a = codes(rng, (ROWS[-1], K))
    for n0 in range(0, N, 8192):  # a head at a time would be gigabytes of expected sums
        b = codes(rng, (min(8192, N - n0), K))
        linear = Linear(npu, b, ROWS[-1])
        expected = exact(a, b)
        for M in ROWS:
            assert np.array_equal(linear(a[:M]), expected[:M])
        linear.free()


def test_a_sample_of_a_head_is_exact(npu: Npu) -> None:
    """All columns of SmolLM2's head for one row, in slices over three cores, some columns checked."""
    rng = np.random.default_rng(1)
    b, a = codes(rng, (49152, 576)), codes(rng, (1, 576))
    found = Linear(npu, b, 1)(a, cores=3)
    assert np.array_equal(found, exact(a, b))


def test_extreme_values_do_not_overflow(npu: Npu) -> None:
    a, b = np.full((3, 10752), -128, np.int8), np.full((64, 10752), -128, np.int8)
    b[32:] = 127
    found = Linear(npu, b, 3)(a)
    assert (found[:, :32] == 10752 * 16384).all()
    assert (found[:, 32:] == -10752 * 16256).all()


@pytest.mark.parametrize("blocking", [True, False])
def test_three_cores_pull_from_one_queue(npu: Npu, kernel: EmulatedKernel, blocking: bool) -> None:
    rng = np.random.default_rng(2)
    b, a = codes(rng, (24 * 64, 32 * 1024)), codes(rng, (40, 32 * 1024))
    linear = Linear(npu, b, 40)
    assert len(linear.columns) == 24
    before = sum(npu.counters.submits)
    assert np.array_equal(linear(a, cores=3, blocking=blocking), exact(a, b))
    assert sum(npu.counters.submits) - before >= 24
    assert min(npu.counters.submits) > 0


def test_whole_k_in_one_program_and_rows_wider_apart(npu: Npu) -> None:
    """K up to 10752 without slices; rows of a wider matrix; results into a wider matrix, whose rest stays."""
    rng = np.random.default_rng(3)
    K, N, M, wide, out_wide = 10752, 64, 7, 10752 + 64, 64 + 128
    a, b = codes(rng, (M, wide)), codes(rng, (N, K))
    rows, weights, out = npu.buffer(a.size), npu.buffer(b.size), npu.buffer(M * out_wide * 4)
    rows.array[: a.size] = a.reshape(-1).view(np.uint8)
    weights.array[: b.size] = np.frombuffer(tiled(b, K), np.uint8)
    out.array[:] = 0x55
    for buffer in (rows, weights, out):
        buffer.sync_to_device()
    one = Int8Job(rows, weights, out, M, K, N, a_offset=32, a_pitch=wide, out_offset=64, out_pitch=out_wide * 4)
    npu.run_int8([one])
    out.sync_from_device()
    found = out.array[: M * out_wide * 4].view(np.int32).reshape(M, out_wide).copy()
    assert np.array_equal(found[:, 16 : 16 + N], exact(a[:, 32 : 32 + K], b))
    found[:, 16 : 16 + N] = 0x55555555
    assert (found == 0x55555555).all()


def test_a_moved_weight_is_used_and_a_reloaded_one(npu: Npu) -> None:
    rng = np.random.default_rng(4)
    a, bs = codes(rng, (5, 256)), [codes(rng, (64, 256)) for _ in range(3)]
    linear = Linear(npu, np.concatenate(bs), 5)
    linear.a.array[: a.size] = a.reshape(-1).view(np.uint8)
    linear.a.sync_to_device()
    prepared = npu.prepare([Int8Job(linear.a, linear.weights, linear.out, 5, 256, 64)])
    for i in (0, 2, 1, 1, 0):
        prepared.move(0, weights=(linear.weights, i * 64 * 256))
        npu.submit(prepared.chain)
        linear.out.sync_from_device()
        assert np.array_equal(linear.out.array[: 5 * 64 * 4].view(np.int32).reshape(5, 64), exact(a, bs[i]))
    with linear.weights.fill(0, 64 * 256) as view:
        view[:] = tiled(bs[2], 256)
    npu.submit(prepared.chain)
    linear.out.sync_from_device()
    assert np.array_equal(linear.out.array[: 5 * 64 * 4].view(np.int32).reshape(5, 64), exact(a, bs[2]))


# -- three precisions, random shapes -----------------------------------------------------------------------------------


def values(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Values whose products and sums are exact: all of int8; fp16 integers up to 8; int4 within +-7."""
    if kind == "int8":
        return rng.integers(-128, 128, shape, dtype=np.int8)
    if kind == "fp16":
        return rng.integers(-8, 9, shape).astype(np.float16)
    return rng.integers(-7, 8, shape).astype(np.int8)


@settings(max_examples=40)
@given(st.data())
def test_random_shapes_are_exact_in_all_precisions(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["int8", "fp16", "int4"]))
    M = data.draw(st.integers(1, 200 if kind == "int8" else 40))
    K = data.draw(st.integers(1, 5000 if kind == "int8" else 2000))
    N = data.draw(st.integers(1, 400 if kind == "int8" else 150))
    cores, blocking = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    rng = np.random.default_rng(M * K * N)
    a, b = values(kind, rng, (M, K)), values(kind, rng, (N, K))
    kernel = EmulatedKernel()
    with Npu.open(kernel) as npu:
        found = multiply(npu, a, b, kind, cores=cores, blocking=blocking)
    assert np.array_equal(found, exact(a, b))
    assert kernel.report.violations == []
    assert kernel.stats.live_buffers == 0


@pytest.mark.parametrize(("M", "K"), [(1, 6400), (17, 1280), (3, 640)])
def test_int4_sums_of_the_largest_codes_do_not_overflow(npu: Npu, M: int, K: int) -> None:
    """49 x 640 fits int16, 49 x 672 does not: K slices are cut there, and added as int32."""
    a, b = np.full((M, K), 7, np.int8), np.full((64, K), -7, np.int8)
    b[:32] = 7
    found = multiply(npu, a, b, "int4")
    assert (found[:, :32] == 49 * K).all()
    assert (found[:, 32:] == -49 * K).all()


def test_int4_jobs_run_in_one_chain(npu: Npu) -> None:
    """Two K slices of one matrix as jobs: where rows, weights and batches of results lie, written down here."""
    rng = np.random.default_rng(11)
    M, K, N, ks = 21, 1280, 128, 640
    a, b = values("int4", rng, (M, K)), values("int4", rng, (N, K))
    rows, weights, out = (npu.buffer(1 << 18) for _ in range(3))
    jobs = []
    for s, k in enumerate(range(0, K, ks)):
        packed = pack_rows("int4", a[:, k : k + ks])
        for m in range(M):  # twice as far apart as they are long
            start = (s * M + m) * ks
            rows.array[start : start + ks // 2] = packed[m]
        block = np.ascontiguousarray(b[:, k : k + ks].reshape(N // 64, 64, ks // 32, 32).transpose(0, 2, 1, 3))
        size = N * ks // 2
        weights.array[s * size : (s + 1) * size] = pack_rows("int4", block.reshape(-1, 32)).reshape(-1)
        jobs.append(
            Int4Job(rows, weights, out, M, ks, N, a_offset=s * M * ks, weights_offset=s * size, out_offset=s << 17)
        )
    for buffer in (rows, weights):
        buffer.sync_to_device()
    prepared = npu.prepare(jobs)
    npu.submit(prepared.chain)
    out.sync_from_device()
    total = np.zeros((M, N), np.int64)
    for job in jobs:
        at = job.out_offset
        for m, count in ((0, 16), (16, 5)):  # at most 16 rows a program
            results = out.array[at : at + 8 * count * N].view(np.int16).reshape(N // 64, count, 4, 64)[:, :, 0]
            total[m : m + count] += results.transpose(1, 0, 2).reshape(count, N)
            at += 8 * count * N
        assert at - job.out_offset == job.out_bytes
        del results
    assert np.array_equal(total, exact(a, b))
    prepared.free()


def test_odd_counts_of_channels_are_exact(npu: Npu) -> None:
    """The smallest kernel groups: 16, 32 and 48 channels, tiles laid out here."""
    rng = np.random.default_rng(5)
    for kind, N in (("fp16", 16), ("fp16", 48), ("int8", 32), ("int8", 96)):
        M, K, G = 9, 96, KINDS[kind].group
        a, b = values(kind, rng, (M, K)), values(kind, rng, (N, K))
        (tile,) = plan(MatmulShape(M, K, N, kind))
        rows, weights, out = (npu.buffer(1 << 16) for _ in range(3))
        rows.array[: M * K * a.itemsize] = pack_rows(kind, a).reshape(-1)
        block = np.ascontiguousarray(b.reshape(N // G, G, K // 32, 32).transpose(0, 2, 1, 3)).view(np.uint8)
        weights.array[: block.size] = block.reshape(-1)
        for buffer in (rows, weights):
            buffer.sync_to_device()
        operands = {"input": (rows, 0), "weights": (weights, 0), "output": (out, 0)}
        npu.submit(npu.chain([Step(program(tile), operands)]))
        out.sync_from_device()
        found = out.array[: M * N * 4].view(np.int32 if kind == "int8" else np.float32).reshape(M, N)
        assert np.array_equal(found, exact(a, b)), (kind, N)
        del found


def test_precisions_may_alternate(npu: Npu) -> None:
    rng = np.random.default_rng(6)
    for kind in ("int8", "int4", "fp16", "int8", "int4", "int8"):
        a, b = values(kind, rng, (5, 256)), values(kind, rng, (64, 256))
        assert np.array_equal(multiply(npu, a, b, kind), exact(a, b))
    assert npu.counters.resets == 4


def test_domains_hold_their_own_weights(npu: Npu) -> None:
    rng = np.random.default_rng(7)
    for domain in (0, 1, 15, 1, 0):
        a, b = values("int8", rng, (3, 128)), values("int8", rng, (64, 128))
        assert np.array_equal(multiply(npu, a, b, domain=domain, blocking=domain != 1, cores=2), exact(a, b))


def test_weights_may_lie_in_on_chip_memory(npu: Npu) -> None:
    rng = np.random.default_rng(10)
    a, b = codes(rng, (3, 512)), codes(rng, (64, 512))
    rows, out, weights = npu.buffer(a.size), npu.buffer(3 * 64 * 4), npu.buffer(b.size, sram=True)
    assert weights.sram_bytes == b.size
    for buffer, data in ((rows, a.tobytes()), (weights, tiled(b, 512))):
        with buffer.fill(0, len(data)) as view:
            view[:] = data
    npu.run_int8([Int8Job(rows, weights, out, 3, 512, 64)])
    out.sync_from_device()
    assert np.array_equal(out.array[: 3 * 64 * 4].view(np.int32).reshape(3, 64), exact(a, b))


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_program_that_hangs_fails_and_the_next_one_works(kernel: EmulatedKernel, npu: Npu) -> None:
    """A chain broken behind the driver's back: the chip waits for a second program that never starts."""
    rng = np.random.default_rng(8)
    a, b = values("int8", rng, (100, 4096)), values("int8", rng, (64, 4096))
    linear = Linear(npu, b, 100)
    prepared = npu.prepare([Int8Job(linear.a, linear.weights, linear.out, 100, 4096, 64)])
    prepared.chain.flush()
    words = prepared.chain._arena.words
    words[prepared.chain._starts[0] + 108] = 0x0101 << 48 | 0xDEAD0 << 16 | 0x10  # a wrong next address
    prepared.chain._dirty = True
    with pytest.raises(SubmitFailed, match="timed out twice"):
        npu.submit(prepared.chain, timeout_ms=300)
    assert npu.counters.resets == 1
    assert kernel.report.violations
    kernel.report.clear()
    assert np.array_equal(linear(a), exact(a, b))


# -- no growth ---------------------------------------------------------------------------------------------------------


def cycle(total: int, window: int) -> None:
    """Stream `total` bytes of weights through slots of a window, a matmul from each; nothing may grow."""
    kernel = EmulatedKernel(views="sampled")
    N, K = 1024, 2048
    size = N * K
    rng = np.random.default_rng(9)
    a = codes(rng, (1, K))
    mark = rng.integers(-128, 128, (64, 32), dtype=np.int8)  # the first K tile of the first 64 channels
    with Npu.open(kernel) as npu:
        rows, out = npu.buffer(K), npu.buffer(N * 4)
        rows.array[:K] = a.reshape(-1).view(np.uint8)
        rows.sync_to_device()
        slots = [npu.buffer(size) for _ in range(window // size)]
        prepared = npu.prepare([Int8Job(rows, slots[0], out, 1, K, N)])
        start: tuple[Any, ...] | None = None
        for i in range(total // size):
            slot = slots[i % len(slots)]
            tiles = slot.array.reshape(N // 32, K // 32, 32, 32)
            tiles[...] = i % 251  # a new weight: all its bytes, and the first K tile of 64 channels that is checked
            tiles[:2, :, :, :] = 0
            tiles[:2, 0] = np.roll(mark, i, 0).reshape(2, 32, 32).view(np.uint8)
            slot.sync_to_device()
            del tiles
            prepared.move(0, weights=(slot, 0))
            npu.submit(prepared.chain)
            if i % 97 == 0:
                out.sync_from_device()
                expected = a[0, :32].astype(np.int32) @ np.roll(mark, i, 0).astype(np.int32).T
                assert np.array_equal(out.array[:256].view(np.int32), expected)
            if i == len(slots):  # every slot was filled once
                gc.collect()
                start = usage(kernel)
        assert start is not None
        gc.collect()
        end = usage(kernel)
    assert end[:3] == start[:3]
    assert end[3] - start[3] < 8 << 20  # bytes of RSS
    assert kernel.report.violations == []


def usage(kernel: EmulatedKernel) -> tuple[int, int, int, int]:
    """(address space in use at most, live buffers, descriptors of the process, RSS in bytes)"""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    stats = kernel.stats
    return max(stats.peak_iova), stats.live_buffers, len(os.listdir("/proc/self/fd")), pages * 4096


def test_weights_streamed_through_a_window_leave_nothing_behind() -> None:
    cycle(total=512 << 20, window=64 << 20)


@pytest.mark.slow
def test_25_gb_of_weights_through_a_window_of_256_mib() -> None:
    cycle(total=25 * 10**9, window=256 << 20)
