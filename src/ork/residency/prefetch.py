"""Fills slots ahead of the ops, in the model's own order, on threads of its own.

A slot is free, being filled, ready, or in use; only slots in use and the one being filled are pinned. An op that asks
out of order (the first pass, a sequence that ended) moves the loaders to what it asked for. A second loader joins when
ops wait for more than a fifth of the time that transfers take: then one cannot keep up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ork.devices.base import Device, Handle, Slot
from ork.residency.cache import Key
from ork.residency.stream import SliceSource, StreamStats, TensorSpec

JOIN_SHARE = 0.2  # of the transfer time spent waiting, from where another loader joins


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
    """`slots` slots through which the slices `order` pass, again and again."""

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
        self._held: dict[Key, Slot] = {}  # what a slot was last filled with
        self._ready: dict[Key, Handle] = {}
        self._filling: set[Key] = set()
        self._used: set[Key] = set()
        self._next = 0  # position in the order of the slice to fill next
        self._error: BaseException | None = None
        self._stop = False
        self._threads: list[threading.Thread] = []
        self._most = max(1, len(slots) - 1)
        if threads:
            self._join()

    def _join(self) -> None:
        thread = threading.Thread(target=self._run, name="ork-loader", daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- for ops ---

    def take(self, key: Key) -> Handle:
        """The handle of a slice, waiting for it if need be; pinned until `give`."""
        with self._changed:
            if key in self._ready:
                self._stats.hits += 1
                self._used.add(key)
                return self._ready[key]
            self._stats.waits += 1
            start = time.perf_counter()
            if not self._threads:
                return self._take_alone(key)
            if key not in self._filling:
                self._go_to(key)
            while key not in self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            self._used.add(key)
            self._stats.wait_seconds += time.perf_counter() - start
            if len(self._threads) < self._most and self._behind():
                self._join()
            return self._ready[key]

    def give(self, key: Key) -> None:
        """The op is done with the slice: its slot may be filled with another."""
        with self._changed:
            self._used.discard(key)
            self._evict(key)
            self._changed.notify_all()

    def ready(self, key: Key) -> bool:
        """Whether `take` would not wait."""
        return key in self._ready

    def close(self) -> list[Slot]:
        """Stops the threads; all slots."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for key in list(self._ready):
            self._evict(key)
        return self._free

    # --- inside; the lock is held ---

    def _behind(self) -> bool:
        return self._stats.wait_seconds > JOIN_SHARE * max(self._stats.transfer_seconds, 1e-3)

    def _go_to(self, key: Key) -> None:
        """The op asks for something else than was foreseen: what is ready and not in use makes room."""
        for other in [k for k in self._ready if k not in self._used]:
            self._evict(other)
        self._next = self._place[key]
        self._changed.notify_all()

    def _evict(self, key: Key) -> None:
        if key in self._ready:
            del self._ready[key]
            self._free.append(self._held.pop(key))
            self._stats.evictions += 1

    def _upcoming(self) -> Key | None:
        """The next slice that is neither here nor on its way."""
        for step in range(len(self._order)):
            key = self._order[(self._next + step) % len(self._order)]
            if key not in self._ready and key not in self._filling:
                self._next = (self._next + step + 1) % len(self._order)
                return key
        return None

    def _take_alone(self, key: Key) -> Handle:
        """Without prefetch: the op's own thread fills the slot."""
        if not self._free:
            for other in [k for k in self._ready if k not in self._used][:1]:
                self._evict(other)
        slot = self._free.pop()
        start = time.perf_counter()
        handle = self._fill(key, slot)
        self._stats.wait_seconds += time.perf_counter() - start
        self._held[key] = slot
        self._ready[key] = handle
        self._used.add(key)
        return handle

    # --- the lock is not held ---

    def _fill(self, key: Key, slot: Slot) -> Handle:
        name, index = key
        self._clock.change(transfers=1)
        try:
            nbytes = self._source.read_into(name, index, slot.memory)
            handle = self._device.fill(self._tensors[name].slices[index], slot, nbytes)
        finally:
            self._clock.change(transfers=-1)
        self._stats.loads += 1
        self._stats.moved_bytes += nbytes
        return handle

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stop and (not self._free or self._error is not None):
                    self._changed.wait()
                if self._stop:
                    return
                key = self._upcoming()
                if key is None:
                    self._changed.wait()
                    continue
                slot = self._free.pop()
                self._filling.add(key)
            try:
                handle = self._fill(key, slot)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._filling.discard(key)
                    self._free.append(slot)
                    self._changed.notify_all()
                return
            with self._changed:
                self._filling.discard(key)
                self._held[key] = slot
                self._ready[key] = handle
                self._changed.notify_all()
