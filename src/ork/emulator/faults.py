"""Faults on purpose, to see what a driver makes of them: jobs that hang, interrupts that get lost, syncs, memory.

A specification is a list like `timeout@12,stale@3,irq-lost:0.01,seed=7`: a kind at one number, or with a probability
for every number. Whether a number is struck depends on kind, number and seed alone, so that a run can be repeated.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ork.emulator.pages import Pages
from ork.errors import UsageError

SUBMIT, CREATE = "SUBMIT", "MEM_CREATE"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a fault does. `counts` names the call whose numbers, from 1 and with refused calls, it goes by."""

    name: str
    counts: str
    text: str


KINDS: Final = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("timeout", SUBMIT, "the job never starts: ETIMEDOUT, or without waiting a core that stays taken"),
            Kind("irq-lost", SUBMIT, "the job does its work and its interrupt never comes: for the driver a time-out"),
            Kind("stale", SUBMIT, "syncs to the device since the last submit have no effect: the job reads old bytes"),
            Kind("enomem", SUBMIT, "no memory for the job: ENOMEM"),
            Kind("create-enomem", CREATE, "no memory for the buffer: ENOMEM"),
            Kind("create-efault", CREATE, "no address space for the buffer, as when a domain is full: EFAULT"),
        )
    }
)


class Faults:
    """What a specification asks for, and how often it has struck; safe for threads. UsageError if it is malformed."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.struck: Counter[str] = Counter()
        self._numbers: dict[str, set[int]] = {}
        self._chances: dict[str, float] = {}
        self._seed = 0
        self._lock = threading.Lock()
        for part in spec.split(","):
            self._add(part.strip())
        if not self._numbers and not self._chances:
            raise UsageError(f"faults {spec!r}: no fault in it, give one like timeout@12")

    def _add(self, part: str) -> None:
        name, mark, value = _divided(part)
        try:
            if (name, mark) == ("seed", "="):
                self._seed = int(value)
                return
            if mark == "@" and name in KINDS and int(value) >= 1:
                self._numbers.setdefault(name, set()).add(int(value))
                return
            if mark == ":" and name in KINDS and 0 < float(value) <= 1:
                self._chances[name] = float(value)
                return
        except ValueError:
            pass
        if mark and name not in KINDS and (name, mark) != ("seed", "="):
            raise UsageError(f"fault {name!r} is not known: {', '.join(KINDS)}")
        raise UsageError(f"fault {part!r}: write KIND@NUMBER from 1, KIND:PROBABILITY up to 1, or seed=NUMBER")

    def strikes(self, kind: str, number: int) -> bool:
        """Whether call `number` is struck; counted if so."""
        chance = self._chances.get(kind)
        struck = number in self._numbers.get(kind, ()) or (
            chance is not None and random.Random(f"{self._seed} {kind} {number}").random() < chance
        )
        if struck:
            with self._lock:
                self.struck[kind] += 1
        return struck

    def __str__(self) -> str:
        """Every kind that was asked for, and how often it struck."""
        asked = [name for name in KINDS if name in self._numbers or name in self._chances]
        return ", ".join(f"{name} {self.struck[name]}" for name in asked)


def _divided(part: str) -> tuple[str, str, str]:
    for mark in "@:=":
        if mark in part:
            return part.partition(mark)
    return part, "", ""


class HeldBack(Pages):
    """Pages of one view, on which a sync had no effect: what it named is stale to the device until the next sync.

    With two views nothing needs to be done: the device's memory simply keeps the old bytes.
    """

    def __init__(self, inner: Pages) -> None:
        self.inner = inner
        self.size, self.memory, self.cpu = inner.size, inner.memory, inner.cpu
        self.dev, self.dev_address = inner.dev, inner.dev_address
        self._held: list[tuple[int, int]] = []

    def hold(self, offset: int, size: int) -> None:
        self._held.append((offset, offset + size))

    def to_device(self, offset: int, size: int) -> None:
        low, high = offset, offset + size
        left: list[tuple[int, int]] = []
        for start, end in self._held:
            left += [(a, b) for a, b in ((start, min(end, low)), (max(start, high), end)) if a < b]
        self._held = left
        self.inner.to_device(offset, size)

    def from_device(self, offset: int, size: int) -> None:
        self.inner.from_device(offset, size)

    def stale(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        end = offset + row_bytes + (rows - 1) * pitch
        return self.inner.stale(offset, row_bytes, rows, pitch) or any(a < end and offset < b for a, b in self._held)

    def overwrites(self, offset: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> bool:
        return self.inner.overwrites(offset, row_bytes, rows, pitch)


def held_back(pages: Pages, offset: int, size: int) -> Pages:
    """The pages after a sync of that range that had no effect."""
    if pages.dev is not pages.cpu:
        return pages
    held = pages if isinstance(pages, HeldBack) else HeldBack(pages)
    held.hold(offset, size)
    return held
