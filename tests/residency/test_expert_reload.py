"""Every expert of a pack, reloaded: what the NPU multiplies is what was packed; an index costs no object an entry."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import ork
from ork import tiles
from ork.cli.main import main
from ork.pack.plan import PackPlan, TensorPlan
from ork.pack.reader import Pack
from ork.pack.writer import PackWriter
from tests import tiny

EXPERTS = 8


@pytest.mark.parametrize("codec", ["i8", "nf4"])
def test_every_reloaded_expert_equals_the_integers_that_were_packed(
    tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exact int32 sums of the emulated NPU, expert by expert, against numpy on the codes of the file."""
    path = tiny.moe_gguf(tmp_path / "moe.gguf", experts=EXPERTS)
    assert main(["convert", str(path), "--codec", codec]) == 0
    rng = np.random.default_rng(3)
    with ork.load(path.with_suffix(".orkpack"), device="emu", threads=1) as model:
        pack = model.pack
        assert isinstance(pack, Pack)
        layers = model.stream.expert_layers
        names = [t.name for layer in layers for e in range(EXPERTS) for t in layer.tensors(e)]
        assert len(set(names)) == 3 * EXPERTS * len(layers)
        assert all(name in pack for name in names), "all experts are in the pack, routed to or not"
        for name in names:
            spec = model.source.spec(name)
            for index, piece in enumerate(spec.slices):
                blob = model.source.blob(name, index)
                n = tiles.pad_n(piece.n1 - piece.n0)
                layout = tiles.slice_layout(piece.codec, piece.K, n, piece.group)
                codes, _, _ = tiles.unpack_blob(layout, blob)
                levels = LEVELS[codes].astype(np.int64) if codec == "nf4" else codes.astype(np.int64)
                a8 = rng.integers(-127, 128, (3, piece.Kp)).astype(np.int8)
                handle = model.device.place(piece, blob)
                try:
                    got = model.device.accumulators(handle, a8)
                finally:
                    model.device.free(handle)
                assert np.array_equal(got, a8.astype(np.int64) @ levels.T), name


LEVELS = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127])


def test_an_index_of_many_experts_is_read_without_an_object_each(tmp_path: Path) -> None:
    """20,000 tensors; 100,000 open in 70 ms. What a pack holds in Python does not grow with them."""
    count = 20_000
    plan = PackPlan([TensorPlan(f"w#{e}", "i8", (1, 1), layer=0, expert=e) for e in range(count)])
    target = tmp_path / "many.orkpack"
    blob = np.zeros(plan.nbytes(0), np.uint8)
    with PackWriter.open(target, plan) as writer:
        for entry in range(len(plan)):
            writer.write(entry, blob)
        writer.finish()
    tracemalloc.start()
    try:
        with Pack.open(target) as pack:
            held, _ = tracemalloc.get_traced_memory()
            assert pack.tensor(f"w#{count - 1}").N == 1
    finally:
        tracemalloc.stop()
    assert held < 32 * count, "a list of 20,000 objects alone would take more"
