"""The check finds a fault of each invariant in a trace, and none in a sound one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fsm.traces import Run, edit, healthy_run, pinned_point, version
from vime.fsm.check import INVARIANTS, RULES, Check, Violation, check
from vime.fsm.machine import IllegalTransition
from vime.fsm.read import read_trace


def violations(path: Path, *, ended: bool = False) -> list[Violation]:
    return list(check(read_trace(path), ended=ended))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with one ready engine."""
    run = Run(tmp_path / "trace.jsonl")
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready", 30)
    return run


def only(run: Run, invariant: int, *, ended: bool = False) -> Violation:
    """The one violation that the trace shows."""
    run.trace.close()
    (violation,) = violations(run.path, ended=ended)
    assert violation.invariant == invariant, violation.text
    return violation


def seqs(violation: Violation) -> list[int]:
    return [record.seq for record in violation.records]


def test_every_invariant_has_a_rule_and_a_sentence() -> None:
    assert {rule.invariant for rule in RULES} == set(INVARIANTS) == set(range(1, 11))


def test_a_sound_run_violates_nothing_wherever_it_is_cut(tmp_path: Path) -> None:
    assert violations(healthy_run(tmp_path / "long"), ended=True) == []
    path = healthy_run(tmp_path / "t", num_points=2)
    lines = path.read_bytes().splitlines(keepends=True)
    for begin in range(len(lines)):
        for end in range(begin + 1, len(lines) + 1):
            path.write_bytes(b"".join(lines[begin:end]))
            assert violations(path) == [], (begin, end)


def test_a_violation_that_quotes_a_forged_state_steers_no_terminal(run: Run) -> None:
    run.fire("point", 10, "dispatch")
    run.trace.close()
    edit(run.path, lambda fields: fields | {"dest": "\x1b[2J"})
    found = violations(run.path, ended=True)
    assert any("point 10 was \\x1b[2J when" in violation.text for violation in found)
    assert not any("\x1b" in violation.text for violation in found)


# -- 1: ends -------------------------------------------------------------------------------


def test_1_a_point_that_has_no_end_when_the_run_has_ended(run: Run) -> None:
    last = run.fire("point", 10, "dispatch")
    run.fire("engine", "eval-0", "stop")
    violation = only(run, 1)
    assert violation.text == "point 10 was queued when the run had ended"
    assert seqs(violation) == [last]


def test_1_a_pending_point_of_a_run_that_goes_on_is_no_fault_unless_it_is_said_to_have_ended(
    run: Run,
) -> None:
    run.fire("point", 10, "dispatch")
    run.trace.close()
    counted = Check()
    for record in read_trace(run.path):
        counted.feed(record)
    assert list(counted.end()) == []
    assert counted.num_pending == 1
    assert [v.invariant for v in violations(run.path, ended=True)] == [1, 8]


def test_1_a_point_with_two_ends(run: Run) -> None:
    pinned_point(run, 10)
    run.trace.close()
    lines = [json.loads(line) for line in run.path.read_bytes().splitlines()]
    (finish,) = [fields for fields in lines if fields["trigger"] == "finish"]
    again = {**finish, "seq": len(lines)}
    with run.path.open("a") as file:
        file.write(json.dumps(again) + "\n")
    found = violations(run.path)
    assert "point 10 goes on after its end" in [v.text for v in found if v.invariant == 1]
    assert 9 in [v.invariant for v in found]  # the tables forbid it as well


# -- 2: the window -------------------------------------------------------------------------


def begin(run: Run, step: int, max_in_flight: int = 2, **more: object) -> int:
    run.fire("point", step, "dispatch", detail={"max_in_flight": max_in_flight, **more})
    return run.fire("point", step, "export")


def test_2_more_points_under_way_than_the_limit(run: Run) -> None:
    exports = [begin(run, step) for step in (10, 20)]
    run.fire("point", 30, "dispatch", detail={"max_in_flight": 2})  # it waits: no fault
    exports.append(run.fire("point", 30, "export"))
    violation = only(run, 2)
    assert violation.text == "3 points are under way, the limit is 2"
    assert seqs(violation) == exports


def test_2_a_place_that_was_freed_may_be_taken(run: Run) -> None:
    for step in (10, 20, 30):
        begin(run, step, max_in_flight=1)
        run.fire("point", step, "skip", reason="export_failed")
    run.trace.close()
    assert violations(run.path) == []


def test_2_more_pending_points_at_a_dispatch_than_the_limit(run: Run) -> None:
    begin(run, 10, max_in_flight=1, pending=2)
    assert only(run, 2).text == "2 points were pending, the limit is 1"


# -- 3 and 7: deadlines --------------------------------------------------------------------


