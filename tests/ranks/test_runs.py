"""Runs of two real ranks: the same outcomes on both, whatever becomes of one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import ranks, results, run

pytestmark = pytest.mark.slow


def summary(result: list[Any]) -> list[tuple[Any, ...]]:
    """Step, state, reason and score of each point, without the sentences."""
    return [tuple(row[:4]) for row in result]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Where the runs were, and what each of the two ranks found."""
    root = tmp_path_factory.mktemp("runs")
    first, second = run("runs", root)
    return root, first, second


def both(runs: tuple[Path, dict[str, Any], dict[str, Any]], name: str) -> Any:
    """What both ranks found in one run."""
    _, first, second = runs
    assert first[name] == second[name]
    return first[name]


def test_every_rank_hears_the_scores_of_the_weights_that_were_dispatched(runs: Any) -> None:
    first, staging = both(runs, "whole_run"), runs[0] / "whole_run" / "staging"
    assert summary(first) == [(step, "done", None, float(step)) for step in range(1, 5)]
    assert len(list(staging.glob("step_*"))) == 2
    assert not list(staging.glob(".vime*"))


def test_points_that_rank_0_drops_take_no_memory_on_the_others(runs: Any) -> None:
    first = both(runs, "dropped_points")
    assert {row[2] for row in first} <= {None, "busy"}
    assert summary(first)[-1] == (8, "done", None, 8.0)


def test_a_rank_that_cannot_capture_ends_the_point_and_not_the_next_one(runs: Any) -> None:
    first = both(runs, "failing_rank")
    assert summary(first) == [(1, "skipped", "export_failed", None), (2, "done", None, 2.0)]
    assert "rank 1" in first[0][4]
    assert "bias: on the meta device" in first[0][4]


def test_a_rank_that_is_stopped_ends_the_point_by_its_deadline(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "timed_out")
    with ranks("stopped_rank", tmp_path) as processes:
        assert (tmp_path / "timed_out").read_text() == "step 1"
        assert (tmp_path / "stopping").exists()
        processes[1].send_signal(signal.SIGCONT)
        first, second = results(processes, tmp_path)
    assert first == second
    assert summary(first) == [(1, "skipped", "timeout_export", None), (2, "done", None, 2.0)]
    assert "rank 1 has not written its part of step 1 within 9 s" in first[0][4]


def test_a_rank_that_dies_ends_the_point_by_its_deadline(tmp_path: Path) -> None:
    first, _ = run("dead_rank", tmp_path)
    assert summary(first) == [(1, "skipped", "timeout_export", None)]
    assert not list((tmp_path / "staging").iterdir())


def test_a_rank_that_dispatches_other_points_holds_nobody(runs: Any) -> None:
    first = both(runs, "absent_rank")
    assert summary(first) == [(1, "skipped", "timeout_export", None), (2, "done", None, 2.0)]


def test_a_rank_that_leaves_is_heard_by_the_others_at_once(runs: Any) -> None:
    _, first, second = runs
    assert first["leader_leaves"] == "the loss is no number"
    assert second["leader_leaves"] == "rank 0 has closed its dispatcher"
    (point,) = first["follower_leaves"]
    assert point[:3] == [1, "skipped", "export_failed"]
    assert "rank 1: this rank has closed its dispatcher" in point[4]


def test_wrong_flags_are_told_on_every_rank(runs: Any) -> None:
    first = both(runs, "wrong_flags")
    assert "--eval-max-in-flight 0" in first[0]


def test_under_ci_test_every_rank_fails(runs: Any) -> None:
    assert both(runs, "ci_test") == ["service_away"]
