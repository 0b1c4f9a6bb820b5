"""Weights of four bits and scales by group on the emulated chip: the CPU's bits, through slots of another form."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native, tiles
from ork.devices.cpu import CODEC_IDS, CpuDevice
from ork.devices.npu import NpuDevice
from ork.devices.npu_slots import Lay, lay_of, lay_out, slot_layout
from ork.emulator.kernel import EmulatedKernel
from ork.npu.chain import Chain
from ork.npu.driver import Npu
from ork.npu.plan import int4_slice
from ork.npu.running import Runner
from tests.devices.slices import random_slice
from tests.devices.test_npu import bits

KINDS = [  # codec, group of weights, group of activations alone
    ("i8", 0, 32),
    ("i8", 0, 128),
    ("i8", 64, 0),
    ("i4", 0, 0),
    ("nf4", 0, 0),
    ("i4", 32, 0),
    ("nf4", 64, 0),
    ("i4", 128, 0),
]
INT4_K = 640


def compare(
    board: EmulatedKernel, parts: list[tuple], M: int, K: int, *, int4_k: int = 0, min_rows: int = 1, seed: int = 3
) -> NpuDevice:
    """One op of slices that read the same rows: the CPU's bits on the NPU, the first time and again; closed after."""
    cpu = CpuDevice(2, w4a4=bool(int4_k))
    device = NpuDevice(Npu.open(board), cpu, name="emu", int4_k=int4_k, min_rows=min_rows)
    spec = parts[0][0]
    N = parts[-1][0].n1
    rng = np.random.default_rng(seed)
    x = native.Array.of(rng.standard_normal((M, K), dtype=np.float32))
    bias = native.Array.of(rng.standard_normal((1, N), dtype=np.float32))
    rows = native.quantise(x, None, 0, spec.act_group, None, device.activation_limit(spec.codec))
    want, got = native.Array(M, N), native.Array(M, N)
    cpu.linear([cpu.place(s, b) for s, b, _ in parts], x, rows, [want] * len(parts), [bias] * len(parts))
    handles = [device.place(s, b) for s, b, _ in parts]
    for _ in range(2):  # prepared, then run again
        got.numpy()[...] = np.nan
        device.linear(handles, x, rows, [got] * len(parts), [bias] * len(parts))
        assert (bits(want.numpy()) == bits(got.numpy())).all()
    assert device.failed_ops == 0
    device.close()
    return device


@pytest.mark.parametrize(("codec", "group", "act_group"), KINDS)
@pytest.mark.parametrize("engine", ["fast", "literal"])
def test_the_cpus_bits(codec: str, group: int, act_group: int, engine: str) -> None:
    board = EmulatedKernel(engine=engine)
    M, K = (21, 1280) if engine == "fast" else (5, 256)
    parts = [
        random_slice(codec, 128, K, 1, group=group, act_group=act_group),
        random_slice(codec, 64, K, 2, group=group, act_group=act_group, n0=128),
    ]
    compare(board, parts, M, K)
    assert not board.report.violations


@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize(("M", "K"), [(1, 1280), (5, 2048), (16, 640), (33, 1920), (17, 96)])
def test_four_bits_by_four_bits(kernel: EmulatedKernel, group: int, M: int, K: int) -> None:
    """K slices of at most 640, one row and batches of up to 16, the last of them shorter."""
    if group > K or K % max(group, 1):
        group = 32
    parts = [random_slice("i4", 128, K, 1, group=group), random_slice("i4", 64, K, 2, group=group, n0=128)]
    compare(kernel, parts, M, K, int4_k=INT4_K)


