"""Recordings: what ran runs again to the same bytes, what differs is named, and no file harms the reader."""

from __future__ import annotations

import errno
import random
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ork.emulator import orktrace
from ork.emulator.capture import CapturingKernel
from ork.emulator.faults import Faults
from ork.emulator.kernel import EmulatedKernel
from ork.emulator.orktrace import Head, Recording, Reset, Writer
from ork.emulator.record import Recorder
from ork.emulator.replay import chain_image, chain_words, compare, replay
from ork.emulator.review import programs, review
from ork.emulator.summary import leaks
from ork.errors import SourceError, StorageError, SubmitFailed
from ork.npu import isa
from ork.npu.driver import Npu
from ork.npu.jobs import Int8Job
from tests.emulator.board import Board
from tests.emulator.programs import INT8, matmul, words


def record(path: Path, work: Callable[[Npu], None], **options: Any) -> EmulatedKernel:
    recorder = Recorder(path)
    kernel = EmulatedKernel(recorder=recorder, **options)
    with Npu.open(kernel) as npu:
        work(npu)
    recorder.close()
    assert leaks(kernel) == {}
    return kernel


def products(seed: int = 0, *, M: int = 5, cores: int = 3, blocking: bool = True, chains: int = 4) -> Any:
    """Some int8 products of random numbers, on several cores."""

    def work(npu: Npu) -> None:
        rng = np.random.default_rng(seed)
        a, w, c = npu.buffer(8 * 64), npu.buffer(64 * 64), npu.buffer(chains * 8192)
        with a.fill(0, 512) as part:
            part[:] = rng.bytes(512)
        with w.fill(0, 4096) as part:
            part[:] = rng.bytes(4096)
        made = [
            npu.prepare([Int8Job(a, w, c, M=M, K=64, N=64, out_offset=8192 * i + 4096 * j) for j in range(2)])
            for i in range(chains)
        ]
        npu.run([p.chain for p in made], cores=cores, blocking=blocking)

    return work


def differing(path: Path, **options: Any) -> dict[int, list[str]]:
    with Recording(path) as recording:
        assert recording.complete
        return {found.number: found.lines for found in replay(recording, **options) if found.lines}


# --- running again ---


@pytest.mark.parametrize("views", ["full", "sampled"])
@pytest.mark.parametrize("blocking", [True, False])
def test_what_was_recorded_runs_again_to_the_same_bytes(tmp_path: Path, views: str, blocking: bool) -> None:
    path = tmp_path / "a.orktrace"
    kernel = record(path, products(blocking=blocking), views=views)
    with Recording(path) as recording:
        submits = list(recording.submits)
        assert [len(submits), sum(s.tasks for s in submits)] == [kernel.stats.submits, kernel.stats.programs]
        cores = {part.core for s in submits for part in s.parts}
        assert cores <= {0, 1, 2} if blocking else cores == {0, 1, 2}
        written = {page for s in submits for first, count, _ in s.after for page in range(first, first + count)}
        assert len(written) == 8  # the outputs, whole pages, and nothing else
    assert differing(path) == {}
    assert differing(path, engine="literal") == {}


def test_a_program_that_reads_what_the_one_before_wrote(tmp_path: Path) -> None:
    """The recorded input is what the chain found, not what its first program left there."""

    def work(npu: Npu) -> None:
        a, w, c = npu.buffer(4096), npu.buffer(1024), npu.buffer(8192)
        a.array[:] = 1
        a.sync_to_device()
        w.array[:] = 1
        w.sync_to_device()
        steps = [
            Int8Job(a, w, c, M=8, K=32, N=32),
            Int8Job(c, w, c, M=8, K=32, N=32, out_offset=4096),  # the sums of the first, read as bytes
        ]
        prepared = npu.prepare(steps)
        for value in (1, 2):
            a.array[:] = value
            a.sync_to_device()
            npu.submit(prepared.chain)

    path = tmp_path / "a.orktrace"
    record(path, work)
    assert differing(path) == {}
    with Recording(path) as recording:
        befores = [dict(recording.pages(s.before)) for s in recording.submits]
        afters = [dict(recording.pages(s.after)) for s in recording.submits]
    for before, after in zip(befores[1:], afters):
        assert all(before[page] == data for page, data in after.items())


