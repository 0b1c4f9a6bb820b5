"""What `bind.cpp` exports, for the type checker; sections as there."""

import numpy as np
import numpy.typing as npt

# --- sources ---
tensor_types: tuple[tuple[int, str, int, int], ...]  # (enum ggml_type, name, elements in a block, bytes of a block)

def dequantise(
    type: int, src: memoryview | npt.NDArray[np.uint8], out: npt.NDArray[np.float32], first: int = 0
) -> None:
    """Expand blocks [first, first + out.size / block) of `src` into the flat `out`. ValueError outside of `src`."""

def scan_strings(
    src: memoryview | npt.NDArray[np.uint8],
    offset: int,
    starts: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> tuple[int, int]:
    """Walk the u64-length-prefixed strings from `offset`, as many as `starts` has room for; fill both arrays.

    Returns (their count, offset behind the last), or (index of the first that does not lie inside `src`, its offset).
    """

# --- end of sources ---
