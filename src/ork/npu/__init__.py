"""What the NPU is and how it is driven: limits, instruction set, kernel interface, programs, driver.

These modules raise and never fall back; `ork.devices.npu` decides what to do about a failure.
"""
