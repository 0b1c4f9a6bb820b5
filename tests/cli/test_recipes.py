"""`ork convert` with recipes: what ends up in a pack, and one line for what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ork.pack.reader import Pack
from ork.quant.imatrix import Imatrix
from tests import tiny
from tests.gguf_writer import write_gguf

Ork = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.random_gguf(tmp_path / "x.gguf")


@pytest.fixture
def codecs(ork: Ork, gguf: Path) -> Callable[..., dict[str, tuple[str, int]]]:
    """Converts with options; (codec, group) of each weight, and what is said of the recipe under "recipe"."""

    def run(*options: object) -> dict[str, tuple[str, int]]:
        code, out, err = ork("convert", gguf, *options)
        assert (code, out) == (0, ""), err
        with Pack.open(gguf.with_suffix(".orkpack")) as pack:
            names = (name for name in pack.names() if name.endswith(".weight") and "norm" not in name)
            tensors = {name.removesuffix(".weight"): pack.tensor(name) for name in names}
            assert err.rstrip().endswith(f"recipe {pack.recipe['name']}")
        return {name: (t.codec, t.group) for name, t in tensors.items()}

    return run


def test_a_recipe_by_name(codecs: Callable[..., dict[str, tuple[str, int]]]) -> None:
    assert set(codecs().values()) == {("i8", 0)}
    assert set(codecs("--codec", "f16").values()) == {("f16", 0)}
    assert set(codecs("--recipe", "nf4", "--group", 64).values()) == {("nf4", 64), ("nf4", 32)}


def test_changes_on_the_command_line(codecs: Callable[..., dict[str, tuple[str, int]]], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[default]\ncodec = "nf4"\n[[rule]]\nmatch = "ffn"\ncodec = "i4"\n')
    options = ("--recipe", tmp_path / "mine.toml", "--tensor-type", "ffn_up=f32", "--tensor-type", r"blk\.1\.=i8")
    got = codecs(*options, "--rotation", "mix")
    wanted = {
        "output": "nf4",
        "blk.0.ffn_up": "f32",
        "blk.1.ffn_up": "f32",
        "blk.0.ffn_down": "i4",
        "blk.1.ffn_down": "i8",
    }
    assert {name: got[name][0] for name in wanted} == wanted
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert [pack.tensor(f"blk.{i}.ffn_down.weight").mix for i in range(2)] == [3, 3]
        assert pack.tensor("blk.0.ffn_up.weight").rotation == 0
    codecs("--recipe", "i4", "--no-rotate")
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert pack.tensor("blk.0.ffn_down.weight").rotation == 0


def test_the_allocation_of_a_reference(codecs: Callable[..., dict[str, tuple[str, int]]], tmp_path: Path) -> None:
    """Five bits or more become int8, less nf4, whatever the recipe's own rules leave."""
    tensors = tiny.random_tensors(seed=5)
    kinds = {"blk.0.ffn_up": "Q4_0", "blk.0.ffn_gate": "Q4_1", "blk.1.ffn_up": "Q8_0"}
    typed = {n: (kinds.get(n.removesuffix(".weight"), "F32"), t, t.shape) for n, t in tensors.items()}
    del typed["blk.1.attn_q.weight"]
    write_gguf(tmp_path / "ref.gguf", tiny.metadata(), typed)
    got = codecs("--tiers-from", tmp_path / "ref.gguf")
    assert {name for name, choice in got.items() if choice == ("nf4", 64)} == {"blk.0.ffn_up"}
    assert {name for name, choice in got.items() if choice == ("i8", 0)} == set(got) - {"blk.0.ffn_up"}
    got = codecs("--tiers-from", tmp_path / "ref.gguf", "--recipe", "i4", "--tensor-type", "output=i4:32")
    assert (got["blk.0.ffn_up"], got["output"], got["blk.1.ffn_up"]) == (("i4", 0), ("i4", 32), ("i8", 0))


def test_importance(codecs: Callable[..., dict[str, tuple[str, int]]], tmp_path: Path) -> None:
    weights = {n: t for n, t in tiny.random_tensors().items() if t.ndim == 2 and n.startswith("blk")}
    sums = {n: np.square(np.arange(t.shape[1], dtype=np.float32)).reshape(1, -1) for n, t in weights.items()}
    Imatrix(sums, {n: np.ones(1, np.float32) for n in sums}).write(tmp_path / "x.imatrix.gguf")
    codecs("--recipe", "nf4", "--rotation", "none")
    plain = (tmp_path / "x.orkpack").read_bytes()
    codecs("--recipe", "nf4", "--rotation", "none", "--imatrix", tmp_path / "x.imatrix.gguf")
    assert len((tmp_path / "x.orkpack").read_bytes()) == len(plain)
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert pack.recipe["default"]["search"] == "importance"
        assert len(pack.provenance["imatrix"]) == 32


