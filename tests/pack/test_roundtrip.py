"""What goes into a pack comes out of it, through ork's reader and through one written from the page."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native, tiles
from ork.errors import PackDamaged, PackError
from ork.pack import Pack, PackPlan, PackWriter, RawPlan, TensorPlan, inspect, verify
from ork.quant import rotation
from tests.pack import plain_reader
from tests.pack.samples import METADATA, RAWS, TENSORS, blob_of, equal_metadata, parts_of, sample_plan, write_sample

PAGE = Path(__file__).parents[2] / "docs" / "pack-format.md"


def test_everything_comes_back(tmp_path: Path) -> None:
    plan = write_sample(tmp_path / "x.orkpack")
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert equal_metadata(pack.metadata, METADATA)
        assert bytes(pack.tokenizer) == b'{"version": "1.0"}' * 300
        assert pack.chat_template == "{% for m in messages %}ü{% endfor %}"
        assert pack.recipe == {"default": "i8", "rules": [1, 2.5, None]}
        assert pack.provenance == {"source": "0123abcd", "ork": "0.1"}
        assert pack.notes() == {}
        assert sorted(pack.names()) == sorted([t.name for t in TENSORS] + [r.name for r in RAWS])
        for want in TENSORS:
            t = pack.tensor(want.name)
            got = TensorPlan(
                t.name, t.codec, (t.N, t.K), t.rotation, t.group, t.act_group, t.layer, t.expert, mix=t.mix
            )
            assert got == TensorPlan(**{**want.__dict__, "role_order": 0})
            assert (t.Kp, t.Np, t.ks) == (tiles.pad_k(t.K), tiles.pad_n(t.N), tiles.ks_of(tiles.pad_k(t.K), t.group))
            assert t.slices == plan.entries(want.name)
            assert t.first_slice == t.slices[0].entry
            for s in t.slices:
                assert s.offset % 4096 == 0
                assert pack.slice(s.entry).tobytes() == blob_of(plan, s.entry).tobytes()
                assert pack.address(s.entry) == pack.slice(s.entry).ctypes.data
        for raw in RAWS:
            array = pack.raw(raw.name)
            assert array.tobytes() == blob_of(plan, plan.entries(raw.name)[0].entry).tobytes()
            assert not array.flags.writeable
        pack.verify()


def test_raw_types_and_wrong_questions(tmp_path: Path) -> None:
    write_sample(tmp_path / "x.orkpack")
    pack = Pack.open(tmp_path / "x.orkpack")
    assert [pack.raw_type(n) for n in pack.raw_names()] == [
        ("u16", (2, 3, 5), 60),
        ("f32", (96,), 384),
        ("f32", (3, 3), 36),
        ("i8", (96,), 96),
        ("f64", (), 8),
    ]
    assert (pack.raw("cube").shape, pack.raw("cube").dtype) == ((2, 3, 5), np.uint16)
    assert (pack.raw("scalar").shape, pack.raw("scalar").dtype) == ((), np.float64)
    assert "cube" in pack
    assert "sphere" not in pack
    for ask in (pack.tensor, pack.raw):
        with pytest.raises(PackError, match="no tensor sphere"):
            ask("sphere")
    with pytest.raises(PackError, match="other kind"):
        pack.tensor("cube")
    with pytest.raises(PackError, match="other kind"):
        pack.raw("blk.1.gate.0")


def test_slices_lie_in_canonical_order(tmp_path: Path) -> None:
    write_sample(tmp_path / "x.orkpack")
    assert Pack.open(tmp_path / "x.orkpack").names() == [
        "token_embd.weight",
        "blk.0.attn_q.weight",
        "blk.0.ffn_up.weight",
        "blk.1.attn_k.weight",
        "blk.1.gate.weight",
        *(f"blk.1.{role}.{e}" for e in (0, 1) for role in ("gate", "up", "down")),
        "cube",
        "output_norm.weight",
        "rotation.mix.3",
        "rotation.signs.96",
        "scalar",
    ]


@pytest.mark.parametrize("mode", ["block", "mix"])
def test_rotated_rows_are_turned_back_as_the_page_says(tmp_path: Path, mode: str) -> None:
    N, K = 70, 96
    rows = np.random.default_rng(5).standard_normal((N, K)).astype(np.float32)
    block, mix = rotation.fields_of(K, mode)
    held = native.Array.of(rotation.rotate_rows(rows, K, mode))
    q = native.quantise(held, None, 0)
    derived = ["rotation.signs.96", "rotation.mix.3"]
    raws = [RawPlan(n, t, s) for n, t, s in zip(derived, ("i8", "f32"), ((96,), (3, 3)))]
    plan = PackPlan([TensorPlan("w", "i8", (N, K), rotation=block, mix=mix)], raws)
    with PackWriter.open(tmp_path / "x.orkpack", plan) as writer:
        for entry in writer.missing():
            item, _, _ = plan.item(entry)
            if isinstance(item, RawPlan):
                writer.write(entry, np.ascontiguousarray(rotation.derived(item.name)).view(np.uint8).ravel())
                continue
            codes, scales = np.zeros((128, K), np.int8), np.zeros(128, np.float32)
            codes[:N], scales[:N] = q.codes(), q.scales()
            writer.write(entry, tiles.build_blob(plan.layout(entry), codes, scales))
        writer.finish()
    data = (tmp_path / "x.orkpack").read_bytes()
    assert np.abs(plain_reader.turned_back(data, "w") - rows).max() < 0.6 * q.scales().max() * np.sqrt(K)
    assert np.square(plain_reader.turned_back(data, "w") - rows).mean() < 1e-4


def test_same_source_same_bytes_whatever_the_order(tmp_path: Path) -> None:
    for i, order in enumerate((None, 1, 2)):
        plan = sample_plan(tensors=TENSORS[::-1] if i else TENSORS, raws=RAWS[::-1] if i else RAWS)
        write_sample(tmp_path / str(i), plan, order=order)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    write_sample(tmp_path / "other", seed=1)
    assert verify(tmp_path / "0") != verify(tmp_path / "other")


def expected(plan: PackPlan, name: str) -> np.ndarray:
    """The f32 weights [N, K] that the parts were made of."""
    columns = []
    for s in plan.entries(name):
        item, _, _ = plan.item(s.entry)
        assert isinstance(item, TensorPlan)
        codes, *scales = parts_of(plan, s.entry)
        value = plain_reader.NF4[codes] if item.codec == "nf4" else codes
        scale = np.ones((len(codes), 1), np.float32)
        if len(scales) == 2:
            scale = np.repeat(scales[1].astype(np.float32) * scales[0][:, None], item.group, 1)
        elif scales:
            scale = scales[0][:, None]
        columns.append(value.astype(np.float32) * scale)
    N, K = plan.item(plan.entries(name)[0].entry)[0].shape
    return np.concatenate(columns)[:N, :K]


@settings(max_examples=25)
@given(st.data())
def test_a_reader_written_from_the_page_gets_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors = []
    for i in range(data.draw(st.integers(0, 4))):
        codec = data.draw(st.sampled_from(sorted(tiles.CODECS)))
        K = data.draw(st.sampled_from([1, 32, 40, 128, 576, 4096, 4128, 4480]))
        group = data.draw(st.sampled_from([0, 32, 64])) if tiles.CODECS[codec].scaled else 0
        group = group if group and tiles.pad_k(K) % group == 0 else 0
        N = data.draw(st.sampled_from([1, 63, 64, 200, 1200]))
        layer = data.draw(st.integers(-1, 3))
        rotation = K & -K & 4095 if tiles.CODECS[codec].scaled else 0
        tensors.append(TensorPlan(f"t{i}", codec, (N, K), rotation, group, group, layer))
    shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
    raws = [
        RawPlan(f"r{i}", data.draw(st.sampled_from(["u8", "f32", "i64", "f16"])), data.draw(shapes)) for i in range(2)
    ]
    plan = PackPlan(tensors, raws)
    path = tmp_path_factory.mktemp("p") / "x.orkpack"
    write_sample(path, plan)
    got = plain_reader.read(path.read_bytes())
    pack = Pack.open(path)
    assert list(got) == pack.names()
    for t in tensors:
        np.testing.assert_array_equal(got[t.name], expected(plan, t.name))
    for r in raws:
        np.testing.assert_array_equal(got[r.name], pack.raw(r.name))
        assert got[r.name].shape == r.shape
    pack.verify()


def test_the_pages_example_is_the_file_to_the_byte(tmp_path: Path) -> None:
    plan = PackPlan(
        [TensorPlan("w", "i8", (1, 3))],
        [RawPlan("norm", "f32", (2,))],
        metadata={"general.architecture": "example"},
    )
    codes, channel = np.zeros((64, 32), np.int8), np.zeros(64, np.float32)
    codes[0, :3] = 1, 2, 3
    channel[0] = 0.5
    path = tmp_path / "example.orkpack"
    with PackWriter.open(path, plan) as w:
        w.write(0, tiles.build_blob(plan.layout(0), codes, channel))
        w.write(1, np.array([1, -1], np.float32))
        w.finish()
    shown = bytearray(2_138_112)
    lines = re.findall(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} ){15}[0-9a-f]{2})", PAGE.read_text(), re.M)
    assert len(lines) > 30
    for at, octets in lines:
        shown[int(at, 16) : int(at, 16) + 16] = bytes.fromhex(octets)
    assert path.read_bytes() == shown


def test_inspect_says_what_the_pack_holds(tmp_path: Path) -> None:
    import json

    plan = write_sample(tmp_path / "x.orkpack")
    report = inspect(tmp_path / "x.orkpack")
    assert json.loads(json.dumps(report)) == report
    assert report["architecture"] == "llama"
    assert report["bytes"] == os.path.getsize(tmp_path / "x.orkpack")
    assert report["digest"] == verify(tmp_path / "x.orkpack")
    assert report["weights"] == sum(t.shape[0] * t.shape[1] for t in TENSORS)
    assert report["weight_bytes"] == sum(plan.nbytes(e) for e in range(plan.slices))
    assert {c: v["tensors"] for c, v in report["codecs"].items()} == {"i8": 7, "i4": 1, "nf4": 1, "f16": 1, "f32": 1}
    assert report["metadata"]["tokens"] == {"array": "str", "length": 5}
    assert report["metadata"]["llama.block_count"] == 2
    assert len(report["raw"]) == len(RAWS)
    wide = PackPlan([TensorPlan("w", "i4", (4096, 4096))])
    write_sample(tmp_path / "wide", wide)
    assert 4 < inspect(tmp_path / "wide")["bits_per_weight"] < 4.02


def test_a_pack_replaced_on_disk_does_not_disturb_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.orkpack"
    plan = write_sample(path)
    pack = Pack.open(path)
    write_sample(path, seed=5)
    for entry in range(len(plan)):
        assert pack.slice(entry).tobytes() == blob_of(plan, entry, 0).tobytes()
    pack.verify()
    assert Pack.open(path).slice(0).tobytes() == blob_of(plan, 0, 5).tobytes()


def test_views_outlive_the_pack_and_nothing_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "x.orkpack"
    plan = write_sample(path)
    with Pack.open(path) as pack:
        view = pack.slice(0)
    del pack
    assert view.tobytes() == blob_of(plan, 0).tobytes()
    assert str(path) in Path("/proc/self/maps").read_text()
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_slice_is_hashed_once_before_its_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ork.pack import reader

    path = tmp_path / "x.orkpack"
    write_sample(path)
    pack = Pack.open(path)
    hashed: list[int] = []
    original = reader.hash_of
    monkeypatch.setattr(reader, "hash_of", lambda data: (hashed.append(data.nbytes), original(data))[1])
    assert pack.slice(1).nbytes == hashed[0]
    pack.slice(1)
    assert len(hashed) == 1
    with open(path, "r+b") as f:  # the mapping shows it: only the first use looks
        f.seek(pack.tensor("blk.1.gate.weight").slices[0].offset)
        f.write(b"\1")
    with pytest.raises(PackDamaged, match=r"blk\.1\.gate\.weight"):
        pack.slice(pack.tensor("blk.1.gate.weight").first_slice)


def test_many_tensors_open_without_an_object_each(tmp_path: Path) -> None:
    """Opening 20,000 tensors costs less than naming them, and allocates nothing per tensor."""
    import gc
    import time

    path = tmp_path / "x.orkpack"
    tensors = [TensorPlan(f"blk.0.e.{i}", "i8", (1, 1), layer=0, expert=i) for i in range(20_000)]
    plan = PackPlan(tensors)
    blob = bytes(plan.nbytes(0))
    with PackWriter.open(path, plan) as w:
        for entry in w.missing():
            w.write(entry, blob)
        w.finish()
    Pack.open(path).close()
    gc.collect()
    before = len(gc.get_objects())
    start = time.perf_counter()
    pack = Pack.open(path)
    opened = time.perf_counter()
    after = len(gc.get_objects())
    described = [pack.tensor(name) for name in pack.names()]
    ended = time.perf_counter()
    assert after - before < 200
    assert len(described) == 20_000
    assert opened - start < (ended - opened) / 2


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (TensorPlan("w", "i5", (64, 64)), "codec i5"),
        (TensorPlan("w", "i8", (0, 64)), "shape"),
        (TensorPlan("w", "i8", (64, 2**32)), "shape"),
        (TensorPlan("w", "i8", (64, 96), group=64, act_group=64), "group 64"),
        (TensorPlan("w", "i8", (64, 96), group=32), "act_group"),
        (TensorPlan("w", "i4", (64, 96), act_group=32), "act_group"),
        (TensorPlan("w", "f16", (64, 96), group=32, act_group=32), "no group scales"),
        (TensorPlan("w", "i8", (64, 96), rotation=64), "rotation 64"),
        (TensorPlan("w", "i8", (64, 96), rotation=3), "rotation 3"),
        (TensorPlan("w", "f16", (64, 96), rotation=32), "never rotated"),
        (TensorPlan("w", "i8", (64, 96), rotation=32, mix=2), "mix 2"),
        (TensorPlan("w", "i8", (64, 96), mix=3), "mix 3"),
        (TensorPlan("w", "i8", (64, 1026), rotation=2, mix=513), "mix 513"),
        (TensorPlan("w", "i8", (64, 96), layer=-2), "layer"),
        (TensorPlan("", "i8", (64, 96)), "name"),
        (TensorPlan("n" * 2000, "i8", (64, 96)), "name"),
    ],
)
def test_a_plan_that_the_format_cannot_hold_is_refused(tensor: TensorPlan, why: str) -> None:
    with pytest.raises(PackError, match=why):
        PackPlan([tensor])


def test_other_plans_that_are_refused() -> None:
    w = TensorPlan("w", "i8", (64, 64))
    with pytest.raises(PackError, match="w: planned twice"):
        PackPlan([w, w])
    with pytest.raises(PackError, match="w: planned twice"):
        PackPlan([w], [RawPlan("w", "f32", (1,))])
    with pytest.raises(PackError, match="r: type f8"):
        PackPlan([], [RawPlan("r", "f8", (1,))])
    for shape in ((1, 1, 1, 1, 1), (0,), (-1,)):
        with pytest.raises(PackError, match="r: shape"):
            PackPlan([], [RawPlan("r", "f32", shape)])
    with pytest.raises(PackError, match="metadata k: a object"):
        PackPlan([w], metadata={"k": object()})
    with pytest.raises(PackError, match="metadata k: a ndarray"):
        PackPlan([w], metadata={"k": np.zeros((2, 2))})
    with pytest.raises(PackError, match="not a JSON object"):
        PackPlan([w], recipe={"k": float("nan")})
