"""ork ppl, qerr, diff, and convert --evaluate: what they print, what they leave behind, what they refuse."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ork.cli.inspect import quality_rows, recipe_rows
from ork.measure.perplexity import compare
from ork.pack.notes import write_note
from ork.pack.verify import inspect, verify
from ork.quant.recipe import Recipe, exactly, usual
from tests import tiny
from tests.cli.conftest import Ork

LETTERS = "the wizard in the thin hat thinks of things; nothing is within. "
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.random_gguf(tmp_path_factory.mktemp("measuring") / "tiny.gguf")


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    path = model.with_name("text.txt")
    path.write_text(LETTERS * 16)
    return path


@pytest.fixture
def packed(ork: Ork, model: Path, tmp_path: Path) -> Path:
    assert ork("convert", model, "-o", tmp_path / "a.orkpack")[0] == 0
    return tmp_path / "a.orkpack"


# --- ppl


def test_perplexity(ork: Ork, packed: Path, text: Path) -> None:
    code, out, err = ork("ppl", packed, "-f", text, "-c", "32", "--json")
    about = json.loads(out)
    assert (code, err) == (0, "")
    assert about["tokens"] == 15 * about["chunks"]
    assert (about["context"], about["reference"], about["kv"]) == (32, None, "f16")
    assert about["perplexity"] > about["error"] > 0
    code, out, err = ork("ppl", packed, "-f", text, "-c", "32", "--chunks", "2")
    assert code == 0
    assert out.startswith("perplexity ")
    assert out.endswith("over 30 predictions\n")
    assert err.startswith("ork: 2 chunks of 32 tokens in ")


def test_against_the_source_and_a_saved_base(ork: Ork, model: Path, packed: Path, text: Path, tmp_path: Path) -> None:
    """A GGUF as a reference is what the file says: f32, whatever --codec makes of the model itself."""
    base = tmp_path / "x.base"
    how = ("-f", text, "-c", "32", "--kv", "f32")
    direct = json.loads(ork("ppl", packed, "--against", model, *how, "--json")[1])
    assert 0.00001 < direct["kl"] < 0.1
    assert direct["ratio"] == pytest.approx(direct["perplexity"] / direct["reference"])
    code, out, err = ork("ppl", model, "--codec", "f32", *how, "--save-base", base)
    assert (code, out.count("\n")) == (0, 1)
    assert "will be written" in err
    saved = json.loads(ork("ppl", packed, "--base", base, *how, "--json")[1])
    for key in ("perplexity", "reference", "kl", "kl_999", "top1"):
        assert saved[key] == pytest.approx(direct[key], rel=1e-3, abs=1e-4)
    out = ork("ppl", packed, "--base", base, *how)[1]
    assert [line.split()[0] for line in out.splitlines()] == ["perplexity", "reference", "ratio", "KL", "same"]
    itself = json.loads(ork("ppl", packed, "--against", packed, *how, "--json")[1])
    assert (itself["kl"], itself["ratio"], itself["top1"]) == (0, 1, 1)


def test_a_window_changes_no_figure(ork: Ork, packed: Path, text: Path) -> None:
    how = ("ppl", packed, "-f", text, "-c", "32", "--json")
    whole, windowed = json.loads(ork(*how)[1]), json.loads(ork(*how, "--window", "120K")[1])
    assert whole["nll"] == windowed["nll"]


def test_what_ppl_refuses(refused: Refused, model: Path, packed: Path, text: Path, tmp_path: Path) -> None:
    short, binary, base = tmp_path / "short.txt", tmp_path / "binary", tmp_path / "x.base"
    short.write_text("short")
    binary.write_bytes(b"abc\xff")
    base.write_bytes(b"ORKBASE1" + b"\xff" * 90)
    for args, words in (
        (("-f", short), "the text is too short: it has"),
        (("-f", tmp_path / "none"), "No such file"),
        (("-f", binary), "byte 3 is not UTF-8"),
        (("-f", text, "-c", "2"), "at least 4"),
        (("-f", text, "-c", "100000"), "trained for contexts of 1 to 2048"),
        (("-f", text, "--chunks", "0"), "1 or more"),
        (("-f", text, "-c", "32", "--base", base), "its head is damaged"),
        (("-f", text, "-c", "32", "--base", text), "not a file of `ork ppl --save-base`"),
        (("-f", text, "--base", base, "--against", packed), "exclude each other"),
        (("-f", text, "-c", "32", "--save-base", tmp_path / "no" / "x"), "there is no folder"),
        (("-f", text, "-c", "32", "--save-base", binary), "is there and is no file of `ork ppl --save-base`"),
        (("-f", text, "-c", "32", "--save-base", tmp_path), "this is a folder"),
        ((), "required"),
    ):
        assert words in refused("ppl", packed, *args)
    assert binary.read_bytes() == b"abc\xff"
    assert "q3" in refused("ppl", model, "-f", text, "--codec", "q3")


def strictly(text: str) -> dict[str, Any]:
    """JSON as the standard has it, without Infinity and NaN."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def test_an_error_that_is_not_known_is_null(ork: Ork, packed: Path, text: Path) -> None:
    found = strictly(ork("ppl", packed, "--against", packed, "-f", text, "-c", 4, "--chunks", 1, "--json")[1])
    assert found["tokens"] == 1
    assert [key for key, value in found.items() if value is None] == [
        "error",
        "reference_error",
        "ratio_error",
        "kl_error",
        "top1_error",
    ]


