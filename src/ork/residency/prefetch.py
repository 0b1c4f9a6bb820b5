"""Fills slots ahead of the ops, in the model's own order, on threads of its own.

The order is a cycle with the place where the next op is expected on it. The next slice that is missing from there on is
loaded into a free slot, or into that of the slice which will be needed last; only slots in use and those being filled
are pinned. An op that asks for something else (the first pass, a sequence that ended) moves the place, nothing more.
Another loader joins when ops wait for slices for more than a fifth of the time: then one cannot keep up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from ork.devices.base import Device, Handle, Slot
from ork.residency.cache import Key
from ork.residency.loading import load_slice
from ork.residency.stream import SliceSource, StreamStats, TensorSpec

JOIN_SHARE = 0.2  # of the time spent waiting, from where another loader joins
LOADERS = 4  # at most: as many reads keep a disk busy
JUDGED = 4  # times the slots: so many loads are looked at before the next one joins


class Clock:
    """How much of the transfers' time an op was computing meanwhile."""

    def __init__(self, stats: StreamStats):
        self._stats = stats
        self._lock = threading.Lock()
        self._computing = 0
        self._transfers = 0
        self._since = time.perf_counter()

    def change(self, *, computing: int = 0, transfers: int = 0) -> None:
        """An op or a transfer begins (+1) or ends (-1)."""
        with self._lock:
            now = time.perf_counter()
            if self._transfers:
                self._stats.transfer_seconds += now - self._since
                if self._computing:
                    self._stats.overlap_seconds += now - self._since
            self._since = now
            self._computing += computing
            self._transfers += transfers


