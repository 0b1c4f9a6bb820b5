"""The NPU device on the emulated chip: the CPU's bits, and the CPU's answer where the chip gives none."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from ork import native, tiles
from ork.api import load
from ork.devices.base import SliceSpec
from ork.devices.choose import open_device
from ork.devices.cpu import CpuDevice
from ork.devices.npu import NpuDevice
from ork.emulator.kernel import EmulatedKernel
from ork.errors import NpuError, UsageError
from ork.npu.driver import Npu
from tests import tiny
from tests.emulator.board import Ended, ScriptedCore

TOKENS = [(7 * i) % tiny.VOCAB for i in range(70)]


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def weights(n: int, K: int, seed: int, n0: int = 0) -> tuple[SliceSpec, np.ndarray, np.ndarray]:
    """(spec, blob on 64-byte alignment, codes int8 [n, K])."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-127, 128, (n, K), dtype=np.int8)
    layout = tiles.slice_layout("i8", K, n)
    made = tiles.build_blob(layout, codes, rng.random(n, dtype=np.float32) * 1e-3)
    room = np.zeros(made.nbytes + 64, np.uint8)
    blob = room[-room.ctypes.data % 64 :][: made.nbytes]
    blob[:] = made
    return SliceSpec("w", "i8", K, K, tiles.ks_of(K), n0, n0 + n), blob, codes


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("device", ["emu", "hybrid"])
def test_a_model_has_the_cpus_bits(tmp_path: Path, arch: str, device: str) -> None:
    path = tiny.random_gguf(tmp_path / "m.gguf", arch)
    with load(path, device="cpu", threads=2) as cpu, load(path, device=device, threads=2) as npu:
        assert npu.device.name == device
        assert (bits(cpu.logits(TOKENS)) == bits(npu.logits(TOKENS))).all()
        assert (bits(cpu.logits(TOKENS[:5], chunk=1)) == bits(npu.logits(TOKENS[:5], chunk=1))).all()
        assert isinstance(npu.device, NpuDevice)
        assert npu.device.npu_ops > 0
        assert (npu.device.cpu_ops > 0) == (device == "hybrid")  # the single rows
        assert npu.device.failed_ops == 0


@pytest.mark.parametrize(("M", "K"), [(1, 96), (3, 4096), (40, 8192), (130, 576), (7, 4128)])
@pytest.mark.parametrize("engine", ["fast", "literal"])
def test_products_with_bias_over_slices(kernel: EmulatedKernel, M: int, K: int, engine: str) -> None:
    """K slices, several slices an op, an op large enough to be cut up for three cores."""
    if engine == "literal" and M * K > 20_000:
        pytest.skip("the literal engine takes seconds")
    kernel = kernel if engine == "fast" else EmulatedKernel(engine="literal")
    device, cpu = NpuDevice(Npu.open(kernel), CpuDevice(2), name="emu"), CpuDevice(2)
    parts = [weights(128, K, 1), weights(64, K, 2, n0=128)]
    x = native.Array.of(np.random.default_rng(3).standard_normal((M, K), dtype=np.float32))
    bias = native.Array.of(np.random.default_rng(4).standard_normal((1, 192), dtype=np.float32))
    rows = native.quantise(x, None, 0)
    want, got = native.Array(M, 192), native.Array(M, 192)
    cpu.linear([cpu.place(s, b) for s, b, _ in parts], x, rows, [want] * 2, [bias] * 2)
    handles = [device.place(s, b) for s, b, _ in parts]
    for _ in range(2):  # prepared, then patched and run again
        device.linear(handles, x, rows, [got] * 2, [bias] * 2)
        assert (bits(want.numpy()) == bits(got.numpy())).all()
    device.close()


def test_an_op_for_all_cores_uses_them(kernel: EmulatedKernel) -> None:
    device, cpu = NpuDevice(Npu.open(kernel), CpuDevice(2), name="emu"), CpuDevice(2)
    spec, blob, _ = weights(1024, 512, 5)
    x = native.Array.of(np.random.default_rng(6).standard_normal((200, 512), dtype=np.float32))
    rows = native.quantise(x, None, 0)
    want, got = native.Array(200, 1024), native.Array(200, 1024)
    cpu.linear([cpu.place(spec, blob)], x, rows, [want], [None])
    device.linear([device.place(spec, blob)], x, rows, [got], [None])
    assert (bits(want.numpy()) == bits(got.numpy())).all()
    assert sum(device.npu.counters.programs) >= 3
    device.close()


