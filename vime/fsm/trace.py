"""The trace: one JSON object a line for every transition, written before its effect begins.

It is the run's journal as well: one ``write`` system call a record on a file opened for
appending, so that ``kill -9`` can lose nothing that had begun, and tear the last line at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vime.fsm.record import CONTINUES, FIELDS, SCHEMA, Record
from vime.fsm.tables import table_hash

if TYPE_CHECKING:
    from vime.fsm.journal_file import Journal, JournalFile

__all__ = ["FIELDS", "SCHEMA", "Listener", "Record", "Trace"]

Listener = Callable[[Record], None]


class Trace:
    """Writes a trace file; safe to call from several threads.

    Args:
        path: the file; created with mode 0600, appended to when it exists. ``None`` keeps the
            records for the listeners only.
        run_id: see :class:`Record`.
        node: see :class:`Record`.
        first_seq: the first ``seq`` to give; above 0 when an older trace is continued
            (:func:`vime.fsm.read.next_seq` says which).
        continues: the run whose trace is continued; the detail of the first record names it.
        mono_ns, wall_ns: the clocks; tests on virtual time bring their own.
        outlive_disk: go on when a record cannot be written (a full disk, say): it is lost,
            which the log says once and the gap in ``seq`` for ever. Nothing that runs beside
            training may end it for want of a journal.

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
        continues: str | None = None,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
        outlive_disk: bool = False,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.node = node
        self._next_seq = first_seq
        self._continues = continues
        self._mono_ns = mono_ns
        self._wall_ns = wall_ns
        self._outlive_disk = outlive_disk
        self.num_lost = 0
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._hash = table_hash()
        self._file: JournalFile | None = None
        self._log: Journal | None = None
        if path is not None:
            from vime.fsm import journal_file  # structlog is slow to load, and readers need none

            self._file = journal_file.JournalFile(path)
            self._log = journal_file.journal(self._file)

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with each later record, on the thread that wrote it.

        Records of several threads may reach it in another order than that of ``seq``. What it
        raises is logged: a listener cannot undo what is in the file already.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

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
            OSError: the write failed (a full disk, say); the record counts as never written.
                Not with ``outlive_disk``.
            ValueError: the trace is closed.
        """
        with self._lock:
            if self._continues is not None:
                detail = {**(detail or {}), CONTINUES: self._continues}
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
            try:
                if self._log is not None:
                    self._log.append(record)
            except OSError as error:
                if not self._outlive_disk:
                    raise
                self._lose(record, error)
            self._next_seq += 1
            self._continues = None
        for listener in self._listeners:
            _tell(listener, record)
        return record

    def _lose(self, record: Record, error: OSError) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            logging.getLogger(__name__).error(
                "record %d could not be written to %s: %s; the run goes on, with a gap in its "
                "trace", record.seq, self.path, error,
            )  # fmt: skip

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


def _tell(listener: Listener, record: Record) -> None:
    try:
        listener(record)
    except Exception:
        logging.getLogger(__name__).exception(
            "a listener failed on trace record %d of %s %s", record.seq, record.machine, record.id
        )
