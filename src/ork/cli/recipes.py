"""How a subcommand is told the recipe: a name or file, and changes to it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.quant.recipe import Recipe
    from ork.sources.base import Source

DEFAULT = "int8"


def add_recipe(sub: argparse.ArgumentParser) -> None:
    named = sub.add_mutually_exclusive_group()
    named.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="how weights are stored: int8 (default), mixed, small, i4, nf4, f16, f32, or ./x.toml (docs/recipes.md)",
    )
    named.add_argument("--codec", metavar="CODEC", help="one codec throughout: i8, i4, nf4, f16, f32")
    sub.add_argument("--group", type=int, metavar="N", help="inputs per weight scale of i4, nf4, int8: 32, 64 or 128")
    sub.add_argument("--act-group", type=int, metavar="N", help="inputs per activation scale of int8: 32, 64 or 128")
    sub.add_argument(
        "--rotation", choices=("none", "block", "mix"), help="Hadamard rotation of inputs (mix for 4 bits, else block)"
    )
    sub.add_argument("--no-rotate", action="store_true", help="the same as --rotation none, to compare")
    sub.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="REGEX=CODEC[:GROUP]",
        help="store tensors whose name the expression is found in like this; may be repeated, the first match counts",
    )
    sub.add_argument(
        "--tiers-from",
        type=Path,
        metavar="REF.gguf",
        help="int8 where this file of the same model has five bits or more, else the recipe's 4 bits (default: nf4:64)",
    )


def recipe_of(args: argparse.Namespace, source: Source) -> Recipe:
    """The recipe that the options ask for. Raises UsageError, SourceError."""
    from ork.build.tiers import tiers_from
    from ork.quant.recipe import builtin, from_toml, tensor_type

    rules = [tensor_type(text) for text in args.tensor_type]
    name = args.recipe or args.codec
    group, act_group = args.group or 0, args.act_group or 0
    if name is None and args.tiers_from:
        name, group = "nf4", group or 64
    if args.recipe and re.search(r"[./\\]", args.recipe):
        if group or act_group:
            raise UsageError("--group and --act-group go with a codec by name; a recipe file has its own")
        recipe = from_toml(Path(args.recipe))
    else:
        recipe = builtin(name or DEFAULT, group=group, act_group=act_group)
    if args.tiers_from:
        recipe = tiers_from(args.tiers_from, source, recipe)
    recipe = recipe.but(rules)
    rotation = "none" if args.no_rotate else args.rotation
    return recipe.rotated(rotation) if rotation else recipe
