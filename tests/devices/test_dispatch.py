"""Where a mixture's experts are computed, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork import tiles
from ork.devices.base import SliceSpec
from ork.devices.choose import open_device, place_experts
from ork.devices.dispatch import LEAST, Mixture, choose, estimate, rows_from
from ork.devices.npu import NpuDevice
from ork.errors import UsageError


def mixture(experts: int, top_k: int, width: int, inner: int) -> Mixture:
    """4-bit in the pack, int8 where the NPU maps it."""
    weights = 3 * width * inner
    return Mixture(experts, top_k, width, inner, weights // 2, weights)


QWEN3 = mixture(128, 8, 2048, 768)  # Qwen3-30B-A3B
LFM2 = mixture(32, 4, 2048, 1792)  # LFM2-8B-A1B


@pytest.mark.parametrize("m", [QWEN3, LFM2])
def test_decode_is_the_cpus_and_resident_prefill_the_npus(m: Mixture) -> None:
    """4-bit weights are half the bytes; published: LFM2-8B-A1B decodes at 12.5 tok/s on the NPU, 12.9 on the CPU, and
    prefills at 40.7 and 31.7."""
    assert estimate(m, 1).cpu < estimate(m, 1).npu
    assert estimate(m, 512).npu < estimate(m, 512).cpu
    least = rows_from(m)
    assert least is not None
    assert LEAST <= least < 512


def test_experts_that_must_be_brought_in_stay_on_the_cpu() -> None:
    """Published: the older stack computed the experts of a 35B-A3B, which do not fit, on the CPU."""
    assert rows_from(QWEN3, streamed=0.75) is None
    choice = choose("auto", QWEN3, streamed=0.75)
    assert choice.rows is None
    assert "experts on the CPU: auto" in choice.reason
    assert "to bring weights in" in choice.reason


def test_what_is_chosen_comes_with_its_reason() -> None:
    choice = choose("auto", LFM2)
    assert choice.rows is not None
    assert choice.rows >= 1
    assert "rows and more" in choice.reason
    assert "predicted from published figures" in choice.reason
    assert choose("auto", LFM2, why_not="because").reason.endswith("because")
    assert choose("cpu", LFM2).rows is None
    assert choose("npu", QWEN3, streamed=1.0).rows == 0


@given(st.integers(1, 512), st.integers(1, 8), st.floats(0, 1))
def test_estimates_make_sense(rows: int, top_k: int, streamed: float) -> None:
    m = replace(QWEN3, top_k=top_k)
    assert min(rows, m.experts / top_k) * top_k * 0.6 < m.active(rows) <= min(rows * top_k, m.experts) + 1e-6
    e, more = estimate(m, rows, streamed), estimate(m, rows + 1, streamed)
    assert 0 <= e.brought < e.npu <= more.npu
    assert 0 < e.cpu <= more.cpu


def parts(codec: str, group: int = 0) -> list[list[SliceSpec]]:
    return [
        [SliceSpec(f"blk.0.ffn_{part}_exps.weight#0", codec, K, K, tiles.ks_of(K, group), 0, n, group, group)]
        for part, n, K in (("gate", 768, 2048), ("up", 768, 2048), ("down", 2048, 768))
    ]


@pytest.mark.parametrize(
    ("name", "mode", "codec", "group", "window", "experts", "rows", "said"),
    [
        ("hybrid", None, "i4", 0, None, 128, True, "NPU for"),  # one layer fits
        ("hybrid", "cpu", "i4", 0, None, 128, None, "CPU: asked for"),
        ("hybrid", "npu", "i4", 0, None, 128, 0, "NPU: asked for"),
        ("hybrid", None, "i4", 32, None, 128, None, "codec"),
        ("hybrid", None, "f16", 0, None, 128, None, "codec"),
        ("hybrid", None, "i4", 0, 100 << 20, 128, None, "to bring weights in"),
        ("hybrid", None, "i4", 0, None, 4096, None, "do not fit"),
        ("emu", None, "i4", 0, None, 128, 0, "NPU, as all that emu gives it"),
        ("emu", None, "f16", 0, None, 128, None, "CPU: their codec"),
        ("emu", "auto", "i4", 32, None, 128, None, "by group"),
        ("emu", "npu", "f16", 0, None, 128, None, "codec"),
    ],
)
def test_devices(
    name: str, mode: str | None, codec: str, group: int, window: int | None, experts: int, rows: object, said: str
) -> None:
    device, _ = open_device(name)
    assert isinstance(device, NpuDevice)
    layers = 4 if experts == 4096 else 1
    reason = place_experts(
        device, mode, [parts(codec, group)] * layers, experts=experts, top_k=8, window=window, others=0
    )
    assert said in reason
    assert device.expert_rows == rows or (rows is True and device.expert_rows)
    slices = [s for part in parts(codec, group) for s in part]
    assert all(device.copies(s) for s in slices) == (device.expert_rows is not None)
    device.close()


def test_experts_of_four_bit_rows_are_the_cpus() -> None:
    device, _ = open_device("hybrid", w4a4=True)
    assert isinstance(device, NpuDevice)
    reason = place_experts(device, "npu", [parts("i4")], experts=8, top_k=2, window=None, others=0)
    assert reason.startswith("experts on the CPU, although the NPU was asked for: int4 programs")
    assert device.expert_rows is None
    device.close()


@pytest.mark.parametrize("first", [True, False])
def test_layers_that_are_stored_in_different_ways(first: bool) -> None:
    """A recipe may choose by layer: one that the NPU does not take keeps it from no other."""
    device, _ = open_device("hybrid")
    assert isinstance(device, NpuDevice)
    layers = [parts("nf4", 32), parts("i4")] if first else [parts("i4"), parts("nf4", 32)]
    how: dict[str, Any] = {"experts": 128, "top_k": 8, "window": None, "others": 0}
    reason = place_experts(device, None, layers, **how)
    assert device.expert_rows
    assert "on the NPU for" in reason
    assert reason.endswith("of 1 of 2 layers on the CPU: their codec, or scales by group")
    reason = place_experts(device, None, [*layers, *[parts("f16")] * 10_000], **how)  # all bytes count
    assert "do not fit" in reason
    device.close()


def test_what_cannot_be_is_refused() -> None:
    cpu, _ = open_device("cpu")
    arguments = {"experts": 8, "top_k": 2, "window": None, "others": 0}
    assert place_experts(cpu, "auto", [parts("i8")], **arguments) == ""
    for mode in ("npu", "gpu"):
        with pytest.raises(UsageError, match="--experts"):
            place_experts(cpu, mode, [parts("i8")], **arguments)
