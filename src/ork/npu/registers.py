"""Every register of the NPU as data: block, offset, name and fields under their datasheet names.

The notation of fields is that of `ork.npu.fields`. Operands that hold an integer or the bits of a float, depending on
the precision, are unsigned: they are bits. Everything resets to 0 except INTERRUPT_MASK (0x1ffff) and MAC_GATING
(0x07800800). Comments say where the manual and what programs show disagree, and what is unproven.
"""

from __future__ import annotations

from ork.npu.fields import Interrupt, Register, parse_fields

_POINTER = (
    "executer[16] executer_pp_clear[5] pointer_pp_clear[4] pointer_pp_mode[3] executer_pp_en[2] pointer_pp_en[1] "
    "pointer[0]"
)
_STATUS = "status_1[17:16] status_0[1:0]"
_INTERRUPT = " ".join(f"{bit.name.lower()}[{bit.value.bit_length() - 1}]" for bit in Interrupt if bit.name)

_TABLES = {
    "PC": {
        0x0000: ("VERSION", "version[31:0]"),
        0x0004: ("VERSION_NUM", "version_num[31:0]"),
        0x0008: ("OPERATION_ENABLE", "op_en[0]"),
        0x0010: ("BASE_ADDRESS", "pc_source_addr[31:4]*16 pc_sel[0]"),
        # [17:16] count the other cores of a multi-core set in the vendor's chains; the meaning is unproven.
        0x0014: ("REGISTER_AMOUNTS", "multi_core[17:16]? pc_data_amount[15:0]"),
        0x0020: ("INTERRUPT_MASK", _INTERRUPT),
        0x0024: ("INTERRUPT_CLEAR", _INTERRUPT),
        0x0028: ("INTERRUPT_STATUS", _INTERRUPT),
        0x002C: ("INTERRUPT_RAW_STATUS", _INTERRUPT),
        0x0030: ("TASK_CON", "task_count_clear[13] task_pp_en[12] task_number[11:0]"),
        0x0034: ("TASK_DMA_BASE_ADDR", "dma_base_addr[31:4]*16"),
        0x003C: ("TASK_STATUS", "task_status[27:0]"),
    },
    "CNA": {
        0x1000: ("S_STATUS", _STATUS),
        0x1004: ("S_POINTER", _POINTER),
        0x1008: ("OPERATION_ENABLE", "op_en[0]"),
        0x100C: (
            "CONV_CON1",
            "nonalign_dma[30] group_line_off[29] deconv[16] argb_in[15:12] proc_precision[9:7]=Precision "
            "in_precision[6:4]=Precision conv_mode[3:0]=ConvMode",
        ),
        # [30:28] name the vendor's multi-core split; without any effect on results.
        0x1010: (
            "CONV_CON2",
            "multi_core[30:28]? kernel_group[23:16] feature_grains[13:4] csc_wo_en[2] csc_do_en[1] cmd_fifo_srst[0]",
        ),
        0x1014: (
            "CONV_CON3",
            "nn_mode[30:28] atrous_y_dilation[25:21] atrous_x_dilation[20:16] deconv_y_stride[13:11] "
            "deconv_x_stride[10:8] conv_y_stride[5:3] conv_x_stride[2:0]",
        ),
        0x1020: ("DATA_SIZE0", "datain_width[26:16] datain_height[10:0]"),
        0x1024: ("DATA_SIZE1", "datain_channel_real[29:16]-1 datain_channel[15:0]"),
        0x1028: ("DATA_SIZE2", "dataout_width[10:0]"),
        0x102C: ("DATA_SIZE3", "surf_mode[23:22] dataout_atomics[21:0]"),
        0x1030: ("WEIGHT_SIZE0", "weight_bytes[31:0]"),
        0x1034: ("WEIGHT_SIZE1", "weight_bytes_per_kernel[18:0]"),
        0x1038: ("WEIGHT_SIZE2", "weight_width[28:24] weight_height[20:16] weight_kernels[13:0]"),
        # The manual speaks of "banks minus one of 8"; captures hold plain counts of 12.
        0x1040: ("CBUF_CON0", "weight_reuse[13] data_reuse[12] fc_data_bank[10:8] weight_bank[7:4] data_bank[3:0]"),
        0x1044: ("CBUF_CON1", "data_entries[13:0]"),
        0x104C: (
            "CVT_CON0",
            "cvt_truncate_3[27:22] cvt_truncate_2[21:16] cvt_truncate_1[15:10] cvt_truncate_0[9:4] data_sign[3] "
            "round_type[2] cvt_type[1] cvt_bypass[0]",
        ),
        0x1050: ("CVT_CON1", "cvt_scale0[31:16]~ cvt_offset0[15:0]~"),
        0x1054: ("CVT_CON2", "cvt_scale1[31:16]~ cvt_offset1[15:0]~"),
        0x1058: ("CVT_CON3", "cvt_scale2[31:16]~ cvt_offset2[15:0]~"),
        0x105C: ("CVT_CON4", "cvt_scale3[31:16]~ cvt_offset3[15:0]~"),
        0x1060: ("FC_CON0", "fc_skip_data[31:16] fc_skip_en[0]"),
        0x1064: ("FC_CON1", "data_offset[16:0]"),
        0x1068: ("PAD_CON0", "pad_left[7:4] pad_top[3:0]"),
        0x1070: ("FEATURE_DATA_ADDR", "feature_base_addr[31:0]"),
        0x1074: ("FC_CON2", "weight_offset[16:0]"),
        0x1078: ("DMA_CON0", "ov4k_bypass[31] weight_burst_len[19:16] data_burst_len[3:0]"),
        # Both strides count atoms of 16 bytes (pixels with image input).
        0x107C: ("DMA_CON1", "line_stride[27:0]"),
        0x1080: ("DMA_CON2", "surf_stride[27:0]~"),
        0x1084: ("FC_DATA_SIZE0", "dma_width[29:16] dma_height[10:0]"),
        0x1088: ("FC_DATA_SIZE1", "dma_channel[15:0]"),
        0x1090: (
            "CLK_GATE",
            "cbuf_cs_disable_clkgate[4] csc_disable_clkgate[2] cna_weight_disable_clkgate[1] "
            "cna_feature_disable_clkgate[0]",
        ),
        0x1100: ("DCOMP_CTRL", "wt_dec_bypass[3] decomp_control[2:0]"),
        0x1104: ("DCOMP_REGNUM", "dcomp_regnum[31:0]"),
        0x1110: ("DCOMP_ADDR0", "decompress_addr0[31:4]*16"),
        **{0x1140 + 4 * i: (f"DCOMP_AMOUNT{i}", f"dcomp_amount{i}[31:0]") for i in range(16)},
        0x1180: ("CVT_CON5", "per_channel_cvt_en[31:0]"),
        0x1184: ("PAD_CON1", "pad_value[31:0]"),
    },
    "CORE": {
        0x3000: ("S_STATUS", _STATUS),
        0x3004: ("S_POINTER", _POINTER),
        0x3008: ("OPERATION_ENABLE", "op_en[0]"),
        0x300C: ("MAC_GATING", "slcg_op_en[26:0]"),
        0x3010: ("MISC_CFG", "soft_gating[19:14] proc_precision[10:8]=Precision dw_en[1] qd_en[0]"),
        0x3014: ("DATAOUT_SIZE_0", "dataout_height[31:16]-1 dataout_width[15:0]-1"),
        0x3018: ("DATAOUT_SIZE_1", "dataout_channel[15:0]-1"),
        0x301C: ("CLIP_TRUNCATE", "round_type[6] clip_truncate[4:0]"),
        0x3030: ("UNDOCUMENTED_3030", "value[31:0]"),  # every vendor program writes 0
    },
    "DPU": {
        0x4000: ("S_STATUS", _STATUS),
        0x4004: ("S_POINTER", _POINTER),
        0x4008: ("OPERATION_ENABLE", "op_en[0]"),
        0x400C: (
            "FEATURE_MODE_CFG",
            "comb_use[31] tp_en[30] rgp_type[29:26] nonalign[25] surf_len[24:9] burst_len[8:5] "
            "conv_mode[4:3]=ConvMode output_mode[2:1] flying_mode[0]",
        ),
        # The *_neg shifts replace those of MUL_CFG and CVT_SCALE when the value is negative: write both equal.
        0x4010: (
            "DATA_FORMAT",
            "out_precision[31:29]=Precision in_precision[28:26]=Precision ew_truncate_neg[25:16] "
            "bn_mul_shift_value_neg[15:10] bs_mul_shift_value_neg[9:4] mc_surf_out[3] proc_precision[2:0]=Precision",
        ),
        0x4014: ("OFFSET_PEND", "offset_pend[15:0]"),
        0x4020: ("DST_BASE_ADDR", "dst_base_addr[31:4]*16"),
        0x4024: ("DST_SURF_STRIDE", "dst_surf_stride[31:4]*16"),
        0x4030: ("DATA_CUBE_WIDTH", "width[12:0]-1"),
        0x4034: ("DATA_CUBE_HEIGHT", "minmax_ctl[24:22] height[12:0]-1"),
        # Atoms between the end of a line and the next; which half the writer uses is unproven: keep them equal.
        0x4038: ("DATA_CUBE_NOTCH_ADDR", "notch_addr_1[28:16] notch_addr_0[12:0]"),
        0x403C: ("DATA_CUBE_CHANNEL", "orig_channel[28:16]-1 channel[12:0]-1"),
        0x4040: (
            "BS_CFG",
            "bs_alu_algo[19:16]=Alu bs_alu_src[8] bs_relux_en[7] bs_relu_bypass[6] bs_mul_prelu[5] bs_mul_bypass[4] "
            "bs_alu_bypass[1] bs_bypass[0]",
        ),
        0x4044: ("BS_ALU_CFG", "bs_alu_operand[31:0]"),
        0x4048: ("BS_MUL_CFG", "bs_mul_operand[31:16] bs_mul_shift_value[13:8] bs_truncate_src[1] bs_mul_src[0]"),
        0x404C: ("BS_RELUX_CMP_VALUE", "bs_relux_cmp_dat[31:0]"),
        0x4050: (
            "BS_OW_CFG",
            "rgp_cnter[31:28] tp_org_en[27] size_e_2[10:8] size_e_1[7:5] size_e_0[4:2] od_bypass[1] ow_src[0]",
        ),
        0x4054: ("BS_OW_OP", "ow_op[15:0]~"),
        0x4058: ("WDMA_SIZE_0", "tp_precision[27] size_c_wdma[26:16] channel_wdma[12:0]-1"),
        0x405C: ("WDMA_SIZE_1", "height_wdma[28:16]-1 width_wdma[12:0]-1"),
        0x4060: (
            "BN_CFG",
            "bn_alu_algo[19:16]=Alu bn_alu_src[8] bn_relux_en[7] bn_relu_bypass[6] bn_mul_prelu[5] bn_mul_bypass[4] "
            "bn_alu_bypass[1] bn_bypass[0]",
        ),
        0x4064: ("BN_ALU_CFG", "bn_alu_operand[31:0]"),
        0x4068: ("BN_MUL_CFG", "bn_mul_operand[31:16] bn_mul_shift_value[13:8] bn_truncate_src[1] bn_mul_src[0]"),
        0x406C: ("BN_RELUX_CMP_VALUE", "bn_relux_cmp_dat[31:0]"),
        0x4070: (
            "EW_CFG",
            "ew_cvt_type[31] ew_cvt_round[30] ew_data_mode[29:28]=OperandMode edata_size[23:22]=OperandSize "
            "ew_equal_en[21] ew_binary_en[20] ew_alu_algo[19:16]=Alu ew_relux_en[10] ew_relu_bypass[9] "
            "ew_op_cvt_bypass[8] ew_lut_bypass[7] ew_op_src[6] ew_mul_prelu[5] ew_op_type[2] ew_op_bypass[1] "
            "ew_bypass[0]",
        ),
        0x4074: ("EW_CVT_OFFSET_VALUE", "ew_op_cvt_offset[31:0]~"),
        0x4078: ("EW_CVT_SCALE_VALUE", "ew_truncate[31:22] ew_op_cvt_shift[21:16] ew_op_cvt_scale[15:0]"),
        0x407C: ("EW_RELUX_CMP_VALUE", "ew_relux_cmp_dat[31:0]"),
        0x4080: ("OUT_CVT_OFFSET", "out_cvt_offset[31:0]~"),
        0x4084: ("OUT_CVT_SCALE", "fp32tofp16_en[16] out_cvt_scale[15:0]~"),
        0x4088: ("OUT_CVT_SHIFT", "cvt_type[31] cvt_round[30] minus_exp[19:12] out_cvt_shift[11:0]"),
        **{0x4090 + 4 * i: (f"EW_OP_VALUE_{i}", f"ew_operand_{i}[31:0]") for i in range(8)},
        0x40C0: ("SURFACE_ADD", "surf_add[31:4]*16"),
        0x40C4: ("UNDOCUMENTED_40C4", "value[31:0]"),  # every vendor program writes 0
        0x4100: ("LUT_ACCESS_CFG", "lut_access_type[17] lut_table_id[16] lut_addr[9:0]"),
        0x4104: ("LUT_ACCESS_DATA", "lut_access_data[15:0]~"),  # vendor streams sign-extend into the reserved half
        0x4108: (
            "LUT_CFG",
            "lut_cal_sel[7] lut_hybrid_priority[6] lut_oflow_priority[5] lut_uflow_priority[4] lut_lo_le_mux[3:2] "
            "lut_expand_en[1] lut_road_sel[0]",
        ),
        0x410C: ("LUT_INFO", "lut_lo_index_select[23:16] lut_le_index_select[15:8]"),
        0x4110: ("LUT_LE_START", "lut_le_start[31:0]~"),
        0x4114: ("LUT_LE_END", "lut_le_end[31:0]~"),
        0x4118: ("LUT_LO_START", "lut_lo_start[31:0]~"),
        0x411C: ("LUT_LO_END", "lut_lo_end[31:0]~"),
        0x4120: ("LUT_LE_SLOPE_SCALE", "lut_le_slope_oflow_scale[31:16] lut_le_slope_uflow_scale[15:0]"),
        0x4124: ("LUT_LE_SLOPE_SHIFT", "lut_le_slope_oflow_shift[9:5] lut_le_slope_uflow_shift[4:0]"),
        0x4128: ("LUT_LO_SLOPE_SCALE", "lut_lo_slope_oflow_scale[31:16] lut_lo_slope_uflow_scale[15:0]"),
        0x412C: ("LUT_LO_SLOPE_SHIFT", "lut_lo_slope_oflow_shift[9:5] lut_lo_slope_uflow_shift[4:0]"),
    },
    "DPU_RDMA": {
        0x5000: ("RDMA_S_STATUS", _STATUS),
        0x5004: ("RDMA_S_POINTER", _POINTER),
        0x5008: ("RDMA_OPERATION_ENABLE", "op_en[0]"),
        0x500C: ("RDMA_DATA_CUBE_WIDTH", "width[12:0]-1"),
        0x5010: ("RDMA_DATA_CUBE_HEIGHT", "ew_line_notch_addr[28:16] height[12:0]-1"),
        0x5014: ("RDMA_DATA_CUBE_CHANNEL", "channel[12:0]-1"),
        0x5018: ("RDMA_SRC_BASE_ADDR", "src_base_addr[31:0]"),
        0x501C: ("RDMA_BRDMA_CFG", "brdma_data_use[4:1]"),
        0x5020: ("RDMA_BS_BASE_ADDR", "bs_base_addr[31:0]"),
        0x5024: ("UNDOCUMENTED_5024", "value[31:0]"),  # a length on a sister chip, without effect here
        0x5028: ("RDMA_NRDMA_CFG", "nrdma_data_use[4:1]"),
        0x502C: ("RDMA_BN_BASE_ADDR", "bn_base_addr[31:0]"),
        0x5034: (
            "RDMA_ERDMA_CFG",
            "erdma_data_mode[31:30]=OperandMode erdma_surf_mode[29] erdma_nonalign[28] "
            "erdma_data_size[3:2]=OperandSize ov4k_bypass[1] erdma_disable[0]",
        ),
        0x5038: ("RDMA_EW_BASE_ADDR", "ew_base_addr[31:0]"),
        0x5040: ("RDMA_EW_SURF_STRIDE", "ew_surf_stride[31:4]*16"),
        0x5044: (
            "RDMA_FEATURE_MODE_CFG",
            "in_precision[17:15]=Precision burst_len[14:11] comb_use[10:8] proc_precision[7:5]=Precision "
            "mrdma_disable[4] mrdma_fp16tofp32_en[3] conv_mode[2:1]=ConvMode flying_mode[0]",
        ),
        0x5048: (
            "RDMA_SRC_DMA_CFG",
            "line_notch_addr[31:19] pooling_method[13] unpooling_en[12] kernel_stride_height[11:9] "
            "kernel_stride_width[8:6] kernel_height[5:3] kernel_width[2:0]",
        ),
        0x504C: ("RDMA_SURF_NOTCH", "surf_notch_addr[31:4]*16"),
        0x5064: ("RDMA_PAD_CFG", "pad_value[31:16] pad_top[6:4] pad_left[2:0]"),
        0x5068: ("RDMA_WEIGHT", "e_weight[31:24] n_weight[23:16] b_weight[15:8] m_weight[7:0]"),
        0x506C: ("RDMA_EW_SURF_NOTCH", "ew_surf_notch[31:4]*16"),
    },
    "PPU": {
        0x6000: ("S_STATUS", _STATUS),
        0x6004: ("S_POINTER", _POINTER),
        0x6008: ("OPERATION_ENABLE", "op_en[0]"),
        0x600C: ("DATA_CUBE_IN_WIDTH", "cube_in_width[12:0]-1"),
        0x6010: ("DATA_CUBE_IN_HEIGHT", "cube_in_height[12:0]-1"),
        0x6014: ("DATA_CUBE_IN_CHANNEL", "cube_in_channel[12:0]-1"),
        0x6018: ("DATA_CUBE_OUT_WIDTH", "cube_out_width[12:0]-1"),
        0x601C: ("DATA_CUBE_OUT_HEIGHT", "cube_out_height[12:0]-1"),
        0x6020: ("DATA_CUBE_OUT_CHANNEL", "cube_out_channel[12:0]-1"),
        0x6024: (
            "OPERATION_MODE_CFG",
            "index_en[30] notch_addr[28:16] use_cnt[7:5] flying_mode[4] pooling_method[1:0]=Pooling",
        ),
        0x6034: (
            "POOLING_KERNEL_CFG",
            "kernel_stride_height[23:20]-1 kernel_stride_width[19:16]-1 kernel_height[11:8]-1 kernel_width[3:0]-1",
        ),
        # 65536 / size: an integer for integer data, the bits of that fp16 number for fp16 data.
        0x6038: ("RECIP_KERNEL_WIDTH", "recip_kernel_width[16:0]"),
        0x603C: ("RECIP_KERNEL_HEIGHT", "recip_kernel_height[16:0]"),
        0x6040: ("POOLING_PADDING_CFG", "pad_bottom[14:12] pad_right[10:8] pad_top[6:4] pad_left[2:0]"),
        0x6044: ("PADDING_VALUE_1_CFG", "pad_value_0[31:0]"),
        0x6048: ("PADDING_VALUE_2_CFG", "pad_value_1[2:0]"),
        0x6070: ("DST_BASE_ADDR", "dst_base_addr[31:4]*16"),
        0x607C: ("DST_SURF_STRIDE", "dst_surf_stride[31:4]*16"),
        0x6084: ("DATA_FORMAT", "index_add[31:4] dpu_flyin[3] proc_precision[2:0]=Precision"),
        0x60DC: ("MISC_CTRL", "surf_len[31:16] mc_surf_out[8] nonalign[7] burst_len[3:0]"),
    },
    "PPU_RDMA": {
        0x7000: ("RDMA_S_STATUS", _STATUS),
        0x7004: ("RDMA_S_POINTER", _POINTER),
        0x7008: ("RDMA_OPERATION_ENABLE", "op_en[0]"),
        0x700C: ("RDMA_CUBE_IN_WIDTH", "cube_in_width[12:0]-1"),
        0x7010: ("RDMA_CUBE_IN_HEIGHT", "cube_in_height[12:0]-1"),
        0x7014: ("RDMA_CUBE_IN_CHANNEL", "cube_in_channel[12:0]-1"),
        0x701C: ("RDMA_SRC_BASE_ADDR", "src_base_addr[31:0]"),
        0x7024: ("RDMA_SRC_LINE_STRIDE", "src_line_stride[31:4]*16"),
        0x7028: ("RDMA_SRC_SURF_STRIDE", "src_surf_stride[31:4]*16"),
        0x7030: ("RDMA_DATA_FORMAT", "in_precision[1:0]=Precision"),
        0x7038: ("UNDOCUMENTED_7038", "value[31:0]"),  # written by programs that work, without effect
    },
    # Reached by programs through the op-enable word alone, whose value has this layout.
    "GLOBAL": {
        0xF008: (
            "OPERATION_ENABLE",
            "ppu_rdma_op_en[6] ppu_op_en[5] dpu_rdma_op_en[4] dpu_op_en[3] core_op_en[2] cna_op_en[0]",
        ),
    },
}

REGISTERS: dict[int, Register] = {
    offset: Register(block, offset, name, parse_fields(fields))
    for block, table in _TABLES.items()
    for offset, (name, fields) in table.items()
}

# Registers that hold device addresses: what a program needs patched when its buffers move.
ADDRESS_OFFSETS = (0x0010, 0x1070, 0x1110, 0x4020, 0x5018, 0x5020, 0x502C, 0x5038, 0x6070, 0x701C)
