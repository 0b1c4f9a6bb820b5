"""Text across the wall: a mixture whose experts are larger than a domain's 4 GiB, in a pack that is mostly holes.

Of 512 experts a layer 24 have weights, those that the router prefers; the others are zero pages, which take no disk
and no time to make. To the program they are experts as any: in the index, hashed, placed, brought in.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ork.api import LoadedModel
from ork.build.convert import make_blob, plan_pack
from ork.cli.main import main
from ork.devices.npu import NpuDevice
from ork.emulator.kernel import EmulatedKernel
from ork.npu.driver import Npu
from ork.pack import writer
from ork.pack.plan import TensorPlan
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.sources.base import F32, TensorInfo
from tests import tiny
from tests.cli.conftest import one_line
from tests.text.vocabs import as_metadata

pytestmark = pytest.mark.slow

ARCH, LAYERS, WIDTH, INNER, EXPERTS, USED = "qwen3moe", 2, 2048, 768, 512, 4
HEADS, HEAD = 8, 64
# Whose weights are not zero: the first and the last of all among them.
REAL = sorted({0, EXPERTS - 1, *range(5, EXPERTS, 23)})
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]  # tokens that the head can say
PROMPT = "the wizard in the"
TOKENS = 16
PASSES = 1 + (TOKENS - 1) + 1  # prompt, tokens, logits
GIB = 1 << 30


class Sparse:
    """A model to convert from whose weights are made when they are asked for."""

    def __init__(self, path: Path):
        self.path = path
        sizes = {
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "expert_feed_forward_length": INNER,
            "expert_count": EXPERTS,
            "expert_used_count": USED,
            "attention.head_count": HEADS,
            "attention.head_count_kv": HEADS // 2,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
        }
        self.metadata = as_metadata(tiny.metadata(ARCH, **{f"{ARCH}.{key}": size for key, size in sizes.items()}))
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (tiny.VOCAB, WIDTH),
            "output.weight": (tiny.VOCAB, WIDTH),
            "output_norm.weight": (WIDTH,),
        }
        for i in range(LAYERS):
            block = {
                "attn_norm.weight": (WIDTH,),
                "attn_q.weight": (HEADS * HEAD, WIDTH),
                "attn_k.weight": (HEADS * HEAD // 2, WIDTH),
                "attn_v.weight": (HEADS * HEAD // 2, WIDTH),
                "attn_q_norm.weight": (HEAD,),
                "attn_k_norm.weight": (HEAD,),
                "attn_output.weight": (WIDTH, HEADS * HEAD),
                "ffn_norm.weight": (WIDTH,),
                "ffn_gate_inp.weight": (EXPERTS, WIDTH),
                "ffn_gate_exps.weight": (EXPERTS, INNER, WIDTH),
                "ffn_up_exps.weight": (EXPERTS, INNER, WIDTH),
                "ffn_down_exps.weight": (EXPERTS, WIDTH, INNER),
            }
            shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        self.tensors = {name: TensorInfo(name, s, "F32", 4 * int(np.prod(s))) for name, s in shapes.items()}

    def rows(self, name: str, start: int, stop: int, out: F32 | None = None) -> F32:
        """Any seeded numbers of the size that matrices have; zero experts, and zero logits for them."""
        t = self.tensors[name]
        if len(t.shape) == 1:
            return np.ones((1, t.columns), np.float32)
        seed = [list(self.tensors).index(name)]
        if len(t.shape) == 3:
            expert, start = divmod(start, t.shape[1])
            stop -= expert * t.shape[1]
            if expert not in REAL:
                return np.zeros((stop - start, t.columns), np.float32)
            seed.append(expert)
        whole: F32 = np.random.default_rng(seed).standard_normal(t.shape[-2:], np.float32) * (1.5 / t.columns**0.5)
        if name.endswith("ffn_gate_inp.weight"):
            whole[[e for e in range(EXPERTS) if e not in REAL]] = 0
        if name == "output.weight":
            whole[[t for t in range(tiny.VOCAB) if tiny.TOKENS[t] not in LETTERS]] = 0
        return whole[start:stop]

    def raw(self, name: str) -> memoryview:
        return memoryview(name.encode())

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Nothing is mapped."""

    def digest(self) -> str:
        return "0" * 32

    def close(self) -> None:
        """Nothing is open."""


