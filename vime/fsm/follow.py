"""Follows a trace that is being written: gives each record as soon as its line is whole."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from vime.fsm.read import TraceFile, TraceUnreadableError
from vime.fsm.record import Record

_CHUNK = 1 << 18


class Follower:
    """Reads on from where it was; when the file was replaced or cut, from its beginning.

    Args:
        path: a trace file or a run directory.

    Attributes:
        trace: the reader, with its problems.
        restarted: how often the file was replaced or cut.

    Raises:
        TraceUnreadableError: there is no trace to read at ``path``.
    """

    def __init__(self, path: Path | str) -> None:
        # A gap is not waited for: the writer has no reason to fill it.
        self.trace = TraceFile(path, window=0)
        self.restarted = 0
        self._file: BinaryIO = self._open()

    def _open(self) -> BinaryIO:
        try:
            return self.trace.path.open("rb")
        except OSError as error:
            raise TraceUnreadableError(f"{self.trace.path}: {error.strerror}") from None

    def poll(self) -> list[Record]:
        """The records that have been added since the last call; may be empty."""
        if self._was_replaced():
            self._file.close()
            self.trace = TraceFile(self.trace.path, window=0)
            self._file = self._open()
            self.restarted += 1
        records: list[Record] = []
        while chunk := self._file.read(_CHUNK):
            records.extend(self.trace.feed(chunk))
        return records

    def _was_replaced(self) -> bool:
        here = os.fstat(self._file.fileno())
        try:
            there = self.trace.path.stat()
        except FileNotFoundError:  # deleted, or about to be replaced: read on what is open
            return False
        same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        return not same or (self._file.seekable() and there.st_size < self._file.tell())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
