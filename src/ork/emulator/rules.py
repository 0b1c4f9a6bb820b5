"""Every rule of the chip and of its kernel driver that the emulator checks, as one table.

A rule's *grade* says where it comes from: `manual` (the chip's reference manual), `kernel` (what the vendor driver
does), `measured` (published results on boards), `executed` (programs proved on boards run right under it), `derived`
(follows from those) or `unproven` (nobody has shown it). Its *effect* says what the emulated chip does when it is
broken; where the effect on silicon is not documented, that is `doubt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

Severity = Literal["error", "unproven", "warning"]


class Effect(Enum):
    """What follows from a broken rule, beside its entry in the report."""

    NONE = "none"  # the result is what the formulas give
    ROWS = "rows"  # rows past the capacity are poisoned
    POISON = "poison"  # the whole output is poisoned
    DOUBT = "doubt"  # poisoned in strict mode; what the formulas give in lenient mode
    HANG = "hang"  # the program never completes: errno 110 after the submit's timeout
    REFUSE = "refuse"  # the emulator cannot know or compute it: errno 22 at once, nothing written
    KERNEL = "kernel"  # the kernel driver answers; `ork.emulator.kernel` says how


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    severity: Severity
    effect: Effect
    grade: str
    text: str


_E: Final[Severity] = "error"
_U: Final[Severity] = "unproven"
_W: Final[Severity] = "warning"
_NONE, _ROWS, _POISON, _DOUBT, _HANG, _REFUSE, _KERNEL = Effect

_TABLE: Final[tuple[tuple[str, Severity, Effect, str, str], ...]] = (
    # --- the stream: words, trailers, chains ---
    ("missing-op-enable", _E, _HANG, "measured", "no op-enable word (0081:0008) in the fetched words: nothing starts"),
    ("next-address", _E, _HANG, "measured", "PC.BASE_ADDRESS of the trailer does not lead to the next program"),
    ("task-count", _E, _HANG, "measured", "the submit counts more tasks than the chain has programs"),
    ("chain-time", _E, _HANG, "kernel", "the chain takes longer than the submit allows, in simulated time"),
    ("op-enable-mask", _E, _HANG, "measured", "the enabled blocks wait for blocks that are not enabled"),
    ("word-target", _U, _NONE, "unproven", "a word's target does not own its register: the word is ignored"),
    (
        "never-written",
        _W,
        _NONE,
        "executed",
        "registers in use were never written since reset; permissive values taken",
    ),
    # --- sizes that blocks must agree on ---
    ("precision-mix", _E, _HANG, "measured", "precisions differ along the pipe: blocks wait for each other"),
    ("output-size", _E, _HANG, "measured", "blocks count different outputs, so the pipe never drains"),
    ("rdma-unconfigured", _E, _HANG, "measured", "DPU_RDMA is enabled but not configured"),
    ("weight-size", _E, _DOUBT, "executed", "the weight sizes do not follow from kernel size, channels and count"),
    ("data-entries", _U, _NONE, "derived", "CNA.CBUF_CON1 is not the entries of one feature line"),
    ("data-entries-short", _E, _DOUBT, "derived", "CNA.CBUF_CON1 is less than the entries of one feature line"),
    ("surface-add", _W, _NONE, "executed", "DPU.SURFACE_ADD is not (SIZE_E + 1) surface strides: gaps or overlaps"),
    ("surface-stride", _W, _NONE, "measured", "feature surfaces overlap or do not hold whole lines"),
    (
        "group-line-stride",
        _U,
        _NONE,
        "executed",
        "line stride in group mode is not 4 widths; only int4 batches do that",
    ),
    ("notch-halves", _U, _NONE, "unproven", "the halves of DATA_CUBE_NOTCH_ADDR differ; the low one is taken"),
    ("address-alignment", _U, _NONE, "derived", "an address is not a multiple of 16: its low bits are dropped"),
    ("image-alignment", _U, _NONE, "unproven", "an image does not begin at a multiple of 16 bytes; taken as written"),
    (
        "image-flags",
        _U,
        _NONE,
        "executed",
        "image input without NONALIGN_DMA and GROUP_LINE_OFF; all programs set both",
    ),
    ("channel-alignment", _U, _NONE, "executed", "channels are not whole 16-byte atoms"),
    # --- the convolution buffer ---
    ("bank-split", _E, _DOUBT, "executed", "data and weight banks are not a split of the 12 banks"),
    ("bank-unused", _U, _NONE, "executed", "data and weight banks are fewer than 12; every known program uses all"),
    ("rows-over-bank", _E, _ROWS, "measured", "more feature lines than the data banks hold"),
    ("rows-streamed", _U, _ROWS, "unproven", "more lines than the data banks hold, with all kernels in one pass"),
    ("int4-overshoot", _E, _HANG, "measured", "an int4 batch of more than 4 rows with K >= 3072 never runs"),
    ("narrow-n-hang", _E, _HANG, "measured", "fp16, K = 1024, N <= 32, 129 to 176 rows, 1 weight bank"),
    ("narrow-n", _U, _NONE, "unproven", "fp16 with N <= 32, more than 128 rows, fewer than 4 weight banks"),
    ("kernel-over-banks", _U, _NONE, "derived", "a kernel group does not fit the weight banks"),
    ("weight-reuse", _E, _POISON, "executed", "weight_reuse without these weights resident in the buffer"),
    ("data-reuse", _E, _POISON, "executed", "data_reuse without these features resident in the buffer"),
    ("data-reuse-used", _U, _NONE, "unproven", "data_reuse: published attempts were not bit-exact"),
    # --- limits of one program ---
    ("n-limit", _E, _POISON, "measured", "more than 8192 output channels: silently wrong"),
    ("k-limit", _E, _POISON, "measured", "a kernel group does not fit 11 banks: wrong sums"),
    ("k-unproven", _U, _NONE, "derived", "K above 10752, the largest tried on a board"),
    ("int4-rows", _U, _NONE, "derived", "int4 rows in row mode: predicted from the addressing, tried on no board"),
    ("requant-k", _U, _NONE, "measured", "requantised int8 output with K < 512 was reported wrong"),
    ("int16-overflow", _U, _NONE, "unproven", "a sum does not fit int16; taken as saturated"),
    ("int32-overflow", _U, _NONE, "unproven", "a sum does not fit int32; taken as saturated"),
    ("conv-mode", _U, _DOUBT, "unproven", "CNA, CORE and DPU do not agree about depthwise; CNA's word is taken"),
    ("depthwise-kernels", _U, _DOUBT, "unproven", "a depthwise program has one kernel; this one counts others"),
    ("depthwise", _U, _NONE, "unproven", "depthwise beyond what boards showed: fp16 of several blocks, images, sums"),
    ("image", _U, _NONE, "unproven", "images are proved for fp16 and for int8 with one channel"),
    ("feature-conversion", _U, _NONE, "manual", "a conversion of features that no program is known to use"),
    ("window-sums", _U, _NONE, "unproven", "weight zero points are proved for int8"),
    ("fp16-window", _U, _NONE, "unproven", "fp16 with strides or kernels above 5: no result is recorded on a board"),
    ("padding", _U, _NONE, "manual", "fp16 padding or dilation rests on register names alone"),
    # --- the output stages, standalone operations, tables, pooling ---
    ("operand-missing", _E, _HANG, "measured", "a stage waits for an operand that DPU_RDMA does not read"),
    ("stage-unproven", _U, _NONE, "unproven", "nobody has shown what the output stage does here"),
    ("operand-layout", _U, _NONE, "unproven", "several BRDMA operands: their layout is known from a sister chip only"),
    ("operand-stride", _U, _NONE, "unproven", "the strides of ERDMA disagree; the surface stride is taken"),
    ("stage-overflow", _U, _NONE, "unproven", "a value does not fit int32 between stages; taken as saturated"),
    ("sdp-precisions", _U, _NONE, "unproven", "no known program of the DPU alone has these precisions"),
    ("sdp-rows", _E, _HANG, "measured", "a standalone integer operation wider than 8176"),
    ("sdp-int16-chain", _E, _HANG, "measured", "an int16 operation of two inputs with BS active, inside of a chain"),
    ("minmax-unproven", _U, _NONE, "unproven", "minima over channels, or maxima of staged values"),
    ("surface-length", _U, _NONE, "derived", "FEATURE_MODE_CFG.surf_len is not the atoms that the results take"),
    ("lut-unloaded", _E, _POISON, "derived", "a table is used whose points were never written since reset"),
    ("lut-address", _U, _NONE, "unproven", "more than 513 points for a table: those beyond are dropped"),
    ("lut-ping-pong", _E, _DOUBT, "measured", "tables loaded and used with ping-pong on: they may be half written"),
    ("lut-fp16-output", _E, _HANG, "measured", "fp16 results out of a matmul through the tables; fp32 works"),
    ("pool-size", _E, _HANG, "derived", "PPU and PPU_RDMA count different cubes, or windows that do not fit"),
    ("pool-unproven", _U, _NONE, "unproven", "no known program pools like this"),
    # --- memory ---
    ("unmapped-address", _E, _HANG, "measured", "the address is not mapped: IOMMU fault"),
    (
        "missing-sync",
        _E,
        _KERNEL,
        "measured",
        "cacheable memory was read on one side without a MEM_SYNC after the write",
    ),
    ("dirty-output", _U, _KERNEL, "measured", "the device writes under dirty CPU lines, which may land on top of it"),
    ("dirty-output", _U, _KERNEL, "measured", "the device writes under dirty CPU lines, which may land on the result"),
    ("sram-kernel-mapping", _E, _KERNEL, "measured", "on-chip SRAM asked for a kernel-mapped buffer hangs the board"),
    # --- what the emulator does not do ---
    ("not-modelled", _U, _REFUSE, "unproven", "the emulator does not model this"),
    ("work-limit", _U, _REFUSE, "unproven", "more work than the emulator takes on for one program"),
    # --- the kernel driver: submits and domains ---
    ("core-mask", _E, _KERNEL, "measured", "one submit for all three cores wedges the board"),
    ("core-mask-stuck", _E, _KERNEL, "kernel", "core masks 5 and 6 are queued and never started"),
    ("core-mask-pair", _U, _KERNEL, "kernel", "one submit for two cores: accepted, and shown to work by nobody"),
    ("subcore-task", _E, _KERNEL, "kernel", "a core of the mask has no tasks in its subcore entry"),
    ("render-node", _U, _KERNEL, "measured", "submits on a render node were seen to time out; use the card node"),
    ("int-mask", _E, _KERNEL, "kernel", "the last task's int_mask is not the interrupt that the chain raises"),
    ("reap-unit", _U, _KERNEL, "unproven", "a job was reaped by an age in microseconds held against milliseconds"),
    ("sync-range", _E, _KERNEL, "kernel", "MEM_SYNC of bytes outside of the buffer"),
    ("domain-range", _E, _KERNEL, "kernel", "the domain id is out of range"),
    ("domain-busy", _E, _KERNEL, "kernel", "a domain switch waited longer than the kernel allows"),
    ("task-array-mapping", _E, _KERNEL, "kernel", "the task array is not kernel-mapped memory"),
    ("task-array-range", _E, _KERNEL, "kernel", "the subcore entry names tasks outside of the task array"),
    ("task-array-import", _E, _KERNEL, "measured", "a task array in imported memory wedges the board"),
    ("task-array-range", _E, _KERNEL, "kernel", "the tasks of the submit lie beyond the task array"),
    ("subcore-task", _E, _KERNEL, "kernel", "the core's subcore_task entry counts no tasks: the job never completes"),
    ("int-mask", _E, _KERNEL, "kernel", "the last task's int_mask is not what the programs raise: never completes"),
    ("core-mask-pair", _U, _KERNEL, "unproven", "one submit for cores 0 and 1: accepted, but nobody is known to do it"),
    ("render-node", _U, _KERNEL, "measured", "a submit through the render node timed out in the one measured case"),
    ("reap-unit", _U, _KERNEL, "unproven", "a stuck job dropped after its timeout in microseconds, not milliseconds"),
    ("sync-range", _E, _KERNEL, "derived", "MEM_SYNC beyond the end of the buffer"),
    # --- the kernel driver: imports ---
    ("import-size", _E, _KERNEL, "measured", "imports of 64 MiB and more fail"),
    ("import-size-unproven", _U, _KERNEL, "unproven", "imports between 16 and 64 MiB"),
    ("import-chain", _E, _KERNEL, "measured", "a chain that touches 19 or more imported mappings times out"),
    ("import-chain-unproven", _U, _KERNEL, "unproven", "a chain that touches 7 to 18 imported mappings"),
    ("import-first", _E, _KERNEL, "measured", "the first buffer of a domain other than 0 is an import: wrong results"),
    (
        "import-leak",
        _E,
        _KERNEL,
        "kernel",
        "an import of another domain is recorded in domain 0: its address range leaks",
    ),
)

RULES: Final[Mapping[str, Rule]] = MappingProxyType({row[0]: Rule(*row) for row in _TABLE})
