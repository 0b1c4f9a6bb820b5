"""The two tables of the DPU: how programs load them, and what a lookup makes of a value.

Each holds 513 int16 points. There is one pair a core, not one a register group; the pair outlives programs and submits
until a reset (measured). LUT_ACCESS_CFG names a table and a place, every LUT_ACCESS_DATA after it writes the next
point, while the program is fetched. With x the value, s the start and k the select of the table that answers:

    i = (x - s) >> k    f = (x - s) mod 2**k    y = T[i] + (T[i + 1] - T[i]) * f / 2**k

and beyond the ends  y = T[end] + ((x - end) * slope_scale >> slope_shift). LE answers below, LO above its range; where
both or neither hold the value, the priorities of LUT_CFG decide. How interpolation rounds is not known: half to even.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator.rounding import shift_round
from ork.emulator.stages import Lookup, Table

Array = npt.NDArray[Any]

POINTS: Final = 513
ACCESS_CFG, ACCESS_DATA = 0x4100, 0x4104
TABLE_ACCESS: Final = (ACCESS_CFG, ACCESS_DATA)
WRITE: Final = 1 << 17  # of LUT_ACCESS_CFG
_TABLE, _PLACE = 1 << 16, 0x3FF


class Tables:
    """The tables of one core, and which of their points were ever written. `loads` counts the times one was begun."""

    def __init__(self) -> None:
        self.points = np.zeros((2, POINTS), np.int16)  # LE, LO
        self.known = np.zeros((2, POINTS), bool)
        self.writing, self._table, self._place = False, 0, 0

    def write(self, offset: int, value: int) -> bool:
        """A write of LUT_ACCESS_CFG or LUT_ACCESS_DATA; False if it points beyond the table and is lost."""
        if offset == ACCESS_CFG:
            self.writing, self._table, self._place = bool(value & WRITE), int(bool(value & _TABLE)), value & _PLACE
            return True
        if not self.writing:
            return True
        if self._place >= POINTS:
            return False
        self.points[self._table, self._place] = np.uint16(value & 0xFFFF).view(np.int16)
        self.known[self._table, self._place] = True
        self._place += 1
        return True

    def look_up(self, x: Array, lookup: Lookup) -> tuple[Array, bool]:
        """The table's values (int64 of int64, float32 of float32), and whether a point was read that nobody wrote."""
        answers, known = zip(*(self._answer(x, i, table) for i, table in enumerate((lookup.le, lookup.lo))))
        lo = _lo_answers(x, lookup)
        result: Array = np.where(lo, answers[1], answers[0])
        return result, not bool(np.where(lo, known[1], known[0]).all())

    def _answer(self, x: Array, number: int, table: Table) -> tuple[Array, Array]:
        """What one table says about each x, and whether it was written there."""
        points = self.points[number].astype(np.int64)
        span = (POINTS - 1) << table.select
        end = min(table.end, table.start + span) if table.end > table.start else table.start
        inside = np.clip(x, table.start, end) - table.start
        if x.dtype.kind == "f":
            inside = np.where(np.isnan(inside), 0, inside).astype(np.float64)
            at = np.floor(np.ldexp(inside, -table.select)).astype(np.int64)
        else:
            at = inside >> table.select
        at = np.minimum(at, POINTS - 1)
        after = np.minimum(at + 1, POINTS - 1)
        rest = inside - (at << table.select)
        rise = (points[after] - points[at]) * rest
        known = self.known[number][at] & (self.known[number][after] | (rest == 0))
        if x.dtype.kind == "f":
            y = points[at] + np.ldexp(rise, -table.select)
            y = np.where(x < table.start, y + _slope(x - float(table.start), table.under), y)
            y = np.where(x > end, y + _slope(x - float(end), table.over), y)
            return np.where(np.isnan(x), np.nan, y).astype(np.float32), known
        y = points[at] + interpolation(rise, table.select)
        y = np.where(x < table.start, y + _slope(x - table.start, table.under), y)
        return np.where(x > end, y + _slope(x - end, table.over), y), known


def interpolation(rise: npt.NDArray[np.int64], select: int) -> npt.NDArray[np.int64]:
    """rise / 2**select as the chip might round it: unproven."""
    return shift_round(rise, select, half_up=False)


def _slope(beyond: Array, slope: tuple[int, int]) -> Array:
    scale, shift = slope
    if not scale:
        return np.zeros_like(beyond)
    if beyond.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ldexp(beyond.astype(np.float64) * scale, -shift)
    return beyond * scale >> shift


def _lo_answers(x: Array, lookup: Lookup) -> Array:
    """Where LO's value is taken."""
    le, lo = lookup.le, lookup.lo
    below_le, below_lo = x < le.start, x < lo.start
    above_le, above_lo = x > le.end, x > lo.end
    in_le, in_lo = ~(below_le | above_le), ~(below_lo | above_lo)
    neither = np.where(
        below_le & below_lo, lookup.under_lo, np.where(above_le & above_lo, lookup.over_lo, lookup.hybrid_lo)
    )
    result: Array = np.where(in_le & in_lo, lookup.hybrid_lo, np.where(in_le | in_lo, in_lo, neither))
    return result
