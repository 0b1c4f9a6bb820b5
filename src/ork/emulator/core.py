"""One NPU core: fetches programs, keeps the register groups, runs what they enable, follows the chain.

The literal engine parses and runs every program by the book. The fast engine keeps what it learnt about a program's
text (addresses apart) and hands matmuls of known geometry to native kernels; whatever is not such a matmul goes the
literal way. Both leave the same bytes, register groups and findings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import convolve, elementwise, fetch, ppu, reader
from ork.emulator import operands as operands_of_stages
from ork.emulator.checks import Finding, Verdict, judge
from ork.emulator.convolve import Places
from ork.emulator.fast import Plan
from ork.emulator.groups import Groups, Registers
from ork.emulator.images import Images
from ork.emulator.kept import Loaded, same_features, same_weights
from ork.emulator.lut import ACCESS_CFG, ACCESS_DATA, TABLE_ACCESS, Tables
from ork.emulator.memory import Domain, IommuFault
from ork.emulator.pipeline import NOTHING
from ork.emulator.rdma import OperandFault
from ork.emulator.reader import Sources
from ork.emulator.report import Report
from ork.emulator.rules import RULES
from ork.emulator.stream import Stream, parse
from ork.emulator.task import FEATURES, OUTPUT, WEIGHTS, Task, read
from ork.npu.isa import MATMUL, Enable, Interrupt, Words, fetch_amount, fetched_words
from ork.npu.soc import Soc

ENGINES: Final = ("fast", "literal")
_TASK_NS: Final = 4400  # a chained program costs so much (measured) ...
_WEIGHTS_PER_NS: Final = 10.8  # ... and its weights so many bytes a nanosecond (measured), or, if that takes longer,
_MACS_PER_NS: Final = {4: 2048, 8: 1024, 16: 512}  # its multiply-adds by bits of an element (nominal peak of a core)
_SDP_PER_NS: Final = 8  # elements of the DPU alone: nobody has measured it
_NOT_YET: Final = (0x7D, 0x7F)  # op-enable masks of programs that work and are not modelled
_BASE_ADDRESS: Final = 0x0010
MAX_WORDS: Final = 1 << 23  # read one by one in one submit; 4095 programs of the usual length have less than 2**19
_SHOWN: Final = 4  # words of the wrong target that a report lists
_DONE: Final = {  # by the block that ends the pipe, and its group that ran
    "DPU": (int(Interrupt.DPU_0), int(Interrupt.DPU_1)),
    "PPU": (int(Interrupt.PPU_0), int(Interrupt.PPU_1)),
}
_MATMUL: Final = int(MATMUL)
_FUSED: Final = int(MATMUL | Enable.DPU_RDMA)
_STANDALONE: Final = int(Enable.DPU | Enable.DPU_RDMA)
_POOLING: Final = int(Enable.PPU | Enable.PPU_RDMA)


@dataclass(slots=True)
class Outcome:
    """How a submit ended: programs done, INTERRUPT_STATUS, simulated time. `hang` says why it never ended, or None.

    With `refused` the hang is one of the emulator, which does not know what the chip would do: the submit should fail
    at once.
    """

    tasks: int = 0
    int_status: int = 0
    hang: str | None = None
    hw_ns: int = 0
    refused: bool = False


class _Stop(Exception):
    """The program does not complete."""

    def __init__(self, finding: Finding, *, refused: bool = False, text: str | None = None) -> None:
        super().__init__(finding.rule)
        self.finding, self.refused, self.text = finding, refused, text


class Core:
    """A core with the state that outlives programs and submits: register groups. `engine`: "fast" or "literal"."""

    def __init__(self, index: int, soc: Soc, report: Report, engine: str = "fast") -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
        self.index, self.soc, self.report = index, soc, report
        self._images = Images(soc, report.strict) if engine == "fast" else None
        self.ended: Callable[[int, int, int], None] | None = None  # told of each program: number, address, ns
        self.reset()

    def reset(self) -> None:
        """A soft reset: nothing was ever written."""
        self.groups = Groups()
        self.tables = Tables()
        self._parsed = 0
        self._chained = self._ping_pong = False  # the submit has several programs, and the flag
        self._loads = False  # this program writes points of the tables
        self._half_written = False  # tables were loaded under ping-pong, and nothing has used them yet
        self._features: Loaded | None = None
        self._weights: Loaded | None = None

    def run(
        self,
        domain: Domain,
        address: int,
        amount: int,
        task_number: int,
        task_base: int = 0,
        limit_ns: int | None = None,
        *,
        ping_pong: bool = False,
    ) -> Outcome:
        """Run a chain of `task_number` programs, the first at `address` with a body of `amount` words.

        `task_base` is added to every operand's address. Never raises: a bad program ends in `hang` and in the report.
        A chain that takes more than `limit_ns` of simulated time is stopped. `ping_pong`: the flag of the submit.
        """
        outcome = Outcome()
        self.groups.commit(self.index)
        # Whether the buffer's contents outlive a submit is unproven: here they don't.
        self._features = self._weights = None
        self._parsed = 0
        self._chained, self._ping_pong = task_number > 1, ping_pong
        at, fetched = address & fetch.WINDOW & ~15, fetch_amount(amount) & 0xFFFF
        if at != address:
            self._add(Finding("address-alignment", _BASE_ADDRESS, {"address": address}))
        try:
            for number in range(task_number):
                self.report.at_program(number)
                start, began = at, outcome.hw_ns
                try:
                    at, fetched = self._program(domain, at, fetched, task_base, outcome)
                except _Stop as stop:
                    self._add(stop.finding, stop.text)
                    outcome.hang = stop.text or RULES[stop.finding.rule].text
                    outcome.refused = stop.refused
                    return outcome
                outcome.tasks = number + 1
                if self.ended is not None:
                    self.ended(number, start, outcome.hw_ns - began)
                if outcome.tasks == task_number:
                    return outcome
                if not at or not fetched:
                    values = {"programs": outcome.tasks, "task_number": task_number}
                    self._add(Finding("task-count", _BASE_ADDRESS, values))
                    outcome.hang = RULES["task-count"].text
                    return outcome
                if limit_ns is not None and outcome.hw_ns > limit_ns:
                    self._add(Finding("chain-time", None, {"hw_ns": outcome.hw_ns, "limit_ns": limit_ns}))
                    outcome.hang = RULES["chain-time"].text
                    return outcome
        finally:
            self.report.at_program(None)
        return outcome

    def _add(self, finding: Finding, text: str | None = None) -> None:
        self.report.add(finding.rule, register=finding.register_name, values=finding.values, text=text)

    # --- one program ---

    def _program(self, domain: Domain, at: int, amount: int, base: int, outcome: Outcome) -> tuple[int, int]:
        """Run the program at `at`; (address, amount) of the next one, address 0 if there is none."""
        try:
            words = domain.read(at, 8 * fetched_words(amount)).view(np.uint64)
        except IommuFault as fault:
            rule = "next-address" if outcome.tasks else "unmapped-address"
            raise _Stop(Finding(rule, _BASE_ADDRESS, {"address": at}), text=f"a program is fetched: {fault}") from None
        if self._images is not None:
            image = self._images.of(words)
            places = image.apply(self.groups, words, base) if image is not None else None
            if image is not None and places is not None:
                if image.table_access is not None:
                    self.tables.write(ACCESS_CFG, image.table_access)
                self._judged(domain, image.task, image.verdict, image.plan, places, outcome)
                return image.following(words)
        stream = parse(words)
        self._parsed += stream.length
        if self._parsed > MAX_WORDS:
            raise _Stop(Finding("work-limit", None, {"words": self._parsed}), refused=True)
        if stream.enable is None:
            rule = "missing-op-enable" if stream.writes or not outcome.tasks else "next-address"
            raise _Stop(Finding(rule, _BASE_ADDRESS, {"address": at, "words": len(words)}))
        if stream.strays:
            self._add(
                Finding("word-target", None, {"words": " ".join(f"{words[i]:#018x}" for i in stream.strays[:_SHOWN])})
            )
        self._write(stream)
        self._enabled(domain, stream.enable, base, outcome)
        return _next(stream, words)

    def _write(self, stream: Stream) -> None:
        """A program's writes, into the groups and into the tables."""
        lost, loads = 0, False
        for write in stream.writes:
            self.groups.blocks[write.block].write(write.offset, write.value)
            if write.offset in TABLE_ACCESS:
                lost += not self.tables.write(write.offset, write.value)
                loads |= write.offset == ACCESS_DATA and self.tables.writing
        self._loads = loads
        if lost:
            self._add(Finding("lut-address", ACCESS_CFG, {"words": lost}))

    def _enabled(self, domain: Domain, enable: int, base: int, outcome: Outcome) -> None:
        """Run what the op-enable word starts. (Convolutions are `convolve`'s, standalone operations
        `elementwise`'s, pooling `ppu`'s.)"""
        running = {name: self.groups.running(name) for name in self.groups.blocks}
        if enable & ~MATMUL == Enable.DPU_RDMA and not running["DPU_RDMA"]:
            raise _Stop(Finding("rdma-unconfigured", 0x5034, {"enable": enable}))
        if enable in _NOT_YET:
            text = f"{RULES['not-modelled'].text}: op-enable mask {enable:#x}"
            raise _Stop(Finding("not-modelled", None, {"enable": enable}), refused=True, text=text)
        if enable == _STANDALONE:
            self._standalone(domain, running["DPU"], running["DPU_RDMA"], base, outcome)
            return
        if enable == _POOLING:
            self._pooling(domain, running["PPU"], running["PPU_RDMA"], base, outcome)
            return
        if enable not in (MATMUL, _FUSED):
            raise _Stop(Finding("op-enable-mask", None, {"enable": enable}))
        rdma = running["DPU_RDMA"] if enable == _FUSED else None
        task = read(running["CNA"], running["CORE"], running["DPU"], rdma)
        at = running["CNA"].get(FEATURES, 0), running["CNA"].get(WEIGHTS, 0), running["DPU"].get(OUTPUT, 0)
        places = Places.at(*at, base, image=bool(task.image))
        if rdma is not None:
            places = replace(places, sources=Sources.at(rdma, base))
        if self._images is not None:
            verdict, plan = self._images.judged(task)
        else:
            verdict, plan = judge(task, self.soc, self.report.strict), None
        for block, offset in (("CNA", FEATURES), ("CNA", WEIGHTS), ("DPU", OUTPUT)):
            value = running[block].get(offset, 0)
            if value & 15:
                rule = "image-alignment" if task.image and offset == FEATURES else "address-alignment"
                self._add(Finding(rule, offset, {"address": value}))
        self._judged(domain, task, verdict, plan, places, outcome)

    def _judged(
        self, domain: Domain, task: Task, verdict: Verdict, plan: Plan | None, places: Places, outcome: Outcome
    ) -> None:
        """Report what was found, then run the task as far as it runs."""
        self._obey(verdict, task.not_modelled)
        if task.stages.lookup is not None and self._tables_spoiled():
            verdict = replace(verdict, poison=True)
        rule: str | None = None
        if plan is not None and not (task.weight_reuse and not self._in_memory(task, places)):
            rule = plan.run(domain, places)
        if rule is None:
            rule = self._literally(domain, task, verdict, places)
        else:
            self._features = Loaded(task, places, None)
            self._weights = self._kept(task, places, None)
        if rule:
            self._add(Finding(rule, 0x4010))
        macs_ns = task.pixels * task.weights_size * 8 / task.kind.bits / _MACS_PER_NS[task.kind.bits]
        outcome.hw_ns += _TASK_NS + int(max(task.weights_size / _WEIGHTS_PER_NS, macs_ns))
        self._ran(_MATMUL if task.reader is None else _FUSED, "DPU", outcome)

    def _obey(self, verdict: Verdict, not_modelled: str) -> None:
        """Report what was found; stop where the program does."""
        for finding in verdict.findings:
            if finding.rule not in (verdict.hang, verdict.refuse):  # the stop below reports those
                self._add(finding)
        if verdict.hang or verdict.refuse:
            stopper = verdict.hang or verdict.refuse
            finding = next(f for f in verdict.findings if f.rule == stopper)
            text = f"{RULES[stopper].text}: {not_modelled}" if stopper == "not-modelled" else None
            raise _Stop(finding, refused=not verdict.hang, text=text)

    def _tables_spoiled(self) -> bool:
        """Whether a program that looks values up may see tables that another one was still writing: loaded in a
        submit with the ping-pong flag, used next by a program whose groups take turns (measured). A program that
        loads what it uses waits for it (executed), and so do those after it."""
        block = self.groups.blocks["DPU"]
        spoiled = self._half_written and not self._loads and (block.pointer_pp or block.executer_pp)
        self._half_written = self._loads = False
        if spoiled:
            self._add(Finding("lut-ping-pong", ACCESS_CFG))
        return spoiled and self.report.strict

    def _ran(self, enable: int, last: str, outcome: Outcome) -> None:
        """The blocks of that mask have run; `last` raises the interrupt."""
        outcome.int_status = _DONE[last][self.groups.blocks[last].executer]
        self.groups.ran(enable)
        if self._loads:
            self._half_written, self._loads = self._ping_pong, False

    def _aligned(self, registers: Registers, *offsets: int) -> None:
        for offset in offsets:
            if (value := registers.get(offset, 0)) & 15:
                self._add(Finding("address-alignment", offset, {"address": value}))

    # --- without the core ---

    def _standalone(self, domain: Domain, dpu: Registers, rdma: Registers, base: int, outcome: Outcome) -> None:
        op = elementwise.read(dpu, rdma)
        verdict = elementwise.judge(op, self.soc, self.report.strict, chained=self._chained)
        self._obey(verdict, op.not_modelled)
        poison = verdict.poison or (op.stages.lookup is not None and self._tables_spoiled())
        self._aligned(dpu, OUTPUT)
        self._aligned(rdma, *reader.ADDRESSES)
        sources, output = Sources.at(rdma, base), base + dpu.get(OUTPUT, 0) & fetch.WINDOW & ~15
        run = partial(elementwise.run, domain, op, sources, output, self.tables, poison=poison)
        for rule in _mapped(OUTPUT, run):
            self._add(Finding(rule, 0x4010))
        outcome.hw_ns += _TASK_NS + int(op.pixels * op.channels / _SDP_PER_NS)
        self._ran(_STANDALONE, "DPU", outcome)

    def _pooling(self, domain: Domain, registers: Registers, rdma: Registers, base: int, outcome: Outcome) -> None:
        pool = ppu.read(registers, rdma)
        verdict = ppu.judge(pool, self.report.strict)
        self._obey(verdict, pool.not_modelled)
        self._aligned(registers, ppu.OUTPUT)
        self._aligned(rdma, ppu.SOURCE)
        mask = fetch.WINDOW & ~15
        source, output = base + rdma.get(ppu.SOURCE, 0) & mask, base + registers.get(ppu.OUTPUT, 0) & mask
        _mapped(ppu.OUTPUT, partial(ppu.run, domain, pool, source, output, poison=verdict.poison))
        outcome.hw_ns += _TASK_NS + int(pool.windows * pool.channels[0] / _SDP_PER_NS)
        self._ran(_POOLING, "PPU", outcome)

    # --- the literal way ---

    def _literally(self, domain: Domain, task: Task, verdict: Verdict, places: Places) -> str:
        operands = None if verdict.poison else self._load(domain, task, verdict.lines, places)
        if operands is None:
            self._features = self._weights = None
        else:
            self._features = Loaded(task, places, operands[0])
            self._weights = self._kept(task, places, operands[1])
        side = NOTHING
        if operands is not None:
            fetch_side = partial(operands_of_stages.fetch, domain, task.stages, task.reader, places.sources)
            side = _mapped(OUTPUT, partial(fetch_side, task.results, self.tables))
        broken: str = _mapped(OUTPUT, lambda: convolve.run(domain, task, places.output, operands, side))
        return broken

    def _load(
        self, domain: Domain, task: Task, lines: int, places: Places
    ) -> tuple[npt.NDArray[Any], fetch.Bytes] | None:
        """Features and kernels, out of memory or, if they are reused, out of the buffer; None if they are not there."""
        if task.data_reuse and not same_features(self._features, task, places):
            self._add(Finding("data-reuse", 0x1040, {"features": places.features}))
            return None
        if task.weight_reuse and not same_weights(self._weights, task, places):
            self._add(Finding("weight-reuse", 0x1040, {"weights": places.weights, "bytes": task.weights_size}))
            return None
        features = self._features.data if task.data_reuse and self._features else None
        if features is None:
            features = _mapped(FEATURES, lambda: fetch.features(domain, task, places.features, lines))
        weights = self._weights.data if task.weight_reuse and self._weights else None
        if weights is None:
            weights = _mapped(WEIGHTS, lambda: domain.read(places.weights, task.weights_size).copy())
        return features, weights

    def _kept(self, task: Task, places: Places, data: fetch.Bytes | None) -> Loaded | None:
        """Kernels stay resident if all of them fit the weight banks at once."""
        if task.weights_size > task.weight_bank * self.soc.bank_bytes:
            return None
        return Loaded(task, places, data)

    def _in_memory(self, task: Task, places: Places) -> bool:
        """Whether reused weights are resident and still lie in memory as they were loaded."""
        kept = self._weights
        return kept is not None and kept.data is None and same_weights(kept, task, places)


def _next(stream: Stream, words: Words) -> tuple[int, int]:
    if stream.next_index < 0:
        return 0, 0
    return int(words[stream.next_index]) >> 16 & 0xFFFFFFF0, stream.next_amount


def _mapped(register: int, access: Callable[[], Any]) -> Any:
    """An access whose fault stops the program, in the name of the register that held the address."""
    try:
        return access()
    except IommuFault as fault:
        register = fault.register if isinstance(fault, OperandFault) else register
        raise _Stop(Finding("unmapped-address", register, {"address": fault.iova}), text=str(fault)) from None
