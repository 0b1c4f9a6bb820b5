"""An op on the NPU: cut into rounds that fit the scratch, programs prepared once for each row count, sums found again.

A round's programs read rows from one scratch buffer and leave partial sums in another: one block for each K slice, of
which each group of the rows has one or several.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ork import native
from ork.devices.npu_slots import Lay, NpuHandle
from ork.errors import NpuError
from ork.npu.buffers import DmaBuffer
from ork.npu.driver import Npu, Prepared
from ork.npu.jobs import INT4_OVERREAD, Int4Job, Int8Job, Job, in_chains, int4_out_bytes, int4_pitch, int4_rows

INPUT_BYTES = 16 << 20  # scratch per domain: quantised rows
OUTPUT_BYTES = 64 << 20  # and sums
LINE = 64  # outputs of programs that run at once share no cache line
SPREAD_MACS = 64 << 20  # from here on an op is cut up for all cores; smaller ones are one chain on one core
PLANS = 1024  # prepared rounds that are kept; each row count of each op has its own
PROGRAMS = 12 << 10  # of all of them: what the memory left for programs holds
COLUMNS = 64  # the least that an op is cut into

Piece = tuple[int, int, int]  # index of a handle, columns [n0, n1) of it


@dataclass(slots=True)
class Sums:
    """Sums of rows [m0, m1): one address a K slice, element (m, c) at `(m - m0) * row + c // 64 * block + c % 64`."""

    m0: int
    m1: int
    row: int
    block: int
    parts: list[int]


@dataclass(slots=True)
class Part:
    """Columns of a slice whose sums lie together. `half`: int16 instead of int32."""

    piece: int  # of the round
    n0: int
    n: int
    half: bool
    sums: list[Sums] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """A round prepared for one row count: chains ready to run, and where their sums will be."""

    buffers: list[DmaBuffer]  # kept: a plan dies with the buffers it reads
    domain: int
    lay: Lay
    chains: list[Prepared]
    parts: list[Part]
    in_bytes: int
    out_bytes: int

    @property
    def programs(self) -> int:
        return sum(len(c.chain) for c in self.chains)


class Scratch:
    """Rows and sums of one domain."""

    def __init__(self, npu: Npu, domain: int):
        self.rows = npu.buffer(INPUT_BYTES, domain=domain)
        self.sums = npu.buffer(OUTPUT_BYTES, domain=domain)
        self.rows_at = self.rows.array.ctypes.data
        self.sums_at = self.sums.array.ctypes.data


class Plans:
    """Runs rounds, and keeps what was prepared for them, the most recently used."""

    def __init__(self, npu: Npu):
        self.npu = npu
        self._scratch: dict[int, Scratch] = {}
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self._programs = 0

    def scratch(self, domain: int) -> Scratch:
        """Made with the domain's first slice, so that an op allocates nothing."""
        scratch = self._scratch.get(domain)
        if scratch is None:
            scratch = self._scratch[domain] = Scratch(self.npu, domain)
        return scratch

    def run(self, handles: Sequence[NpuHandle], pieces: Sequence[Piece], rows: native.QuantisedRows) -> Plan:
        """Copies the rows in, runs the round's chains, and makes their sums visible to the host."""
        plan = self._plan(handles, pieces, rows.rows)
        scratch = self._scratch[plan.domain]
        if plan.lay.kind == "int8":
            native.copy_codes(rows, scratch.rows_at)
        else:
            native.pack_int4(rows, plan.lay.ks, int4_pitch(rows.rows, plan.lay.ks), scratch.rows_at)
        scratch.rows.sync_to_device(0, plan.in_bytes)
        if len(plan.chains) == 1:
            self.npu.submit(plan.chains[0].chain)
        else:
            self.npu.run([c.chain for c in plan.chains])
        scratch.sums.sync_from_device(0, plan.out_bytes)
        return plan

    def forget(self, buffer: DmaBuffer) -> None:
        """Drops the plans that read a buffer which is about to go."""
        for key in [k for k, plan in self._plans.items() if any(b is buffer for b in plan.buffers)]:
            self._drop(key)

    def forget_round(self, handles: Sequence[NpuHandle], pieces: Sequence[Piece], M: int) -> None:
        key = _key(handles, pieces, M)
        if key in self._plans:
            self._drop(key)

    def close(self) -> None:
        for key in list(self._plans):
            self._drop(key)
        self._scratch.clear()

    def _plan(self, handles: Sequence[NpuHandle], pieces: Sequence[Piece], M: int) -> Plan:
        key = _key(handles, pieces, M)
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        plan = _prepare(self.npu, self.scratch(_domain(handles[pieces[0][0]])), handles, pieces, M)
        self._plans[key] = plan
        self._programs += plan.programs
        while len(self._plans) > 1 and (len(self._plans) > PLANS or self._programs > PROGRAMS):
            self._drop(next(iter(self._plans)))
        return plan

    def _drop(self, key: tuple[object, ...]) -> None:
        plan = self._plans.pop(key)
        self._programs -= plan.programs
        for prepared in plan.chains:
            prepared.free()


