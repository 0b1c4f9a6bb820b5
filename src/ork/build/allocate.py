"""Recipes by measurement: the best choice of codecs within a budget of bytes.

`sensitivity.measure` says what each tensor in each codec adds to the KL divergence of the model's predictions; what
tensors add is summed, and `allocation.solve` finds the least sum. One measurement serves any number of budgets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ork.build.outputs import stored_bytes
from ork.errors import UsageError
from ork.quant import codecs, q4_k_m
from ork.quant.allocation import BudgetTooSmall, Option, solve, together
from ork.quant.recipe import Choice, Recipe, exactly, named, usual


@dataclass(frozen=True)
class Measured:
    """One tensor [N, K], or the experts of a stack one below the other: KL of the model's predictions (nats) when it
    alone is coarse, what it may be stored as, and the first tensor that reads the same rows."""

    name: str
    shape: tuple[int, int]
    coarse: float
    options: tuple[Option, ...]
    reads: str = ""

    def stored(self, choice: Choice) -> Option:
        """The tensor as `choice` has it; a codec that was not measured, f16 say, is taken to cost nothing."""
        kind = choice.codec, codecs.effective_group(self.shape[1], choice.group)
        own = (o for o in self.options if (o.codec, o.group) == kind)
        return next(own, None) or Option(*kind, stored_bytes(self.shape, kind), 0.0)


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
        """The options of least summed error within `budget` bytes, those of tensors that read the same rows all of one
        group, so that the rows are quantised once; but a tensor that has no choice leaves it to the others. Raises
        UsageError if nothing fits.

        Measured, with the tie over without: KL divergence 0.99, 0.96 and 1.00 (SmolLM2, Gemma 3 270M, Qwen2.5-Coder
        0.5B) at Q4_K_M's bytes, 0.97, 0.96 and 1.01 at 4.5 bits a weight; SmolLM2's passes 1 to 3 % faster.
        """
        calls: dict[tuple[str, ...], list[int]] = {}
        for i, t in enumerate(self.tensors):
            calls.setdefault((t.reads or t.name,) if len(t.options) > 1 else (t.reads, t.name), []).append(i)
        return self._solve([t.options for t in self.tensors], list(calls.values()), budget, name)

    def promote(self, recipe: Recipe, extra: int) -> Allocation:
        """`recipe`, but int8 for those of its 4-bit tensors that need it most, for at most `extra` bytes more."""
        options = []
        for t in self.tensors:
            choice = recipe.choose(t.name)
            promoted = [o for o in t.options if (o.codec, o.group) == ("i8", 0)] if choice.four_bit else []
            options.append([t.stored(choice), *promoted])
        budget = sum(o[0].nbytes for o in options) + extra
        name, alone = named(recipe.name, f"+{extra / 1e6:g}MB"), [[i] for i in range(len(options))]
        return replace(self._solve(options, alone, budget, name), base=recipe)

    def fixed(self, recipe: Recipe, rules: Sequence[str]) -> Measurements:
        """Tensors that one of these expressions of `recipe` is found in are stored as it says."""

        def named_by_rule(name: str) -> bool:
            return any(re.search(rule, name) for rule in rules)

        return replace(
            self,
            tensors=tuple(
                replace(t, options=(t.stored(recipe.choose(t.name)),)) if named_by_rule(t.name) else t
                for t in self.tensors
            ),
        )

    def _solve(
        self, options: Sequence[Sequence[Option]], calls: Sequence[Sequence[int]], budget: int, name: str
    ) -> Allocation:
        """`options` of each tensor; `calls`: numbers of tensors that get one group together, each tensor in one."""
        joints = [together([options[i] for i in call]) for call in calls]
        try:
            chosen = {i: o for call, joint in zip(calls, solve(joints, budget)) for i, o in zip(call, joint.options)}
            return Allocation(self, name, tuple(chosen[i] for i in range(len(self.tensors))))
        except BudgetTooSmall as e:
            raise UsageError(
                f"{8 * budget / self.weights:.2f} bits a weight are too few for this model: the smallest choice of "
                f"codecs takes {8 * e.least / self.weights:.2f}"
            ) from None


@dataclass(frozen=True)
class Allocation:
    """One option for each measured tensor, in their order."""

    measurements: Measurements
    name: str
    chosen: tuple[Option, ...]
    base: Recipe | None = None  # what it changes; None: it says all itself

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
        """One rule for each tensor that `base` does not say, and what was measured."""
        if self.base is not None:
            return replace(self.base, name=self.name, rules=(*self._promoted(self.base), *self.base.rules),
                           figures=self.figures())  # fmt: skip
        mode = self.measurements.mode
        tensors = self.measurements.tensors
        rules = tuple((exactly(t.name), usual(o.codec, o.group, rotation=mode)) for t, o in zip(tensors, self.chosen))
        return Recipe(self.name, usual("i8", rotation=mode), rules, self.figures())

    def _promoted(self, base: Recipe) -> list[tuple[str, Choice]]:
        """int8 rotated, and rounded with GPTQ or not, as the 4 bits were."""
        own = [(t.name, base.choose(t.name), o) for t, o in zip(self.measurements.tensors, self.chosen)]
        return [
            (exactly(name), usual("i8", rotation=choice.rotation, gptq=choice.gptq))
            for name, choice, option in own
            if choice.four_bit and option.codec == "i8"
        ]

    def figures(self) -> dict[str, Any]:
        """What goes into the pack's record."""
        costs = {t.name: float(f"{o.error:.4g}") for t, o in zip(self.measurements.tensors, self.chosen)}
        return {
            "tokens": self.measurements.tokens,
            "bytes": self.nbytes,
            "kl": float(f"{self.kl:.4g}"),
            "tensors": costs,
        }
