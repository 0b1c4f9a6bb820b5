"""Which experts are in memory: slots, the policies that give them away, and what a window has for them.

Everything here is bookkeeping on numbers, without memory, threads or time: a run moves bytes as a `Pool` says, and
`ork skew` asks the same pools what a run would have moved. So a predicted hit rate is a measured one.

A pass of a layer needs a set of experts. Those that are there are computed first; the others come in ascending order,
which is the file's, and take slots of experts that the pass does not need, then of those that it has computed. With
fewer slots than the pass needs, half of them are filled while the other half is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from ork.devices.base import SliceSpec
from ork.errors import UsageError
from ork.pack.format import align
from ork.residency.stream import ExpertLayer

Item = tuple[int, ...]  # layer and number of an expert; role and index too where slots hold slices
POLICIES = ("lru", "lfu", "pinned")
HALF_LIFE = 128  # visits of each layer after which a use counts half, in lfu
LEAST = 2  # slots of a pool: one is computed, one is filled
SHARED = 16  # slots that all layers share beside the experts that stay
PASSING = 8  # slots that experts pass through where nothing is left for them: as many are on their way side by side
PASSING_SHARE = 8  # of the window: no more than this part of it goes to slots beyond two

Profile = Mapping[int, Sequence[int]]  # by layer: how often each of its experts was chosen


class Policy(Protocol):
    """Remembers uses of what is in its slots and chooses what goes."""

    def visit(self) -> None:
        """A pass of a layer begins."""

    def use(self, item: Item) -> None:
        """It is used now; it is in a slot, or comes into one."""

    def drop(self, item: Item) -> None:
        """It is in no slot any more."""

    def victim(self, kept: Set[Item]) -> Item:
        """The one that goes of those that are not to be kept: there is one."""


class Lru:
    """The one that was used longest ago goes."""

    def __init__(self) -> None:
        self._held: OrderedDict[Item, None] = OrderedDict()

    def visit(self) -> None:
        """All that counts is the order of uses."""

    def use(self, item: Item) -> None:
        self._held[item] = None
        self._held.move_to_end(item)

    def drop(self, item: Item) -> None:
        self._held.pop(item, None)

    def victim(self, kept: Set[Item]) -> Item:
        return next(item for item in self._held if item not in kept)


class Lfu:
    """The one with the fewest uses goes, where a use counts half after `half_life` visits; of equals the older one.

    Uses are remembered of all experts, also of those that are not there.
    """

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        self._growth = 2 ** (1 / half_life)
        self._weight = 1.0  # of a use now: growing instead of letting all counts shrink
        self._uses = 0
        self._ranks: dict[Item, tuple[float, int]] = {}  # the count of an expert, and when it was used last
        self._held: set[Item] = set()

    def visit(self) -> None:
        self._weight *= self._growth
        if self._weight > 1e100:
            self._ranks = {item: (count / self._weight, at) for item, (count, at) in self._ranks.items()}
            self._weight = 1.0

    def use(self, item: Item) -> None:
        self._uses += 1
        self._ranks[item] = self._ranks.get(item, (0.0, 0))[0] + self._weight, self._uses
        self._held.add(item)

    def drop(self, item: Item) -> None:
        self._held.discard(item)

    def victim(self, kept: Set[Item]) -> Item:
        return min(self._held - kept, key=self._ranks.__getitem__)


@dataclass(frozen=True, slots=True)
class Load:
    """An expert that is to be brought into a slot; not before `after`, of the same pass, is computed if that is set."""

    item: Item
    slot: int
    after: Item | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """What a pass finds (and in which slots) and what it must bring in. Experts are computed in the order of `hits`,
    then of `loads`; `most` at a time where others wait for their slots."""

    hits: Mapping[Item, int]
    loads: tuple[Load, ...]
    most: int


class Pool:
    """Slots, and who is in them once all visits so far are over."""

    def __init__(self, slots: int, policy: Policy):
        self.slots = slots
        self.policy = policy
        self.evictions = 0
        self._held: dict[Item, int] = {}
        self._free = list(range(slots - 1, -1, -1))

    def visit(self, needed: Sequence[Item]) -> Visit:
        """A pass needs these, ascending: decides what comes into which slot."""
        self.policy.visit()
        held, wanted = self._held, set(needed)
        hits = {item: held[item] for item in needed if item in held}
        for item in hits:
            self.policy.use(item)
        most = max(1, self.slots // 2)
        missing = [item for item in needed if item not in held]
        busy = len(hits)  # of what is held: needed by this pass
        loads: list[Load] = []
        for i, item in enumerate(missing):
            after = None
            if self._free:
                slot = self._free.pop()
            else:
                if busy == len(held):  # those that may not be computed yet stay
                    waiting = set(missing[max(0, i // most - (self.slots > 1)) * most :])
                    gone = self.policy.victim(waiting)
                    after = gone
                    busy -= 1
                else:
                    gone = self.policy.victim(wanted)
                self.policy.drop(gone)
                slot = held.pop(gone)
                self.evictions += 1
            held[item] = slot
            self.policy.use(item)
            busy += 1
            loads.append(Load(item, slot, after))
        return Visit(hits, tuple(loads), most)

    def forget(self, *items: Item) -> None:
        """These did not come, or are no longer wanted: their slots are free."""
        for item in items:
            slot = self._held.pop(item, None)
            if slot is not None:
                self.policy.drop(item)
                self._free.append(slot)

    def clear(self) -> None:
        self.forget(*list(self._held))

    def __contains__(self, item: object) -> bool:
        return item in self._held

    def __len__(self) -> int:
        return len(self._held)


# --- what a window has for experts -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Slots that experts of `layers` pass through; `sizes` are the bytes of a slot's pieces, one for each slice."""

    layers: tuple[int, ...]
    slots: int
    sizes: tuple[int, ...]
    shared: bool = False  # made for all layers, though there may be one

    @property
    def nbytes(self) -> int:
        return self.slots * sum(self.sizes)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Experts that stay, by layer, and pools for the others. `parts`: slots hold slices, an expert is too large."""

    policy: str
    pools: tuple[PoolPlan, ...]
    stay: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stay_bytes: int = 0
    parts: bool = False

    @property
    def nbytes(self) -> int:
        return self.stay_bytes + sum(pool.nbytes for pool in self.pools)

    @property
    def reason(self) -> str:
        """One line for the report."""
        slots = sum(pool.slots for pool in self.pools)
        if not slots:
            return f"all {sum(map(len, self.stay.values()))} experts fit"
        if self.parts:
            return f"experts pass in slices through {slots} slots of {self.pools[0].sizes[0] / 2**20:.1f} MiB"
        counts = sorted({pool.slots for pool in self.pools})
        spread = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        if stay := sum(map(len, self.stay.values())):
            ways = f"{stay} experts stay, the others pass through {slots} slots"
        elif self.pools[0].shared:
            ways = f"{slots} experts of all layers together, {self.policy if self.policy == 'lfu' else 'lru'}"
        else:
            ways = f"{spread} experts a layer, {self.policy}"
        return f"{ways} ({self.nbytes >> 20} MiB)"


Mapped = Callable[[SliceSpec], int]


def piece_sizes(layers: Sequence[ExpertLayer], mapped: Mapped) -> tuple[int, ...]:
    """Bytes of the pieces of a slot that holds any expert of these layers, in whole pages; those of one layer are
    stored alike (`Ops.experts_of`)."""
    return _widest(tuple(align(mapped(s)) for t in layer.tensors(0) for s in t.slices) for layer in layers)


def _widest(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip_longest(*shapes, fillvalue=0))


def plan_experts(
    layers: Sequence[ExpertLayer], room: int, mapped: Mapped, policy: str = "lru", profile: Profile | None = None
) -> ExpertPlan | None:
    """What `room` bytes are for experts: all of them if they fit; else a pool a layer of as many bytes each, with
    further slots, from the first layer on, for what that leaves over; or with "pinned" the most used of the profile,
    and a pool that all layers share. None where two experts have no room.

    Raises UsageError for an unknown policy, or for "pinned" without a profile of these layers.
    """
    check_policy(policy)
    sizes = {layer.layer: piece_sizes([layer], mapped) for layer in layers}
    each = {n: sum(pieces) for n, pieces in sizes.items()}  # bytes of an expert
    everything = sum(len(layer) * each[layer.layer] for layer in layers)
    if everything <= room:
        stay = {layer.layer: tuple(range(len(layer))) for layer in layers}
        return ExpertPlan(policy, (), stay, everything)
    numbers = tuple(layer.layer for layer in layers)
    widest = _widest(sizes.values())
    if room < LEAST * sum(widest):
        return None
    if policy == "pinned":
        shared = max(LEAST, min(SHARED, room // 4 // sum(widest)))
        stay, used = _most_used(_checked(layers, profile), each, room - shared * sum(widest))
        return ExpertPlan(policy, (PoolPlan(numbers, shared, widest, True),), stay, used)
    counts = {layer.layer: len(layer) for layer in layers}
    slots = {n: min(counts[n], room // len(layers) // each[n]) for n in numbers}
    if min(slots.values()) >= LEAST:
        left = room - sum(slots[n] * each[n] for n in numbers)
        while wanting := [n for n in numbers if slots[n] < counts[n] and each[n] <= left]:
            for n in wanting:
                if each[n] <= left:
                    slots[n] += 1
                    left -= each[n]
        return ExpertPlan(policy, tuple(PoolPlan((n,), slots[n], sizes[n]) for n in numbers))
    return shared_plan(layers, room, mapped, policy)


def shared_plan(layers: Sequence[ExpertLayer], room: int, mapped: Mapped, policy: str = "lru") -> ExpertPlan:
    """One pool for all layers, of the slots that `room` has."""
    widest = piece_sizes(layers, mapped)
    slots = min(sum(map(len, layers)), room // sum(widest))
    return ExpertPlan(policy, (PoolPlan(tuple(layer.layer for layer in layers), slots, widest, True),))


def plan_parts(layers: Sequence[ExpertLayer], room: int, mapped: Mapped, slots: int, policy: str) -> ExpertPlan:
    """The least: slots for two experts that all layers share, or a few more in a part of `room`, or if it is too small
    for that, as many `slots` for slices. Raises UsageError with what is missing."""
    numbers = tuple(layer.layer for layer in layers)
    sizes = piece_sizes(layers, mapped)
    if LEAST * sum(sizes) <= room:
        passing = max(LEAST, min(PASSING, room // PASSING_SHARE // sum(sizes)))
        return ExpertPlan(policy, (PoolPlan(numbers, passing, sizes, True),))
    pool = PoolPlan(numbers, slots, (max(sizes),), True)
    if pool.nbytes > room:
        raise UsageError(
            f"the window is too small by {pool.nbytes - room:,} bytes: beside the slices of dense weights {slots} "
            f"slices of experts take {pool.nbytes:,} bytes: give --window {-(-(pool.nbytes - room) >> 20)}M more"
        )
    return ExpertPlan(policy, (pool,), parts=True)


def profile_of(note: object) -> Profile | None:
    """The profile that a pack's notes hold, as `ork skew --save` writes it: {"counts": {layer: [uses of each expert]}}.
    Notes are not under the pack's hash: what cannot be right counts as none."""
    counts = note.get("counts") if isinstance(note, dict) else None
    if not isinstance(counts, dict):
        return None
    profile: dict[int, list[int]] = {}
    for layer, uses in counts.items():
        if not (isinstance(layer, str) and layer.isdecimal() and len(layer) < 6 and isinstance(uses, list)):
            return None
        if not all(type(n) is int and 0 <= n < 1 << 53 for n in uses):
            return None
        profile[int(layer)] = uses
    return profile or None


