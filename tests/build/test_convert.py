"""Conversion: what ends up in a pack, the same bytes every time, and within its memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ork
from ork import tiles
from ork.api import LoadedModel
from ork.build.convert import Aids, convert, is_weight
from ork.errors import OrkError, SourceError, UsageError
from ork.native import Array
from ork.pack import writer
from ork.pack.reader import Pack
from ork.pack.verify import verify
from ork.quant import rotation
from ork.quant.codecs import Quantised, dequantise, quantise
from ork.quant.imatrix import Imatrix
from ork.quant.recipe import Choice, Recipe, builtin, usual
from ork.sources.base import open_source
from tests import tiny
from tests.gguf_writer import write_gguf
from tests.models.test_goldens import GOLDENS
from tests.native.oracles import hadamard
from tests.quant import plain

ROOT = Path(__file__).parents[2]


def make(source: Path, target: Path, recipe: Recipe | None = None, **options: object) -> bytes:
    with contextlib.closing(open_source(source)) as s:
        convert(s, target, recipe or builtin("i8"), **options)  # type: ignore[arg-type]
    return target.read_bytes()


def stored(pack: Pack, name: str) -> Quantised:
    """What a pack holds of a weight, padding of N cut off."""
    t = pack.tensor(name)
    parts = []
    for s in t.slices:
        layout = tiles.slice_layout(t.codec, t.K, s.n1 - s.n0, t.group)
        parts.append(tiles.unpack_blob(layout, pack.slice(s.entry)))
    codes, channel, groups = (None if p[0] is None else np.concatenate(p) for p in zip(*parts))
    assert codes is not None
    assert not codes[t.N :].any()
    assert not codes[:, t.K :].any()
    cut = [None if a is None else a[: t.N] for a in (channel, groups)]
    return Quantised(codes[: t.N], cut[0], cut[1])


def unpacked(pack: Pack, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes [N, K] and channel scales [N] of a weight, padding cut off."""
    q = stored(pack, name)
    return q.codes[:, : pack.tensor(name).K], q.channel


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "model.gguf", "gemma3", kind="Q8_0")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH", 16 << 10)


# --- what is in a pack


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1"])
@pytest.mark.parametrize("rotate", [True, False])
def test_i8_codes_are_those_of_a_plain_quantiser(tmp_path: Path, kind: str, rotate: bool) -> None:
    source = tiny.random_gguf(tmp_path / "x.gguf", "qwen2", kind=kind)
    make(source, tmp_path / "x.orkpack", builtin("i8", rotate=rotate))
    with contextlib.closing(open_source(source)) as s, Pack.open(tmp_path / "x.orkpack") as pack:
        weights = [t for t in s.tensors.values() if len(t.shape) == 2]
        assert len(weights) == 15
        for t in weights:
            rows, block = s.rows(t.name, 0, t.rows), rotation.block_of(t.columns)
            assert pack.tensor(t.name).rotation == (block if rotate else 0)
            if rotate:
                signs = pack.raw(f"rotation.signs.{t.columns}")
                assert sorted(set(signs.tolist())) == [-1, 1]
                rows = hadamard(rows, signs.astype(np.float32), block) * (np.float32(1) / np.sqrt(np.float32(block)))
            scales = plain.scales_of("i8", rows, 0)[0]
            got, channel = unpacked(pack, t.name)
            assert np.array_equal(channel, scales)
            assert np.array_equal(got, plain.codes_of("i8", rows, plain.stored_scales(scales, None, t.columns)))
        norms = [t for t in s.tensors.values() if len(t.shape) == 1]
        assert norms
        for t in norms:
            assert np.array_equal(pack.raw(t.name), s.rows(t.name, 0, 1)[0])


def test_an_f32_pack_holds_the_rows_of_the_source(gguf: Path, tmp_path: Path) -> None:
    make(gguf, tmp_path / "x.orkpack", builtin("f32"))
    with contextlib.closing(open_source(gguf)) as s, Pack.open(tmp_path / "x.orkpack") as pack:
        for t in s.tensors.values():
            if len(t.shape) == 2:
                got, scales = unpacked(pack, t.name)
                assert scales is None
                assert np.array_equal(got, s.rows(t.name, 0, t.rows))
        assert not any(name.startswith("rotation") for name in pack.names())


