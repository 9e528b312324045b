"""Invariants 1, 2, 3, 7 and 10: what may become of points, and when."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from vime.fsm.check_rule import Context, Rule, Run, Violation, number, run_of
from vime.fsm.lives import Key, begins_anew, key_of
from vime.fsm.record import Record
from vime.fsm.tables import POINT
from vime.fsm.text import clean, duration

_GRACE_S = 5.0
_GRACE_SHARE = 0.05


class EndsRule(Rule):
    """1: one end for each point, and no second one.

    Attributes:
        pending: node and id → the last record of each point that has no end yet. A point that
            a run left when it was cut off may end in the later run that takes it up again.
    """

    invariant = 1
    machines = ("point",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.pending: dict[tuple[str, str], Record] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        attempt = self.context.ended
        if attempt is not None and not begins_anew(record, attempt):
            return [self.broken(f"point {_name(record)} goes on after its end", record)]
        point = record.node, record.id
        if record.dest in POINT.terminal:
            self.pending.pop(point, None)
        else:
            self.pending[point] = record
        return ()

    def end(self, ended: bool) -> Iterable[Violation]:
        """Whatever is pending, when the run is over."""
        if not ended:
            return ()
        return [
            self.broken(f"point {_name(last)} was {last.dest} when the run had ended", last)
            for last in self.pending.values()
        ]


class WindowRule(Rule):
    """2: the points beyond ``queued`` are never more than the limit that dispatch recorded."""

    invariant = 2
    machines = ("point",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._limits: dict[Run, float] = {}
        self._busy: dict[Run, dict[str, Record]] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        run = run_of(record)
        busy = self._busy.setdefault(run, {})
        found = []
        if record.trigger == "dispatch":
            limit = number(record, "max_in_flight")
            if limit is not None:
                self._limits[run] = limit
            pending = number(record, "pending")
            if pending is not None and limit is not None and pending > limit:
                text = f"{pending:g} points were pending, the limit is {limit:g}"
                found.append(self.broken(text, record))
        if record.dest in POINT.terminal:
            busy.pop(record.id, None)
        elif record.dest != "queued":
            is_further = record.id not in busy
            busy[record.id] = record
            limit = self._limits.get(run)
            if is_further and limit is not None and len(busy) > limit:
                text = f"{len(busy)} points are under way, the limit is {limit:g}"
                found.append(self.broken(text, *busy.values()))
        return found


class HoldRule(Rule):
    """3: what dispatch held the caller for is a length of time, within the deadline for it."""

    invariant = 3
    machines = ("point",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._bounds: dict[Key, Record] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        if record.trigger == "dispatch":
            if number(record, "deadlines_s", "stall") is not None:
                self._bounds[key_of(record)] = record
            return ()
        if record.dest not in POINT.terminal:
            return ()
        dispatched = self._bounds.pop(key_of(record), None)
        stall_s = number(record, "stall_s")
        if stall_s is None:
            return ()
        if not isfinite(stall_s) or stall_s < 0:
            return [self.broken(f"stall_s is {stall_s:g}", record)]
        bound_s = number(dispatched, "deadlines_s", "stall") if dispatched else None
        if bound_s is not None and stall_s > _with_grace(bound_s):
            text = f"training was held for {stall_s:.1f} s, the deadline is {bound_s:g} s"
            return [self.broken(text, dispatched, record)]
        return ()


class WaitRule(Rule):
    """7: no stay in a state is longer than the deadline that dispatch recorded for it."""

    invariant = 7
    machines = ("point",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._points: dict[Key, tuple[Record, Record]] = {}

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        key = key_of(record)
        if record.trigger == "dispatch":
            if record.detail is not None and "deadlines_s" in record.detail:
                self._points[key] = record, record
            return ()
        known = self._points.pop(key, None)
        if known is None:
            return ()
        dispatched, last = known
        if record.dest not in POINT.terminal:
            self._points[key] = dispatched, record
        stay_ns = record.mono_ns - last.mono_ns
        bound_s = number(dispatched, "deadlines_s", last.dest)
        if bound_s is not None and stay_ns / 1e9 > _with_grace(bound_s):
            text = f"point {_name(record)} was {last.dest} for {duration(stay_ns)}"
            return [self.broken(f"{text}, the deadline is {bound_s:g} s", last, record)]
        return ()


class StepRule(Rule):
    """10: the step of the metrics is the point's own."""

    invariant = 10
    machines = ("point",)

    def feed(self, record: Record) -> Iterable[Violation]:
        """Watch one record; see :class:`Rule`."""
        if record.dest not in POINT.terminal:
            return ()
        step = number(record, "metrics", "eval/step")
        own = record.id.removeprefix("hf:")
        if step is None or not own.isdecimal() or step == int(own):
            return ()
        text = f"the result of point {_name(record)} landed at step {step:g}"
        return [self.broken(text, record)]


def _with_grace(seconds: float) -> float:
    """A deadline is seen a little later than it strikes: on a busy loop, say."""
    return seconds * (1 + _GRACE_SHARE) + _GRACE_S


def _name(record: Record) -> str:
    return clean(record.id, 80)
