"""What the convolution buffer still holds of an earlier task, and which tasks may use it instead of fetching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ork.emulator.convolve import Places
from ork.emulator.task import Task


@dataclass(slots=True)
class Loaded:
    """One operand in the convolution buffer, as a task fetched it. `data` None: memory still holds the same."""

    task: Task
    places: Places
    data: npt.NDArray[Any] | None


def same_features(loaded: Loaded | None, task: Task, places: Places) -> bool:
    return loaded is not None and _feature_key(loaded.task, loaded.places) == _feature_key(task, places)


def same_weights(loaded: Loaded | None, task: Task, places: Places) -> bool:
    return loaded is not None and _weight_key(loaded.task, loaded.places) == _weight_key(task, places)


def _feature_key(task: Task, places: Places) -> tuple[object, ...]:
    geometry = (task.width, task.height, task.channels, task.group_mode, task.line_stride, task.surf_stride)
    return (places.features, task.precision, task.data_bank, task.image, task.conversion, *geometry)


def _weight_key(task: Task, places: Places) -> tuple[object, ...]:
    shape = (task.depthwise, task.kernels, task.kernel_width, task.kernel_height, task.channels)
    return (places.weights, task.precision, task.data_bank, task.weight_bank, *shape)