# --- qerr


def test_errors_of_weights(ork: Ork, model: Path, packed: Path) -> None:
    code, out, _ = ork("qerr", packed, "--against", model, "--json")
    found = json.loads(out)
    assert code == 0
    assert {t["name"] for t in found["tensors"]} >= {"token_embd.weight", "blk.1.ffn_down.weight"}
    assert list(found["layers"]) == ["output.weight", "token_embd.weight", "blk.0", "blk.1"]
    assert all(0.001 < t["error"] < 0.02 for t in found["tensors"])
    code, out, _ = ork("qerr", model)  # converted on the way, and compared with itself
    assert code == 0
    assert "blk.1.attn_output.weight" in out


def test_a_model_that_overflows_is_walked_through_all_the_same(ork: Ork, text: Path, tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_norm.weight"][:] = 1e25
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    for codec in ("i8", "f32"):
        assert ork("convert", source, "--codec", codec, "-o", tmp_path / f"{codec}.orkpack")[0] == 0
    packs = (tmp_path / "i8.orkpack", "--against", tmp_path / "f32.orkpack")
    walk = strictly(ork("qerr", *packs, "-f", text, "-c", 8, "--json")[1])["walk"]
    assert [d["error"] is None for d in walk["layers"]] == [False, False, True, True]


def test_where_two_packs_and_devices_differ(ork: Ork, model: Path, packed: Path, text: Path) -> None:
    code, out, _ = ork("qerr", packed, "--against-device", "emu", "-f", text, "-c", "8")
    assert code == 0
    assert out.endswith("no difference to the last bit: 9 inputs of linear layers, and the logits\n")
    code, out, _ = ork("qerr", packed, "--against", model, "-f", text, "-c", "8", "--json")
    found = json.loads(out)["walk"]
    assert code == 0
    assert [d["place"] for d in found["layers"]] == ["embedding", "blk.0", "blk.1", "logits"]
    assert found["first"]["place"] == "blk.0.attn_q, blk.0.attn_k, blk.0.attn_v"
    assert found["equal_until"] == ""


def test_what_qerr_refuses(refused: Refused, model: Path, packed: Path, text: Path, tmp_path: Path) -> None:
    other = tiny.random_gguf(tmp_path / "other.gguf", "qwen2")
    assert "does not hold its source" in refused("qerr", packed)
    walking = (
        ("--against-device", "emu"),
        ("--device", "emu"),
        ("--kv", "f16"),
        ("--min-rows", 5),
        ("-c", 8),
        ("--chunks", 1),
    )
    for option in walking:
        told = f"{option[0]} is for walking through a text: give one with -f"
        assert told in refused("qerr", packed, "--against", model, *option)
    assert "known are auto, cpu" in refused("qerr", packed, "--against-device", "gpu", "-f", text, "-c", "8")
    assert "is this its source?" in refused("qerr", packed, "--against", other)
    assert "at most 512" in refused("qerr", packed, "--against-device", "emu", "-f", text, "-c", "513")
    assert "one chunk" in refused("qerr", packed, "--against", model, "-f", text, "--chunks", "2")


# --- ork inspect


def test_inspect_reads_a_recipe_out(ork: Ork, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.orkpack"
    rules = ("--tensor-type", "ffn_(up|down)=i4", "--recipe", "nf4", "--group", 32)
    assert ork("convert", model, *rules, "-o", target)[0] == 0
    code, out, _ = ork("inspect", target, "--tensors")
    assert code == 0
    for line in (r"match ffn_\(up\|down\) .* i4, rotation mix, search mse", "all others .* nf4 g32, rotation mix",
                 r"blk\.0\.ffn_down\.weight .* i4 .* 32 mix 3"):  # fmt: skip
        assert re.search(line, out), out
    assert "KL" not in out


def test_inspect_says_what_a_recipe_was_measured_from() -> None:
    a, b = usual("i8", act_group=64), usual("nf4", 32, gptq=True)
    rules = ((exactly("a.weight"), b), (exactly("b.weight"), a), (exactly("c.weight"), b), ("x", a))
    figures = {"tokens": 256, "bytes": 12345, "kl": 0.01234, "tensors": {"a.weight": 0.5}}
    assert recipe_rows(Recipe("mixed", usual("f16"), rules, figures).record()) == [
        ("2 by name", "nf4 g32, rotation mix, search mse, gptq"),
        ("1 by name", "i8, act_group 64, rotation block"),
        ("match x", "i8, act_group 64, rotation block"),
        ("all others", "f16, rotation none"),
        ("by measurement", "tokens 256, bytes 12,345, expected KL 0.01234 nats"),
    ]
    plain = Recipe("int8", usual("i8")).record()
    assert recipe_rows(plain) == [("all", "i8, rotation block")]
    for odd in ({}, {"default": 3}, [], None, plain | {"figures": 3}):
        assert recipe_rows(odd) == []
    assert len(recipe_rows(plain | {"figures": {"kl": "much", "tokens": [], "tensors": 3}})) == 1


# --- convert --evaluate, inspect, diff


def test_a_conversion_is_evaluated(ork: Ork, model: Path, packed: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.orkpack"
    code, out, err = ork("convert", model, "-o", target, "--evaluate", text, "--evaluate-chunks", "1")
    assert (code, out) == (0, "")
    assert "noted in the pack" in err
    assert verify(target) == verify(packed)  # notes are not part of the pack's hash
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.orkpack", "b.orkpack"]
    note = inspect(target)["notes"]["quality"]
    assert (note["tokens"], note["context"], note["chunks"]) == (255, 512, 1)
    assert note["text"].startswith("sha256:")
    command = shlex.split(note["command"])
    assert command[:3] == ["ork", "ppl", "b.orkpack"]
    places = {"b.orkpack": target, model.name: model, text.name: text}
    again = json.loads(ork(*[places.get(a, a) for a in command[1:]], "--json")[1])
    for key in ("perplexity", "reference", "kl", "kl_999", "top1"):
        assert again[key] == note[key]
    out = ork("inspect", target)[1]
    assert f"{note['perplexity']:.4f} ±" in out
    assert "same top token" in out
    code, out, _ = ork("diff", packed, target)
    assert code == 0
    assert "the same weights, tensors and metadata" in out
    assert f"{note['perplexity']:.4f} ±" in out


def test_nothing_is_left_of_the_reference_whatever_ends_the_measurement(
    ork: Ork, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that ends the process at once included: it has no name any more when the measuring begins."""
    there: list[list[str]] = []

    def measured(*args: object) -> object:
        there.append([f.name for f in tmp_path.iterdir()])
        return compare(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("ork.build.evaluate.compare", measured)
    assert ork("convert", model, "-o", tmp_path / "b.orkpack", "--evaluate", text, "--evaluate-chunks", "1")[0] == 0
    assert there == [["b.orkpack"]]


def test_what_cannot_be_evaluated_is_not_converted(refused: Refused, model: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short")
    target = tmp_path / "b.orkpack"
    assert "too short" in refused("convert", model, "-o", target, "--evaluate", short)
    zero = ("--evaluate", text, "--evaluate-chunks", 0)
    assert "--evaluate-chunks 0: give a number" in refused("convert", model, "-o", target, *zero)
    assert "goes with --evaluate" in refused("convert", model, "-o", target, "--evaluate-chunks", "2")
    assert [f.name for f in tmp_path.iterdir()] == ["short.txt"]
    (tmp_path / "b.orkpack.reference").write_text("mine")
    assert "is no pack" in refused("convert", model, "-o", target, "--evaluate", text)
    assert (tmp_path / "b.orkpack.reference").read_text() == "mine"


def test_a_disk_without_room_for_pack_and_reference(
    refused: Refused, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packs of tiny weights are twice the notes' 2 MiB and some: room for one is not enough."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    line = refused("convert", model, "-o", tmp_path / "b.orkpack", "--evaluate", text)
    assert re.search(r"the pack and the f32 reference to evaluate with take [4-5],.* the disk has 3,145,728", line)
    assert not list(tmp_path.iterdir())


def test_what_json_has_not_is_null(ork: Ork, tmp_path: Path) -> None:
    metadata = tiny.metadata(**{"llama.odd": float("inf"), "llama.odder": float("nan")})
    source = tiny.write(tmp_path / "x.gguf", metadata, tiny.random_tensors())
    assert ork("convert", source)[0] == 0
    found = strictly(ork("inspect", tmp_path / "x.orkpack", "--json")[1])["metadata"]
    assert (found["llama.odd"], found["llama.odder"]) == (None, None)


def test_a_note_that_somebody_made_up(ork: Ork, packed: Path) -> None:
    for odd in ("good", {"perplexity": "low"}, [1], {"perplexity": 3.0}):
        write_note(packed, "quality", odd)
        assert quality_rows(odd) == {}
        assert ork("inspect", packed)[0] == 0
        assert ork("diff", packed, packed)[0] == 0


def test_names_are_shown_as_they_are(ork: Ork, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks like markup or an emoji; but control characters reach no terminal."""
    monkeypatch.chdir(tmp_path)
    Path("d[").mkdir()
    for name in ("d[/x].orkpack", "[red]:x:.orkpack", "\x1b[2J.orkpack"):
        Path(name).hardlink_to(packed)
        shown = name.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
        assert shown in ork("inspect", name)[1]
        assert shown in ork("diff", name, packed)[1]


def test_nothing_is_cut_off_where_there_is_no_terminal(
    ork: Ork, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which parallel test runners set
    pack = tmp_path / "x.orkpack"
    assert ork("convert", model, "--target-bpw", "8.5", "--calibrate", text, "-o", pack)[0] == 0
    out = ork("inspect", pack, "--tensors")[1]
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    for name, cost in inspect(pack)["recipe"]["figures"]["tensors"].items():
        assert re.search(rf"{re.escape(name)} .* {re.escape(f'{cost:.3g}')} ", out)


def test_two_packs(ork: Ork, model: Path, packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.orkpack"
    assert ork("convert", model, "-o", other, "--tensor-type", "attn_v=f32")[0] == 0
    found = json.loads(ork("diff", packed, other, "--json")[1])
    assert {t["name"]: t["differs"] for t in found["tensors"]} == {
        f"blk.{i}.attn_v.weight": "codec, rotation" for i in range(2)
    }
    assert found["equal_tensors"] == 14
    assert not found["same"]
    assert found["raw"] == []
    out = ork("diff", packed, other)[1]
    assert re.search(r"match attn_v +│ - +│ f32, rotation none", out)
    assert re.search(r"all others +│ - +│ i8, rotation block", out)
    assert re.search(r"all +│ i8, rotation block +│ - ", out)
    assert "rotation block" not in ork("diff", packed, packed)[1]
    assert "blk.0.attn_v.weight" in out
    assert "14 tensors are equal, 2 differ" in out


def test_packs_of_two_models(ork: Ork, packed: Path, tmp_path: Path) -> None:
    seeded = tiny.random_gguf(tmp_path / "seed.gguf", seed=1)
    other = tmp_path / "b.orkpack"
    assert ork("convert", seeded, "-o", other)[0] == 0
    found = json.loads(ork("diff", packed, other, "--json")[1])
    assert {t["differs"] for t in found["tensors"]} == {"content"}
    assert found["equal_tensors"] == 0
    assert "blk.0.attn_norm.weight" in found["raw"]


def test_what_diff_refuses(refused: Refused, packed: Path, model: Path) -> None:
    refused("diff", packed, model)
    refused("diff", packed, packed.with_name("none.orkpack"))
