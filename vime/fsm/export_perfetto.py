"""A trace as Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: "Trace Event Format", the JSON form that both viewers read; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from vime.fsm.arrows import Arrow, Arrows
from vime.fsm.filters import Filter
from vime.fsm.lives import Key, Life, Lives, Span
from vime.fsm.record import Record
from vime.fsm.tables import NEW, TABLES

Row = tuple[int, int]
"""Process and thread, as the format calls them: a kind of machine, and one of the kind."""


def perfetto(records: Iterable[Record], filter: Filter | None = None) -> Iterator[str]:
    """The document in pieces: one slice a stay in a state, one row a machine.

    Arrows lead from a cause to its effect on another machine, a counter shows how many points
    were pending, instants show ends and refused triggers.
    """
    events = _Events(filter or Filter())
    yield '{"displayTimeUnit":"ms","traceEvents":['
    first = True
    for event in events.of(records):
        yield ("" if first else ",\n") + json.dumps(event)
        first = False
    yield "]}\n"


class _Events:
    def __init__(self, filter: Filter) -> None:
        self._filter = filter
        self._lives = Lives()
        self._arrows = Arrows()
        self._rows: dict[Key, int] = {}
        self._processes: dict[str, int] = {}
        self._entered: dict[int, Record] = {}
        self._pending = 0

    def of(self, records: Iterable[Record]) -> Iterator[dict[str, Any]]:
        for record in records:
            yield from self._record(record)
        for machine in dict.fromkeys([*TABLES, *self._processes]):
            for life in self._lives.of(machine):
                for span in life.spans:  # where its run was cut off
                    yield from self._slice(life, _drawable(span))
                if life.state != NEW and not life.cut:
                    span = Span(life.state, life.entered_ns, self._lives.now_ns)
                    yield from self._slice(life, _drawable(span))

    def _record(self, record: Record) -> Iterator[dict[str, Any]]:
        life, ended = self._lives.add(record)
        at_ns = self._lives.clock.at(record)
        before = life.spans[:-1] if ended else life.spans[:]  # of a life that it goes on with
        life.spans.clear()
        for span in (*map(_drawable, before), *([ended] if ended else ())):
            yield from self._slice(life, span)
        if not record.rejected and record.dest != record.source:
            self._entered[id(life)] = record
        wanted = self._filter.wants(record, at_ns, self._lives.clock)
        if wanted and (life.finished or record.rejected):
            yield from self._instant(life, record, at_ns)
        arrow = self._arrows.add(record, life.key, at_ns)
        if arrow is not None and self._filter.empty:
            yield from self._arrow(arrow, life)
        yield from self._count(record, at_ns)
        if life.finished:
            self._lives.forget(life)
            self._entered.pop(id(life), None)

    def _instant(self, life: Life, record: Record, at_ns: int) -> Iterator[dict[str, Any]]:
        yield from self._row(life)
        pid, tid = self._place(life.key)
        name = f"{record.trigger} rejected" if record.rejected else record.dest
        yield {
            "name": name,
            "ph": "i",
            "s": "t",
            "ts": at_ns / 1e3,
            "pid": pid,
            "tid": tid,
            "args": _args(record),
        }

    def _arrow(self, arrow: Arrow, effect: Life) -> Iterator[dict[str, Any]]:
        """Both ends are bound to the slice around them; ``bp: e`` says so of the second."""
        if arrow.cause not in self._rows:  # it had no time to be drawn
            return
        yield from self._row(effect)
        ends = ((arrow.cause, "s", arrow.from_ns), (effect.key, "f", arrow.to_ns))
        for key, phase, at_ns in ends:
            pid, tid = self._place(key)
            binding = {"bp": "e"} if phase == "f" else {}
            yield {
                "name": "cause",
                "cat": "cause",
                "ph": phase,
                "id": arrow.number,
                "ts": at_ns / 1e3,
                "pid": pid,
                "tid": tid,
                **binding,
            }

    def _slice(self, life: Life, span: Span) -> Iterator[dict[str, Any]]:
        record = self._entered.get(id(life))
        if not self._filter.wants_machine(life.machine, life.id) or (
            self._filter.states and span.state not in self._filter.states
        ):
            return
        if not self._filter.in_time(span.start_ns, span.end_ns, self._lives.clock):
            return
        yield from self._row(life)
        pid, tid = self._place(life.key)
        yield {
            "name": span.state,
            "cat": life.machine,
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": span.start_ns / 1e3,
            "dur": span.dwell_ns / 1e3,
            "args": _args(record) if record else {},
        }

    def _row(self, life: Life) -> Iterator[dict[str, Any]]:
        """Name the row of a machine when it is first needed."""
        if life.key in self._rows:
            return
        if life.earlier in self._rows:
            self._rows[life.key] = self._rows[life.earlier]
            return
        pid = self._processes.get(life.machine)
        if pid is None:
            pid = self._processes[life.machine] = len(self._processes) + 1
            yield _name("process_name", pid, 0, f"{life.machine}s")
        tid = len(self._rows) + 1
        self._rows[life.key] = tid
        yield _name("thread_name", pid, tid, f"{life.machine} {life.id}")

    def _place(self, key: Key) -> Row:
        return self._processes[key[2]], self._rows[key]

    def _count(self, record: Record, at_ns: int) -> Iterator[dict[str, Any]]:
        if record.machine != "point" or record.rejected:
            return
        before = self._pending
        self._pending += record.trigger == "dispatch"
        self._pending -= record.dest in TABLES["point"].terminal
        if self._pending != before and self._filter.empty:
            args = {"points": max(self._pending, 0)}
            yield {"name": "pending", "ph": "C", "ts": at_ns / 1e3, "pid": 0, "args": args}


def _drawable(span: Span) -> Span:
    """The last stay before an end of the trace: an arrow may lead into it, however short it is."""
    return Span(span.state, span.start_ns, max(span.end_ns, span.start_ns + 1))


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _args(record: Record) -> dict[str, Any]:
    facts = {
        "seq": record.seq,
        "trigger": record.trigger,
        "reason": record.reason,
        "weight_version": record.weight_version,
        "cause_seq": record.cause_seq,
        "detail": record.detail,
    }
    return {name: value for name, value in facts.items() if value is not None}
