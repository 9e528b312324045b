"""A trace as Mermaid state diagrams: how often each way was taken, and after how long a stay."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from vime.fsm.filters import Filter
from vime.fsm.lives import Lives
from vime.fsm.record import Record
from vime.fsm.tables import NEW, TABLES
from vime.fsm.text import duration

Edge = tuple[str, str, str, str]
"""Machine, source, trigger, destination."""


def mermaid_states(records: Iterable[Record], filter: Filter | None = None) -> Iterator[str]:
    """The diagram line by line: a group a kind of machine, an arrow a way that was taken.

    An arrow says its trigger, how often it was taken, and the median stay in the state that it
    leaves. Events within a state and refused triggers are left out.
    """
    counts, stays_s = _edges(records, filter or Filter())
    yield "stateDiagram-v2"
    for machine in dict.fromkeys(machine for machine, *_ in counts):
        name = _plain(machine)
        states = _states(machine, counts)
        yield f"    state {name} {{"
        for state in states:
            if state != NEW:
                yield f'        state "{_plain(state)}" as {_id(machine, state)}'
        for edge, times in sorted(counts.items(), key=lambda item: _place(item[0])):
            if edge[0] == machine:
                yield f"        {_arrow(edge, times, stays_s.get(edge))}"
        for state in states:
            if machine in TABLES and state in TABLES[machine].terminal:
                yield f"        {_id(machine, state)} --> [*]"
        yield "    }"


def _edges(
    records: Iterable[Record], filter: Filter
) -> tuple[dict[Edge, int], dict[Edge, array[float]]]:
    counts: dict[Edge, int] = {}
    stays_s: dict[Edge, array[float]] = {}
    lives = Lives()
    for record in records:
        life, ended = lives.add(record)
        life.spans.clear()
        if life.finished:
            lives.forget(life)
        at_ns = lives.clock.at(record)
        if record.rejected or record.source == record.dest:
            continue
        if not filter.wants(record, at_ns, lives.clock):
            continue
        edge = record.machine, record.source, record.trigger, record.dest
        counts[edge] = counts.get(edge, 0) + 1
        if ended is not None:
            stays_s.setdefault(edge, array("d")).append(ended.dwell_ns / 1e9)
    return counts, stays_s


def _arrow(edge: Edge, times: int, stays_s: array[float] | None) -> str:
    machine, source, trigger, dest = edge
    begin = "[*]" if source == NEW else _id(machine, source)
    label = f"{_plain(trigger)} ×{times}"
    if stays_s:
        label += f", after {duration(sorted(stays_s)[(len(stays_s) - 1) // 2] * 1e9)}"
    return f"{begin} --> {_id(machine, dest)} : {label}"


def _states(machine: str, counts: Iterable[Edge]) -> list[str]:
    """Those that were left or entered, in the order of the table."""
    seen = {s for kind, source, _, dest in counts if kind == machine for s in (source, dest)}
    known = list(TABLES[machine].states) if machine in TABLES else []
    return [s for s in known if s in seen] + sorted(seen - set(known))


def _place(edge: Edge) -> tuple[int, Edge]:
    machine, source, trigger, dest = edge
    ways = TABLES[machine].edges() if machine in TABLES else []
    way = source, trigger, dest
    return (ways.index(way) if way in ways else len(ways)), edge


def _id(machine: str, state: str) -> str:
    return "_".join(f"{_plain(machine)} {_plain(state)}".split())


def _plain(text: str) -> str:
    """Without the characters that mean something to Mermaid."""
    kept = "".join(c if c.isalnum() else " " for c in text)
    return "_".join(kept.split())[:60] or "none"
