"""The `.orkpack` file: the whole model in one hashed, self-describing file. See `docs/pack-format.md`."""

from ork.pack.metadata import MetaValue
from ork.pack.notes import write_note
from ork.pack.plan import PackPlan, RawPlan, SliceInfo, TensorPlan
from ork.pack.reader import Pack, Tensor
from ork.pack.verify import inspect, verify
from ork.pack.writer import PackWriter

__all__ = [
    "MetaValue",
    "Pack",
    "PackPlan",
    "PackWriter",
    "RawPlan",
    "SliceInfo",
    "Tensor",
    "TensorPlan",
    "inspect",
    "verify",
    "write_note",
]