def test_registers_that_a_reset_clears_are_cleared_in_the_replay(tmp_path: Path) -> None:
    """Faults are recorded too: a job that never ran, and the resets after it."""
    path = tmp_path / "a.orktrace"
    kernel = record(path, products(cores=1), faults=Faults("timeout@2,irq-lost@4"))
    with Recording(path) as recording:
        assert [s.ran for s in recording.submits].count(False) == 1
        assert [s.error != 0 for s in recording.submits].count(True) == 2
        assert sum(isinstance(event, Reset) for event in recording.events) == 3 * kernel.stats.resets
    assert differing(path) == {}


def test_rules_and_hangs_are_part_of_the_outcome(tmp_path: Path) -> None:
    def work(npu: Npu) -> None:
        a, w, c = npu.buffer(4096), npu.buffer(4096), npu.buffer(4096)
        prepared = npu.prepare([Int8Job(a, w, c, M=4, K=64, N=32)])
        code = prepared.chain._arena.words
        at = prepared.chain._starts[0]
        body = np.frombuffer(code, np.uint64)[at : at + 120].copy()
        code[at + int(isa.positions(body, 0x4034)[-1])] = isa.word(0x1001, 0x4034, 7)
        with pytest.raises(SubmitFailed):
            npu.submit(prepared.chain)

    path = tmp_path / "a.orktrace"
    record(path, work)
    with Recording(path) as recording:
        assert [set(s.rules) for s in recording.submits] == [{"output-size"}] * 2
    assert differing(path) == {}


def test_what_comes_out_otherwise_is_named(tmp_path: Path) -> None:
    """A recording whose output, tasks and rules are not what the cores do."""
    path, other = tmp_path / "a.orktrace", tmp_path / "b.orktrace"
    record(path, products(cores=1, chains=1))
    with Recording(path) as recording:
        writer = Writer(other, recording.head)
        for event in recording.submits:
            after = dict(recording.pages(event.after))
            page = min(after)
            after[page] = after[page][:100] + bytes([after[page][100] ^ 1]) + after[page][101:]
            changes = {
                "before": writer.runs(dict(recording.pages(event.before))),
                "after": writer.runs(after),
                "tasks": event.tasks + 1,
                "rules": {"bank-split": 1},
            }
            writer.add(msgspec.structs.replace(event, **changes))
        writer.close()
    found = differing(other)
    assert set(found) == {1, 2}
    tasks, rules, output = found[2]
    assert tasks == "2 programs completed, recorded 3"
    assert rules == "rules broken: none; recorded: bank-split 1"
    assert output.startswith(
        f"output: 1 bytes differ in page {page * 4096:#010x}, the first at {page * 4096 + 100:#x} ("
    )


# --- any kernel ---


@pytest.mark.parametrize("views", ["full", "sampled"])
def test_what_any_kernel_did_is_replayed_by_the_emulator(tmp_path: Path, views: str) -> None:
    """A kernel of which only the calls are seen, as a board's: two domains, an import, a time-out, a queue."""
    path = tmp_path / "a.orktrace"
    inner = EmulatedKernel(views=views, faults=Faults("timeout@2"))
    kernel = CapturingKernel(inner, path)
    rng = np.random.default_rng(3)
    with Npu.open(kernel) as npu:
        for domain in (0, 1):
            imported = npu.import_buffer(4096, domain=domain)
            c = npu.buffer(4096, domain=domain)
            w = npu.buffer(4096, domain=domain)
            for buffer in (imported, w):
                with buffer.fill(0, 2048) as part:
                    part[:] = rng.bytes(2048)
            prepared = npu.prepare([Int8Job(imported, w, c, M=5, K=64, N=32)])
            npu.submit(prepared.chain)
            c.sync_from_device()
            a = np.frombuffer(imported.view, np.int8)[:320].reshape(5, 64).astype(int)
            b = w.array.view(np.int8)[:2048].reshape(2, 32, 32).transpose(1, 0, 2).reshape(32, 64)
            assert (c.array.view(np.int32)[:160].reshape(5, 32) == a @ b.T).all()
            del a, b
        npu.run([prepared.chain], blocking=False)
    kernel.close_recording()
    assert kernel.skipped == 1
    with Recording(path) as recording:
        found = {event.number: event for event in recording.submits}
        assert {event.domain for event in found.values()} == {0, 1}
        assert [event.error for event in found.values()].count(errno.ETIMEDOUT) == 1
    # the emulator that replays knows of no faults: it completes what was made to hang, and only that
    (number,) = differing(path)
    assert found[number].error == errno.ETIMEDOUT
    assert differing(path)[number][0] == "completes, and ended in errno 110 when recorded"
    assert leaks(inner) == {"bytes of address space": inner.stats.leaked_bytes}  # an import of domain 1, stock driver


