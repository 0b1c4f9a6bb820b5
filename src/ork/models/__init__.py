"""Architectures by the name that GGUF gives them, one file each."""

from __future__ import annotations

from typing import Any

from ork.errors import SourceError
from ork.models.config import Config, read_config
from ork.models.gemma3 import Gemma3
from ork.models.granitemoe import GraniteMoe
from ork.models.layers import Model, Rows
from ork.models.lfm2moe import Lfm2Moe
from ork.models.llama import Llama
from ork.models.olmoe import Olmoe
from ork.models.qwen2 import Qwen2
from ork.models.qwen2moe import Qwen2Moe
from ork.models.qwen3 import Qwen3
from ork.models.qwen3moe import Qwen3Moe
from ork.ops import Ops
from ork.residency.stream import TensorSpec, with_experts

Architecture = type[Llama] | type[Gemma3] | type[Lfm2Moe]

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
    "qwen2moe": Qwen2Moe,
    "qwen3moe": Qwen3Moe,
    "olmoe": Olmoe,
    "granitemoe": GraniteMoe,
    "lfm2moe": Lfm2Moe,
}

__all__ = [
    "ARCHITECTURES",
    "Config",
    "Model",
    "Rows",
    "build",
    "check_architecture",
    "cycle",
    "order_of_pass",
    "traits",
]


def check_architecture(arch: object) -> Architecture:
    """The class for `arch`; SourceError naming the known ones if there is none."""
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise SourceError(f"architecture {str(arch)[:60]!r} is not supported; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def order_of_pass(ops: Ops) -> list[TensorSpec]:
    """The weights of a model that was just built in the order in which a pass reads them: layer by layer, each in the
    order in which its blocks were made, its routed experts behind them, the head last."""
    return with_experts(_dense(ops), ops.expert_layers)


def _dense(ops: Ops) -> list[TensorSpec]:
    layers = {t.name: int(t.name.split(".")[1]) for t in ops.weights if t.name.startswith("blk.")}
    return sorted({t.name: t for t in ops.weights}.values(), key=lambda t: layers.get(t.name, len(ops.weights)))


def cycle(ops: Ops) -> list[TensorSpec]:
    """What passes multiply with, over and over, from the head on: of a window too small for all, the head is the first
    to stay. A prefill computes it for one row, so that nothing would hide its transfer; those of layers are hidden.

    Without routed experts, whose order is not known. An embedding that is not the head too is only looked up, a few
    columns at a time.
    """
    head = "output.weight" if "output.weight" in ops.source else "token_embd.weight"
    order = [t for t in _dense(ops) if t.name == head or t.name != "token_embd.weight"]
    return sorted(order, key=lambda t: t.name != head)


def build(ops: Ops) -> Model:
    """The model that `ops.source` holds. Raises SourceError or PackError naming what does not fit."""
    source = ops.source
    cls = check_architecture(source.metadata.get("general.architecture"))
    config = read_config(
        source.metadata,
        vocab=source.spec("token_embd.weight").N,
        tied="output.weight" not in source,
        **traits(cls),
    )
    return cls(ops, config)


def traits(cls: Architecture) -> dict[str, Any]:
    """What `read_config` must know of an architecture."""
    return {
        name: getattr(cls, name) for name in ("default_pattern", "local_base", "moe", "mixed") if hasattr(cls, name)
    }
