"""A layer of many experts beside a dense feed-forward of the same work, in one run.

    python bench/experts.py [--experts 128] [--used 8] [--width 2048] [--inner 768] [--codec nf4] [--group 32]
                            [--rows 1 8 64 512] [--threads 2] [--json FILE] [--cpu-time] [--profile]

Random weights. The dense layer's inner width is used x inner: with one row both read the same bytes and do the same
products. Layers of both kinds are cycled through until more than 1 GiB of weights has passed, so that none is in a
cache; rounds of the two alternate. --profile shows the share of each part of the sparse layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ork import native, tiles
from ork.devices.base import SliceSpec
from ork.devices.cpu import CpuDevice
from ork.ops import Ops
from ork.quant import rotation
from ork.residency.stream import Stream, TensorSpec

WEIGHT_BYTES = 1 << 30
ROUNDS = 5
PARTS = ("linear", "route", "quantise", "gather_rows", "linear_experts", "gate_experts", "weighted_sum", "gate")


class RandomSource:
    """Weights of random codes and scales near 1 / (100 sqrt K); routers of f32."""

    metadata: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, shapes: dict[str, tuple[int, int]], codec: str, group: int):
        rng = np.random.default_rng(0)
        self.specs: dict[str, TensorSpec] = {}
        self.blobs: dict[tuple[str, int], np.ndarray] = {}
        for name, (N, K) in shapes.items():
            c, g = ("f32", 0) if "ffn_gate_inp" in name else (codec, group)
            block = rotation.fields_of(K, "block")[0] if c != "f32" else 0
            slices = []
            for i, (n0, n1) in enumerate(tiles.slice_columns(c, K, N, g)):
                layout = tiles.slice_layout(c, K, n1 - n0, g)
                blob = np.empty(layout.nbytes + 4096, np.uint8)
                blob = blob[-blob.ctypes.data % 4096 :][: layout.nbytes]
                blob[:] = np.resize(rng.integers(0, 256, 1 << 16, np.uint8), layout.nbytes)
                if c == "f32":
                    blob.view(np.float32)[:] = rng.standard_normal(layout.nbytes // 4) / np.sqrt(K)
                else:
                    part = layout.channel
                    blob[part.offset : part.offset + part.nbytes].view(np.float32)[:] = 0.01 / np.sqrt(K)
                    part = layout.groups
                    blob[part.offset : part.offset + part.nbytes].view(np.float16)[:] = 1.0
                self.blobs[name, i] = blob
                slices.append(SliceSpec(name, c, K, tiles.pad_k(K), tiles.ks_of(tiles.pad_k(K), g), n0, n1, g, g))
            self.specs[name] = TensorSpec(name, c, N, K, block, g, tuple(slices))

    def __contains__(self, name: str) -> bool:
        return name in self.specs

    def spec(self, name: str) -> TensorSpec:
        return self.specs[name]

    def blob(self, name: str, index: int) -> np.ndarray:
        return self.blobs[name, index]

    def raw(self, name: str) -> np.ndarray:
        return np.asarray(rotation.derived(name))

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.blobs.values())


def layers(a: argparse.Namespace) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Shapes of sparse and dense layers, enough of each to pass WEIGHT_BYTES with one row."""
    bits = tiles.CODECS[a.codec].bits + (16 / a.group if a.group else 0)
    dense_bytes = 3 * a.width * a.inner * a.used * bits / 8
    sparse, dense = (
        max(2, int(WEIGHT_BYTES // (dense_bytes * a.experts / a.used)) + 1),
        int(WEIGHT_BYTES // dense_bytes),
    )
    shapes = {}
    for i in range(sparse):
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = (a.experts, a.width)
        for part, n, k in (("gate", a.inner, a.width), ("up", a.inner, a.width), ("down", a.width, a.inner)):
            shapes |= {f"blk.{i}.ffn_{part}_exps.weight#{e}": (n, k) for e in range(a.experts)}
    for i in range(dense):
        inner = a.used * a.inner
        shapes |= {f"blk.{i}.ffn_{p}.weight": (n, k) for p, n, k in
                   (("gate", inner, a.width), ("up", inner, a.width), ("down", a.width, inner))}  # fmt: skip
    return shapes, sparse, dense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("experts", 128),
        ("used", 8),
        ("width", 2048),
        ("inner", 768),
        ("group", 32),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--codec", default="nf4")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="the process's own time: right with one thread")
    parser.add_argument("--profile", action="store_true")
    a = parser.parse_args()
    clock = time.process_time if a.cpu_time else time.perf_counter
    shapes, sparse_count, dense_count = layers(a)
    device = CpuDevice(a.threads)
    ops = Ops(Stream(RandomSource(shapes, a.codec, a.group), device), device)  # type: ignore[arg-type]
    routers = [ops.weight(f"blk.{i}.ffn_gate_inp.weight", a.experts, a.width) for i in range(sparse_count)]
    experts = [ops.experts_of(i, a.experts, a.width, a.inner) for i in range(sparse_count)]
    inner = a.used * a.inner
    gates = [ops.weight(f"blk.{i}.ffn_gate.weight", inner, a.width) for i in range(dense_count)]
    ups = [ops.weight(f"blk.{i}.ffn_up.weight", inner, a.width) for i in range(dense_count)]
    downs = [ops.weight(f"blk.{i}.ffn_down.weight", a.width, inner) for i in range(dense_count)]

    def sparse(i: int, x: native.Array) -> None:
        i %= sparse_count
        ops.experts(x, ops.route(i, ops.linear(x, routers[i])[0], a.used), experts[i], "silu")

    def dense(i: int, x: native.Array) -> None:
        i %= dense_count
        g, u = ops.linear(x, gates[i], ups[i])
        ops.linear(ops.gate("silu", g, u), downs[i])

    if a.profile:
        times = profile()
    rng = np.random.default_rng(1)
    results: list[dict[str, Any]] = []
    how = f"{a.codec} group {a.group}, {native.isa()}, {a.threads} threads"
    print(f"{a.experts} experts of {a.width} x {a.inner}, {a.used} a row, {how}")
    for m in a.rows:
        count = max(1, min(dense_count, 64 // m))
        xs = [native.Array.of(rng.standard_normal((m, a.width)).astype(np.float32)) for _ in range(count)]
        kinds: dict[str, Callable[[int, native.Array], None]] = {"sparse": sparse, "dense": dense}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for r in range(ROUNDS + 1):
            if a.profile:
                times.clear()
            for kind, work in kinds.items():
                start = clock()
                for i, x in enumerate(xs):
                    work(r * count + i, x)
                seconds[kind].append((clock() - start) / count)
                if a.profile and kind == "sparse":
                    shown = ", ".join(f"{k} {1e3 * v / count:.3f}" for k, v in times.items())
        best = {kind: min(s[1:]) for kind, s in seconds.items()}
        median = {kind: statistics.median(s[1:]) for kind, s in seconds.items()}
        results.append({"rows": m, "best": best, "median": median})
        print(
            f"M = {m}: sparse {1e3 * best['sparse']:.3f} ms, dense {1e3 * best['dense']:.3f} ms a layer, "
            f"dense / sparse {best['dense'] / best['sparse']:.2f} (medians {median['dense'] / median['sparse']:.2f})"
        )
        if a.profile:
            print("   ms:", shown)
    if a.json:
        a.json.write_text(
            json.dumps({"arguments": {k: str(v) for k, v in vars(a).items()}, "results": results}, indent=1)
        )


def profile() -> Counter[str]:
    """Seconds in each native call from now on."""
    times: Counter[str] = Counter()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                times[name] += time.perf_counter() - start

        return timing

    for name in PARTS:
        setattr(native, name, timed(name, getattr(native, name)))
    return times


if __name__ == "__main__":
    main()
