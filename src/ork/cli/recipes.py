"""How a subcommand is told the recipe: a name or file, and changes to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.quant.recipe import Choice, Recipe
    from ork.sources.base import Source

DEFAULT = "int8"


def add_recipe(sub: argparse.ArgumentParser) -> None:
    """What `ork convert` takes; `recipe_of` and `calibration.measured_recipe` make a recipe of it."""
    _add_name(
        sub, "how weights are stored: int8 (default), mixed, small, i4, nf4, f16, f32, or ./x.toml (docs/recipes.md)"
    )
    sub.add_argument("--group", type=int, metavar="N", help="inputs per weight scale of i4, nf4, int8: 32, 64 or 128")
    sub.add_argument("--act-group", type=int, metavar="N", help="inputs per activation scale of int8: 32, 64 or 128")
    rotation = sub.add_mutually_exclusive_group()
    rotation.add_argument(
        "--rotation", choices=("none", "block", "mix"), help="Hadamard rotation of inputs (mix for 4 bits, else block)"
    )
    rotation.add_argument("--no-rotate", action="store_true", help="the same as --rotation none, to compare")
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


def _add_name(sub: argparse.ArgumentParser, text: str) -> None:
    named = sub.add_mutually_exclusive_group()
    named.add_argument("--recipe", metavar="NAME|FILE", help=text)
    named.add_argument("--codec", metavar="CODEC", help="one codec throughout: i8, i4, nf4, f16, f32")


def add_first_run(sub: argparse.ArgumentParser) -> None:
    """For a model that is no pack: how it is converted on the way, into the cache."""
    _add_name(sub, "for a model that is converted on the way: int8 (default), i4, nf4, f16, f32, or ./x.toml")
    sub.add_argument("--no-rotate", action="store_true", help="likewise: without the Hadamard rotation, to compare")
    sub.add_argument("--max-ram", default="2G", metavar="SIZE", help="memory for that conversion (default: 2G)")


def first_run_recipe(args: argparse.Namespace, path: Path) -> Recipe:
    """The recipe of `add_first_run`'s options. Raises UsageError; also for a pack, which has a recipe already, and for
    one that is found by measuring."""
    from ork.build.cache import is_pack
    from ork.quant.recipe import by_name_or_file

    name = args.recipe or args.codec
    if (name or args.no_rotate) and path.is_file() and is_pack(path):
        option = "--recipe" if args.recipe else "--codec" if args.codec else "--no-rotate"
        raise UsageError(f"{path}: a pack is as it was made: {option} is for a model that is converted on the way")
    recipe = by_name_or_file(name or DEFAULT)
    return recipe.rotated("none") if args.no_rotate else recipe


def recipe_of(args: argparse.Namespace, source: Source) -> Recipe:
    """The recipe that the options ask for. Raises UsageError, SourceError."""
    from ork.build.tiers import tiers_from
    from ork.quant.recipe import by_name_or_file

    rules = command_line_rules(args, source)
    name = args.recipe or args.codec
    group, act_group = args.group or 0, args.act_group or 0
    if name is None and args.tiers_from:
        name, group = "nf4", group or 64
    recipe = by_name_or_file(name or DEFAULT, group=group, act_group=act_group)
    if args.tiers_from:
        recipe = tiers_from(args.tiers_from, source, recipe)
    recipe = recipe.but(rules)
    rotation = "none" if args.no_rotate else args.rotation
    turned = recipe.rotated(rotation) if rotation else recipe
    if args.rotation and not any(c.rotation == rotation for c in (turned.default, *(c for _, c in turned.rules))):
        raise UsageError(f"--rotation {rotation}: recipe {recipe.name} has no codec that is rotated")
    return turned


def command_line_rules(args: argparse.Namespace, source: Source) -> list[tuple[str, Choice]]:
    """The rules of `--tensor-type`. Raises UsageError, also for one that names no matrix of the source."""
    from ork.build.convert import is_weight
    from ork.quant.recipe import builtin, tensor_type

    rules = [tensor_type(text) for text in args.tensor_type]
    for pattern in builtin(DEFAULT).but(rules).idle(t.name for t in source.tensors.values() if is_weight(t)):
        raise UsageError(
            f"--tensor-type: {pattern!r} names no matrix of {source.path}; `ork inspect --tensors` lists them"
        )
    return rules
