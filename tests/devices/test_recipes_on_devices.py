"""Packs of four bits, of groups and of everything at once on every device, in place and through windows: one result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ork
from ork.api import LoadedModel
from ork.build.convert import convert
from ork.devices.npu import NpuDevice
from ork.errors import UsageError
from ork.pack.format import align
from ork.pack.reader import Pack
from ork.quant.recipe import Recipe, builtin, from_toml
from ork.residency.window import Window
from ork.sources.base import open_source
from tests import tiny

TOKENS = [(7 * i) % tiny.VOCAB for i in range(70)]
MIXED = """
name = "everything"
default = { codec = "i4", group = 32 }
rule = [
    { match = "attn_q", codec = "nf4" },
    { match = "attn_k", codec = "i8" },
    { match = "attn_v", codec = "i8", act_group = 32 },
    { match = "attn_output", codec = "f16" },
    { match = "ffn_gate", codec = "nf4", group = 32 },
    { match = "ffn_up", codec = "i4" },
]
"""
RECIPES = {
    "i4": builtin("i4"),
    "nf4": builtin("nf4"),
    "i4-g32": builtin("i4", group=32),
    "nf4-g32": builtin("nf4", group=32),
    "i8-a32": builtin("int8", act_group=32),
    "everything": from_toml(MIXED),
}

Logits = list[npt.NDArray[np.uint32]]


def bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32)


def logits(model: LoadedModel) -> Logits:
    return [bits(model.logits(TOKENS)), bits(model.logits(TOKENS[:4], chunk=1))]


def smallest_window(path: Path, device: str, **how: Any) -> int:
    """The bytes of the slots that slices pass through one by one: no pack fits in."""
    with ork.load(path, device=device, threads=2, **how) as model:
        sizes = [align(model.device.mapped_bytes(s)) for t in model.stream.tensors for s in t.slices]
        window = (model.device.cores + 1) * max(sizes)
        assert window < sum(sizes)
        return window


def pack_of(folder: Path, recipe: Recipe, arch: str = "gemma3") -> Path:
    path = tiny.random_gguf(folder / "m.gguf", arch)
    return convert(open_source(path), folder / f"{recipe.name}.orkpack", recipe)


@pytest.fixture(scope="module", params=RECIPES)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    """A tied model, and its logits in place on the CPU."""
    path = pack_of(tmp_path_factory.mktemp(request.param), RECIPES[request.param])
    with ork.load(path, device="cpu", threads=1) as model:
        return path, logits(model)


@pytest.mark.parametrize("device", ["cpu", "emu", "hybrid"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_same_bits(pack: tuple[Path, Logits], device: str, streamed: bool) -> None:
    path, want = pack
    window = smallest_window(path, device) if streamed else None
    with ork.load(path, device=device, threads=2, window=window) as model:
        for a, b in zip(logits(model), want):
            assert np.array_equal(a, b)
        stats = model.stream.stats
        if window is not None:
            assert isinstance(model.stream, Window)
            assert stats.peak_bytes <= window
            assert stats.evictions > 0
        if isinstance(model.device, NpuDevice):
            assert model.device.failed_ops == 0
            assert (model.device.npu_ops > 0) == (device == "emu" or path.stem in ("i4", "nf4", "everything"))
            assert ("scales by group" in model.device_reason) == (device == "hybrid" and path.stem not in ("i4", "nf4"))
            assert ("float tensors" in model.device_reason) == (path.stem == "everything")


def test_what_is_mapped_is_counted(tmp_path: Path) -> None:
    """Inflated codes take twice what the pack holds of them; windows, slots and reports go by that."""
    path = pack_of(tmp_path, builtin("nf4"))
    with ork.load(path, device="cpu") as cpu, ork.load(path, device="emu") as emu:
        cpu.reside()
        ready = emu.reside()
        held = sum(emu.device.mapped_bytes(s) for t in emu.stream.tensors for s in t.slices)
        assert ready.nbytes == emu.stream.stats.resident_bytes == held
        codes = sum(s.Kp * (s.n1 - s.n0) // 2 for t in emu.stream.tensors for s in t.slices)
        assert held - cpu.stream.stats.resident_bytes == codes
        assert emu.placement is not None
        assert sum(emu.placement.bytes.values()) >= held


# --- W4A4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("streamed", [False, True])
def test_w4a4_is_the_same_on_every_device(tmp_path: Path, group: int, streamed: bool) -> None:
    path = pack_of(tmp_path, builtin("i4", group=group))
    with ork.load(path, device="cpu", w4a4=True) as model:
        want = logits(model)
    with ork.load(path, device="cpu") as model:
        assert not np.array_equal(logits(model)[0], want[0])  # with eight bits the rows say something else
    for device in ("emu", "hybrid"):
        window = smallest_window(path, device, w4a4=True) if streamed else None
        with ork.load(path, device=device, w4a4=True, window=window) as model:
            for a, b in zip(logits(model), want):
                assert np.array_equal(a, b)
            assert isinstance(model.device, NpuDevice)
            assert (model.device.npu_ops > 0) == (device == "emu" or not group)
            assert model.device.failed_ops == 0
            assert model.stream.stats.peak_bytes <= (window or 1 << 30)
            assert (model.stream.stats.evictions > 0) == streamed


def test_w4a4_beside_int8_takes_turns(tmp_path: Path) -> None:
    """Weights of eight bits keep rows of eight; the chip is reset where the precision changes."""
    rule = [{"match": "ffn_down", "codec": "i8"}, {"match": "token_embd", "codec": "i8"}]
    path = pack_of(tmp_path, Recipe.of({"name": "two", "default": {"codec": "i4"}, "rule": rule}, "test"))
    with ork.load(path, device="cpu", w4a4=True) as cpu, ork.load(path, device="emu", w4a4=True) as emu:
        for a, b in zip(logits(emu), logits(cpu)):
            assert np.array_equal(a, b)
        assert isinstance(emu.device, NpuDevice)
        assert emu.device.npu.counters.resets > 1


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("nf4", r"--w4a4: token_embd\.weight is nf4, .* convert with i4"),
        ("everything", r"--w4a4: blk\.0\.\w+\.weight is nf4"),
        ("i8-a32", r"--w4a4: no weight of this model is i4: convert it"),
    ],
)
def test_what_int4_products_cannot_multiply_is_refused(tmp_path: Path, recipe: str, said: str) -> None:
    path = pack_of(tmp_path, RECIPES[recipe])
    for device in ("cpu", "emu"):
        with pytest.raises(UsageError) as error:
            ork.load(path, device=device, w4a4=True)
        assert re.search(said, str(error.value))
        assert "\n" not in str(error.value)


def test_unproven_goes_with_w4a4(tmp_path: Path) -> None:
    path = pack_of(tmp_path, builtin("i4"))

    def loaded(**how: bool) -> LoadedModel:
        return LoadedModel(Pack.open(path), device="emu", threads=1, context=None, kv=None, **how)

    with pytest.raises(UsageError, match=r"--unproven .* goes with --w4a4"):
        loaded(unproven=True)
    with loaded(w4a4=True) as model, loaded(w4a4=True, unproven=True) as longer:
        for a, b in zip(logits(model), logits(longer)):
            assert np.array_equal(a, b)  # K = 64 and 96: nothing to lengthen
        assert isinstance(longer.device, NpuDevice)
        assert longer.device.int4_k == 4096
