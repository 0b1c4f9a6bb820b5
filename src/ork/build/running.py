"""A first run: the converter runs ahead of the model, and text appears while the pack is being built.

Workers convert slices in the model's own order; one that an op asks for goes before the others. What is written to
`x.part` is served from it at once, by mapping or descriptor, and the finishing rename changes neither: the file stays
the same one. The bytes are those of `ork convert`, and so is what an interrupted run leaves: part and journal.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ork.build.cache import is_pack, place_of
from ork.build.check import PlannedSource, check_model
from ork.build.convert import Progress, check_recipe, make_blob, plan_pack, workers_within
from ork.errors import OrkError, PackBusy, SourceError, StorageError, UsageError
from ork.files import check_output
from ork.pack.file import SliceFile
from ork.pack.format import PACK
from ork.pack.index import map_pack
from ork.pack.plan import PackPlan
from ork.pack.reader import Pack
from ork.pack.writer import Hook, PackWriter
from ork.quant.recipe import Recipe
from ork.residency.stream import TensorSpec
from ork.sources.base import Source, open_source
from ork.text.vocab import build_tokenizer

MISSING, BUSY, DONE = range(3)
BUSY_SECONDS = 0.2  # between two looks at a pack that another process writes
SWITCH_SECONDS = 0.0005  # how long a thread of Python may keep the others waiting while the tokenizer is built

Bytes = npt.NDArray[np.uint8]


def open_running(
    path: Path,
    recipe: Recipe,
    *,
    max_ram: int,
    announce: Callable[[str], None],
) -> Pack | RunningPack:
    """The pack of a model: `path` itself if it is one, else the cache's, which a first run builds as it goes.

    `recipe` is for what is no pack. While another process builds the same pack this one waits for it. Raises the
    errors of `convert`.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    if path.is_file() and is_pack(path):
        return Pack.open(path)
    source = open_source(path)
    try:
        check_recipe(source, recipe)
        target = place_of(path, source, recipe)
        if not target.exists():
            running = RunningPack(source, target, recipe, max_ram=max_ram)
            begun = False
            try:
                begun = running.begin(partial(announce, f"converting {path.name} once, into {target}"), announce)
            finally:
                if not begun:
                    running.close()
            if begun:
                return running
    except BaseException:
        source.close()
        raise
    source.close()
    return Pack.open(target)


