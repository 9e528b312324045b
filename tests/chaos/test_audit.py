"""The auditor's judgement on runs that are told as traces: whatever is wrong with one is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.audit import Attribution, Evidence, Injected, points_of
from bench.chaos.faults import Fault
from bench.chaos.leftovers import Leftovers
from bench.chaos.report import Report, print_report
from tests.fsm.traces import Run, version
from vime.fsm.read import read_trace


class Story:
    """A run with two engines, told second by second."""

    def __init__(self, path: Path) -> None:
        self.run = Run(path)
        self.outcomes: list[dict[str, Any]] = []
        self.injected: dict[int, Injected] = {}
        for engine in ("engine_0", "engine_1"):
            self.run.fire("engine", engine, "start")
            self.up(engine, after_s=30)

    def up(self, engine: str, after_s: float) -> None:
        detail = {"seconds": after_s, "url": "http://127.0.0.1:1"}
        self.run.fire("engine", engine, "ready", after_s, detail=detail)

    def down(self, engine: str, weights: str | None = None) -> None:
        self.run.fire("engine", engine, "suspect", reason="gone", weight_version=weights)
        self.run.fire("engine", engine, "kill")

    def back(self, engine: str, after_s: float) -> None:
        self.run.fire("engine", engine, "restart")
        self.run.fire("engine", engine, "start")
        self.up(engine, after_s)

    def fault(self, kind: str, point: int, engine: int = 0) -> None:
        fault = Fault(kind, point, "running", engine)
        self.injected[len(self.injected)] = Injected(fault, self.run.clock.mono(), (point,))

    def begin(self, point: int) -> None:
        self.run.fire("point", point, "dispatch")
        self.run.fire("point", point, "export")
        self.run.fire("point", point, "pin")

    def done(self, point: int) -> None:
        self.run.fire("point", point, "run")
        self.run.fire("point", point, "finish")
        self.report(point, "done", {"eval/chaos": 0.5})

    def skip(self, point: int, reason: str) -> None:
        self.run.fire("point", point, "skip", reason=reason)
        self.report(point, "skipped", {f"eval/skipped_{reason}": 1.0})

    def report(self, point: int, state: str, metrics: dict[str, float]) -> None:
        outcome = {"rollout_id": point, "state": state, "detail": "said so", "metrics": metrics}
        self.outcomes.append(outcome)

    def judged(self) -> tuple[Evidence, Attribution]:
        records = list(read_trace(self.run.path))
        evidence = Evidence(records, points_of(records, self.outcomes), self.injected)
        return evidence, Attribution(evidence)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path / "trace.jsonl")
    yield story
    story.run.trace.close()


def test_a_skip_is_due_to_the_fault_that_hit_its_point(story: Story) -> None:
    story.begin(1)
    story.fault("kill_core", 1)
    story.down("engine_0")
    story.skip(1, "unhealthy")
    story.back("engine_0", 40)
    story.begin(2)
    story.done(2)
    evidence, judged = story.judged()
    assert judged.unattributed == []
    assert judged.costs[0].skipped == [1]
    assert judged.restarts == 1
    assert judged.restarts_without_fault == 0
    assert judged.costs[0].cold_start_s == 40
    assert judged.costs[0].recovery_s == pytest.approx(45)
    assert evidence.points[2].score == 0.5


def test_a_point_that_waited_for_a_whole_fleet_in_vain_is_due_to_the_fault_before_it(
    story: Story,
) -> None:
    story.begin(1)
    story.fault("kill_core", 1)
    story.down("engine_0")
    story.done(1)
    story.begin(2)
    story.skip(2, "timeout_pin")
    story.back("engine_0", 40)
    story.begin(3)
    story.skip(3, "timeout_pin")
    _, judged = story.judged()
    assert judged.costs[0].skipped == [2]
    assert judged.unattributed == ["point 3 was skipped as timeout_pin: said so"]


def test_a_skip_for_another_reason_than_the_faults_is_not_due_to_it(story: Story) -> None:
    story.begin(1)
    story.fault("truncated", 1)
    story.skip(1, "crashed")
    _, judged = story.judged()
    assert judged.unattributed == ["point 1 was skipped as crashed: said so"]


@pytest.mark.parametrize("reports", [0, 2])
def test_a_point_that_is_not_reported_exactly_once_is_unattributed(
    story: Story, reports: int
) -> None:
    story.begin(1)
    story.done(1)
    story.outcomes *= reports
    _, judged = story.judged()
    (sentence,) = judged.unattributed
    assert sentence.startswith("point 1 ended as ['done'] and was reported as")


def test_a_point_without_an_end_is_unattributed(story: Story) -> None:
    story.begin(1)
    _, judged = story.judged()
    assert judged.unattributed == ["point 1 ended as [] and was reported as []"]


def test_a_score_of_a_damaged_snapshot_is_wrong_whatever_it_is(story: Story) -> None:
    story.begin(1)
    story.fault("rotten", 1)
    story.done(1)
    _, judged = story.judged()
    assert judged.wrongly_done == [1]


def test_both_engines_that_a_snapshot_brought_down_are_its_and_a_third_death_is_nobodys(
    story: Story,
) -> None:
    story.begin(1)
    story.fault("rotten", 1)
    for engine in ("engine_0", "engine_1"):
        story.run.fire("engine", engine, "pin", weight_version=version(1))
        story.down(engine, version(1))
    story.skip(1, "pin_violation")
    story.back("engine_0", 30)
    story.back("engine_1", 35)
    story.down("engine_1")
    _, judged = story.judged()
    assert judged.costs[0].skipped == [1]
    assert judged.costs[0].cold_start_s == 35
    assert judged.restarts_without_fault == 1


def test_the_verdict_is_failed_by_each_thing_that_must_be_none(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.begin(1)
    story.fault("kill_core", 1)
    story.down("engine_0")
    story.done(1)
    evidence, judged = story.judged()
    schedule = [hit.fault for hit in evidence.injected.values()]

    def report(**found: Any) -> Report:
        return Report(5, schedule, evidence, judged, **found)

    assert report().passed
    print_report(report())
    assert "chaos passed: seed 5" in capsys.readouterr().out
    for found in (
        {"wrong_scores": ["point 1: wrong"]},
        {"violations": ["4: broken"]},
        {"broken_off": ["faults: status 1"]},
        {"leftovers": Leftovers(processes=["7 worker"])},
        {"leftovers": Leftovers(directories=["vime-1"])},
        {"leftovers": Leftovers(shared_memory=["psm_1"])},
        {"leftovers": Leftovers(ports=["http://127.0.0.1:1"])},
    ):
        assert not report(**found).passed
        print_report(report(**found))
        assert "chaos FAILED: seed 5" in capsys.readouterr().out
    missed = Report(5, [*schedule, Fault("kill_router", 3, "running")], evidence, judged)
    assert missed.must_be_none()["faults not injected"] == ["kill_router at point 3 (running)"]
