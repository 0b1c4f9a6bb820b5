"""Recipes: which choice a tensor gets, files and records, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ork.errors import UsageError
from ork.quant.recipe import PLAIN, Choice, Recipe, builtin, exactly, from_toml, tensor_type, usual

TEXT = """
name = "mine"

[default]
codec = "nf4"
group = 64

[[rule]]
match = "attn_v|^output"
codec = "i8"
act_group = 128

[[rule]]
match = 'blk\\.[01]\\.'
codec = "i4"
group = 32
rotation = "mix"
search = "absmax"
gptq = true

[[rule]]
match = "attn_v"
codec = "f16"
"""


def test_the_first_rule_that_matches_decides() -> None:
    recipe = from_toml(TEXT)
    assert recipe.name == "mine"
    assert recipe.choose("blk.0.attn_v.weight") == Choice("i8", rotation="mix", act_group=128)
    assert recipe.choose("output.weight") == Choice("i8", rotation="mix", act_group=128)
    assert recipe.choose("blk.1.attn_output.weight") == Choice("i4", 32, "mix", "absmax", gptq=True)
    assert recipe.choose("blk.10.ffn_up.weight") == Choice("nf4", 64, "mix", "mse")


def test_a_record_says_all_there_is(tmp_path: Path) -> None:
    recipe = from_toml(TEXT)
    assert Recipe.of(json.loads(json.dumps(recipe.record()))) == recipe
    measured = Recipe("mixed", usual("i8"), ((exactly("a.weight"), usual("nf4", 32)),), {"kl": 0.5})
    assert Recipe.of(measured.record()) == measured
    for name in PLAIN:
        assert Recipe.of(builtin(name).record()) == builtin(name)
    assert len({r.digest for r in (recipe, measured, *map(builtin, PLAIN))}) == 1 + 1 + len(PLAIN) - 1  # i8 is int8


def test_a_file_without_a_name_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "my recipe (2).toml"
    path.write_text('[default]\ncodec = "i4"\n')
    assert from_toml(path).name == "my-recipe--2-"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default", "not TOML: "),
        ("a = " + "[" * 100_000, "not TOML: "),
        ("", r"\[default\] is missing"),
        ("[default]\ngroup = 32", r"\[default\]: codec is missing; known are i8, i4, nf4, f16, f32"),
        ('[default]\ncodec = "q4"', r"\[default\]: codec 'q4' is unknown; known are i8, i4, nf4, f16, f32"),
        ("[default]\ncodec = 4", r"\[default\]: codec 4 is unknown"),
        ('[default]\ncodec = "i4"\ngruop = 32', r"\[default\]: unknown key 'gruop'; known are codec, group, rotation"),
        ('default = "i8"', r"\[default\]: codec is missing"),
        ('[default]\ncodec = "i4"\ngroup = 48', "group 48 is unknown; known are 0, 32, 64, 128"),
        ('[default]\ncodec = "i4"\ngroup = 32.0', r"group 32\.0 is unknown"),
        ('[default]\ncodec = "i4"\ngroup = [32]', r"group \[32\] is unknown"),
        ('[default]\ncodec = "i4"\nrotation = "full"', "rotation 'full' is unknown; known are none, block, mix"),
        ('[default]\ncodec = "i4"\nsearch = "best"', "search 'best' is unknown; known are absmax, mse, importance"),
        ('[default]\ncodec = "i4"\ngptq = 1', "gptq is 1, not true or false"),
        ('[default]\ncodec = "i4"\nact_group = 32', "act_group is for codec i8 without group"),
        ('[default]\ncodec = "f16"\ngroup = 32', "codec f16 has no scales"),
        ('recipe = 1\n[default]\ncodec = "i8"', "unknown key 'recipe'; known are name, default, rule"),
        ('name = "a/b"\n[default]\ncodec = "i8"', "recipe name 'a/b'"),
        ('rule = 3\n[default]\ncodec = "i8"', r"each rule is headed \[\[rule\]\]"),
        ('[default]\ncodec = "i8"\n[[rule]]\ncodec = "i4"', "rule 1 has no match"),
        ('[default]\ncodec = "i8"\ngroup = ' + "9" * 5000, "not TOML: "),
        ('[default]\ncodec = "i8"\n[figures]\nday = 2020-01-01', "figures hold what JSON does not"),
        ('[default]\ncodec = "i8"\n[figures]\nkl = nan', "figures hold what JSON does not"),
        ('[default]\ncodec = "i8"\n[[rule]]\nmatch = "x"\n', "rule 1: codec is missing"),
        ('[default]\ncodec = "i8"\n[[rule]]\nmatch = "("\ncodec = "i4"', r"match '\(' is not a regular expression"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as e:
        from_toml(path)
    assert str(e.value).startswith(f"{path}: ")
    assert "\n" not in str(e.value)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.toml: No such file"):
        from_toml(tmp_path / "nothing.toml")
    with pytest.raises(UsageError, match="Is a directory"):
        from_toml(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\x00" * 100)
    with pytest.raises(UsageError, match="not TOML"):
        from_toml(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        from_toml(tmp_path / "x.toml")


def test_built_in_recipes() -> None:
    assert builtin("int8").choose("blk.0.ffn_up.weight") == Choice("i8")
    assert builtin("i8") == builtin("int8")
    assert builtin("nf4", group=64).default == Choice("nf4", 64, "mix", "mse")
    assert builtin("int8", act_group=32).default == Choice("i8", act_group=32)
    assert builtin("f32").default == Choice("f32", rotation="none")
    assert builtin("i4", rotate=False).default.rotation == "none"
    assert len({builtin(n, rotate=r, group=g).name for n in ("i4", "nf4") for r in (0, 1) for g in (0, 32)}) == 8
    for bad in (
        {"name": "q4"},
        {"name": "small"},
        {"name": "f16", "group": 32},
        {"name": "nf4", "group": 5},
    ):
        with pytest.raises(UsageError):
            builtin(**bad)  # type: ignore[arg-type]


def test_changes_to_a_recipe() -> None:
    recipe = builtin("nf4", group=64).but(
        [tensor_type("attn_.*=i8"), tensor_type("ffn_down=i4:32"), tensor_type("_norm=f32")]
    )
    assert recipe.choose("blk.0.attn_q.weight") == Choice("i8", rotation="mix")
    assert recipe.choose("blk.0.ffn_down.weight") == Choice("i4", 32, "mix", "mse")
    assert recipe.choose("blk.0.ffn_up.weight") == Choice("nf4", 64, "mix", "mse")
    block = recipe.rotated("block")
    for each, modes in ((recipe, ["mix", "mix", "none"]), (block, ["block", "block", "none"])):
        assert [each.choose(f"{n}.weight").rotation for n in ("attn_q", "ffn_down", "a_norm")] == modes
    assert block.name != recipe.name
    assert block.rotated("block") == block
    weighed = recipe.with_importance()
    assert [weighed.choose(f"{n}.weight").search for n in ("attn_q", "ffn_down", "ffn_up")] == [
        "absmax",
        "importance",
        "importance",
    ]
    assert recipe.idle(["blk.0.attn_q.weight", "blk.1.ffn_down.weight"]) == ["_norm"]
    assert tensor_type("a=b=i8") == ("a=b", Choice("i8"))


@pytest.mark.parametrize(
    "text", ["attn", "=i8", "attn=", "attn=q4", "attn=i4:x", "attn=i4:", "attn=i4:33", "(=i8", "a=f16:32"]
)
def test_a_tensor_type_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--tensor-type"):
        tensor_type(text)
