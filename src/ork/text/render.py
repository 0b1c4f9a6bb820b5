"""The renderer of chat templates: a program of its own, started by `chat.py`, that reads requests and writes replies.

A template comes with a model, from anywhere. Jinja's sandbox keeps it away from the system, but no check inside one
process stops `{{ [a] * 9 ** 9 }}`, nested loops that print nothing, or a list that holds itself a billion times over.
So the system does: this process may use so much memory (RLIMIT_AS) and so much processor time (ITIMER_PROF, whose
signal ends the process wherever it is).

One JSON object a line. Request: source, variables, now, seconds, most (characters). Reply: text, or kind and error.
It imports nothing but jinja2 and the standard library: its start is a part of the start of `ork run --chat`.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20  # bytes of address space; an idle renderer has about 40 MB


class Refused(Exception):
    """The template called raise_exception: these messages do not suit this model."""


class Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: plain JSON, not made safe for HTML."""
    options = {k: v for k, v in options.items() if k in ("separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise Refused(str(message)[:1000])


@lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControls, Generation])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    return env.from_string(source)


def render(source: str, variables: dict[str, Any], now: str, most: int) -> str:
    """`now` is an ISO date and time for strftime_now. Raises what the template raises; ValueError past `most`."""
    moment = datetime.datetime.fromisoformat(now)
    clock: Callable[[str], str] = moment.strftime
    parts, size = [], 0
    for part in _compiled(source).generate(strftime_now=clock, **variables):
        size += len(part)
        if size > most:
            raise ValueError(f"writes more than {most} characters")
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(request["source"], request["variables"], request["now"], request["most"])}
    except Refused as error:
        return {"kind": "refused", "error": str(error)}
    except MemoryError:
        return {"kind": "limit", "error": f"needs more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"kind": "limit", "error": "is nested too deeply"}
    except TemplateSyntaxError as error:
        return {"kind": "broken", "error": f"line {error.lineno}: {error.message}"}
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return {"kind": "broken", "error": f"{type(error).__name__}: {error}"[:1000]}


def serve() -> None:
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
