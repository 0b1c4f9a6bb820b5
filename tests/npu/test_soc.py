"""The limits of the chips, and that reading them costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ork.errors import UsageError
from ork.npu.soc import RK3576, RK3588, by_name


def test_the_buffer_is_384_kib_of_512_entry_banks() -> None:
    assert RK3588.cbuf_bytes == 384 * 1024
    assert RK3588.entries_per_bank == 512
    # a kernel group is 32 * K bytes: the largest K must fit the eleven banks that features leave
    assert 32 * RK3588.max_k <= 11 * RK3588.bank_bytes


def test_sixty_three_buffers_of_64_mib_fit_beside_page_zero() -> None:
    assert (RK3588.iova_bytes - RK3588.iova_reserved) // (64 << 20) == 63


def test_chips_are_found_in_any_case_and_say_whether_they_were_tried() -> None:
    assert by_name("rk3588") is RK3588
    assert RK3588.validated
    assert by_name("RK3576") is RK3576
    assert (RK3576.cores, RK3576.core_mask, RK3576.validated) == (2, 3, False)
    with pytest.raises(UsageError, match="RK3588, RK3576"):
        by_name("rk3399")


def test_limits_and_registers_load_without_numpy() -> None:
    code = "import sys, ork.npu, ork.npu.soc, ork.npu.registers; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
