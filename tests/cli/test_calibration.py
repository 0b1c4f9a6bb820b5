"""`ork imatrix`, and recipes of `ork convert` that are found by measuring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ork.build import sensitivity
from ork.build.imatrix import read_imatrix
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
    rng = np.random.default_rng(0)
    width, ffn = 512, 1024
    shapes = {"attn_q": (width, width), "attn_k": (256, width), "attn_v": (256, width), "attn_output": (width, width)}
    shapes |= {"ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (tiny.VOCAB, width), "output.weight": (tiny.VOCAB, width)}
    values: dict[str, Any] = {
        name: (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32) for name, (n, k) in tensors.items()
    }
    values |= {name: np.ones(width, np.float32) for name in ("output_norm.weight", "blk.0.attn_norm.weight")}
    values["blk.0.ffn_norm.weight"] = np.ones(width, np.float32)
    sizes = {"block_count": 1, "embedding_length": width, "feed_forward_length": ffn}
    sizes |= {"attention.key_length": 128, "attention.value_length": 128}
    metadata = tiny.metadata(**{f"llama.{key}": value for key, value in sizes.items()})
    return tiny.write(tmp_path_factory.mktemp("calibration") / "model.gguf", metadata, values)


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
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused("imatrix", model, "-f", tmp_path / "bytes", "-o", target)
    assert "nowhere" in refused("imatrix", model, "-f", text, "-o", tmp_path / "nowhere" / "a.gguf", "-c", 64)
    assert not target.exists()


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
    for wrong in (b"", b"{}", b"[1, 2", kept[:-9], kept.replace(b'"error":', b'"eror":'), b"\xff"):
        file.write_bytes(wrong)
        assert "figures.json: holds no measurements" in refused(*convert("--recipe", "mixed"))
        assert file.read_bytes() == wrong
    file.write_bytes(kept.replace(b'"error":', b'"error":-'))
    assert "holds costs that cannot be" in refused(*convert("--recipe", "mixed"))
    assert "--measurements goes with" in refused("convert", model, "--measurements", file)


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
