"""What residency asks of the kernel: memory calls to get ready, one sync a refilled slot, nothing made in a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import ork
from ork.api import LoadedModel
from ork.build.cache import cached_pack
from ork.devices.cpu import CpuDevice
from ork.devices.npu import NpuDevice
from ork.emulator.faults import Faults
from ork.emulator.kernel import EmulatedKernel
from ork.errors import NpuError, PackDamaged, UsageError
from ork.npu import uabi
from ork.npu.buffers import IOVA_CEILING
from ork.npu.driver import Npu
from ork.npu.kernel import RecordingKernel
from ork.pack.file import aligned
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.residency.planner import arrange, plan_placement
from ork.residency.prefetch import Clock, Loader
from ork.residency.stream import Stream, StreamStats
from tests import tiny
from tests.residency.fakes import BLOB, FakeSource, tensor

TOKENS = [(7 * i) % tiny.VOCAB for i in range(40)]
MEMORY_CALLS = {"open", "close", "mmap", "munmap", "VERSION", "ACTION", "MEM_CREATE", "MEM_MAP", "MEM_SYNC"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    gguf = tiny.random_gguf(tmp_path / "m.gguf")
    return cached_pack(gguf, builtin("i8"), max_ram=1 << 30)


def names(kernel: RecordingKernel) -> Counter[str]:
    """Calls by name, without the prefixes of the headers."""
    return Counter(call.name.removeprefix("DRM_").removeprefix("RKNPU_") for call in kernel.calls)


def loaded(path: Path, kernel: RecordingKernel, **options: object) -> LoadedModel:
    return LoadedModel(
        Pack.open(path),
        device="emu",
        threads=2,
        context=None,
        kv=None,
        board=kernel,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("window", "domains"), [(None, None), (None, 3), (6 * 24576, 2)])
def test_getting_ready_submits_nothing_and_a_run_makes_nothing(
    path: Path, window: int | None, domains: int | None
) -> None:
    kernel = RecordingKernel(EmulatedKernel())
    with loaded(path, kernel, window=window, domains=domains, preload=True) as model:
        ready = model.ready
        assert ready is not None
        asked = names(kernel)
        assert asked["SUBMIT"] == 0
        assert set(asked) <= MEMORY_CALLS, set(asked) - MEMORY_CALLS
        assert ready.slices > 0
        assert sum(ready.domains.values()) == ready.nbytes > 0
        assert len(ready.domains) == (domains or 1)
        assert ready.seconds > 0
        kernel.calls.clear()
        model.logits(TOKENS)
        run = names(kernel)
        assert run["SUBMIT"] > 0
        assert run["MEM_CREATE"] == run["MEM_DESTROY"] == run["MEM_MAP"] == 0
        assert model.stream.stats.lazy == 0
        assert model.reside() is ready


def test_a_run_without_preload_is_lazy_and_says_nothing_of_it(path: Path) -> None:
    kernel = RecordingKernel(EmulatedKernel())
    with loaded(path, kernel) as model:
        assert model.ready is None
        before = names(kernel)["MEM_CREATE"]
        model.logits(TOKENS)
        assert names(kernel)["MEM_CREATE"] > before


def test_refilling_a_slot_is_one_sync() -> None:
    kernel = RecordingKernel(EmulatedKernel())
    device = NpuDevice(Npu.open(kernel), CpuDevice(1), name="emu")
    t = tensor("w", 9)
    slots = [device.make_slot(8192) for _ in range(4)]
    stats = StreamStats()
    order = [("w", i) for i in range(9)]
    source = FakeSource([t])
    loader = Loader(source, device, {"w": t}, order, slots, stats, Clock(stats), threads=False)  # type: ignore[arg-type]
    kernel.calls.clear()
    for key in order * 2:
        loader.take(key)
        loader.give(key)
    assert len(kernel.calls) == stats.loads > 9
    for call in kernel.calls:
        assert call.request == uabi.MEM_SYNC
        assert (call.before["flags"], call.before["size"]) == (uabi.SYNC_TO_DEVICE, 64 * 64)
    for slot in loader.close():
        device.free_slot(slot)
    device.close()


def test_closing_gives_the_address_space_back(path: Path) -> None:
    board = EmulatedKernel()
    kernel = RecordingKernel(board)
    model = loaded(path, kernel, window=6 * 24576, domains=2, preload=True)
    model.logits(TOKENS)
    assert isinstance(model.device, NpuDevice)
    mapped = dict(model.device.npu.memory.mapped)
    scratch = model.device.scratch_bytes
    assert sum(mapped.values()) <= 6 * 24576 + sum(scratch.values())
    assert [used for used in board.stats.peak_iova if used] == [mapped[0], mapped[1]]
    model.stream.close()
    assert model.device.scratch_bytes == model.device.npu.memory.mapped == scratch
    model.close()
    assert board.stats.live_buffers == board.stats.live_bytes == 0
    assert not board.report.violations


def test_a_placement_is_noted_and_used_again(path: Path) -> None:
    with ork.load(path, device="emu", domains=3) as model:
        first = model.placement
        assert first is not None
    note = Pack.open(path).notes()["placement"]
    assert note == first.note()
    assert [record[0] for record in note["records"]] == [0, 1, 2]
    with ork.load(path, device="emu", domains=3) as model:
        assert model.placement is not None
        assert "noted" in model.placement.reason
        assert model.placement.domains == first.domains
    with ork.load(path, device="emu", domains=2) as model:  # another wish: planned anew
        assert model.placement is not None
        assert len(model.placement.bytes) == 2


def test_sixteen_domains_and_not_one_more(path: Path) -> None:
    """A slice in each; every one of them is computed with."""
    tensors = [tensor(f"blk.{i}.w", 1) for i in range(16)]
    board, cpu = EmulatedKernel(), CpuDevice(1)
    device = NpuDevice(Npu.open(board), cpu, name="emu")
    source = FakeSource(tensors)
    stream = Stream(source, device)  # type: ignore[arg-type]
    stream.tensors = tensors
    arrange(stream, device.capacity(), domains=16)
    ready = stream.reside()
    assert ready.domains == dict.fromkeys(range(16), BLOB)
    a8 = np.random.default_rng(1).integers(-127, 128, (3, 64), dtype=np.int8)
    for t in tensors:
        blob = aligned(BLOB)
        source.read_into(t.name, 0, blob)
        want = cpu.accumulators(cpu.place(t.slices[0], blob), a8)
        assert (device.accumulators(stream.handles(t)[0], a8) == want).all()
    stream.close()
    device.close()
    assert (board.stats.live_buffers, board.report.violations) == (0, [])
    with pytest.raises(UsageError, match="--domains 17: this device has domains 1 to 16"):
        ork.load(path, device="emu", domains=17)
    with pytest.raises(UsageError, match="--domains 2"):
        ork.load(path, device="cpu", domains=2)


@pytest.mark.slow
def test_more_than_a_domain() -> None:
    """Slices of nothing but zero pages: 6 GiB in one domain are refused by the planner, without it by the driver,
    without that by the kernel; in two domains they fit."""

    class Sparse(FakeSource):
        def read_into(self, name: str, index: int, memory: np.ndarray) -> int:
            return 8192 * 256 + 4 * 256

    from ork.devices.base import SliceSpec
    from ork.residency.stream import TensorSpec

    def big(layer: int) -> TensorSpec:
        name = f"blk.{layer}.ffn_up.weight"
        specs = tuple(SliceSpec(name, "i8", 8192, 8192, 4096, i * 256, (i + 1) * 256) for i in range(32))
        return TensorSpec(name, "i8", 8192, 8192, 0, 0, specs)

    tensors = [big(layer) for layer in range(96)]
    kernels = "the address space of the domain is full"
    for forced, ceiling in (("do not fit domain 0", IOVA_CEILING), (kernels, 8 << 30), ("", IOVA_CEILING)):
        board = EmulatedKernel(views="sampled")
        device = NpuDevice(Npu.open(board, iova_ceiling=ceiling), CpuDevice(1), name="emu")
        stream = Stream(Sparse(tensors), device)  # type: ignore[arg-type]
        stream.tensors = tensors
        if forced:
            with pytest.raises(NpuError, match=forced):
                stream.reside()
        else:
            with pytest.raises(UsageError, match=r"6\.\d\d GiB .* do not fit 1 domains of 3"):
                arrange(stream, device.capacity(), domains=1)
            placement = arrange(stream, device.capacity())
            assert placement == plan_placement(
                [(key, 8192 * 256 + 4096) for key in placement.domains], device.capacity()
            )
            ready = stream.reside()
            assert sorted(ready.domains) == [0, 1]
            assert len(stream.handles(tensors[-1])) == 32
            device.accumulators(stream.handles(tensors[-1])[0], np.ones((1, 8192), np.int8))
        stream.close()
        device.close()
        assert board.stats.live_buffers == 0


@pytest.mark.parametrize("window", [None, 6 * 24576])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
def test_a_damaged_slice_is_named_and_nothing_stays_mapped(path: Path, window: int | None, name: str) -> None:
    """In what stays or in what streams: the error of the op or of getting ready, and the model can be closed."""
    with Pack.open(path) as pack:
        at = int(pack._index.entries["offset"][pack.tensor(name).slices[0].entry])
    data = bytearray(path.read_bytes())
    data[at + 100] ^= 1
    path.write_bytes(data)
    board = EmulatedKernel()
    model = loaded(path, RecordingKernel(board), window=window)
    for _ in range(2):  # the second time too
        with pytest.raises(PackDamaged, match=name):
            model.logits(TOKENS)
    model.close()
    assert board.stats.live_buffers == board.stats.live_maps == 0
    board = EmulatedKernel()
    with pytest.raises(PackDamaged, match=name), loaded(path, RecordingKernel(board), window=window, preload=True) as m:
        m.logits(TOKENS)
    assert board.stats.live_buffers == board.stats.live_maps == 0


@pytest.mark.parametrize("calls", ["create-enomem@4", "create-enomem@6"])
def test_a_board_without_memory_is_one_line(path: Path, calls: str) -> None:
    board = EmulatedKernel(faults=Faults(calls))
    with pytest.raises(NpuError) as said:
        loaded(path, RecordingKernel(board), window=6 * 24576, preload=True)
    assert "\n" not in str(said.value)
    assert board.stats.live_buffers == board.stats.live_maps == 0


def test_damaged_notes_hold_nobody_up(path: Path) -> None:
    with Pack.open(path) as pack:
        offset, nbytes = pack.section_span("notes")
    data = bytearray(path.read_bytes())
    for area in (0, nbytes // 2):
        data[offset + area] ^= 1
    path.write_bytes(data)
    with ork.load(path, device="emu", domains=2) as model:
        assert model.placement is not None
        assert len(model.placement.bytes) == 2


def test_an_embedding_that_is_only_looked_up_takes_no_npu_memory(path: Path) -> None:
    with ork.load(path, device="emu", preload=True) as model, ork.load(path, device="cpu") as cpu:
        tensors = {t.name for t in model.stream.tensors}
        assert "output.weight" in tensors
        assert "token_embd.weight" not in tensors
        before = model.stream.stats.resident_bytes
        assert (model.logits(TOKENS) == cpu.logits(TOKENS)).all()
        assert model.stream.stats.resident_bytes == before
        assert model.stream.stats.lazy == 0
