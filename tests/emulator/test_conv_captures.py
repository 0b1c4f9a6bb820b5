"""A vendor's convolutions as it cuts them for one, two and three cores, on as many cores of the emulated chip.

Every submit buffer holds three sets of chains: one chain of row tiles for one core; two chains, halves; three chains,
thirds. Each chain runs on a core of its own, with register groups and a convolution buffer of its own, on random data;
together they must be the whole convolution. `f16_conv_live_*` are words, verbatim; `decoded_conv_*` are the registers
that differ between programs, and the others follow from them. Skipped without the files.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork.emulator.core import Core
from ork.emulator.kernel import EmulatedKernel
from ork.npu import isa, uabi
from ork.npu.disasm import disassemble
from ork.npu.soc import RK3588
from tests.emulator import board as kernels_board
from tests.emulator.programs import UNCACHED, Array, Board

FOLDER = Path(os.environ.get("ORK_CAPTURES", Path(__file__).parents[2] / "../shared/captures"))
TWICE = ("rerun", "sweep", "live_c32_h14")  # the same graphs at other addresses
LIVE = {p.stem: p for p in sorted(FOLDER.glob("f16_conv_live_*.json")) if not any(x in p.stem for x in TWICE)}
DECODED = {p.stem: p for p in sorted(FOLDER.glob("decoded_conv_*.json"))}
pytestmark = pytest.mark.skipif(not LIVE, reason="no captured programs: ORK_CAPTURES names their folder")
MEMORY = 32 << 20  # from the top of the address space
TEXTS = (1 << 32) - MEMORY  # below all operands


@dataclass
class Chain:
    """Programs of one core: where the first one lies, its body's length, how many there are."""

    address: int
    amount: int
    programs: int
    pooling: bool = False  # the last of them pools, and raises the interrupt


@dataclass
class Graph:
    """A captured convolution; the sets of chains, one after the other for 1, 2 and 3 cores."""

    texts: list[tuple[int, isa.Words]]  # address, words
    sets: list[list[Chain]]
    first: dict[int, int]  # registers of the first program of the only core
    W: int
    H: int
    C: int
    N: int
    kernel: tuple[int, int]
    depthwise: bool

    @property
    def out(self) -> tuple[int, int]:
        return self.W - self.kernel[0] + 1, self.H - self.kernel[1] + 1


def chains(tasks: list[dict[str, Any]]) -> list[list[Chain]]:
    """Of the tasks in order. The first chain ends where the first one begins that another core shares; the others end
    with a pooling program (of a scratch pixel, for its interrupt)."""
    found: list[list[dict[str, Any]]] = [[]]
    for task in tasks:
        if len(found) == 1 and found[0] and task["amount"] == 104:
            found.append([])
        if task["mask"] == 0x60:
            found.append([])
        else:
            found[-1].append(task)
    cores = [Chain(chain[0]["address"], chain[0]["amount"], len(chain)) for chain in found if chain]
    assert len(cores) == 1 + 2 + 3
    return [cores[:1], cores[1:3], cores[3:]]


def graph_of(
    texts: list[tuple[int, isa.Words]], sets: list[list[Chain]], first: dict[int, int], results: int, C: int
) -> Graph:
    W, kernel = first[0x1020] >> 16, (first[0x1038] >> 24, first[0x1038] >> 16 & 0x1F)
    H = ((first[0x1080] + 4 * W) & 0xFFFFFFF) // W
    return Graph(texts, sets, first, W, H, C, results, kernel, first[0x100C] & 0xF == 3)


def live(name: str) -> Graph:
    about = json.loads(LIVE[name].read_text())
    words = np.array([int(w, 16) for w in about["words"]], np.uint64)
    tasks = [
        {"address": int(t["regcmd_addr"], 16), "amount": t["regcfg_amount"], "mask": int(t["enable_mask"], 16)}
        for t in about["tasks"]
    ]
    first = {line.offset: line.value for line in disassemble(words[:112])}
    sets = chains(tasks)
    for chain in (chain for cores in sets[1:] for chain in cores):
        chain.programs, chain.pooling = chain.programs + 1, True
    return graph_of([(tasks[0]["address"], words)], sets, first, first[0x1038] & 0x3FFF, first[0x1024] & 0xFFFF)


