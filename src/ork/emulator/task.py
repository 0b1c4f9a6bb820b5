"""A convolution task as plain numbers: what the registers of CNA, CORE and DPU say, without the addresses.

`read` turns register groups into a `Task`; a matmul is the 1x1 case. Registers that were never written since reset get
the permissive values under which validated programs run (executed) and are named in `Task.missing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ork.emulator import reader, stages
from ork.emulator.reader import Reader
from ork.emulator.stages import Stages
from ork.npu.isa import REGISTERS, ConvMode, Precision, decode
from ork.npu.soc import Soc

FEATURES, WEIGHTS, OUTPUT = 0x1070, 0x1110, 0x4020  # registers of the addresses
_TO_MEMORY = 2  # output_mode

# Registers without which a program means nothing sure; the others rest at 0 in programs that work.
_WANTED: Final = (
    *(0x100C, 0x1014, 0x1020, 0x1024, 0x1028, 0x102C, 0x1030, 0x1034, 0x1038, 0x1040, 0x1044),
    *(0x1070, 0x107C, 0x1080, 0x1110),
    *(0x3010, 0x3014, 0x3018),
    *(0x400C, 0x4010, 0x4020, 0x4024, 0x4030, 0x4034, 0x403C, 0x4040, 0x4050, 0x4058, 0x405C, 0x4060, 0x4070, 0x40C0),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an input precision fixes: bits of an element, kernels in a group (channels, if depthwise; 0: nobody has
    seen it), and output precision -> bytes."""

    name: str
    bits: int
    group: int
    depthwise_group: int
    outputs: Mapping[int, int]


KINDS: Final[Mapping[int, Kind]] = {
    Precision.INT8: Kind("int8", 8, 32, 64, {Precision.INT8: 1, Precision.INT16: 2, Precision.INT32: 4}),
    Precision.INT16: Kind("int16", 16, 16, 0, {Precision.INT32: 4}),
    Precision.FP16: Kind("fp16", 16, 16, 32, {Precision.FP16: 2, Precision.FP32: 4}),
    Precision.INT4: Kind("int4", 4, 64, 0, {Precision.INT16: 2}),
}
BLOCK: Final = 32  # channels of a weight block
_IMAGES: Final = range(8, 12)  # argb_in of images with 1 to 4 channels; 0 is no image


@dataclass(frozen=True, slots=True)
class Conversion:
    """CVT_CON0..5: what features go through on their way into the buffer, for channels 0 to 3 each."""

    signed: bool
    add_first: bool
    half_up: bool
    scales: tuple[int, ...]
    offsets: tuple[int, ...]
    shifts: tuple[int, ...]
    enabled: int  # a bit per channel

    @property
    def uniform(self) -> bool:
        """Whether all channels are converted alike."""
        return all(len(set(x)) == 1 for x in (self.scales, self.offsets, self.shifts))

    @property
    def plain(self) -> bool:
        """Scaled first, with nothing to round: what programs that work do."""
        return not self.add_first and all(scale % (1 << shift) == 0 for scale, shift in zip(self.scales, self.shifts))


