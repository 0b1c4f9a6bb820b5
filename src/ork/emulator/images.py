"""What the fast engine remembers about program texts and tasks.

An `Image` is a program text, addresses left out, that writes every register a matmul task is read from and plays no
games with the group pointers. It owes nothing to earlier programs, so that its task, verdict and plan are known once
and for all; what is left per run is to note its writes in the register groups and to pick out its addresses.
"""

from __future__ import annotations

from typing import Final

from ork.emulator.checks import Verdict, judge
from ork.emulator.convolve import Places
from ork.emulator.fast import Plan, plan
from ork.emulator.groups import CLEARS, POINTER, POINTER_PP, Groups, Registers
from ork.emulator.lut import ACCESS_CFG, ACCESS_DATA, WRITE
from ork.emulator.stream import Stream, parse
from ork.emulator.task import FEATURES, OUTPUT, READS, WEIGHTS, Task, read
from ork.npu.isa import ADDRESS_OFFSETS, MATMUL, REGISTERS, Words, mask_addresses
from ork.npu.soc import Soc

_KEPT: Final = 1024  # texts and tasks remembered, each
_LONGEST: Final = 1024  # words of a remembered text; matmuls have about 112
_BLOCKS: Final = ("CNA", "CORE", "DPU")
_NEEDED: Final = {(REGISTERS[offset].block, offset) for offset in READS}
_ADDRESSES: Final = (("CNA", FEATURES), ("CNA", WEIGHTS), ("DPU", OUTPUT))


class Image:
    """A text, the task it describes and how that runs."""

    def __init__(self, stream: Stream, judged: tuple[Task, Verdict, Plan | None]) -> None:
        self.task, self.verdict, self.plan = judged
        last = last_writes(stream)
        self._pointers = [(w.block, w.offset, w.value) for w in stream.writes if w.offset & 0xFFF == POINTER]
        values: dict[str, Registers] = {}
        for (block, offset), index in last.items():
            values.setdefault(block, {})[offset] = stream.writes[index].value
        self._values = tuple(values.items())
        words = {key: stream.writes[index].index for key, index in last.items()}
        self._features, self._weights, self._output = (words[key] for key in _ADDRESSES)
        # addresses of registers that the task does not use still are part of the groups
        self._others = [(b, o, i) for (b, o), i in words.items() if o in ADDRESS_OFFSETS and (b, o) not in _ADDRESSES]
        access = last.get(("DPU", ACCESS_CFG))
        self.table_access = None if access is None else stream.writes[access].value
        self._next_index, self._next_amount = stream.next_index, stream.next_amount

    def apply(self, groups: Groups, words: Words, base: int) -> Places | None:
        """Write the text's registers; its addresses. None, and nothing written, if it has to go the long way: blocks
        that would run another group than the one written, addresses that are not multiples of 16."""
        blocks = groups.blocks
        for name in _BLOCKS:
            block = blocks[name]
            if block.pointer != block.executer:
                return None
        features, weights, output = (
            int(words[self._features]) >> 16 & 0xFFFFFFFF,
            int(words[self._weights]) >> 16 & 0xFFFFFFFF,
            int(words[self._output]) >> 16 & 0xFFFFFFFF,
        )
        if (features | weights | output) & 15:
            return None
        for name, offset, value in self._pointers:
            blocks[name].write(offset, value)
        for name, values in self._values:
            block = blocks[name]
            block.groups[block.pointer].update(values)
        cna, dpu = blocks["CNA"], blocks["DPU"]
        written = cna.groups[cna.pointer]
        written[FEATURES], written[WEIGHTS] = features, weights
        dpu.groups[dpu.pointer][OUTPUT] = output
        for name, offset, index in self._others:
            blocks[name].write(offset, int(words[index]) >> 16 & 0xFFFFFFFF)
        return Places.at(features, weights, output, base, image=bool(self.task.image))

    def following(self, words: Words) -> tuple[int, int]:
        """(address, amount) of the next program, address 0 if there is none."""
        if self._next_index < 0:
            return 0, 0
        return int(words[self._next_index]) >> 16 & 0xFFFFFFF0, self._next_amount


def last_writes(stream: Stream) -> dict[tuple[str, int], int]:
    """(block, offset) -> index of its last write in `stream.writes`, the group pointers left out."""
    return {(w.block, w.offset): i for i, w in enumerate(stream.writes) if w.offset & 0xFFF != POINTER}


def loads_tables(stream: Stream) -> bool:
    """Whether a text may write points of a table, which register groups do not hold."""
    access = [w for w in stream.writes if w.offset in {ACCESS_CFG, ACCESS_DATA}]
    return any(w.offset == ACCESS_CFG and w.value & WRITE for w in access) or (
        bool(access) and access[0].offset == ACCESS_DATA
    )


class Images:
    """Texts and tasks that a core has seen, the latest about a thousand of each."""

    def __init__(self, soc: Soc, strict: bool) -> None:
        self._soc, self._strict = soc, strict
        self._images: dict[bytes, Image | None] = {}
        self._judged: dict[Task, tuple[Verdict, Plan | None]] = {}

    def __len__(self) -> int:
        return len(self._images) + len(self._judged)

    def of(self, words: Words) -> Image | None:
        """The image of a fetched program; None if it has none."""
        if len(words) > _LONGEST:
            return None
        key = mask_addresses(words)
        try:
            return self._images[key]
        except KeyError:
            if len(self._images) >= _KEPT:
                self._images.clear()
            image = self._images[key] = self._image(parse(words))
            return image

    def judged(self, task: Task) -> tuple[Verdict, Plan | None]:
        """What the checks say about a task, and how it runs natively, if it does."""
        known = self._judged.get(task)
        if known is None:
            if len(self._judged) >= _KEPT:
                self._judged.clear()
            verdict = judge(task, self._soc, self._strict)
            known = self._judged[task] = (verdict, plan(task, verdict))
        return known

    def _image(self, stream: Stream) -> Image | None:
        pointers = (w.value for w in stream.writes if w.offset & 0xFFF == POINTER)
        if stream.enable != MATMUL or stream.strays or any(v & CLEARS or not v & POINTER_PP for v in pointers):
            return None
        last = last_writes(stream)
        written = {offset for _, offset in last}
        if not last.keys() >= _NEEDED or loads_tables(stream):
            return None
        registers: dict[str, Registers] = {name: {} for name in _BLOCKS}
        for (block, offset), index in last.items():
            registers.setdefault(block, {})[offset] = stream.writes[index].value
        task = read(registers["CNA"], registers["CORE"], registers["DPU"])
        if task.conversion is not None or not written >= set(task.stages.reads):
            return None  # it reads registers that are not needed without
        return Image(stream, (task, *self.judged(task)))
