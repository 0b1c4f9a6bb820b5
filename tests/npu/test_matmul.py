"""Plans and programs of matmuls: the bank split, the register values, the vendor's own words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.errors import OrkError, UsageError
from ork.npu import isa
from ork.npu.matmul import KINDS, ROLES, Form, MatmulShape, Program, Tile, plan, program
from ork.npu.plan import bank_split, rows_limit, weight_banks
from ork.npu.soc import RK3588

CAPTURES = Path(os.environ.get("ORK_CAPTURES", Path(__file__).parents[2].parent / "shared" / "captures"))

shapes = st.builds(
    lambda kind, M, k, g: MatmulShape(M, 32 * k, KINDS[kind].group * g, kind),
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 1500),
    st.integers(1, 336 * 2),
    st.integers(1, 300),
)


def registers(tile: Tile) -> dict[int, int]:
    """What a program leaves in the registers."""
    return {
        o: v
        for t, v, o in map(isa.split, program(tile).words.tolist())
        if t in {isa.BLOCKS[b].target for b in ("CNA", "CORE", "DPU")}
    }


def one(M: int, K: int, N: int, kind: str = "int8", *, unproven: bool = False) -> Tile:
    (tile,) = plan(MatmulShape(M, K, N, kind), unproven=unproven)
    return tile


# Values that programs were seen or measured to work with: (shape, {register: value}).
KNOWN = [
    (
        (64, 2048, 512, "int8"),
        {
            0x100C: 0x20000000, 0x1014: 9, 0x1020: 0x10040, 0x1024: 0x07FF0800, 0x1028: 1, 0x102C: 64,
            0x1030: 2048 * 512, 0x1034: 2048, 0x1038: 0x1010200, 0x1040: 0x84, 0x1044: 32, 0x104C: 0xB,
            0x1050: 0x10000, 0x105C: 0x10000, 0x1060: 0, 0x1078: 0xF000F, 0x107C: 128, 0x1080: 0, 0x1084: 0x10040,
            0x1088: 2048, 0x1180: 0, 0x3010: 1, 0x3014: 63 << 16, 0x3018: 511, 0x400C: 0x1E4, 0x4010: 0x80000000,
            0x4024: 0x10, 0x4030: 0, 0x4034: 63, 0x4038: 127 << 16 | 127, 0x403C: 511 << 16 | 511, 0x4040: 0x53,
            0x4050: 0x7FC, 0x4054: 0, 0x4058: 511, 0x405C: 63 << 16, 0x4060: 0x53, 0x4070: 0x383, 0x4078: 1,
            0x4084: 1, 0x4088: 0, 0x40C0: 0x80, 0x412C: 0,
        },
    ),
    (
        (128, 512, 48, "fp16"),
        {
            0x100C: 0x20000120, 0x1020: 0x10080, 0x1024: 0x01FF0200, 0x1030: 2 * 512 * 48, 0x1034: 1024,
            0x1038: 0x1010030, 0x1040: 0x84, 0x1044: 16, 0x107C: 64, 0x1080: 0, 0x1088: 512, 0x3010: 0x201,
            0x4010: 0xA8000002, 0x4034: 127, 0x4038: 11 << 16 | 11, 0x4050: 0x36E, 0x405C: 127 << 16, 0x40C0: 0x40,
        },
    ),
    (
        (1, 4096, 192, "int4"),
        {
            0x100C: 0x360, 0x1010: 0x20, 0x1020: 0x10001, 0x102C: 1, 0x1030: 4096 * 96, 0x1034: 2048, 0x1040: 0xB1,
            0x1044: 32, 0x107C: 4, 0x1080: 0x0FFFFFFD, 0x3010: 0x601, 0x3014: 0, 0x4010: 0x38000006, 0x4034: 0,
            0x4038: 0, 0x4050: 0x7FE, 0x405C: 0, 0x40C0: 0x80,
        },
    ),
    (  # a batch of 8 rows: 32 lines
        (8, 512, 128, "int4"),
        {
            0x100C: 0x360, 0x1010: 16 * 33, 0x1020: 0x10020, 0x102C: 32, 0x1040: 0xB1, 0x1044: 4, 0x107C: 32,
            0x1080: 0x0FFFFFFD, 0x1084: 0x10020, 0x3014: 31 << 16, 0x4034: 31, 0x4038: 31 << 16 | 31, 0x405C: 0,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "values"), KNOWN)
def test_registers_hold_the_values_that_work(shape: tuple[int, int, int, str], values: dict[int, int]) -> None:
    found = registers(one(*shape))
    assert {hex(o): hex(found[o]) for o in values} == {hex(o): hex(v) for o, v in values.items()}


def test_unproven_int4_rows_are_dense_rows() -> None:
    found = registers(one(8, 512, 128, "int4", unproven=True))
    expected = {0x100C: 0x20000360, 0x1020: 0x10008, 0x107C: 16, 0x1080: 0, 0x4038: 15 << 16 | 15, 0x405C: 7 << 16}
    assert {o: found[o] for o in expected} == expected
    assert all(t.form is not Form.ROW for M in (1, 8, 100) for t in plan(MatmulShape(M, 512, 128, "int4")))


@pytest.mark.parametrize(
    ("name", "M", "K", "N", "kind"),
    [
        ("f16_matmul_m4_k32_n16", 4, 32, 16, "fp16"),
        ("i8_matmul_m4_k32_n32", 4, 32, 32, "int8"),
        ("i4_matmul_m1of4_k64_n64", 1, 64, 64, "int4"),
    ],
)
def test_words_are_those_of_the_vendor(name: str, M: int, K: int, N: int, kind: str) -> None:
    if not CAPTURES.is_dir():
        pytest.skip("no captured programs here (ORK_CAPTURES)")
    words = [int(w, 16) for w in json.loads((CAPTURES / f"{name}.json").read_text())["words"]]
    ours = program(one(M, K, N, kind)).words.copy()
    for offset in (*ROLES.values(), 0x0010):
        if values := {v for t, v, o in map(isa.split, words) if o == offset and t}:
            isa.patch(ours, offset, values.pop())
    body = len(words) - 4
    assert [hex(w) for w in ours.tolist()[:body]] == [hex(w) for w in words[:body]]
    assert ours.tolist()[-2:] == words[-2:]


# The vendor's 1040 for fp16, N = 16 (the two splits beyond capacity, K 1024 with M 192 and 256, left out).
VENDOR_BANKS = {
    (64, 256): 0xB1, (64, 512): 0xA2, (64, 1024): 0x84, (128, 256): 0xA2, (128, 512): 0x84, (128, 1024): 0x48,
    (192, 256): 0x93, (192, 512): 0x66, (256, 256): 0x84, (256, 512): 0x48,
}  # fmt: skip


def test_banks_are_split_as_the_vendor_splits_them() -> None:
    ours = {(M, K): registers(one(M, K, 16, "fp16"))[0x1040] for M, K in VENDOR_BANKS}
    assert ours == VENDOR_BANKS


@pytest.mark.parametrize(("K", "rows"), [(512, 704), (1024, 352), (2048, 160), (3072, 96), (4096, 64), (10752, 3)])
def test_rows_of_an_int8_program(K: int, rows: int) -> None:
    """Rows fill the data banks that a resident kernel group leaves; K = 4096 leaves 8 of 12, for 64 rows."""
    assert rows_limit("int8", Form.ROW, K) == rows
    assert weight_banks("int8", K) == -(-K // 1024)
    assert (
        registers(one(rows, K, 32) if K <= 4096 else plan(MatmulShape(rows, K, 32), ks=K)[0])[0x1040] >> 4 >= K // 1024
    )


@pytest.mark.parametrize(("K", "rows"), [(128, 16), (768, 16), (2560, 4), (3072, 4), (3584, 3), (4096, 3), (8192, 1)])
def test_int4_batches_stay_below_what_hangs(K: int, rows: int) -> None:
    assert rows_limit("int4", Form.BATCH, K) == rows


@given(shapes)
def test_tiles_cover_the_matmul_once_and_fit_the_chip(shape: MatmulShape) -> None:
    tiles = plan(shape)
    assert sum(t.M * t.K * t.N for t in tiles) == shape.M * shape.K * shape.N
    assert len({(t.m0, t.k0, t.n0) for t in tiles}) == len(tiles)
    kind = KINDS[shape.kind]
    for t in tiles:
        assert 0 <= t.m0 < t.m1 <= shape.M
        assert 0 <= t.k0 < t.k1 <= shape.K
        assert 0 <= t.n0 < t.n1 <= shape.N
        assert t.N <= 8192
        assert t.K <= 4096
        assert t.data_bank >= 1
        assert t.data_bank + t.weight_bank == 12
        assert t.weight_bank >= -(-t.K // 1024)
        chip_rows = 4 * t.M if t.form is Form.BATCH else t.M
        assert chip_rows <= 2047
        assert chip_rows * -(-t.K * kind.bits // 8 // 64) <= 512 * t.data_bank


@given(shapes)
def test_programs_differ_in_size_alone(shape: MatmulShape) -> None:
    """Tiles of one size share a program, its words hold every address as 0 and say where each belongs."""
    by_size: dict[tuple[int, ...], object] = {}
    for t in plan(shape):
        p = program(t)
        assert by_size.setdefault((t.M, t.K, t.N), p) is p
        assert len(p.words) == p.body + 4
        assert not p.words.flags.writeable
        for role, offset in ROLES.items():
            assert list(p.operands[role].positions) == list(isa.positions(p.words, offset))
            assert all(isa.split(int(p.words[i]))[1] == 0 for i in p.operands[role].positions)


def extents(p: Program) -> tuple[int, ...]:
    return tuple(p.operands[role].nbytes for role in ("input", "weights", "output"))


def test_extents_are_what_the_chip_touches() -> None:
    p = program(one(5, 64, 32), a_pitch=128, out_pitch=256)
    assert extents(p) == (4 * 128 + 64, 64 * 32, 4 * 256 + 128)
    batch = program(one(3, 64, 64, "int4"))  # the last row's copies reach 48 bytes past it
    assert extents(batch) == (2 * 64 + 32 + 48, 32 * 64, 12 * 128)


def test_pitches_are_written_in_atoms() -> None:
    tile = one(5, 64, 32)
    words = program(tile, a_pitch=128, out_pitch=256).words
    values = {o: v for _, v, o in map(isa.split, words.tolist())}
    assert values[0x107C] == 8
    assert values[0x4038] == 15 << 16 | 15


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MatmulShape(0, 32, 32), "all positive"),
        (lambda: MatmulShape(1, 48, 32), "K must be a multiple of 32"),
        (lambda: MatmulShape(1, 64, 48), "N of 32"),
        (lambda: MatmulShape(1, 64, 32, "int4"), "N of 64"),
        (lambda: MatmulShape(1, 64, 32, "bf16"), "use one of int8, fp16, int4"),
        (lambda: plan(MatmulShape(1, 16384, 32), ks=16384), "cut K into slices"),
        (lambda: plan(MatmulShape(1, 4096, 32), ks=96), "divides K"),
        (lambda: program(one(2, 64, 32), a_pitch=32), "input rows 32 bytes apart"),
        (lambda: program(one(2, 64, 32), a_pitch=72), "multiple of 16"),
        (lambda: program(one(2, 64, 32), out_pitch=64), "output rows 64 bytes apart"),
        (lambda: program(one(2, 64, 64, "int4"), a_pitch=32), "must be 64"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OrkError, match=says) as e:
        make()
    assert "\n" not in str(e.value)
    assert isinstance(e.value, UsageError)


def test_split_gives_weights_what_rows_leave() -> None:
    assert bank_split("int8", Form.ROW, 1, 512) == (1, 11)
    assert bank_split("int8", Form.ROW, 64, 4096) == (8, 4)
    assert bank_split("int4", Form.BATCH, 16, 768) == (1, 11)
    assert RK3588.cbuf_banks == np.sum(bank_split("fp16", Form.ROW, 100, 1024))
