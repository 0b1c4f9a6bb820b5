"""Questions to a board (or to the emulator) about its memory, each answered by a table.

How much address space a domain has, whether freeing gives it back, whether a weight that is loaded again is the same,
where imports break. On a board they run into the limits on purpose: nothing else should use the NPU meanwhile.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ork import tiles
from ork.errors import NpuError
from ork.npu import uabi
from ork.npu.buffers import AllocationFailed, DmaBuffer
from ork.npu.chain import Step
from ork.npu.driver import Npu
from ork.npu.jobs import Int8Job, steps_of
from ork.npu.kernel import Kernel
from ork.npu.soc import RK3588, Soc
from ork.npu.trial import trials

BUFFER_BYTES = 64 << 20
IMPORT_SIZES = tuple(n << 20 for n in (1, 4, 16, 24, 32, 48, 64))
IMPORT_COUNTS = (1, 2, 4, 6, 7, 12, 19)
MOST = 1024  # buffers of one filling


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    finding: str


def dma(npu: Npu, size: int = BUFFER_BYTES) -> Iterator[Table]:
    """How many buffers of `size` bytes fit a domain, with and without mapping them for the CPU."""
    rows = []
    for mapped in (True, False):
        made, why = _fill(npu, size, mapped)
        rows.append(("yes" if mapped else "no", str(len(made)), f"{len(made) * size:,}", why))
        _empty(npu, made)
    one = "is the same" if rows[0][1:] == rows[1][1:] else "differs"
    yield Table(
        f"Address space of a domain, buffers of {size >> 20} MiB, flags 0x403",
        ("mapped", "buffers", "bytes", "then"),
        tuple(rows),
        f"{rows[0][1]} buffers, {int(rows[0][2].replace(',', '')) / 1e9:.2f} GB; unmapped it {one}",
    )


def stream(npu: Npu, size: int = BUFFER_BYTES, rounds: int = 3) -> Iterator[Table]:
    """Whether freed address space can be had again: all of it, and every second buffer of a full domain."""
    rows, counts = [], []
    for number in range(rounds):
        made, why = _fill(npu, size, True)
        counts.append(len(made))
        rows.append((str(number + 1), "all", str(len(made)), f"{len(made) * size:,}", why))
        holes = made[::2]
        _empty(npu, holes)
        again, why = _fill(npu, size, True)
        rows.append((str(number + 1), "every second", str(len(again)), f"{len(again) * size:,}", why))
        counts.append(len(made) - len(holes) + len(again))
        _empty(npu, made[1::2] + again)
    same = len(set(counts)) == 1
    yield Table(
        f"Filling a domain again after freeing, buffers of {size >> 20} MiB",
        ("round", "after freeing", "buffers", "bytes", "then"),
        tuple(rows),
        "freeing gives the address space back" if same else f"address space is lost: {counts} buffers fitted",
    )


def persist(npu: Npu, K: int = 2048, N: int = 1024, domains: tuple[int, ...] = (0, 1, 0)) -> Iterator[Table]:
    """Whether a weight that was evicted and loaded again, elsewhere, has the packed bytes and gives the same sums."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (N, K), dtype=np.int8)
    packed = tiles.pack_codes("i8", codes)
    a = rng.integers(-128, 128, (1, K), dtype=np.int8)
    expected = (codes.astype(np.int64) @ a[0].astype(np.int64)).astype(np.int32)
    rows = []
    for load, domain in enumerate(domains):
        with _buffers(npu, domain, K, N * 4, *[K * N + load * 4096] * (load + 1)) as (source, out, *_, weights):
            with source.fill(0, K) as view:
                view[:] = a.tobytes()
            with weights.fill(0, K * N) as view:
                view[:] = packed.tobytes()
            npu.run_int8([Int8Job(source, weights, out, 1, K, N)])
            out.sync_from_device()
            weights.sync_from_device()
            bytes_equal = bytes(weights.view[: K * N]) == packed.tobytes()
            sums_equal = bytes(out.view[: N * 4]) == expected.tobytes()
            rows.append((str(load + 1), str(domain), f"{weights.iova:#010x}", _yes(bytes_equal), _yes(sums_equal)))
    good = all(row[3:] == ("yes", "yes") for row in rows)
    yield Table(
        f"An int8 weight of {K} x {N}, loaded {len(domains)} times",
        ("load", "domain", "address", "bytes as packed", "sums exact"),
        tuple(rows),
        "a reloaded weight equals the packed one" if good else "a reloaded weight is NOT the packed one",
    )


def imports(npu: Npu, domain: int = 1) -> Iterator[Table]:
    """Where imports from a dma-heap break: their size, their number in one chain, and after they are freed."""
    yield _import_sizes(npu)
    yield _import_counts(npu)
    yield _import_leak(npu, domain)


def _import_sizes(npu: Npu) -> Table:
    rows = []
    for size in IMPORT_SIZES:
        try:
            npu.import_buffer(size, unproven=True).free()
            rows.append((f"{size >> 20} MiB", "works"))
        except AllocationFailed as e:
            rows.append((f"{size >> 20} MiB", _errno(e.errno)))
    works = [size for size, (_, result) in zip(IMPORT_SIZES, rows) if result == "works"]
    largest = f"{max(works) >> 20} MiB work" if works else "none works"
    return Table("Size of one import", ("size", "result"), tuple(rows), largest)


