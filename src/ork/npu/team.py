"""One queue of chains that several cores pull from: a thread per core, each waiting in the kernel for its job."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from ork.npu.chain import Chain


class Team:
    """Threads for all cores but the first, whose work the caller does. They sleep between runs.

    `work(chain, core, timeout_ms)` runs one chain and raises if it fails.
    """

    def __init__(self, work: Callable[[Chain, int, int | None], None], cores: int) -> None:
        self._work = work
        self._queue: deque[Chain] = deque()
        self._timeout: int | None = None
        self._errors: list[BaseException] = []
        self._wake = [threading.Semaphore(0) for _ in range(cores - 1)]
        self._done = threading.Semaphore(0)
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._helper, args=(core,), name=f"npu-core-{core}", daemon=True)
            for core in range(1, cores)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, chains: Sequence[Chain], cores: int, timeout_ms: int | None) -> None:
        """Return when all are done. After a failure no further chain is begun, and the first error is raised."""
        self._queue.extend(chains)
        self._timeout = timeout_ms
        self._errors.clear()
        helpers = min(cores, len(chains)) - 1
        for wake in self._wake[:helpers]:
            wake.release()
        self._pull(0)
        while helpers:
            try:
                self._done.acquire()
                helpers -= 1
            except (KeyboardInterrupt, SystemExit) as interrupt:
                # the others end their chain first: its buffers must live so long
                self._errors.append(interrupt)
        self._queue.clear()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """End the threads; none may be running a chain."""
        self._stopping = True
        for wake in self._wake:
            wake.release()
        for thread in self._threads:
            thread.join()

    def _pull(self, core: int) -> None:
        while not self._errors:
            try:
                chain = self._queue.popleft()
            except IndexError:
                return
            try:
                self._work(chain, core, self._timeout)
            except BaseException as error:
                self._errors.append(error)

    def _helper(self, core: int) -> None:
        while True:
            self._wake[core - 1].acquire()
            if self._stopping:
                return
            self._pull(core)
            self._done.release()
