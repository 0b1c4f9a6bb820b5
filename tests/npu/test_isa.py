"""Encoding of registers, assembly and patching: nothing is lost, nothing wrong goes in."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.npu import isa
from ork.npu.isa import REGISTERS, AssemblyError, Enable, Precision

U32 = st.integers(0, 0xFFFFFFFF)
WRITABLE = [offset for offset, r in REGISTERS.items() if r.block != "GLOBAL"]
EVERY = pytest.mark.parametrize("offset", REGISTERS, ids=lambda o: f"{o:04x}-{REGISTERS[o].full_name}")


# ------------------------------------------------------------------------------------------------ registers


@EVERY
def test_fields_of_a_register_are_sound(offset: int) -> None:
    reg = REGISTERS[offset]
    assert all(0 <= f.lo <= f.hi <= 31 for f in reg.fields)
    assert len({f.name for f in reg.fields}) == len(reg.fields)
    assert reg.mask.bit_count() == sum(f.bits for f in reg.fields)  # no bit in two fields
    if reg.block != "GLOBAL":
        assert offset >> 12 == isa.BLOCKS[reg.block].base >> 12
        assert isa.target_of(offset) == isa.BLOCKS[reg.block].target


@EVERY
def test_every_field_takes_its_whole_range_and_nothing_else(offset: int) -> None:
    reg = REGISTERS[offset]
    base = {f.name: max(f.low, 0) for f in reg.fields}
    for f in reg.fields:
        assert (f.high - f.low) // f.unit == (1 << f.bits) - 1
        for value in (f.low, f.high):
            stored = isa.encode(offset, **{**base, f.name: value})
            assert isa.decode(offset, stored) == {**base, f.name: value}
        for value in (f.low - f.unit, f.high + f.unit):
            with pytest.raises(AssemblyError, match=rf"{f.name} = {value}.*from {f.low} to {f.high}"):
                isa.encode(offset, **{**base, f.name: value})


@given(st.sampled_from(list(REGISTERS)), U32)
def test_decoding_loses_nothing(offset: int, value: int) -> None:
    fields = isa.decode(offset, value)
    assert isa.encode(offset, **fields) == value
    assert isa.encode(REGISTERS[offset].full_name, **fields) == value


@given(st.sampled_from(WRITABLE), st.data())
def test_encoding_and_decoding_are_inverse(offset: int, data: st.DataObject) -> None:
    fields = {
        f.name: data.draw(st.integers(f.low // f.unit, f.high // f.unit)) * f.unit for f in REGISTERS[offset].fields
    }
    assert isa.decode(offset, isa.encode(offset, **fields)) == fields


@EVERY
def test_a_forgotten_field_is_refused_by_name(offset: int) -> None:
    reg = REGISTERS[offset]
    full = {f.name: max(f.low, 0) for f in reg.fields}
    for f in reg.fields:
        rest = {name: value for name, value in full.items() if name != f.name}
        if f.optional:
            assert isa.encode(offset, **rest) == isa.encode(offset, **full)
        else:
            with pytest.raises(AssemblyError, match=rf"{reg.full_name}: {f.name} not given"):
                isa.encode(offset, **rest)


def test_unknown_names_reserved_bits_and_crooked_addresses_are_refused() -> None:
    with pytest.raises(AssemblyError, match="no field hight: it has datain_width, datain_height"):
        isa.encode(0x1020, datain_width=1, datain_height=1, hight=1)
    with pytest.raises(AssemblyError, match="overlaps"):
        isa.encode(0x1020, datain_width=1, datain_height=1, reserved=1)
    with pytest.raises(AssemblyError, match="multiple of 16"):
        isa.encode("DPU.DST_BASE_ADDR", dst_base_addr=0x1008)
    with pytest.raises(AssemblyError, match="no register at offset 0x1018"):
        isa.decode(0x1018, 0)
    with pytest.raises(AssemblyError, match=r"no register is named CNA\.NOTHING"):
        isa.register("CNA.NOTHING")
    with pytest.raises(AssemblyError, match=r"DPU\.DATA_FORMAT or PPU\.DATA_FORMAT"):
        isa.register("DATA_FORMAT")
    assert isa.register("CBUF_CON0").offset == 0x1040


# Register values of published programs, read by hand: an oracle that shares nothing with the tables.
KNOWN = [
    (0x100C, 0x20000120, {"group_line_off": 1, "proc_precision": 2, "in_precision": 2}),
    (0x100C, 0x00000360, {"proc_precision": 6, "in_precision": 6}),
    (0x1010, 0x50000020, {"multi_core": 5, "feature_grains": 2}),
    (0x1014, 0x00000009, {"conv_y_stride": 1, "conv_x_stride": 1}),
    (0x1020, 0x00010004, {"datain_width": 1, "datain_height": 4}),
    (0x1024, 0x0DFF0E00, {"datain_channel_real": 3584, "datain_channel": 3584}),
    (0x1038, 0x030301F4, {"weight_width": 3, "weight_height": 3, "weight_kernels": 500}),
    (0x1040, 0x0000201B, {"weight_reuse": 1, "weight_bank": 1, "data_bank": 11}),
    (0x104C, 0x0000000B, {"data_sign": 1, "cvt_type": 1, "cvt_bypass": 1}),
    (0x1050, 0x4000FF80, {"cvt_scale0": 0x4000, "cvt_offset0": -128}),
    (0x1080, 0x0FFFFFFD, {"surf_stride": -3}),
    (0x3010, 0x00000601, {"proc_precision": 6, "qd_en": 1}),
    (0x400C, 0x000001E4, {"burst_len": 15, "output_mode": 2}),
    (0x400C, 0x000001FC, {"burst_len": 15, "conv_mode": 3, "output_mode": 2}),
    (0x4010, 0xA8000002, {"out_precision": 5, "in_precision": 2, "proc_precision": 2}),
    (0x4010, 0x000044E0, {"bn_mul_shift_value_neg": 17, "bs_mul_shift_value_neg": 14}),
    (0x4024, 0x00000080, {"dst_surf_stride": 128}),
    (0x403C, 0x03E903EF, {"orig_channel": 1002, "channel": 1008}),
    (0x4040, 0x00020150, {"bs_alu_algo": 2, "bs_alu_src": 1, "bs_relu_bypass": 1, "bs_mul_bypass": 1}),
    (0x4050, 0x0000036E, {"size_e_2": 3, "size_e_1": 3, "size_e_0": 3, "od_bypass": 1}),
    (0x4054, 0x0000FF80, {"ow_op": -128}),
    (0x405C, 0x00030000, {"height_wdma": 4, "width_wdma": 1}),
    (0x4068, 0x411C0800, {"bn_mul_operand": 16668, "bn_mul_shift_value": 8}),
    (
        0x4070,
        0x904002C4,
        {"ew_cvt_type": 1, "ew_data_mode": 1, "edata_size": 1, "ew_relu_bypass": 1, "ew_lut_bypass": 1}
        | {"ew_op_src": 1, "ew_op_type": 1},
    ),
    (0x4084, 0x00010001, {"fp32tofp16_en": 1, "out_cvt_scale": 1}),
    (0x4088, 0x0000F000, {"minus_exp": 15}),
    (0x4110, 0xFFFFC000, {"lut_le_start": -16384}),
    (0x412C, 0x000001A0, {"lut_lo_slope_oflow_shift": 13}),
    (0x5034, 0x8000000A, {"erdma_data_mode": 2, "erdma_data_size": 2, "ov4k_bypass": 1}),
    (
        0x5044,
        0x00017849,
        {"in_precision": 2, "burst_len": 15, "proc_precision": 2, "mrdma_fp16tofp32_en": 1, "flying_mode": 1},
    ),
    (0x5048, 0x01C00000, {"line_notch_addr": 56}),
    (0xF008, 0x0000001D, {"cna_op_en": 1, "core_op_en": 1, "dpu_op_en": 1, "dpu_rdma_op_en": 1}),
]


@pytest.mark.parametrize(("offset", "value", "fields"), KNOWN, ids=lambda x: f"{x:x}" if isinstance(x, int) else "")
def test_values_of_published_programs(offset: int, value: int, fields: dict[str, int]) -> None:
    assert {name: v for name, v in isa.decode(offset, value).items() if v} == fields


# ---------------------------------------------------------------------------------------------------- words


def test_a_word_in_memory_is_offset_value_target() -> None:
    made = isa.word(0x0201, 0x1040, 0x123456B1)
    assert struct.pack("<Q", made) == struct.pack("<HIH", 0x1040, 0x123456B1, 0x0201)
    assert isa.split(made) == (0x0201, 0x123456B1, 0x1040)
    target, value, offset = isa.split(np.array([made, 0x0081_0000_000D_0008], np.uint64))
    assert target.tolist() == [0x0201, 0x0081]
    assert value.tolist() == [0x123456B1, 13]
    assert offset.tolist() == [0x1040, 8]
    for bad in ((0x10000, 0, 0), (0, -4, 0), (0, 0, 1 << 32)):
        with pytest.raises(AssemblyError, match="does not fit"):
            isa.word(*bad)


def test_fetch_amounts_of_published_chains() -> None:
    seen = {108: 0x37, 104: 0x35, 69: 0x24, 70: 0x24, 63: 0x21, 28: 0x0F, 26: 0x0E, 24: 0x0D}
    seen |= {25: 0x0E, 17: 0x0A, 13: 8, 12: 7, 9: 6, 1097: 0x226}
    assert {body: isa.fetch_amount(body) for body in seen} == seen
    for body in seen:  # body and trailer are always read, and at most one word more
        assert isa.fetched_words(isa.fetch_amount(body)) - (body + isa.REGCFG_EXTRA) in (0, 1)
    assert isa.fetched_words(0x2000E) == isa.fetched_words(0x0E)


# ------------------------------------------------------------------------------------------------- programs

BODY = [(0x1040, 0xB1), (0x1070, 0x1000), (0x4004, 0x0E), (0x1040, 0xB1), (0x1070, 0x1000)]


def test_a_program_is_its_writes_and_a_trailer() -> None:
    words = isa.assemble(BODY, enable=Enable.CNA | Enable.CORE | Enable.DPU)
    assert words.dtype == np.uint64
    assert [f"{w:016x}" for w in words.tolist()] == [
        "0201000000b11040",
        "0201000010001070",
        "10010000000e4004",
        "0201000000b11040",
        "0201000010001070",
        "0000000000000000",
        "0101000000000014",
        "0041000000000000",
        "00810000000d0008",
    ]
    linked = isa.assemble(BODY, next_address=0xFFFFC400, next_amount=0x37, enable=0x18)
    assert [f"{w:016x}" for w in linked.tolist()[-4:]] == [
        "0101ffffc4000010",
        "0101000000370014",
        "0041000000000000",
        "0081000000180008",
    ]


def test_links_are_made_and_taken_back() -> None:
    words = isa.assemble(BODY)
    last = words.copy()
    isa.link(words, 0xFFFFC400, 0x37)
    assert np.array_equal(words, isa.assemble(BODY, next_address=0xFFFFC400, next_amount=0x37))
    isa.link(words)
    assert np.array_equal(words, last)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"next_address": 0x1008, "next_amount": 1}, "multiple of 16"),
        ({"next_address": 1 << 32, "next_amount": 1}, "must be from 0 to"),
        ({"next_address": 0x1000, "next_amount": 1 << 16}, "must be from 0 to 65535"),
        ({"next_address": 0x1000}, "both or neither"),
        ({"next_amount": 1}, "both or neither"),
        ({"enable": 0}, "op-enable mask 0x0"),
        ({"enable": 0x0F}, "op-enable mask 0xf"),
    ],
)
def test_a_trailer_that_cannot_run_is_refused(kwargs: dict[str, int], why: str) -> None:
    with pytest.raises(AssemblyError, match=why):
        isa.assemble(BODY, **kwargs)


@pytest.mark.parametrize("write", [(0x1018, 0), (0x2000, 0), (0xF008, 0), (0x1040, 1 << 32), (0x1040, -1)])
def test_a_write_that_the_chip_does_not_have_is_refused(write: tuple[int, int]) -> None:
    with pytest.raises(AssemblyError):
        isa.assemble([write])


def test_patching_finds_every_write_of_the_register_and_no_other_word() -> None:
    # the third word has the offset but not the block of the feature address: it is not a write of it
    words = np.append(isa.assemble(BODY), np.uint64(isa.word(0x1001, 0x1070, 5)))
    before = words.copy()
    assert isa.positions(words, 0x1070).tolist() == [1, 4]
    assert isa.patch(words, 0x1070, 0xFFFE4000) == 2
    changed = np.flatnonzero(words != before)
    assert changed.tolist() == [1, 4]
    assert set(words[changed].tolist()) == {isa.word(0x0201, 0x1070, 0xFFFE4000)}
    assert isa.patch(words, 0x5018, 0) == 0
    assert isa.patch(words, 0x0010, 0x1000) == 0  # the last program of a chain names no next one
    with pytest.raises(AssemblyError, match="does not fit"):
        isa.patch(words, 0x1070, 1 << 32)


WRITES = st.lists(st.tuples(st.sampled_from(WRITABLE), U32), min_size=1, max_size=40)


@given(WRITES, st.data())
def test_masked_words_are_equal_exactly_when_addresses_alone_differ(
    writes: list[tuple[int, int]], data: st.DataObject
) -> None:
    words = isa.assemble(writes)
    key = isa.mask_addresses(words)
    assert len(key) == 8 * len(words)
    index = data.draw(st.integers(0, len(writes) - 1))
    offset, value = writes[index]
    other = data.draw(U32.filter(lambda v: v != value))
    changed = isa.assemble([*writes[:index], (offset, other), *writes[index + 1 :]])
    assert (isa.mask_addresses(changed) == key) == (offset in isa.ADDRESS_OFFSETS)
    assert np.array_equal(words, isa.assemble(writes))  # the words themselves stay


def test_address_registers_are_those_named_so_in_the_tables() -> None:
    named = {o for o, r in REGISTERS.items() if r.name.endswith(("_ADDR", "ADDR0", "BASE_ADDRESS"))}
    # one is the kernel's, and is added to all others; the other is a distance
    assert set(isa.ADDRESS_OFFSETS) == named - {0x0034, 0x4038}


def test_precisions_are_one_numbering() -> None:
    assert isa.decode("CNA.CONV_CON1", 0x360)["in_precision"] == Precision.INT4
    assert isa.decode("DPU.DATA_FORMAT", 0x80000000)["out_precision"] == Precision.INT32