class Loader:
    """Slots through which the slices `order` pass, again and again.

    One op at a time takes and gives; it holds fewer slices than there are slots. A slice that could not be loaded ahead
    is tried again when an op asks for it, and `take` raises what came of that; the loader goes on.
    """

    def __init__(
        self,
        source: SliceSource,
        device: Device,
        tensors: dict[str, TensorSpec],
        order: Sequence[Key],
        slots: Sequence[Slot],
        stats: StreamStats,
        clock: Clock,
        *,
        threads: bool,
    ):
        self._source, self._device, self._tensors, self._order = source, device, tensors, order
        self._place = {key: i for i, key in enumerate(order)}
        self._stats, self._clock = stats, clock
        self._changed = threading.Condition()
        self._free = list(slots)
        self._ready: dict[Key, tuple[Handle, Slot]] = {}
        self._filling: set[Key] = set()
        self._failed: dict[Key, BaseException | None] = {}  # None: the op that asked was told
        self._pins: Counter[Key] = Counter()
        self._at = 0  # position in the order from where slices will be needed
        self._stop = False
        self._slots = len(slots)
        self._judged = (0, 0.0, time.perf_counter())  # loads, seconds waited and time when it was last asked
        self._threads: list[threading.Thread] = []
        if threads:
            self._join()

    def _join(self) -> None:
        thread = threading.Thread(target=self._run, name=f"ork-loader-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- for ops ---

    def take(self, key: Key) -> Handle:
        """The handle of a slice, waiting for it if need be; pinned until `give`. Raises what loading it raised."""
        with self._changed:
            if self._stop:
                raise RuntimeError("the window is closed")
            self._at = self._place[key]
            if key in self._ready:
                self._stats.hits += 1
            else:
                self._stats.waits += 1
                start = time.perf_counter()
                if self._threads:
                    self._wait_for(key)
                else:
                    self._bring(key)
                self._stats.wait_seconds += time.perf_counter() - start
                self._adapt()
            self._pins[key] += 1
            self._at = (self._at + 1) % len(self._order)
            return self._ready[key][0]

    def give(self, *keys: Key) -> None:
        """The op is done with these slices: their slots may be filled with others."""
        with self._changed:
            for key in keys:
                self._pins[key] -= 1
                if self._pins[key] <= 0:
                    del self._pins[key]
            self._changed.notify_all()

    def ready(self, key: Key) -> bool:
        """Whether `take` would not wait."""
        return key in self._ready

    @property
    def loaders(self) -> int:
        """Threads that load."""
        return len(self._threads)

    def close(self) -> list[Slot]:
        """Stops the threads, each after the transfer it is in; all slots, which are the caller's again."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        slots = [*self._free, *(slot for _, slot in self._ready.values())]
        self._free.clear()
        self._ready.clear()
        return slots

    # --- inside; the lock is held ---

    def _wait_for(self, key: Key) -> None:
        self._failed.pop(key, None)
        self._changed.notify_all()
        while key not in self._ready:
            if (error := self._failed.get(key)) is not None:
                self._failed[key] = None  # it stays failed: no loader tries again until the next op asks
                raise error
            if self._stop:
                raise RuntimeError("the window was closed while an op waited for a slice")
            self._check_room(key)
            self._changed.wait()

    def _bring(self, key: Key) -> None:
        """Without prefetch: the op's own thread fills a slot."""
        self._check_room(key)
        slot = self._room(key)
        assert slot is not None
        result: tuple[Handle, int] | BaseException = KeyboardInterrupt()
        try:
            result = self._transfer(key, slot)
        finally:
            self._finish(key, slot, result)
            error = self._failed.pop(key, None)
        if error is not None:
            raise error

    def _check_room(self, key: Key) -> None:
        if not self._free and not self._filling and all(k in self._pins for k in self._ready):
            raise RuntimeError(f"no slot for {key[0]}: all {self._slots} are in use by ops that were not ended")

    def _distance(self, key: Key) -> int:
        """Slices that will be asked for before this one."""
        return (self._place[key] - self._at) % len(self._order)

    def _wanted(self) -> Key | None:
        """The next slice that is neither here nor on its way; none past one that failed."""
        for step in range(min(self._slots + 1, len(self._order))):
            key = self._order[(self._at + step) % len(self._order)]
            if key in self._failed:
                return None
            if key not in self._ready and key not in self._filling:
                return key
        return None

    def _room(self, key: Key) -> Slot | None:
        """A slot for `key`: a free one, or that of the slice which is needed last, if that is later than `key`."""
        if self._free:
            return self._free.pop()
        idle = [k for k in self._ready if k not in self._pins]
        last = max(idle, key=self._distance, default=key)
        if self._distance(last) <= self._distance(key):
            return None
        self._stats.evictions += 1
        return self._ready.pop(last)[1]

    def _job(self) -> tuple[Key, Slot] | None:
        key = self._wanted()
        slot = self._room(key) if key is not None else None
        if key is None or slot is None:
            return None
        self._filling.add(key)
        return key, slot

    def _finish(self, key: Key, slot: Slot, result: tuple[Handle, int] | BaseException) -> None:
        self._filling.discard(key)
        if isinstance(result, BaseException):
            self._failed[key] = result
            self._free.append(slot)
        else:
            handle, nbytes = result
            self._ready[key] = handle, slot
            self._stats.loads += 1
            self._stats.moved_bytes += nbytes
        self._changed.notify_all()

    def _adapt(self) -> None:
        """After a wait: another loader if those that are there cannot keep up."""
        s, (loads, waited, since) = self._stats, self._judged
        most = min(LOADERS, self._slots - 1)
        if not self._threads or len(self._threads) >= most or s.loads - loads < JUDGED * self._slots:
            return
        now = time.perf_counter()
        if s.wait_seconds - waited > JOIN_SHARE * (now - since):
            self._join()
        self._judged = s.loads, s.wait_seconds, now

    # --- the lock need not be held ---

    def _transfer(self, key: Key, slot: Slot) -> tuple[Handle, int] | BaseException:
        name, index = key
        self._clock.change(transfers=1)
        try:
            return load_slice(self._source, self._device, self._tensors[name], index, slot)
        except Exception as error:
            return error
        finally:
            self._clock.change(transfers=-1)

    def _run(self) -> None:
        while True:
            with self._changed:
                job = None
                while not self._stop and (job := self._job()) is None:
                    self._changed.wait()
                if job is None:
                    return
            result = self._transfer(*job)
            with self._changed:
                self._finish(*job, result)
