"""How long things took, and how often: dwell times by state, reasons, stalls and lags."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, isfinite

from vime.fsm.check_rule import number
from vime.fsm.filters import Filter
from vime.fsm.lives import Life, Lives, Span
from vime.fsm.record import Record
from vime.fsm.tables import TABLES


@dataclass(frozen=True)
class Summary:
    """A set of numbers: how many, and percentiles by nearest rank.

    The p-th percentile is the smallest value that at least p % of the values do not exceed.
    """

    count: int
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """``None`` without a value."""
        ordered = array("d", sorted(values))
        if not ordered:
            return None
        ranks = (ordered[max(ceil(len(ordered) * p / 100), 1) - 1] for p in (50, 90, 99, 100))
        return cls(len(ordered), *ranks)


class Stats:
    """Gathers numbers from a trace in 8 bytes a stay; the records themselves are not kept.

    Attributes:
        dwell_s: machine and state → how long each stay in it took, in seconds.
        reasons: machine and reason → how many records gave it.
        stall_s: what dispatch held training for, a number a settled point, in seconds.
        lag_steps: how many steps training was ahead, a number a settled point.
        duration_s: seconds from dispatch to the result, a number a finished point.
        ends: terminal state of points → how many.
        num_records, num_rejected: how many records, and illegal triggers among them.
    """

    def __init__(self, filter: Filter | None = None) -> None:
        self._filter = filter or Filter()
        self._lives = Lives()
        self.dwell_s: dict[tuple[str, str], array[float]] = {}
        self.reasons: dict[tuple[str, str], int] = {}
        self.stall_s = array("d")
        self.lag_steps = array("d")
        self.duration_s = array("d")
        self.ends: dict[str, int] = {}
        self.num_records = 0
        self.num_rejected = 0

    def add(self, record: Record) -> None:
        """Take in one record."""
        life, ended = self._lives.add(record)
        life.spans.clear()  # a long run has many, and only their lengths are wanted
        if life.finished:
            self._lives.forget(life)
        at_ns, clock = self._lives.clock.at(record), self._lives.clock
        if not self._filter.wants(record, at_ns, clock):
            return
        self.num_records += 1
        self.num_rejected += record.rejected
        if record.reason:
            key = record.machine, record.reason
            self.reasons[key] = self.reasons.get(key, 0) + 1
        if ended is not None:
            self._stay(life, ended)
        if life.machine == "point" and life.finished and not record.rejected:
            self._settled(record)

    def _stay(self, life: Life, span: Span) -> None:
        if self._filter.states and span.state not in self._filter.states:
            return
        stays = self.dwell_s.get((life.machine, span.state))
        if stays is None:
            stays = self.dwell_s[life.machine, span.state] = array("d")
        stays.append(span.dwell_ns / 1e9)

    def _settled(self, record: Record) -> None:
        self.ends[record.dest] = self.ends.get(record.dest, 0) + 1
        for name, values in (("stall_s", self.stall_s), ("lag_steps", self.lag_steps)):
            value = number(record, name)
            if value is not None and isfinite(value):
                values.append(value)
        duration_s = number(record, "duration_s")
        if record.trigger == "finish" and duration_s is not None:
            self.duration_s.append(duration_s)

    def states(self) -> list[tuple[str, str, Summary]]:
        """Machine, state and its dwell times, in the order of the tables."""
        rows = []
        for key in sorted(self.dwell_s, key=_place):
            summary = Summary.of(self.dwell_s[key])
            assert summary is not None, "a state is listed by its first stay"
            rows.append((*key, summary))
        return rows

    def span_s(self) -> float:
        """Seconds from the first record of the trace to the last."""
        return self._lives.now_ns / 1e9


def _place(key: tuple[str, str]) -> tuple[int, int, str, str]:
    machine, state = key
    if machine not in TABLES:
        return len(TABLES), 0, machine, state
    states = list(TABLES[machine].states)
    at = states.index(state) if state in states else len(states)
    return list(TABLES).index(machine), at, machine, state


def stats(records: Iterable[Record], filter: Filter | None = None) -> Stats:
    """The numbers of a trace."""
    gathered = Stats(filter)
    for record in records:
        gathered.add(record)
    return gathered
