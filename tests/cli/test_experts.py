"""`--experts`: where a mixture's experts are computed; the same text, with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ork.api import LoadedModel, load
from ork.devices.npu import NpuDevice
from tests.cli.conftest import Ork

MIXTURE = Path(__file__).parent.parent / "goldens" / "qwen3moe-gguf" / "model.gguf"
RUN = ("-p", "It is a truth", "-n", "6", "--temp", "0", "--json")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "hybrid"], "auto: "),
        (["--device", "hybrid", "--experts", "auto"], "auto: "),
        (["--device", "hybrid", "--experts", "cpu"], "experts on the CPU: asked for"),
        (["--device", "hybrid", "--experts", "npu"], "experts on the NPU: asked for"),
        (["--device", "emu", "--experts", "cpu"], "experts on the CPU: asked for"),
        (["--device", "emu"], "experts on the NPU, as all that emu gives it"),
    ],
)
def test_the_same_text_everywhere(ork: Ork, flags: list[str], said: str) -> None:
    want = json.loads(ork("run", MIXTURE, *RUN, "--device", "cpu")[1])
    code, out, _ = ork("run", MIXTURE, *RUN, *flags)
    about = json.loads(out)
    assert (code, about["text"]) == (0, want["text"])
    assert said in about["device_reason"]
    assert "experts" not in want["device_reason"]


def test_a_dense_model_has_none(ork: Ork, pack: Path) -> None:
    assert "experts" not in json.loads(ork("run", pack, "-p", "T", "--json", "--experts", "cpu")[1])["device_reason"]


def test_an_npu_that_is_not_there_is_told(ork: Ork) -> None:
    code, _, err = ork("run", MIXTURE, *RUN, "--device", "cpu", "--experts", "npu")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--experts npu: the device is the CPU" in err


def test_three_submits_a_group_of_projections() -> None:
    """Gate and up of all experts of a layer together, then down, whatever was routed where."""
    calls: list[int] = []

    def counted(model: LoadedModel) -> None:
        device = model.device
        assert isinstance(device, NpuDevice)
        run, submits = device.linear_experts, device.npu.counters.submits

        def linear_experts(*args: object) -> None:
            before = sum(submits)
            run(*args)  # type: ignore[arg-type]
            calls.append(sum(submits) - before)

        device.linear_experts = linear_experts  # type: ignore[method-assign]

    with load(MIXTURE, device="emu") as model:
        tokens = [i % model.model.config.vocab for i in range(60)]
        model.logits(tokens)  # new memory is warmed up
        counted(model)
        model.logits(tokens)
        assert len(calls) == 2 * len(model.stream.expert_layers)
        assert max(calls) <= 3
