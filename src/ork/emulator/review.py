"""The rules of the emulated chip on a dump of programs, without the memory they work on.

Every address counts as mapped and reads as zeros, so what is found is in the words alone: streams, links, sizes, the
buffer split, limits. What needs real memory or values (unmapped addresses, missing syncs, overflows) is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, cast

import numpy as np

from ork.emulator.checks import Verdict
from ork.emulator.convolve import Places
from ork.emulator.core import Core
from ork.emulator.kept import Loaded
from ork.emulator.memory import Buffer, Domain
from ork.emulator.pages import Bytes, CoherentPages
from ork.emulator.report import Report, Violation
from ork.emulator.task import Task
from ork.errors import SourceError
from ork.npu.isa import ENABLE_TARGET, NO_TARGETS, REGCFG_EXTRA, Enable, Words, fetch_amount, fetched_words, split
from ork.npu.soc import RK3588, Soc
from ork.npu.uabi import INT_DPU, INT_PPU

_NEXT_ADDRESS, _NEXT_AMOUNT = 0x0010, 0x0014
MAX_PROGRAMS: Final = 1 << 14
_SOMEWHERE: Final = 0x1000_0000  # where a dump is put whose links don't say


@dataclass(frozen=True, slots=True)
class Span:
    """One program of a dump: words [start, end), the op-enable word last if there is one; its link."""

    start: int
    end: int
    enable: int | None
    next_address: int
    next_amount: int

    @property
    def length(self) -> int:
        return self.end - self.start


def programs(words: Words) -> list[Span]:
    """The programs of a dump, padding around them left out."""
    targets, values, offsets = split(words)
    idle = np.isin(targets, NO_TARGETS)
    found: list[Span] = []
    start = 0
    for end in [*(np.flatnonzero(targets == ENABLE_TARGET) + 1).tolist(), len(words)]:
        busy = np.flatnonzero(~idle[start:end])
        if busy.size:
            first = start + int(busy[0])
            link = {_NEXT_ADDRESS: 0, _NEXT_AMOUNT: 0}
            pc = np.flatnonzero((targets[first:end] == 0x0101) & np.isin(offsets[first:end], list(link))) + first
            for i in pc.tolist():
                link[int(offsets[i])] = int(values[i])
            enable = int(values[end - 1]) if targets[end - 1] == ENABLE_TARGET else None
            found.append(Span(first, end, enable, link[_NEXT_ADDRESS] & 0xFFFF_FFF0, link[_NEXT_AMOUNT] & 0xFFFF))
        start = end
    return found


def base_address(spans: Sequence[Span]) -> int:
    """Where in device memory the dump lay, by what most of its links say."""
    bases = Counter(
        one.next_address - 8 * two.start for one, two in pairwise(spans) if one.next_address >= 8 * two.start
    )
    return bases.most_common(1)[0][0] if bases else _SOMEWHERE


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the kernel driver would take from a task array's entry; None where the dump does not say."""

    regcfg_amount: int | None = None
    int_mask: int | None = None


def review(
    words: Words, soc: Soc = RK3588, *, strict: bool = True, tasks: Sequence[Descriptor] = ()
) -> list[Violation]:
    """Every rule that the programs of a dump break, `program` counting those of the dump; `tasks` one each, or none.

    A chain is followed as far as its links lead from each program to the next one of the dump; the others start
    afresh, with the registers that the ones before them left. Raises SourceError for more programs than can be read.
    """
    count = int(np.count_nonzero(words >> np.uint64(48) == ENABLE_TARGET))
    if count > MAX_PROGRAMS:
        raise SourceError(f"{count} programs: at most {MAX_PROGRAMS} are checked at once, cut the dump")
    spans = programs(words)
    if tasks and len(tasks) != len(spans):
        raise SourceError(f"{len(tasks)} tasks for {len(spans)} programs: give one each, or none")
    base = base_address(spans)
    report = Report(strict)
    domain = cast(Domain, _Blank(base, words))
    core = _Reader(0, soc, report, "literal")
    found: list[Violation] = []
    for first, count in _chains(spans, base):
        at = first
        while at < first + count:  # once more behind a program that stops the chain
            report.clear()
            amount = max(spans[at].length - REGCFG_EXTRA, 0)
            outcome = core.run(domain, base + 8 * spans[at].start, amount, first + count - at)
            found += [replace(v, program=(v.program or 0) + at) for v in report.violations]
            at += outcome.tasks + (outcome.hang is not None)
    return sorted([*found, *_links(spans, base), *_descriptors(spans, tasks)], key=lambda v: v.program or 0)