def test_accumulators_are_exact_with_every_code(kernel: EmulatedKernel) -> None:
    device = NpuDevice(Npu.open(kernel), CpuDevice(1), name="emu")
    spec, blob, codes = weights(192, 8192, 7)
    a8 = np.random.default_rng(8).integers(-128, 128, (9, 8192), dtype=np.int8)
    a8[0] = -128
    got = device.accumulators(device.place(spec, blob), a8)
    assert (got == a8.astype(np.int64) @ codes.astype(np.int64).T).all()
    device.close()


def test_a_freed_slice_gives_its_memory_back(kernel: EmulatedKernel) -> None:
    device = NpuDevice(Npu.open(kernel), CpuDevice(1), name="emu")
    spec, blob, _ = weights(64, 256, 9)
    keep = device.place(spec, blob)
    device.accumulators(keep, np.ones((1, 256), np.int8))
    before = kernel.stats.live_buffers
    for _ in range(20):
        handle = device.place(spec, blob)
        device.accumulators(handle, np.ones((2, 256), np.int8))
        device.free(handle)
    assert kernel.stats.live_buffers == before
    device.close()


def test_what_the_chip_does_not_finish_the_cpu_computes() -> None:
    """A core that hangs: one reset, one retry, then the CPU's numbers, a warning and a count."""
    dead = [ScriptedCore(act=lambda *_: Ended(tasks=0, hang="dead")) for _ in range(3)]
    kernel = EmulatedKernel(cores=dead)
    cpu = CpuDevice(1)
    device = NpuDevice(Npu.open(kernel), cpu, name="emu")
    spec, blob, _ = weights(64, 128, 10)
    x = native.Array.of(np.random.default_rng(11).standard_normal((4, 128), dtype=np.float32))
    rows = native.quantise(x, None, 0)
    want, got = native.Array(4, 64), native.Array(4, 64)
    cpu.linear([cpu.place(spec, blob)], x, rows, [want], [None])
    with pytest.warns(RuntimeWarning, match="the CPU computes instead"):
        device.linear([device.place(spec, blob)], x, rows, [got], [None])
    assert (bits(want.numpy()) == bits(got.numpy())).all()
    assert (device.failed_ops, device.npu_ops, device.cpu_ops) == (1, 0, 1)
    assert device.npu.counters.resets >= 1
    device.close()
    assert kernel.stats.live_buffers == 0


def test_float_tensors_stay_on_the_cpu(tmp_path: Path) -> None:
    path = tiny.random_gguf(tmp_path / "m.gguf")
    with load(path, codec="f32", device="emu") as model, load(path, codec="f32", device="cpu") as cpu:
        assert (bits(cpu.logits(TOKENS)) == bits(model.logits(TOKENS))).all()
        assert isinstance(model.device, NpuDevice)
        assert model.device.npu_ops == 0


def test_devices_come_with_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device, why = open_device("auto")  # no board here
        assert (device.name, why[:5]) == ("cpu", "auto:")
        with pytest.raises(NpuError):
            open_device("rk3588")
        hybrid, why = open_device("hybrid", min_rows=8)
        assert isinstance(hybrid, NpuDevice)
        assert (hybrid.min_rows, "emulated" in why) == (8, True)
        hybrid.close()
        for name, rows in (("gpu", None), ("cpu", 8), ("hybrid", 0)):
            with pytest.raises(UsageError):
                open_device(name, min_rows=rows)


def test_what_was_prepared_for_a_slice_serves_it_anywhere_in_an_op(kernel: EmulatedKernel) -> None:
    """Slices of two domains in one op, then the second one alone: the same programs, another place in the op."""
    device, cpu = NpuDevice(Npu.open(kernel), CpuDevice(1), name="emu"), CpuDevice(1)
    parts = [weights(64, 256, 1), weights(64, 256, 2, n0=64)]
    x = native.Array.of(np.random.default_rng(3).standard_normal((3, 256), dtype=np.float32))
    rows = native.quantise(x, None, 0)
    want = native.Array(3, 128)
    cpu.linear([cpu.place(s, b) for s, b, _ in parts], x, rows, [want] * 2, [None] * 2)
    handles = [device.place(s, b, domain) for domain, (s, b, _) in enumerate(parts)]
    for chosen in (handles, handles[1:], handles[:1]):
        got = native.Array(3, 128)
        device.linear(chosen, x, rows, [got] * len(chosen), [None] * len(chosen))
        for h in chosen:
            columns = slice(h.spec.n0, h.spec.n1)
            assert (bits(want.numpy()[:, columns]) == bits(got.numpy()[:, columns])).all()
    device.close()