def test_tensors_of_one_input_share_its_rotation(
    codecs: Callable[..., dict[str, tuple[str, int]]], tmp_path: Path
) -> None:
    """Other rules than the default's would have the rows rotated and quantised once more."""
    (tmp_path / "mine.toml").write_text('[default]\ncodec = "nf4"\n[[rule]]\nmatch = "ffn_down"\ncodec = "i8"\n')
    for options in (
        ("--recipe", "nf4", "--tensor-type", "ffn_down=i8"),
        ("--recipe", tmp_path / "mine.toml"),
        ("--recipe", "int8", "--rotation", "mix", "--tensor-type", "ffn_down=nf4"),
    ):
        codecs(*options)
        with Pack.open(tmp_path / "x.orkpack") as pack:
            assert {pack.tensor(f"blk.{i}.ffn_down.weight").mix for i in range(2)} == {3}
    codecs("--recipe", "int8", "--tensor-type", "ffn_down=nf4")
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert pack.tensor("blk.0.ffn_down.weight").mix == 0


def test_a_file_may_name_what_a_model_lacks_and_that_is_said(ork: Ork, gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[default]\ncodec = "i8"\n[[rule]]\nmatch = "ssm_out"\ncodec = "nf4"\n')
    code, _, err = ork("convert", gguf, "--recipe", tmp_path / "mine.toml")
    assert code == 0
    assert "warning: recipe mine: match 'ssm_out' names no matrix of " in err


def test_a_long_name_is_cut_for_what_is_added(
    codecs: Callable[..., dict[str, tuple[str, int]]], tmp_path: Path
) -> None:
    path = tmp_path / f"{'a' * 80}.toml"
    path.write_text('[default]\ncodec = "i8"\n')
    codecs("--recipe", path, "--tensor-type", "ffn=nf4", "--no-rotate")
    with Pack.open(tmp_path / "x.orkpack") as pack:
        assert pack.recipe["name"].endswith("a+1-norotate"[-9:])
        assert len(pack.recipe["name"]) == 64


def test_a_source_that_cannot_be_converted_leaves_nothing(refused: Refused, tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_up.weight"][5, 7] = np.nan
    source = tiny.write(tmp_path / "nan.gguf", tiny.metadata(), tensors)
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    for options in (
        ("--recipe", "int8"),
        ("--recipe", "nf4", "--group", "32"),
        ("--recipe", "f16"),
        ("--recipe", "mixed", "--calibrate", tmp_path / "text.txt"),
    ):
        assert "tensor blk.1.ffn_up.weight" in refused("convert", source, *options)
        assert not list(tmp_path.glob("*.orkpack*"))


# --- a model that is converted on the way


@pytest.fixture
def first_run(ork: Ork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, object]]:
    """Runs a command that converts; the recipe of the pack in the cache."""
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "home"))

    def run(*args: object) -> dict[str, object]:
        code, _, err = ork(*args)
        assert code == 0, err
        (path,) = (tmp_path / "home" / "packs").glob("*.orkpack")
        with Pack.open(path) as pack:
            recipe = dict(pack.recipe)
        path.unlink()
        return recipe

    return run


def test_first_runs_take_recipes_too(first_run: Callable[..., dict[str, object]], gguf: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 40)
    mine = tmp_path / "mine.toml"
    mine.write_text('[default]\ncodec = "nf4"\ngroup = 32\n[[rule]]\nmatch = "ffn"\ncodec = "i4"\n')
    for command in (
        ("run", gguf, "-p", "a", "-n", "2"),
        ("bench", gguf, "-p", "4", "-n", "2", "-r", "1"),
        ("ppl", gguf, "-f", text, "-c", "64"),
        ("qerr", gguf, "--against", gguf),
    ):
        assert first_run(*command)["name"] == "int8"
        assert first_run(*command, "--recipe", "nf4", "--no-rotate")["name"] == "nf4-norotate"
        assert first_run(*command, "--codec", "f16")["name"] == "f16"
        recipe = first_run(*command, "--recipe", mine)
        assert (recipe["name"], len(recipe["rule"])) == ("mine", 1)  # type: ignore[arg-type]