@dataclass(frozen=True, slots=True)
class Task:
    """One convolution. Strides of features and outputs in bytes, sizes in elements unless a name says bytes."""

    precision: int
    precisions: tuple[int, int, int, int]  # CNA processing, CORE processing, DPU input, DPU processing
    out_precision: int
    # features
    width: int
    height: int
    channels: int
    group_mode: bool  # four lines of one surface are fetched together
    image: int  # channels of an image, whose pixels lie side by side; 0: features are surfaces of atoms
    nonalign: bool
    conversion: Conversion | None
    line_stride: int
    surf_stride: int
    pad_left: int
    pad_top: int
    pad_value: int
    # kernels
    depthwise: bool  # one kernel whose channels each make a result of their own
    modes: tuple[bool, bool, bool]  # whether CNA, CORE and DPU say depthwise
    kernels: int
    kernel_width: int
    kernel_height: int
    stride_x: int
    stride_y: int
    dilation_x: int
    dilation_y: int
    weight_bytes: int  # as the registers say, of all kernels and of one
    kernel_bytes: int
    weights_size: int  # bytes of all kernels, by their shape
    # convolution buffer
    data_bank: int
    weight_bank: int
    entries: int
    weight_reuse: bool
    data_reuse: bool
    # output as each block counts it: (width, height), and channels
    cna_out: tuple[int, int]  # (width, pixels): CNA holds no height
    core_out: tuple[int, int]
    dpu_out: tuple[int, int]
    core_channels: int
    dpu_channels: int
    wdma_channels: int
    wdma: tuple[int, int]  # the writer's counters, which may wrap at other places than the lines of the output
    atoms: int  # of one pixel of one kernel group: SIZE_E + 1
    atom_stride: int
    group_stride: int
    notch: int
    notches_equal: bool
    # weight zero points: results += operand * sum of the window's features
    window_sums: bool
    ow_operand: int
    ow_memory: bool  # the operand is a vector out of memory
    stages: Stages
    reader: Reader | None  # DPU_RDMA beside the convolution
    # what is asked for and not modelled, "" if nothing; registers in use that were never written
    not_modelled: str
    missing: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        return KINDS[self.precision]

    @property
    def group(self) -> int:
        """Results of a pixel that are written together."""
        return self.kind.depthwise_group if self.depthwise else self.kind.group

    @property
    def results(self) -> int:
        """Results of a pixel: one per kernel, or per channel."""
        return self.channels if self.depthwise else self.kernels

    @property
    def pixels(self) -> int:
        return self.core_out[0] * self.core_out[1]

    @property
    def surfaces(self) -> int:
        """16-byte atoms of one pixel's channels."""
        return -(-self.channels * self.kind.bits // 128)

    @property
    def out_bytes(self) -> int:
        return self.kind.outputs[self.out_precision]

    @property
    def kernel_elements(self) -> int:
        return self.kernel_width * self.kernel_height * self.channels

    @property
    def groups(self) -> int:
        """Kernel groups that are written: whole ones, whatever the number of kernels."""
        return -(-self.dpu_channels // self.group)

    def need(self, soc: Soc) -> int:
        """Entries of the convolution buffer that one feature line takes."""
        return -(-self.width * self.channels * self.kind.bits // (8 * soc.entry_bytes))

    def lines_that_fit(self, soc: Soc) -> int:
        """Feature lines that the data banks hold, at most all."""
        return min(self.height, soc.entries_per_bank * self.data_bank // max(self.need(soc), 1))


class _Fields:
    """Decoded registers of one task; one that was never written is all zeros, unless a value is given."""

    def __init__(self, registers: Mapping[int, int]) -> None:
        self.registers = registers

    def __call__(self, offset: int, unwritten: int = 0) -> dict[str, int]:
        return decode(offset, self.registers.get(offset, unwritten))


# Registers that `read` looks at: a program that writes all of them owes nothing to the programs before it.
READS: Final = (
    *_WANTED,
    *(0x104C, 0x1060, 0x1068, 0x1100, 0x1184),
    *(0x4038, 0x4054, 0x4084, 0x4088, 0x4080),
)


def read(
    cna: Mapping[int, int], core: Mapping[int, int], dpu: Mapping[int, int], rdma: Mapping[int, int] | None = None
) -> Task:
    """The task that these register groups (offset -> value) describe; `rdma` if DPU_RDMA runs too. Never raises:
    `checks` judges it."""
    registers = {**cna, **core, **dpu}
    f = _Fields(registers)
    con1, con3, size0, size1 = f(0x100C), f(0x1014), f(0x1020), f(0x1024)
    kernel, cbuf, pads = f(0x1038), f(0x1040), f(0x1068)
    out0, misc, form = f(0x3014), f(0x3010), f(0x4010)
    cube_w, cube_h, notch, ow = f(0x4030)["width"], f(0x4034)["height"], f(0x4038), f(0x4050)
    precision, out_precision = con1["in_precision"], form["out_precision"]
    kind = KINDS.get(precision)
    out_bytes = kind.outputs.get(out_precision, 0) if kind else 0
    modes = (
        con1["conv_mode"] == ConvMode.DEPTHWISE,
        bool(misc["dw_en"]),
        f(0x400C)["conv_mode"] == ConvMode.DEPTHWISE,
    )
    image = con1["argb_in"] - _IMAGES.start + 1 if con1["argb_in"] in _IMAGES else 0
    image_pixel = image * kind.bits // 8 if kind else 0
    usual_atoms = (kind.depthwise_group if modes[0] else kind.group) * out_bytes // 16 if kind else 1
    atoms = ow["size_e_0"] + 1 if 0x4050 in registers else max(usual_atoms, 1)
    wdma = f(0x405C)
    dense = cube_w * cube_h * 16
    elements = kernel["weight_kernels"] * kernel["weight_width"] * kernel["weight_height"] * size1["datain_channel"]
    window_sums = bool(misc["qd_en"]) and not ow["od_bypass"] and precision != Precision.FP16
    stage = stages.read(dpu)
    source = None if rdma is None else reader.read(rdma)
    return Task(
        precision=precision,
        precisions=(con1["proc_precision"], misc["proc_precision"], form["in_precision"], form["proc_precision"]),
        out_precision=out_precision,
        width=size0["datain_width"],
        height=size0["datain_height"],
        channels=size1["datain_channel"],
        group_mode=not con1["group_line_off"],
        image=image,
        nonalign=bool(con1["nonalign_dma"]),
        conversion=_conversion(f),
        line_stride=(image_pixel or 16) * f(0x107C)["line_stride"],
        surf_stride=16 * f(0x1080)["surf_stride"],
        pad_left=pads["pad_left"],
        pad_top=pads["pad_top"],
        pad_value=f(0x1184)["pad_value"],
        depthwise=modes[0],
        modes=modes,
        kernels=kernel["weight_kernels"],
        kernel_width=kernel["weight_width"],
        kernel_height=kernel["weight_height"],
        stride_x=con3["conv_x_stride"] if 0x1014 in registers else 1,
        stride_y=con3["conv_y_stride"] if 0x1014 in registers else 1,
        dilation_x=max(con3["atrous_x_dilation"], 1),
        dilation_y=max(con3["atrous_y_dilation"], 1),
        weight_bytes=f(0x1030)["weight_bytes"],
        kernel_bytes=f(0x1034)["weight_bytes_per_kernel"],
        weights_size=-(-elements * (kind.bits if kind else 0) // 8),
        data_bank=cbuf["data_bank"],
        weight_bank=cbuf["weight_bank"],
        entries=f(0x1044)["data_entries"],
        weight_reuse=bool(cbuf["weight_reuse"]),
        data_reuse=bool(cbuf["data_reuse"]),
        cna_out=(f(0x1028)["dataout_width"], f(0x102C)["dataout_atomics"]),
        core_out=(out0["dataout_width"], out0["dataout_height"]),
        dpu_out=(cube_w, cube_h),
        core_channels=f(0x3018)["dataout_channel"],
        dpu_channels=f(0x403C)["channel"],
        wdma_channels=f(0x4058)["channel_wdma"] if 0x4058 in registers else f(0x403C)["channel"],
        wdma=(wdma["width_wdma"], wdma["height_wdma"]) if 0x405C in registers else (cube_w, cube_h),
        atoms=atoms,
        atom_stride=f(0x4024)["dst_surf_stride"],
        group_stride=f(0x40C0)["surf_add"] if 0x40C0 in registers else dense * atoms,
        notch=16 * notch["notch_addr_0"],
        notches_equal=notch["notch_addr_0"] == notch["notch_addr_1"],
        window_sums=window_sums,
        ow_operand=f(0x4054)["ow_op"],
        ow_memory=window_sums and bool(ow["ow_src"]),
        stages=stage,
        reader=source,
        not_modelled=_not_modelled(f, kind, out_precision, stage, source),
        missing=tuple(offset for offset in _WANTED if offset not in registers),
    )


def _conversion(f: _Fields) -> Conversion | None:
    """The converter of the features, unless it is bypassed."""
    con0 = f(0x104C, 1)
    if con0["cvt_bypass"]:
        return None
    channels = [f(offset) for offset in (0x1050, 0x1054, 0x1058, 0x105C)]
    return Conversion(
        signed=bool(con0["data_sign"]),
        add_first=bool(con0["cvt_type"]),
        half_up=bool(con0["round_type"]),
        scales=tuple(values[f"cvt_scale{i}"] for i, values in enumerate(channels)),
        offsets=tuple(values[f"cvt_offset{i}"] for i, values in enumerate(channels)),
        shifts=tuple(con0[f"cvt_truncate_{i}"] for i in range(4)),
        enabled=f(0x1180)["per_channel_cvt_en"],
    )


def _not_modelled(f: _Fields, kind: Kind | None, out_precision: int, stage: Stages, source: Reader | None) -> str:
    """The first thing asked for that the engines cannot do yet, or ""."""
    con1, form, mode = f(0x100C), f(0x4010), f(0x400C)
    conversion = _conversion(f)
    asked = {
        f"input precision {con1['in_precision']}": kind is None,
        f"output precision {out_precision} of {kind.name if kind else ''}": kind and out_precision not in kind.outputs,
        f"convolution mode {con1['conv_mode']}": con1["conv_mode"] not in {ConvMode.DIRECT, ConvMode.DEPTHWISE},
        f"depthwise convolution of {kind.name if kind else ''}": con1["conv_mode"] == ConvMode.DEPTHWISE
        and kind
        and not kind.depthwise_group,
        "deconvolution": con1["deconv"],
        f"image format {con1['argb_in']}": con1["argb_in"] and con1["argb_in"] not in _IMAGES,
        "non-aligned features that are no image": con1["nonalign_dma"] and not con1["argb_in"],
        "int4 images": con1["argb_in"] and con1["in_precision"] == Precision.INT4,
        "conversion of features that are not int8": conversion and con1["in_precision"] != Precision.INT8,
        "conversion channel by channel of features that are no image": conversion
        and not conversion.uniform
        and not con1["argb_in"],
        "FC skipping": f(0x1060)["fc_skip_en"],
        "compressed weights": f(0x1100)["decomp_control"],
        "row maxima": f(0x4034)["minmax_ctl"],
        "non-aligned or transposed output": mode["nonalign"] or mode["tp_en"] or form["mc_surf_out"],
        f"output mode {mode['output_mode']}": mode["output_mode"] != _TO_MEMORY,
        "features from memory beside a convolution": mode["flying_mode"],
        stage.not_modelled: stage.not_modelled,
        source.not_modelled if source else "": source is not None and source.not_modelled,
    }
    return next((what for what, yes in asked.items() if yes), "")


def name_of(offset: int) -> str:
    """BLOCK.REGISTER of an offset."""
    return REGISTERS[offset].full_name
