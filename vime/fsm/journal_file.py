"""The trace's file: a line is one ``write``, rendered by structlog."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog

from vime.fsm.encode import encode
from vime.fsm.record import FIELDS, Record

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class JournalFile(FileIO):
    """Unbuffered, so that a line is one ``write``; never glues a line to a torn one."""

    def __init__(self, path: Path) -> None:
        """Open for appending, readable by its owner alone."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        super().__init__(os.open(path, flags, 0o600), "r+")
        info = os.fstat(self.fileno())
        self._torn = False
        if stat.S_ISREG(info.st_mode):
            if info.st_mode & 0o077 and info.st_uid == os.geteuid():
                os.fchmod(self.fileno(), 0o600)
            last = os.pread(self.fileno(), 1, info.st_size - 1) if info.st_size else b"\n"
            self._torn = last != b"\n"

    def write(self, line: ReadableBuffer, /) -> int:
        """Write one line with its end, in one system call.

        Raises:
            OSError: it failed, or not all of the line was written.
        """
        data = bytes(line)
        if self._torn:  # a crash or a full disk cut the line before this one
            data = b"\n" + data
        written = super().write(data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written", self.name)
        return written


class Journal(structlog.BoundLoggerBase):
    """The structlog logger of a trace: an event is a record, and has no level."""

    def append(self, record: Record) -> None:
        """Write one line.

        Raises:
            OSError: it is not in the file, or not all of it.
        """
        self._proxy_to_logger("msg", **{name: getattr(record, name) for name in FIELDS})


def journal(file: JournalFile) -> Journal:
    """The logger that writes into ``file``."""
    logger = structlog.wrap_logger(
        structlog.BytesLogger(file),
        processors=[structlog.processors.JSONRenderer(serializer=_render)],
        wrapper_class=Journal,
        context_class=dict,
    )
    return cast(Journal, logger.bind())


def _render(event: dict[str, Any], **_: Any) -> bytes:
    return encode(event)
