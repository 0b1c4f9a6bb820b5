"""Each rule of the output stage: a program that breaks it is told which register, and ends as the chip would."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ork.emulator.dpu import POISON
from ork.emulator.rules import RULES, Effect
from tests.emulator.elementwise import FP16, INT8, INT16, Operation, standalone, two_inputs

ADD = 2 << 16 | 0xC0  # EW_CFG


@dataclass(frozen=True)
class Case:
    """A standalone operation with something wrong."""

    rule: str
    wrong: dict[int, int] = field(default_factory=dict)
    precision: int = INT8
    register: str = ""
    drop: tuple[int, ...] = ()
    also: tuple[str, ...] = ()


CASES = [
    Case("never-written", drop=(0x4070,)),
    Case("rdma-unconfigured", {0x5044: 0x7800}, register="DPU_RDMA.RDMA_FEATURE_MODE_CFG"),
    Case("rdma-unconfigured", {0x400C: 0x1E4}, register="DPU_RDMA.RDMA_FEATURE_MODE_CFG"),
    Case("precision-mix", {0x4010: 0x48000002}, register="DPU.DATA_FORMAT"),
    Case("precision-mix", {0x4010: 0x40000000}, register="DPU.DATA_FORMAT"),
    Case("precision-mix", {0x5044: 0xF821}, register="DPU.DATA_FORMAT"),
    Case("precision-mix", {0x5034: 0x40000008}, register="DPU_RDMA.RDMA_ERDMA_CFG"),
    Case("output-size", {0x500C: 6}, register="DPU.DATA_CUBE_CHANNEL"),
    Case("output-size", {0x5014: 15}, register="DPU.DATA_CUBE_CHANNEL"),
    Case("output-size", {0x4058: 15}, register="DPU.DATA_CUBE_CHANNEL"),
    Case("operand-missing", {0x5034: 1}, register="DPU_RDMA.RDMA_ERDMA_CFG"),
    Case("operand-missing", {0x4040: 0x20150}, register="DPU_RDMA.RDMA_BRDMA_CFG"),
    Case("operand-missing", {0x4060: 0x20150}, register="DPU_RDMA.RDMA_NRDMA_CFG"),
    Case("stage-unproven", {0x4078: 3 << 22 | 1}, register="DPU.EW_CVT_SCALE_VALUE"),
    Case("stage-unproven", {0x4070: 0x104502C0}, register="DPU.EW_CFG"),
    Case("stage-unproven", {0x4040: 0x62}, register="DPU.BS_CFG"),
    Case("operand-stride", {0x506C: 0x200}, register="DPU_RDMA.RDMA_EW_SURF_NOTCH"),
    Case("operand-layout", {0x501C: 0xA}, register="DPU_RDMA.RDMA_BRDMA_CFG"),
    Case("stage-overflow", {0x4040: 0x20050, 0x4044: 0x7FFFFFFF}, register="DPU.DATA_FORMAT"),
    Case("sdp-precisions", {0x4010: 0x20000000}, register="DPU.DATA_FORMAT"),
    Case("sdp-rows", {0x500C: 8177, 0x4030: 8177}, register="DPU.DATA_CUBE_WIDTH"),
    Case("notch-halves", {0x4038: 0x10000}, register="DPU.DATA_CUBE_NOTCH_ADDR"),
    Case("surface-add", {0x4050: 0x26, 0x40C0: 0x80}, register="DPU.SURFACE_ADD"),
    Case("channel-alignment", {0x403C: 0x140014, 0x4058: 0x14, 0x5014: 0x14}, register="DPU.DATA_CUBE_CHANNEL"),
    Case("minmax-unproven", {0x4034: 5 << 22, 0x400C: 0x020003E5}, register="DPU.DATA_CUBE_HEIGHT"),
    Case("surface-length", {0x4034: 7 << 22, 0x400C: 0x020021E5, 0x4070: 0x383}, register="DPU.FEATURE_MODE_CFG"),
    Case("not-modelled", {0x4034: 7 << 22}),
    Case("not-modelled", {0x4034: 1 << 22, 0x400C: 0x020011E5}),
    Case("not-modelled", {0x400C: 0x020011E5}),
    Case("not-modelled", {0x5048: 1 << 12}),
    Case("not-modelled", {0x5034: 0x60000004}),
    Case("not-modelled", {0x4070: 0x10020000 | 0x400000 | 0x2C0 | 1 << 20}),
    Case("lut-unloaded", {0x4070: 0x302, 0x4108: 0x68, 0x410C: 0x50500, 0x411C: 0x4000}),
]  # fmt: skip
OF_THE_DPU = {case.rule for case in CASES} | {
    *("pool-size", "pool-unproven", "lut-address", "lut-fp16-output", "lut-ping-pong", "sdp-int16-chain"),
}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.rule}-{i}" for i, case in enumerate(CASES)])
def test_a_broken_rule_is_named(case: Case) -> None:
    a, b = np.full((8, 32), 3, np.int8), np.full((8, 32), 4, np.int8)
    registers = two_inputs(case.precision, ADD, 8, 32) | case.wrong
    for offset in case.drop:
        del registers[offset]
    op = Operation(registers, a, b, 1 << 18)
    outcome = op.outcome()
    report, rule = op.board.report, RULES[case.rule]
    assert report.counts[case.rule]
    assert set(report.counts) == {case.rule, *case.also}
    if case.register:
        assert report.of(case.rule)[0].register == case.register
    assert (outcome.hang is not None) == (rule.effect in {Effect.HANG, Effect.REFUSE})
    assert outcome.refused == (rule.effect is Effect.REFUSE)
    untouched = op.c.cpu == 0x5A
    assert untouched.all() == (outcome.hang is not None)
    poisoned = rule.effect is Effect.POISON
    assert ((op.c.cpu[:256] == POISON).mean() > 0.9) == poisoned


def test_good_programs_are_silent() -> None:
    for precision, dtype in ((INT8, np.int8), (INT16, np.int16), (FP16, np.float16)):
        a, b = np.full((8, 32), 3, dtype), np.full((8, 32), 4, dtype)
        op = Operation(two_inputs(precision, ADD, 8, 32), a, b)
        op.run()
        assert not op.board.report.violations
        assert (op.c.cpu[: a.nbytes].view(dtype) == 7).all()


def test_an_int16_operation_of_two_inputs_with_bs_hangs_inside_of_a_chain() -> None:
    registers = two_inputs(INT16, ADD, 8, 32) | {0x4040: 0x20050}
    a = np.ones((8, 32), np.int16)
    op = Operation(registers, a, a)
    placed = registers | {0x5018: op.a.iova, 0x5038: op.b.iova, 0x4020: op.c.iova}
    assert op.board.run([placed], enable=0x18).hang is None
    assert op.board.run([placed, placed], enable=0x18).hang
    assert op.board.report.counts == {"sdp-int16-chain": 1}
    assert op.board.run([placed | {0x4040: 0x53}] * 2, enable=0x18).hang is None


def test_the_rdma_block_must_be_configured() -> None:
    op = Operation({o: v for o, v in standalone(INT8, 8, 32).items() if o < 0x5000}, np.ones((8, 32), np.int8))
    op.registers |= {0x4020: op.c.iova}  # type: ignore[operator]
    assert op.board.run([op.registers], enable=0x18).hang  # type: ignore[list-item]
    assert op.board.report.counts == {"rdma-unconfigured": 1}


@pytest.mark.parametrize(("offset", "name"), [(0x5018, "RDMA_SRC_BASE_ADDR"), (0x5038, "RDMA_EW_BASE_ADDR"),
                                              (0x4020, "DST_BASE_ADDR")])  # fmt: skip
def test_unmapped_addresses_are_named_by_their_register(offset: int, name: str) -> None:
    a = np.ones((8, 32), np.int8)
    op = Operation({}, a, a)
    at = {0x5018: op.a.iova, 0x5038: op.b.iova, 0x4020: op.c.iova} | {offset: 0x1000}
    assert op.board.run([two_inputs(INT8, ADD, 8, 32) | at], enable=0x18).hang
    assert op.board.report.counts == {"unmapped-address": 1}
    assert name in str(op.board.report.violations[0])
    assert (op.c.cpu == 0x5A).all()
