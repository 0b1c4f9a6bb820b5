"""Listings and differences of programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ork.npu import isa
from ork.npu.disasm import diff, disassemble, listing, reassemble, text

E = isa.encode


def tiny_matmul(rows: int = 2, output: int = 0x3000) -> isa.Words:
    """int8 [rows, 32] x [32, 32] -> int32, row mode: only what a clean core needs."""
    return isa.assemble(
        [
            (0x4004, E("DPU.S_POINTER", **pointer())),
            (
                0x100C,
                E(
                    "CNA.CONV_CON1",
                    nonalign_dma=0,
                    group_line_off=1,
                    deconv=0,
                    argb_in=0,
                    proc_precision=isa.Precision.INT8,
                    in_precision=isa.Precision.INT8,
                    conv_mode=isa.ConvMode.DIRECT,
                ),
            ),
            (0x1020, E("CNA.DATA_SIZE0", datain_width=1, datain_height=rows)),
            (0x1024, E("CNA.DATA_SIZE1", datain_channel_real=32, datain_channel=32)),
            (0x1034, E("CNA.WEIGHT_SIZE1", weight_bytes_per_kernel=32)),
            (0x1040, E("CNA.CBUF_CON0", weight_reuse=0, data_reuse=0, fc_data_bank=0, weight_bank=11, data_bank=1)),
            (0x1070, E("CNA.FEATURE_DATA_ADDR", feature_base_addr=0x1000)),
            (0x1080, E("CNA.DMA_CON2", surf_stride=-3)),
            (0x1110, E("CNA.DCOMP_ADDR0", decompress_addr0=0x2000)),
            (0x3014, E("CORE.DATAOUT_SIZE_0", dataout_height=rows, dataout_width=1)),
            (
                0x4010,
                E(
                    "DPU.DATA_FORMAT",
                    out_precision=isa.Precision.INT32,
                    in_precision=isa.Precision.INT8,
                    ew_truncate_neg=0,
                    bn_mul_shift_value_neg=0,
                    bs_mul_shift_value_neg=0,
                    mc_surf_out=0,
                    proc_precision=isa.Precision.INT8,
                ),
            ),
            (0x4020, E("DPU.DST_BASE_ADDR", dst_base_addr=output)),
            (0x4014, E("DPU.OFFSET_PEND", offset_pend=0)),
            (0x4048, E("DPU.BS_MUL_CFG", bs_mul_operand=0, bs_mul_shift_value=0, bs_truncate_src=0, bs_mul_src=0)),
        ]
    )


def pointer() -> dict[str, int]:
    on = {"pointer_pp_mode": 1, "executer_pp_en": 1, "pointer_pp_en": 1}
    return on | dict.fromkeys(("executer", "executer_pp_clear", "pointer_pp_clear", "pointer"), 0)


# Written by hand from the datasheet.
LISTING = """\
program 0
     0  4004  DPU.S_POINTER                     0000000e  pointer_pp_mode=1 executer_pp_en=1 pointer_pp_en=1
     1  100c  CNA.CONV_CON1                     20000000  group_line_off=1 proc_precision=INT8 in_precision=INT8
     2  1020  CNA.DATA_SIZE0                    00010002  datain_width=1 datain_height=2
     3  1024  CNA.DATA_SIZE1                    001f0020  datain_channel_real=32 datain_channel=32
     4  1034  CNA.WEIGHT_SIZE1                  00000020  weight_bytes_per_kernel=32
     5  1040  CNA.CBUF_CON0                     000000b1  weight_bank=11 data_bank=1
     6  1070  CNA.FEATURE_DATA_ADDR             00001000  feature_base_addr=0x1000
     7  1080  CNA.DMA_CON2                      0ffffffd  surf_stride=-3
     8  1110  CNA.DCOMP_ADDR0                   00002000  decompress_addr0=0x2000
     9  3014  CORE.DATAOUT_SIZE_0               00010000  dataout_height=2 dataout_width=1
    10  4010  DPU.DATA_FORMAT                   80000000  out_precision=INT32 in_precision=INT8 proc_precision=INT8
    11  4020  DPU.DST_BASE_ADDR                 00003000  dst_base_addr=0x3000
    12  4014  DPU.OFFSET_PEND                   00000000  offset_pend=0
    13  4048  DPU.BS_MUL_CFG                    00000000
    14        no operation
    15  0014  PC.REGISTER_AMOUNTS               00000000
    16  0000  marker                            00000000
    17  0008  OPERATION_ENABLE                  0000000d  starts CNA CORE DPU"""


def test_a_listing_reads_like_the_datasheet() -> None:
    assert text(disassemble(tiny_matmul())) == LISTING


def test_a_dump_is_listed_program_by_program() -> None:
    first = isa.assemble([(0x1040, 0xB1)], next_address=0xFFFFC400, next_amount=isa.fetch_amount(1), enable=0x7D)
    words = np.concatenate([first, np.zeros(3, np.uint64), isa.assemble([(0x6084, 0x12)], enable=0x60)])
    assert text(disassemble(words)).splitlines() == [
        "program 0",
        "     0  1040  CNA.CBUF_CON0                     000000b1  weight_bank=11 data_bank=1",
        "     1  0010  PC.BASE_ADDRESS                   ffffc400  pc_source_addr=0xffffc400",
        "     2  0014  PC.REGISTER_AMOUNTS               00000002  pc_data_amount=2",
        "     3  0000  marker                            00000000",
        "     4  0008  OPERATION_ENABLE                  0000007d  starts CNA CORE DPU DPU_RDMA PPU PPU_RDMA",
        "     5        no operation x 3",
        "program 1",
        "     8  6084  PPU.DATA_FORMAT                   00000012  index_add=1 proc_precision=FP16",
        "     9        no operation",
        "    10  0014  PC.REGISTER_AMOUNTS               00000000",
        "    11  0000  marker                            00000000",
        "    12  0008  OPERATION_ENABLE                  00000060  starts PPU PPU_RDMA",
    ]


def test_what_is_not_known_is_shown_as_it_is() -> None:
    words = np.array([0x02010000_00071018, 0x1001000000051070, 0x0201FFFF00001020, 0xBEEF000000000000], np.uint64)
    assert text(disassemble(words)).splitlines()[1:] == [
        "     0  1018  target 0x0201, no known register  00000007",
        "     1  1070  target 0x1001, no known register  00000005",
        "     2  1020  CNA.DATA_SIZE0                    ffff0000  datain_width=2047 reserved=0xf8000000",
        "     3  0000  target 0xbeef, no known register  00000000",
    ]


TARGETS = st.sampled_from([0, 1, 0x41, 0x81, 0x101, 0x201, 0x801, 0x1001, 0x2001, 0x4001, 0x8001])
PLAUSIBLE = st.builds(
    isa.word, TARGETS, st.sampled_from([*isa.REGISTERS, 0x0008, 0, 0x1018]), st.integers(0, 0xFFFFFFFF)
)


@given(st.lists(st.one_of(PLAUSIBLE, st.integers(0, (1 << 64) - 1)), max_size=60), st.data())
def test_any_words_are_listed_and_come_back(values: list[int], data: st.DataObject) -> None:
    words = np.array(values, np.uint64)
    listed = disassemble(words)
    assert np.array_equal(reassemble(listed), words)
    numbered = [row for row in listing(listed) if not row.startswith("program")]
    covered = sum(int(row.rsplit(" x ", 1)[1]) if " no operation x " in row else 1 for row in numbered)
    assert covered == len(words)
    assert not list(diff(words, words))
    other = data.draw(st.permutations(values))
    assert all(str(found) for found in diff(words, np.array(other, np.uint64)))


# --------------------------------------------------------------------------------------------------- differences


def test_a_difference_names_register_fields_and_both_values() -> None:
    found = list(diff(tiny_matmul(2), tiny_matmul(4, output=0x5000)))
    assert [str(d) for d in found] == [
        "program 0  1020  CNA.DATA_SIZE0                    00010002 -> 00010004  datain_height 2 -> 4",
        "program 0  3014  CORE.DATAOUT_SIZE_0               00010000 -> 00030000  dataout_height 2 -> 4",
        "program 0  4020  DPU.DST_BASE_ADDR                 00003000 -> 00005000  dst_base_addr 0x3000 -> 0x5000",
    ]
    assert found[0].fields == {"datain_height": (2, 4)}


def test_order_does_not_matter_but_the_last_write_does() -> None:
    assert not list(diff(isa.assemble([(0x1020, 1), (0x1040, 2)]), isa.assemble([(0x1040, 2), (0x1020, 1)])))
    (found,) = diff(isa.assemble([(0x1034, 5), (0x1034, 6)]), isa.assemble([(0x1034, 6)]))
    assert str(found).endswith("00000006 in both, written differently before")
    (found,) = diff(isa.assemble([(0x1034, 5), (0x1034, 6)]), isa.assemble([(0x1034, 6), (0x1034, 5)]))
    assert found.fields == {"weight_bytes_per_kernel": (6, 5)}


def test_registers_and_programs_of_one_side_only() -> None:
    one, two = isa.assemble([(0x1034, 5)]), isa.assemble([(0x1044, 7)])
    assert [str(d)[11:] for d in diff(one, two)] == [
        "1034  CNA.WEIGHT_SIZE1                  00000005 in the first only",
        "1044  CNA.CBUF_CON1                     00000007 in the second only",
    ]
    longer = list(diff(one, np.concatenate([one, two])))
    assert {(d.program, d.a) for d in longer} == {(1, None)}
    assert "OPERATION_ENABLE" in {d.name for d in longer}


def test_blocks_started_and_precisions_are_compared_by_name() -> None:
    a = isa.assemble([(0x7030, 0)], enable=0x60)
    b = isa.assemble([(0x7030, 2)], enable=0x40)
    assert [str(d).split("  ")[-1] for d in diff(a, b)] == ["in_precision INT8 -> FP16", "ppu_op_en 1 -> 0"]


@pytest.mark.parametrize("kind", ["write", "enable"])
def test_lines_come_back_from_their_fields_not_from_the_value(kind: str) -> None:
    line = next(x for x in disassemble(tiny_matmul()) if x.kind == kind)
    name = "executer" if kind == "write" else "ppu_op_en"
    changed = type(line)(**{**vars(line), "fields": {**line.fields, name: 1}})
    assert changed.word != line.word
