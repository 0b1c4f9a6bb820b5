"""Address space, the accesses of the device, and what a forgotten MEM_SYNC does."""

from __future__ import annotations

import ctypes
import errno
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork.emulator.iova import IovaSpace
from ork.emulator.memory import Buffer, IommuFault, Memory
from ork.emulator.pages import LINE, SampledView, TwoViews
from ork.emulator.report import Report
from ork.npu import uabi
from ork.npu.soc import RK3588

PAGES = 64


def memory(views: str = "full") -> Memory:
    return Memory(RK3588, Report(), views)


def made(mem: Memory, size: int, flags: int = uabi.BUFFER, domain: int = 0) -> Buffer:
    return mem.create(1, size, flags, domain)


# --- address space ---


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0, 0, 1]), st.integers(0, 30)), max_size=60))
def test_allocator_is_the_plain_one(steps: list[tuple[int, int, int]]) -> None:
    """Against a list of 64 pages: the highest place that fits and is aligned, page 0 never."""
    space = IovaSpace(PAGES)
    taken = [True] + [False] * (PAGES - 1)
    live: list[tuple[int, int]] = []
    for pages, aligned, victim in steps:
        if victim < len(live):
            start, count = live.pop(victim)
            space.free(start, count)
            taken[start : start + count] = [False] * count
        align = 1 << (pages - 1).bit_length() if aligned else 1
        fits = [s for s in range(0, PAGES - pages + 1, align) if not any(taken[s : s + pages])]
        want = max(fits, default=0)
        assert space.allocate(pages, align) == want
        if want:
            taken[want : want + pages] = [True] * pages
            live.append((want, pages))
        assert space.used == sum(taken) - 1
        assert space.peak >= space.used
        gaps = space.gaps
        assert sum(end - start for start, end in gaps) == taken.count(False)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(gaps))  # touching gaps are one


def test_addresses_go_down_from_the_top() -> None:
    mem = memory()
    first, second = made(mem, 4096), made(mem, 100)
    assert (first.iova, second.iova) == (0xFFFFF000, 0xFFFFE000)
    assert second.size == 4096
    assert made(mem, 3 << 12).iova == 0xFFFFB000
    other = made(mem, 4096, domain=3)
    assert other.iova == 0xFFFFF000  # each domain has its own window


def test_without_the_flag_addresses_are_aligned_to_the_size() -> None:
    mem = memory()
    made(mem, 4096)
    assert made(mem, 3 << 20, uabi.BUFFER & ~uabi.MEM_EXACT_IOVA).iova % (4 << 20) == 0


def test_sixty_three_times_64_mib_and_page_zero_is_never_given() -> None:
    mem = memory("sampled")
    buffers = [made(mem, 64 << 20) for _ in range(63)]
    with pytest.raises(OSError) as failure:
        made(mem, 64 << 20)
    assert failure.value.errno == errno.EFAULT
    rest = made(mem, (64 << 20) - 4096)
    assert rest.iova == 4096
    with pytest.raises(OSError):
        made(mem, 4096)
    mem.remove(buffers[5])
    assert made(mem, 64 << 20).iova == buffers[5].iova


# --- the device's accesses ---


def test_locate_and_faults() -> None:
    mem = memory()
    domain = mem.domains[0]
    top, low = made(mem, 8192), made(mem, 4096)
    assert domain.locate(low.iova, 4096) == (low, 0)
    assert domain.locate(top.iova + 8191, 1) == (top, 8191)
    assert domain.locate(low.iova + 4000, 200) == (low, 4000)  # goes on into the next buffer
    for iova, size in ((0, 1), (low.iova - 1, 2), (top.iova + 8191, 2), (low.iova, 12289), (1 << 32, 1)):
        with pytest.raises(IommuFault):
            domain.locate(iova, size)
    with pytest.raises(IommuFault):
        mem.domains[1].locate(low.iova, 1)
    mem.remove(low)
    with pytest.raises(IommuFault) as fault:
        domain.read(low.iova, 64)
    assert fault.value.iova == low.iova


