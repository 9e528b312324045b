"""The tables are well-formed, and a machine obeys them for every state and trigger."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import MappingProxyType

import pytest

from vime.fsm import machine as machine_module
from vime.fsm import tables
from vime.fsm.machine import IllegalTransition, TracedMachine
from vime.fsm.tables import NEW, TABLES, Table
from vime.fsm.trace import Record, Trace

every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)

PAIRS = [
    pytest.param(table, state, trigger, id=f"{table.name}-{state}-{trigger}")
    for table in TABLES.values()
    for state, trigger in product(table.states, (*table.triggers, "unheard_of"))
]


def machine_in(table: Table, state: str) -> tuple[TracedMachine, list[Record]]:
    """A machine that was brought to ``state`` by legal triggers, and its later records."""
    ways: dict[str, list[str]] = {NEW: []}
    for source in list(table.states) * len(table.states):
        for trigger, dest in table.states[source].items():
            if source in ways:
                ways.setdefault(dest, [*ways[source], trigger])
    trace = Trace(None, "run")
    machine = TracedMachine(table, "40", trace)
    for trigger in ways[state]:
        machine.fire(trigger)
    records: list[Record] = []
    trace.subscribe(records.append)
    return machine, records


@every_table
def test_every_state_has_a_meaning_and_every_destination_is_a_state(table: Table) -> None:
    assert set(table.meanings) == set(table.states)
    assert all(table.meanings.values())
    assert {dest for _, _, dest in table.edges()} <= set(table.states)


@every_table
def test_every_state_is_reached_from_new_and_nothing_returns_to_new(table: Table) -> None:
    for state in table.states:
        machine_in(table, state)  # raises KeyError for a state without a way to it
    assert NEW not in {dest for _, _, dest in table.edges()}


@every_table
def test_every_live_state_can_still_reach_a_terminal_state(table: Table) -> None:
    ends = set(table.terminal)
    assert ends
    for _ in table.states:
        ends |= {s for s, ways in table.states.items() if ends & set(ways.values())}
    assert ends == set(table.states)


@every_table
def test_terminal_states_stand_in_the_table_with_no_way_out(table: Table) -> None:
    assert table.terminal == {s for s in table.states if not table.states[s]}
    for state in table.terminal:
        machine, _ = machine_in(table, state)
        assert machine.finished
        assert not any(machine.can(trigger) for trigger in table.triggers)


@pytest.mark.parametrize(("table", "state", "trigger"), PAIRS)
def test_a_listed_trigger_moves_and_any_other_raises_changes_nothing_and_is_traced_as_rejected(
    table: Table, state: str, trigger: str
) -> None:
    machine, records = machine_in(table, state)
    expected = table.states[state].get(trigger)
    assert machine.can(trigger) == (expected is not None)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"'{trigger}' is illegal in state '{state}'"):
            machine.fire(trigger, reason="why", detail={"a": 1})
    else:
        assert machine.fire(trigger, reason="why", detail={"a": 1}) is records[0]
    assert machine.state == (expected or state)
    (record,) = records
    assert (record.trigger, record.source, record.dest) == (trigger, state, expected or state)
    assert record.rejected == (expected is None)
    assert (record.reason, record.detail) == ("why", {"a": 1})


@every_table
def test_the_library_underneath_knows_the_same_transitions_as_the_table(table: Table) -> None:
    rules = machine_module._rules(table.name).machine
    known = {
        (source, trigger, transition.dest)
        for trigger, event in rules.events.items()
        for source, transitions in event.transitions.items()
        for transition in transitions
    }
    assert known == set(table.edges())
    assert set(rules.states) == set(table.states)


def test_an_illegal_transition_names_the_machine_and_what_would_be_legal() -> None:
    machine, _ = machine_in(TABLES["point"], "running")
    with pytest.raises(IllegalTransition) as caught:
        machine.fire("export")
    assert str(caught.value) == (
        "point 40: trigger 'export' is illegal in state 'running'; allowed there: finish, skip"
    )
    error = caught.value
    assert (error.machine, error.id, error.state, error.trigger) == (
        "point",
        "40",
        "running",
        "export",
    )
    ended, _ = machine_in(TABLES["point"], "done")
    with pytest.raises(IllegalTransition, match="nothing: it is a terminal state"):
        ended.fire("skip")


def test_a_record_is_caused_by_the_one_before_of_its_machine_unless_told_otherwise() -> None:
    machine, records = machine_in(TABLES["point"], NEW)
    machine.fire("dispatch")
    machine.fire("export")
    machine.fire("skip", cause_seq=17)
    assert [record.cause_seq for record in records] == [None, 0, 17]


def test_a_failed_write_leaves_the_state_as_it_was() -> None:
    class FullDisk(Trace):
        def write(self, **_: object) -> Record:
            raise OSError("no space left on device")

    machine = TracedMachine(TABLES["point"], "40", FullDisk(None, "run"))
    with pytest.raises(OSError, match="no space"):
        machine.fire("dispatch")
    assert machine.state == NEW
    assert machine.last_seq is None


def test_the_table_hash_changes_with_any_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables.table_hash()
    states = {**TABLES["point"].states, "queued": MappingProxyType({"skip": "skipped"})}
    changed = {**TABLES, "point": replace(TABLES["point"], states=states)}
    monkeypatch.setattr(tables, "TABLES", changed)
    assert tables.table_hash.__wrapped__() != before
    assert len(before) == 12
