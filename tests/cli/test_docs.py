"""README and docs name only commands and options that exist, and every command is in one of them."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ork.cli.main import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^|[`$ ])ork ((?:(?:emu|npu) )?[a-z][a-z-]*)([^\n`|]*)", re.MULTILINE)
OPTION = re.compile(r"(?<![^\s`(])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
ARROW = re.compile(r"--[\w ()]+-->")
OTHERS = {"--break"}  # of tests/clients, which docs/emulator.md runs


def commands(top: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, list[argparse.Action]]]:
    """Every subcommand with its options."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield from commands(sub, f"{name} {word}".strip())
    yield name, [a for a in top._actions if a.option_strings]


OPTIONS = {name: {o for a in actions for o in a.option_strings} for name, actions in commands(parser())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = ARROW.sub("", page.read_text())
    named = set(OPTION.findall(text))
    assert named <= set().union(*OPTIONS.values()) | OTHERS
    for command, rest in COMMAND.findall(text):
        own = rest.partition(" -- ")[0]
        assert command in OPTIONS, command
        assert set(OPTION.findall(own)) <= OPTIONS[command], f"ork {command}{rest}"


def test_every_command_is_in_a_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert not [name for name in OPTIONS if not re.search(rf"\bork {name}\b", text)]


@pytest.mark.parametrize(
    ("command", "actions"), list(commands(parser())), ids=lambda c: c if isinstance(c, str) else ""
)
def test_every_option_says_what_it_does(command: str, actions: list[argparse.Action]) -> None:
    assert not [a.option_strings for a in actions if not a.help and not a.choices]