def test_accesses_over_several_buffers() -> None:
    mem = memory()
    domain = mem.domains[0]
    buffers = [made(mem, 4096, uabi.MEM_NON_CONTIGUOUS | uabi.MEM_EXACT_IOVA) for _ in range(1500)]
    low = buffers[-1].iova
    data = np.random.default_rng(0).integers(0, 256, 1500 * 4096 - 20, np.uint8)
    domain.write(low + 10, data)
    assert np.array_equal(domain.read(low + 10, len(data)), data)
    assert np.array_equal(
        domain.read_rows(low + 10, 5, 300, 4000), np.stack([data[r * 4000 :][:300] for r in range(5)])
    )
    assert domain.read_address(low + 4000, 200) == 0
    assert domain.write_address(low, 64, 2, 4090) == 0
    with pytest.raises(ValueError, match="span"):
        domain.write_view(low + 4000, 200)
    before = domain.read(low, 4096).copy()
    with pytest.raises(IommuFault):
        domain.write(buffers[0].iova + 4000, data[:200])
    assert np.array_equal(domain.read(low, 4096), before)


def test_addresses_are_the_views() -> None:
    mem = memory()
    buffer = made(mem, 8192)
    address = mem.domains[0].write_address(buffer.iova + 100, 4, 3, 1000)
    ctypes.memset(address, 9, 4)
    assert buffer.dev[100:105].tolist() == [9, 9, 9, 9, 0]
    assert mem.domains[0].read_address(buffer.iova, 1) == buffer.dev_address
    rows = mem.domains[0].read_rows(buffer.iova + 100, 2, 2, 1)
    assert rows.tolist() == [[9, 9], [9, 9]]
    rows = mem.domains[0].write_view(buffer.iova, 64)
    rows[:] = 3
    assert buffer.dev[:64].tolist() == [3] * 64


# --- two views ---


def test_what_the_cpu_wrote_is_stale_until_cleaned() -> None:
    mem = memory()
    buffer = made(mem, 4096)
    domain = mem.domains[0]
    buffer.cpu[:] = 1
    assert domain.read(buffer.iova, 128).tolist() == [0] * 128
    assert mem.report.counts["missing-sync"] == 1
    buffer.pages.to_device(0, 128)
    assert domain.read(buffer.iova, 128).tolist() == [1] * 128
    assert mem.report.counts["missing-sync"] == 1
    assert domain.read(buffer.iova + 128, 1)[0] == 0
    violation = mem.report.of("missing-sync")[-1]
    assert violation.values == {"handle": 1, "offset": 128, "bytes": 1}


def test_what_the_device_wrote_is_unseen_until_invalidated() -> None:
    mem = memory()
    buffer = made(mem, 4096)
    mem.domains[0].write(buffer.iova + 64, np.full(64, 7, np.uint8))
    assert not buffer.cpu.any()
    assert mem.domains[0].read(buffer.iova + 64, 64).tolist() == [7] * 64  # its own writes it sees
    buffer.pages.from_device(64, 64)
    assert buffer.cpu[:192].tolist() == [0] * 64 + [7] * 64 + [0] * 64
    assert not mem.report.violations


def test_cleaning_a_clean_line_does_not_undo_the_device() -> None:
    mem = memory()
    buffer = made(mem, 4096)
    mem.domains[0].write(buffer.iova, np.full(4096, 7, np.uint8))
    buffer.cpu[100] = 1
    buffer.pages.to_device(0, 4096)
    assert buffer.dev[:64].tolist() == [7] * 64
    assert buffer.dev[128:].tolist() == [7] * (4096 - 128)
    # The line the CPU wrote goes back whole: what the device put beside the byte is lost.
    assert buffer.dev[64:128].tolist() == [0] * 36 + [1] + [0] * 27


def test_a_dirty_output_is_named() -> None:
    mem = memory()
    buffer = made(mem, 4096)
    buffer.cpu[:64] = 5
    mem.domains[0].write(buffer.iova, np.ones(64, np.uint8))
    assert [v.severity for v in mem.report.of("dirty-output")] == ["unproven"]


