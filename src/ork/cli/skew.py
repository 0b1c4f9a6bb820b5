"""`ork skew`: which experts a text chooses, and what a cache of experts would hit at every size."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.cli.common import add_model, check_threads, parse_size, resolve, say, size_text, step_bar
from ork.cli.measuring import add_text, converted, opened, read_text
from ork.cli.recipes import add_first_run
from ork.errors import StorageError, UsageError
from ork.files import Kind, begins_with, check_output

if TYPE_CHECKING:
    from ork.api import LoadedModel
    from ork.measure.routing import Point, Routing

MOST_USED = 4  # experts that a layer's line names
NOTE = "routing"  # the note that --save writes
COLUMNS = ("what", "layer", "at", "name", "value")  # of --csv


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    add_text(sub)
    sub.add_argument(
        "--cache-mib", metavar="LIST", help="cache sizes in MiB, as 256,512 (default: parts of all experts)"
    )
    sub.add_argument("--ram", metavar="SIZE", help="a board's RAM, as 8G: what to give its cache")
    sub.add_argument("--save", action="store_true", help="keep the profile in the pack, for --expert-policy pinned")
    sub.add_argument("--json", type=Path, metavar="FILE", help="everything that was found")
    sub.add_argument("--csv", type=Path, metavar="FILE", help="the same as one long table")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="curves, as PNG, PDF or SVG (needs matplotlib)")
    sub.add_argument("--kv", choices=("f16", "f32"), help="element type of the KV cache (default: f16, f32 for f32)")
    add_first_run(sub)
    sub.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical, big cores)")


def run(args: argparse.Namespace) -> int:
    from ork.measure import routing

    check_threads(args.threads)
    sizes = _sizes(args.cache_mib)
    ram = None if args.ram is None else parse_size(args.ram)
    for name, (kind, _) in FILES.items():
        if getattr(args, name):
            check_output(getattr(args, name), kind)
    if args.plot:
        _matplotlib()  # before the work
    text = read_text(args.file)
    path = converted(resolve(args.model), args)
    args.device, args.min_rows = "cpu", None
    with opened(path, args) as model:
        train, held = _traces(model, text, args)
        layers, mapped = model.stream.expert_layers, model.device.mapped_bytes
        profile = train.profile()
        points = routing.curve(held, profile, layers, mapped, sizes or routing.sizes_of(layers, mapped))
        if not points:
            raise UsageError(f"--cache-mib {args.cache_mib}: none of these sizes has room for two experts")
        dense = dense_bytes(model)
        budget = (
            None
            if ram is None
            else _budget(model, ram, dense, lambda n: routing.curve(held, profile, layers, mapped, [n]))
        )
        found = {
            "model": str(model.pack.path),
            "text": str(args.file),
            "top_k": held.top_k,
            "tokens": {"profile": train.tokens, "held_out": held.tokens},
            "dense_bytes": dense,
            "expert_bytes": routing.expert_bytes(layers, mapped),
            **_skew(train, held),
            "hit_rates": [
                {"bytes": p.nbytes, "slots_per_layer": round(p.slots, 2), **_rounded(p.rates)} for p in points
            ],
            "predicted": [
                {"layer": p.layer, **_rounded({"across": p.across, "before": p.before, "common": p.common})}
                for p in routing.predictions(train, held)
            ],
            **({"budget": budget} if budget else {}),
        }
        print(_told(found, points))
        _write(args, found)
        if args.save:
            _save(model, args, train)
    return 0


def dense_bytes(model: LoadedModel) -> int:
    """What everything but routed experts takes in a window."""
    from ork.pack.format import align

    return sum(align(model.device.mapped_bytes(s)) for t in model.stream.tensors for s in t.slices)


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = sorted({int(float(part) * (1 << 20)) for part in text.split(",")})
    except (ValueError, OverflowError):
        sizes = [0]
    if sizes[0] <= 0:
        raise UsageError(f"--cache-mib {text}: give sizes in MiB, as 256,512,1024")
    return sizes


def _traces(model: LoadedModel, text: str, args: argparse.Namespace) -> tuple[Routing, Routing]:
    """Of the text's first half and of its second, each in sequences of its own."""
    from ork.measure.routing import record

    if args.chunks is not None and args.chunks < 2:
        raise UsageError(f"--chunks {args.chunks}: at least 2, one for the profile and one that it has not seen")
    tokens = model.tokenizer.encode(text)
    if args.chunks is not None:
        tokens = tokens[: args.chunks * args.context]
    if len(tokens) < 2:
        raise UsageError(f"{args.file}: {len(tokens)} tokens are too few: half of them are held out")
    half = len(tokens) // 2
    if len(tokens) > args.context:
        half = max(1, half // args.context) * args.context
    with step_bar("reading") as progress:
        train = record(model.engine, tokens[:half], args.context, lambda done, _: progress(done, len(tokens)))
        held = record(model.engine, tokens[half:], args.context, lambda done, _: progress(half + done, len(tokens)))
    return train, held


def _skew(train: Routing, held: Routing) -> dict[str, Any]:
    from ork.measure.routing import SHARES, coverage, gini, pinned_coverage

    unseen = pinned_coverage(train.profile(), held)
    held_counts = held.counts()
    layers = []
    for layer, counts in train.counts().items():
        covered = coverage(counts)
        layers.append(
            {
                "layer": layer,
                "counts": counts.tolist(),
                "held_out_counts": held_counts[layer].tolist(),
                "gini": round(gini(counts + held_counts[layer]), 4),
                "coverage": [round(float(c), 4) for c in covered],
                "held_out_coverage": [round(float(c), 4) for c in unseen[layer]],
                "cover": {str(share): int((covered < share - 1e-12).sum()) + 1 for share in SHARES},
            }
        )
    mean = sum(entry["gini"] for entry in layers) / len(layers)
    return {"gini": round(mean, 4), "layers": layers}


def _rounded(rates: Any) -> dict[str, float]:
    return {name: round(rate, 4) for name, rate in rates.items()}


def _budget(model: LoadedModel, ram: int, dense: int, rates: Callable[[int], list[Point]]) -> dict[str, Any]:
    """What a board with `ram` bytes has for experts, and what comes of it."""
    from ork.measure.routing import expert_bytes, room_for_experts

    kv = model.engine.pool.nbytes(model.context)
    room = room_for_experts(ram, dense, kv)
    room -= (dense + room) % (1 << 20) if dense + room >= 64 << 20 else 0  # a window that can be told in MiB
    everything = expert_bytes(model.stream.expert_layers, model.device.mapped_bytes)
    about: dict[str, Any] = {"ram": ram, "kv_bytes": kv, "room_for_experts": room, "all_fit": room >= everything}
    point = next(iter(rates(min(room, everything))), None) if room > 0 else None
    if point is None:
        return about
    return {**about, "window": dense + point.nbytes, "policy": point.best, "hit_rates": _rounded(point.rates)}


def _told(found: dict[str, Any], points: Sequence[Point]) -> str:
    from ork.measure.routing import BOUND

    lines = ["layer  experts   Gini  for 50 %  for 90 %  most used"]
    for entry in found["layers"]:
        counts = entry["counts"]
        top = sorted(range(len(counts)), key=lambda e: -counts[e])[:MOST_USED]
        total = max(1, sum(counts))
        used = ", ".join(f"{e} ({100 * counts[e] / total:.1f} %)" for e in top)
        cover = entry["cover"]
        lines.append(
            f"{entry['layer']:5}  {len(counts):7}  {entry['gini']:5.3f}  {cover['0.5']:8}  {cover['0.9']:8}  {used}"
        )
    tokens = found["tokens"]
    lines += [
        f"Gini {found['gini']:.3f} on average; profile from {tokens['profile']} tokens, {tokens['held_out']} held out",
        "",
        "hit rate of decoding the held-out text, from an empty cache:",
        "      cache  experts a layer     lru     lfu  pinned   bound",
    ]
    for p in points:
        rates = "  ".join(f"{100 * p.rates[name]:5.1f}%" for name in ("lru", "lfu", "pinned", BOUND))
        lines.append(f"{size_text(p.nbytes):>11}  {p.slots:15.1f}  {rates}")
    if found["predicted"]:
        across, before, common = (_mean(found["predicted"], name) for name in ("across", "before", "common"))
        lines += [
            "",
            f"known before the router: {100 * across:.1f} % from the layer before, {100 * before:.1f} % from the token "
            f"before, {100 * common:.1f} % as the most used (not built)",
        ]
    if "budget" in found:
        lines += ["", _advice(found)]
    return "\n".join(lines)


def _mean(entries: list[dict[str, float]], name: str) -> float:
    return sum(entry[name] for entry in entries) / len(entries)


def _advice(found: dict[str, Any]) -> str:
    b, dense = found["budget"], size_text(found["dense_bytes"])
    board = f"a board with {size_text(b['ram'])} of RAM"
    if b["all_fit"]:
        return f"{board}: all experts fit, no --window is needed"
    if "window" not in b:
        left = size_text(max(0, b["room_for_experts"]))
        return f"{board}: {left} are left for experts beside {dense} of other weights and the KV cache: too little"
    return (
        f"{board}: --window {_told_size(b['window'])} --expert-policy {b['policy']}: {dense} of other weights and "
        f"{size_text(b['window'] - found['dense_bytes'])} of experts, {100 * b['hit_rates'][b['policy']]:.1f} % hits"
    )


def _told_size(nbytes: int) -> str:
    """As `--window` takes it, to the byte."""
    return str(nbytes) if nbytes % (1 << 20) else f"{nbytes >> 20}M"


# --- files ---------------------------------------------------------------------------------------------------------


def _write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    for name, (_, write) in FILES.items():
        if path := getattr(args, name):
            try:
                write(path, found)
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror or error}") from None


