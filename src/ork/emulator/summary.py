"""What an emulated board has to say at the end: what ran, which rules were broken, what was left behind."""

from __future__ import annotations

from ork.emulator.kernel import EmulatedKernel


def summary(kernel: EmulatedKernel) -> str:
    """One line for standard error."""
    stats, report = kernel.stats, kernel.report
    parts = [
        f"{stats.submits} submits, {stats.programs} programs, {stats.timeouts} time-outs, {stats.resets} resets, "
        f"{kernel.clock_ns / 1e9:.3f} s simulated"
    ]
    if kernel.faults is not None:
        parts.append(f"faults: {kernel.faults}")
    if report.counts:
        parts.append("rules: " + ", ".join(f"{rule} {count}" for rule, count in sorted(report.counts.items())))
    left = ", ".join(f"{name} {count}" for name, count in leaks(kernel).items())
    parts.append(f"left behind: {left or 'nothing'}")
    return "; ".join(parts)


def leaks(kernel: EmulatedKernel) -> dict[str, int]:
    """What is still held, by name; empty after a program that gave everything back."""
    stats = kernel.stats
    held = {
        "buffers": stats.live_buffers,
        "bytes": stats.live_bytes,
        "descriptors": stats.live_files,
        "mappings": stats.live_maps,
        "domain references": kernel.switch_references,
        "bytes of address space": stats.leaked_bytes,
    }
    return {name: count for name, count in held.items() if count}
