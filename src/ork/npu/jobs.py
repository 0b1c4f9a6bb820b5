"""Integer products as jobs on buffers, and what they become: steps of a chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ork.errors import UsageError
from ork.npu.buffers import DmaBuffer
from ork.npu.chain import CHAIN_LIMIT, Step
from ork.npu.matmul import program
from ork.npu.plan import KINDS, Form, MatmulShape, form_of, lines, plan, rows_limit
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
class Int4Job:
    """Sums `out[M, N] = a[M, K] x weights` of int4 by int4 as int16, for one K slice.

    `a` holds rows of K/2 bytes, two codes a byte and the even one low, `int4_pitch(M, K)` bytes apart from `a_offset`;
    the chip reads `INT4_OVERREAD` bytes past the last. `weights` is one block of tiles `[N/64][K/32][64][16 bytes]`.
    `out` receives `[M][N]` for one row, else what `plan.Form.BATCH` writes: for each program, of `int4_rows(K)` rows,
    `[N/64][4 * rows][64]`, of which every fourth line counts. Sums that do not fit int16 are unspecified: K of at most
    `plan.INT4_SAFE_K` and codes within +-7 make none. Offsets are multiples of 16.
    """

    a: DmaBuffer
    weights: DmaBuffer
    out: DmaBuffer
    M: int
    K: int
    N: int
    a_offset: int = 0
    weights_offset: int = 0
    out_offset: int = 0

    @property
    def out_bytes(self) -> int:
        """Bytes of `out` that the job owns."""
        return int4_out_bytes(self.M, self.N)


INT4_OVERREAD = 48  # three atoms: of a batch's last row come three shifted copies too


def int4_pitch(M: int, K: int) -> int:
    """Bytes between rows: a batch wants them twice as far apart as they are long."""
    return K if form_of("int4", M) is Form.BATCH else K // 2


def int4_rows(M: int, K: int, soc: Soc) -> int:
    """Rows of one program of M rows, but the last program's, which are the rest."""
    return min(M, rows_limit("int4", form_of("int4", M), K, soc))


def int4_out_bytes(M: int, N: int) -> int:
    return lines(form_of("int4", M), M) * N * KINDS["int4"].out_bytes


Job = Int8Job | Int4Job


def programs_of(job: Job, soc: Soc) -> int:
    """How many programs a job becomes."""
    if isinstance(job, Int8Job):
        return len(plan(MatmulShape(job.M, job.K, job.N), soc, ks=job.ks or job.K))
    return len(plan(MatmulShape(job.M, job.K, job.N, "int4"), soc, ks=job.K))


def in_chains(jobs: Sequence[Job], soc: Soc) -> Iterator[list[Job]]:
    """Jobs in runs of at most as many programs as a chain takes."""
    run: list[Job] = []
    count = 0
    for job in jobs:
        programs = programs_of(job, soc)
        if run and count + programs > CHAIN_LIMIT:
            yield run
            run, count = [], 0
        run.append(job)
        count += programs
    yield run


@dataclass(frozen=True)
class Place:
    """Where one step of a job lies relative to the job's offsets, in bytes."""

    job: int
    input: int
    weights: int
    output: int


def steps_of(jobs: Sequence[Job], soc: Soc) -> tuple[list[Step], list[Place]]:
    """The programs of all jobs, in order, and where each lies. Raises UsageError for a shape that cannot be."""
    if not jobs:
        raise UsageError("no jobs: a chain needs at least one")
    steps: list[Step] = []
    places: list[Place] = []
    for number, job in enumerate(jobs):
        made = _int8_steps(number, job, soc) if isinstance(job, Int8Job) else _int4_steps(number, job, soc)
        for step, place in made:
            steps.append(step)
            places.append(place)
    return steps, places


def _int8_steps(number: int, job: Int8Job, soc: Soc) -> Iterator[tuple[Step, Place]]:
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
        yield Step(program(tile, a_pitch=a_pitch, out_pitch=out_pitch, soc=soc), _operands(job, place)), place


def _int4_steps(number: int, job: Int4Job, soc: Soc) -> Iterator[tuple[Step, Place]]:
    kind, pitch = KINDS["int4"], int4_pitch(job.M, job.K)
    for tile in plan(MatmulShape(job.M, job.K, job.N, "int4"), soc, ks=job.K):
        if tile.N != job.N:
            raise UsageError(f"an int4 job of {job.N} channels: at most {soc.max_n}")
        place = Place(number, tile.m0 * pitch, 0, lines(tile.form, tile.m0) * job.N * kind.out_bytes)
        yield Step(program(tile, soc=soc), _operands(job, place)), place


def _operands(job: Job, place: Place) -> dict[str, tuple[DmaBuffer, int]]:
    return {
        "input": (job.a, job.a_offset + place.input),
        "weights": (job.weights, job.weights_offset + place.weights),
        "output": (job.out, job.out_offset + place.output),
    }
