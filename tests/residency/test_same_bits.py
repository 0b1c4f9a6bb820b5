"""The same logits, to the last bit, through any window, in any number of domains, read ahead or not."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ork
from ork.devices.npu import NpuDevice
from ork.residency.window import Window
from ork.sources import hub
from tests import tiny

TOKENS = [(7 * i) % tiny.VOCAB for i in range(70)]


# (window in bytes, prefetch, domains, threads, device, architecture): each pair of values that can meet does.
# The smallest windows: of the largest slices (24 KiB) two on one thread of the CPU, three on more, four on the NPU.
PAIRS = [
    (2 * 24576, True, None, 1, "cpu", "llama"),
    (3 * 24576, False, None, 2, "cpu", "gemma3"),
    (3 * 24576 + 4096, True, None, 2, "cpu", "llama"),
    (6 * 24576, False, None, 1, "cpu", "gemma3"),
    (4 * 24576, True, 1, 1, "emu", "gemma3"),  # nothing stays, so one domain
    (5 * 24576, False, 2, 2, "emu", "llama"),
    (6 * 24576, True, 2, 2, "emu", "llama"),
    (6 * 24576, False, 1, 1, "emu", "gemma3"),
    (None, True, 2, 1, "emu", "gemma3"),
    (None, True, 15, 2, "emu", "llama"),  # a slice each
    (6 * 24576, True, 2, 1, "hybrid", "gemma3"),
]


def bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[npt.NDArray[np.float32]]]]:
    """A model of each architecture, and its logits of a prefill and of single rows with no window."""
    made = {}
    for arch in ("llama", "gemma3"):
        path = tiny.random_gguf(tmp_path_factory.mktemp("models") / f"{arch}.gguf", arch)
        with ork.load(path, device="cpu", threads=1) as model:
            made[arch] = path, [model.logits(TOKENS), model.logits(TOKENS[:5], chunk=1)]
    return made


@pytest.mark.parametrize(("window", "prefetch", "domains", "threads", "device", "arch"), PAIRS)
def test_tiny_models(
    models: dict[str, tuple[Path, list[npt.NDArray[np.float32]]]],
    window: int | None,
    prefetch: bool,
    domains: int | None,
    threads: int,
    device: str,
    arch: str,
) -> None:
    path, want = models[arch]
    with ork.load(
        path, device=device, threads=threads, window=window, prefetch=prefetch, domains=domains, preload=True
    ) as model:
        got = [model.logits(TOKENS), model.logits(TOKENS[:5], chunk=1)]
        stats = model.stream.stats
        assert model.ready is not None
        if window is not None:
            assert isinstance(model.stream, Window)
            assert model.stream.plan is not None
            assert stats.peak_bytes <= window
            assert stats.evictions > 0
        else:
            assert stats.loads == model.ready.slices
        if domains is not None:
            assert sorted(model.ready.domains) == list(range(domains))
        assert stats.lazy == 0
        if isinstance(model.device, NpuDevice):
            assert model.device.failed_ops == 0
            assert model.device.npu_ops > 0
    for a, b in zip(got, want):
        assert (bits(a) == bits(b)).all()
    assert stats.resident_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_an_op_that_fails_half_way_leaves_the_window_usable(
    models: dict[str, tuple[Path, list[npt.NDArray[np.float32]]]],
    device: str,
    prefetch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, want = models["llama"]
    with ork.load(path, device=device, window=6 * 24576, prefetch=prefetch) as model:
        linear, left = model.device.linear, [7]

        def fails(*args: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            linear(*args)

        for _ in range(3):
            left[0] = 7
            monkeypatch.setattr(model.device, "linear", fails)
            with pytest.raises(KeyboardInterrupt) as kept:  # whose frames live on
                model.logits(TOKENS)
            monkeypatch.undo()
            assert (bits(model.logits(TOKENS)) == bits(want[0])).all()
            del kept


# --- real models

MIB = 1 << 20
REAL = ("smollm2-135m", "gemma3-270m")
TEXT = "The three most important inventions of the twentieth century are "


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest) -> tuple[Path, list[npt.NDArray[np.float32]]]:
    cache = Path(os.environ.get("ORK_MODELS") or Path.home() / ".cache" / "ork")
    path = hub.pull(request.param, cache=cache)
    with ork.load(path, device="cpu", threads=2) as model:
        ids = model.tokenizer.encode(TEXT * 4)
        return path, [model.logits(ids), model.logits(ids[:4], chunk=1)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("window", [16 * MIB, 32 * MIB, 128 * MIB, None])
def test_real_models(real: tuple[Path, list[npt.NDArray[np.float32]]], device: str, window: int | None) -> None:
    path, want = real
    for domains, prefetch, threads in itertools.product((1, 2), (True, False), (1, 2)):
        if device == "cpu" and domains > 1:
            continue  # no domains there
        with ork.load(
            path, device=device, threads=threads, window=window, prefetch=prefetch, domains=domains, preload=True
        ) as model:
            ids = model.tokenizer.encode(TEXT * 4)
            got = [model.logits(ids), model.logits(ids[:4], chunk=1)]
            assert model.ready is not None
            assert len(model.ready.domains) == domains
            assert window is None or model.stream.stats.peak_bytes <= window
            if isinstance(model.device, NpuDevice):
                assert model.device.failed_ops == 0
        for a, b in zip(got, want):
            assert (bits(a) == bits(b)).all(), (domains, prefetch, threads)