def test_recipes_that_a_first_run_cannot_follow(
    refused: Refused, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORK_HOME", str(tmp_path / "home"))
    (tmp_path / "gptq.toml").write_text('[default]\ncodec = "nf4"\ngptq = true\n')
    (tmp_path / "importance.toml").write_text('[default]\ncodec = "nf4"\nsearch = "importance"\n')
    for command in (("run", gguf, "-p", "a"), ("bench", gguf), ("ppl", gguf, "-f", gguf.parent / "text.txt")):
        (tmp_path / "text.txt").write_text("abcdefgh" * 99)
        assert "make a pack with `ork convert --recipe mixed`" in refused(*command, "--recipe", "mixed")
        assert "make a pack with `ork convert --recipe small`" in refused(*command, "--codec", "small")
        assert "recipe 'q4' is unknown" in refused(*command, "--recipe", "q4")
        assert "nothing.toml: No such file" in refused(*command, "--recipe", "./nothing.toml")
        assert "`ork convert --calibrate FILE`" in refused(*command, "--recipe", tmp_path / "gptq.toml")
        assert "`ork convert --imatrix FILE`" in refused(*command, "--recipe", tmp_path / "importance.toml")
        assert not list(tmp_path.glob("home/packs/*"))
    coarse = tiny.random_gguf(tmp_path / "q.gguf", kind="Q4_0")
    assert "4 bits already" in refused("run", coarse, "-p", "a", "--recipe", "nf4")


def test_a_pack_keeps_its_recipe(ork: Ork, refused: Refused, gguf: Path) -> None:
    assert ork("convert", gguf)[0] == 0
    pack = gguf.with_suffix(".orkpack")
    for option in (("--recipe", "nf4"), ("--codec", "f32"), ("--no-rotate",)):
        assert f"{option[0]} is for a model that is converted on the way" in refused("run", pack, "-p", "a", *option)


# --- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "q4_0"), "recipe 'q4_0' is unknown; known are int8"),
        (("--codec", "i3"), "recipe 'i3' is unknown; known are int8"),
        (("--recipe", "./mine.toml"), "mine.toml: No such file"),
        (("--codec", "i4", "--recipe", "i4"), "not allowed with"),
        (("--recipe", "i4", "--group", "48"), "group 48 is unknown; known are 0, 32, 64, 128"),
        (("--recipe", "i4", "--group", "many"), "--group"),
        (("--recipe", "i4", "--act-group", "32"), "act_group is for codec i8 without group"),
        (("--tensor-type", "ffn"), "--tensor-type 'ffn': write it like"),
        (("--tensor-type", "(=i8"), "is not a regular expression"),
        (("--rotation", "full"), "--rotation"),
        (("--rotation", "block", "--no-rotate"), "not allowed with"),
        (("--rotation", "mix", "--codec", "f16"), "--rotation mix: recipe f16 has no codec that is rotated"),
        (("--tensor-type", "atn_q=f16"), "'atn_q' names no matrix of "),
        (("--tensor-type", "_norm=f16"), "'_norm' names no matrix of "),
        (("--tensor-type", "ffn=nf4:" + "9" * 5000), "write it like"),
        (("--tiers-from", "nothing.gguf"), "nothing.gguf: no such file"),
        (("--imatrix", "nothing.imatrix"), "nothing.imatrix: no such file"),
    ],
)
def test_options_that_do_not_fit(refused: Refused, gguf: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused("convert", gguf, *options)
    assert not list(gguf.parent.glob("*.orkpack*"))


def test_a_pack_is_not_converted_again(ork: Ork, refused: Refused, gguf: Path) -> None:
    assert ork("convert", gguf)[0] == 0
    pack = gguf.with_suffix(".orkpack")
    before = pack.read_bytes()
    assert "convert the model that it was made of" in refused("convert", pack, "--recipe", "nf4")
    assert pack.read_bytes() == before


def test_files_of_other_models(refused: Refused, gguf: Path, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "o.gguf", tiny.metadata(), tiny.random_tensors(rows=270))
    assert "not the same model: token_embd.weight is 270 x 64 and 263 x 64" in refused(
        "convert", gguf, "--tiers-from", other
    )
    write_gguf(tmp_path / "n.gguf", {}, {"x.weight": ("F32", np.ones((2, 2), np.float32), (2, 2))})
    assert "none of its tensors" in refused("convert", gguf, "--tiers-from", tmp_path / "n.gguf")
    assert "no 4-bit default" in refused("convert", gguf, "--recipe", "int8", "--tiers-from", gguf)
    assert "not an imatrix" in refused("convert", gguf, "--recipe", "nf4", "--imatrix", gguf)
    Imatrix({"a": np.ones((1, 3), np.float32)}, {"a": np.ones(1, np.float32)}).write(tmp_path / "m.gguf")
    line = refused("convert", gguf, "--recipe", "nf4", "--imatrix", tmp_path / "m.gguf")
    assert "m.gguf: lists no tensor blk.0.attn_q.weight: it is of another model" in line
    line = refused("convert", gguf, "--imatrix", tmp_path / "m.gguf")
    assert "of no use to recipe int8" in line
    (tmp_path / "w.toml").write_text('[default]\ncodec = "nf4"\nsearch = "importance"\n')
    assert "`ork convert --imatrix FILE`" in refused("convert", gguf, "--recipe", tmp_path / "w.toml")
    assert not list(tmp_path.glob("*.orkpack*"))


def test_a_source_of_four_bits(ork: Ork, refused: Refused, tmp_path: Path) -> None:
    source = tiny.random_gguf(tmp_path / "q.gguf", kind="Q4_0")
    assert "--allow-requantize" in refused("convert", source, "--recipe", "nf4")
    assert "--allow-requantize" in refused("convert", source, "--tensor-type", "ffn_up=i4")
    assert not list(tmp_path.glob("*.orkpack*"))
    assert ork("convert", source, "--recipe", "nf4", "--allow-requantize")[0] == 0
    assert ork("convert", source)[0] == 0
