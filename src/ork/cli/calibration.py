"""The text that a subcommand calibrates with, and recipes that are found by measuring."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ork.cli.common import parse_size, say, size_text, step_bar
from ork.cli.measuring import read_text
from ork.cli.recipes import command_line_rules, recipe_of
from ork.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ork.build.allocate import Allocation, Measurements
    from ork.build.convert import Aids
    from ork.quant.recipe import Recipe
    from ork.sources.base import Source

SMALL_BPW = 4.5
BPW = (4.25, 8.5)
DEFAULT_ROTATION = "mix"
OWN_TEXT = "calibrating on the text that comes with ork (from Botchan, by Natsume Soseki)"


def add_allocation(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--target-bpw", type=float, metavar="X", help=f"codecs by measurement, X bits a weight ({BPW[0]} to {BPW[1]})"
    )
    sub.add_argument(
        "--promote-budget", type=float, metavar="MB", help="int8 for the tensors of a 4-bit recipe that need it most"
    )
    sub.add_argument(
        "--measurements", type=Path, metavar="FILE", help="keep what is measured in this file; read it if it is there"
    )


def calibration(file: Path | None) -> tuple[str, str]:
    """The text to calibrate with, and its name. Raises UsageError if the file cannot be read."""
    from ork.build.importance import calibration_text

    return (calibration_text(), "botchan") if file is None else (read_text(file), file.name)


def measured(args: argparse.Namespace) -> bool:
    """Whether the recipe is to be found by measuring. Raises UsageError for options that do not go together."""
    from ork.quant.recipe import MEASURED

    named = args.recipe in MEASURED
    if args.target_bpw is not None:
        if not BPW[0] <= args.target_bpw <= BPW[1]:
            raise UsageError(f"--target-bpw {args.target_bpw:g}: give a number from {BPW[0]} to {BPW[1]}")
        if args.codec or args.recipe not in (None, "mixed"):
            raise UsageError("--target-bpw chooses the codecs: it goes with no other recipe")
    if args.promote_budget is not None:
        if not 0 < args.promote_budget < 1 << 20:
            raise UsageError(
                f"--promote-budget {args.promote_budget:g}: give megabytes, more than 0 and less than 2^20"
            )
        if named or args.target_bpw is not None:
            raise UsageError("--promote-budget is on top of a 4-bit recipe: mixed and small have a budget of their own")
        return True
    by_budget = named or args.target_bpw is not None
    if args.measurements is not None and not by_budget:
        raise UsageError("--measurements goes with a recipe that is found by measuring: mixed, small or --target-bpw")
    if by_budget and (args.group or args.act_group or args.tiers_from):
        raise UsageError("--group, --act-group and --tiers-from do not go with a recipe that is found by measuring")
    return by_budget


def measured_recipe(
    args: argparse.Namespace, source: Source, aids: Aids, calibration: tuple[str, str], waiting: Path
) -> Recipe:
    """The recipe for the budget that the options name, and a line about it; `calibration` is a text and its name. What
    is measured is kept in `waiting`, unless --measurements names another file."""
    from ork.build.calibrate import tokens_of
    from ork.build.convert import check_requantising, is_weight, plan_pack
    from ork.build.sensitivity import calibration_tokens
    from ork.quant.recipe import builtin
    from ork.text.tokenizer import Tokenizer, build_tokenizer

    mode = "none" if args.no_rotate else args.rotation or DEFAULT_ROTATION
    rules = command_line_rules(args, source)
    if args.promote_budget is not None:
        base = recipe_of(args, source)
        modes = [
            c.rotation for c in (base.choose(t.name) for t in source.tensors.values() if is_weight(t)) if c.four_bit
        ]
        if not modes:
            raise UsageError(f"--promote-budget makes int8 of 4 bits, of which recipe {base.name} has none")
        mode = modes[0]
    else:
        base = builtin("nf4", group=64).rotated(mode).but(rules)
    if not args.allow_requantize:
        check_requantising(source, base)
    gptq = args.gptq or base.calibrated
    if args.calibrate_tokens is not None and not gptq:
        raise UsageError("--calibrate-tokens is how much of a text GPTQ looks at: it goes with --gptq")
    text, name = calibration
    if args.calibrate is None:
        say(OWN_TEXT)
    tokenizer = Tokenizer.load(build_tokenizer(source.metadata))
    tokens = calibration_tokens(tokenizer, text)
    if gptq:  # what would keep the pack from being made is told before the measuring
        tokens_of(tokenizer, text, gptq_tokens(args))
    if aids.importance:
        plan_pack(source, base.with_importance(), tokenizer=b"", aids=replace(aids, calibration={}))
    found = _measurements(args, source, tokens, mode, waiting).fixed(base, [pattern for pattern, _ in rules])
    if args.promote_budget is not None:
        allocation = found.promote(base, int(args.promote_budget * 1e6))
    elif args.target_bpw is not None:
        allocation = found.allocate(found.bytes_at(args.target_bpw), f"mixed-{args.target_bpw:g}bpw")
    elif args.recipe == "small":
        allocation = found.allocate(found.bytes_at(SMALL_BPW), "small")
    else:
        allocation = found.allocate(found.q4_k_m_bytes(), "mixed")
    say(f"measured {found.tokens} tokens of {name}: {allocation_text(allocation)}")
    recipe = allocation.recipe()
    return recipe if args.promote_budget is not None else recipe.but(rules)


def gptq_tokens(args: argparse.Namespace) -> int:
    """How much of a text GPTQ looks at."""
    from ork.build.calibrate import DEFAULT_TOKENS

    return DEFAULT_TOKENS if args.calibrate_tokens is None else int(args.calibrate_tokens)


def _measurements(
    args: argparse.Namespace, source: Source, tokens: npt.NDArray[np.int32], mode: str, waiting: Path
) -> Measurements:
    """Those of --measurements, or of a conversion that did not end, or made now and kept in such a file."""
    from ork.build.measurements import load, recall, save, subject_of
    from ork.build.sensitivity import measure
    from ork.files import check_folder

    subject = subject_of(source, tokens, mode)
    found = load(args.measurements, subject) if args.measurements else recall(waiting, subject)
    if found is None:
        file = args.measurements or waiting
        check_folder(file)
        with step_bar("measuring") as progress:
            found = measure(
                source, tokens, mode=mode, threads=args.threads, max_ram=parse_size(args.max_ram), progress=progress
            )
        save(file, subject, found)
    elif not args.measurements:
        say("going on with what the conversion before has measured")
    return found


def allocation_text(allocation: Allocation) -> str:
    """What a budget was spent on."""
    count: dict[str, int] = {}
    for option in allocation.chosen:
        count[option.codec] = count.get(option.codec, 0) + 1
    tensors = ", ".join(f"{n} {codec}" for codec, n in sorted(count.items(), key=lambda item: -item[1]))
    return (
        f"{tensors}; weights of {size_text(allocation.nbytes)} ({allocation.bpw:.2f} bits each), "
        f"expected KL divergence {allocation.kl:.3g}"
    )