@pytest.mark.parametrize(("M", "group"), [(1, 0), (3, 0), (3, 64)])
def test_four_bits_by_four_bits_literally(M: int, group: int) -> None:
    board = EmulatedKernel(engine="literal")
    compare(board, [random_slice("i4", 64, 768, 1, group=group)], M, 768, int4_k=INT4_K)
    assert not board.report.violations


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    int4 = data.draw(st.booleans())
    codec = "i4" if int4 else data.draw(st.sampled_from(["i8", "i4", "nf4"]))
    K = data.draw(st.integers(1, 60)) * 32 - data.draw(st.sampled_from([0, 0, 5, 31]))
    Kp = tiles.pad_k(K)
    group = data.draw(st.sampled_from([0, *(g for g in (32, 64, 96, 128) if Kp % g == 0 and Kp == K)]))
    act = data.draw(st.sampled_from([0, *(g for g in (32, 64, 128) if Kp % g == 0)])) if codec == "i8" else 0
    n = 64 * data.draw(st.integers(1, 4))
    board = EmulatedKernel()
    parts = [random_slice(codec, n, K, 5, group=group, act_group=act)]
    compare(board, parts, data.draw(st.integers(1, 40)), K, int4_k=INT4_K if int4 else 0)
    assert board.report.violations == []
    assert board.stats.live_buffers == 0


def test_an_op_for_all_cores(kernel: EmulatedKernel) -> None:
    parts = [random_slice("nf4", 512, 2048, 1, group=64), random_slice("nf4", 512, 2048, 2, group=64, n0=512)]
    device = compare(kernel, parts, 64, 2048)
    assert min(device.npu.counters.submits) > 0


def test_sums_larger_than_the_scratch_go_in_rounds(kernel: EmulatedKernel) -> None:
    """Sums of a group each: 64 K slices x 300 rows x 1024 columns are more than the 64 MiB that are there."""
    device = compare(kernel, [random_slice("i8", 1024, 2048, 1, act_group=32)], 300, 2048)
    assert device.npu_ops == 4  # two rounds, run twice


@pytest.mark.parametrize("int4_k", [0, INT4_K])
@pytest.mark.parametrize("group", [0, 64])
def test_accumulators_are_exact(kernel: EmulatedKernel, int4_k: int, group: int) -> None:
    cpu = CpuDevice(1)
    device = NpuDevice(Npu.open(kernel), cpu, name="emu", int4_k=int4_k)
    spec, blob, values = random_slice("i4", 128, 1280, 7, group=group)
    most = 7 if int4_k else 127
    a = np.random.default_rng(8).integers(-most, most + 1, (19, 1280), dtype=np.int8)
    a[0] = most
    got = device.accumulators(device.place(spec, blob), a)
    assert (got == a.astype(np.int64) @ values.astype(np.int64).T).all()
    if int4_k:
        with pytest.raises(ValueError, match="7"):
            device.accumulators(device.place(spec, blob), np.full((1, 1280), 8, np.int8))
    device.close()


# --- int16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [-7, -8])
def test_int16_never_overflows(kernel: EmulatedKernel, least: int) -> None:
    """The largest sums there can be, also of a pack that holds the code -8: its K slices are shorter."""
    K = 1280
    spec, blob, _ = random_slice("i4", 64, K, 1)
    layout = tiles.slice_layout("i4", K, 64)
    codes = np.full((64, K), 7, np.int8)
    codes[32:] = least
    blob[:] = tiles.build_blob(layout, codes, np.ones(64, np.float32))
    device = NpuDevice(Npu.open(kernel), CpuDevice(1), name="emu", int4_k=INT4_K)
    handle = device.place(spec, blob)
    assert handle.way.ks == {-7: 640, -8: 320}[least]
    got = device.accumulators(handle, np.full((2, K), 7, np.int8))
    assert (got[:, :32] == 49 * K).all()
    assert (got[:, 32:] == 7 * least * K).all()
    device.close()


def test_longer_slices_are_said_to_overflow() -> None:
    """Unproven: the whole K in one program. The emulator says what may go wrong, and that the results differ."""
    board = EmulatedKernel()
    spec, blob, _ = random_slice("i4", 64, 1280, 1)
    blob[: 64 * 640] = 0x77
    device = NpuDevice(Npu.open(board), CpuDevice(1), name="emu", int4_k=4096)
    handle = device.place(spec, blob)
    assert handle.way.ks == 1280
    assert device.accumulators(handle, np.full((1, 1280), 7, np.int8)).max() == 32767
    assert board.report.counts["int16-overflow"]
    device.close()


