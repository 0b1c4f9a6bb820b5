"""`ork imatrix`, and recipes of `ork convert` that are found by measuring."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork.build import convert, sensitivity
from ork.build.allocate import Measurements
from ork.build.imatrix import read_imatrix
from ork.errors import SourceError
from ork.pack.format import align
from ork.pack.reader import Pack
from ork.quant import q4_k_m
from ork.quant.imatrix import Imatrix
from tests import tiny
from tests.cli.conftest import Ork

Refused = Callable[..., str]
TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of width 512, so that slices are more than padding."""
    return tiny.write(
        tmp_path_factory.mktemp("calibration") / "model.gguf", metadata_of_one_layer(), tensors_of_one_layer()
    )


WIDTH, FFN = 512, 1024


def tensors_of_one_layer() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    width, ffn = WIDTH, FFN
    shapes = {"attn_q": (width, width), "attn_k": (256, width), "attn_v": (256, width), "attn_output": (width, width)}
    shapes |= {"ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (tiny.VOCAB, width), "output.weight": (tiny.VOCAB, width)}
    values: dict[str, Any] = {
        name: (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32) for name, (n, k) in tensors.items()
    }
    values |= {name: np.ones(width, np.float32) for name in ("output_norm.weight", "blk.0.attn_norm.weight")}
    values["blk.0.ffn_norm.weight"] = np.ones(width, np.float32)
    return values


def metadata_of_one_layer() -> dict[str, Any]:
    sizes = {"block_count": 1, "embedding_length": WIDTH, "feed_forward_length": FFN}
    sizes |= {"attention.key_length": 128, "attention.value_length": 128}
    return tiny.metadata(**{f"llama.{key}": value for key, value in sizes.items()})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


def weights(path: Path) -> tuple[int, dict[str, tuple[int, int]], dict[str, str]]:
    """(bytes on pages, shapes, codecs) of a pack's matrices."""
    with contextlib.closing(Pack.open(path)) as pack:
        raw = set(pack.raw_names())
        tensors = [pack.tensor(name) for name in pack.names() if name not in raw]
        nbytes = sum(align(s.nbytes) for t in tensors for s in t.slices)
        return nbytes, {t.name: (t.N, t.K) for t in tensors}, {t.name: t.codec for t in tensors}


# --- ork imatrix


def test_imatrix_of_a_source_and_of_its_pack(ork: Ork, model: Path, text: Path, tmp_path: Path) -> None:
    code, out, err = ork("imatrix", model, "-f", text, "-o", tmp_path / "a.gguf", "-c", 64)
    assert (code, out) == (0, "")
    assert "8 tensors over " in err
    assert "chunks of 64 tokens of fox.txt" in err
    assert ork("convert", model, "--codec", "f32", "-o", tmp_path / "x.orkpack")[0] == 0
    assert ork("imatrix", tmp_path / "x.orkpack", "-f", text, "-o", tmp_path / "b.gguf", "-c", 64)[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert ork("imatrix", model, "-f", text, "-o", tmp_path / "c.gguf", "-c", 64, "--chunks", 2)[0] == 0
    found = read_imatrix(tmp_path / "c.gguf")
    assert (found.chunk_count, found.chunk_size, found.datasets) == (2, 64, ("fox.txt",))


def test_without_a_text_the_one_that_comes_with_ork_is_named(ork: Ork, model: Path, tmp_path: Path) -> None:
    code, _, err = ork("imatrix", model, "-o", tmp_path / "a.gguf", "-c", 64, "--chunks", 1)
    assert code == 0
    assert "calibrating on the text that comes with ork (from Botchan, by Natsume Soseki)" in err


def test_an_imatrix_that_convert_takes(ork: Ork, model: Path, text: Path, tmp_path: Path) -> None:
    ork("imatrix", model, "-f", text, "-o", tmp_path / "a.gguf", "-c", 64)
    target = tmp_path / "x.orkpack"
    assert ork("convert", model, "--recipe", "nf4", "--imatrix", tmp_path / "a.gguf", "-o", target)[0] == 0
    with contextlib.closing(Pack.open(target)) as pack:
        assert pack.provenance["imatrix"] == read_imatrix(tmp_path / "a.gguf").digest


def test_imatrix_says_what_is_wrong(refused: Refused, model: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.gguf"
    assert "too short" in refused("imatrix", model, "-f", text, "-o", target, "-c", 4096)
    assert "nothing.txt" in refused("imatrix", model, "-f", tmp_path / "nothing.txt", "-o", target)
    assert "chunks" in refused("imatrix", model, "-f", text, "-o", target, "--chunks", 0)
    assert "--max-ram 50 MiB is too little" in refused("imatrix", model, "-f", text, "-o", target, "--max-ram", "50M")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused("imatrix", model, "-f", tmp_path / "bytes", "-o", target)
    nowhere = tmp_path / "nowhere" / "a.gguf"
    assert "there is no folder" in refused("imatrix", tmp_path / "unread.gguf", "-f", text, "-o", nowhere)
    assert not target.exists()


def test_imatrix_overwrites_nothing_but_an_imatrix(
    ork: Ork, refused: Refused, model: Path, text: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(model.read_bytes())
    for file in (copy, text):
        before = file.read_bytes()
        assert "is there and is no imatrix" in refused("imatrix", copy, "-f", text, "-o", file)
        assert file.read_bytes() == before
    for chunks in (1, 2):
        assert ork("imatrix", copy, "-f", text, "-o", tmp_path / "a.gguf", "-c", 64, "--chunks", chunks)[0] == 0
        assert read_imatrix(tmp_path / "a.gguf").chunk_count == chunks


def test_a_model_that_overflows_on_the_text(refused: Refused, text: Path, tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    tensors["blk.1.ffn_norm.weight"] = np.full(64, 1e25, np.float32)
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    told = "not finite; the model's weights overflow, or are damaged"
    assert told in refused("imatrix", source, "-f", text, "-o", tmp_path / "a.gguf", "-c", 64)
    assert told in refused("convert", source, "--recipe", "mixed", "--calibrate", text)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["blk.1.attn_norm.weight", "blk.1.ffn_up.weight"])
def test_the_tensor_that_is_damaged_is_the_one_that_is_named(
    refused: Refused, model: Path, text: Path, tmp_path: Path, name: str
) -> None:
    """Whichever way the model is read: a norm's infinity is nothing that the text brings about."""
    tensors = tiny.random_tensors()
    tensors[name].reshape(-1)[3] = np.inf
    source = tiny.write(tmp_path / "x.gguf", tiny.metadata(), tensors)
    told = f"x.gguf: tensor {name} holds a value that is not finite"
    assert refused("imatrix", source, "-f", text, "-o", tmp_path / "a.gguf", "-c", 64) == f"{tmp_path}/{told}"
    assert refused("convert", source, "--recipe", "mixed", "--calibrate", text) == f"{tmp_path}/{told}"
    assert list(tmp_path.iterdir()) == [source]


# --- ork convert


def test_mixed_is_within_q4_k_m(ork: Ork, model: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.orkpack"
    code, _, err = ork("convert", model, "--recipe", "mixed", "--calibrate", text, "-o", target)
    assert code == 0
    assert "tokens of fox.txt" in err
    assert "bits each), expected KL divergence" in err
    nbytes, shapes, codecs = weights(target)
    assert 0.9 * q4_k_m.total_bytes(shapes) < nbytes <= q4_k_m.total_bytes(shapes)
    assert {"i8", "nf4"} <= set(codecs.values())
    first = target.read_bytes()
    assert ork("convert", model, "--recipe", "mixed", "--calibrate", text, "-o", target, "--threads", 1)[0] == 0
    assert target.read_bytes() == first
    assert ork("verify", target)[0] == 0


@pytest.mark.parametrize(
    ("options", "bpw"), [(("--recipe", "small"), 4.5), (("--target-bpw", 5.5), 5.5), (("--target-bpw", 8.5), 8.5)]
)
def test_budgets_in_bits(
    ork: Ork, model: Path, text: Path, tmp_path: Path, options: tuple[object, ...], bpw: float
) -> None:
    target = tmp_path / "x.orkpack"
    assert ork("convert", model, *options, "--calibrate", text, "-o", target)[0] == 0
    nbytes, shapes, _ = weights(target)
    bits = 8 * nbytes / sum(n * k for n, k in shapes.values())
    assert bpw - 0.2 < bits <= bpw


def test_promotion_is_on_top_of_the_recipe(ork: Ork, model: Path, text: Path, tmp_path: Path) -> None:
    sizes = []
    for name, more in (("base", ()), ("more", ("--promote-budget", 0.3, "--calibrate", text))):
        target = tmp_path / f"{name}.orkpack"
        assert ork("convert", model, "--recipe", "nf4", "--group", 64, *more, "-o", target)[0] == 0
        sizes.append(weights(target))
    (before, _, plain), (after, _, promoted) = sizes
    assert before < after <= before + 300_000
    assert set(plain.values()) == {"nf4"}
    assert set(promoted.values()) == {"nf4", "i8"}


def test_a_recipe_file_may_ask_for_gptq_and_be_promoted(ork: Ork, model: Path, text: Path, tmp_path: Path) -> None:
    """--calibrate-tokens is for it, as with --gptq; what is measured is rotated as its four bits are."""
    (tmp_path / "mine.toml").write_text(
        '[default]\ncodec = "f16"\n[[rule]]\nmatch = "attn"\ncodec = "nf4"\nrotation = "block"\ngptq = true\n'
    )
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 4)
    options = ("--recipe", tmp_path / "mine.toml", "--promote-budget", 0.2, "--calibrate-tokens", 512)
    file, target = tmp_path / "figures.json", tmp_path / "x.orkpack"
    assert ork("imatrix", model, "-f", text, "-o", tmp_path / "a.gguf", "-c", 64)[0] == 0
    options += ("--imatrix", tmp_path / "a.gguf")
    code, _, err = ork("convert", model, *options, "--calibrate", long, "--measurements", file, "-o", target)
    assert code == 0, err
    assert "GPTQ on" in err
    assert b'"mode":"block"' in file.read_bytes()
    assert set(weights(target)[2].values()) == {"f16", "nf4", "i8"}


def test_measurements_serve_other_budgets(
    ork: Ork, refused: Refused, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file = tmp_path / "x.orkpack", tmp_path / "figures.json"

    def convert(*options: object) -> tuple[object, ...]:
        return ("convert", model, *options, "--calibrate", text, "--measurements", file, "-o", target)

    assert ork(*convert("--recipe", "mixed"))[0] == 0
    first = target.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(sensitivity, "measure", None)  # nobody calls it again
        assert ork(*convert("--recipe", "mixed"))[0] == 0
        assert target.read_bytes() == first
        assert ork(*convert("--target-bpw", 5))[0] == 0
        assert target.read_bytes() != first
    kept = file.read_bytes()
    assert "another model, text or rotation" in refused(*convert("--recipe", "mixed", "--rotation", "block"))
    nothing = kept[: kept.index(b'"tensors":[') + 11] + kept[kept.index(b'],"tokens"') :]
    file.write_bytes(nothing)
    assert "holds costs that cannot be" in refused(*convert("--recipe", "mixed"))
    for wrong in (b"", b"{}", b"[1, 2", kept[:-9], kept.replace(b'"error":', b'"eror":'), b"\xff"):
        file.write_bytes(wrong)
        assert "figures.json: holds no measurements" in refused(*convert("--recipe", "mixed"))
        assert file.read_bytes() == wrong
    file.write_bytes(kept.replace(b'"error":', b'"error":-'))
    assert "holds costs that cannot be" in refused(*convert("--recipe", "mixed"))
    assert "--measurements goes with" in refused("convert", model, "--measurements", file)
    file.unlink()
    os.mkfifo(file)  # nobody would ever write into it
    assert "holds no measurements" in refused(*convert("--recipe", "mixed"))


@pytest.fixture
def measurings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rotations of what is measured from now on."""
    done: list[str] = []
    measure = sensitivity.measure

    def counted(*args: Any, **options: Any) -> Measurements:
        done.append(options["mode"])
        return measure(*args, **options)

    monkeypatch.setattr(sensitivity, "measure", counted)
    return done


@pytest.fixture
def interrupted(ork: Ork, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a conversion that ends, as Ctrl-C ends it, in the middle of its slices."""

    def run(*command: object) -> None:
        calls, make_blob = itertools.count(), convert.make_blob

        def blob(*args: Any) -> Any:
            if next(calls) == 6:
                raise KeyboardInterrupt
            return make_blob(*args)

        with monkeypatch.context() as patch:
            patch.setattr(convert, "make_blob", blob)
            assert ork(*command, "--threads", 1)[0] == 130

    return run


def test_interrupted_it_goes_on_without_measuring(
    ork: Ork, interrupted: Callable[..., None], model: Path, text: Path, tmp_path: Path, measurings: list[str]
) -> None:
    target = tmp_path / "x.orkpack"
    command = ("convert", model, "--recipe", "mixed", "--calibrate", text, "-o", target)
    assert ork(*command)[0] == 0
    want = target.read_bytes()
    assert list(tmp_path.iterdir()) == [target]
    target.unlink()
    for _ in range(2):  # also the second time
        interrupted(*command)
        assert {p.name for p in tmp_path.iterdir()} == {f"x.orkpack.{end}" for end in ("part", "journal", "measuring")}
    assert measurings == ["mix"] * 2
    code, _, err = ork(*command)
    assert (code, measurings) == (0, ["mix"] * 2)
    assert "going on with what the conversion before has measured" in err
    assert target.read_bytes() == want
    assert list(tmp_path.iterdir()) == [target]


def test_what_an_interrupted_conversion_measured_on_something_else_is_not_taken(
    ork: Ork, interrupted: Callable[..., None], model: Path, text: Path, tmp_path: Path, measurings: list[str]
) -> None:
    """Another text, rotation or source; a file that is damaged; a recipe that needs no measuring."""
    target, waiting = tmp_path / "x.orkpack", tmp_path / "x.orkpack.measuring"
    other = tmp_path / "other.txt"
    other.write_text(TEXT.upper())
    command = ("convert", model, "--recipe", "mixed", "--calibrate", text, "-o", target)
    interrupted(*command)
    kept = waiting.read_bytes()
    tensors = {name: 2 * value for name, value in tensors_of_one_layer().items()}
    changed = tiny.write(tmp_path / "changed.gguf", metadata_of_one_layer(), tensors)
    for options in (
        ("convert", model, "--recipe", "mixed", "--calibrate", other),
        ("convert", model, "--recipe", "mixed", "--calibrate", text, "--rotation", "block"),
        ("convert", changed, "--recipe", "mixed", "--calibrate", text),
    ):
        waiting.write_bytes(kept)
        measurings.clear()
        assert ork(*options, "-o", target)[0] == 0
        assert len(measurings) == 1
        assert not waiting.exists()
    waiting.write_bytes(kept[:-20])
    assert ork(*command)[0] == 0
    assert len(measurings) == 2
    waiting.write_bytes(kept)
    assert ork("convert", model, "-o", target)[0] == 0
    assert not waiting.exists()


def test_a_budget_that_was_too_small_is_not_measured_for_again(
    ork: Ork, refused: Refused, model: Path, text: Path, tmp_path: Path, measurings: list[str]
) -> None:
    target = tmp_path / "x.orkpack"
    options = ("convert", model, "--calibrate", text, "--tensor-type", "attn=f32", "-o", target)
    assert "bits a weight are too few" in refused(*options, "--target-bpw", 5)
    assert [p.name for p in tmp_path.iterdir()] == ["x.orkpack.measuring"]
    assert ork(*options[:-4], *options[-2:], "--target-bpw", 6)[0] == 0
    assert len(measurings) == 1
    assert list(tmp_path.iterdir()) == [target]


def test_what_was_measured_goes_with_a_source_that_is_no_good(
    ork: Ork, model: Path, text: Path, tmp_path: Path, measurings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise SourceError("damaged")

    monkeypatch.setattr(convert, "make_blob", damaged)
    target = tmp_path / "x.orkpack"
    code, _, err = ork("convert", model, "--recipe", "mixed", "--calibrate", text, "-o", target)
    assert (code, err.splitlines()[-1]) == (2, "ork: damaged")
    assert len(measurings) == 1
    assert not list(tmp_path.iterdir())


def test_named_tensors_keep_what_they_were_given(ork: Ork, model: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.orkpack"
    kept = ("--tensor-type", "attn_q=f16", "--tensor-type", "ffn_up=i4")
    assert ork("convert", model, "--target-bpw", 8, *kept, "--calibrate", text, "-o", target)[0] == 0
    nbytes, shapes, codecs = weights(target)
    assert codecs["blk.0.attn_q.weight"] == "f16"
    assert codecs["blk.0.ffn_up.weight"] == "i4"
    assert nbytes <= sum(n * k for n, k in shapes.values())


def test_what_cannot_be_written_is_told_before_the_measuring(
    ork: Ork, refused: Refused, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "measure", None)  # nobody calls it
    mixed = ("convert", model, "--recipe", "mixed", "--calibrate", text)
    assert "this is a folder" in refused(*mixed, "-o", tmp_path)
    assert "goes with --gptq" in refused(*mixed, "--calibrate-tokens", 512)
    assert "size 'lots'" in refused(*mixed, "--max-ram", "lots")
    assert "--calibrate-tokens 5: one sequence takes 512" in refused(*mixed, "--gptq", "--calibrate-tokens", 5)
    assert "there is no folder" in refused(*mixed, "-o", tmp_path / "no" / "x.orkpack")
    assert "there is no folder" in refused(*mixed, "--measurements", tmp_path / "no" / "x.json")
    assert "'atn' names no matrix" in refused(*mixed, "--tensor-type", "atn=i8")
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh" * 25)
    assert "GPTQ takes 512 tokens" in refused("convert", model, "--recipe", "mixed", "--gptq", "--calibrate", short)
    assert "of 4 bits, of which recipe int8 has none" in refused("convert", model, "--promote-budget", 5)
    Imatrix({"a": np.ones((1, 3), np.float32)}, {"a": np.ones(1, np.float32)}).write(tmp_path / "other.gguf")
    assert "it is of another model" in refused(*mixed, "--imatrix", tmp_path / "other.gguf")


def test_options_that_do_not_go_together(refused: Refused, model: Path, text: Path, tmp_path: Path) -> None:
    def no(*options: object) -> str:
        return refused("convert", model, *options, "-o", tmp_path / "x.orkpack")

    assert "--target-bpw 3: give a number from 4.25 to 8.5" in no("--target-bpw", 3)
    assert "--target-bpw" in no("--target-bpw", "nan")
    assert "goes with no other recipe" in no("--target-bpw", 5, "--recipe", "nf4")
    assert "--promote-budget" in no("--recipe", "mixed", "--promote-budget", 5)
    assert "--promote-budget" in no("--recipe", "nf4", "--promote-budget", -1)
    assert "--group" in no("--recipe", "mixed", "--group", 64)
    assert "of which recipe f16 has none" in no("--recipe", "f16", "--promote-budget", 5, "--calibrate", text)
    (tmp_path / "short.txt").write_text("too short")
    assert "give one of 128 tokens" in no("--recipe", "mixed", "--calibrate", tmp_path / "short.txt")
    assert "--max-ram 50 MiB" in no("--recipe", "mixed", "--calibrate", text, "--max-ram", "50M")
    assert not list(tmp_path.glob("*.orkpack*"))


def test_four_bits_of_four_bits_are_refused_before_anything_is_measured(refused: Refused, tmp_path: Path) -> None:
    source = tiny.random_gguf(tmp_path / "x.gguf", kind="Q4_0")
    assert "--allow-requantize" in refused("convert", source, "--recipe", "mixed")
