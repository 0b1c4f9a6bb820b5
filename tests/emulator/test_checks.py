"""Each rule of the chip: a program that keeps all of them is silent, one that breaks one is told which, and ends as
the chip would."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ork.emulator.core import Outcome
from ork.emulator.dpu import POISON
from ork.emulator.report import Report, Violation
from ork.emulator.rules import RULES, Effect
from ork.npu import isa
from tests.emulator.programs import (
    FP16,
    FP16_FP16,
    INT4,
    INT8,
    INT8_INT8,
    INT16,
    Board,
    Kind,
    matmul,
    random_operands,
    stored_kernels,
)
from tests.emulator.test_dpu_rules import OF_THE_DPU

ENGINES = pytest.mark.parametrize("engine", ["literal", "fast"])


@dataclass(frozen=True)
class Case:
    """A matmul with one register wrong, or of a shape that is wrong as a whole."""

    rule: str
    wrong: dict[int, int] = field(default_factory=dict)
    kind: Kind = INT8
    M: int = 4
    K: int = 64
    N: int = 64
    form: str = "row"
    register: str | None = None  # that the report names
    drop: tuple[int, ...] = ()
    also: tuple[str, ...] = ()  # rules that such a program cannot help breaking
    lenient: Effect | None = None  # where it differs from the rule's effect


CASES = [
    Case("op-enable-mask"),  # the mask is set below
    Case("never-written", form="wide", drop=(0x40C0, 0x4040)),
    Case("precision-mix", {0x100C: 0x20000120}, register="CORE.MISC_CFG"),
    Case("precision-mix", {0x3010: 0x201}, register="CORE.MISC_CFG"),
    Case("precision-mix", {0x4010: 0x48000002}, register="DPU.DATA_FORMAT"),  # fp16 out of int8
    Case("precision-mix", {0x4010: 0x40000000}, register="DPU.DATA_FORMAT"),
    Case("output-size", {0x102C: 5}, register="CNA.DATA_SIZE3"),
    Case("output-size", {0x4034: 4}, register="DPU.DATA_CUBE_HEIGHT"),
    Case("output-size", {0x3014: 4 << 16, 0x102C: 5, 0x4034: 4}, register="CORE.DATAOUT_SIZE_0"),
    Case("output-size", {0x4058: 31}, register="DPU.DATA_CUBE_CHANNEL"),
    Case("output-size", {0x1038: 0x01010060}, register="DPU.DATA_CUBE_CHANNEL"),
    Case("output-size", {0x1038: 0x01010000}, register="CNA.WEIGHT_SIZE2"),
    Case("output-size", {0x4050: 0x36E}, register="DPU.BS_OW_CFG"),
    Case("output-size", {0x1014: 0}, register="CNA.DATA_SIZE0"),
    Case("weight-size", {0x1030: 64 * 64 + 64}, register="CNA.WEIGHT_SIZE0"),
    Case("weight-size", {0x1034: 32}, register="CNA.WEIGHT_SIZE0"),
    Case("data-entries", {0x1044: 2}, register="CNA.CBUF_CON1"),
    Case("data-entries-short", {0x1044: 1}, K=128, register="CNA.CBUF_CON1"),
    Case("surface-add", {0x40C0: 0x100}, register="DPU.SURFACE_ADD"),
    Case("surface-stride", {0x1080: 0}, form="tall", M=6, register="CNA.DMA_CON2"),
    Case("group-line-stride", {0x107C: 8}, form="tall", M=6, register="CNA.DMA_CON1"),
    Case("notch-halves", {0x4038: 0x7000F}, register="DPU.DATA_CUBE_NOTCH_ADDR"),
    Case("channel-alignment", K=40, form="wide", register="CNA.DATA_SIZE1"),
    Case("bank-split", {0x1040: 0xB2}, register="CNA.CBUF_CON0"),
    Case("bank-split", {0x1040: 0xC0}, also=("rows-over-bank",), register="CNA.CBUF_CON0"),
    Case("bank-split", {0x1040: 0x0B}, also=("kernel-over-banks",), register="CNA.CBUF_CON0"),
    Case("bank-unused", {0x1040: 0xA1}, register="CNA.CBUF_CON0"),
    Case("rows-over-bank", {0x1040: 0xB1}, M=40, K=1024, register="CNA.CBUF_CON0"),
    Case("rows-streamed", {0x1040: 0xB1}, M=40, K=1024, N=32, register="CNA.CBUF_CON0"),
    Case("int4-overshoot", {0x1040: 0xB1}, INT4, M=5, K=3072, form="batch", register="CNA.DATA_SIZE0"),
    Case("narrow-n-hang", {0x1040: 0x1B}, FP16, M=129, K=1024, N=16, register="CNA.CBUF_CON0"),
    Case("narrow-n", {0x1040: 0x3 << 4 | 9}, FP16, M=129, K=512, N=32, register="CNA.CBUF_CON0"),
    Case("kernel-over-banks", {0x1040: 0x1B}, M=4, K=2048, register="CNA.CBUF_CON0"),
    Case("k-limit", M=1, K=11296, N=32, register="CNA.WEIGHT_SIZE1"),
    Case("k-unproven", M=1, K=10784, N=32, register="CNA.DATA_SIZE1"),
    Case(
        "n-limit",
        # what a program gets whose author wrote N - 1 into fields of 13 bits
        {0x1038: 0x01010000 | 8224, 0x1030: 8224 * 32, 0x3018: 8223, 0x403C: 31, 0x4058: 31, 0x4038: 0x7FF07FF},
        M=1,
        K=32,
        N=8192,
        register="CORE.DATAOUT_SIZE_1",
    ),
    Case("int4-rows", kind=INT4, M=2, register="CNA.CONV_CON1"),
    Case("requant-k", {0x4084: 0x4000, 0x4088: 14}, INT8_INT8, register="CNA.DATA_SIZE1"),
    Case("padding", {0x1014: 0x400009}, register="CNA.PAD_CON0"),
    Case("conv-mode", {0x3010: 3}, register="DPU.FEATURE_MODE_CFG"),
    Case("conv-mode", {0x400C: 0x1FC}, register="DPU.FEATURE_MODE_CFG"),
    Case("not-modelled", {0x4070: 0x40280 | 1 << 21}),
    Case("not-modelled", {0x4034: 0x1C00003}),
    Case("not-modelled", {0x100C: 0x20010000}),
    Case("not-modelled", {0x4084: 0x4000}, FP16_FP16),
    Case("work-limit", {0x4058: 8191, 0x403C: 8191 << 16 | 8191, 0x3018: 8191, 0x1020: 0x200 << 16 | 0x200,
                        0x1028: 0x200, 0x102C: 0x40000, 0x3014: 0x1FF01FF, 0x4030: 0x1FF, 0x4034: 0x1FF,
                        0x1040: 0x1B}, K=16, N=32, register="CORE.DATAOUT_SIZE_0",
         also=("rows-streamed", "data-entries-short")),
]  # fmt: skip
APART = {  # rules whose programs have tests of their own below or elsewhere
    *("missing-op-enable", "next-address", "task-count", "word-target", "rdma-unconfigured", "op-enable-mask"),
    *("weight-reuse", "data-reuse", "data-reuse-used", "int16-overflow", "int32-overflow", "address-alignment"),
    *("unmapped-address", "chain-time"),
    *("depthwise", "depthwise-kernels", "image", "image-alignment", "image-flags"),
    *("feature-conversion", "window-sums", "fp16-window"),
}


def run(case: Case, engine: str, strict: bool) -> tuple[Board, Outcome, np.ndarray, np.ndarray]:
    """The board, how it ended, its output and the right one (as bytes)."""
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, case.kind, case.M, case.K, case.N)
    board = Board(engine, strict)
    right = A.astype(np.float64) @ B.astype(np.float64)
    size = case.M * max(case.N, 64) * 4 * 4
    a, w = board.buffer(np.resize(A.view(np.uint8), 1 << 18)), board.buffer(stored_kernels(B, case.kind))
    c = board.buffer(size, 0x11)
    registers = board.place(matmul(case.kind, case.M, case.K, case.N, case.form), a, w, c) | case.wrong
    for offset in case.drop:
        del registers[offset]
    outcome = board.run([registers], enable=0x05 if case.rule == "op-enable-mask" else 0xD)
    dtype = "<f4" if case.kind is FP16 else "<i4"
    return board, outcome, c.cpu[:size], right.astype(dtype).view(np.uint8)


def test_every_rule_has_a_test() -> None:
    of_the_chip = {name for name, rule in RULES.items() if rule.effect is not Effect.KERNEL}
    assert {case.rule for case in CASES} | APART | OF_THE_DPU == of_the_chip


@ENGINES
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c.rule}" for i, c in enumerate(CASES)])
def test_one_rule_broken(case: Case, strict: bool, engine: str) -> None:
    board, outcome, output, right = run(case, engine, strict)
    rule = RULES[case.rule]
    broken = {v.rule: v for v in board.report.violations}
    assert set(broken) == {case.rule, *case.also}
    found = broken[case.rule]
    assert (found.severity, found.program) == (rule.severity, 0)
    if case.register:
        assert found.register == case.register
        assert found.values or case.rule == "notch-halves"

    untouched, poisoned = (output == 0x11).all(), (output == POISON).any()
    if rule.effect in (Effect.HANG, Effect.REFUSE):
        assert outcome.hang
        assert outcome.tasks == 0
        assert outcome.refused == (rule.effect is Effect.REFUSE)
        assert untouched
        return
    assert (outcome.hang, outcome.tasks) == (None, 1)
    assert not untouched
    spoiled = rule.effect is Effect.POISON or (rule.effect is Effect.DOUBT and strict)
    if spoiled:
        assert not (output[output != 0x11] != POISON).any()
    elif rule.effect is Effect.ROWS:
        fit, row = 32, case.N * 4
        assert np.array_equal(output[: fit * row], right.reshape(-1)[: fit * row])
        assert (output[fit * row : case.M * row] == POISON).all()
    elif rule.effect is Effect.NONE:
        assert not poisoned or (output == POISON).mean() < 0.05  # right sums hold such a byte now and then


def test_a_good_program_is_silent_and_right() -> None:
    for kind in (INT8, FP16, INT4):
        board, outcome, output, right = run(Case("", kind=kind, M=1 if kind is INT4 else 4), "literal", True)
        assert outcome.hang is None
        assert not board.report.violations
        if kind is not INT4:
            assert np.array_equal(output[: right.size], right.reshape(-1))


@pytest.mark.parametrize("engine", ["literal", "fast"])
def test_rows_that_fit_exactly_are_all_right(engine: str) -> None:
    case = Case("", {0x1040: 0xB1}, M=32, K=1024)
    board, _, output, right = run(case, engine, True)
    assert not board.report.violations
    assert np.array_equal(output[: right.size], right.reshape(-1))


# --- the stream ---


def ready(engine: str = "literal") -> tuple[Board, dict[int, int]]:
    rng = np.random.default_rng(0)
    A, B = random_operands(rng, INT8, 2, 32, 32)
    board = Board(engine)
    a, w, c = board.buffer(A), board.buffer(stored_kernels(B, INT8)), board.buffer(4096)
    return board, board.place(matmul(INT8, 2, 32, 32), a, w, c)


def only(board: Board, rule: str) -> Violation:
    assert board.report.counts == {rule: 1}
    return board.report.violations[0]


@ENGINES
def test_missing_trailer(engine: str) -> None:
    board, registers = ready(engine)
    body = isa.assemble(registers)[:-4]
    buffer = board.buffer(body)
    outcome = board.core.run(board.domain, buffer.iova, len(body), 1)
    assert outcome.hang
    assert (outcome.tasks, outcome.int_status) == (0, 0)
    assert only(board, "missing-op-enable").values["address"] == buffer.iova


@ENGINES
@pytest.mark.parametrize("where", ["zeros", "data", "unmapped"])
def test_wrong_next_address(where: str, engine: str) -> None:
    board, registers = ready(engine)
    data = board.buffer(np.random.default_rng(0).integers(0, 256, 4096, np.uint8))
    address = {"zeros": board.buffer(4096).iova, "data": data.iova, "unmapped": 0x1000}[where]
    raw = isa.assemble(registers, next_address=address, next_amount=isa.fetch_amount(len(registers)))
    outcome = board.core.run(board.domain, board.buffer(raw).iova, len(registers), 2)
    assert outcome.tasks == 1
    assert outcome.hang
    found = only(board, "next-address")
    assert (found.program, found.register, found.values["address"]) == (1, "PC.BASE_ADDRESS", address)


@ENGINES
def test_task_count_too_long(engine: str) -> None:
    board, registers = ready(engine)
    outcome = board.run([registers, registers], tasks=3)
    assert outcome.tasks == 2
    assert outcome.hang
    assert only(board, "task-count").values == {"programs": 2, "task_number": 3}


@ENGINES
def test_a_halted_chain_stops_early(engine: str) -> None:
    """A fetch amount of 0 in a program that has not run yet ends the chain there."""
    board, registers = ready(engine)
    raw = isa.assemble(registers, next_address=board.chain([registers]), next_amount=1)
    raw[-3] = isa.word(0x0101, 0x0014, 0)
    assert board.core.run(board.domain, board.buffer(raw).iova, len(registers), 2).tasks == 1
    only(board, "task-count")


@ENGINES
def test_a_program_that_leads_to_itself_runs_as_often_as_counted(engine: str) -> None:
    board, registers = ready(engine)
    buffer = board.buffer(4096)
    raw = isa.assemble(registers, next_address=buffer.iova, next_amount=isa.fetch_amount(len(registers)))
    buffer.cpu[: raw.nbytes] = raw.view(np.uint8)
    outcome = board.core.run(board.domain, buffer.iova, len(registers), 5)
    assert (outcome.tasks, outcome.hang, outcome.int_status) == (5, None, 0x100)


@pytest.mark.parametrize(
    ("offset", "name"), [(0x1070, "CNA.FEATURE_DATA_ADDR"), (0x1110, "CNA.DCOMP_ADDR0"), (0x4020, "DPU.DST_BASE_ADDR")]
)
@ENGINES
def test_unmapped_address(offset: int, name: str, engine: str) -> None:
    board, registers = ready(engine)
    outcome = board.run([{**registers, offset: 0x10000}])
    assert outcome.hang
    assert outcome.tasks == 0
    found = only(board, "unmapped-address")
    assert found.register == name
    assert found.values == {"address": 0x10000}


def test_unmapped_program() -> None:
    board, _ = ready()
    assert board.core.run(board.domain, 0x4000, 108, 1).hang
    only(board, "unmapped-address")


@ENGINES
def test_unaligned_address_is_dropped_to_its_atom(engine: str) -> None:
    board, registers = ready(engine)
    assert board.run([{**registers, 0x1070: registers[0x1070] + 4}]).hang is None
    assert only(board, "address-alignment").register == "CNA.FEATURE_DATA_ADDR"


@ENGINES
def test_unaligned_program_is_fetched_from_its_atom(engine: str) -> None:
    board, registers = ready(engine)
    assert board.core.run(board.domain, board.chain([registers]) + 8, len(registers), 1).hang is None
    assert only(board, "address-alignment").register == "PC.BASE_ADDRESS"


@ENGINES
def test_a_chain_that_takes_too_long_is_cut_off(engine: str) -> None:
    board, registers = ready(engine)
    address = board.chain([registers] * 9)
    outcome = board.core.run(board.domain, address, len(registers), 9, limit_ns=20_000)
    assert outcome.tasks == 5
    assert outcome.hang
    assert not outcome.refused
    assert only(board, "chain-time").values["limit_ns"] == 20_000


@ENGINES
def test_a_word_for_the_wrong_block_is_ignored(engine: str) -> None:
    board, registers = ready(engine)
    raw = isa.assemble(registers)
    raw[0] = isa.word(0x0801, 0x1070, 0)
    board.core.groups.blocks["DPU"].write(0x4004, 0xE)
    assert board.core.run(board.domain, board.buffer(raw).iova, len(registers), 1).hang is None
    assert only(board, "word-target").values == {"words": f"{raw[0]:#018x}"}


@pytest.mark.parametrize("enable", [0x0, 0x8, 0x4, 0x9, 0xC, 0x10])
@ENGINES
def test_blocks_that_wait_for_others(enable: int, engine: str) -> None:
    board, registers = ready(engine)
    raw = isa.assemble(registers)
    raw[-1] = isa.word(isa.ENABLE_TARGET, 8, enable)
    outcome = board.core.run(board.domain, board.buffer(raw).iova, len(registers), 1)
    assert outcome.hang
    assert not outcome.refused
    assert set(board.report.counts) <= {"op-enable-mask", "rdma-unconfigured"}
    assert board.report.violations


@ENGINES
def test_rdma_enabled_but_unconfigured(engine: str) -> None:
    board, registers = ready(engine)
    outcome = board.run([registers], enable=0x1D)
    assert outcome.hang
    assert not outcome.refused
    only(board, "rdma-unconfigured")


@pytest.mark.parametrize("enable", [0x7D])
def test_blocks_that_are_not_modelled_are_refused_at_once(enable: int) -> None:
    board, registers = ready()
    outcome = board.run([{**registers, 0x5034: 1, 0x7030: 2, 0x6024: 0}], enable=enable)
    assert outcome.hang
    assert outcome.refused
    only(board, "not-modelled")


@ENGINES
def test_a_submit_of_endless_words_is_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ork.emulator.core.MAX_WORDS", 10_000)
    board, registers = ready(engine)
    raw = isa.assemble(registers)
    long = np.concatenate([np.repeat(raw[:1], 4000), raw])
    buffer = board.buffer(len(long) * 8)
    amount = isa.fetch_amount(len(long) - 4)
    long[-4], long[-3] = isa.word(0x0101, 0x10, buffer.iova), isa.word(0x0101, 0x14, amount)
    buffer.cpu[: long.nbytes] = long.view(np.uint8)
    outcome = board.core.run(board.domain, buffer.iova, len(long) - 4, 4095)
    assert outcome.refused
    assert outcome.tasks == 2
    only(board, "work-limit")


# --- reuse, overflow ---


@ENGINES
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("bit", "rule"), [(13, "weight-reuse"), (12, "data-reuse")])
def test_reuse_of_what_is_not_resident(bit: int, rule: str, strict: bool, engine: str) -> None:
    board, registers = ready(engine)
    board.report.strict = strict
    other = {**registers, 0x1110: registers[0x1110] + 1024, 0x1070: registers[0x1070] + 1024}
    reusing = {**registers, 0x1040: registers[0x1040] | 1 << bit}
    output = board.domain.write_view(registers[0x4020], 256)
    for chain in ([reusing], [other, reusing]):
        output[:] = 0
        board.report.clear()
        assert board.run(chain).hang is None
        assert board.report.counts[rule] == 1
        assert (output == POISON).all()
    # what a submit loaded is not counted on in the next one
    board.run([registers])
    board.report.clear()
    board.run([reusing])
    assert board.report.counts[rule] == 1


@ENGINES
def test_weights_that_do_not_fit_their_banks_are_not_resident_afterwards(engine: str) -> None:
    board = Board(engine)
    a, w, c = board.buffer(4096), board.buffer(1 << 20), board.buffer(1 << 16)
    registers = board.place(matmul(INT8, 1, 1024, 1024), a, w, c)
    board.run([registers, {**registers, 0x1040: registers[0x1040] | 1 << 13}])
    only(board, "weight-reuse")


@ENGINES
def test_int16_overflow_is_reported_and_saturates(engine: str) -> None:
    board = Board(engine)
    a, w = board.buffer(np.full(256, 0x88, np.uint8)), board.buffer(np.full(64 * 256, 0x88, np.uint8))
    c = board.buffer(128)
    board.run([board.place(matmul(INT4, 1, 512, 64, "wide"), a, w, c)])
    assert only(board, "int16-overflow").severity == "unproven"
    assert (c.cpu[:128].view("<i2") == 32767).all()


@ENGINES
def test_int32_overflow_is_reported_and_saturates(engine: str) -> None:
    board = Board(engine)
    rows, kernels = np.full(64, -32768, np.int16), np.full((64, 16), -32768, np.int16)
    a, w, c = board.buffer(rows), board.buffer(stored_kernels(kernels, INT16)), board.buffer(64)
    board.run([board.place(matmul(INT16, 1, 64, 16), a, w, c)])
    only(board, "int32-overflow")
    assert (c.cpu[:64].view("<i4") == 2**31 - 1).all()


# --- the report ---


def test_a_violation_reads_as_one_line() -> None:
    report = Report()
    report.at_program(3)
    report.add("rows-over-bank", register="CNA.CBUF_CON0", values={"lines": 40, "fit": 32, "at": 0xFFFF0000})
    line = str(report.violations[0])
    assert line == (
        "error rows-over-bank: more feature lines than the data banks hold "
        "[program 3] [CNA.CBUF_CON0] [lines = 40, fit = 32, at = 0xffff0000]"
    )
    with pytest.raises(KeyError):
        report.add("no-such-rule")


def test_the_report_counts_everything_and_keeps_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ork.emulator.report.KEPT", 5)
    report = Report()
    for _ in range(9):
        report.add("never-written")
    assert (len(report.violations), report.counts["never-written"], len(report.of("never-written"))) == (5, 9, 5)
    report.clear()
    assert not report.violations
    assert not report.counts