NAMES = {
    "cbuf0": 0x1040, "data_size0": 0x1020, "data_size1": 0x1024, "data_size3": 0x102C, "fc_data_size0": 0x1084,
    "fc_data_size1": 0x1088, "dma_con2": 0x1080, "weight_size0": 0x1030, "weight_size1": 0x1034,
    "weight_size2": 0x1038, "conv_con1": 0x100C, "conv_con2": 0x1010, "core_dataout_size0": 0x3014,
    "core_dataout_size1": 0x3018, "dst_base": 0x4020, "feature_data_addr": 0x1070, "dcomp_addr": 0x1110,
    "dst_surf_stride": 0x4024, "data_cube_height": 0x4034, "data_cube_channel": 0x403C, "wdma_size0": 0x4058,
    "wdma_size1": 0x405C, "surface_add": 0x40C0,
}  # fmt: skip


def decoded(name: str) -> Graph:
    """Bodies rebuilt: a register that the file leaves out was inherited, so it is left out here too.

    Where the programs lie is ours: one file has other addresses than its words, inside of the features.
    """
    about = json.loads(DECODED[name].read_text())
    rows = [{NAMES[key]: value for key, value in row.items() if value is not None} for row in about["body_rows"]]
    tasks = [{"amount": amount, "mask": mask} for amount, mask in zip(about["amounts"], about["masks"])]
    convolutions = [task for task in tasks if task["mask"] == 0xD]
    assert len(rows) == len(convolutions)
    for number, task in enumerate(tasks):
        task["address"] = TEXTS + 0x400 * number
    sets = chains(tasks)
    heads = {chain.address: chain for cores in sets for chain in cores}
    inherited: list[dict[int, int]] = []
    for i, row in enumerate(rows):
        inherited.append({**(inherited[i - 2] if i > 1 else {}), **row})
    bodies = [_body(row, whole) for row, whole in zip(rows, inherited)]
    texts = []
    for i, (task, body) in enumerate(zip(convolutions, bodies)):
        if task["address"] in heads:
            heads[task["address"]].amount = len(body)
        following = convolutions[i + 1]["address"] if i + 1 < len(rows) else 0
        leads = following and following not in heads
        words = (
            isa.assemble(body, next_address=following, next_amount=isa.fetch_amount(len(bodies[i + 1])))
            if leads
            else isa.assemble(body)
        )
        texts.append((task["address"], words))
    first = rows[0]
    # The only core does a depthwise image block by block of channels; each of three takes rows of all channels.
    C = (rows[-1] if first[0x100C] & 0xF == 3 else first)[0x1024] & 0xFFFF
    return graph_of(texts, sets, first, C if first[0x100C] & 0xF == 3 else first[0x1038] & 0x3FFF, C)


