"""What a conversion with GPTQ is going to do, in which memory, and what it could not do: known apart from doing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ork.build.layerwise import EMBEDDING, I32
from ork.errors import UsageError
from ork.models import Config
from ork.pack.plan import PackPlan, TensorPlan
from ork.quant.recipe import Recipe

SEQUENCE: Final = 512  # tokens of the text that see each other
TOGETHER: Final = 2  # sequences in one pass
FIXED_BYTES: Final = 128 << 20  # what is there whatever the model
KEPT_BYTES: Final = 256 << 20  # of arrays by size, which native code keeps: experts' rows are of all sizes
SLICE_COPIES: Final = 6  # of a slice as f32: rows as read and rotated, being compensated, errors, tiles


@dataclass(frozen=True)
class Input:
    """Rows that some tensors read, rotated in one way. To see them takes weights that the pass does without else."""

    names: tuple[str, ...]
    K: int
    mode: str  # of rotation
    behind: tuple[str, ...] = ()  # an expert's gate and up, whose product its down projection reads
    behind_bytes: int = 0  # of these in f32

    @property
    def nbytes(self) -> int:
        """While the rows are summed up."""
        return 4 * self.K**2 + self.behind_bytes


def within(inputs: Sequence[Input], room: int) -> Iterator[list[Input]]:
    """Runs of inputs whose Hessians, and what is behind them, fit in `room` bytes, at least one each."""
    some: list[Input] = []
    for part in inputs:
        if some and sum(p.nbytes for p in [*some, part]) > room:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


@dataclass
class Plain:
    """What GPTQ was asked for and was rounded plainly, the text having fewer rows for it than it has inputs."""

    tensors: list[str]
    experts: int  # of all layers, that GPTQ was asked for
    few: dict[str, list[int]] = field(default_factory=dict)  # of experts: numbers by stack

    def add(self, name: str) -> None:
        """An expert's tensor, `stack#number`."""
        stack, _, number = name.partition("#")
        self.few.setdefault(stack, []).append(int(number))

    def lines(self) -> list[str]:
        """For people: nothing, or what was rounded plainly; experts as their number in each layer, a line a role."""
        told = []
        if self.tensors:
            more = f" and {len(self.tensors) - 1} more" if self.tensors[1:] else ""
            told = [
                f"{self.tensors[0]}{more}: more inputs than the text has tokens, so rounded without GPTQ; give a "
                "longer text, or more of it (--calibrate-tokens)"
            ]
        if not self.few:
            return told
        experts = {(stack.split(".")[1], number) for stack, numbers in self.few.items() for number in numbers}
        told.append(
            f"{len(experts)} of {self.experts} experts had fewer rows than inputs, so rounded without GPTQ; a longer "
            "text, or more of it (--calibrate-tokens), brings them more"
        )
        roles: dict[str, list[str]] = {}
        for stack, numbers in self.few.items():
            _, layer, role, _ = stack.split(".")
            roles.setdefault(role, []).append(f"{layer}: {len(numbers)}")
        return told + [f"  {role}, experts by layer: {', '.join(layers)}" for role, layers in roles.items()]


@dataclass(frozen=True)
class Work:
    """One conversion."""

    plan: PackPlan
    recipe: Recipe
    sequences: I32  # [S, SEQUENCE]
    names: frozenset[str]  # tensors that GPTQ rounds; of experts, those that turn out to get enough rows
    plain: Plain
    room: int  # bytes for the inputs that one pass sums up, if one alone is not more
    threads: int
    workers: int  # slices at a time

    @classmethod
    def of(cls, plan: PackPlan, recipe: Recipe, config: Config, sequences: I32, max_ram: int, threads: int) -> Work:
        """Raises UsageError for a `max_ram` (bytes) that is too little."""
        tensors = {t.name: t for t in plan.tensors}
        asked = [t for t in plan.tensors if recipe.choose(t.name).gptq and t.name != EMBEDDING]
        able = [t for t in asked if t.shape[1] <= sequences.size]
        experts = {(t.layer, t.expert) for t in asked if t.expert >= 0}
        names = frozenset(t.name for t in asked if t.expert >= 0 or t.shape[1] <= sequences.size)
        slices = [(t.shape[1], s) for t in asked if t.name in names for s in plan.entries(t.name)]
        largest = SLICE_COPIES * max((4 * K * (s.n1 - s.n0) for K, s in slices), default=0)

        fixed = FIXED_BYTES + 2 * sum(map(len, plan.sections.values()))
        fixed += KEPT_BYTES if config.experts else 0
        fixed += 4 * sequences.size * tensors[EMBEDDING].shape[1]
        weights, row, packed = _largest_layer(plan, config.experts.used if config.experts else 0)
        passing = weights + TOGETHER * SEQUENCE * row
        one = max((_expected_bytes(t) for t in able), default=0)
        embedding = sum(s.nbytes for s in plan.entries(EMBEDDING))
        least = fixed + max(one + max(passing, largest), packed + TOGETHER * SEQUENCE * row, embedding)
        if max_ram < least:
            raise UsageError(
                f"--max-ram {max_ram >> 20} MiB is too little: GPTQ on {sequences.size} tokens of this model needs "
                f"{(least >> 20) + 1} MiB"
            )
        workers = max(1, min(threads, (max_ram - fixed - one) // max(largest, 1)))
        return cls(
            plan,
            recipe,
            sequences,
            names,
            Plain([t.name for t in asked if t.name not in names], len(experts)),
            room=max_ram - fixed - max(passing, workers * largest),
            threads=threads,
            workers=workers,
        )


def _largest_layer(plan: PackPlan, used: int) -> tuple[int, int, int]:
    """Bytes: of a layer's weights in f32 without its experts, which are held as they are listened to; of a row's
    inputs and outputs, those of `used` experts among them; of a layer in the pack."""
    shared, rows, packed = Counter[int](), Counter[int](), Counter[int]()
    for t in plan.tensors:
        if t.layer < 0:
            continue
        N, K = t.shape
        packed[t.layer] += sum(s.nbytes for s in plan.entries(t.name))
        if t.expert < 0:
            shared[t.layer] += 4 * N * K
            rows[t.layer] += 4 * (N + K)
        elif t.expert == 0:
            rows[t.layer] += 4 * (N + K) * used
    return max(shared.values()), max(rows.values()), max(packed.values())


def _expected_bytes(t: TensorPlan) -> int:
    """`Input.nbytes` of what a tensor reads."""
    N, K = t.shape
    return 4 * K * K + (2 * 4 * N * K if t.expert >= 0 and ".ffn_down_exps." in t.name else 0)