def test_a_codec_per_tensor(tmp_path: Path) -> None:
    """Tensors that read the same rows may be stored in different ways; each is multiplied in its own."""
    rules = (
        (r"blk\.0\.attn_k\.weight", Choice("f32")),
        (r"ffn_up", Choice("i8", rotation="none")),
        (r"^output\.weight", Choice("f32")),
    )
    source = tiny.random_gguf(tmp_path / "x.gguf")
    make(source, tmp_path / "mixed.orkpack", Recipe("mixed", Choice("i8"), rules))
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 60).tolist()
    with ork.load(tmp_path / "mixed.orkpack") as mixed, ork.load(source, codec="f32") as exact:
        assert mixed.pack.tensor("blk.0.attn_k.weight").codec == "f32"
        assert [mixed.pack.tensor(f"blk.0.ffn_{n}.weight").rotation for n in ("up", "gate")] == [0, 64]
        assert Recipe.of(mixed.pack.recipe) == Recipe("mixed", Choice("i8"), rules)
        got, want = mixed.logits(tokens), exact.logits(tokens)
        assert np.abs(got - want).max() < 0.2 * np.abs(want).max()
        assert (got.argmax(axis=1) == want.argmax(axis=1)).mean() > 0.8


@pytest.mark.parametrize("codec", ["i4", "nf4", "i8"])
@pytest.mark.parametrize("mode", ["none", "block", "mix"])
def test_groups_and_rotations_are_those_of_the_recipe(tmp_path: Path, codec: str, mode: str) -> None:
    """64 inputs get the group asked for; 96, of three blocks of 32, the largest that divides them, and are mixed."""
    source = tiny.random_gguf(tmp_path / "x.gguf")
    recipe = Recipe("mine", Choice(codec, 64, mode, "mse"))
    make(source, tmp_path / "x.orkpack", recipe)
    with contextlib.closing(open_source(source)) as s, Pack.open(tmp_path / "x.orkpack") as pack:
        assert Recipe.of(pack.recipe) == recipe
        for t in (t for t in s.tensors.values() if len(t.shape) == 2):
            K, got = t.columns, pack.tensor(t.name)
            group = {64: 64, 96: 32}[K]
            assert (got.codec, got.group, got.act_group) == (codec, group, group)
            assert (got.rotation, got.mix) == {"none": (0, 0), "block": (K & -K, 0), "mix": (K & -K, 3 * (K == 96))}[
                mode
            ]
            rows = rotation.rotate_rows(s.rows(t.name, 0, t.rows), K, mode)
            want, held = quantise(codec, rows, group, search="mse"), stored(pack, t.name)
            assert np.array_equal(held.codes, want.codes)
            assert np.array_equal(held.channel, want.channel)
            assert np.array_equal(held.groups, want.groups)
        mixes = [name for name in pack.names() if name.startswith("rotation.mix")]
        assert mixes == (["rotation.mix.3"] if mode == "mix" else [])
        if mixes:
            q = pack.raw(mixes[0]).astype(np.float64)
            assert np.allclose(q @ q.T, np.eye(3), atol=1e-6)


def test_int8_with_groups_of_activations(tmp_path: Path) -> None:
    source = tiny.random_gguf(tmp_path / "x.gguf")
    make(source, tmp_path / "x.orkpack", builtin("int8", act_group=64))
    with Pack.open(tmp_path / "x.orkpack") as pack:
        down, up = pack.tensor("blk.0.ffn_down.weight"), pack.tensor("blk.0.ffn_up.weight")
        assert (down.K, down.group, down.act_group) == (96, 0, 32)
        assert (up.K, up.group, up.act_group) == (64, 0, 64)