def _body(row: dict[int, int], whole: dict[int, int]) -> dict[int, int]:
    """A program's registers: those in the file, and what follows from them in the vendor's other convolutions. `whole`:
    with those that it inherits."""
    body = {0x4004: 0xE, **row}
    depthwise = row[0x100C] & 0xF == 3
    if row.keys() & {0x1020, 0x1024}:
        width = whole[0x1020] >> 16
        body |= {0x107C: 4 * width, 0x1044: -(-width * (whole[0x1024] & 0xFFFF) * 2 // 64)}
    if 0x3014 in row:
        body |= {0x1028: (row[0x3014] & 0xFFFF) + 1, 0x4030: row[0x3014] & 0xFFFF}
    if 0x1038 in row:
        body |= {
            0x1014: 9, 0x104C: 0xB, 0x1060: 0, 0x1068: 0, 0x1100: 0, 0x1184: 0, 0x3010: 0x200 | depthwise << 1,
            0x400C: 0x1FC if depthwise else 0x1E4, 0x4010: 0x48000002, 0x4038: 0, 0x4040: 0x53,
            0x4050: 0x36E if depthwise else 0x126, 0x4054: 0, 0x4060: 0x53, 0x4070: 0x383, 0x4080: 0, 0x4084: 0x10001,
            0x4088: 0,
        }  # fmt: skip
    return body


class Data:
    """Random operands of a graph, where it wants them, and what it must make of them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        rng = np.random.default_rng(0)
        kw, kh = graph.kernel
        C, N, (out_w, out_h) = graph.C, graph.N, graph.out
        image = rng.integers(-2, 3, (C, graph.H, graph.W)).astype(np.float16)
        self.image = np.ascontiguousarray(image.reshape(C // 8, 8, graph.H, graph.W).transpose(0, 2, 3, 1))
        self.want = np.zeros((N, out_h, out_w))
        if graph.depthwise:
            kernels = rng.integers(-2, 3, (C, kh, kw)).astype(np.float16)
            blocks = [kernels[c : c + 32].transpose(1, 2, 0) for c in range(0, C, 32)]
        else:
            kernels = rng.integers(-2, 3, (N, C, kh, kw)).astype(np.float16)
            blocks = [
                kernels[n : n + 16, c : c + 32].transpose(2, 3, 0, 1) for n in range(0, N, 16) for c in range(0, C, 32)
            ]
        self.kernels = np.concatenate([block.reshape(-1) for block in blocks])
        for y in range(kh):
            for x in range(kw):
                window = image[:, y : y + out_h, x : x + out_w].astype(np.float64)
                if graph.depthwise:
                    self.want += window * kernels[:, y, x, None, None].astype(np.float64)
                else:
                    product = kernels[:, :, y, x].astype(np.float64) @ window.reshape(C, -1)
                    self.want += product.reshape(self.want.shape)

    def lay(self, memory: Array, base: int) -> None:
        places = ((self.graph.first[0x1070], self.image), (self.graph.first[0x1110], self.kernels))
        for where, data in (*places, *self.graph.texts):
            raw = data.view(np.uint8).reshape(-1)
            memory[where - base :][: raw.size] = raw

    def check(self, memory: Array, base: int) -> None:
        (out_w, out_h), pitch, N = self.graph.out, self.graph.first[0x4024], self.graph.N
        surfaces = -(-N // 8)
        raw = memory[self.graph.first[0x4020] - base :][: surfaces * pitch]
        raw = np.ascontiguousarray(raw.reshape(-1, pitch)[:, : out_h * out_w * 16])
        got = raw.view("<f2").reshape(surfaces, out_h, out_w, 8).transpose(0, 3, 1, 2).reshape(-1, out_h, out_w)
        assert np.array_equal(got[:N], self.want.astype(np.float16))


@pytest.mark.parametrize("name", [*LIVE, *DECODED])
def test_sets_for_one_two_and_three_cores(name: str) -> None:
    graph = live(name) if name in LIVE else decoded(name)
    data = Data(graph)
    for cores in graph.sets:
        board = Board("fast")
        memory = board.memory.create(1, MEMORY, UNCACHED, 0)
        data.lay(memory.cpu, memory.iova)
        for number, chain in enumerate(cores):
            core = Core(number, RK3588, board.report, "fast")
            outcome = core.run(board.domain, chain.address, chain.amount, chain.programs)
            assert (outcome.hang, outcome.tasks) == (None, chain.programs)
            assert outcome.int_status & (0xC00 if chain.pooling else 0x300)
        data.check(memory.cpu, memory.iova)
        # fp16 depthwise of several channel blocks is known from these captures alone
        assert set(board.report.counts) <= {"depthwise"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_chains_as_submits_with_core_masks(count: int) -> None:
    """Masks 1, 2 and 4 through the kernel, all at the same time."""
    graph = live(next(name for name in LIVE if "target" in name))
    data, cores = Data(graph), graph.sets[count - 1]
    kernel = EmulatedKernel()
    board = kernels_board.Board(kernel)
    made = board.create(MEMORY, UNCACHED, mapped=True)
    data.lay(made.array, made.iova)
    calls = []
    for number, chain in enumerate(cores):
        tasks = board.tasks(chain.programs, int_mask=0xC00 if chain.pooling else 0x300)
        array = (uabi.Task * chain.programs).from_buffer(tasks.view)
        array[0].regcmd_addr, array[0].regcfg_amount = chain.address, chain.amount
        del array
        board.sync(tasks, uabi.SYNC_TO_DEVICE)
        calls.append(kernels_board.in_thread(lambda t=tasks, n=number, c=chain: board.submit(t, c.programs, n)))
    for thread, result in calls:
        thread.join(60)
        assert isinstance(result[0], uabi.Submit), result
    data.check(made.array, made.iova)
    board.close()
