"""What a program did wrong: violations of the rules, with program, register and values, collected and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock, local

from ork.emulator.rules import RULES, Severity

KEPT = 10_000  # violations kept in full; all are counted


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule. `program` counts the programs of one submit; `register` is BLOCK.NAME, or None."""

    rule: str
    severity: Severity
    program: int | None
    register: str | None
    values: Mapping[str, object]
    text: str

    def __str__(self) -> str:
        where = [] if self.program is None else [f"program {self.program}"]
        where += [] if self.register is None else [self.register]
        values = ", ".join(f"{name} = {_shown(value)}" for name, value in self.values.items())
        return f"{self.severity} {self.rule}: {self.text}" + "".join(f" [{x}]" for x in (*where, values) if x)


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 0xFFFF:
        return hex(value)
    return str(value)


class Report:
    """The violations of one emulated chip, safe to add to from several threads.

    `strict`: what the chip does wrong is wrong here, and what nobody documented is poisoned; else (lenient) the
    second kind is only recorded.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self._lock = Lock()
        self._current = local()

    def at_program(self, program: int | None) -> None:
        """What this thread adds from now on without saying which program it is about concerns this one."""
        self._current.program = program

    def add(
        self,
        rule: str,
        *,
        program: int | None = None,
        register: str | None = None,
        values: Mapping[str, object] | None = None,
        text: str | None = None,
        severity: Severity | None = None,
    ) -> None:
        """Record one violation; text and severity default to the rule's. KeyError for a rule not in the table."""
        known = RULES[rule]
        if program is None:
            program = getattr(self._current, "program", None)
        found = Violation(rule, severity or known.severity, program, register, values or {}, text or known.text)
        with self._lock:
            self.counts[rule] += 1
            if len(self.violations) < KEPT:
                self.violations.append(found)

    def of(self, rule: str) -> list[Violation]:
        """The kept violations of one rule, in order."""
        with self._lock:
            return [v for v in self.violations if v.rule == rule]

    def clear(self) -> None:
        with self._lock:
            self.violations.clear()
            self.counts.clear()