def test_a_board_that_computes_otherwise_is_found(tmp_path: Path) -> None:
    class Wrong(CapturingKernel):
        """Its chip flips one bit of one result."""

        out, flip = 0, 0

        def _pages(self, fd: int, domain: int) -> dict[int, bytes]:
            pages = super()._pages(fd, domain)
            at = self.out // 4096
            if at in pages:
                pages[at] = bytes([pages[at][0] ^ self.flip]) + pages[at][1:]
            return pages

    path = tmp_path / "a.orktrace"
    kernel = Wrong(EmulatedKernel(), path)
    with Npu.open(kernel) as npu:
        a, w, c = npu.buffer(4096), npu.buffer(4096), npu.buffer(4096)
        prepared = npu.prepare([Int8Job(a, w, c, M=5, K=64, N=32)])
        npu.submit(prepared.chain)
        kernel.out, kernel.flip = c.iova, 4
        a.array[:2048] = w.array[:2048] = 1
        a.sync_to_device()
        w.sync_to_device()
        npu.submit(prepared.chain)
    kernel.close_recording()
    (lines,) = differing(path).values()
    assert lines == [
        f"output: 1 bytes differ in page {c.iova:#010x}, the first at {c.iova:#010x} "
        "(when recorded 44 00 00 00, now 40 00 00 00)"
    ]


# --- comparing ---


def compared(one: Path, two: Path) -> dict[int, list[str]]:
    with Recording(one) as a, Recording(two) as b:
        return {found.number: found.lines for found in compare(a, b) if found.lines}


def test_two_recordings_of_the_same_are_equal_and_of_others_are_not(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / f"{x}.orktrace" for x in "abcd")
    record(a, products(cores=1))
    record(b, products(cores=1))
    record(c, products(cores=1, seed=1))
    record(d, products(cores=1, M=6, chains=3))
    assert compared(a, a) == compared(a, b) == {}
    data = compared(a, c)[2]
    assert any(line.startswith("memory before: ") for line in data)
    assert any(line.startswith("memory after: ") for line in data)
    assert not any("CNA" in line for line in data)
    shape = compared(a, d)
    assert any("CNA.DATA_SIZE0" in line and "height 5 -> 6" in line for line in shape[2])
    last = max(shape)
    assert shape[last] == ["in the first recording only"]


