"""Chat templates: from messages to the one text that a chat model was trained on.

The model's own template is rendered by a small process (`render.py`) under limits of memory, time and output. It starts
when a `ChatTemplate` is made, so that it is ready when the model is, and serves all templates of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ork.errors import SourceError, UsageError

MOST_SOURCE: Final = 256 << 10  # characters of a template; the longest known has 17,000
MOST_OUTPUT: Final = 16 << 20  # characters of a rendered chat
SECONDS: Final = 5.0  # of processor time for one rendering

# Templates of our own, for models that come without one; who uses one has to name it.
BUILTIN: Final = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% set ns = namespace(system='') %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% else %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.system }}"
        "{{ m.content | trim + '<end_of_turn>\n' }}{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}


class ChatTemplate:
    """`source` is a Jinja template as models carry it; `bos` and `eos` are the texts of those tokens ("" for none)."""

    def __init__(self, source: str, bos: str = "", eos: str = ""):
        if len(source) > MOST_SOURCE:
            raise SourceError(
                f"the model's chat template has {len(source)} characters, more than {MOST_SOURCE}; "
                f"choose a built-in one: {', '.join(BUILTIN)}"
            )
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        _RENDERER.start()

    @classmethod
    def of(cls, metadata: Mapping[str, Any], bos: str = "", eos: str = "", name: str | None = None) -> ChatTemplate:
        """The model's own template (`tokenizer.chat_template`), or the built-in one called `name`.

        Raises UsageError for an unknown name, and for a model without a template if no name is given.
        """
        if name is not None:
            if name not in BUILTIN:
                raise UsageError(f"no chat template is called {name!r}; the built-in ones are {', '.join(BUILTIN)}")
            return cls(BUILTIN[name], bos, eos)
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str) or not source:
            raise UsageError(
                "the model has no chat template (it may not be made for chat); "
                f"choose a built-in one: {', '.join(BUILTIN)}"
            )
        return cls(source, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> str:
        """The text to encode with special=True. `messages` are {"role": ..., "content": ...} and what else the template
        reads; `now` is the template's clock (default: the system's); `variables` are further names it may read.

        Raises UsageError where the template refuses the messages, SourceError where it is broken or breaks a limit.
        """
        given = {
            **self._tokens,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        moment = now or datetime.datetime.now()
        request = {
            "source": self.source,
            "variables": given,
            "now": moment.isoformat(),
            "seconds": SECONDS,
            "most": MOST_OUTPUT,
        }
        try:
            line = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the messages are not plain data: {error}") from None
        reply = _RENDERER.ask(line)
        if "text" in reply:
            return reply["text"]
        if reply["kind"] == "refused":
            raise UsageError(f"the model's chat template refuses these messages: {reply['error']}")
        what = reply["error"] if reply["kind"] == "limit" else f"fails: {reply['error']}"
        raise SourceError(f"the model's chat template {what}; choose a built-in one: {', '.join(BUILTIN)}")


class _Renderer:
    """The rendering process: started early, started again after a template that had to be stopped."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(self) -> None:
        with self._lock:
            self._running()

    def ask(self, line: bytes) -> dict[str, str]:
        with self._lock:
            code = 0
            for _ in range(2):  # a process that something else has ended is replaced once
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    process.stdin.write(line + b"\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except BrokenPipeError:
                    answer = b""
                if answer.endswith(b"\n"):
                    reply: dict[str, str] = json.loads(answer)
                    return reply
                code = self._end(process)
                if code == -signal.SIGPROF:
                    return {"kind": "limit", "error": f"runs for more than {SECONDS:g} s"}
            return {"kind": "limit", "error": f"ends its renderer (status {code}; is jinja2 installed?)"}

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # The child gets this process's import path, and nothing of its environment, terminal or signals.
            boot = (
                "import json,runpy,sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2])['serve']()"
            )
            path = json.dumps([p for p in sys.path if p])
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", boot, path, str(Path(__file__).with_name("render.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        self._process = None
        with contextlib.suppress(BrokenPipeError):
            process.communicate()  # closes its input, which ends an idle one
        return process.wait()


_RENDERER = _Renderer()
