"""The products of many experts on the NPU: a chain a core, whatever the number of experts.

Rows that go to one expert lie together, so that each expert is a product of its own rows, somewhere among the rows in
the scratch, with its own slices. All of them become three lists of programs of about the same length in time, and each
list is one submit. Which rows go where is another matter in every pass, so nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ork import native
from ork.devices.npu_plan import COLUMNS, INPUT_BYTES, OUTPUT_BYTES, Plans
from ork.devices.npu_slots import NpuHandle
from ork.npu.driver import Npu, Prepared
from ork.npu.jobs import Int8Job, in_chains
from ork.npu.soc import Soc

# What a program takes on a core: published measurements of an RK3588, in seconds, bytes and products a second.
TASK, WEIGHT_RATE, MAC_RATE = 4.38e-6, 10.8e9, 541e9


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [m0, m1) with columns [n0, n0 + n) of the slice of a handle, by number."""

    handle: int
    m0: int
    m1: int
    n0: int
    n: int


@dataclass(slots=True)
class Round:
    """Parts whose rows, [m0, m1) in all, and sums fit the scratch of one domain."""

    domain: int
    m0: int
    m1: int
    parts: list[Part] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # of each part: where they begin in the scratch
    used: int = 0  # bytes of sums


def possible(handles: Sequence[NpuHandle]) -> bool:
    """Whether the NPU can compute them: in its memory, as int8 programs. (int4 programs take rows in another form, in
    which those of an expert do not lie together.)"""
    return all(h.slot is not None and h.way.kind == "int8" for h in handles)


def rounds(handles: Sequence[NpuHandle], ranges: npt.NDArray[np.int32], cores: int) -> list[Round]:
    """All parts, by domain and then by rows, in as few rounds as the scratch allows: one, as a rule."""
    share = -(-cores // len(handles))  # of few slices each core gets its columns
    pieces = sorted(
        (h.weights.domain, m0, min(m0 + step, int(end)), i)
        for i, (h, (begin, end)) in enumerate(zip(handles, ranges))
        for step in [_most_rows(h)]
        for m0 in range(int(begin), int(end), step)
    )
    made: list[Round] = []
    for domain, m0, m1, i in pieces:
        h, now = handles[i], made[-1] if made else None
        need = _sum_bytes(h) * (m1 - m0) * h.columns
        if (
            now is None
            or now.domain != domain
            or now.used + need > OUTPUT_BYTES
            or (max(m1, now.m1) - now.m0) * h.spec.Kp > INPUT_BYTES
        ):
            now = Round(domain, m0, m1)
            made.append(now)
        now.m1 = max(now.m1, m1)
        units = h.columns // COLUMNS
        cuts = min(share, units)
        for n0, n1 in pairwise(COLUMNS * (units * cut // cuts) for cut in range(cuts + 1)):
            now.parts.append(Part(i, m0, m1, n0, n1 - n0))
            now.sums.append(now.used)
            now.used += _sum_bytes(h) * (m1 - m0) * (n1 - n0)
    return made


def _sum_bytes(h: NpuHandle) -> int:
    """Of one row and column: an int32 for each K slice."""
    return h.spec.Kp // h.way.ks * 4


def _most_rows(h: NpuHandle) -> int:
    """Rows whose codes and sums fit the scratch: at least one, as no slice is that wide."""
    return max(1, min(INPUT_BYTES // h.spec.Kp, OUTPUT_BYTES // (_sum_bytes(h) * h.columns)))


def run_round(
    npu: Npu,
    plans: Plans,
    todo: Round,
    handles: Sequence[NpuHandle],
    rows: native.QuantisedRows,
    outs: Sequence[native.Array],
) -> None:
    """Copies the rows in, runs at most a chain a core where chains are long enough, scales the sums into `outs`.

    Raises SubmitFailed when the chip does not answer; what was scaled before is right.
    """
    scratch = plans.scratch(todo.domain)
    Kp = rows.width
    native.copy_codes(rows, scratch.rows_at, todo.m0, todo.m1)
    scratch.rows.sync_to_device(0, (todo.m1 - todo.m0) * Kp)
    work: list[tuple[float, int, list[Int8Job]]] = []
    for number, (part, at) in enumerate(zip(todo.parts, todo.sums)):
        h = handles[part.handle]
        M, ks = part.m1 - part.m0, h.way.ks
        jobs = [
            Int8Job(
                scratch.rows,
                h.weights,
                scratch.sums,
                M,
                ks,
                part.n,
                a_offset=(part.m0 - todo.m0) * Kp + k0,
                a_pitch=Kp,
                weights_offset=h.offset + k0 * h.columns + part.n0 * ks,
                out_offset=at + k0 // ks * M * part.n * 4,
            )
            for k0 in range(0, Kp, ks)
        ]
        work.append((seconds(M, Kp, part.n, len(jobs)), number, jobs))
    chains: list[Prepared] = []
    try:
        for share in shares(work, npu.soc):
            for run in in_chains(share, npu.soc):  # one by one: what is prepared is freed even if the next one fails
                chains.append(npu.prepare(run))
        npu.run([c.chain for c in chains])
    finally:
        for prepared in chains:
            prepared.free()
    scratch.sums.sync_from_device(0, todo.used)
    for part, at in zip(todo.parts, todo.sums):
        h = handles[part.handle]
        M, base = part.m1 - part.m0, scratch.sums_at + at
        places = [base + s * M * part.n * 4 for s in range(Kp // h.way.ks)]
        native.scale_partial_sums(
            places, False, part.n, COLUMNS, part.m0, part.m1, rows, h.part(part.n0, part.n), outs[part.handle], None
        )


def seconds(M: int, K: int, N: int, programs: int = 1) -> float:
    """What M rows with weights [N, K] take on one core, by the published figures: a prediction."""
    return programs * TASK + max(K * N / WEIGHT_RATE, M * K * N / MAC_RATE)


def shares(work: Sequence[tuple[float, int, list[Int8Job]]], soc: Soc) -> list[list[Int8Job]]:
    """The jobs of each core: the longest first, each to the core that is done first."""
    taken: list[list[tuple[int, list[Int8Job]]]] = [[] for _ in range(soc.cores)]
    busy = [0.0] * soc.cores
    for took, number, jobs in sorted(work, key=lambda w: (-w[0], w[1])):
        core = busy.index(min(busy))
        busy[core] += took
        taken[core].append((number, jobs))
    return [[job for _, jobs in sorted(core, key=lambda t: t[0]) for job in jobs] for core in taken if core]
