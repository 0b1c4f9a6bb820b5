"""What a descriptor of the emulated kernel names: a DRM node, the dma-heap, or a dma-buf."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ork.emulator.memory import Buffer
from ork.emulator.pages import Pages


@dataclass(eq=False)
class DrmFile:
    """One open of the NPU's node. Handles are the file's own numbers for kernel objects, from 1, lowest first."""

    path: str
    handles: dict[int, Buffer] = field(default_factory=dict)
    by_object: dict[int, int] = field(default_factory=dict)  # obj_addr -> handle
    imports: dict[DmaBuf, int] = field(default_factory=dict)
    _released: list[int] = field(default_factory=list)
    _made: int = 0

    @property
    def render(self) -> bool:
        return "render" in self.path

    def next_handle(self) -> int:
        return self._released[0] if self._released else self._made + 1

    def enter(self, buffer: Buffer) -> int:
        """Give the object a handle and count the reference."""
        if self._released:
            handle = heapq.heappop(self._released)
        else:
            self._made += 1
            handle = self._made
        self.handles[handle] = buffer
        self.by_object[buffer.obj_addr] = handle
        buffer.refs += 1
        return handle

    def leave(self, handle: int) -> Buffer:
        """Take the handle back; the caller drops the reference."""
        buffer = self.handles.pop(handle)
        del self.by_object[buffer.obj_addr]
        self.imports = {source: number for source, number in self.imports.items() if number != handle}
        heapq.heappush(self._released, handle)
        return buffer


@dataclass(eq=False)
class OtherNode:
    """A DRM node of another driver: the display's."""

    path: str
    driver: str


@dataclass(eq=False)
class HeapFile:
    """A dma-heap. `cached`: whether the CPU caches its memory."""

    cached: bool = True


@dataclass(eq=False)
class DmaBuf:
    """Shareable pages: of the heap, or of a buffer that was exported (`origin`, whose reference it holds)."""

    pages: Pages
    origin: Buffer | None = None


File = DrmFile | OtherNode | HeapFile | DmaBuf
