"""Invariant 9: the records of a trace follow each other, and the tables."""

from __future__ import annotations

from collections.abc import Iterable

from vime.fsm.check_rule import Context, Rule, Run, Violation, run_of
from vime.fsm.lives import continued_by
from vime.fsm.record import Record
from vime.fsm.replay import Replay
from vime.fsm.text import clean, count


class OrderRule(Rule):
    """Replays every record; no gap in ``seq``, no clock that runs backwards, causes come first."""

    invariant = 9
    reads_rejected = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._replay = Replay(brief=True)
        context.late = self._replay.late
        self._last: dict[Run, Record] = {}
        self._continued: set[Run] = set()

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        found = []
        run = run_of(record)
        last = self._last.get(run)
        self._last[run] = record
        is_first = record.node not in self.context.latest
        self.context.latest[record.node] = record.run_id
        divergence = self._replay.step(record)
        self.context.ended = self._replay.ended
        missing = self._replay.missing
        if missing and not is_first:  # a trace without its beginning is no fault by itself
            lack = f"{count(missing, 'record')} of node {clean(record.node, 40)} missing before"
            found.append(self.broken(f"{lack} this one", last, record))
        if divergence is not None:
            found.append(self.broken(str(divergence), record))
        if last is not None and record.seq <= last.seq:
            found.append(self.broken(f"seq {record.seq} comes again, or too late", last, record))
        if run in self._continued:
            found.append(self.broken(f"{clean(record.run_id, 80)} was continued before", record))
        continued = continued_by(record)
        if continued is not None:
            self._continued.add((continued, record.node))
        if last is not None and record.mono_ns < last.mono_ns:
            found.append(self.broken("the monotonic clock ran backwards", last, record))
        cause = record.cause_seq
        other_node = record.detail is not None and "cause_node" in record.detail
        if cause is not None and not 0 <= cause < record.seq and not other_node:
            text = f"its cause, seq {cause}, is no record before it"
            found.append(self.broken(text, record))
        return found
