"""Replay: the same states from the triggers alone, and the first record that says otherwise."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fsm.traces import Run, edit, healthy_run
from vime.fsm.machine import IllegalTransition, TracedMachine
from vime.fsm.read import read_trace
from vime.fsm.record import Record
from vime.fsm.replay import Divergence, Replay, replay, replay_until
from vime.fsm.tables import TABLES
from vime.fsm.trace import Trace


def divergence_of(path: Path) -> Divergence:
    _, divergence = replay(read_trace(path))
    assert divergence is not None
    return divergence


@given(seed=st.integers(0, 2**32 - 1), num_records=st.integers(0, 60))
def test_whatever_machines_do_a_replay_comes_to_the_states_that_they_have(
    seed: int, num_records: int
) -> None:
    draw = random.Random(seed)
    trace = Trace(None, "run")
    records: list[Record] = []
    trace.subscribe(records.append)
    machines = [TracedMachine(table, str(i), trace) for table in TABLES.values() for i in range(3)]
    for _ in range(num_records):
        machine = draw.choice(machines)
        legal = list(machine.table.states[machine.state])
        anything = [*machine.table.triggers, "unheard_of"]
        with suppress(IllegalTransition):  # traced as rejected, and replayed as such
            machine.fire(draw.choice(legal if legal and draw.random() < 0.8 else anything))
    run, divergence = replay(records)
    assert divergence is None
    assert run.num_records == num_records
    replayed = {key[2:]: present.state for key, present in run.machines.items()}
    for machine in machines:
        assert replayed.get((machine.table.name, machine.id), "new") == machine.state


@pytest.mark.parametrize(
    ("seq", "changes", "field", "expected", "found"),
    [
        (3, {"source": "running"}, "source", "queued", "running"),
        (3, {"dest": "pinning"}, "dest", "exporting", "pinning"),
        (3, {"trigger": "finish"}, "rejected", "true (the trigger is illegal there)", "false"),
        (3, {"rejected": True}, "rejected", "false (the trigger leads to exporting)", "true"),
        (3, {"machine": "mill"}, "machine", "point or engine or snapshot", "mill"),
        (2, {"dest": "asleep"}, "dest", "queued", "asleep"),
        (3, {"trigger": "", "rejected": True}, "dest", "queued", "exporting"),
    ],
)
def test_a_forged_record_is_the_first_divergence(
    tmp_path: Path, seq: int, changes: dict[str, Any], field: str, expected: str, found: str
) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    edit(path, lambda fields: {**fields, **changes} if fields["seq"] == seq else fields)
    divergence = divergence_of(path)
    assert divergence.record.seq == seq
    assert (divergence.field, divergence.expected, divergence.found) == (field, expected, found)
    assert f"seq {seq} of node driver" in str(divergence)


def test_a_lost_transition_shows_at_the_next_one_of_its_machine(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    edit(path, lambda fields: None if fields["trigger"] == "export" else fields)
    divergence = divergence_of(path)
    assert (divergence.record.trigger, divergence.field) == ("pin", "source")
    assert (divergence.expected, divergence.found) == ("queued", "exporting")


def test_a_record_right_after_a_gap_says_how_many_are_missing(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    edit(path, lambda fields: None if fields["seq"] in (2, 3, 4, 5, 6, 7) else fields)
    divergence = divergence_of(path)
    assert divergence.missing == 6
    assert str(divergence).endswith("6 records of this node are missing right before it")


def test_a_trace_cut_anywhere_replays(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=2)
    lines = path.read_bytes().splitlines(keepends=True)
    for begin in range(len(lines)):
        for end in (begin + 1, len(lines) - 3, len(lines)):
            path.write_bytes(b"".join(lines[begin:end]))
            _, divergence = replay(read_trace(path))
            assert divergence is None, (begin, end)


def test_a_machine_of_a_later_run_or_life_begins_as_new(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    run = Run(path, run_id="run-2", first_seq=len(path.read_bytes().splitlines()))
    run.fire("point", 10, "dispatch")
    del run._machines["point", "10"]
    run.machine("point", 10).attempt = 1
    run.fire("point", 10, "dispatch")
    run.fire("point", 10, "skip", reason="cancelled")
    run.trace.close()
    replayed, divergence = replay(read_trace(path))
    assert divergence is None
    assert replayed.machines["run-2", "driver", "point", "10"].state == "skipped"
    assert replayed.machines["run-2", "driver", "point", "10"].attempt == 1


def test_the_state_at_a_moment_is_that_after_its_record(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    for record in read_trace(path):
        run, found = replay_until(read_trace(path), lambda r, seq=record.seq: r.seq == seq)
        assert found
        present = run.machines[record.run_id, record.node, record.machine, record.id]
        assert (present.state, run.num_records) == (record.dest, record.seq + 1)
    assert not replay_until(read_trace(path), lambda r: r.seq == 999)[1]


def test_an_unwanted_divergence_is_passed_over(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=2)
    edit(path, lambda f: {**f, "source": "queued"} if f["seq"] in (6, 20) else f)
    everything = Replay()
    diverging = [r.seq for r in read_trace(path) if everything.step(r) is not None]
    assert diverging[0] == 6
    _, divergence = replay(read_trace(path), lambda record: record.seq > 10)
    assert divergence is not None
    assert divergence.record.seq == 20
