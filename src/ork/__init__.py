"""ork: large language models on RK3588 boards and on any CPU, bit for bit the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ork.api import LoadedModel, load

__version__ = "0.1.0"
__all__ = ["LoadedModel", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("load", "LoadedModel"):
        from ork import api

        return getattr(api, name)
    raise AttributeError(f"module 'ork' has no attribute {name!r}")