def test_what_no_group_divides_has_one_scale_a_channel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = tiny.random_tensors()
    for i in range(2):
        for name, shape in (("gate", (100, 64)), ("up", (100, 64)), ("down", (64, 100))):
            tensors[f"blk.{i}.ffn_{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(**{"llama.feed_forward_length": 100}), tensors)
    make(source, tmp_path / "x.orkpack", builtin("nf4", group=128))
    verify(tmp_path / "x.orkpack")
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert [pack.tensor(f"blk.0.ffn_{name}.weight").group for name in ("up", "down")] == [64, 0]
        held = stored(pack, "blk.0.ffn_down.weight")
        rows = rotation.rotate_rows(tensors["blk.0.ffn_down.weight"], 100, "mix")
        assert plain.relative_error(rows, dequantise("nf4", held, 100)) < 0.1


# --- importance


def imatrix_of(tensors: dict[str, np.ndarray], **changes: np.ndarray) -> Imatrix:
    """Of every matrix but look-ups and head, as files from hubs are; random mean squares."""
    rng = np.random.default_rng(9)
    weights = {n: t for n, t in tensors.items() if t.ndim == 2 and n not in ("token_embd.weight", "output.weight")}
    sums = {n: (rng.random((1, t.shape[1])) ** 8).astype(np.float32) for n, t in weights.items()} | changes
    return Imatrix(sums, {n: np.array([7], np.float32) for n in sums}, where="x.imatrix")


def test_importance_weighs_the_errors_of_a_search(tmp_path: Path) -> None:
    """Unrotated, each input counts; rotated, each block's mean; tensors that no imatrix lists are searched by mse."""
    tensors = tiny.random_tensors()
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    aids = Aids(imatrix_of(tensors))
    name = "blk.1.ffn_down.weight"
    rows = tensors[name]
    given = aids.importance.sums[name][0] / 7  # type: ignore[union-attr]
    for mode, importance in (("none", given), ("block", np.repeat(given.reshape(3, 32).mean(axis=1), 32))):
        target = tmp_path / f"{mode}.orkpack"
        make(source, target, Recipe("mine", usual("nf4", rotation=mode)).with_importance(), aids=aids)
        rotated = rotation.rotate_rows(rows, 96, mode)
        with Pack.open(target) as pack:
            assert pack.provenance["imatrix"] == aids.importance.digest  # type: ignore[union-attr]
            want = quantise("nf4", rotated, search="importance", importance=importance.astype(np.float32))
            assert np.array_equal(stored(pack, name).codes, want.codes)
            head = rotation.rotate_rows(tensors["output.weight"], 64, mode)
            assert np.array_equal(stored(pack, "output.weight").codes, quantise("nf4", head, search="mse").codes)
        assert not np.array_equal(want.codes, quantise("nf4", rotated, search="mse").codes)


def test_experts_that_an_imatrix_leaves_out_are_searched_by_mse(tmp_path: Path) -> None:
    """As older programs do where a text reached some experts alone; said once. Other tensors must be listed."""
    source = tiny.moe_gguf(tmp_path / "x.gguf")
    with contextlib.closing(open_source(source)) as s:
        weights = {t.name: t.shape for t in s.tensors.values() if is_weight(t) and not t.name.startswith("output")}
    stack = "blk.1.ffn_up_exps.weight"
    rng = np.random.default_rng(1)
    sums = {
        n: (rng.random((shape[0] if len(shape) == 3 else 1, shape[-1])) ** 8).astype(np.float32)
        for n, shape in weights.items()
        if n != stack
    }
    imatrix = Imatrix(sums, {n: np.full(len(a), 7, np.float32) for n, a in sums.items()}, where="x.imatrix")
    recipe, plain = Recipe("mine", usual("i4", rotation="none")), tmp_path / "plain.orkpack"
    make(source, plain, recipe)
    with pytest.warns(
        UserWarning, match=rf"x\.imatrix: lists no {stack}: these experts' scales are searched by mse"
    ) as told:
        make(source, tmp_path / "x.orkpack", recipe.with_importance(), aids=Aids(imatrix))
    assert len(told) == 1
    with Pack.open(tmp_path / "x.orkpack") as a, Pack.open(plain) as b:
        same = {
            n: np.array_equal(stored(a, n).codes, stored(b, n).codes)
            for n in (f"{stack}#3", "blk.1.ffn_gate_exps.weight#3")
        }
    assert list(same.values()) == [True, False]
    sums.pop("blk.1.attn_q.weight")
    with pytest.raises(UsageError, match="it is of another model"):
        make(source, tmp_path / "x.orkpack", recipe.with_importance(), aids=Aids(imatrix))


def test_an_imatrix_of_another_model_is_refused(gguf: Path, tmp_path: Path) -> None:
    tensors = tiny.random_tensors("gemma3")
    recipe, target = builtin("nf4").with_importance(), tmp_path / "x.orkpack"
    shorter = imatrix_of(tensors, **{"blk.1.attn_q.weight": np.ones((1, 32), np.float32)})
    negative = imatrix_of(tensors, **{"blk.1.attn_q.weight": np.full((1, 64), -1, np.float32)})
    deeper = imatrix_of(tensors, **{"blk.2.attn_q.weight": np.ones((1, 64), np.float32)})
    lacking = imatrix_of({n: t for n, t in tensors.items() if n != "blk.1.attn_q.weight"})
    for imatrix, message in (
        (shorter, r"x\.imatrix: tensor blk\.1\.attn_q\.weight has 32 inputs, not 64: it is of another model"),
        (negative, r"x\.imatrix: tensor blk\.1\.attn_q\.weight holds a negative or infinite square"),
        (lacking, r"x\.imatrix: lists no tensor blk\.1\.attn_q\.weight: it is of another model"),
        (deeper, r"x\.imatrix: lists blk\.2\.attn_q\.weight, a layer that is not there: it is of another model"),
        (None, "recipe nf4 weighs errors by importance: use `ork convert --imatrix FILE`"),
    ):
        with pytest.raises(UsageError, match=message):
            make(gguf, target, recipe, aids=Aids(imatrix))
    with pytest.raises(UsageError, match=r"x\.imatrix: of no use to recipe int8, which searches no scales"):
        make(gguf, target, builtin("int8").with_importance(), aids=Aids(imatrix_of(tensors)))
    assert not target.exists()


def test_rotated_and_plain_products_agree(tmp_path: Path) -> None:
    """Rotation leaves a product alone; where rows have outliers it makes int8 better."""
    rng = np.random.default_rng(4)
    tensors = tiny.random_tensors()
    tensors["blk.0.attn_q.weight"][:, 5] *= 20
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    x = rng.standard_normal((50, 64)).astype(np.float32)
    x[:, 9] *= 30
    want = x.astype(np.float64) @ tensors["blk.0.attn_q.weight"].T.astype(np.float64)
    error = {}
    for rotate in (True, False):
        with ork.load(source, rotate=rotate) as model:
            ops = model.model.ends.ops  # type: ignore[attr-defined]
            y = ops.linear(Array.of(x), ops.weight("blk.0.attn_q.weight", 64, 64))[0].numpy()
            error[rotate] = float(np.abs(y - want).max() / np.abs(want).max())
    assert error[True] < 0.02
    assert error[False] < 0.2
    assert error[True] < 0.6 * error[False]


@pytest.mark.parametrize("codec", ["i8", "f32"])
def test_a_hugging_face_folder(tmp_path: Path, codec: str) -> None:
    """The same model as folder and as GGUF gives the same numbers."""
    tokens = list(range(40, 80))
    logits = []
    for name in ("llama3", "llama3-gguf/model.gguf"):
        target = tmp_path / f"{name[:8].strip('/')}.orkpack"
        make(GOLDENS / name, target, builtin(codec))
        verify(target)
        with ork.load(target) as model:
            logits.append(model.logits(tokens))
    assert np.allclose(logits[0], logits[1], rtol=0, atol=1e-4 * np.abs(logits[1]).max())


# --- the same bytes


@pytest.mark.parametrize("codec", ["i8", "f32", "f16", "i4", "nf4"])
def test_same_source_same_bytes(gguf: Path, tmp_path: Path, codec: str) -> None:
    first = make(gguf, tmp_path / "a.orkpack", builtin(codec), workers=1)
    moved = gguf.rename(tmp_path / "moved.gguf")
    os.utime(moved, (1, 1))
    assert make(moved, tmp_path / "b.orkpack", builtin(codec), workers=1) == first
    assert make(moved, tmp_path / "c.orkpack", builtin(codec), workers=4) == first
    assert verify(tmp_path / "c.orkpack")


class Stop(BaseException):
    pass


def stop_after(count: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        nonlocal count
        count -= 1
        if count < 0:
            raise Stop

    return progress


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("workers", [1, 4])
def test_interrupted_and_resumed(gguf: Path, tmp_path: Path, workers: int) -> None:
    whole = make(gguf, tmp_path / "whole.orkpack")
    target = tmp_path / "x.orkpack"
    taken_over = 0
    for count in (0, 1, 5, 3, 12, 2):
        with contextlib.suppress(Stop):
            make(gguf, target, progress=stop_after(count), workers=workers)
        if target.exists():  # what other workers have under way is written too, so that little may have been left
            break
        seen: list[tuple[int, int]] = []
        with pytest.raises(Stop):
            make(gguf, target, progress=lambda d, t: (seen.append((d, t)), stop_after(0)(d, t)))  # noqa: B023
        taken_over = max(taken_over, seen[0][0])
    assert make(gguf, target, workers=workers) == whole
    assert taken_over > 50_000
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "whole.orkpack", "x.orkpack"}


def test_killed_and_resumed(gguf: Path, tmp_path: Path) -> None:
    whole = make(gguf, tmp_path / "whole.orkpack")
    script = """
import os, signal, sys
from ork.build.convert import convert
from ork.pack import writer
from ork.quant.recipe import builtin
from ork.sources.base import open_source
writer.BATCH = 16 << 10
left = 9
def progress(done, total):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
convert(open_source(sys.argv[1]), sys.argv[2], builtin("i8"), progress=progress, workers=2)
"""
    target = tmp_path / "x.orkpack"
    done = subprocess.run([sys.executable, "-c", script, gguf, target], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    assert make(gguf, target) == whole


@pytest.mark.usefixtures("small_batches")
def test_another_model_never_finishes_an_interrupted_one(tmp_path: Path) -> None:
    """Equal headers, other numbers: a fine-tuned model under the name of its origin."""
    source, target = tmp_path / "x.gguf", tmp_path / "x.orkpack"
    tiny.random_gguf(source, seed=1)
    with pytest.raises(Stop):
        make(source, target, progress=stop_after(12))
    tiny.random_gguf(source, seed=2)
    assert make(source, target) == make(source, tmp_path / "fresh.orkpack")


@pytest.mark.usefixtures("small_batches")
def test_recipes_and_imatrices_are_not_mixed_by_resuming(gguf: Path, tmp_path: Path) -> None:
    target, tensors = tmp_path / "x.orkpack", tiny.random_tensors("gemma3")
    one, other = imatrix_of(tensors), imatrix_of(tensors, **{"blk.0.attn_q.weight": np.eye(1, 64, dtype=np.float32)})
    weighed = builtin("nf4", group=32).with_importance()
    ways = [
        (builtin("nf4", group=32), Aids()),
        (Recipe("nf4-g32", Choice("nf4", 32)), Aids()),  # of one name and one layout, but another search
        (weighed, Aids(one)),
        (weighed, Aids(other)),
    ]
    fresh = [make(gguf, tmp_path / f"{i}.orkpack", recipe, aids=aids) for i, (recipe, aids) in enumerate(ways)]
    assert len(set(fresh)) == 4
    for i, (recipe, aids) in enumerate(ways):
        with pytest.raises(Stop):
            make(gguf, target, ways[i - 1][0], aids=ways[i - 1][1], progress=stop_after(12))
        assert make(gguf, target, recipe, aids=aids) == fresh[i]
        target.unlink()


# --- memory


def test_too_little_memory_is_refused_with_what_it_takes(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.orkpack"
    with pytest.raises(UsageError, match=r"--max-ram 1 MiB is too little: this model needs \d+ MiB") as e:
        make(gguf, target, max_ram=1 << 20)
    assert list(tmp_path.iterdir()) == [gguf]
    need = int(str(e.value).split("needs ")[1].split(" MiB")[0])
    make(gguf, target, max_ram=need << 20)


def test_memory_stays_within_what_was_allowed(tmp_path: Path) -> None:
    """97 MB of Q8_0 through 64 MB: the growth of the process's anonymous memory, and of what it maps."""
    rng = np.random.default_rng(0)
    rows, width = 6400, 1024
    blocks = rng.integers(0, 256, (rows * width // 32, 34), np.uint8)
    blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    data = blocks.tobytes()
    few = {"token_embd": (tiny.VOCAB, width), "output": (tiny.VOCAB, width)}
    shapes = {f"{name}.weight": shape for name, shape in few.items()}
    for i in range(5):
        block = {"attn_q": (64, width), "attn_k": (32, width), "attn_v": (32, width), "attn_output": (width, 64)}
        block |= {"ffn_gate": (rows, width), "ffn_up": (rows, width), "ffn_down": (width, rows)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    tensors = {name: ("Q8_0", data[: n * k // 32 * 34], (n, k)) for name, (n, k) in shapes.items()}
    norms = ["output_norm.weight", *(f"blk.{i}.{name}_norm.weight" for i in range(5) for name in ("attn", "ffn"))]
    tensors |= {name: ("F32", np.ones(width, np.float32), (width,)) for name in norms}
    sizes = {"block_count": 5, "embedding_length": width, "feed_forward_length": rows}
    metadata = tiny.metadata(**{f"llama.{key}": value for key, value in sizes.items()})
    source = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    assert source.stat().st_size > 90 << 20
    script = """
import sys, threading
from ork.build.convert import convert
from ork.quant.recipe import builtin
from ork.sources.base import open_source
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
def mapped():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssFile")) * 1024
source = open_source(sys.argv[1])
before, before_mapped, peak, peak_mapped = anonymous(), mapped(), 0, 0
done = threading.Event()
def watch():
    global peak, peak_mapped
    while not done.wait(0.001):
        peak, peak_mapped = max(peak, anonymous()), max(peak_mapped, mapped())
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
convert(source, sys.argv[2], builtin("i8"), max_ram=int(sys.argv[3]), workers=4)
done.set()
watcher.join()
print(peak - before, peak_mapped - before_mapped)
"""
    allowed = 64 << 20
    command = [sys.executable, "-c", script, source, tmp_path / "x.orkpack", str(allowed)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    grown, mapped = map(int, out.stdout.split())
    assert (4 << 20) < grown < allowed
    assert mapped < 48 << 20  # pages of the source are dropped after use


# --- what cannot be converted


@pytest.mark.parametrize("codec", ["i8", "f32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "blk.0.attn_norm.weight", "token_embd.weight"])
def test_numbers_that_are_none_are_named(tmp_path: Path, name: str, bad: float, codec: str) -> None:
    tensors = tiny.random_tensors()
    tensors[name].reshape(-1)[-3] = bad
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    with pytest.raises(SourceError, match=rf"x\.gguf: tensor {name}.*not finite"):
        make(source, tmp_path / "x.orkpack", builtin(codec))
    assert not (tmp_path / "x.orkpack").exists()


@pytest.mark.parametrize("codec", ["nf4", "i4", "f16"])
def test_the_row_of_a_number_that_is_none(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SLICE_BYTES", 1)  # slices of 64 columns
    tensors = tiny.random_tensors()
    tensors["output.weight"][233, 5] = np.nan
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    with pytest.raises(SourceError, match=r"x\.gguf: tensor output\.weight, row 233 holds a value that is not finite"):
        make(source, tmp_path / "x.orkpack", builtin(codec))


def test_four_bits_are_not_made_of_four_bits_unasked(tmp_path: Path) -> None:
    target = tmp_path / "x.orkpack"
    source = tiny.random_gguf(tmp_path / "x.gguf", kind="Q4_0")
    with pytest.raises(UsageError, match=r"have about 4 bits already \(Q4_0\): rounding twice.*--allow-requantize"):
        make(source, target, builtin("nf4"))
    assert not target.exists()
    make(source, target, builtin("nf4"), allow_requantize=True)
    make(source, tmp_path / "int8.orkpack", builtin("int8"))
    spared = Recipe("spared", Choice("nf4"), ((".", Choice("i8")),))
    make(source, tmp_path / "spared.orkpack", spared)
    five = tiny.random_gguf(tmp_path / "y.gguf", kind="Q5_0")
    make(five, tmp_path / "five.orkpack", builtin("nf4"))


def test_unknown_architecture(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata("mamba"), tiny.random_tensors())
    with pytest.raises(SourceError, match="'mamba' is not supported; known are llama, qwen2, qwen3, gemma3"):
        make(source, tmp_path / "x.orkpack")
    assert list(tmp_path.iterdir()) == [source]


def test_stacked_experts_of_a_model_without_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny.random_tensors() | {"blk.0.ffn_up_exps.weight": np.ones((2, 32, 64), np.float32)}
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    with pytest.raises(
        SourceError, match=r"tensor blk\.0\.ffn_up_exps\.weight: 2 experts, and llama\.expert_count is None"
    ):
        make(source, tmp_path / "x.orkpack")


def test_only_packs_are_overwritten(gguf: Path, tmp_path: Path) -> None:
    before = gguf.read_bytes()
    for target in (gguf, tmp_path):
        with pytest.raises(UsageError):
            make(gguf, target)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no pack"):
        make(gguf, tmp_path / "notes.txt")
    assert gguf.read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"
    first = make(gguf, tmp_path / "x.orkpack")
    assert make(gguf, tmp_path / "x.orkpack") == first


def test_unknown_codec() -> None:
    with pytest.raises(UsageError, match="recipe 'i3' is unknown; known are int8, i8, i4, nf4, f16, f32, mixed"):
        builtin("i3")


def test_everything_raised_is_an_error_of_ours(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(OrkError):
        make(gguf, tmp_path / "no" / "folder" / "x.orkpack")
    with ork.load(gguf) as model:
        assert isinstance(model, LoadedModel)
