"""Replays a trace: drives the tables again from the triggers alone, and compares every state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vime.fsm.lives import Key, begins_anew, key_of
from vime.fsm.record import Record
from vime.fsm.tables import NEW, TABLES
from vime.fsm.text import clean, count


@dataclass(frozen=True)
class Divergence:
    """A record that does not say what the tables say.

    Attributes:
        record: the record.
        field: which of its fields differs: ``machine``, ``source``, ``dest`` or ``rejected``.
        expected: what the replay came to.
        found: what the record says.
        missing: how many records of its node are missing right before it.
    """

    record: Record
    field: str
    expected: str
    found: str
    missing: int = 0

    def __str__(self) -> str:
        r = self.record
        text = (
            f"seq {r.seq} of node {r.node}: {r.machine} {r.id}, trigger {r.trigger!r}: "
            f"{self.field} should be {self.expected}, and the record says {self.found}"
        )
        gap = f"; {count(self.missing, 'record')} of this node are missing right before it"
        return clean(text + gap if self.missing else text)


@dataclass(slots=True)
class Present:
    """Where a machine stands in the replay.

    Attributes:
        state: its state.
        attempt: its life.
        since_seq: the record that brought it there, or the first one of it.
        weight_version: the last one given.
    """

    state: str
    attempt: int
    since_seq: int = -1
    weight_version: str | None = None


class Replay:
    """Machines that are moved by triggers only, never by what a record says of their states.

    Args:
        brief: of a machine that has come to its end, keep only its state and its life. A long run
            has many of them.

    Attributes:
        machines: where each stands, by key, in the order of their first records.
        num_records: how many records were replayed.
        missing: how many records of its node are lacking right before the last one.
        late: the runs, with their nodes, whose beginning the trace does not have.
        ended: the life in which the machine of the last record had come to its end before it.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self.machines: dict[Key, Present] = {}
        self.num_records = 0
        self.missing = 0
        self.ended: int | None = None
        self._brief = brief
        self._ends: dict[tuple[str, int], Present] = {}
        self._next: dict[tuple[str, str], int] = {}
        self._node_next: dict[str, int] = {}
        self.late: set[tuple[str, str]] = set()

    def step(self, record: Record) -> Divergence | None:
        """Replay one record; a record that diverges moves its machine to where it says."""
        self.num_records += 1
        missing = self.missing = self._count(record)
        table = TABLES.get(record.machine)
        if table is None:
            return Divergence(record, "machine", " or ".join(TABLES), record.machine, missing)
        key = key_of(record)
        present = self.machines.get(key)
        had_ended = present is not None and present.state in table.terminal
        self.ended = present.attempt if present is not None and had_ended else None
        if present is None or begins_anew(record, present.attempt):
            # A machine that was born before the trace begins is taken over as it is found.
            late = (record.run_id, record.node) in self.late and record.source in table.states
            present = Present(record.source if late else NEW, record.attempt)
            self.machines[key] = present
        elif had_ended and self._brief:
            present = self.machines[key] = replace(present)
        expected = table.states[present.state].get(record.trigger)
        divergence = _compare(record, present.state, expected, missing)
        if divergence is None:
            state = expected or present.state
        else:
            state = record.dest if record.dest in table.states else present.state
        if state != present.state or present.since_seq < 0:
            present.state, present.since_seq = state, record.seq
        present.attempt = record.attempt
        present.weight_version = record.weight_version or present.weight_version
        if self._brief and present.state in table.terminal:
            end = present.state, present.attempt
            self.machines[key] = self._ends.setdefault(end, Present(*end))
        return divergence

    def _count(self, record: Record) -> int:
        """How many records of its node are lacking between the one before and ``record``."""
        run = record.run_id, record.node
        expected = self._next.get(run)
        if expected is None:  # a further run continues the numbers, or starts anew
            before = self._node_next.get(record.node, 0)
            if record.seq not in (0, before):
                self.late.add(run)
            expected = before if record.seq else 0
        self._next[run] = self._node_next[record.node] = record.seq + 1
        return max(record.seq - expected, 0)


def _compare(record: Record, state: str, dest: str | None, missing: int) -> Divergence | None:
    if record.source != state:
        return Divergence(record, "source", state, record.source, missing)
    if record.rejected != (dest is None):
        why = "the trigger is illegal there" if dest is None else f"the trigger leads to {dest}"
        found = "true" if record.rejected else "false"
        expected = f"{'true' if dest is None else 'false'} ({why})"
        return Divergence(record, "rejected", expected, found, missing)
    if record.dest != (dest or state):
        return Divergence(record, "dest", dest or state, record.dest, missing)
    return None


def replay(
    records: Iterable[Record], counts: Callable[[Record], bool] = lambda _: True
) -> tuple[Replay, Divergence | None]:
    """Replay up to the first divergence, or to the end.

    Args:
        records: the trace.
        counts: whether a divergence at this record is to be reported.

    Returns:
        The replay, a brief one, and the divergence.
    """
    run = Replay(brief=True)
    for record in records:
        divergence = run.step(record)
        if divergence is not None and counts(record):
            return run, divergence
    return run, None


def replay_until(records: Iterable[Record], last: Callable[[Record], bool]) -> tuple[Replay, bool]:
    """Replay up to the first record for which ``last`` is true, that one included.

    Returns the replay, and whether there was such a record.
    """
    run = Replay()
    for record in records:
        run.step(record)
        if last(record):
            return run, True
    return run, False
