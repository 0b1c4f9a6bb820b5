"""Which slices go into which 4 GiB domain: decided once, before anything is loaded, the same in every run.

A domain switch costs time, so a domain takes a run of the model's order: whole layers, as even in bytes as they come.
A layer is cut only where it does not fit a domain or where there are fewer layers than domains asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ork.devices.base import Capacity
from ork.errors import UsageError
from ork.pack.format import align
from ork.residency.cache import Key
from ork.residency.stream import Streams

Sized = tuple[Key, int]  # a slice and the bytes it is mapped with


@dataclass(frozen=True)
class Placement:
    """A domain for each slice. `bytes` by domain; slots that slices pass through are in the last one used."""

    domains: Mapping[Key, int]
    bytes: Mapping[int, int]
    records: tuple[tuple[int, str, int, int, int], ...] = ()  # domain, tensor and slice of the first, slices, bytes
    slot_domain: int = 0
    reason: str = ""
    board: Mapping[str, Any] = field(default_factory=dict)

    def note(self) -> dict[str, Any]:
        """As it is kept in a pack's notes."""
        return {"board": dict(self.board), "records": [list(record) for record in self.records]}


def arrange(stream: Streams, capacity: Capacity, *, domains: int | None = None, note: object = None) -> Placement:
    """Places what `stream` will keep on a device of that capacity, as `note` of the pack has it if that still holds.
    Raises UsageError as `plan_placement`."""
    keys, slot_bytes = stream.staying()
    source, device = stream.source, stream.device
    slices = [((name, i), align(device.mapped_bytes(source.spec(name).slices[i]))) for name, i in keys]
    placement = recorded(note, slices, capacity, domains=domains, slot_bytes=slot_bytes)
    if placement is None:
        placement = plan_placement(slices, capacity, domains=domains, slot_bytes=slot_bytes)
    stream.place(placement.domains, placement.slot_domain)
    return placement


def plan_placement(
    slices: Sequence[Sized], capacity: Capacity, *, domains: int | None = None, slot_bytes: int = 0
) -> Placement:
    """Divides `slices`, in order, among as few domains as hold them, or among `domains`.

    `slot_bytes` of slots follow the last slice, in its domain. Raises UsageError, with the numbers, when the device has
    not so many domains or no room.
    """
    most = capacity.domains
    if domains is not None and not 1 <= domains <= most:
        has = f"has domains 1 to {most}" if most > 1 else "has one address space"
        raise UsageError(f"--domains {domains}: this device {has}")
    board = _board(capacity, domains, slot_bytes)
    limit = capacity.bytes_per_domain or 1 << 62
    total = sum(n for _, n in slices) + slot_bytes
    counts = [domains] if domains else range(max(1, -(-total // limit)), most + 1)
    for count in counts:
        units = _units(slices, count, limit)
        if slot_bytes:
            units.append([(("", 0), slot_bytes)])
        if runs := _divide(units, count, limit):
            return _placement(runs, board, f"{total >> 20} MiB in {len(runs)} of {most} domains")
    raise UsageError(
        f"{total / 2**30:.2f} GiB of slices do not fit {domains or most} domains of {limit / 2**30:.2f} GiB each: "
        "give --window SIZE, more --domains, or a smaller model"
    )


def recorded(
    note: object, slices: Sequence[Sized], capacity: Capacity, *, domains: int | None = None, slot_bytes: int = 0
) -> Placement | None:
    """The placement that a pack's notes hold, if it was made for this board, these slices and what is asked; else
    None. The notes are not under the pack's hash: a record that cannot be right counts as none."""
    board = _board(capacity, domains, slot_bytes)
    if not isinstance(note, dict) or note.get("board") != board or not isinstance(note.get("records"), list):
        return None
    runs: list[tuple[int, list[Sized]]] = []
    at = 0
    for record in note["records"]:
        if not isinstance(record, list) or len(record) != 5 or not all(isinstance(v, int | str) for v in record):
            return None
        domain, name, index, count, nbytes = record
        run = list(slices[at : at + count]) if isinstance(count, int) and count >= 0 else []
        if len(run) != count or (run and run[0][0] != (name, index)):
            return None
        at += count
        if domain == len(note["records"]) - 1 and slot_bytes:
            run.append((("", 0), slot_bytes))
        limit = capacity.bytes_per_domain or 1 << 62
        if domain != len(runs) or domain >= capacity.domains or sum(n for _, n in run) != nbytes or nbytes > limit:
            return None
        runs.append((domain, run))
    if at != len(slices):
        return None
    return _placement([run for _, run in runs], board, f"as noted in the pack: {len(runs)} domains")


# --- inside


def _board(capacity: Capacity, domains: int | None, slot_bytes: int) -> dict[str, Any]:
    """What a placement is made for."""
    return {
        "domains": capacity.domains,
        "bytes_per_domain": capacity.bytes_per_domain,
        "asked": domains,
        "slots": slot_bytes,
    }


def _units(slices: Sequence[Sized], count: int, limit: int) -> list[list[Sized]]:
    """What stays together: layers, and tensors that are in none; single slices where a layer does not fit or where
    there are fewer layers than domains."""
    units: list[list[Sized]] = []
    last = None
    for item in slices:
        name = item[0][0]
        layer = name.split(".")[1] if name.startswith("blk.") else name
        if layer != last:
            units.append([])
            last = layer
        units[-1].append(item)
    if len(units) < count:
        return [[item] for item in slices]
    fits = [sum(n for _, n in unit) <= limit for unit in units]
    return [piece for unit, fit in zip(units, fits) for piece in ([unit] if fit else [[item] for item in unit])]


def _divide(units: Sequence[list[Sized]], count: int, limit: int) -> list[list[Sized]] | None:
    """At most `count` runs of units, the largest as small as can be; None if one would be larger than `limit`."""
    sizes = [sum(n for _, n in unit) for unit in units]
    low, high = max([*sizes, math.ceil(sum(sizes) / count)], default=0), sum(sizes)
    while low < high:  # the smallest bound under which the runs are not more than `count`
        middle = (low + high) // 2
        if len(_runs(sizes, middle, 1)) <= count:
            high = middle
        else:
            low = middle + 1
    if low > limit:
        return None
    edges = [0, *_runs(sizes, low, count)]
    return [[item for unit in units[a:b] for item in unit] for a, b in pairwise(edges)]


def _runs(sizes: Sequence[int], bound: int, least: int) -> list[int]:
    """Ends of runs of at most `bound` bytes, each as long as can be; where there are enough units, `least` runs."""
    ends: list[int] = []
    used = 0
    for i, size in enumerate(sizes):
        short = len(sizes) - i <= least - len(ends) - 1  # each of the rest must be a run of its own
        if i and (used + size > bound or short):
            ends.append(i)
            used = 0
        used += size
    return [*ends, len(sizes)]


def _placement(runs: Sequence[Sequence[Sized]], board: Mapping[str, Any], reason: str) -> Placement:
    domains = {key: domain for domain, run in enumerate(runs) for key, _ in run if key[0]}
    records = []
    for domain, run in enumerate(runs):
        real = [key for key, _ in run if key[0]]
        name, index = real[0] if real else ("", 0)
        records.append((domain, name, index, len(real), sum(n for _, n in run)))
    return Placement(
        domains,
        {domain: nbytes for domain, *_, nbytes in records},
        tuple(records),
        slot_domain=max(0, len(runs) - 1),
        reason=reason,
        board=board,
    )
