"""Bounded readers of foreign model files behind one `Source`: metadata, tensors, rows as f32."""

from ork.sources.base import MetaValue, Source, TensorInfo, open_source

__all__ = ["MetaValue", "Source", "TensorInfo", "open_source"]
