"""Digests parts of a file, however small they are, through one buffer."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self

from vime.eval.contracts import Content
from vime.eval.snapshot.files import open_regular
from vime.eval.snapshot.inspection import Inspection

CHUNK_BYTES = 16 << 20
"""The size of a buffer that is worth its system calls."""


def digest_of(path: Path) -> str:
    """Hexadecimal BLAKE3 of a whole file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or became shorter meanwhile.
    """
    with mmap.mmap(-1, CHUNK_BYTES) as buffer, Pages(path, buffer) as pages:
        return pages.inspect(0, pages.size).digest


class Pages:
    """A file that is read in large pieces, each of which may hold many small tensors.

    Args:
        path: a regular file.
        buffer: holds one piece.

    Attributes:
        size: of the file, in bytes.

    Raises:
        ValueError: it is no regular file.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._file = open_regular(path)
        self._name = path.name
        self._view = memoryview(buffer)
        self._start = self._end = 0
        self.size = os.fstat(self._file.fileno()).st_size

    def inspect(self, start: int, end: int, dtype: str | None = None) -> Content:
        """Look at the bytes from ``start`` to ``end``; see :class:`Inspection` for ``dtype``."""
        inspection = Inspection(dtype)
        while start < end:
            if not self._start <= start < self._end:
                self._load(start)
            stop = min(end, self._end)
            with self._view[start - self._start : stop - self._start] as piece:
                inspection.look(piece)
            start = stop
        return inspection.content

    def _load(self, position: int) -> None:
        count = os.preadv(self._file.fileno(), [self._view], position)
        if not count:
            raise ValueError(f"{self._name}: it became shorter while it was read")
        self._start, self._end = position, position + count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.release()
        self._file.close()
