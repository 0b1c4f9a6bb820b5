"""Matmuls as register programs: a 1x1 convolution whose channels are K and whose kernels are N. Pure functions.

The registers are written in the order of the vendor's matmul programs, those that it repeats included, so that the
shapes it was seen with give its words. What does not depend on the shape is in `_CONSTANT`; a register that is in
neither table is written 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from ork.errors import UsageError
from ork.npu import isa
from ork.npu.plan import KINDS, Form, MatmulShape, Tile, form_of, lines, plan
from ork.npu.program import Operand, Program
from ork.npu.soc import RK3588, Soc

__all__ = ["KINDS", "ROLES", "Form", "MatmulShape", "Program", "Tile", "form_of", "plan", "program"]

ROLES = MappingProxyType({"input": 0x1070, "weights": 0x1110, "output": 0x4020})  # what a program is patched with

_ORDER_TEXT = """
    1040 1104 1100 100c 4004
    100c 1010 1014 1020 1024 1028 102c 1030 1034 1038 1040 1044 104c 1050 1054 1058 105c 1060 1064 1068 1070 1074 1078
    107c 1080 1084 1088 1100 1104 1110 1140 1144 1148 114c 1150 1154 1158 115c 1160 1164 1168 116c 1170 1174 1178 117c
    1180 1184
    3010 3014 3018 301c 3030
    400c 4010 4014 4020 4024 4030 4034 4038 403c 4040 4044 4048 404c 4050 4054 4058 405c 4060 4064 4068 406c 4070 4074
    4078 407c 4080 4084 4088 4090 4094 4098 409c 40a0 40a4 40a8 40ac 40c0 40c4
    4100 4104 4108 410c 4110 4114 4118 411c 4120 4124 4128 412c
