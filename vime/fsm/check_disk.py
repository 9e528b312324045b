"""Invariant 6, its other half: how many snapshots are on disk."""

from __future__ import annotations

from collections.abc import Iterable

from vime.fsm.check_rule import Context, Rule, Run, Violation, number, run_of
from vime.fsm.record import Record
from vime.fsm.tables import POINT, SNAPSHOT
from vime.fsm.text import count


class DiskRule(Rule):
    """At most ``keep_snapshots``, as dispatch recorded it, and one a pending point.

    Counted when the writing of one begins: those that are to go are gone by then.
    """

    invariant = 6
    machines = ("point", "snapshot")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._keep: dict[Run, float] = {}
        self._pending: dict[Run, set[str]] = {}
        self._on_disk: dict[Run, dict[str, Record]] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        run = run_of(record)
        if record.machine == "point":
            self._point(record, run)
            return ()
        on_disk = self._on_disk.setdefault(run, {})
        if record.dest in SNAPSHOT.terminal:
            on_disk.pop(record.id, None)
        elif record.trigger == "inherit":
            on_disk[record.id] = record
        elif record.trigger == "write":
            on_disk[record.id] = record
            keep = self._keep.get(run)
            pending = len(self._pending.get(run, ()))
            if keep is not None and len(on_disk) > keep + pending:
                text = f"{count(len(on_disk), 'snapshot')} on disk, {keep:g} are to be kept and "
                text += f"{count(pending, 'point')} pending"
                return [self.broken(text, *on_disk.values())]
        return ()

    def _point(self, record: Record, run: Run) -> None:
        pending = self._pending.setdefault(run, set())
        if record.dest in POINT.terminal:
            pending.discard(record.id)
            return
        pending.add(record.id)
        keep = number(record, "keep_snapshots")
        if keep is not None:
            self._keep[run] = keep
