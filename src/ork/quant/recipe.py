"""Which codec each tensor gets: an ordered list of rules, the first whose pattern is found in a tensor's name decides.

A recipe is data, in a pack's record as in a TOML file (docs/recipes.md):

    name = "mine"

    [default]
    codec = "nf4"
    group = 64

    [[rule]]
    match = "attn_v|^output"
    codec = "i8"
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import xxhash

from ork.errors import UsageError
from ork.quant.codecs import GROUPS, SEARCHES
from ork.quant.rotation import MODES
from ork.tiles import CODECS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOUR_BIT: Final = ("i4", "nf4")
ROUTER: Final = ".ffn_gate_inp.weight"
MAX_BYTES: Final = 1 << 20  # of a recipe file
MAX_NAME: Final = 64  # characters
NAME: Final = re.compile(rf"[A-Za-z0-9._+-]{{1,{MAX_NAME}}}")  # it becomes part of a file's name


@dataclass(frozen=True)
class Choice:
    """How one tensor is stored. Raises UsageError for values that do not go together.

    `group` and `act_group` are what is asked for: a tensor gets the largest of 128, 64 and 32 that is not above it and
    divides its inputs. Grouped weights have activations of the same groups; `act_group` is for `i8` without groups.
    `search` importance needs an imatrix and is mse for tensors that none lists. f16 and f32 are stored unrotated.
    """

    codec: str
    group: int = 0
    rotation: str = "block"
    search: str = "absmax"
    act_group: int = 0
    gptq: bool = False

    def __post_init__(self) -> None:
        _one_of("codec", self.codec, tuple(CODECS))
        _one_of("group", self.group, (0, *sorted(GROUPS)))
        _one_of("rotation", self.rotation, MODES)
        _one_of("search", self.search, SEARCHES)
        _one_of("act_group", self.act_group, (0, *sorted(GROUPS)))
        if type(self.gptq) is not bool:
            raise UsageError(f"gptq is {self.gptq!r}, not true or false")
        if not CODECS[self.codec].scaled:
            if self.group or self.act_group or self.gptq or self.search != "absmax":
                raise UsageError(f"codec {self.codec} has no scales: no group, act_group, search or gptq goes with it")
            object.__setattr__(self, "rotation", "none")
        if self.act_group and (self.codec != "i8" or self.group):
            raise UsageError("act_group is for codec i8 without group; a weight's group is its activations' too")

    @property
    def four_bit(self) -> bool:
        return self.codec in FOUR_BIT


def usual(codec: str, group: int = 0, **changes: Any) -> Choice:
    """A codec with what serves it: 4 bits searched by mse and mixed across blocks, others of absmax and not mixed.

    Measured, KL divergence with the mix over without: nf4 a channel 0.92, int8 0.83 to 1.08; prefill up to 10 % slower.
    """
    fields = {"search": "mse", "rotation": "mix"} if codec in FOUR_BIT else {}
    return Choice(codec, group, **(fields | changes))


@dataclass(frozen=True)
class Recipe:
    """`rules` are (regular expression, choice) pairs, searched for in a tensor's name in order; `default` is for the
    rest. `figures`, a JSON object, says what the rules were derived from. Raises UsageError for an expression that is
    none, or a name that is not fit for a file's.
    """

    name: str
    default: Choice
    rules: tuple[tuple[str, Choice], ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(f"recipe name {self.name!r}: letters, digits and . _ + - only, at most {MAX_NAME}")
        _ = self._compiled

    @cached_property
    def _compiled(self) -> list[tuple[re.Pattern[str], Choice]]:
        return [(_pattern(p), choice) for p, choice in self.rules]

    def choose(self, tensor: str) -> Choice:
        """How a tensor is stored: an expert, `stack#3`, as the whole stack; a router in f32 whatever the rules say, for
        rounded it would send rows elsewhere."""
        tensor = tensor.partition("#")[0]
        if tensor.endswith(ROUTER):
            return Choice("f32")
        choice = self._chosen.get(tensor)  # asked for again and again, once a slice
        if choice is None:
            choice = next((c for pattern, c in self._compiled if pattern.search(tensor)), self.default)
            self._chosen[tensor] = choice
        return choice

    @cached_property
    def _chosen(self) -> dict[str, Choice]:
        return {}

    def record(self) -> dict[str, Any]:
        """The recipe as a pack stores it; `of` is the inverse."""
        rules = [{"match": pattern, **asdict(choice)} for pattern, choice in self.rules]
        record = {"name": self.name, "default": asdict(self.default), "rule": rules}
        return record | ({"figures": dict(self.figures)} if self.figures else {})

    @property
    def digest(self) -> str:
        """xxh3-64 (hex) of the record: tells apart recipes of one name."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.record(), sort_keys=True).encode())

    def but(self, rules: Sequence[tuple[str, Choice]]) -> Recipe:
        """With rules that come before the others, rotated as the default is: tensors that read the same rows and are
        rotated in one way share one quantised input."""
        if not rules:
            return self
        if CODECS[self.default.codec].scaled:
            rules = [(pattern, replace(choice, rotation=self.default.rotation)) for pattern, choice in rules]
        return replace(self, name=named(self.name, f"+{len(rules)}"), rules=(*rules, *self.rules))

    def idle(self, tensors: Iterable[str]) -> list[str]:
        """The rules' expressions that are found in none of these names."""
        names = [t.partition("#")[0] for t in tensors]
        return [pattern.pattern for pattern, _ in self._compiled if not any(map(pattern.search, names))]

    def rotated(self, mode: str) -> Recipe:
        """With another rotation in every choice that has one."""
        recipe = self._map(lambda c: replace(c, rotation=mode))
        if recipe == self:
            return self
        return replace(recipe, name=named(self.name, f"-{'norotate' if mode == 'none' else mode}"))

    def with_importance(self) -> Recipe:
        """Every search for the least squared error weighs it by importance instead."""
        return self._map(lambda c: replace(c, search="importance") if c.search == "mse" else c)

    @property
    def calibrated(self) -> bool:
        """Whether a tensor may be rounded by GPTQ, which looks at a text."""
        return self.default.gptq or any(choice.gptq for _, choice in self.rules)

    def with_gptq(self) -> Recipe:
        """Every codec that rounds makes up for its errors."""
        return self._map(lambda choice: replace(choice, gptq=True) if CODECS[choice.codec].scaled else choice)

    def _map(self, change: Callable[[Choice], Choice]) -> Recipe:
        return replace(self, default=change(self.default), rules=tuple((p, change(c)) for p, c in self.rules))

    @staticmethod
    def of(record: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """Raises UsageError, `where` first, for an unknown key, codec or other value."""
        try:
            _known(record, ("name", "default", "rule", "figures"))
            if "default" not in record:
                raise UsageError("[default] is missing: it says how tensors are stored that no rule names")
            name, rules = record.get("name", "unnamed"), record.get("rule", [])
            figures = record.get("figures", {})
            if not (isinstance(name, str) and isinstance(rules, list) and isinstance(figures, dict)):
                raise UsageError("name is a string, figures a table, and each rule is headed [[rule]]")
            _check_figures(figures)
            default = _choice(record["default"], "[default]")
            rotation = {"rotation": default.rotation} if CODECS[default.codec].scaled else {}
            pairs = [_rule(rule, i, rotation) for i, rule in enumerate(rules, 1)]
            return Recipe(name, default, tuple(pairs), figures)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


def named(name: str, suffix: str) -> str:
    """A recipe's name with a suffix, the name cut where both are too long."""
    return name[: MAX_NAME - len(suffix)] + suffix


def exactly(tensor: str) -> str:
    """The pattern that only this name matches."""
    return f"^{re.escape(tensor)}$"


def from_toml(source: str | Path) -> Recipe:
    """The recipe of a TOML text, or of the file at a `Path`, whose stem is the name unless the file gives one.

    Raises UsageError naming the file (or "recipe") and what is wrong: syntax, an unknown key or value.
    """
    where, text = "recipe", source
    if isinstance(source, Path):
        where = str(source)
        try:
            with source.open("rb") as f:
                data = f.read(MAX_BYTES + 1)
        except OSError as error:
            raise UsageError(f"{where}: {error.strerror or error}") from None
        if len(data) > MAX_BYTES:
            raise UsageError(f"{where}: larger than {MAX_BYTES >> 20} MiB: not a recipe")
        text = data.decode("utf-8", "replace")
    assert isinstance(text, str)
    try:
        record = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
        raise UsageError(f"{where}: not TOML: {' '.join(str(error).split()) or 'nested too deep'}") from None
    if isinstance(source, Path):
        record.setdefault("name", re.sub(r"[^A-Za-z0-9._+-]", "-", source.stem)[:MAX_NAME] or "unnamed")
    return Recipe.of(record, where)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"match {text!r} is not a regular expression: {error}") from None


