from __future__ import annotations

import datetime
import os
import signal
import threading
from typing import Any

import pytest

from ork.errors import SourceError, UsageError
from ork.text import chat
from ork.text.chat import BUILTIN, ChatTemplate

# As SmolLM2-135M-Instruct (Apache-2.0) and gemma-2-2b-it carry them.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
USER = {"role": "user", "content": "Hi é 🙂"}
ANSWER = {"role": "assistant", "content": " Yes. "}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (
            SMOLLM2,
            [USER],
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi é 🙂<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            SMOLLM2,
            [SYSTEM, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi é 🙂<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            GEMMA2,
            [USER, ANSWER, USER],
            "<B><start_of_turn>user\nHi é 🙂<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
            "<start_of_turn>user\nHi é 🙂<end_of_turn>\n<start_of_turn>model\n",
        ),
        (BUILTIN["chatml"], [USER], "<|im_start|>user\nHi é 🙂<|im_end|>\n<|im_start|>assistant\n"),
        (
            BUILTIN["gemma"],
            [SYSTEM, USER],
            "<B><start_of_turn>user\nBe brief.\n\nHi é 🙂<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            BUILTIN["llama3"],
            [USER, ANSWER],
            "<B><|start_header_id|>user<|end_header_id|>\n\nHi é 🙂<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_conversations_read_as_the_models_were_trained(source: str, messages: list[Any], text: str) -> None:
    assert ChatTemplate(source, "<B>", "<E>").render(messages) == text


def test_without_the_prompt_of_the_answer() -> None:
    assert ChatTemplate(BUILTIN["chatml"]).render([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\nend", "  Hi é 🙂\nend"),  # blocks leave no blanks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': 'é<', 'b': [1]} | tojson }}", '{"a": "é<", "b": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "09 Mar 2024"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi é 🙂"),
        ("{{ tools is none }}{{ documents is none }}{{ deep }}", "TrueTrue7"),
    ],
)
def test_what_templates_may_count_on(source: str, text: str) -> None:
    now = datetime.datetime(2024, 3, 9)
    assert ChatTemplate(source).render([USER], now=now, deep=7) == text


def test_tools_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    assert ChatTemplate("{{ tools[0].function.name }}").render([USER], tools=[tool]) == "look"


def test_a_model_without_a_template_names_the_built_in_ones() -> None:
    with pytest.raises(UsageError, match=r"no chat template.*chatml, gemma, llama3"):
        ChatTemplate.of({})
    with pytest.raises(UsageError, match=r"'nix'.*chatml"):
        ChatTemplate.of({}, name="nix")
    assert ChatTemplate.of({}, name="chatml").source == BUILTIN["chatml"]
    assert ChatTemplate.of({"tokenizer.chat_template": GEMMA2}).source == GEMMA2


def test_what_a_template_refuses_is_the_users_to_change() -> None:
    with pytest.raises(UsageError, match="System role not supported"):
        ChatTemplate(GEMMA2).render([SYSTEM])
    with pytest.raises(UsageError, match="plain data"):
        ChatTemplate(GEMMA2).render([{"role": "user", "content": object()}])


DEEP = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "runs for more than"),
        ("{{ 9 ** (9 ** 9) }}", "runs for more than|MiB of memory"),
        (DEEP + "{{ ns.a }}", "runs for more than|MiB of memory"),
        ("{{ 'a' * 10 ** 10 }}", "MiB of memory"),
        ("{{ 'a'.ljust(10 ** 10) }}", "MiB of memory"),
        (
            "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
            "MiB of memory",
        ),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 16777216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ " + "(" * 9999, "nested too deeply|line 1"),
        ("{{ range(10 ** 9) }}", "range"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for x in", "line 1"),
        ("{{ nope.x }}", "undefined"),
        ("{{ 1 / 0 }}", "ZeroDivision"),
        ("{{ 'x' | nope }}", "nope"),
        ("x" * 300_000, "300000 characters"),
    ],
)
def test_bad_templates_end_in_one_clear_line(source: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if says.startswith("runs for"):  # for the others time must not run out first, however busy the machine is
        monkeypatch.setattr(chat, "SECONDS", 0.5)
    with pytest.raises(SourceError, match=f"(?i){says}") as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)
    assert "chatml" in str(caught.value)
    assert ChatTemplate(BUILTIN["chatml"]).render([USER]).startswith("<|im_start|>user")  # the next one is served


def test_a_renderer_that_died_is_replaced() -> None:
    template = ChatTemplate(BUILTIN["chatml"])
    text = template.render([USER])
    process = chat._RENDERER._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert template.render([USER]) == text
    assert chat._RENDERER._process is not process


def test_many_threads_share_one_renderer() -> None:
    wrong = []

    def work(n: int) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        wrong.extend(i for i in range(20) if template.render([{"content": f"{n}.{i}"}]) != f"{n}.{i}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