def test_programs_are_taken_out_as_they_lie_so_that_their_links_hold(tmp_path: Path) -> None:
    """Programs on 64 bytes, with gaps between them."""
    recorder = Recorder(tmp_path / "a.orktrace")
    board = Board(EmulatedKernel(recorder=recorder))
    operands = [board.create(4096) for _ in range(3)]
    code = board.create(8192, mapped=True)
    body = matmul(INT8, 4, 32, 32) | {0x1070: operands[0].iova, 0x1110: operands[1].iova, 0x4020: operands[2].iova}
    for i, at in enumerate((0, 1024, 5056)):
        following = [code.iova + 1024, code.iova + 5056, 0][i]
        raw = words(body, following, isa.fetch_amount(len(body)) if following else 0).view(np.uint8)
        code.array[at : at + len(raw)] = raw
    board.sync(code, 1)
    tasks = board.tasks(3)
    tasks.array.view(np.uint32)[6:40:10] = len(body)
    tasks.array[:120].reshape(3, 40)[:, 32:] = np.array([code.iova], np.uint64).view(np.uint8)
    board.submit(tasks, 3)
    recorder.close()
    with Recording(tmp_path / "a.orktrace") as recording:
        (event,) = recording.submits
        pages = dict(recording.pages(event.before))
        assert event.tasks == 3
        assert [span.start for span in programs(chain_image(event, pages))] == [0, 128, 632]
        assert review(chain_image(event, pages)) == []
        assert len(chain_words(event, pages)) == 3 * (len(body) + 4)


def test_the_programs_of_a_submit_can_be_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "a.orktrace"
    record(path, products(cores=1))
    with Recording(path) as recording:
        for event in recording.submits:
            found = chain_words(event, dict(recording.pages(event.before)))
            assert len(isa.positions(found, 0x1020)) == event.tasks == 2


# --- files ---


def test_equal_pages_are_stored_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", Head("RK3588", True))
    page = random.Random(1).randbytes(4096)
    pages = {5: page, 6: bytes(4096), 7: bytes(4096), 9: page}
    assert writer.runs(pages) == [(5, 1, 1), (6, 2, 0), (9, 1, 1)]
    assert writer.runs(pages) == [(5, 1, 1), (6, 2, 0), (9, 1, 1)]
    writer.close()
    assert (tmp_path / "a").stat().st_size < 4500
    with Recording(tmp_path / "a") as recording:
        assert recording.complete
        assert list(recording.events) == []


def test_a_recording_that_was_cut_is_good_up_to_there(tmp_path: Path) -> None:
    whole, cut = tmp_path / "a.orktrace", tmp_path / "b.orktrace"
    record(whole, products(cores=1))
    data = whole.read_bytes()
    cut.write_bytes(data[: len(data) - 700])
    with Recording(whole) as a, Recording(cut) as b:
        assert (a.complete, b.complete) == (True, False)
        assert 0 < len(b) < len(a)
        assert not any(found.lines for found in replay(b))


def test_a_full_disk_ends_in_one_error() -> None:
    with pytest.raises(StorageError, match="/dev/full: No space left on device"):
        EmulatedKernel(recorder=Recorder(Path("/dev/full")))
    with pytest.raises(StorageError, match="No such file or directory"):
        EmulatedKernel(recorder=Recorder(Path("/nowhere/a.orktrace")))


def test_a_disk_that_fills_up_fails_the_submit_and_leaks_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.orktrace")
    kernel = EmulatedKernel(recorder=recorder)
    with Npu.open(kernel) as npu:
        products(cores=1)(npu)
        recorder._writer._file = open("/dev/full", "wb")  # type: ignore[union-attr]  # noqa: SIM115
        with pytest.raises(StorageError, match=r"a.orktrace: No space left on device"):
            products(seed=1, cores=1)(npu)
    with pytest.raises(StorageError):
        recorder.close()
    assert leaks(kernel) == {}


def hostile(kind: int, data: bytes, nbytes: int | None = None, *, crc: int | None = None) -> bytes:
    stored = zlib.compress(data)
    head = orktrace._RECORD.pack(
        kind, len(stored), len(data) if nbytes is None else nbytes, zlib.crc32(stored) if crc is None else crc
    )
    return head + stored


START = orktrace._START.pack(orktrace.MAGIC, orktrace.VERSION, 0)
HEAD = hostile(orktrace.HEAD, b'{"soc": "RK3588", "strict": true}')
EVENT = {
    "number": 1, "domain": 0, "timeout_ms": 1, "blocking": True, "task_base": 0, "ran": True, "tasks": 1, "hw_ns": 1,
    "parts": [{"core": 0, "pieces": [[4096, 108, 1]], "int_mask": 768, "int_status": 256}],
    "error": 0, "rules": {}, "buffers": [[4096, 4096]], "before": [[1, 1, 0]], "after": [],
}  # fmt: skip


