"""The flags of a window, and what a run says of it: which slices stayed, what was moved, what of that was hidden."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ork.cli.common import parse_size, say, size_text
from ork.errors import OrkError, UsageError

if TYPE_CHECKING:
    from ork.api import LoadedModel


def add_window(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--window", metavar="SIZE", help="weights on the device at most, as 512M; the rest is streamed")
    sub.add_argument("--no-prefetch", action="store_true", help="do not read ahead, to compare")
    sub.add_argument("--domains", type=int, metavar="N", help="spread weights over N of the NPU's 4 GiB domains")
    sub.add_argument(
        "--expert-policy",
        choices=("lru", "lfu", "pinned"),
        help="experts that a window keeps: those used last (default) or most, or by the profile of ork skew --save",
    )
    sub.add_argument(
        "--experts",
        choices=("npu", "cpu", "auto"),
        help="where a mixture's experts are computed; auto (default with hybrid): as published figures predict",
    )


def window_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `LoadedModel` takes of these flags. Raises UsageError."""
    if args.no_prefetch and args.window is None:
        raise UsageError("--no-prefetch turns off reading ahead through a window: it goes with --window")
    if args.expert_policy is not None and args.window is None:
        raise UsageError("--expert-policy says which experts a window keeps: it goes with --window")
    window = None if args.window is None else parse_size(args.window)
    return {
        "window": window,
        "prefetch": not args.no_prefetch,
        "domains": args.domains,
        "expert_policy": args.expert_policy or "lru",
        "experts": args.experts,
    }


def ready_facts(model: LoadedModel) -> dict[str, Any]:
    """The ready event: what was brought in before the first op."""
    r = model.ready
    if r is None:
        return {}
    by_domain = {str(domain): n for domain, n in r.domains.items()}
    return {"ready": {"slices": r.slices, "bytes": r.nbytes, "domains": by_domain, "seconds": round(r.seconds, 6)}}


def say_ready(model: LoadedModel) -> None:
    r = model.ready
    if r is None:
        return
    where = ", ".join(f"domain {domain} {size_text(n)}" for domain, n in r.domains.items())
    place = f" ({where})" if len(r.domains) > 1 else ""
    say(f"ready: {r.slices} slices, {size_text(r.nbytes)}{place} in {r.seconds:.3f} s, before the first op")


def window_facts(model: LoadedModel) -> dict[str, Any]:
    """Everything that residency counted since the model was loaded."""
    s = model.stream.stats
    return {
        "window_reason": s.reason,
        "loads": s.loads,
        "hits": s.hits,
        "waits": s.waits,
        "evictions": s.evictions,
        "moved_bytes": s.moved_bytes,
        "transfer_seconds": round(s.transfer_seconds, 6),
        "wait_seconds": round(s.wait_seconds, 6),
        "overlap": round(s.overlap, 4),
        "peak_resident_bytes": s.peak_bytes,
        "scratch_bytes": scratch_bytes(model),
        "domains": {str(domain): n for domain, n in s.domains.items()},
        **({"placement": model.placement.reason} if model.placement else {}),
        **expert_facts(model),
    }


def expert_facts(model: LoadedModel) -> dict[str, Any]:
    """What was counted of routed experts, in all and by layer; nothing for a dense model."""
    s = model.stream.stats.experts
    if not model.stream.expert_layers:
        return {}
    lookups, hits, loads, moved = (c.total() for c in (s.lookups, s.hits, s.loads, s.moved_bytes))
    return {
        "experts": {
            "layers": len(model.stream.expert_layers),
            "total": sum(map(len, model.stream.expert_layers)),
            "lookups": lookups,
            "hits": hits,
            "hit_rate": round(s.hit_rate, 4),
            "loads": loads,
            "moved_bytes": moved,
            "waits": s.waits,
            "wait_seconds": round(s.wait_seconds, 6),
            "by_layer": {
                str(n): {"lookups": s.lookups[n], "hits": s.hits[n], "loads": s.loads[n], "bytes": s.moved_bytes[n]}
                for n in sorted(s.lookups)
            },
        }
    }


def say_experts(model: LoadedModel) -> None:
    """The experts' line: of a pack all are there, and none is converted again."""
    facts = expert_facts(model)
    if not facts:
        return
    e = facts["experts"]
    packed = getattr(model.pack, "made_experts", 0)
    line = f"experts: loaded {e['loads']} / packed {packed} of {e['total']}"
    if model.windowed:
        line += (
            f"; {e['lookups']} lookups, {100 * e['hit_rate']:.1f} % hits, {size_text(e['moved_bytes'])} moved, "
            f"{e['waits']} waits of {e['wait_seconds']:.2f} s"
        )
    say(line)


def say_window(model: LoadedModel) -> None:
    """A line or two where there is a window or more than one domain; nothing for a model that simply fits."""
    s = model.stream.stats
    if model.placement and len(model.placement.bytes) > 1:
        where = ", ".join(f"{domain}: {size_text(n)}" for domain, n in s.domains.items())
        say(f"placement: {model.placement.reason} ({where})")
    say_experts(model)
    if not model.windowed:
        return
    say(
        f"{s.reason}; {s.loads} loads, {s.hits} hits, {s.waits} waits of {s.wait_seconds:.2f} s, {s.evictions} "
        f"evictions, {size_text(s.moved_bytes)} moved, {100 * s.overlap:.0f} % of it under computation; peak "
        f"{size_text(s.peak_bytes)} and {size_text(scratch_bytes(model))} of scratch"
    )


def scratch_bytes(model: LoadedModel) -> int:
    """What is in use beside slices: rows, sums and programs of the NPU, 4-bit blobs that are kept beside the slots they
    fill inflated, pieces of an embedding that streams."""
    by_domain: dict[int, int] = getattr(model.device, "scratch_bytes", {})
    kept: int = getattr(model.device, "kept_bytes", 0)
    return model.stream.stats.scratch_bytes + kept + sum(by_domain.values())


def check_eager(model: LoadedModel) -> None:
    """Raises OrkError if an op had to wait for a slice that should have been there: timings would hold its loading."""
    if lazy := model.stream.stats.lazy:
        raise OrkError(
            f"{lazy} slices were loaded in timed runs although everything was to be there: the rates are void"
        )