def _chains(spans: Sequence[Span], base: int) -> Iterator[tuple[int, int]]:
    """(first, programs) of each run of programs that lead to one another."""
    first = 0
    for i, span in enumerate(spans):
        follows = i + 1 < len(spans) and _leads(span, spans[i + 1], base)
        if not follows:
            yield first, i + 1 - first
            first = i + 1


def _leads(one: Span, two: Span, base: int) -> bool:
    enough = fetched_words(one.next_amount) >= two.length
    return bool(one.next_amount and one.next_address == base + 8 * two.start and enough)


def _links(spans: Sequence[Span], base: int) -> Iterator[Violation]:
    """Links inside of the dump that lead elsewhere, or fetch too little."""
    report = Report()
    for i, (one, two) in enumerate(pairwise(spans)):
        place = base + 8 * two.start
        if not one.next_address and not one.next_amount:
            continue  # the last of its chain
        if one.next_address != place:
            values = {"next": hex(one.next_address), "program_at": hex(place)}
            report.add("next-address", program=i, register="PC.BASE_ADDRESS", values=values)
        elif fetched_words(one.next_amount) < two.length:
            short = {"fetched": fetched_words(one.next_amount), "words": two.length}
            report.add("missing-op-enable", program=i + 1, register="PC.REGISTER_AMOUNTS", values=short)
    yield from report.violations


def _descriptors(spans: Sequence[Span], tasks: Sequence[Descriptor]) -> Iterator[Violation]:
    """Task entries that fetch too little, or wait for an interrupt that their program does not raise."""
    report = Report()
    for i, (span, task) in enumerate(zip(spans, tasks)):
        if task.regcfg_amount is not None and span.enable is not None:
            fetched = fetched_words(fetch_amount(task.regcfg_amount))
            if fetched < span.length:
                values = {"regcfg_amount": task.regcfg_amount, "fetched": fetched, "words": span.length}
                report.add("missing-op-enable", program=i, values=values)
        if task.int_mask is not None and span.enable:
            raised = INT_PPU if span.enable & Enable.PPU else INT_DPU
            if task.int_mask != raised:
                values = {"int_mask": task.int_mask, "raised": raised}
                report.add("int-mask", program=i, values=values)
    yield from report.violations


class _Reader(Core):
    """A core that looks at programs and computes nothing."""

    def _literally(self, domain: Domain, task: Task, verdict: Verdict, places: Places) -> str:
        operands = None if verdict.poison else self._load(domain, task, verdict.lines, places)
        if operands is None:
            self._features = self._weights = None
        else:
            self._features = Loaded(task, places, operands[0])
            self._weights = self._kept(task, places, operands[1])
        return ""


class _Blank:
    """A domain in which everything is mapped: the dump, and zeros around it."""

    def __init__(self, base: int, words: Words) -> None:
        self._base, self._dump = base, np.ascontiguousarray(words).view(np.uint8)
        # of no size, so that whoever wants its memory takes the way of ranges that span buffers
        self._nowhere = Buffer(0, 0, 0, 0, 0, 0, 0, CoherentPages(4096))

    def locate(self, iova: int, nbytes: int) -> tuple[Buffer, int]:
        return self._nowhere, 0

    def read(self, iova: int, nbytes: int) -> Bytes:
        data: Bytes = np.zeros(nbytes, np.uint8)
        low, high = max(iova, self._base), min(iova + nbytes, self._base + len(self._dump))
        if low < high:
            data[low - iova : high - iova] = self._dump[low - self._base : high - self._base]
        return data

    def read_rows(self, iova: int, rows: int, row_bytes: int, pitch: int) -> Bytes:
        return np.zeros((rows, row_bytes), np.uint8)

    def read_address(self, iova: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> int:
        return 0

    write_address = read_address

    def write_view(self, iova: int, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def write(self, iova: int, data: Bytes) -> None:
        pass