def check_policy(policy: str) -> str:
    if policy not in POLICIES:
        raise UsageError(f"expert policy {policy!r}: known are {', '.join(POLICIES)}")
    return policy


def make_policy(policy: str, layers: int = 1) -> Policy:
    """Of the slots of a pool that so many layers visit; what stays by "pinned" is in none, and the others pass by
    age."""
    return Lfu(HALF_LIFE * layers) if policy == "lfu" else Lru()


def _checked(layers: Sequence[ExpertLayer], profile: Profile | None) -> Profile:
    if profile is None:
        raise UsageError("expert policy pinned needs a routing profile in the pack: `ork skew MODEL -f TEXT --save`")
    for layer in layers:
        if len(profile.get(layer.layer, ())) != len(layer):
            raise UsageError(
                f"the pack's routing profile does not hold {len(layer)} experts of layer {layer.layer}: "
                "make it again with `ork skew MODEL -f TEXT --save`"
            )
    return profile


def _most_used(profile: Profile, sizes: Mapping[int, int], room: int) -> tuple[dict[int, tuple[int, ...]], int]:
    """The experts with the most uses a byte that fit, each layer's uses as shares of that layer's; and their bytes."""
    ranked = sorted(
        (-count / max(1, sum(counts)) / sizes[layer], layer, expert)
        for layer, counts in profile.items()
        if layer in sizes
        for expert, count in enumerate(counts)
    )
    stay: dict[int, list[int]] = {layer: [] for layer in sizes}
    used = 0
    for _, layer, expert in ranked:
        if used + sizes[layer] <= room:
            stay[layer].append(expert)
            used += sizes[layer]
    return {layer: tuple(sorted(experts)) for layer, experts in stay.items()}, used