class RunningPack(PlannedSource):
    """A pack under construction as a SliceSource, with what a model needs of a `Pack`.

    Conversion starts with `begin`, goes on in threads until the pack is whole or `close` is called, and holds at most
    `max_ram` bytes beyond the mapped source. `hook` is the writer's.
    """

    def __init__(
        self,
        source: Source,
        target: Path,
        recipe: Recipe,
        *,
        max_ram: int,
        workers: int | None = None,
        hook: Hook | None = None,
    ):
        check_output(target, PACK)
        self.path = str(target)
        self.recipe = recipe.record()
        self.tokenizer = b""
        self._recipe, self._hook = recipe, hook
        plan = self.plan = plan_pack(source, recipe, tokenizer=b"")
        tensors = check_model(plan, source)
        super().__init__(plan, source)
        self._workers = workers_within(plan, max_ram, workers)
        self._order = _order(plan, tensors)
        self._position = {entry: i for i, entry in enumerate(self._order)}
        self._entries = {name: [s.entry for s in plan.entries(name)] for name in self.tensors}
        self._offsets = plan.entry_records["offset"].tolist()
        self._state = bytearray(len(plan))
        self._changed = threading.Condition()
        self._asked: deque[int] = deque()
        self._next = 0  # position in the order from where workers look
        self._writer: PackWriter | None = None
        self._file: SliceFile | None = None
        self._bytes: Bytes | None = None
        self._threads: list[threading.Thread] = []
        self._total = sum(map(plan.nbytes, self._order))
        self._done = 0  # bytes
        self._progress: Progress | None = None
        self._error: BaseException | None = None
        self._stop = False
        self.finished = False

    # --- for the model -----------------------------------------------------------------------------------------

    def blob(self, name: str, index: int) -> Bytes:
        entry = self._need(name, index)
        assert self._bytes is not None
        offset = self._offsets[entry]
        return self._bytes[offset : offset + self.plan.nbytes(entry)]

    def read_into(self, name: str, index: int, memory: Bytes) -> int:
        entry = self._need(name, index)
        assert self._file is not None
        nbytes = self.plan.nbytes(entry)
        if self.finished:
            self._file.read(self._offsets[entry], nbytes, memory)
        else:  # what has just been written is in the page cache: going past it would wait for the disk
            self._file.read_part(self._offsets[entry], memory[:nbytes])
        return nbytes

    def read_part(self, name: str, index: int, start: int, memory: Bytes) -> None:
        entry = self._need(name, index)
        assert self._file is not None
        self._file.read_part(self._offsets[entry] + start, memory)

    @property
    def nbytes(self) -> int:
        """Of the pack, once it is whole."""
        return self.plan.file_bytes

    # --- for whoever runs it -----------------------------------------------------------------------------------

    def begin(self, announce: Callable[[], None] | None = None, say: Callable[[str], None] | None = None) -> bool:
        """Starts to convert; False if the pack turned out to be there, written by another process meanwhile.

        `announce` is called when the source has been found good, `say` if another process has to be waited for.
        Raises SourceError (nothing is left behind), StorageError.
        """
        writer = self._writer = self._open_writer(say)
        if writer is None:
            return False
        data, fd = map_pack(self.path + ".part")
        self._file, self._bytes = SliceFile(self.path, fd), np.frombuffer(data, np.uint8)
        missing = set(writer.missing())
        for entry in self._order:
            if entry not in missing:
                self._state[entry] = DONE
                self._done += self.plan.nbytes(entry)
        # Slices need no tokenizer, and building it takes as long as converting a small model: both at a time.
        for _ in range(self._workers):
            self._start(self._work)
        try:
            with _short_turns():
                self.tokenizer = build_tokenizer(self.source.metadata)
        except SourceError:
            self._end()
            writer.abort()
            self._writer = None
            raise
        plan = self.plan = plan_pack(self.source, self._recipe, tokenizer=self.tokenizer)
        writer.extend(plan)
        if announce:
            announce()
        self._start(self._keep)
        return True

    @property
    def made_experts(self) -> int:
        """Routed experts that are converted so far, each layer's by itself."""
        names = [
            name for name, t in self.tensors.items() if t.expert >= 0 and t.role_order == 2
        ]  # the last of its parts
        return sum(all(self._state[entry] == DONE for entry in self._entries[name]) for name in names)

    def watch(self, progress: Progress | None) -> None:
        """Calls `progress(bytes done, bytes in all)` from now on, from any thread; None: no longer."""
        self._progress = progress
        if progress:
            progress(self._done, self._total)

    def finish(self) -> None:
        """Waits until the pack is whole and in place. Raises what stopped it: SourceError, StorageError."""
        with self._changed:
            while not self.finished:
                self._check()
                self._changed.wait()

    def close(self) -> None:
        """Stops; what is converted so far is kept for the next run. Views that were handed out stay valid."""
        self._end()
        if self._writer is not None and not self.finished:
            if isinstance(self._error, SourceError):
                self._writer.abort()  # no other run would get further
            elif self._error is None:
                with contextlib.suppress(OrkError):  # what is not in the journal is converted again
                    self._writer.sync()
            self._writer.close()
        if self._file is not None:
            self._file.close()
        self._file = self._bytes = None
        self.source.close()

    def _end(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # --- workers -----------------------------------------------------------------------------------------------

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(target,), name="ork-converter", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # handed to whoever asks for a slice next
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _work(self) -> None:
        writer = self._writer
        assert writer is not None
        while (entry := self._claim()) is not None:
            writer.write(entry, make_blob(self.plan, self.source, entry), sync=False)
            with self._changed:
                self._state[entry] = DONE
                self._done += self.plan.nbytes(entry)
                self._changed.notify_all()
            if progress := self._progress:
                progress(self._done, self._total)

    def _claim(self) -> int | None:
        """The next entry to convert; None: nothing is left to do."""
        with self._changed:
            if self._stop or self._error is not None:
                return None
            entry = self._upcoming()
            if entry is not None:
                self._state[entry] = BUSY
            return entry

    def _upcoming(self) -> int | None:
        """What an op waits for, else what comes next in the order, going round. The lock is held."""
        while self._asked:
            entry = self._asked.popleft()
            if self._state[entry] == MISSING:
                self._next = self._position[entry] + 1
                return entry
        for step in range(len(self._order)):
            at = (self._next + step) % len(self._order)
            if self._state[self._order[at]] == MISSING:
                self._next = at + 1
                return self._order[at]
        return None

    def _keep(self) -> None:
        """Brings batches to the disk, off the way of those who convert, and at last the whole pack."""
        writer = self._writer
        assert writer is not None
        while True:
            with self._changed:
                while not (self._stop or self._error or writer.full or self._done == self._total):
                    self._changed.wait()
                if self._stop or self._error:
                    return
                whole = self._done == self._total
            if not whole:
                writer.sync()
                continue
            writer.finish()
            for name in self.source.tensors:  # what the system read in beside the rows that were asked for
                self.source.release(name)
            with self._changed:
                self.finished = True
                self._changed.notify_all()
            return

    # --- inside ------------------------------------------------------------------------------------------------

    def _open_writer(self, say: Callable[[str], None] | None) -> PackWriter | None:
        """None if the pack is there: another process, which has been waited for, has finished it."""
        while True:
            try:
                writer = PackWriter.open(self.path, self.plan, hook=self._hook)
            except PackBusy:
                if say:
                    say(f"another process is converting this model into {self.path}: waiting for it")
                    say = None
                time.sleep(BUSY_SECONDS)
                if not Path(self.path).exists():
                    continue
                return None
            if Path(self.path).exists():
                writer.abort()
                return None
            return writer

    def _need(self, name: str, index: int) -> int:
        """The entry of a slice, which is in the file from now on."""
        entry = self._entries[name][index]
        if self._state[entry] == DONE:
            return entry
        with self._changed:
            if self._state[entry] == MISSING:
                self._asked.append(entry)
                self._changed.notify_all()
            while self._state[entry] != DONE:
                self._check()
                self._changed.wait()
        return entry

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stop:
            raise StorageError(f"{self.path}: the conversion was stopped; run the model again to go on")


def _order(plan: PackPlan, tensors: list[TensorSpec]) -> list[int]:
    """All entries: small tensors, then slices as a pass reads them."""
    slices = [s.entry for t in tensors for s in plan.entries(t.name)]
    first = set(slices)
    return [entry for entry in range(len(plan)) if entry not in first] + slices


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Lets threads that need Python for microseconds have it soon from one that computes in it for seconds."""
    before: Any = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
