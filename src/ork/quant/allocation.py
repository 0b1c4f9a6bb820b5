"""Which codec each tensor gets within a budget of bytes: the choice of least summed error, found exactly.

Every tensor has a list of options, each with its bytes and the error it would add to the model's output. Errors of
different tensors add up (they are independent, and small), so this is a multiple-choice knapsack. Tensors that read the
same rows are one item of it, with one group for all (`together`), so that these rows are quantised once. Bytes are
counted in steps of whole pages, at most 65536 of them, and every number of steps is solved at once by dynamic
programming. The size of a step follows from the options alone, so a larger budget never has a larger error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

STEPS_MAX: Final = 1 << 16
PAGE: Final = 4096  # slices begin on pages, so bytes of a tensor are multiples of it


@dataclass(frozen=True)
class Option:
    """One way to store a tensor: what it takes in the pack, and what it adds to the error of the model's output."""

    codec: str
    group: int
    nbytes: int
    error: float


@dataclass(frozen=True)
class Joint:
    """An option for each of some tensors."""

    options: tuple[Option, ...]
    nbytes: int
    error: float


class Priced(Protocol):
    """What can be chosen."""

    @property
    def nbytes(self) -> int: ...

    @property
    def error(self) -> float: ...


P = TypeVar("P", bound=Priced)


class BudgetTooSmall(ValueError):
    """Not even the smallest options fit; `least` is what they take."""

    def __init__(self, budget: int, least: int):
        super().__init__(f"{budget} bytes hold no allocation: the smallest takes {least}")
        self.least = least


def together(tensors: Sequence[Sequence[Option]]) -> list[Joint]:
    """What some tensors may be stored as at once: every group that all of them have, each time the choices of codecs
    that no other one beats."""

    def add(front: Sequence[Joint], options: Sequence[Option]) -> list[Joint]:
        pairs = product(front, options)
        return pareto([Joint((*j.options, o), j.nbytes + o.nbytes, j.error + o.error) for j, o in pairs])

    common = set.intersection(*({o.group for o in options} for options in tensors))
    by_group = [[[o for o in options if o.group == group] for options in tensors] for group in sorted(common)]
    return [joint for alike in by_group for joint in reduce(add, alike, [Joint((), 0, 0.0)])]


def solve(tensors: Sequence[Sequence[P]], budget: int) -> list[P]:
    """One option for each tensor, of least summed error within `budget` bytes; of equal ones the smaller.

    Raises BudgetTooSmall; ValueError for a tensor without options or an error that is negative or no number.
    """
    fronts = [pareto(options) for options in tensors]
    least = sum(front[0].nbytes for front in fronts)
    most = sum(front[-1].nbytes for front in fronts)
    if budget < least:
        raise BudgetTooSmall(budget, least)
    step = -(-(most - least) // STEPS_MAX // PAGE) * PAGE or PAGE
    room = min((budget - least) // step, sum(_steps(front, -1, step) for front in fronts))
    best: npt.NDArray[np.float64] = np.zeros(room + 1)  # least error by steps beyond the smallest options
    chosen: list[npt.NDArray[np.uint16]] = []
    for front in fronts:
        total = best + front[0].error
        choice = np.zeros(room + 1, np.uint16)
        for i in range(1, len(front)):
            extra = _steps(front, i, step)
            if extra > room:
                break
            other = best[: room + 1 - extra] + front[i].error
            better = other < total[extra:]
            total[extra:][better] = other[better]
            choice[extra:][better] = i
        best = total
        chosen.append(choice)
    at = room
    picked: list[P] = []
    for front, choice in zip(reversed(fronts), reversed(chosen)):
        i = int(choice[at])
        picked.append(front[i])
        at -= _steps(front, i, step)
    return picked[::-1]


def pareto(options: Sequence[P]) -> list[P]:
    """The options that no other one beats in both bytes and error, by bytes; errors fall strictly."""
    if not options or not all(o.error >= 0 for o in options):
        raise ValueError("a tensor needs options, each with an error of at least 0")
    front: list[P] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.error)):
        if not front or option.error < front[-1].error:
            front.append(option)
    return front


def _steps(front: Sequence[Priced], i: int, step: int) -> int:
    return -(-(front[i].nbytes - front[0].nbytes) // step)
