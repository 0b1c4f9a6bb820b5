"""The NPU in software, behind the ioctls of the vendor's kernel driver.

`kernel.EmulatedKernel` is the door; memory and its two views, the jobs of the three cores, and the cores themselves are
behind it.
"""
