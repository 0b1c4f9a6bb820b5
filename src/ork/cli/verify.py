"""`ork verify`: re-hashes everything in a pack."""

from __future__ import annotations

import argparse
from pathlib import Path

from ork.cli.common import progress_bar


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("pack", metavar="PACK", type=Path)


def run(args: argparse.Namespace) -> int:
    from ork.pack.verify import verify

    with progress_bar(args.pack.name) as progress:
        digest = verify(args.pack, progress)
    print(f"{args.pack}: whole, {digest}")
    return 0
