"""Arrows from a cause to its effect on another machine, for pictures of a trace."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass

from vime.fsm.lives import Key
from vime.fsm.record import Record, cause_of
from vime.fsm.tables import TABLES


@dataclass(frozen=True)
class Arrow:
    """One arrow.

    Attributes:
        number: unique in the picture.
        cause: the machine where it begins.
        from_ns, to_ns: its ends, on the trace's clock.
    """

    number: int
    cause: Key
    from_ns: int
    to_ns: int


@dataclass(slots=True)
class _Column:
    """The records of one run of one node: ``seq``, machine and moment of each."""

    seqs: array[int]
    machines: array[int]
    moments: array[int]


class Arrows:
    """Finds each record's cause among those before it, in 24 bytes a record."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], _Column] = {}
        self._numbers: dict[Key, int] = {}
        self._keys: list[Key] = []
        self._num_arrows = 0

    def add(self, record: Record, key: Key, at_ns: int) -> Arrow | None:
        """Take in one record; the arrow that ends at it, if its cause is another machine's.

        Args:
            record: those of a node come by ``seq``.
            key: its machine.
            at_ns: when it was written, on the trace's clock.
        """
        moment_ns = _inside(record, at_ns)
        arrow = self._arrow(record, key, moment_ns)
        column = self._columns.get((record.node, record.run_id))
        if column is None:
            column = _Column(array("q"), array("q"), array("q"))
            self._columns[record.node, record.run_id] = column
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        column.seqs.append(record.seq)
        column.machines.append(self._numbers[key])
        column.moments.append(moment_ns)
        return arrow

    def _arrow(self, record: Record, key: Key, to_ns: int) -> Arrow | None:
        cause = cause_of(record)
        column = None if cause is None else self._columns.get((cause[0], record.run_id))
        if cause is None or column is None or not 0 <= cause[1] < 1 << 62:
            return None
        at = bisect_left(column.seqs, cause[1])
        if at == len(column.seqs) or column.seqs[at] != cause[1]:
            return None
        whose = self._keys[column.machines[at]]
        if whose == key:
            return None
        self._num_arrows += 1
        return Arrow(self._num_arrows, whose, column.moments[at], to_ns)


def _inside(record: Record, at_ns: int) -> int:
    """A moment within the stay that the record begins, or ends if nothing comes after it."""
    table = TABLES.get(record.machine)
    is_end = table is not None and record.dest in table.terminal
    return max(at_ns - 1, 0) if is_end else at_ns + 1
