"""int8 per output channel: scale = absmax / 127, code = round half to even, never -128."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ork import native
from ork.errors import SourceError


def quantise_rows(
    rows: npt.NDArray[np.float32], signs: npt.NDArray[np.int8] | None, block: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Codes int8 [n, K padded to 32] and scales f32 [n] of f32 rows [n, K], rotated first where signs are given.

    The same native call quantises activations. Raises SourceError where a row holds an infinity or NaN.
    """
    held = None if signs is None else native.Array.of(signs.astype(np.float32).reshape(1, -1))
    q = native.quantise(native.Array.of(np.ascontiguousarray(rows)), held, block)
    scales = q.scales().copy()
    bad = np.flatnonzero(np.isnan(scales))
    if bad.size:
        raise SourceError(f"row {bad[0]} holds a value that is not finite: the source is damaged or not a model")
    return q.codes().copy(), scales
