"""The limits of each chip as data, so that no other module holds a number about the hardware.

Grades of a figure: *manual* (the chip's reference manual), *kernel* (the vendor driver 0.9.8 does or defines it),
*measured* (published results on boards), *derived* (follows from those), *unproven* (nobody has shown it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ork.errors import UsageError


@dataclass(frozen=True)
class Soc:
    """One chip. Sizes in bytes, `*_ms` in milliseconds; a limit is the largest value that is allowed."""

    name: str
    validated: bool  # False: inherited from another chip, tried on no board of this one

    # The cores (kernel: core_mask above this is EINVAL).
    cores: int = 3
    core_mask: int = 7

    # The convolution buffer, shared by features and weights (manual; the count of 12 is what captures show).
    cbuf_banks: int = 12
    bank_bytes: int = 32768
    entry_bytes: int = 64
    atom_bytes: int = 16  # the unit of every feature and output address, and the alignment of every base

    # Sizes of one program.
    max_n: int = 8192  # 13-bit channel fields; N = 16384 is silently wrong (measured)
    max_k: int = 10752  # largest K of a validated program (measured); the 11264 that fits 11 banks is unproven
    max_m_field: int = 2047  # the input height has 11 bits (manual)
    max_out_field: int = 8192  # output width and height have 13 bits, stored minus one (manual)
    max_sdp_rows: int = 8176  # rows of an element-wise program: 8184 hangs in int8 (measured)
    weight_tile_bytes: int = 1024  # [G kernels][32 channels] in every precision (derived)

    # Tasks and chains.
    task_limit: int = 4095  # tasks of one hardware submit: 12 bits (kernel); longer lists are cut by the kernel
    subcores: int = 5  # entries of rknpu_submit.subcore_task (kernel)
    max_interrupt: int = 0x1FFFF  # mask and clear registers have 17 bits (manual)

    # The IOMMU.
    domains: int = 16  # kernel; published programs used 8 in practice
    iova_bytes: int = 1 << 32  # per domain (kernel)
    iova_reserved: int = 4096  # page 0 is never handed out, hence 63 buffers of 64 MiB fit (measured)
    page: int = 4096
    domain_wait_ms: int = 6000  # a switch waits so long for jobs of another domain, then EINVAL (kernel)

    # On-chip SRAM that MEM_CREATE can ask for, where the kernel is built with it (kernel: 956 KiB).
    sram_bytes: int = 956 * 1024

    # Imports of foreign buffers (measured; what lies between "ok" and "fail" is unproven).
    import_ok_bytes: int = 16 << 20
    import_fail_bytes: int = 64 << 20
    chain_imports_ok: int = 6
    chain_imports_fail: int = 19

    # Time.
    timeout_ms: int = 6000  # what the vendor's programs put into a submit
    reset_ms: int = 105  # a soft reset with its re-warming (measured)

    # What GET_DRV_VERSION and GET_HW_VERSION answer (kernel).
    drv_version: int = 908
    hw_version: int = 0x46495245

    @property
    def cbuf_bytes(self) -> int:
        return self.cbuf_banks * self.bank_bytes

    @property
    def entries_per_bank(self) -> int:
        return self.bank_bytes // self.entry_bytes


RK3588 = Soc("RK3588", validated=True)

# Two cores and mask 3 are in the vendor driver's table; everything else is assumed to be as on RK3588.
RK3576 = replace(RK3588, name="RK3576", validated=False, cores=2, core_mask=3)

SOCS = {soc.name: soc for soc in (RK3588, RK3576)}


def by_name(name: str) -> Soc:
    """The chip of that name, in any case. Raises UsageError for a name not in `SOCS`."""
    try:
        return SOCS[name.upper()]
    except KeyError:
        raise UsageError(f"chip {name!r} is not known: use one of {', '.join(SOCS)}") from None