def _check_figures(figures: Mapping[str, Any]) -> None:
    try:
        json.dumps(figures, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UsageError("figures hold what JSON does not: a date, inf or nan") from None


def _rule(rule: object, number: int, usually: Mapping[str, Any]) -> tuple[str, Choice]:
    where = f"rule {number}"
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise UsageError(f"{where} has no match: a regular expression for the names of its tensors")
    choice = _choice({**usually, **{k: v for k, v in rule.items() if k != "match"}}, where)
    return rule["match"], choice


def _choice(record: object, where: str) -> Choice:
    try:
        if not isinstance(record, dict) or "codec" not in record:
            raise UsageError(f"codec is missing; known are {', '.join(CODECS)}")
        _known(record, tuple(f.name for f in fields(Choice)))
        _one_of("codec", record["codec"], tuple(CODECS))
        return usual(**record)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _known(record: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in record:
        if key not in keys:
            raise UsageError(f"unknown key {key!r}; known are {', '.join(keys)}")


def _one_of(what: str, value: object, known: Sequence[object]) -> None:
    if type(value) is not type(known[0]) or value not in known:
        raise UsageError(f"{what} {value!r} is unknown; known are {', '.join(map(str, known))}")


# --- the built-in ones

PLAIN: Final = {"int8": "i8", "i8": "i8", "i4": "i4", "nf4": "nf4", "f16": "f16", "f32": "f32"}
MEASURED: Final = ("mixed", "small")  # found for each model by measuring it (build/allocate.py)


def builtin(name: str, *, rotate: bool = True, group: int = 0, act_group: int = 0) -> Recipe:
    """`int8` (or `i8`), `i4`, `nf4`, `f16`, `f32`: that codec throughout, rotated unless told otherwise.

    `group` is for i4, nf4 and int8, `act_group` for int8. Raises UsageError.
    """
    if name in MEASURED:
        raise UsageError(f"recipe {name} is found by measuring a model: make a pack with `ork convert --recipe {name}`")
    if name not in PLAIN:
        known = ", ".join((*PLAIN, *MEASURED))
        raise UsageError(f"recipe {name!r} is unknown; known are {known}, or name a TOML file, ./x.toml")
    codec = PLAIN[name]
    suffix = (f"-g{group}" if group else "") + (f"-a{act_group}" if act_group else "")
    recipe = Recipe(("int8" if codec == "i8" else codec) + suffix, usual(codec, group, act_group=act_group))
    return recipe if rotate else recipe.rotated("none")


def by_name_or_file(text: str, *, group: int = 0, act_group: int = 0) -> Recipe:
    """The built-in recipe of a name, or that of a TOML file: whatever has a dot or a slash. Raises UsageError."""
    if not re.search(r"[./\\]", text):
        return builtin(text, group=group, act_group=act_group)
    if group or act_group:
        raise UsageError("--group and --act-group go with a codec by name; a recipe file has its own")
    return from_toml(Path(text))


def tensor_type(text: str) -> tuple[str, Choice]:
    """The rule of 'PATTERN=CODEC' or 'PATTERN=CODEC:GROUP', as `--tensor-type` takes it. Raises UsageError."""
    pattern, equals, spec = text.rpartition("=")
    codec, colon, group = spec.partition(":")
    if not pattern or not equals or (colon and not re.fullmatch("[0-9]{1,3}", group)):
        raise UsageError(f"--tensor-type {text!r}: write it like 'attn_.*=i8' or 'ffn_down=nf4:32'")
    try:
        _pattern(pattern)
        return pattern, usual(codec, int(group or 0))
    except UsageError as error:
        raise UsageError(f"--tensor-type {text!r}: {error}") from None
