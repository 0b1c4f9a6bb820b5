"""A convolution as a matmul: the windows of the features as rows, and kernels as the native kernels take them.

The chip stores a kernel group as block of 32 channels > kernel row > kernel column > kernel > channel. Read as a matrix
whose columns run over (block, row, column, channel), that is the order of a plain matmul's kernels: rows of windows in
this order need no repacking of the kernels, unless the last group or block is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ork.emulator import fetch
from ork.emulator.task import BLOCK, Task

Array = npt.NDArray[Any]

_TILE: Final = 32  # kernels in a tile of the native kernels
_CHUNK: Final = 1 << 20  # elements of windows at a time: they stay in a cache


def columns(task: Task) -> int:
    """Elements of a window, its channels padded to whole blocks."""
    return task.kernel_height * task.kernel_width * -(-task.channels // BLOCK) * BLOCK


def rows(task: Task, features: Array) -> Iterator[Array]:
    """The windows [pixels, columns] of successive output lines, from features [height, width, channels]."""
    kh, kw, (out_w, out_h) = task.kernel_height, task.kernel_width, task.core_out
    padded = pad(task, features)
    channels = -(-task.channels // BLOCK) * BLOCK
    if channels > task.channels:
        padded = np.concatenate([padded, np.zeros((*padded.shape[:2], channels - task.channels), padded.dtype)], axis=2)
    blocked = padded.reshape(*padded.shape[:2], -1, BLOCK)
    lines = max(_CHUNK // (out_w * kh * kw * channels), 1)
    for first in range(0, out_h, lines):
        count = min(lines, out_h - first)
        windows = np.empty((count, out_w, channels // BLOCK, kh, kw, BLOCK), features.dtype)
        for ky in range(kh):
            top = first * task.stride_y + ky * task.dilation_y
            for kx in range(kw):
                part = blocked[top :: task.stride_y, kx * task.dilation_x :: task.stride_x]
                windows[:, :, :, ky, kx] = part[:count, :out_w]
        yield windows.reshape(count * out_w, -1)


def pad(task: Task, features: Array) -> Array:
    """Features [lines, width, channels] with the padding around them that the windows reach."""
    (out_w, out_h), (lines, width, channels) = task.core_out, features.shape
    reach_x = max((out_w - 1) * task.stride_x + (task.kernel_width - 1) * task.dilation_x + 1, 1)
    reach_y = max((out_h - 1) * task.stride_y + (task.kernel_height - 1) * task.dilation_y + 1, 1)
    if (task.pad_left, task.pad_top, width, lines) == (0, 0, reach_x, reach_y):
        return features
    padded = np.full((reach_y, reach_x, channels), pad_value(task, features.dtype))
    # the part of the image that lies inside of the padded window
    inside_y, inside_x = min(lines, reach_y - task.pad_top), min(width, reach_x - task.pad_left)
    if inside_y > 0 and inside_x > 0:
        target = padded[task.pad_top :, task.pad_left :]
        target[:inside_y, :inside_x] = features[:inside_y, :inside_x]
    return padded


def pad_value(task: Task, dtype: np.dtype[Any]) -> Any:
    """PAD_CON1 in the precision of the data: its low bits."""
    return np.array([task.pad_value], "<u4").view(np.uint8)[: dtype.itemsize].view(dtype)[0]


def tiles(task: Task, raw: fetch.Bytes) -> Array:
    """int8 kernels as tiles [kernels / 32][columns / 32][32][32], short groups and blocks filled up with zeros."""
    if task.kernels % _TILE == 0 and task.channels % BLOCK == 0:
        return raw
    kernels = matrix(task, raw)
    whole = np.zeros((-(-task.kernels // _TILE) * _TILE, kernels.shape[1]), kernels.dtype)
    whole[: task.kernels] = kernels
    return np.ascontiguousarray(whole.reshape(-1, _TILE, whole.shape[1] // BLOCK, BLOCK).transpose(0, 2, 1, 3))


def matrix(task: Task, raw: fetch.Bytes) -> Array:
    """Kernels [kernels, columns]."""
    kernels = fetch.kernels(raw, task, 0, task.kernels)
    channels = -(-task.channels // BLOCK) * BLOCK
    if channels > task.channels:
        rest = np.zeros((*kernels.shape[:3], channels - task.channels), kernels.dtype)
        kernels = np.concatenate([kernels, rest], axis=3)
    blocked = kernels.reshape(*kernels.shape[:3], -1, BLOCK).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(blocked).reshape(len(kernels), -1)
