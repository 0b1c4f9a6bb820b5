"""Recipes by measurement: the best choice of codecs within a budget of bytes.

`sensitivity.measure` says what each tensor in each codec adds to the KL divergence of the model's predictions; what
tensors add is summed, and `allocation.solve` finds the least sum. One measurement serves any number of budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ork.errors import UsageError
from ork.quant import codecs, q4_k_m
from ork.quant.allocation import BudgetTooSmall, Option, solve
from ork.quant.recipe import Recipe, exactly, usual


@dataclass(frozen=True)
class Measured:
    """One tensor [N, K]: KL of the model's predictions (nats) when it alone is coarse, and what it may be stored as."""

    name: str
    shape: tuple[int, int]
    coarse: float
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Measurements:
    """Of one model on one text; `tokens` went through it, `mode` is the rotation."""

    tensors: tuple[Measured, ...]
    tokens: int
    mode: str

    @property
    def weights(self) -> int:
        return sum(t.shape[0] * t.shape[1] for t in self.tensors)

    def bytes_at(self, bpw: float) -> int:
        """Bytes of all matrices at so many bits a weight."""
        return int(self.weights * bpw / 8)

    def q4_k_m_bytes(self) -> int:
        """What llama.cpp's Q4_K_M takes for these matrices."""
        return q4_k_m.total_bytes({t.name: t.shape for t in self.tensors})

    def allocate(self, budget: int, name: str) -> Allocation:
        """The options of least summed error within `budget` bytes. Raises UsageError if nothing fits."""
        return self._solve([t.options for t in self.tensors], budget, name)

    def promote(self, recipe: Recipe, extra: int) -> Allocation:
        """`recipe`, but int8 for those tensors that need it most, for at most `extra` bytes more.

        Raises UsageError for a recipe with codecs that were not measured.
        """
        options = []
        for t in self.tensors:
            choice = recipe.choose(t.name)
            kind = choice.codec, codecs.effective_group(t.shape[1], choice.group)
            own = [o for o in t.options if (o.codec, o.group) == kind]
            if not own:
                raise UsageError(f"recipe {recipe.name}: {t.name} in {choice.codec} cannot be promoted to int8")
            options.append([*own, *(o for o in t.options if (o.codec, o.group) == ("i8", 0))])
        return self._solve(options, sum(o[0].nbytes for o in options) + extra, f"{recipe.name}+{extra >> 20}M")

    def _solve(self, options: Sequence[Sequence[Option]], budget: int, name: str) -> Allocation:
        try:
            return Allocation(self, name, tuple(solve(options, budget)))
        except BudgetTooSmall as e:
            raise UsageError(
                f"{8 * budget / self.weights:.2f} bits a weight are too few for this model: 4 bits without groups take "
                f"{8 * e.least / self.weights:.2f}"
            ) from None


@dataclass(frozen=True)
class Allocation:
    """One option for each measured tensor, in their order."""

    measurements: Measurements
    name: str
    chosen: tuple[Option, ...]

    @property
    def nbytes(self) -> int:
        return sum(o.nbytes for o in self.chosen)

    @property
    def bpw(self) -> float:
        return 8 * self.nbytes / self.measurements.weights

    @property
    def kl(self) -> float:
        """The KL divergence of the model's predictions (nats) that the measurements foretell."""
        return sum(o.error for o in self.chosen)

    def recipe(self) -> Recipe:
        """One rule for each tensor, and what was measured."""
        mode = self.measurements.mode
        tensors = self.measurements.tensors
        rules = tuple((exactly(t.name), usual(o.codec, o.group, rotation=mode)) for t, o in zip(tensors, self.chosen))
        return Recipe(self.name, usual("i8", rotation=mode), rules, self.figures())

    def figures(self) -> dict[str, Any]:
        """What goes into the pack's record."""
        costs = {t.name: float(f"{o.error:.4g}") for t, o in zip(self.measurements.tensors, self.chosen)}
        return {
            "tokens": self.measurements.tokens,
            "bytes": self.nbytes,
            "kl": float(f"{self.kl:.4g}"),
            "tensors": costs,
        }
