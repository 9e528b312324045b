"""The export for Perfetto is Trace Event Format to the letter, and its arrows are bound to slices.

The rules are those of the document "Trace Event Format": fields by phase, complete events that
nest, flow events in pairs of one id, each within a slice of its own row.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fsm.traces import Run, healthy_run
from vime.fsm.export_perfetto import perfetto
from vime.fsm.read import read_trace
from vime.fsm.record import Record

Event = dict[str, Any]

TESTS = Path(__file__).parents[1]
COMMON = {"name": str, "ph": str, "pid": int}
NUMBER = (int, float)
FIELDS: dict[str, dict[str, Any]] = {
    "X": {"cat": str, "tid": int, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "i": {"tid": int, "ts": NUMBER, "s": str, "args": dict},
    "C": {"ts": NUMBER, "args": dict},
    "M": {"tid": int, "args": dict},
    "s": {"cat": str, "id": int, "tid": int, "ts": NUMBER},
    "f": {"cat": str, "id": int, "tid": int, "ts": NUMBER, "bp": str},
}


def events_of(records: Iterable[Record]) -> list[Event]:
    document = json.loads("".join(perfetto(records)), parse_constant=pytest.fail)
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    return events


def check_format(events: list[Event]) -> None:
    """Every event is one of the format's; see the module's docstring."""
    rows, processes = set(), set()
    for event in events:
        expected = COMMON | FIELDS[event["ph"]]
        assert set(event) == set(expected), event
        for name, kind in expected.items():
            assert isinstance(event[name], kind), (name, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert all(isinstance(value, NUMBER) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            (rows if event["name"] == "thread_name" else processes).add(
                (event["pid"], event["tid"])
            )
        if event["ph"] in "Xisf":
            assert (event["pid"], event["tid"]) in rows, "a row is named before it is used"
            assert (event["pid"], 0) in processes
    slices = slices_of(events)
    for row in slices.values():
        for (_, end, _), (start, _, _) in pairwise(row):
            assert start >= end, "the stays of a machine follow each other"
    check_arrows(events, slices)


def slices_of(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Row → start and end in nanoseconds, and the name, of its slices."""
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = round(e["ts"] * 1e3)
            found[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1e3), e["name"]))
    return {row: sorted(slices) for row, slices in found.items()}


def check_arrows(
    events: list[Event], slices: dict[tuple[int, int], list[tuple[int, int, str]]]
) -> None:
    ends: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] not in "sf":
            continue
        ends[event["cat"], event["id"]].append(event["ph"])
        assert event.get("bp", "e") == "e"
        assert slice_around(event, slices) is not None, f"bound to nothing: {event}"
    assert all(phases == ["s", "f"] for phases in ends.values())


def slice_around(
    event: Event, slices: dict[tuple[int, int], list[tuple[int, int, str]]]
) -> str | None:
    row = slices.get((event["pid"], event["tid"]), [])
    at = round(event["ts"] * 1e3)
    index = bisect_right(row, (at, float("inf"), "")) - 1
    if index < 0:
        return None
    start, end, name = row[index]
    return name if start <= at <= end else None


def arrows_of(events: list[Event]) -> list[tuple[str, str, str, str]]:
    """Row and slice where each begins and ends."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = slices_of(events)
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    return [
        (
            names[begins[e["id"]]["pid"], begins[e["id"]]["tid"]],
            str(slice_around(begins[e["id"]], slices)),
            names[e["pid"], e["tid"]],
            str(slice_around(e, slices)),
        )
        for e in events
        if e["ph"] == "f"
    ]


@pytest.mark.parametrize(
    "path", [*sorted((TESTS / "traces").glob("*.jsonl")), TESTS / "rerun" / "real_run.jsonl"],
    ids=lambda path: path.stem,
)  # fmt: skip
def test_every_recorded_trace_is_exported_to_the_letter_of_the_format(path: Path) -> None:
    check_format(events_of(read_trace(path)))


def test_an_arrow_leads_from_the_slice_of_the_cause_to_that_of_its_effect(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("engine", "e", "start")
    run.fire("engine", "e", "ready")
    run.fire("point", 1, "dispatch")
    export = run.fire("point", 1, "export")
    run.fire("snapshot", "step_1", "write", cause_seq=export)
    asked = run.fire("point", 1, "pin")
    run.fire("engine", "e", "pin", cause_seq=asked)
    suspect = run.fire("engine", "e", "suspect", 9)
    run.fire("point", 1, "skip", reason="pin_violation", cause_seq=suspect)
    run.trace.close()
    events = events_of(read_trace(run.path))
    check_format(events)
    assert arrows_of(events) == [
        ("point 1", "exporting", "snapshot step_1", "writing"),
        ("point 1", "pinning", "engine e", "pinning"),
        ("engine e", "suspect", "point 1", "pinning"),
    ]


def test_a_cause_that_is_nowhere_and_one_of_the_same_machine_have_no_arrow(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    run.fire("snapshot", "step_1", "write", cause_seq=700)
    run.fire("point", 1, "export")
    run.trace.close()
    assert arrows_of(events_of(read_trace(run.path))) == []


def test_a_point_that_was_taken_up_stays_on_its_row(tmp_path: Path) -> None:
    first = Run(tmp_path / "t")
    first.fire("point", 1, "dispatch")
    first.fire("point", 1, "export")
    first.fire("point", 2, "dispatch")
    first.trace.close()
    then = Run(first.path, run_id="run-2", first_seq=3, continues="run-1")
    then.clock.now_s = 60
    then.fire("point", 1, "dispatch", detail={"taken_up": {"run_id": "run-1"}})
    then.fire("point", 1, "run")
    then.fire("point", 1, "finish")
    then.trace.close()
    events = events_of(read_trace(first.path))
    check_format(events)
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert sorted(rows) == ["point 1", "point 2"]
    (row, other) = sorted(slices_of(events).values(), key=len, reverse=True)
    assert [name for _, _, name in row] == ["queued", "exporting", "queued", "running"]
    assert [end - start for start, end, _ in other] == [1], "it ended with its run"


def test_a_healthy_run_has_an_arrow_for_each_cause_on_another_machine(tmp_path: Path) -> None:
    events = events_of(read_trace(healthy_run(tmp_path / "t")))
    check_format(events)
    assert arrows_of(events) == [
        ("engine eval-0", "serving", f"point {step}", "running") for step in (10, 20, 30)
    ]