def _json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def _csv(path: Path, found: dict[str, Any]) -> None:
    """A row a number: what it is, its layer, its expert (or how many, or bytes), its name, the number."""
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(COLUMNS)
        for entry in found["layers"]:
            layer = entry["layer"]
            out.writerow(["gini", layer, "", "", entry["gini"]])
            for what, key, name in (
                ("count", "counts", "profile"),
                ("count", "held_out_counts", "held_out"),
            ):
                out.writerows([what, layer, e, name, n] for e, n in enumerate(entry[key]))
            for name, key in (("profile", "coverage"), ("held_out", "held_out_coverage")):
                out.writerows(["coverage", layer, n, name, share] for n, share in enumerate(entry[key], 1))
        for row in found["hit_rates"]:
            rates = {name: rate for name, rate in row.items() if name not in ("bytes", "slots_per_layer")}
            out.writerows(["hit_rate", "", row["bytes"], name, rate] for name, rate in rates.items())
        for row in found["predicted"]:
            out.writerows(["predicted", row["layer"], "", name, row[name]] for name in ("across", "before", "common"))


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'ork-npu[plot]'") from None
    matplotlib.use("Agg")
    return matplotlib


def _plot(path: Path, found: dict[str, Any]) -> None:
    _matplotlib()
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for entry in found["layers"]:
        covered = entry["held_out_coverage"]
        left.plot(range(1, len(covered) + 1), [100 * c for c in covered], color="C0", alpha=0.35, linewidth=1)
    left.set(xlabel="most used experts of a layer", ylabel="% of its lookups", title="coverage of the held-out text")
    rows = found["hit_rates"]
    for name in ("lru", "lfu", "pinned", "belady"):
        style = "--" if name == "belady" else "-"
        mib = [row["bytes"] / 2**20 for row in rows]
        right.plot(mib, [100 * row[name] for row in rows], style, marker=".", label=name)
    right.set(xlabel="MiB of experts", ylabel="% hits", title="decoding, by size of the cache", ylim=(0, 101))
    right.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


FILES: dict[str, tuple[Kind, Callable[[Path, dict[str, Any]], None]]] = {  # by flag
    "json": (Kind("file of `ork skew --json`", begins_with(b'{\n "model": '), in_place=True), _json),
    "csv": (Kind("file of `ork skew --csv`", begins_with(",".join(COLUMNS).encode()), in_place=True), _csv),
    "plot": (Kind("PNG, PDF or SVG", begins_with(b"\x89PNG", b"%PDF", b"<?xml"), in_place=True), _plot),
}


def _save(model: LoadedModel, args: argparse.Namespace, train: Routing) -> None:
    from ork.pack.notes import write_note

    counts = {str(layer): uses for layer, uses in train.profile().items()}
    path = str(model.pack.path)
    write_note(path, NOTE, {"text": args.file.name, "tokens": train.tokens, "top_k": train.top_k, "counts": counts})
    with contextlib.suppress(BrokenPipeError):
        say(f"{path}: the profile of the first half ({train.tokens} tokens) is in the pack's notes")
