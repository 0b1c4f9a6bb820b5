"""Builds the model from the plan of its pack, before a byte of it is written: what does not fit is found now.

Every tensor that the architecture needs must be there in the shape that the metadata implies, and every tensor that is
there must have been asked for: a weight that a model silently leaves out would make it another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from ork import models, tiles
from ork.devices.base import Device, SliceSpec
from ork.errors import SourceError
from ork.ops import Ops
from ork.pack.plan import PackPlan, TensorPlan
from ork.quant import rotation
from ork.residency.stream import Stream, TensorSpec
from ork.sources.base import Source

UNUSED = ("rope_freqs.weight",)  # Llama's divisors: some converters write them for models that do without


class PlannedSource:
    """A SliceSource of a plan: shapes from the plan, small tensors from the source, no slices yet."""

    def __init__(self, plan: PackPlan, source: Source):
        self.source = source
        self.tensors = {t.name: t for t in plan.tensors}
        self.raws = {r.name: r for r in plan.raws}

    @property
    def metadata(self) -> Mapping[str, object]:
        return self.source.metadata

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self.raws

    def spec(self, name: str) -> TensorSpec:
        t: TensorPlan | None = self.tensors.get(name)
        if t is None:
            raise SourceError(f"tensor {name} is missing: the file is not a complete model")
        N, K = t.shape
        slices = tuple(
            SliceSpec(name, t.codec, K, tiles.pad_k(K), tiles.ks_of(tiles.pad_k(K), t.group), n0, n1, t.group)
            for n0, n1 in tiles.slice_columns(t.codec, K, N, t.group)
        )
        return TensorSpec(name, t.codec, N, K, t.rotation, t.act_group, slices, t.mix)

    def blob(self, name: str, index: int) -> npt.NDArray[np.uint8]:
        raise NotImplementedError("a plan has no slices")

    def read_into(self, name: str, index: int, memory: npt.NDArray[np.uint8]) -> int:
        raise NotImplementedError("a plan has no slices")

    def read_run(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        return [self.read_into(*item) for item in items]

    def cached(self, name: str, index: int) -> bool:
        return False

    def copy(self, items: Sequence[tuple[str, int, npt.NDArray[np.uint8]]]) -> list[int]:
        return self.read_run(items)

    def expect(self, name: str, index: int, start: int, nbytes: int) -> None:
        """Nothing: what has just been converted is in memory."""

    def read_part(self, name: str, index: int, start: int, memory: npt.NDArray[np.uint8]) -> None:
        raise NotImplementedError("a plan has no slices")

    def raw(self, name: str) -> npt.NDArray[np.generic]:
        r = self.raws.get(name)
        if r is None:
            raise SourceError(f"tensor {name} is missing: the file is not a complete model")
        derived = rotation.derived(name)
        if derived is not None:
            return derived
        values = self.source.rows(name, 0, self.source.tensors[name].rows).reshape(r.shape)
        if not np.isfinite(values).all():
            raise SourceError(f"tensor {name} holds a value that is not finite")
        return values


def check_model(plan: PackPlan, source: Source) -> list[TensorSpec]:
    """The weights in the order of a pass.

    Raises SourceError naming the tensor that is missing, of the wrong shape, or of no use to the architecture.
    """
    planned = PlannedSource(plan, source)
    nowhere = cast(Device, None)  # building a model places nothing
    ops = Ops(Stream(planned, nowhere), nowhere)
    try:
        models.build(ops)
    except SourceError as error:
        raise SourceError(f"{source.path}: {error}") from None
    arch = source.metadata.get("general.architecture")
    for name in (*planned.tensors, *(raw for raw in planned.raws if raw in source.tensors)):
        if name not in ops.used and name not in UNUSED:
            raise SourceError(
                f"{source.path}: tensor {name} has no place in the architecture {arch}: this is a variant of it that "
                "ork does not know"
            )
    return models.order_of_pass(ops)