@pytest.mark.parametrize("stall_s", [-1.0, 7.0])
def test_3_a_stall_that_is_negative_or_beyond_its_deadline(run: Run, stall_s: float) -> None:
    run.fire("point", 10, "dispatch", detail={"deadlines_s": {"stall": 1.0}})
    run.fire("point", 10, "skip", detail={"stall_s": stall_s}, reason="busy")
    assert "stall" in only(run, 3).text or "held for 7.0 s" in violations(run.path)[0].text


def test_7_a_stay_beyond_its_deadline(run: Run) -> None:
    deadlines = {"deadlines_s": {"exporting": 10, "queued": 1}}
    run.fire("point", 10, "dispatch", detail=deadlines)
    export = run.fire("point", 10, "export")
    late = run.fire("point", 10, "skip", 20, reason="export_failed")
    violation = only(run, 7)
    assert violation.text == "point 10 was exporting for 20 s, the deadline is 10 s"
    assert seqs(violation) == [export, late]


# -- 4: proof ------------------------------------------------------------------------------


def running_point(run: Run, step: int, **facts: object) -> None:
    v = version(step)
    run.fire("point", step, "dispatch")
    run.fire("engine", "eval-0", "pin", weight_version=v)
    run.fire("engine", "eval-0", "serve", weight_version=v)
    run.fire("point", step, "pin", weight_version=v)
    run.fire(
        "point", step, "run", **{"weight_version": v, "detail": {"engines": ["eval-0"]}, **facts}
    )


def test_4_a_point_that_runs_on_an_engine_with_other_weights(run: Run) -> None:
    running_point(run, 10, weight_version=version(20))
    run.trace.close()
    asked, served = (v.text for v in violations(run.path))
    assert "engine eval-0 serves run-1:10:" in asked
    assert served == f"point 10 had the weights {version(10)} and has {version(20)}"


def test_4_a_point_that_runs_on_an_engine_that_is_down(run: Run) -> None:
    running_point(run, 10)
    run.fire("engine", "eval-0", "suspect")
    run.fire("point", 20, "dispatch")
    run.fire("point", 20, "run", weight_version=version(10), detail={"engines": ["eval-0"]})
    assert (
        "point 20 runs on run-1:10:00000000000a, and engine eval-0 serves nothing"
        in only(run, 4).text
    )


def test_4_a_point_whose_weights_no_engine_serves(run: Run) -> None:
    running_point(run, 10, weight_version=version(20), detail=None)
    run.trace.close()
    assert violations(run.path)[0].text.endswith("and no engine serves it")


def test_4_an_engine_that_is_pinned_to_other_weights_under_a_running_point(run: Run) -> None:
    running_point(run, 10)
    run.fire("engine", "eval-0", "pin", weight_version=version(20))
    assert "engine eval-0 is pinned to run-1:20:" in only(run, 4).text


def test_4_an_engine_that_serves_what_it_was_not_pinned_to(run: Run) -> None:
    run.fire("engine", "eval-0", "pin", weight_version=version(10))
    run.fire("engine", "eval-0", "serve", weight_version=version(20))
    assert "was pinned to run-1:10:00000000000a and serves run-1:20:" in only(run, 4).text


def test_4_a_score_under_another_version_than_the_point_ran_on(run: Run) -> None:
    running_point(run, 10)
    run.fire("point", 10, "finish", weight_version=version(20))
    assert "ran on run-1:10:00000000000a and is scored as run-1:20:" in only(run, 4).text


def test_4_a_score_of_a_pinned_point_without_a_version(run: Run) -> None:
    running_point(run, 10)
    run.fire("point", 10, "finish")
    assert "is scored without a weight version" in only(run, 4).text


def test_4_a_score_on_mixed_weights(run: Run) -> None:
    running_point(run, 10)
    detail = {"metrics": {"eval/sums/weight_version/mixed_ratio": 0.25}}
    run.fire("point", 10, "finish", weight_version=version(10), detail=detail)
    assert "mixed_ratio is 0.25" in only(run, 4).text


def test_4_a_point_on_shared_engines_needs_no_version(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 10, "dispatch")
    run.fire("point", 10, "run", detail={"engines": "shared"})
    run.fire("point", 10, "finish", detail={"metrics": {"eval/sums": 1.0}})
    run.trace.close()
    assert violations(run.path) == []


# -- 5 and 6: snapshots --------------------------------------------------------------------


def snapshot(run: Run, *triggers: str, step: int = 10) -> int:
    for trigger in triggers:
        last = run.fire("snapshot", step, trigger, weight_version=version(step))
    return last


