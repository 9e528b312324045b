"""The trace: one JSON object a line for every transition, written before its effect begins.

It is the run's journal as well: one ``write`` system call a record on a file opened for
appending, so that ``kill -9`` can lose nothing that had begun, and tear the last line at most.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import orjson
import structlog

from vime.fsm.tables import table_hash

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a trace.

    Attributes:
        schema: the version of this record's form.
        table_hash: the rules under which it was written (:func:`vime.fsm.tables.table_hash`).
        run_id: the run; unique in the world.
        node: which writer of the run; ``driver`` on one machine.
        seq: 0, 1, 2 … without a gap for each node.
        machine: ``point``, ``engine`` or ``snapshot``.
        id: which one.
        attempt: 0 for the first life of the thing, then 1, 2 … (an engine's restarts).
        trigger, source, dest: the transition; ``dest == source`` when it was rejected.
        rejected: the table forbade it, and nothing changed.
        reason: why, as a short name.
        detail: further facts.
        cause_seq: the record of the same node that made this one happen.
        weight_version: the weights that the thing carries or awaits.
        mono_ns: monotonic clock in nanoseconds: differences have a meaning, values have none.
        wall_ns: nanoseconds since the epoch, for people.
    """

    schema: int
    table_hash: str
    run_id: str
    node: str
    seq: int
    machine: str
    id: str
    attempt: int
    trigger: str
    source: str
    dest: str
    rejected: bool
    reason: str | None
    detail: dict[str, Any] | None
    cause_seq: int | None
    weight_version: str | None
    mono_ns: int
    wall_ns: int


FIELDS = tuple(Record.__slots__)

Listener = Callable[[Record], None]


class _Journal(structlog.BoundLoggerBase):
    """The structlog logger of a trace: an event is a record, and has no level."""

    def append(self, record: Record) -> None:
        self._proxy_to_logger("msg", **{name: getattr(record, name) for name in FIELDS})


def _dumps(event: dict[str, Any], **_: Any) -> bytes:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS)


def _journal(file: FileIO) -> _Journal:
    logger = structlog.wrap_logger(
        structlog.BytesLogger(file),
        processors=[structlog.processors.JSONRenderer(serializer=_dumps)],
        wrapper_class=_Journal,
        context_class=dict,
    )
    return cast(_Journal, logger.bind())


def _open_journal(path: Path) -> FileIO:
    """Unbuffered, so that a record is one ``write``; readable by its owner alone."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "w")


class Trace:
    """Writes a trace file; safe to call from several threads.

    Args:
        path: the file; created with mode 0600, appended to when it exists. ``None`` keeps the
            records for the listeners only.
        run_id: see :class:`Record`.
        node: see :class:`Record`.
        first_seq: the first ``seq`` to give; above 0 when an older trace is continued.
        mono_ns, wall_ns: the clocks; tests on virtual time bring their own.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(
        self,
        path: Path | None,
        run_id: str,
        node: str = "driver",
        *,
        first_seq: int = 0,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.node = node
        self._next_seq = first_seq
        self._mono_ns = mono_ns
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._hash = table_hash()
        self._file = None if path is None else _open_journal(path)
        self._log = None if self._file is None else _journal(self._file)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with each later record, on the thread that wrote it."""
        self._listeners.append(listener)

    def write(
        self,
        *,
        machine: str,
        id: str,
        attempt: int,
        trigger: str,
        source: str,
        dest: str,
        rejected: bool,
        reason: str | None,
        detail: dict[str, Any] | None,
        cause_seq: int | None,
        weight_version: str | None,
    ) -> Record:
        """Append one record; it is in the file when this returns (not necessarily on the disk).

        Raises:
            OSError: the write failed (a full disk, say).
        """
        with self._lock:
            record = Record(
                SCHEMA,
                self._hash,
                self.run_id,
                self.node,
                self._next_seq,
                machine,
                id,
                attempt,
                trigger,
                source,
                dest,
                rejected,
                reason,
                detail,
                cause_seq,
                weight_version,
                self._mono_ns(),
                self._wall_ns(),
            )
            if self._log is not None:
                self._log.append(record)
            self._next_seq += 1
        for listener in self._listeners:
            listener(record)
        return record

    def close(self) -> None:
        """Close the file; further writes raise ``ValueError``."""
        if self._file is not None:
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
