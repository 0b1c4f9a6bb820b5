"""Which IOMMU domain is attached, who needs it, and the simulated clock that waits are charged to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ork.emulator.report import Report
from ork.npu.soc import Soc

_PATIENCE_S = 30.0  # of real time, for a domain that other threads never let go


class Clock:
    """Nanoseconds the chip and its driver would have taken. Nothing sleeps; waits only add up here."""

    def __init__(self) -> None:
        self.ns = 0

    def advance(self, ns: int) -> None:
        self.ns += ns

    def advance_ms(self, ms: int) -> None:
        self.ns += ms * 1_000_000


class Device:
    """The one lock of the device, and a bell that rings when something changed for those who wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._bell = threading.Condition(self.lock)
        self._waiting = 0

    def wait(self, seconds: float | None = None) -> bool:
        """Let the lock go until the next `ring`; False when the time is over. Lock held before and after."""
        self._waiting += 1
        try:
            return self._bell.wait(seconds)
        finally:
            self._waiting -= 1

    def ring(self) -> None:
        """Wake those who wait. Lock held."""
        if self._waiting:
            self._bell.notify_all()


class DomainSwitch:
    """The attached domain and the number of those who need it to stay. One instance per device; lock held throughout.

    The stock driver's rule: the same domain is shared; another one is attached only when nobody needs the present one,
    else the caller waits, up to 6 s.
    """

    def __init__(self, soc: Soc, clock: Clock, report: Report, device: Device) -> None:
        self.current = 0
        self.refs = 0
        self.switches = 0
        self.stuck: Callable[[], int] = lambda: 0  # references held by jobs that will never end
        self._soc, self._clock, self._report, self._device = soc, clock, report, device

    def get(self, number: int) -> bool:
        """Attach domain `number` and keep it attached until `put`; False after the driver's 6 s (simulated)."""
        if number != self.current:
            if self.refs and not self._wait():
                self._clock.advance_ms(self._soc.domain_wait_ms)
                self._report.add(
                    "domain-busy", values={"wanted": number, "attached": self.current, "references": self.refs}
                )
                return False
            if number != self.current:
                self.current = number
                self.switches += 1
        self.refs += 1
        return True

    def put(self) -> None:
        """End one `get`."""
        self.refs -= 1
        self._device.ring()

    def _wait(self) -> bool:
        """Wait for the others to finish; at once False if what is left of them never will."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.refs:
            left = deadline - time.monotonic()
            if self.refs <= self.stuck() or left <= 0:
                return False
            self._device.wait(left)
        return True
