"""`ork emu check`: the chip's rules on a dump of programs, by name, without running it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.cli.npu import read_dump, words_of
from ork.errors import SourceError

if TYPE_CHECKING:
    from ork.emulator.report import Violation
    from ork.emulator.review import Descriptor


def add(tool: argparse.ArgumentParser) -> None:
    tool.description = (
        "Names every rule that the programs of a dump break: streams, links, sizes, the buffer split, limits. What "
        "depends on memory or values is only found by running them. Exit code 1 if a rule of severity error is broken."
    )
    tool.add_argument(
        "file", metavar="FILE", help="little-endian 64-bit words, or a captured JSON; - is standard input"
    )
    tool.add_argument("--json", action="store_true", help="a JSON array instead of lines")


def run(args: argparse.Namespace) -> int:
    from ork.emulator.review import programs, review

    name, data = read_dump(args.file)
    words = words_of(name, data)
    tasks = _descriptors(name, data)
    try:
        found = review(words, tasks=tasks)
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from None
    if args.json:
        print(json.dumps([_plain(v) for v in found], indent=1))
    else:
        for violation in found:
            print(violation)
        count = len(programs(words))
        errors = sum(v.severity == "error" for v in found)
        print(f"{count} program{'s' * (count != 1)}, {errors} errors, {len(found) - errors} other findings")
    return int(any(v.severity == "error" for v in found))


def _plain(violation: Violation) -> dict[str, Any]:
    values = {name: v if isinstance(v, int | float | str) else str(v) for name, v in violation.values.items()}
    return {
        "rule": violation.rule,
        "severity": str(violation.severity),
        "program": violation.program,
        "register": violation.register,
        "values": values,
        "text": violation.text,
    }


def _descriptors(name: Path | str, data: bytes) -> list[Descriptor]:
    """The task entries of a captured JSON, if it has any."""
    from ork.emulator.review import Descriptor

    about: Any = json.loads(data) if data.lstrip()[:1] == b"{" else {}
    listed = about.get("tasks") or [about["task"]] if about.get("tasks") or about.get("task") else []
    if not isinstance(listed, list):
        raise SourceError(f'{name}: "tasks" is no list')
    return [
        Descriptor(_number(name, i, task, "regcfg_amount"), _number(name, i, task, "int_mask"))
        for i, task in enumerate(listed)
    ]


def _number(name: Path | str, index: int, task: Any, key: str) -> int | None:
    value = task.get(key) if isinstance(task, dict) else task
    if value is None:
        return None
    try:
        number = value if type(value) is int else int(value, 0)
        if 0 <= number < 1 << 32:
            return number
    except (TypeError, ValueError):
        pass
    raise SourceError(f"{name}: {key} of task {index} is {str(value)[:40]!r}, not a 32-bit number")
