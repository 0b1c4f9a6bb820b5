"""What a job reads and writes: a domain that remembers every page a core touches, as it was at the first touch."""

from __future__ import annotations

from typing import cast

from ork.emulator.iova import PAGE
from ork.emulator.memory import Buffer, Domain
from ork.emulator.pages import Bytes


class Watched:
    """Stands before a `Domain` while one job runs.

    `before` maps page numbers (device address / 4096) to their bytes before the job changed them, `written` are the
    pages that it may have changed, `buffers` those that it touched, by address.
    """

    def __init__(self, inner: Domain) -> None:
        self._inner = inner
        self.number = inner.number
        self.before: dict[int, bytes] = {}
        self.written: set[int] = set()
        self.buffers: dict[int, Buffer] = {}

    def as_domain(self) -> Domain:
        """For cores: every access of theirs goes through one of the methods below."""
        return cast(Domain, self)

    def after(self) -> dict[int, bytes]:
        """Written pages as they are now; those whose buffer is gone are left out."""
        return {page: data for page in sorted(self.written) if (data := self._page(page)) is not None}

    def _page(self, page: int) -> bytes | None:
        for buffer in self.buffers.values():
            offset = page * PAGE - buffer.iova
            if 0 <= offset < buffer.size:
                return buffer.dev[offset : offset + PAGE].tobytes()
        return None

    def _touch(self, iova: int, nbytes: int, *, write: bool) -> None:
        """All pages of the range, which is mapped."""
        at, end = iova, iova + max(nbytes, 1)
        while at < end:
            buffer, _ = self._inner.locate(at, 1)
            self.buffers[buffer.iova] = buffer
            stop = min(end, buffer.iova + buffer.size)
            for page in range(at // PAGE, -(-stop // PAGE)):
                if page not in self.before:
                    start = page * PAGE - buffer.iova
                    self.before[page] = buffer.dev[start : start + PAGE].tobytes()
            if write:
                self.written.update(range(at // PAGE, -(-stop // PAGE)))
            at = stop

    # --- the device's accesses: first the domain checks them, then they are noted, then they happen ---

    def locate(self, iova: int, nbytes: int) -> tuple[Buffer, int]:
        return self._inner.locate(iova, nbytes)

    def read(self, iova: int, nbytes: int) -> Bytes:
        found = self._inner.read(iova, nbytes)
        self._touch(iova, nbytes, write=False)
        return found

    def read_rows(self, iova: int, rows: int, row_bytes: int, pitch: int) -> Bytes:
        found = self._inner.read_rows(iova, rows, row_bytes, pitch)
        self._rows(iova, row_bytes, rows, pitch, write=False)
        return found

    def read_address(self, iova: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> int:
        found = self._inner.read_address(iova, row_bytes, rows, pitch)
        self._rows(iova, row_bytes, rows, pitch, write=False)
        return found

    def write_address(self, iova: int, row_bytes: int, rows: int = 1, pitch: int = 0) -> int:
        found = self._inner.write_address(iova, row_bytes, rows, pitch)
        self._rows(iova, row_bytes, rows, pitch, write=True)
        return found

    def write_view(self, iova: int, nbytes: int) -> Bytes:
        found = self._inner.write_view(iova, nbytes)
        self._touch(iova, nbytes, write=True)
        return found

    def write(self, iova: int, data: Bytes) -> None:
        self._inner.locate(iova, len(data))
        self._touch(iova, len(data), write=True)
        self._inner.write(iova, data)

    def _rows(self, iova: int, row_bytes: int, rows: int, pitch: int, *, write: bool) -> None:
        if pitch < PAGE:
            self._touch(iova, (rows - 1) * pitch + row_bytes, write=write)
            return
        for row in range(rows):
            self._touch(iova + row * pitch, row_bytes, write=write)