def test_noncacheable_memory_has_one_view() -> None:
    mem = memory()
    buffer = made(mem, 4096, uabi.BUFFER & ~uabi.MEM_CACHEABLE)
    buffer.cpu[:] = 3
    assert mem.domains[0].read(buffer.iova, 4)[0] == 3
    mem.domains[0].write(buffer.iova, np.zeros(4, np.uint8))
    assert buffer.cpu[0] == 0
    assert not mem.report.violations


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["cpu", "dev", "to", "from"]), st.integers(0, 511), st.integers(1, 300)),
        max_size=25,
    )
)
def test_two_views_are_a_cache_of_lines(steps: list[tuple[str, int, int]]) -> None:
    """Against a model with one dirty bit and one held copy per line."""
    pages = TwoViews(4096)
    memory_bytes = np.zeros(512, np.uint8)
    held = np.zeros(512, np.uint8)
    dirty = np.zeros(8, bool)
    for value, (what, start, size) in enumerate(steps, 1):
        end = min(512, start + size)
        lines = range(start // LINE, -(-end // LINE))
        if what == "cpu":
            pages.cpu[start:end] = held[start:end] = value
            dirty[lines.start : lines.stop] = True
        elif what == "dev":
            pages.dev[start:end] = memory_bytes[start:end] = value
        for line in lines:
            span = slice(line * LINE, line * LINE + LINE)
            whole = start <= span.start and span.stop <= end
            if what == "to" or (what == "from" and not whole):
                if dirty[line]:
                    memory_bytes[span] = held[span]
                dirty[line] = False
            if what == "from":
                held[span] = memory_bytes[span]
                dirty[line] = False
        if what == "to":
            pages.to_device(start, end - start)
        elif what == "from":
            pages.from_device(start, end - start)
        if what in ("to", "from"):
            assert np.array_equal(pages.dev[:512], memory_bytes)
        assert np.array_equal(pages.cpu[:512], held)
        stale = any(dirty[line] for line in lines)
        assert stale or not pages.stale(start, end - start)


# --- one view, sampled ---


@pytest.mark.parametrize("size", [4096, 12288, 1 << 16, 2 << 20, 64 << 20])
def test_a_rewrite_without_a_sync_is_caught(size: int) -> None:
    pages = SampledView(size)
    rng = np.random.default_rng(size)
    part = min(size, 2 << 20)
    pages.cpu[:part] = rng.integers(0, 256, part, np.uint8)
    assert pages.stale(0, part)
    pages.to_device(0, size)
    assert not pages.stale(0, part)
    caught = 0
    for _ in range(20):
        start = int(rng.integers(0, part // 2)) // 64 * 64
        pages.cpu[start:part] = rng.integers(0, 256, part - start, np.uint8)
        caught += pages.stale(0, part)
        pages.to_device(start, part - start)
        assert not pages.stale(0, part)
    assert caught >= 18


def test_sampled_device_writes_are_not_stale() -> None:
    pages = SampledView(1 << 16)
    pages.overwrites(0, 1 << 15)
    pages.dev[: 1 << 15] = 1
    assert not pages.stale(0, 1 << 16)
    pages.overwrites(0, 1 << 15)
    pages.dev[: 1 << 15] = 2
    pages.from_device(0, 1 << 16)
    assert not pages.stale(0, 1 << 16)
    pages.cpu[: 1 << 15] = 3  # the next turn's rows, and no sync
    assert pages.stale(0, 1 << 16)


def test_sampled_reads_of_rows_skip_what_lies_between() -> None:
    pages = SampledView(1 << 16)
    rows = np.ndarray((64, 512), np.uint8, pages.cpu, 0, (1024, 1))
    gaps = np.ndarray((64, 512), np.uint8, pages.cpu, 512, (1024, 1))
    gaps[:] = 1
    assert not pages.stale(0, 512, 64, 1024)
    rows[:] = 1
    assert pages.stale(0, 512, 64, 1024)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.data())
def test_sampled_never_accuses_a_synced_buffer(pages: int, data: st.DataObject) -> None:
    size = pages * 4096
    view = SampledView(size)
    for value in range(1, 8):
        start = data.draw(st.integers(0, size - 1))
        count = data.draw(st.integers(1, size - start))
        if data.draw(st.booleans()):
            view.overwrites(start, count)
            view.dev[start : start + count] = value
        else:
            view.cpu[start : start + count] = value
            view.to_device(start, count)
        if data.draw(st.booleans()):
            view.from_device(0, size)
        start = data.draw(st.integers(0, size - 1))
        assert not view.stale(start, data.draw(st.integers(1, size - start)))


# --- lifetimes ---


def test_freed_pages_outlive_the_job_that_holds_their_address() -> None:
    mem = memory()
    buffer = made(mem, 4096)
    address = buffer.dev_address
    early, late = mem.start_epoch(), mem.start_epoch()
    mem.remove(buffer)
    del buffer
    after = mem.start_epoch()
    ctypes.memset(address, 1, 4096)  # would crash
    mem.end_epoch(early)
    ctypes.memset(address, 2, 4096)
    assert mem.limbo == 1
    mem.end_epoch(late)
    assert mem.limbo == 0
    mem.end_epoch(after)


def test_an_impossible_size_is_an_error() -> None:
    mem = memory()
    for size in (1 << 32, 1 << 40, (1 << 64) - 1):
        with pytest.raises(OSError) as failure:
            made(mem, size)
        assert failure.value.errno == errno.EFAULT
    assert mem.domains[0].space.used == 0
