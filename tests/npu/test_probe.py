"""`ork npu probe` on the emulated kernels: the published findings come out, and a defect would be seen."""

from __future__ import annotations

import pytest

from ork.cli.main import main
from ork.emulator.kernel import EmulatedKernel
from ork.npu import probe
from ork.npu.driver import Npu
from tests.npu.fake_kernel import FakeKernel


def tables(name: str, profile: str = "stock") -> list[probe.Table]:
    kernel = EmulatedKernel(views="sampled", profile=profile)
    found = list(probe.run(name, kernel))
    assert kernel.stats.live_buffers == kernel.stats.live_files == kernel.stats.live_maps == 0
    return found


def test_63_buffers_of_64_mib_fit_a_domain() -> None:
    (table,) = tables("dma")
    assert table.rows == (
        ("yes", "63", "4,227,858,432", "errno 14 (EFAULT)"),
        ("no", "63", "4,227,858,432", "errno 14 (EFAULT)"),
    )


def test_freeing_gives_address_space_back() -> None:
    (table,) = tables("stream")
    assert [row[2] for row in table.rows] == ["63", "32"] * 3
    assert table.finding == "freeing gives the address space back"


def test_lost_address_space_would_be_seen() -> None:
    kernel = FakeKernel(room=64 << 20)

    def shrinking(arg: object) -> None:
        kernel.room -= 1 << 19
        type(kernel)._destroy(kernel, arg)

    kernel._destroy = shrinking  # type: ignore[method-assign]
    with Npu.open(kernel) as npu:
        (table,) = probe.stream(npu, size=4 << 20)
    assert table.finding.startswith("address space is lost: [16,")


def test_a_reloaded_weight_is_the_packed_one() -> None:
    (table,) = tables("persist")
    assert len({row[2] for row in table.rows}) == 3
    assert all(row[3:] == ("yes", "yes") for row in table.rows)


def test_a_weight_that_computes_something_else_would_be_seen() -> None:
    kernel = FakeKernel()  # computes nothing
    with Npu.open(kernel) as npu:
        (table,) = probe.persist(npu, K=64, N=64)
    assert {row[3:] for row in table.rows} == {("yes", "NO")}
    assert "NOT" in table.finding


def test_imports_break_where_they_were_measured_to() -> None:
    sizes, counts, leak = tables("import")
    assert dict(sizes.rows)["16 MiB"] == "works"
    assert dict(sizes.rows)["64 MiB"] == "errno 12 (ENOMEM)"
    assert dict(counts.rows)["6"] == "works"
    assert "errno 110" in dict(counts.rows)["19"]
    assert [row[2] for row in leak.rows] == ["back", "lost"]
    assert [row[2] for row in tables("import", "patched")[2].rows] == ["back", "back"]


def test_everything_of_the_output_side_is_right() -> None:
    (table,) = tables("vector")
    assert table.finding == "all results are right"
    assert {row[0] for row in table.rows} >= {"add", "mul", "silu", "gelu", "exp", "rsqrt", "matmul + silu"}


def test_wrong_results_of_the_output_side_would_be_seen() -> None:
    kernel = FakeKernel()
    kernel.finish = lambda run: None  # type: ignore[method-assign]  # computes nothing
    with Npu.open(kernel) as npu:
        (table,) = probe.element_wise(npu)
    assert table.finding.startswith("WRONG: add int8")


@pytest.mark.parametrize("what", ["dma", "stream", "persist", "import", "vector"])
def test_the_command_prints_the_tables(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["npu", "probe", what]) == 0
    out = capsys.readouterr().out
    findings = {"dma": "63 buffers", "stream": "back", "persist": "equals", "import": "16 MiB work"}
    assert (findings | {"vector": "all results are right"})[what] in out


def test_without_a_board_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    assert main(["npu", "probe", "dma", "--device", "rk3588"]) == 2
    assert "no DRM node" in capsys.readouterr().err