def test_5_an_engine_that_is_given_an_unverified_snapshot(run: Run) -> None:
    sealed = snapshot(run, "write", "seal")
    pin = run.fire("engine", "eval-0", "pin", weight_version=version(10))
    violation = only(run, 5)
    assert "is given run-1:10:00000000000a, which is not verified" in violation.text
    assert seqs(violation) == [sealed, pin]


def test_5_an_engine_that_is_given_a_snapshot_that_is_gone(run: Run) -> None:
    snapshot(run, "write", "seal", "verify", "delete")
    run.fire("engine", "eval-0", "pin", weight_version=version(10))
    only(run, 5)


def test_6_a_snapshot_that_is_deleted_under_its_reader(run: Run) -> None:
    lease = snapshot(run, "write", "seal", "verify", "lease")
    delete = snapshot(run, "delete")
    violation = only(run, 6)
    assert violation.text == "snapshot 10 is deleted under 1 reader"
    assert seqs(violation) == [lease, delete]


def test_6_a_snapshot_that_is_left_more_often_than_leased(run: Run) -> None:
    snapshot(run, "write", "seal", "verify", "lease", "leave", "leave")
    assert only(run, 6).text == "snapshot 10 is left by nobody"


def test_6_a_deleted_snapshot_that_was_never_ours(run: Run) -> None:
    snapshot(run, "adopt", "verify", "delete")
    assert only(run, 6).text == "snapshot 10 is deleted and was never vime's"


def test_6_more_snapshots_on_disk_than_are_to_be_kept(run: Run) -> None:
    for step in (10, 20):
        run.fire("point", step, "dispatch", detail={"keep_snapshots": 0})
        snapshot(run, "write", "seal", "verify", step=step)
        run.fire("point", step, "skip", reason="busy")
    run.fire("point", 30, "dispatch", detail={"keep_snapshots": 1})
    snapshot(run, "write", step=30)
    text = "2 snapshots on disk, 0 are to be kept and 1 point pending"
    run.trace.close()
    assert [(v.invariant, v.text) for v in violations(run.path)] == [
        (6, text),
        (6, "3 snapshots on disk, 1 are to be kept and 1 point pending"),
    ]


def test_6_a_snapshot_that_was_removed_in_time_leaves_room_for_the_next(run: Run) -> None:
    for step in (10, 20):
        run.fire("point", step, "dispatch", detail={"keep_snapshots": 0})
        snapshot(run, "write", "seal", "verify", "delete", step=step)
        run.fire("point", step, "skip", reason="busy")
    run.trace.close()
    assert violations(run.path) == []


# -- 8: what is left -----------------------------------------------------------------------


def test_8_an_engine_that_is_up_when_the_run_has_ended(run: Run) -> None:
    assert only(run, 8, ended=True).text == "engine eval-0 was ready when the run had ended"


@pytest.mark.parametrize(("triggers", "what"), [(["write"], "written"), (["write", "seal", "verify", "lease"], "read")])  # fmt: skip
def test_8_a_snapshot_in_use_when_every_engine_is_stopped(
    run: Run, triggers: list[str], what: str
) -> None:
    snapshot(run, *triggers)
    run.fire("engine", "eval-0", "stop")
    assert only(run, 8).text == f"snapshot 10 was being {what} when the run had ended"


# -- 9 and 10 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: None if f["seq"] in (3, 4) else f, "2 records of node driver missing before"),
        (lambda f: {**f, "dest": "done"} if f["seq"] == 2 else f, "dest should be queued"),
        (lambda f: {**f, "mono_ns": 5} if f["seq"] == 2 else f, "clock ran backwards"),
        (lambda f: {**f, "cause_seq": 9} if f["seq"] == 2 else f, "seq 9, is no record before it"),
    ],
)
def test_9_a_trace_that_is_not_what_a_run_wrote(
    tmp_path: Path, change: Callable[[dict], dict | None], text: str
) -> None:
    path = edit(healthy_run(tmp_path / "t", num_points=1), change)
    assert any(v.invariant == 9 and text in v.text for v in violations(path))


def test_a_rejected_trigger_is_counted_and_no_fault(run: Run) -> None:
    with pytest.raises(IllegalTransition):
        run.fire("engine", "eval-0", "serve")
    run.trace.close()
    counted = Check()
    assert [v for record in read_trace(run.path) for v in counted.feed(record)] == []
    assert counted.num_rejected == 1


def test_10_a_result_that_lands_at_another_step(run: Run) -> None:
    run.fire("point", "hf:10", "dispatch")
    run.fire("point", "hf:10", "skip", reason="busy", detail={"metrics": {"eval/step": 10.0}})
    run.fire("point", 20, "dispatch")
    run.fire("point", 20, "skip", reason="busy", detail={"metrics": {"eval/step": 30}})
    assert only(run, 10).text == "the result of point 20 landed at step 30"