def test_slices_of_k_divide_it() -> None:
    for unit in range(32, 4097, 32):
        for least in (-7, -8):
            ks = int4_slice(unit, 640, least)
            assert (unit % ks, ks % 32) == (0, 0)
            assert ks * 7 * -least < 1 << 15
    assert [int4_slice(unit, 640) for unit in (1280, 1536, 8960, 896, 640)] == [640, 512, 640, 448, 640]


# --- the form in the slot --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_slot_holds_the_same_values(data: st.DataObject) -> None:
    """Tiles moved and codes inflated, against the layouts of `tiles` undone in numpy."""
    codec = data.draw(st.sampled_from(["i8", "i4", "nf4"]))
    steps = data.draw(st.integers(1, 300))
    Kp = 32 * steps
    group = data.draw(st.sampled_from([0, *(32 * g for g in range(1, min(steps, 128) + 1) if steps % g == 0)]))
    int4 = codec == "i4" and data.draw(st.booleans())
    n = 64 * data.draw(st.integers(1, 2))
    spec, blob, values = random_slice(codec, n, Kp, 1, group=group)
    lay = lay_of(spec, INT4_K if int4 else 0)
    assert lay is not None
    layout = slot_layout(spec, lay)
    memory = np.full(layout.nbytes + 64, 0x5A, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: layout.nbytes]
    lay_out(spec, lay, blob, memory)
    slices = np.split(memory[: layout.codes.nbytes], Kp // lay.ks)  # each by itself a blob's codes
    got = np.concatenate([_plain(lay, piece, n) for piece in slices], axis=1)
    assert np.array_equal(got, values)
    _, channel, groups = tiles.unpack_blob(tiles.slice_layout(codec, Kp, n, group), blob)
    _, channel_there, groups_there = tiles.unpack_blob(layout, memory)
    assert np.array_equal(channel, channel_there)
    assert groups is None or np.array_equal(groups, groups_there)


def _plain(lay: Lay, piece: np.ndarray, n: int) -> np.ndarray:
    """Codes [n, ks] of one K slice, from the layout: [n/G][ks/32][G][32]."""
    G = tiles.CODECS[lay.codec].G
    if lay.codec == "i4":
        piece = np.stack([piece.view(np.int8) << 4 >> 4, piece.view(np.int8) >> 4], axis=-1)
    whole = piece.reshape(n // G, lay.ks // 32, G, 32).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(whole).view(np.int8).reshape(n, lay.ks)


@pytest.mark.parametrize(("codec", "group"), [("i4", 0), ("nf4", 0), ("nf4", 64), ("i4", 32), ("i8", 128)])
def test_the_host_reads_a_slot_as_it_reads_the_pack(kernel: EmulatedKernel, codec: str, group: int) -> None:
    """Look-ups and products of the CPU from a slot's memory, which has another codec and other K slices."""
    K = 1280
    spec, blob, _ = random_slice(codec, 128, K, 1, group=group)
    cpu = CpuDevice(1)
    device = NpuDevice(Npu.open(kernel), cpu, name="emu")
    slot = device.make_slot(device.mapped_bytes(spec))
    device.room(spec, slot)[: blob.nbytes] = blob
    handle = device.fill(spec, slot, blob.nbytes)
    ids = np.array([0, 1, 33, 64, 127], np.int32)
    plain = native.gather([cpu.place(spec, blob)], ids, K, 128, None, 0)
    assert (bits(native.gather([device.host(handle)], ids, K, 128, None, 0).numpy()) == bits(plain.numpy())).all()
    x = native.Array.of(np.random.default_rng(1).standard_normal((3, K), dtype=np.float32))
    rows = native.quantise(x, None, 0, group)
    want, got = native.Array(3, 128), native.Array(3, 128)
    native.linear(x, rows, [cpu.place(spec, blob)], [want], [None])
    native.linear(x, rows, [device.host(handle)], [got], [None])
    assert (bits(want.numpy()) == bits(got.numpy())).all()
    device.free_slot(slot)
    device.close()


def test_hybrid_keeps_the_four_bits_for_few_rows(kernel: EmulatedKernel) -> None:
    """A slot has the inflated codes; the host's slice is the blob as it was read, half as many bytes."""
    cpu = CpuDevice(1)
    device = NpuDevice(Npu.open(kernel), cpu, name="hybrid", min_rows=8, grouped=False)
    spec, blob, _ = random_slice("nf4", 64, 256, 1)
    grouped, _, _ = random_slice("nf4", 64, 256, 1, group=32)
    assert [device.copies(spec), device.copies(grouped)] == [True, False]
    assert device.mapped_bytes(spec) == 64 * 256 + 4 * 64
    slot = device.make_slot(device.mapped_bytes(spec))
    room = device.room(spec, slot)
    assert room.ctypes.data != slot.memory.ctypes.data
    room[: blob.nbytes] = blob
    handle = device.fill(spec, slot, blob.nbytes)
    assert np.array_equal(room[: blob.nbytes], blob)
    assert handle.host.scales_address - room.ctypes.data == 64 * 256 // 2
    assert (slot.memory[: 64 * 256].view(np.int8) == _inflated(blob[: 64 * 128])).all()
    device.free_slot(slot)
    device.close()


def _inflated(codes: np.ndarray) -> np.ndarray:
    plain = tiles.unpack_codes("nf4", codes, 64, 256)
    from tests.devices.slices import NF4

    return tiles.pack_codes("i8", NF4[plain]).view(np.int8)


def test_codecs_have_their_numbers() -> None:
    assert {name: CODEC_IDS[name] for name in ("f32", "i8", "i4", "nf4", "f16")} == {
        "f32": 0, "i8": 1, "i4": 2, "nf4": 3, "f16": 4,
    }  # fmt: skip


@pytest.mark.parametrize("late", [3, 1 << 30])
def test_results_behind_their_interrupt(kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """int4 results are waited for; what never comes is tried again and then computed by the CPU."""
    asked = 0

    def written(self: Runner, chain: Chain, attempt: int) -> bool:
        nonlocal asked
        asked += 1
        return asked > late and original(self, chain, attempt)

    original = Runner._written
    monkeypatch.setattr(Runner, "_written", written)
    monkeypatch.setattr("ork.npu.running.INT4_LAG", 0.01)
    cpu = CpuDevice(1, w4a4=True)
    device = NpuDevice(Npu.open(kernel), cpu, name="emu", int4_k=INT4_K)
    spec, blob, _ = random_slice("i4", 64, 96, 1)
    x = native.Array.of(np.random.default_rng(2).standard_normal((2, 96), dtype=np.float32))
    rows = native.quantise(x, None, 0, 0, None, 7)
    want, got = native.Array(2, 64), native.Array(2, 64)
    cpu.linear([cpu.place(spec, blob)], x, rows, [want], [None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if late > 3 else "error")
        device.linear([device.place(spec, blob)], x, rows, [got], [None])
    assert (bits(want.numpy()) == bits(got.numpy())).all()
    assert (device.failed_ops, asked > late) == ((0, True) if late == 3 else (1, False))
    device.close()


def test_blobs_that_are_kept_for_the_cpu_are_counted(kernel: EmulatedKernel) -> None:
    """A board has one memory: what ops with few rows read lies beside the slots, and is told."""
    device = NpuDevice(Npu.open(kernel), CpuDevice(1), name="hybrid", min_rows=32)
    parts = [random_slice("i4", 64, 1280, seed) for seed in range(3)]
    slots = device.make_slots([device.mapped_bytes(spec) for spec, *_ in parts[:2]])
    for slot, (spec, blob, _) in zip([*slots, slots[0]], parts):  # the last one takes the first one's place
        device.room(spec, slot)[: blob.nbytes] = blob
        device.fill(spec, slot, blob.nbytes)
    assert 2 * parts[0][1].nbytes <= device.kept_bytes < 2 * parts[0][1].nbytes + 2 * 4096
    for slot in slots:
        device.free_slot(slot)
    assert device.kept_bytes == 0
    device.close()