def rounds(handles: Sequence[NpuHandle], M: int) -> Iterator[list[Piece]]:
    """The columns of all handles in runs of one domain and one way of running, whose sums fit the scratch together.

    Raises NpuError for more rows than the scratch takes.
    """
    pieces: list[Piece] = []
    used, alike = 0, None
    for i, h in enumerate(handles):
        least = _out_bytes(h, M, COLUMNS)
        width = OUTPUT_BYTES // least * COLUMNS
        if not width or M * h.spec.Kp + INT4_OVERREAD > INPUT_BYTES:
            raise NpuError(
                f"{h.spec.tensor}: {M} rows of {h.spec.Kp} bytes or their sums exceed the scratch of "
                f"{INPUT_BYTES >> 20} and {OUTPUT_BYTES >> 20} MiB: use a smaller chunk"
            )
        for n0 in range(0, h.columns, width):
            n1 = min(n0 + width, h.columns)
            need, kind = (n1 - n0) // COLUMNS * least, (_domain(h), h.way.kind, h.way.kind == "int4" and h.way.ks)
            if pieces and (used + need > OUTPUT_BYTES or kind != alike):
                yield pieces
                pieces, used = [], 0
            pieces.append((i, n0, n1))
            used, alike = used + need, kind
    yield pieces


def _prepare(npu: Npu, scratch: Scratch, handles: Sequence[NpuHandle], pieces: Sequence[Piece], M: int) -> Plan:
    first = handles[pieces[0][0]]
    Kp, lay = first.spec.Kp, first.way
    spread = M * Kp * sum(n1 - n0 for _, n0, n1 in pieces) >= SPREAD_MACS
    share = -(-npu.soc.cores // len(pieces)) if spread else 1
    parts: list[Part] = []
    jobs: list[list[Job]] = []  # of each part
    at = 0
    for number, (index, begin, end) in enumerate(pieces):
        for n0, n1 in _cut(begin, end, share):
            part, made, at = _part(npu, scratch, number, handles[index], M, n0, n1 - n0, at)
            parts.append(part)
            jobs.append(made)
    runs = jobs if spread else [[job for of_part in jobs for job in of_part]]
    chains: list[Prepared] = []
    try:
        chains += [npu.prepare(chain) for run in runs for chain in in_chains(run, npu.soc)]
    except BaseException:
        for prepared in chains:
            prepared.free()
        raise
    buffers = [handles[i].weights for i, _, _ in pieces]
    in_bytes = M * Kp if lay.kind == "int8" else Kp // lay.ks * M * int4_pitch(M, lay.ks) + INT4_OVERREAD
    return Plan(buffers, scratch.rows.domain, lay, chains, parts, in_bytes, at)


def _part(
    npu: Npu, scratch: Scratch, number: int, h: NpuHandle, M: int, n0: int, n: int, at: int
) -> tuple[Part, list[Job], int]:
    """The jobs of some columns of a slice, one for each K slice; their sums begin at `at` of the scratch."""
    ks, Kp, int8 = h.way.ks, h.spec.Kp, h.way.kind == "int8"
    jobs: list[Job] = []
    starts: list[int] = []
    pitch = Kp if int8 else int4_pitch(M, ks)
    for k0 in range(0, Kp, ks):
        tiles = k0 * h.columns + n0 * ks  # within a K slice the tiles of a group of columns follow each other
        starts.append(scratch.sums_at + at)
        if int8:
            jobs.append(
                Int8Job(
                    scratch.rows,
                    h.weights,
                    scratch.sums,
                    M,
                    ks,
                    n,
                    a_offset=k0,
                    a_pitch=Kp,
                    weights_offset=h.offset + tiles,
                    out_offset=at,
                )
            )
        else:
            jobs.append(
                Int4Job(
                    scratch.rows,
                    h.weights,
                    scratch.sums,
                    M,
                    ks,
                    n,
                    a_offset=k0 // ks * M * pitch,
                    weights_offset=h.offset + tiles // 2,
                    out_offset=at,
                )
            )
        at += _line(jobs[-1].out_bytes)
    part = Part(number, n0, n, not int8)
    if int8 or M == 1:
        part.sums.append(Sums(0, M, n, COLUMNS, starts))
    else:
        step = int4_rows(M, ks, npu.soc)
        for m0 in range(0, M, step):  # a batch: every fourth line of 64 columns, and one block of such after another
            m1 = min(m0 + step, M)
            offset = int4_out_bytes(M, n) // M * m0
            part.sums.append(Sums(m0, m1, 4 * COLUMNS, 4 * (m1 - m0) * COLUMNS, [s + offset for s in starts]))
    return part, jobs, at


def _key(handles: Sequence[NpuHandle], pieces: Sequence[Piece], M: int) -> tuple[object, ...]:
    return (M, *((n0, n1, *handles[i].shape) for i, n0, n1 in pieces))


def _domain(handle: NpuHandle) -> int:
    return handle.weights.domain


def _out_bytes(h: NpuHandle, M: int, n: int) -> int:
    """Bytes of the sums of n columns."""
    each = M * n * 4 if h.way.kind == "int8" else int4_out_bytes(M, n)
    return h.spec.Kp // h.way.ks * _line(each)


def _line(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _cut(begin: int, end: int, pieces: int) -> list[tuple[int, int]]:
    """[begin, end) in at most `pieces` runs of whole 64s."""
    units = (end - begin) // COLUMNS
    edges = sorted({begin + COLUMNS * (units * i // pieces) for i in range(pieces + 1)})
    return list(pairwise(edges))
