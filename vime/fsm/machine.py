"""A guarded machine over one table: it moves by listed triggers only, and traces each move."""

from __future__ import annotations

from functools import cache
from typing import Any

import transitions

from vime.fsm.tables import TABLES, Table
from vime.fsm.trace import Record, Trace


class IllegalTransition(Exception):
    """A trigger that the table does not list for the machine's present state.

    Attributes:
        machine, id, state, trigger: what was asked of which thing.
    """

    def __init__(self, table: Table, id: str, state: str, trigger: str) -> None:
        allowed = ", ".join(sorted(table.states[state])) or "nothing: it is a terminal state"
        super().__init__(
            f"{table.name} {id}: trigger {trigger!r} is illegal in state {state!r}; "
            f"allowed there: {allowed}"
        )
        self.machine = table.name
        self.id = id
        self.state = state
        self.trigger = trigger


class _Model:
    """What `transitions` moves: one attribute, `state`."""

    state: str


class _Rules:
    """One `transitions.Machine` for a table; models are handed to it one call at a time.

    What it makes of the table is looked up once. Its own way from a trigger to the next state
    passes callbacks and logs that no machine here has, in two thirds of a transition's time.
    """

    def __init__(self, table: Table) -> None:
        self.machine = transitions.Machine(
            model=None,
            states=list(table.states),
            initial=table.initial,
            transitions=[
                {"trigger": trigger, "source": source, "dest": dest}
                for source, trigger, dest in table.edges()
            ],
            auto_transitions=False,
            send_event=False,
        )
        self._next: dict[tuple[str, str], transitions.State] = {
            (source, trigger): self.machine.get_state(way.dest or source)
            for trigger, event in self.machine.events.items()
            for source, ways in event.transitions.items()
            for way in ways
        }

    def move(self, model: _Model, trigger: str) -> None:
        """Take ``model`` to the state to which ``trigger`` leads; it does lead somewhere."""
        self.machine.set_state(self._next[model.state, trigger], model)


@cache
def _rules(name: str) -> _Rules:
    return _Rules(TABLES[name])


class TracedMachine:
    """The state of one eval point, engine or snapshot.

    Args:
        table: its rules.
        id: its name in the trace, unique among the machines of its table in one run.
        trace: where each transition is written, before it takes effect.
    """

    def __init__(self, table: Table, id: str, trace: Trace) -> None:
        self.table = table
        self.id = id
        self.trace = trace
        self.attempt = 0
        self.last_seq: int | None = None
        self._model = _Model()
        self._model.state = table.initial

    @property
    def state(self) -> str:
        """The present state; ``new`` before the first trigger."""
        return self._model.state

    @property
    def finished(self) -> bool:
        """Whether the state is terminal."""
        return self.state in self.table.terminal

    def restore(self, state: str) -> None:
        """Take over, without a record, the state that an earlier run's trace tells of."""
        assert state in self.table.states, "the trace was read by these tables"
        self._model.state = state

    def can(self, trigger: str) -> bool:
        """Whether ``trigger`` is legal in the present state."""
        return self.table.dest(self.state, trigger) is not None

    def fire(
        self,
        trigger: str,
        *,
        reason: str | None = None,
        detail: dict[str, Any] | None = None,
        cause_seq: int | None = None,
        weight_version: str | None = None,
    ) -> Record:
        """Take one transition: its record is in the trace file before this returns.

        Args:
            trigger: a verb of the table.
            reason: why, as a short name (a skip reason, for example).
            detail: facts for people and for replay; JSON values only.
            cause_seq: the record that made this happen; this machine's previous one if absent.
            weight_version: the weights that the thing carries or awaits.

        Raises:
            IllegalTransition: the table forbids it; traced as rejected, and nothing changed.
        """
        source = self.state
        dest = self.table.dest(source, trigger)
        record = self.trace.write(
            machine=self.table.name,
            id=self.id,
            attempt=self.attempt,
            trigger=trigger,
            source=source,
            dest=dest or source,
            rejected=dest is None,
            reason=reason,
            detail=detail,
            cause_seq=self.last_seq if cause_seq is None else cause_seq,
            weight_version=weight_version,
        )
        self.last_seq = record.seq
        if dest is None:
            raise IllegalTransition(self.table, self.id, source, trigger)
        _rules(self.table.name).move(self._model, trigger)
        assert self.state == dest, "the library and the table agree"
        return record
