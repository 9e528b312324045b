"""Reading a trace: one record after the other, in constant memory, whatever the file holds.

What is readable is used, and all the rest is told in one line a kind (``problems``). Records of
one node come out in the order of ``seq``, each once, also when lines were swapped or repeated.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from vime.fsm.order import WINDOW, SeqOrder
from vime.fsm.record import SCHEMA, Record, record_of
from vime.fsm.tables import table_hash

MAX_LINE = 16 << 20
"""Longer lines, in bytes, are skipped: no writer makes them, and they would eat the memory."""

_CHUNK = 1 << 18


class TraceUnreadableError(Exception):
    """There is no trace at this path; the message is one line for the user."""


def trace_path(path: Path) -> Path:
    """The trace file that ``path`` means: itself, or ``trace.jsonl`` of a run directory.

    Raises:
        TraceUnreadableError: nothing is there, or no file that could be read.
    """
    try:
        if path.is_dir():
            if not (path / "trace.jsonl").exists():
                raise TraceUnreadableError(f"{path}: no trace.jsonl in this directory")
            path = path / "trace.jsonl"
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise TraceUnreadableError(f"{path}: no such file or run directory") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise TraceUnreadableError(f"{path!s}: {_why(error)}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise TraceUnreadableError(f"{path}: not a file")
    return path


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


class Lines:
    """Splits what is read into lines, dropping those above :data:`MAX_LINE` as they pass.

    Attributes:
        number: how many lines have been given out or dropped.
        tail: what followed the last newline, unless it is too long.
        skipping: whether what followed the last newline is too long.
    """

    def __init__(self) -> None:
        self.number = 0
        self.tail = b""
        self.skipping = False

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """Each line that ``chunk`` completes; ``None`` for one that was too long."""
        first, *rest = chunk.split(b"\n")
        if not rest:
            if not self.skipping:
                self.tail += first
                self.skipping = len(self.tail) > MAX_LINE
                self.tail = b"" if self.skipping else self.tail
            return
        last = rest.pop()
        self.number += 1
        yield None if self.skipping else self.tail + first
        self.tail, self.skipping = last, False
        for line in rest:
            self.number += 1
            yield line


class TraceFile:
    """The records of one trace file; iterate over it as often as needed.

    Args:
        path: a trace file or a run directory.
        window: how many records may be held back to bring swapped ones into order.

    Attributes:
        path: the trace file.
        torn: whether the last line was cut.
        other_tables: the hash of foreign rules under which some records were written.
        num_records: how many records the last iteration gave.

    Raises:
        TraceUnreadableError: there is no trace to read at ``path``; also while iterating.
    """

    def __init__(self, path: Path | str, *, window: int = WINDOW) -> None:
        self.path = trace_path(Path(path))
        self._window = window
        self._reset()

    def _reset(self) -> None:
        self.torn = False
        self.num_records = 0
        self.other_tables: str | None = None
        self._order = SeqOrder(self._window)
        self._lines = Lines()
        self._newer_schema: int | None = None
        self._bad_lines = 0
        self._first_bad = ""

    @property
    def missing(self) -> int:
        """How many records are lacking in the sequences of the nodes."""
        return self._order.missing

    @property
    def problems(self) -> list[str]:
        """What could not be used in the last iteration, one line a kind."""
        found = []
        if self._bad_lines:
            found.append(f"{_count(self._bad_lines, 'line')} left out: {self._first_bad}")
        found += self._order.problems
        if self.torn:
            found.append(f"line {self._lines.number + 1} is torn: the trace is valid up to there")
        if self._newer_schema is not None:
            found.append(
                f"written by a newer vime (schema {self._newer_schema}, {SCHEMA} is known): "
                "what it added is ignored"
            )
        if self.other_tables is not None:
            found.append(
                f"written under other tables ({self.other_tables}; these are {table_hash()}): "
                "states and triggers may differ"
            )
        return found

    def __iter__(self) -> Iterator[Record]:
        if self._lines.number and self.path.is_fifo():
            raise TraceUnreadableError(f"{self.path}: a pipe can be read once only; give a file")
        self._reset()
        try:
            with self.path.open("rb") as file:
                for chunk in _chunks(file):
                    yield from self.feed(chunk)
        except OSError as error:
            raise TraceUnreadableError(f"{self.path}: {_why(error)}") from None
        yield from self.finish()

    def feed(self, chunk: bytes) -> Iterator[Record]:
        """The records that become available with the next ``chunk`` of the file."""
        is_next = self._order.is_next
        for line in self._lines.feed(chunk):
            record = self._parse(line)
            if record is None:
                continue
            if is_next(record):
                yield record
            else:
                yield from self._order.put(record)

    def finish(self) -> Iterator[Record]:
        """The last records, at the end of the file; a line without its newline counts if whole."""
        line = self._lines.tail
        self.torn = self._lines.skipping
        if line:
            try:
                record = record_of(orjson.loads(line))
            except ValueError:
                self.torn = True
            else:
                self._note(record)
                yield from self._order.put(record)
        yield from self._order.rest()

    def _parse(self, line: bytes | None) -> Record | None:
        """The record of one line; what is none is noted among the problems."""
        if line is not None and not line.strip():
            return None
        try:
            if line is None:
                raise ValueError(f"longer than {MAX_LINE >> 20} MiB")
            record = record_of(orjson.loads(line))
        except ValueError as error:
            self._bad_lines += 1
            if self._bad_lines == 1:
                kind = "not JSON: " if isinstance(error, orjson.JSONDecodeError) else ""
                self._first_bad = f"line {self._lines.number} is {kind}{error}"
            return None
        self._note(record)
        return record

    def _note(self, record: Record) -> None:
        self.num_records += 1
        if record.schema > SCHEMA:
            self._newer_schema = record.schema
        if record.table_hash != table_hash():
            self.other_tables = record.table_hash


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """What stands in the file up to its present end, so that reading a growing one ends."""
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode):
        yield from iter(lambda: file.read(_CHUNK), b"")
        return
    left = info.st_size
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        left -= len(chunk)
        yield chunk


def read_trace(path: Path | str) -> TraceFile:
    """The records of the trace at ``path`` (a file or a run directory); see :class:`TraceFile`."""
    return TraceFile(path)


def next_seq(path: Path, node: str = "driver") -> int:
    """The first ``seq`` that a writer which continues the trace at ``path`` should give.

    0 when there is no trace yet.

    Raises:
        TraceUnreadableError: what is at ``path`` cannot be read.
    """
    if not path.exists():
        return 0
    return max((record.seq + 1 for record in TraceFile(path) if record.node == node), default=0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