"""
_ORDER = tuple(int(offset, 16) for offset in _ORDER_TEXT.split())
REGCFG_AMOUNT = len(_ORDER)  # 108


def _value(name: str, **fields: int) -> int:
    """`isa.encode` with every field that is not named at 0 (which fields stored minus one refuse)."""
    return isa.encode(name, **{field.name: fields.pop(field.name, 0) for field in isa.register(name).fields}, **fields)


_CONSTANT = {
    "CNA.CONV_CON3": _value("CNA.CONV_CON3", conv_x_stride=1, conv_y_stride=1),
    "CNA.DATA_SIZE2": _value("CNA.DATA_SIZE2", dataout_width=1),
    "CNA.CVT_CON0": _value("CNA.CVT_CON0", data_sign=1, cvt_type=1, cvt_bypass=1),
    "CNA.CVT_CON1": _value("CNA.CVT_CON1", cvt_scale0=1),
    "CNA.CVT_CON2": _value("CNA.CVT_CON2", cvt_scale1=1),
    "CNA.CVT_CON3": _value("CNA.CVT_CON3", cvt_scale2=1),
    "CNA.CVT_CON4": _value("CNA.CVT_CON4", cvt_scale3=1),
    "CNA.DMA_CON0": _value("CNA.DMA_CON0", weight_burst_len=15, data_burst_len=15),
    # both register groups take turns, the pointers moved by the blocks themselves
    "DPU.S_POINTER": _value("DPU.S_POINTER", pointer_pp_mode=1, executer_pp_en=1, pointer_pp_en=1),
    "DPU.FEATURE_MODE_CFG": _value("DPU.FEATURE_MODE_CFG", burst_len=15, output_mode=2),
    "DPU.DST_SURF_STRIDE": _value("DPU.DST_SURF_STRIDE", dst_surf_stride=16),
    "DPU.DATA_CUBE_WIDTH": _value("DPU.DATA_CUBE_WIDTH", width=1),
    # all of the output stage is bypassed
    "DPU.BS_CFG": _value("DPU.BS_CFG", bs_relu_bypass=1, bs_mul_bypass=1, bs_alu_bypass=1, bs_bypass=1),
    "DPU.BN_CFG": _value("DPU.BN_CFG", bn_relu_bypass=1, bn_mul_bypass=1, bn_alu_bypass=1, bn_bypass=1),
    "DPU.EW_CFG": _value(
        "DPU.EW_CFG", ew_relu_bypass=1, ew_op_cvt_bypass=1, ew_lut_bypass=1, ew_op_bypass=1, ew_bypass=1
    ),
    "DPU.EW_CVT_SCALE_VALUE": _value("DPU.EW_CVT_SCALE_VALUE", ew_op_cvt_scale=1),
    "DPU.OUT_CVT_SCALE": _value("DPU.OUT_CVT_SCALE", out_cvt_scale=1),
}


def _of_shape(tile: Tile, a_pitch: int, out_pitch: int, soc: Soc) -> dict[str, int]:
    """Values of the registers that depend on the shape. Pitches in bytes."""
    kind, M, K, N = KINDS[tile.kind], tile.M, tile.K, tile.N
    H = lines(tile.form, M)
    precision = kind.precision
    entries = kind.entries(K, soc)
    row_mode = tile.form is Form.ROW
    kernel = kind.row_bytes(K)
    size_e = kind.group * kind.out_bytes // soc.atom_bytes - 1  # atoms of one pixel of a kernel group, minus one
    # Atoms between lines; in a batch without effect, as the writer then counts lines of one pixel.
    notch = {Form.ROW: out_pitch // soc.atom_bytes - 1, Form.SINGLE: 0, Form.BATCH: N // 4 - 1}[tile.form]
    # A prefetch hint without effect on results: one line more than there are, within the data banks and the field.
    grains = min(H + 1, tile.data_bank * soc.entries_per_bank // entries, 1023)
    # In a batch the writer's counters wrap at each pixel, so that pixels follow each other group by group.
    wdma_lines = H if row_mode else 1
    return {
        "CNA.CBUF_CON0": _value("CNA.CBUF_CON0", data_bank=tile.data_bank, weight_bank=tile.weight_bank),
        "CNA.CONV_CON1": _value(
            "CNA.CONV_CON1", group_line_off=int(row_mode), proc_precision=precision, in_precision=precision
        ),
        "CNA.CONV_CON2": _value("CNA.CONV_CON2", feature_grains=grains),
        "CNA.DATA_SIZE0": _value("CNA.DATA_SIZE0", datain_width=1, datain_height=H),
        "CNA.DATA_SIZE1": _value("CNA.DATA_SIZE1", datain_channel_real=K, datain_channel=K),
        "CNA.DATA_SIZE3": _value("CNA.DATA_SIZE3", dataout_atomics=H),
        "CNA.WEIGHT_SIZE0": _value("CNA.WEIGHT_SIZE0", weight_bytes=kernel * N),
        "CNA.WEIGHT_SIZE1": _value("CNA.WEIGHT_SIZE1", weight_bytes_per_kernel=kernel),
        "CNA.WEIGHT_SIZE2": _value("CNA.WEIGHT_SIZE2", weight_width=1, weight_height=1, weight_kernels=N),
        "CNA.CBUF_CON1": _value("CNA.CBUF_CON1", data_entries=entries),
        # group mode fetches four lines of one atom together: from their end back to the second atom is -3
        "CNA.DMA_CON1": _value(
            "CNA.DMA_CON1", line_stride=4 if tile.form is Form.SINGLE else a_pitch // soc.atom_bytes
        ),
        "CNA.DMA_CON2": _value("CNA.DMA_CON2", surf_stride=0 if row_mode else -3),
        "CNA.FC_DATA_SIZE0": _value("CNA.FC_DATA_SIZE0", dma_width=1, dma_height=H),
        "CNA.FC_DATA_SIZE1": _value("CNA.FC_DATA_SIZE1", dma_channel=K),
        "CORE.MISC_CFG": _value("CORE.MISC_CFG", proc_precision=precision, qd_en=1),
        "CORE.DATAOUT_SIZE_0": _value("CORE.DATAOUT_SIZE_0", dataout_height=H, dataout_width=1),
        "CORE.DATAOUT_SIZE_1": _value("CORE.DATAOUT_SIZE_1", dataout_channel=N),
        "DPU.DATA_FORMAT": _value(
            "DPU.DATA_FORMAT", out_precision=kind.out_precision, in_precision=precision, proc_precision=precision
        ),
        "DPU.DATA_CUBE_HEIGHT": _value("DPU.DATA_CUBE_HEIGHT", height=H),
        # which half the writer uses is unproven, so both hold it
        "DPU.DATA_CUBE_NOTCH_ADDR": _value("DPU.DATA_CUBE_NOTCH_ADDR", notch_addr_1=notch, notch_addr_0=notch),
        "DPU.DATA_CUBE_CHANNEL": _value("DPU.DATA_CUBE_CHANNEL", orig_channel=N, channel=N),
        "DPU.BS_OW_CFG": _value(
            "DPU.BS_OW_CFG", size_e_2=size_e, size_e_1=size_e, size_e_0=size_e, od_bypass=kind.od_bypass
        ),
        "DPU.WDMA_SIZE_0": _value("DPU.WDMA_SIZE_0", channel_wdma=N),
        "DPU.WDMA_SIZE_1": _value("DPU.WDMA_SIZE_1", height_wdma=wdma_lines, width_wdma=1),
        "DPU.SURFACE_ADD": _value("DPU.SURFACE_ADD", surf_add=(size_e + 1) * soc.atom_bytes),
    }


def _extents(tile: Tile, a_pitch: int, out_pitch: int, soc: Soc) -> tuple[int, int]:
    """(bytes read as input, bytes written) from the addresses."""
    kind, M, N = KINDS[tile.kind], tile.M, tile.N
    rows = (M - 1) * a_pitch + kind.row_bytes(tile.K)
    if tile.form is Form.BATCH:
        # the copies of the last row are shifted by up to three atoms, and every line is written
        return rows + 3 * soc.atom_bytes, lines(Form.BATCH, M) * N * kind.out_bytes
    return rows, (M - 1) * out_pitch + N * kind.out_bytes


@lru_cache(maxsize=4096)
def _program(tile: Tile, a_pitch: int, out_pitch: int, soc: Soc) -> Program:
    values = {isa.register(name).offset: value for name, value in _CONSTANT.items()}
    values |= {isa.register(name).offset: v for name, v in _of_shape(tile, a_pitch, out_pitch, soc).items()}
    if not values.keys() <= set(_ORDER):
        raise AssertionError("a register has a value and no place in the order")
    words = isa.assemble([(offset, values.get(offset, 0)) for offset in _ORDER])
    words.flags.writeable = False
    kind = KINDS[tile.kind]
    read, written = _extents(tile, a_pitch, out_pitch, soc)
    extents = {"input": read, "weights": kind.row_bytes(tile.K) * tile.N, "output": written}
    operands = {
        role: Operand(tuple(map(int, isa.positions(words, offset))), extents[role], role == "output")
        for role, offset in ROLES.items()
    }
    return Program(words, REGCFG_AMOUNT, MappingProxyType(operands), tile.kind, kind.out_bytes)


def program(tile: Tile, *, a_pitch: int | None = None, out_pitch: int | None = None, soc: Soc = RK3588) -> Program:
    """The program of a tile; tiles of one size share it, since it holds no addresses.

    `a_pitch` is the distance of input rows in bytes (default: dense; twice the row, which is K, in a batch),
    `out_pitch` that of output rows (default: dense). Both are multiples of 16. Pitches wider than the row follow the
    addressing rules derived from captures. SINGLE has one row; a BATCH writes element n of row m at
    `[n // 64][4 * m][n % 64]` of an int16 array `[N / 64][4 * M][64]`, whose other lines are garbage.
    Raises UsageError for a pitch that the form cannot have.
    """
    kind = KINDS[tile.kind]
    row, out_row = kind.row_bytes(tile.K), tile.N * kind.out_bytes
    dense = tile.K if tile.form is Form.BATCH else row
    a_pitch = dense if a_pitch is None else a_pitch
    out_pitch = out_row if out_pitch is None else out_pitch
    fixed = tile.form is not Form.ROW
    for name, pitch, least in (("input", a_pitch, dense), ("output", out_pitch, out_row)):
        if pitch % soc.atom_bytes or pitch < least or (fixed and pitch != least):
            raise UsageError(
                f"{name} rows {pitch} bytes apart in {tile.form.value} form: "
                f"must be {'' if fixed else 'at least '}{least}, a multiple of {soc.atom_bytes}"
            )
    size = replace(tile, m0=0, m1=tile.M, k0=0, k1=tile.K, n0=0, n1=tile.N)
    return _program(size, a_pitch, out_pitch, soc)