def sparse_writing(patch: pytest.MonkeyPatch) -> None:
    """A file system that reserves no space, and zeros that need not be written to be read."""
    write_all = writer.write_all

    def unreserved(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def write_some(fd: int, data: bytes | memoryview, offset: int) -> None:
        if np.frombuffer(data, np.uint8).any():
            write_all(fd, data, offset)

    patch.setattr(os, "posix_fallocate", unreserved)
    patch.setattr(writer, "write_all", write_some)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("wall") / "wall.orkpack"
    source = Sparse(path)
    plan = plan_pack(source, builtin("int8"))
    zeros: dict[int, npt.NDArray[np.uint8]] = {}
    with pytest.MonkeyPatch.context() as patch:
        sparse_writing(patch)
        with writer.PackWriter.open(path, plan) as out:
            for entry in out.missing():
                item, _, _ = plan.item(entry)
                nbytes = plan.nbytes(entry)
                if not isinstance(item, TensorPlan) or item.expert in (-1, *REAL):
                    out.write(entry, make_blob(plan, source, entry))
                    continue
                if nbytes not in zeros:
                    zeros[nbytes] = make_blob(plan, source, entry)
                    assert not zeros[nbytes].any()
                out.write(entry, zeros[nbytes])
            out.finish()
    yield path
    path.unlink()


Said = tuple[str, npt.NDArray[np.uint32]]


def say(path: Path, device: str, **options: Any) -> tuple[Said, LoadedModel]:
    """The text after PROMPT and the bits of the logits over both; and the model, closed, for its figures."""
    board = EmulatedKernel(views="sampled") if device == "emu" else None
    model = LoadedModel(Pack.open(path), device=device, board=board, threads=2, context=256, kv=None, **options)
    chosen: dict[int, set[int]] = {i: set() for i in range(LAYERS)}
    model.ops.router = lambda layer, routes: chosen[layer].update(routes.active())
    with model:
        text = "".join(model.generate(PROMPT, max_tokens=TOKENS))
        logits = model.logits(model.tokenizer.encode(PROMPT + text))
    assert all(chosen[i] <= set(REAL) for i in range(LAYERS))
    assert EXPERTS - 1 in chosen[LAYERS - 1]  # what lies last in the file
    assert len(text) == TOKENS
    if board is not None:
        assert (board.stats.live_buffers, board.report.violations) == (0, [])
    return (text, logits.view(np.uint32)), model


@pytest.fixture(scope="module")
def said(pack: Path) -> Said:
    """On the CPU, which has no domains."""
    return say(pack, "cpu")[0]


def same(a: Said, b: Said) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1])


def test_there_are_experts_past_the_wall(pack: Path) -> None:
    """More bytes than a domain's addresses, few of them on the disk."""
    with Pack.open(pack) as opened:
        experts = [s for n in opened.names() if "_exps.weight#" in n for s in opened.tensor(n).slices]
    assert len(experts) == LAYERS * EXPERTS * 3
    assert sum(s.nbytes for s in experts) > 1 << 32
    assert pack.stat().st_blocks * 512 < GIB // 2


def test_forced_into_one_domain_they_are_refused(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the planner; and where that and the driver believe in more room, by the chip's kernel: its error, one line."""

    def refusal() -> str:
        capsys.readouterr()
        flags = ["--device", "emu", "--domains", "1", "--preload", "-n", "1"]
        return one_line(main(["run", str(pack), "-p", PROMPT, *flags]), *capsys.readouterr())

    assert re.match(r"4\.\d\d GiB of slices do not fit 1 domains of 3\.\d\d GiB each: give --window SIZE", refusal())
    monkeypatch.setattr(Npu, "open", staticmethod(partial(Npu.open, iova_ceiling=8 * GIB)))
    line = refusal()
    used = re.search(r"in domain 0, where (\d+) are in use: the address space of the domain is full \(errno 14\)", line)
    assert used is not None, line
    assert 3.9 * GIB < int(used[1]) < 4.1 * GIB


def test_spread_over_two_domains_they_speak(pack: Path, said: Said) -> None:
    got, model = say(pack, "emu", domains=2)
    assert same(got, said)
    assert model.ready is not None
    assert list(model.ready.domains) == [0, 1]
    assert min(model.ready.domains.values()) > 2 * GIB
    assert model.stream.stats.lazy == 0
    computed_by_the_npu(model)


@pytest.mark.parametrize(("window", "again"), [(GIB, False), (96 << 20, True)])
def test_through_a_window_they_speak(pack: Path, said: Said, window: int, again: bool) -> None:
    """A quarter of the experts; less than those that the text takes, so that some are brought in again."""
    got, model = say(pack, "emu", window=window)
    assert same(got, said)
    stats = model.stream.stats
    assert stats.peak_bytes <= window
    assert list(stats.domains) == [0]
    assert (stats.experts.loads.total() > LAYERS * len(REAL)) == again
    computed_by_the_npu(model)


def computed_by_the_npu(model: LoadedModel) -> None:
    """All but the routers, which are f32: one a layer and pass."""
    device = model.device
    assert isinstance(device, NpuDevice)
    assert device.failed_ops == 0
    assert device.cpu_ops == LAYERS * PASSES
    assert device.npu_ops > 4 * device.cpu_ops
