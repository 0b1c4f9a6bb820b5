"""The allocation of a reference file: what it stores in five bits or more becomes int8, the rest four bits.

Only the reference's header is read: the numbers come from the source, the reference says which tensors are worth more.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ork.build.convert import INT8_BITS, effective_bits, is_weight
from ork.errors import UsageError
from ork.quant.recipe import Recipe, exactly, named, usual
from ork.sources.base import Source, open_source
from ork.tiles import K_ALIGN


def tiers_from(reference: Path, source: Source, base: Recipe) -> Recipe:
    """`base`, whose default is a 4-bit codec, with int8 for every tensor that the reference stores in five bits or
    more, that it does not have, or whose inputs fill no tile of the chip.

    Raises SourceError for a file that is no model; UsageError for another model, or a base that is not of 4 bits.
    """
    if not base.default.four_bit:
        raise UsageError(f"--tiers-from shares tensors between int8 and 4 bits: {base.name} has no 4-bit default")
    with contextlib.closing(open_source(reference)) as other:
        known = {t.name: t for t in other.tensors.values() if is_weight(t)}
    weights = [t for t in source.tensors.values() if is_weight(t)]
    for t in weights:
        if t.name in known and known[t.name].shape != t.shape:
            shapes = " and ".join(" x ".join(map(str, shape)) for shape in (known[t.name].shape, t.shape))
            raise UsageError(f"{reference}: not the same model: {t.name} is {shapes}")
    if not any(t.name in known for t in weights):
        raise UsageError(f"{reference}: not the same model: none of its tensors has a name of {source.path}'s")
    fine = [
        t.name
        for t in weights
        if t.name not in known or effective_bits(known[t.name]) >= INT8_BITS or t.columns % K_ALIGN
    ]
    int8 = usual("i8", rotation=base.default.rotation)
    return Recipe(named(base.name, "-tiers"), base.default, (*base.rules, *((exactly(name), int8) for name in fine)))
