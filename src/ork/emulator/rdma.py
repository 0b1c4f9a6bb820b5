"""What DPU_RDMA reads: the cube of a standalone operation (MRDMA) and the operands of BS, BN and EW.

In 16-byte atoms, with W, H the cube, s the surface (16 bytes of channels), all derived from captures and executed:

    MRDMA              atom(s, h, w) = base + s * (W * H + surf_notch) + h * (W + line_notch) + w
    ERDMA, per pixel   atom(s, h, w) = base + s * surf_stride + h * (W + ew_line_notch) + w
    ERDMA, per channel atom(s)       = base + s * surf_stride

BRDMA reads the operands that data_use names, interleaved by four channels: int32 (fp32) x 4 for the ALU, int16 x 4 for
CPEND (the weight zero points), int16 (fp16) x 4 for MUL. With the ALU operand alone that is a dense vector (executed);
several are laid out so on a sister chip and unproven on this one. NRDMA does the same for BN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import fetch
from ork.emulator.fetch import ATOM, WINDOW
from ork.emulator.memory import Domain, IommuFault
from ork.emulator.reader import ALU, CPEND, MUL, Reader
from ork.npu.isa import OperandMode, OperandSize, Precision

Array = npt.NDArray[Any]

MAIN_TYPES: Final[Mapping[int, str]] = {Precision.INT8: "<i1", Precision.INT16: "<i2", Precision.FP16: "<f2"}
_INTEGERS: Final = {OperandSize.BITS_8: "<i1", OperandSize.BITS_16: "<i2", OperandSize.BITS_32: "<i4"}
_FLOATS: Final = {OperandSize.BITS_16: "<f2", OperandSize.BITS_32: "<f4"}
_RUN: Final = 4  # channels that lie together in BRDMA's stream


class OperandFault(IommuFault):
    """An operand lies at an address that is not mapped; `register` holds it."""

    def __init__(self, fault: IommuFault, register: int) -> None:
        super().__init__(fault.iova, fault.nbytes, fault.domain)
        self.register = register


@contextmanager
def at_register(register: int) -> Iterator[None]:
    """Faults inside are those of the address in this register."""
    try:
        yield
    except IommuFault as fault:
        raise OperandFault(fault, register) from None


def main(domain: Domain, reader: Reader, base: int) -> Array:
    """The cube [pixels, channels] in the reader's precision. Raises IommuFault."""
    dtype = MAIN_TYPES[reader.precision]
    surface = ATOM * reader.pixels + reader.surf_notch
    line = ATOM * reader.width + reader.line_notch
    return _cube(domain, base, dtype, (reader.channels, reader.height, reader.width), surface, line)


def element(domain: Domain, reader: Reader, base: int, channels: int, *, floating: bool) -> Array:
    """EW's operand [pixels or 1, channels] as int64 or float32. Raises IommuFault."""
    how = reader.element
    assert how is not None
    dtype = (_FLOATS if floating else _INTEGERS)[OperandSize(how.size)]
    if how.mode == OperandMode.PER_PIXEL:
        stride = how.surf_stride or ATOM * reader.pixels + how.surf_notch
        line = ATOM * reader.width + how.line_notch
        raw = _cube(domain, base, dtype, (channels, reader.height, reader.width), stride, line)
    else:
        raw = _cube(domain, base, dtype, (channels, 1, 1), how.surf_stride or ATOM, ATOM)
    return raw.astype(np.float32 if floating else np.int64)


def _cube(
    domain: Domain, base: int, dtype: str, shape: tuple[int, int, int], surface_pitch: int, line_pitch: int
) -> Array:
    channels, height, width = shape
    per_atom = ATOM // np.dtype(dtype).itemsize
    surfaces = -(-channels // per_atom)
    s = np.arange(surfaces, dtype=np.int64)[:, None, None] * surface_pitch
    h = np.arange(height, dtype=np.int64)[None, :, None] * line_pitch
    w = np.arange(width, dtype=np.int64)[None, None, :] * ATOM
    atoms = fetch.gather(domain, base + s + h + w & WINDOW)
    pixels = np.ascontiguousarray(atoms.reshape(surfaces, -1, ATOM).transpose(1, 0, 2)).reshape(height * width, -1)
    return pixels.view(dtype)[:, :channels]


def vectors(domain: Domain, base: int, use: int, channels: int, *, floating: bool) -> dict[int, Array]:
    """The operands that `use` names, each [channels] as int64 or float32, by their bit. Raises IommuFault."""
    types = {ALU: "<f4" if floating else "<i4", CPEND: "<i2", MUL: "<f2" if floating else "<i2"}
    used = [(bit, dtype) for bit, dtype in types.items() if use & bit]
    if not used:
        return {}
    row = np.dtype([(str(bit), dtype, (_RUN,)) for bit, dtype in used])
    runs = -(-channels // _RUN)
    rows = domain.read(base, runs * row.itemsize).copy().view(row)
    wide = np.float32 if floating else np.int64
    return {bit: rows[str(bit)].reshape(-1)[:channels].astype(np.int64 if bit == CPEND else wide) for bit, _ in used}
