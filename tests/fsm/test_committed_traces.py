"""Traces that were recorded once are still read, replayed and checked; one of them diverges."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.fsm.check import check
from vime.fsm.lives import lives_of
from vime.fsm.read import read_trace
from vime.fsm.record import SCHEMA
from vime.fsm.replay import replay

TRACES = Path(__file__).parents[1] / "traces"

ENDS = {
    "two_engines": {
        "hf:0": "done",
        "10": "done",
        "20": "done",
        "50": "done",
        "30": "busy",
        "40": "pin_violation",
    },
    "resumed": {"10": "done"},
    # The quick driver of tests/programs/mortal.py, killed twice and resumed each time.
    "resumed_real": {
        "hf:0": "done",
        "1": "done",
        "2": "crashed",
        "3": "crashed",
        "4": "done",
        "5": "done",
    },
}


@pytest.mark.parametrize("name", ENDS)
def test_a_recorded_trace_replays_and_violates_nothing(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    assert list(check(trace, ended=True)) == []
    assert all("other tables" in problem for problem in trace.problems)
    _, divergence = replay(trace)
    assert divergence is None
    ends = {life.id: life.reason or life.state for life in lives_of(trace).of("point")}
    assert ends == ENDS[name]


def test_the_forged_trace_diverges_where_it_was_forged() -> None:
    _, divergence = replay(read_trace(TRACES / "diverges.jsonl"))
    assert divergence is not None
    assert (divergence.record.id, divergence.field) == ("20", "dest")
    assert (divergence.expected, divergence.found) == ("running", "done")
    assert {violation.invariant for violation in check(read_trace(TRACES / "diverges.jsonl"))} == {
        1,
        9,
    }


def test_every_trace_is_named_here_and_carries_its_schema_and_tables() -> None:
    assert {path.stem for path in TRACES.glob("*.jsonl")} == {*ENDS, "diverges"}
    for path in TRACES.glob("*.jsonl"):
        for record in read_trace(path):
            assert record.schema <= SCHEMA
            assert len(record.table_hash) == 12


def test_the_traces_can_be_made_again(tmp_path: Path) -> None:
    root = TRACES.parents[1]
    subprocess.run(
        [sys.executable, "-m", "tests.traces.make_traces", tmp_path],
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    for path in map(TRACES.joinpath, ("two_engines.jsonl", "resumed.jsonl", "diverges.jsonl")):
        ours = [(r.machine, r.id, r.trigger, r.dest) for r in read_trace(path)]
        made = [(r.machine, r.id, r.trigger, r.dest) for r in read_trace(tmp_path / path.name)]
        assert made == ours