def _import_counts(npu: Npu) -> Table:
    """A chain of matmuls each with its weight in an import of its own; results are compared too."""
    K = N = 64
    rows = []
    for count in IMPORT_COUNTS:
        made: list[DmaBuffer] = []
        with _buffers(npu, 0, K, count * N * 4) as (source, out):
            try:
                with source.fill(0, K) as view:
                    view[:] = b"\1" * K
                for number in range(count):
                    made.append(npu.import_buffer(K * N))
                    with made[-1].fill(0, K * N) as view:
                        view[:] = bytes([number + 1]) * (K * N)
                jobs = [Int8Job(source, w, out, 1, K, N, out_offset=i * N * 4) for i, w in enumerate(made)]
                rows.append((str(count), _run(npu, steps_of(jobs, npu.soc)[0], partial(_sums, out, count, N, K))))
            finally:
                for buffer in made:
                    buffer.free()
    works = [count for count, (_, result) in zip(IMPORT_COUNTS, rows) if result == "works"]
    return Table(
        "Imports that one chain walks over",
        ("imports", "result"),
        tuple(rows),
        f"{max(works)} work" if works else "none works",
    )


def _sums(out: DmaBuffer, count: int, N: int, K: int) -> bool:
    out.sync_from_device()
    found = np.frombuffer(bytes(out.view[: count * N * 4]), np.int32).reshape(count, N)
    return bool((found == K * np.arange(1, count + 1)[:, None]).all())


def _run(npu: Npu, steps: list[Step], right: Callable[[], bool]) -> str:
    chain = npu.chain(steps, unproven=True)
    try:
        npu.submit(chain)
        return "works" if right() else "wrong sums"
    except NpuError as e:
        return str(e).split("; ")[0]
    finally:
        chain.free()


def _import_leak(npu: Npu, domain: int) -> Table:
    rows, seen = [], []
    for where in (0, domain):
        addresses = []
        for _ in range(4):
            buffer = npu.import_buffer(1 << 20, where)
            addresses.append(buffer.iova)
            buffer.free()
        seen.append(len(set(addresses)) == 1)
        rows.append((str(where), " ".join(f"{a:#010x}" for a in addresses), "back" if seen[-1] else "lost"))
    finding = "freed imports give their addresses back" if all(seen) else "freed imports lose their addresses"
    return Table("Importing and freeing 1 MiB, four times", ("domain", "addresses", "space"), tuple(rows), finding)


def element_wise(npu: Npu) -> Iterator[Table]:
    """Whether the programs of the output side give what their formulas say."""
    rows, wrong = [], []
    for what, kind, error, bound in trials(npu):
        rows.append((what, kind, f"{error:.3g}", f"{bound:g}", _yes(error <= bound)))
        wrong += [f"{what} {kind}"] if error > bound else []
    yield Table(
        "Element-wise operations, tables, requantised matmuls",
        ("operation", "kind", "largest error", "allowed", "right"),
        tuple(rows),
        f"WRONG: {', '.join(wrong)}" if wrong else "all results are right",
    )


PROBES: dict[str, Callable[[Npu], Iterator[Table]]] = {
    "dma": dma,
    "stream": stream,
    "persist": persist,
    "import": imports,
    "vector": element_wise,
}


def run(name: str, kernel: Kernel, soc: Soc = RK3588) -> Iterator[Table]:
    """The tables of one probe, on an NPU opened for it. The driver's own care about full domains is off."""
    with Npu.open(kernel, soc, iova_ceiling=soc.iova_bytes) as npu:
        yield from PROBES[name](npu)


def _fill(npu: Npu, size: int, mapped: bool) -> tuple[list[Any], str]:
    """Buffers until one is refused, and why. Mapped ones are DmaBuffers, the others bare handles."""
    made: list[Any] = []
    while len(made) < MOST:
        try:
            if mapped:
                made.append(npu.memory.allocate(size, domain=0, flags=uabi.BUFFER, sram=False))
            else:
                arg = uabi.MemCreate(flags=uabi.BUFFER, size=size)
                npu.kernel.ioctl(npu.fd, uabi.MEM_CREATE, arg)
                made.append(arg.handle)
        except AllocationFailed as e:
            return made, _errno(e.errno)
        except OSError as e:
            return made, _errno(e.errno or 0)
    return made, f"stopped at {MOST}"


def _empty(npu: Npu, made: list[Any]) -> None:
    for each in made:
        if isinstance(each, DmaBuffer):
            each.free()
        else:
            npu.kernel.ioctl(npu.fd, uabi.MEM_DESTROY, uabi.MemDestroy(handle=each))


@contextmanager
def _buffers(npu: Npu, domain: int, *sizes: int) -> Iterator[list[DmaBuffer]]:
    made: list[DmaBuffer] = []
    try:
        for size in sizes:
            made.append(npu.buffer(size, domain=domain))
        yield made
    finally:
        for buffer in made:
            buffer.free()


def _errno(code: int) -> str:
    return f"errno {code} ({errno.errorcode.get(code, 'unknown')})"


def _yes(good: bool) -> str:
    return "yes" if good else "NO"
