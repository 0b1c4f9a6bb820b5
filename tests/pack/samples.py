"""Small packs with every codec, a group, a rotation, experts, raw tensors and every kind of metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ork import tiles
from ork.pack import PackPlan, PackWriter, RawPlan, TensorPlan
from ork.strings import StringTable

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 1e6,
    "big": 2**64 - 1,
    "small": -(2**63),
    "half": float(np.float32(0.1)),
    "flag": True,
    "text": "naïve 日本語",
    "tokens": StringTable.of(["<s>", "", "▁a", b"\xff\xfe", "日本"]),
    "none": StringTable.of([]),
    "nested": [[1, 2], ["x", "y"], []],
    **{f"array.{t}": np.array([0, 1, 1], t) for t in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")},
    **{f"array.{t}": np.array([0, 1, 1], t) for t in ("<u8", "<i8", "<f8", "<f2")},
    "empty": np.array([], np.float32),
}
TENSORS = [
    TensorPlan("token_embd.weight", "i8", (300, 96), rotation=32, mix=3),
    TensorPlan("blk.0.attn_q.weight", "i4", (64, 128), group=32, act_group=32, layer=0),
    TensorPlan("blk.0.ffn_up.weight", "nf4", (100, 64), layer=0),
    TensorPlan("blk.1.gate.weight", "f32", (4, 40), layer=1),
    TensorPlan("blk.1.attn_k.weight", "f16", (65, 33), layer=1),
    *(
        TensorPlan(f"blk.1.{role}.{e}", "i8", (64, 64), layer=1, expert=e, role_order=order, act_group=32)
        for e in (1, 0)
        for order, role in enumerate(("gate", "up", "down"))
    ),
]
RAWS = [
    RawPlan("output_norm.weight", "f32", (96,)),
    RawPlan("rotation.signs.96", "i8", (96,)),
    RawPlan("rotation.mix.3", "f32", (3, 3)),
    RawPlan("cube", "u16", (2, 3, 5)),
    RawPlan("scalar", "f64", ()),
]


def sample_plan(**changes: Any) -> PackPlan:
    fields: dict[str, Any] = {
        "metadata": METADATA,
        "tokenizer": b'{"version": "1.0"}' * 300,
        "chat_template": "{% for m in messages %}ü{% endfor %}",
        "recipe": {"default": "i8", "rules": [1, 2.5, None]},
        "provenance": {"source": "0123abcd", "ork": "0.1"},
        **changes,
    }
    return PackPlan(fields.pop("tensors", TENSORS), fields.pop("raws", RAWS), **fields)


def parts_of(plan: PackPlan, entry: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Random (codes, channel, groups) of a slice, or (data,) of a raw tensor; padding is zero."""
    item, n0, n1 = plan.item(entry)
    rng = np.random.default_rng([seed, entry])
    if isinstance(item, RawPlan):
        return (rng.integers(0, 100, plan.nbytes(entry)).astype(np.uint8),)
    layout, (N, K) = plan.layout(entry), item.shape
    codec = layout.codec
    low, high = {"i8": (-127, 128), "i4": (-7, 8), "nf4": (0, 16)}.get(codec.name, (-99, 99))
    codes = rng.integers(low, high, (n1 - n0, layout.K)).astype(codec.dtype)
    columns = max(0, min(n1, N) - n0)
    codes[columns:] = 0
    codes[:, K:] = 0
    if not codec.scaled:
        return (codes,)
    channel = rng.random(n1 - n0).astype(np.float32)
    channel[columns:] = 0
    if not item.group:
        return codes, channel
    return codes, channel, rng.random((n1 - n0, layout.K // item.group)).astype(np.float16)


def blob_of(plan: PackPlan, entry: int, seed: int = 0) -> np.ndarray:
    parts = parts_of(plan, entry, seed)
    return parts[0] if isinstance(plan.item(entry)[0], RawPlan) else tiles.build_blob(plan.layout(entry), *parts)


def fill(writer: PackWriter, seed: int = 0, order: int | None = None) -> None:
    entries = list(writer.missing())
    if order is not None:
        np.random.default_rng(order).shuffle(entries)
    for entry in entries:
        writer.write(entry, blob_of(writer.plan, entry, seed))


def complete(writer: PackWriter, seed: int = 0, order: int | None = None) -> None:
    fill(writer, seed, order)
    writer.finish()


def write_sample(path: Path, plan: PackPlan | None = None, seed: int = 0, order: int | None = None) -> PackPlan:
    plan = plan or sample_plan()
    with PackWriter.open(path, plan) as writer:
        complete(writer, seed, order)
    return plan


def equal_metadata(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Same keys in the same order, same values of the same Python and array types."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(y, np.ndarray):
            return isinstance(x, np.ndarray) and x.dtype == y.dtype and np.array_equal(x, y)
        if isinstance(y, StringTable):
            return isinstance(x, StringTable) and [x.raw(i) for i in range(len(x))] == [y.raw(i) for i in range(len(y))]
        if isinstance(y, list):
            return len(x) == len(y) and all(same(p, q) for p, q in zip(x, y))
        return type(x) is type(y) and bool(x == y)

    return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
