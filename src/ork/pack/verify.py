"""`ork verify` and `ork inspect` as plain data."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from ork.pack.format import SECTIONS, VERSION
from ork.pack.metadata import MetaValue
from ork.pack.reader import Pack
from ork.strings import StringTable

STRING_SHOWN = 200  # characters of a metadata string


def verify(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> str:
    """Check every byte of a pack and give its digest. Raises what `Pack.open` and `Pack.verify` raise."""
    with Pack.open(path) as pack:
        pack.verify(progress)
        return pack.digest


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All that a pack says about itself, in types that JSON holds; reads no slice."""
    with Pack.open(path) as pack:
        raw = set(pack.raw_names())
        tensors = [_tensor(pack, name) for name in pack.names() if name not in raw]
        codecs: dict[str, dict[str, Any]] = defaultdict(lambda: {"tensors": 0, "weights": 0, "bytes": 0})
        for t in tensors:
            total = codecs[t["codec"]]
            total["tensors"] += 1
            total["weights"] += t["weights"]
            total["bytes"] += t["bytes"]
        for total in codecs.values():
            total["bits_per_weight"] = _bits(total)
        every = {key: sum(c[key] for c in codecs.values()) for key in ("weights", "bytes")}
        return {
            "path": pack.path,
            "version": VERSION,
            "bytes": pack.nbytes,
            "digest": pack.digest,
            "architecture": pack.metadata.get("general.architecture"),
            "weights": every["weights"],
            "weight_bytes": every["bytes"],
            "bits_per_weight": _bits(every),
            "codecs": dict(codecs),
            "tensors": tensors,
            "raw": [_raw(pack, name) for name in pack.raw_names()],
            "sections": {name: pack.section_span(name)[1] for name in SECTIONS},
            "metadata": {key: summary(value) for key, value in pack.metadata.items()},
            "recipe": pack.recipe,
            "provenance": pack.provenance,
            "notes": pack.notes(),
        }


def summary(value: MetaValue) -> Any:
    """A metadata value as it is, or what kind of array or long string it is."""
    if isinstance(value, StringTable):
        return {"array": "str", "length": len(value)}
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "length": len(value)}
    if isinstance(value, list):
        return {"array": "mixed", "length": len(value)}
    if isinstance(value, str) and len(value) > STRING_SHOWN:
        return {"string": value[:STRING_SHOWN], "length": len(value)}
    return value


def _bits(total: dict[str, Any]) -> float:
    return 8 * total["bytes"] / total["weights"] if total["weights"] else 0.0


def _tensor(pack: Pack, name: str) -> dict[str, Any]:
    t = pack.tensor(name)
    row = {"weights": t.N * t.K, "bytes": sum(s.nbytes for s in t.slices)}
    return {
        "name": name,
        "codec": t.codec,
        "shape": [t.N, t.K],
        "slices": len(t.slices),
        **row,
        "bits_per_weight": _bits(row),
        "rotation": t.rotation,
        "mix": t.mix,
        "group": t.group,
        "act_group": t.act_group,
        "layer": t.layer,
        "expert": t.expert,
        "content": pack.content(name),
    }


def _raw(pack: Pack, name: str) -> dict[str, Any]:
    dtype, shape, nbytes = pack.raw_type(name)
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": nbytes, "content": pack.content(name)}
