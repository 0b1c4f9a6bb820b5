"""`ork bench`: prefill (ppN) and decode (tgN) rates, as llama-bench names and prints them."""

from __future__ import annotations

import argparse
import json

from ork.cli.common import add_device, add_model, check_threads, parse_size, progress_bar, resolve, say, size_text
from ork.cli.recipes import add_first_run, first_run_recipe
from ork.cli.window import add_window, check_eager, ready_facts, say_ready, say_window, window_facts, window_options
from ork.errors import UsageError


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    sub.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="prefill N tokens (0: skip)")
    sub.add_argument("-n", "--n-gen", type=int, default=128, metavar="N", help="decode N tokens (0: skip)")
    sub.add_argument("-r", "--repetitions", type=int, default=5, metavar="R", help="times to measure (default: 5)")
    sub.add_argument("-o", "--output", choices=("md", "json"), default="md")
    add_first_run(sub)
    add_device(sub)
    add_window(sub)


def run(args: argparse.Namespace) -> int:
    from ork import api
    from ork.build.cache import cached_pack
    from ork.measure import bench
    from ork.pack.reader import Pack

    if args.n_prompt < 0 or args.n_gen < 0 or args.repetitions < 1 or not args.n_prompt + args.n_gen:
        raise UsageError("give -p or -n a positive number of tokens, and -r at least 1")
    check_threads(args.threads)
    options = window_options(args)
    path = resolve(args.model)
    with progress_bar("converting") as progress:
        pack = cached_pack(
            path, first_run_recipe(args, path), max_ram=parse_size(args.max_ram), progress=progress, announce=say
        )
    need = max(args.n_prompt, args.n_gen)
    with api.LoadedModel(
        Pack.open(pack),
        device=args.device,
        threads=args.threads,
        context=need,
        kv=None,
        min_rows=args.min_rows,
        preload=True,
        **options,
    ) as model:
        if args.output == "md":
            say_ready(model)
        results = []
        if args.n_prompt:
            results.append(bench.prefill(model.engine, args.n_prompt, args.repetitions))
        if args.n_gen:
            results.append(bench.decode(model.engine, args.n_gen, args.repetitions))
        check_eager(model)
        if args.output == "md":
            say_window(model)
        config, size = model.model.config, model.pack.nbytes
        about = {
            "model": path.name,
            "arch": config.arch,
            "codec": model.pack.recipe.get("name"),
            "size_bytes": size,
            "device": model.device.name,
            "isa": model.device.isa,
            "threads": model.device.threads,
            **window_facts(model),
            **ready_facts(model),
        }
    if args.output == "json":
        rows = [
            {**about, "test": r.test, "avg_ts": r.mean, "stddev_ts": r.deviation, "samples_ts": r.rates}
            for r in results
        ]
        print(json.dumps(rows, indent=1))
        return 0
    print("| model | size | codec | device | threads | test | t/s |")
    print("|---|---:|---|---|---:|---:|---:|")
    for r in results:
        print(
            f"| {about['arch']} {path.stem} | {size_text(size)} | {about['codec']} | "
            f"{about['device']} {about['isa']} | {about['threads']} | {r.test} | {r.mean:.2f} ± {r.deviation:.2f} |"
        )
    return 0
