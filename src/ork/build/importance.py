"""How much each input of each weight matters: the mean square of what a text puts there (llama.cpp's "imatrix").

The calibration text that comes with ork is the beginning of "Botchan" by Natsume Soseki in Yasotaro Morri's
translation of 1918, from Project Gutenberg (public domain in the USA), without chapter headings and line breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ork.build.convert import DEFAULT_MAX_RAM
from ork.build.layerwise import DAMAGED, I32, Layers
from ork.engine.kvcache import BLOCK
from ork.errors import OrkError, UsageError
from ork.ops import Array, Weight
from ork.quant.imatrix import Imatrix

CALIBRATION: Final = Path(__file__).with_name("calibration.txt")
HEAD_ROWS: Final = 64  # of a chunk that reach the head
STATE_BYTES: Final = 512 << 20  # hidden rows between two layers; a longer text goes through the layers in turns
FIXED_BYTES: Final = 96 << 20  # what is there whatever the model

F32 = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]  # (chunks x layers done, in all)


def calibration_text() -> str:
    return CALIBRATION.read_text(encoding="utf-8")


class Sums:
    """Sums of squares of what weights read; an observer of `Ops.linear`."""

    def __init__(self) -> None:
        self.squares: dict[str, npt.NDArray[np.float64]] = {}
        self.rows: dict[str, int] = {}

    def __call__(self, weights: Sequence[Weight], x: Array) -> None:
        """Adds rows x [M, K] that all of `weights` read."""
        with np.errstate(over="ignore", invalid="ignore"):  # `_stacked` finds it
            squares = np.square(x.numpy(), dtype=np.float64).sum(axis=0)
        for name in [w.tensor.name for w in weights]:
            self.squares[name] = self.squares.get(name, 0.0) + squares
            self.rows[name] = self.rows.get(name, 0) + x.rows


def collect(
    layers: Layers,
    tokens: I32,
    *,
    dataset: str = "",
    max_ram: int = DEFAULT_MAX_RAM,
    progress: Progress | None = None,
) -> Imatrix:
    """The importance of every input over chunks `tokens` [C, T], each a sequence of its own.

    All rows go through the layers, HEAD_ROWS of each chunk, spread evenly, to the head, whose products nobody needs.
    Holds a layer of a source in f32, what one chunk makes of it, and hidden rows of as many chunks as `max_ram` bytes
    have room for. Raises UsageError if that is none, OrkError where the text brings inputs that are not finite.
    """
    model, ops = layers.model, layers.ops
    count, length = tokens.shape
    depth = model.config.layers
    sums = Sums()
    wanted = np.unique(np.linspace(0, length - 1, min(HEAD_ROWS, length)).astype(np.int32))
    turn = _chunks_within(layers, length, max_ram)
    done = 0
    for start in range(0, count, turn):
        states = [model.begin(layers.rows(chunk[None], wanted)) for chunk in tokens[start : start + turn]]
        for i in range(depth):
            layers.hold(i)
            ops.observer = sums
            for j, state in enumerate(states):
                states[j] = model.layer(i, state)
                done += 1
                if progress:
                    progress(done, count * depth)
            ops.observer = None
            layers.drop(i)
        ops.observer = sums
        for state in states:
            model.end(state)
        ops.observer = None
    squares, rows = _stacked(layers, sums)
    return Imatrix(squares, rows, (dataset,) if dataset else (), count, length)


def _chunks_within(layers: Layers, length: int, max_ram: int) -> int:
    """Chunks of `length` tokens whose hidden rows are between two layers at a time. Raises UsageError if there is room
    for none."""
    c, shapes = layers.model.config, layers.shapes
    used = c.experts.used if c.experts else 0

    def row_bytes(layer: int) -> int:
        """Of a row's inputs and outputs, those of all the experts that it goes to among them."""
        times = {name: used * name.endswith("#0") if "#" in name else 1 for name in layers.names(layer)}
        return sum(4 * n * sum(shapes[name]) for name, n in times.items())

    cache = 2 * 4 * c.attention_layers * c.kv_heads * c.head_dim * (length + BLOCK)
    squares = 8 * max(K for _, K in shapes.values()) * length * max(used, 1)
    logits = 4 * shapes[layers.head][0] * min(HEAD_ROWS, length)
    rows = max(length * max(map(row_bytes, range(c.layers))) + squares, logits)
    need = FIXED_BYTES + max(map(layers.held_bytes, range(c.layers))) + cache + rows
    state = 4 * length * c.width
    if max_ram < need + state:
        raise UsageError(
            f"--max-ram {max_ram >> 20} MiB is too little: chunks of {length} tokens of this model need "
            f"{(need + state >> 20) + 1} MiB"
        )
    return max(1, min(STATE_BYTES, max_ram - need) // state)


def _stacked(layers: Layers, sums: Sums) -> tuple[dict[str, F32], dict[str, F32]]:
    """Squares [E, K] and rows [E] by tensor; of an expert that no row went to, zeros. Raises OrkError for inputs that
    are not finite, or whose squares are not."""
    stacks: dict[str, list[str]] = {}
    for name in layers.shapes:
        if name in sums.squares or "#" in name:
            stacks.setdefault(name.partition("#")[0], []).append(name)
    with np.errstate(over="ignore"):  # found in what follows
        squares = {
            stack: np.stack([sums.squares.get(n, np.zeros(layers.shapes[n][1])) for n in names]).astype(np.float32)
            for stack, names in stacks.items()
        }
    for stack, values in squares.items():
        if not np.isfinite(values).all():
            raise OrkError(f"tensor {stack}: its inputs' squares on this text are not finite; {DAMAGED}")
    rows = {stack: np.array([sums.rows.get(n, 0) for n in names], np.float32) for stack, names in stacks.items()}
    return squares, rows
