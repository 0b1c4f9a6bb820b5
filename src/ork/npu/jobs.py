"""int8 products as jobs on buffers, and what they become: steps of a chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ork.errors import UsageError
from ork.npu.buffers import DmaBuffer
from ork.npu.chain import Step
from ork.npu.matmul import program
from ork.npu.plan import KINDS, MatmulShape, plan
from ork.npu.soc import Soc


@dataclass(frozen=True)
class Int8Job:
    """Partial sums `out[s, M, N] = a[M, s-th ks of K] x weights[s]`, exact int32; the caller adds them over s.

    `a` holds int8 rows `a_pitch` bytes apart from `a_offset`. `weights` holds for each K slice one block of tiles
    `[N/32][ks/32][32][32]`, one after the other as packs store them, from `weights_offset`. `out` receives K/ks blocks
    of M rows, `out_pitch` bytes apart, from `out_offset`. Pitches of 0 mean dense; ks of 0 means K, if one program can
    take it. Offsets and pitches are multiples of 16, K, ks and N of 32. Outputs of jobs that run at the same time
    must not share a cache line of 64 bytes.
    """

    a: DmaBuffer
    weights: DmaBuffer
    out: DmaBuffer
    M: int
    K: int
    N: int
    ks: int = 0
    a_offset: int = 0
    weights_offset: int = 0
    out_offset: int = 0
    a_pitch: int = 0
    out_pitch: int = 0

    @property
    def out_bytes(self) -> int:
        """Bytes of `out` that the job owns."""
        return self.K // (self.ks or self.K) * self.M * (self.out_pitch or self.N * KINDS["int8"].out_bytes)


@dataclass(frozen=True)
class Place:
    """Where one step of a job lies relative to the job's offsets, in bytes."""

    job: int
    input: int
    weights: int
    output: int


def steps_of(jobs: Sequence[Int8Job], soc: Soc) -> tuple[list[Step], list[Place]]:
    """The programs of all jobs, in order, and where each lies. Raises UsageError for a shape that cannot be."""
    if not jobs:
        raise UsageError("no jobs: a chain needs at least one")
    steps: list[Step] = []
    places: list[Place] = []
    for number, job in enumerate(jobs):
        for step, place in _steps(number, job, soc):
            steps.append(step)
            places.append(place)
    return steps, places


def _steps(number: int, job: Int8Job, soc: Soc) -> Iterator[tuple[Step, Place]]:
    ks = job.ks or job.K
    a_pitch = job.a_pitch or job.K
    out_pitch = job.out_pitch or job.N * KINDS["int8"].out_bytes
    if a_pitch < job.K:
        raise UsageError(f"input rows {a_pitch} bytes apart: less than K={job.K}")
    for tile in plan(MatmulShape(job.M, job.K, job.N), soc, ks=ks):
        place = Place(
            number,
            tile.m0 * a_pitch + tile.k0,
            tile.k0 * job.N + tile.n0 * ks,
            (tile.k0 // ks * job.M + tile.m0) * out_pitch + tile.n0 * KINDS["int8"].out_bytes,
        )
        operands = {
            "input": (job.a, job.a_offset + place.input),
            "weights": (job.weights, job.weights_offset + place.weights),
            "output": (job.out, job.out_offset + place.output),
        }
        yield Step(program(tile, a_pitch=a_pitch, out_pitch=out_pitch, soc=soc), operands), place
