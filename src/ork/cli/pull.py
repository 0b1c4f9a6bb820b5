"""`ork pull`: fetches a model and prints where it lies."""

from __future__ import annotations

import argparse

from ork.cli.common import transfer_progress


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="NAME", nargs="?", help="a named model, hf:OWNER/REPO[:QUANT], or a path")
    sub.add_argument("--list", action="store_true", help="list the named models")


def run(args: argparse.Namespace) -> int:
    from ork.errors import UsageError
    from ork.sources import hub

    if args.list:
        for model in hub.MODELS:
            print(f"{model.name:22} {model.nbytes / 2**20:7.0f} MiB  {model.licence:14} {model.description}")
        return 0
    if not args.model:
        raise UsageError("name a model to pull, or give --list")
    with transfer_progress() as progress:
        print(hub.pull(args.model, progress=progress))
    return 0
