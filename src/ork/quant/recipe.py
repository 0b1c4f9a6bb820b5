"""Which codec each tensor gets: an ordered list of rules, the first that matches a tensor's name decides."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ork.errors import UsageError

CODECS = ("i8", "f32")  # what this version quantises to


@dataclass(frozen=True)
class Choice:
    """How one tensor is stored."""

    codec: str
    rotate: bool


@dataclass(frozen=True)
class Recipe:
    """`rules` are (regular expression, choice) pairs tried in order on the whole name; `default` is for the rest."""

    name: str
    default: Choice
    rules: tuple[tuple[str, Choice], ...] = field(default=())

    def choose(self, tensor: str) -> Choice:
        for pattern, choice in self.rules:
            if re.fullmatch(pattern, tensor):
                return choice
        return self.default

    def record(self) -> dict[str, Any]:
        """The recipe as a pack stores it."""
        return {
            "name": self.name,
            "default": {"codec": self.default.codec, "rotate": self.default.rotate},
            "rules": [{"match": p, "codec": c.codec, "rotate": c.rotate} for p, c in self.rules],
        }


def builtin(codec: str, *, rotate: bool = True) -> Recipe:
    """`i8`: int8 per channel, rotated unless told otherwise; `f32`: as the source has it."""
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is unknown; known are {', '.join(CODECS)}")
    return Recipe(codec, Choice(codec, rotate and codec != "f32"))