def event(**changes: Any) -> bytes:
    return hostile(orktrace.SUBMIT, msgspec.json.encode(EVENT | changes))


FILES = {
    "empty": (b"", "no .orktrace recording"),
    "other": (b"GGUF" + bytes(60), "no .orktrace recording"),
    "newer": (orktrace._START.pack(orktrace.MAGIC, 9, 0), "version 9 of the format"),
    "headless": (START, "no head"),
    "kind": (START + HEAD + hostile(77, b"x"), "unknown kind 77"),
    "odd pages": (START + HEAD + hostile(orktrace.PAGES, b"x" * 100), "100 bytes of pages"),
    "huge": (START + HEAD + hostile(orktrace.SUBMIT, b"{}", (64 << 20) + 1), "at most"),
    "checksum": (START + HEAD + hostile(orktrace.SUBMIT, b"{}", crc=1), "does not match its checksum"),
    "bomb": (START + HEAD + hostile(orktrace.SUBMIT, bytes(20 << 20), 1000), "is not the 1000 bytes"),
    "short": (START + HEAD + hostile(orktrace.SUBMIT, b"{}", 1000), "is not the 1000 bytes"),
    "json": (START + HEAD + hostile(orktrace.SUBMIT, b'{"number":'), "the record at"),
    "fields": (START + HEAD + hostile(orktrace.SUBMIT, b"{}"), "missing required field"),
    "core": (START + HEAD + event(parts=[EVENT["parts"][0] | {"core": 3}]), "core"),  # type: ignore[index]
    "domain": (START + HEAD + event(domain=16), "domain"),
    "page id": (START + HEAD + event(before=[[1, 1, 5]]), "page 5 is named, and there are 0"),
    "many pages": (START + HEAD + event(before=[[1, 1000, 1]]), "is named, and there are 0"),
    "many times": (
        START
        + HEAD
        + hostile(orktrace.PAGES, b"x" * 4096)
        + event(before=[[i, 1, 1] for i in range(1, (1 << 18) + 2)]),
        "more than 1 GiB",
    ),
    "no buffer": (START + HEAD + event(before=[[2, 1, 0]]), "lies in none of its buffers"),
    "beyond": (START + HEAD + event(buffers=[[0xFFFFF000, 8192]]), "a buffer of 8192 bytes"),
    "overlap": (START + HEAD + event(buffers=[[4096, 8192], [8192, 4096]]), "a buffer of 4096 bytes"),
    "unaligned": (START + HEAD + event(buffers=[[4097, 4096]]), "a buffer of 4096 bytes"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_line(tmp_path: Path, name: str) -> None:
    data, why = FILES[name]
    path = tmp_path / "x.orktrace"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=why) as caught, Recording(path) as recording:
        list(replay(recording))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_mutated_recordings_end_in_typed_errors_or_differences(tmp_path: Path) -> None:
    """Bytes flipped under a checksum that is made to fit again: nothing but SourceError, and no memory."""
    path = tmp_path / "a.orktrace"
    record(path, products(cores=1, chains=1))
    data = path.read_bytes()
    rng = random.Random(7)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(300):
        at = orktrace._START.size
        out = bytearray(data[:at])
        chosen = rng.randrange(4)
        while at < len(data):
            kind, stored, _, _ = orktrace._RECORD.unpack_from(data, at)
            raw = bytearray(zlib.decompress(data[at + 16 : at + 16 + stored]))
            if (kind == orktrace.PAGES) == (chosen == 0) and raw:
                for _ in range(rng.randrange(1, 4)):
                    raw[rng.randrange(len(raw))] = rng.randrange(256)
            out += hostile(kind, bytes(raw))
            at += 16 + stored
        path.write_bytes(out)
        try:
            with Recording(path) as recording:
                list(replay(recording))
                list(compare(recording, recording))
        except SourceError:
            refused += 1
    assert 0 < refused < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB
