"""Running a recording again, and comparing two of them: outcome by outcome, register by register, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import numpy as np

from ork.emulator.core import Core
from ork.emulator.iova import PAGE
from ork.emulator.job import widened
from ork.emulator.memory import Buffer, Domain, IommuFault, Memory
from ork.emulator.orktrace import ZEROS, Recorded, Recording, Reset
from ork.emulator.pages import CoherentPages
from ork.emulator.report import Report
from ork.emulator.review import programs
from ork.emulator.watch import Watched
from ork.errors import SourceError
from ork.npu.disasm import diff as diff_words
from ork.npu.isa import Words, fetch_amount, fetched_words
from ork.npu.soc import RK3588, Soc

Pages = Mapping[int, bytes]  # page number -> its bytes
SHOWN: Final = 8  # differences of one kind in one submit that are spelt out
_REGISTERS: Final = 64  # the same for registers
_IMAGE: Final = 16 << 20  # bytes
_LIMIT: Final = 1 << 32  # bytes of one domain
_BOTH: Final = ("in the first", "in the second")


@dataclass(frozen=True)
class Found:
    """What differs in one submit, a line each; the first `SHOWN` of a kind, then their number."""

    number: int
    lines: list[str] = field(default_factory=list)


# --- running again ---


def replay(recording: Recording, soc: Soc = RK3588, *, engine: str = "fast") -> Iterator[Found]:
    """Run every submit on fresh cores, in order, over the memory that was recorded; what came out otherwise.

    Yields one `Found` per submit, empty where everything is as recorded. Raises SourceError where the recording
    contradicts itself.
    """
    report = Report(recording.head.strict)
    cores = [Core(index, soc, report, engine) for index in range(soc.cores)]
    for event in recording.events:
        if isinstance(event, Reset):
            cores[event.core].reset()
        elif not event.ran:
            yield Found(event.number)
        else:
            report.clear()
            yield Found(event.number, list(_again(recording, event, cores, report, soc)))


def _again(recording: Recording, event: Recorded, cores: list[Core], report: Report, soc: Soc) -> Iterator[str]:
    watched = Watched(restored(recording, event, report, soc))
    limit = event.timeout_ms * 1_000_000 if event.blocking else None
    tasks = 0
    for part in event.parts:
        status, hang = 0, None
        for piece in part.pieces:
            outcome = cores[part.core].run(
                watched.as_domain(),
                piece.address,
                piece.amount,
                piece.tasks,
                event.task_base,
                limit,
                ping_pong=event.ping_pong,
            )
            tasks += outcome.tasks
            status, hang = outcome.int_status, outcome.hang
            if hang is not None:
                break
        if hang is None and widened(status) != widened(part.int_status):
            yield f"core {part.core}: int_status {status:#x}, recorded {part.int_status:#x}"
        if hang is not None:
            if not event.error:
                yield f"core {part.core}: hangs, and did not when recorded: {hang}"
            break
    else:
        if event.error and event.rules is None:
            yield f"completes, and ended in errno {event.error} when recorded"
    if tasks != event.tasks:
        yield f"{tasks} programs completed, recorded {event.tasks}"
    yield from _rules_differ(event, report)
    before, after = dict(recording.pages(event.before)), dict(recording.pages(event.after))
    now = watched.after()
    # what only one of them wrote is, for the other, as it was before
    then = {page: after.get(page, before.get(page, ZEROS)) for page in after.keys() | now.keys()}
    now |= {page: before.get(page, ZEROS) for page in after.keys() - now.keys()}
    yield from _pages_differ("output", then, now, ("when recorded", "now"))


def _rules_differ(event: Recorded, report: Report) -> Iterator[str]:
    if event.rules is None:
        return
    broken = {rule: count for rule, count in report.counts.items() if rule not in _OF_THE_KERNEL}
    recorded = {rule: count for rule, count in event.rules.items() if rule not in _OF_THE_KERNEL}
    if broken != recorded:
        yield f"rules broken: {_counts(broken)}; recorded: {_counts(recorded)}"


# Rules of the kernel driver and of its memory: a replay has neither.
_OF_THE_KERNEL: Final = frozenset(
    {"missing-sync", "dirty-output", "import-chain", "import-chain-unproven", "import-first", "int-mask", "chain-time"}
)


def _counts(rules: Mapping[str, int]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in sorted(rules.items())) or "none"


def restored(recording: Recording, event: Recorded, report: Report, soc: Soc) -> Domain:
    """The memory of a submit as it was before it ran: its buffers at their addresses, pages it did not touch zero."""
    memory = Memory(soc, report)
    domain = memory.domains[event.domain]
    end = PAGE
    for iova, size in sorted(event.buffers):
        if iova % PAGE or size % PAGE or not size or iova < end or iova + size > _LIMIT:
            raise _bad(recording, event, f"a buffer of {size} bytes at {iova:#010x}")
        end = iova + size
        domain.attach(Buffer(0, size, 0, event.domain, event.domain, iova, iova, CoherentPages(size)))
    for page, data in recording.pages(event.before):
        try:
            buffer, offset = domain.locate(page * PAGE, PAGE)
        except IommuFault:
            raise _bad(recording, event, f"page {page * PAGE:#010x} lies in none of its buffers") from None
        if data is not ZEROS:
            buffer.dev[offset : offset + PAGE] = np.frombuffer(data, np.uint8)
    return domain


def _bad(recording: Recording, event: Recorded, what: str) -> SourceError:
    return SourceError(f"{recording.path}: submit {event.number}: {what}: record it again")


# --- comparing two recordings ---


def compare(a: Recording, b: Recording) -> Iterator[Found]:
    """Submit by submit in the order in which they ended: outcomes, registers, memory before and after.

    Yields one `Found` per submit, empty where they are equal. Device addresses matter: they are operands.
    """
    for one, two in zip_longest(a.submits, b.submits):
        if one is None or two is None:
            which, event = ("second", two) if one is None else ("first", one)
            assert event is not None
            yield Found(event.number, [f"in the {which} recording only"])
            continue
        yield Found(one.number, list(_compared(a, one, b, two)))


def _compared(a: Recording, one: Recorded, b: Recording, two: Recorded) -> Iterator[str]:
    for name in ("number", "domain", "timeout_ms", "blocking", "task_base", "ran", "tasks", "error", "rules"):
        x, y = getattr(one, name), getattr(two, name)
        if x != y:
            yield f"{name} {x} -> {y}"
    if one.parts != two.parts:
        yield f"cores and programs {_parts(one)} -> {_parts(two)}"
    pages_a, pages_b = dict(a.pages(one.before)), dict(b.pages(two.before))
    words_a, words_b = chain_words(one, pages_a), chain_words(two, pages_b)
    yield from _first((str(d) for d in diff_words(words_a, words_b)), _REGISTERS)
    code = frozenset([*_code_pages(one, pages_a), *_code_pages(two, pages_b)])  # compared by register
    yield from _pages_differ("memory before", pages_a, pages_b, _BOTH, code)
    yield from _pages_differ("memory after", dict(a.pages(one.after)), dict(b.pages(two.after)), _BOTH)


def _parts(event: Recorded) -> str:
    return ", ".join(
        f"core {part.core} " + " ".join(f"{p.tasks} at {p.address:#010x}" for p in part.pieces) for part in event.parts
    )


def chain_words(event: Recorded, pages: Pages) -> Words:
    """The words of all programs of a submit, one after the other, as far as they were recorded."""
    found = [words for _, words in _chains(event, pages)]
    return np.concatenate(found) if found else np.zeros(0, np.uint64)


def chain_image(event: Recorded, pages: Pages) -> Words:
    """The same as they lie in memory, zeros between them, so that their links can be followed; where they lie more
    than 16 MiB apart, one after the other."""
    found = list(_chains(event, pages))
    if not found:
        return np.zeros(0, np.uint64)
    low = min(at for at, _ in found)
    span = max(at + words.nbytes for at, words in found) - low
    if span > _IMAGE:
        return chain_words(event, pages)
    image = np.zeros(span // 8, np.uint64)
    for at, words in found:
        image[(at - low) // 8 : (at - low) // 8 + len(words)] = words
    return image


def _chains(event: Recorded, pages: Pages) -> Iterator[tuple[int, Words]]:
    """(address, words) of each program, followed through the trailers."""
    for part in event.parts:
        for piece in part.pieces:
            at, amount = piece.address, fetch_amount(piece.amount)
            for _ in range(piece.tasks):
                words = _read(pages, at, fetched_words(amount))
                spans = programs(words)
                if not spans:
                    break
                yield at, words[: spans[0].end]
                at, amount = spans[0].next_address, spans[0].next_amount
                if spans[0].enable is None or not at or not amount:
                    break


def _code_pages(event: Recorded, pages: Pages) -> Iterator[int]:
    for at, words in _chains(event, pages):
        yield from range(at // PAGE, (at + words.nbytes - 1) // PAGE + 1)


def _read(pages: Pages, address: int, count: int) -> Words:
    """Words at an address, up to the first page that was not recorded."""
    data = bytearray()
    page, skip = divmod(address & ~7, PAGE)
    while len(data) < skip + 8 * count and page in pages:
        data += pages[page]
        page += 1
    whole = bytes(data[skip : skip + 8 * count])
    return np.frombuffer(whole[: len(whole) // 8 * 8], np.uint64)


# --- bytes ---


def _pages_differ(
    what: str, then: Pages, now: Pages, names: tuple[str, str], leave: frozenset[int] = frozenset()
) -> Iterator[str]:
    """Stretches of bytes that differ; pages in `leave` are not looked at."""
    found: list[str] = []
    total = 0
    for page in sorted((now.keys() | then.keys()) - leave):
        place, x, y = page * PAGE, then.get(page), now.get(page)
        if x is None or y is None:
            total += PAGE
            found.append(f"{what}: page {place:#010x} {names[y is not None]} only")
        elif x != y:
            at = np.flatnonzero(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8))
            total += len(at)
            first = int(at[0])
            word = slice(first & ~3, (first & ~3) + 4)
            found.append(
                f"{what}: {len(at)} bytes differ in page {place:#010x}, the first at {place + first:#010x} "
                f"({names[0]} {x[word].hex(' ')}, {names[1]} {y[word].hex(' ')})"
            )
    yield from _first(iter(found))
    if len(found) > 1:
        yield f"{what}: {total} bytes differ in {len(found)} pages"


def _first(lines: Iterator[str], shown: int = SHOWN) -> Iterator[str]:
    rest = 0
    for i, line in enumerate(lines):
        if i < shown:
            yield line
        else:
            rest += 1
    if rest:
        yield f"... and {rest} more"
