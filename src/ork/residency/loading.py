"""Reading slices into slots, with errors that are one clear line and hold no slot's memory."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ork.devices.base import Device, Handle, Slot
from ork.errors import OrkError, StorageError

if TYPE_CHECKING:
    from ork.residency.stream import SliceSource, TensorSpec

Loaded = tuple[Handle, int]  # and the bytes that were read


def load_slice(source: SliceSource, device: Device, tensor: TensorSpec, index: int, slot: Slot) -> Loaded:
    """Reads a slice into a slot: its handle and bytes. Raises the source's and the device's errors, one clear line."""
    try:
        nbytes = source.read_into(tensor.name, index, device.room(tensor.slices[index], slot))
        return device.fill(tensor.slices[index], slot, nbytes), nbytes
    except OrkError as error:
        release_frames(error)
        raise
    except (OSError, MemoryError) as error:
        text = f"slice {index} of {tensor.name} could not be loaded: {error.__class__.__name__}: {error}"
        release_frames(error)
        raise StorageError(text) from None


def load_run(
    source: SliceSource, device: Device, items: Sequence[tuple[TensorSpec, int, Slot]], *, cached: bool = False
) -> tuple[list[Handle], int]:
    """Neighbours in the file, as an expert's slices are: by one read where the device takes blobs as they are; or any
    that are in memory already, copied by all threads if `cached` says so. Their handles and bytes in all; raises as
    `load_slice`."""
    rooms = []
    for tensor, index, slot in items:
        room = device.room(tensor.slices[index], slot)
        if not _is_of(room, slot):
            del room
            loaded = [load_slice(source, device, *item) for item in items]
            return [handle for handle, _ in loaded], sum(nbytes for _, nbytes in loaded)
        rooms.append((tensor.name, index, room))
    try:
        sizes = source.copy(rooms) if cached else source.read_run(rooms)
        handles = [device.fill(t.slices[index], slot, nbytes) for (t, index, slot), nbytes in zip(items, sizes)]
        return handles, sum(sizes)
    except OrkError as error:
        rooms.clear()
        release_frames(error)
        raise
    except (OSError, MemoryError) as error:
        text = f"slices from {items[0][0].name} on could not be loaded: {error.__class__.__name__}: {error}"
        rooms.clear()
        release_frames(error)
        raise StorageError(text) from None


def as_stored(device: Device, tensor: TensorSpec, index: int, slot: Slot) -> bool:
    """Whether the device takes a slice as it is read, into the slot's own memory."""
    return _is_of(device.room(tensor.slices[index], slot), slot)


def _is_of(room: npt.NDArray[np.uint8], slot: Slot) -> bool:
    return room is slot.memory or room.ctypes.data == slot.memory.ctypes.data


def load_slices(source: SliceSource, device: Device, items: Sequence[tuple[TensorSpec, int, Slot]]) -> list[Loaded]:
    """The same for many, by as many threads as the device computes with: reading and hashing leave the interpreter."""
    for name in dict.fromkeys(tensor.name for tensor, _, _ in items):
        source.spec(name)
    with ThreadPoolExecutor(device.threads, thread_name_prefix="ork-loader") as pool:
        jobs = [pool.submit(load_slice, source, device, *item) for item in items]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def release_frames(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold: a slot cannot be freed while an array of its memory is alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
