"""The synchronous face: what a training loop sees."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.eval import ConfigError, EvalDispatcher
from vime.eval.contracts import EvalOutput
from vime.eval.dispatcher import SkippedPointsError
from vime.fsm.tables import POINT
from vime.rollout.base_types import RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import EvalSkip


def namespace(tmp_path: Path, **flags: Any) -> argparse.Namespace:
    return argparse.Namespace(eval_run_dir=str(tmp_path / "run"), **flags)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[EvalDispatcher]:
    def score(rollout_id: int) -> dict[str, float]:
        if rollout_id == 13:
            raise ZeroDivisionError("unlucky")
        if rollout_id == 14:
            raise EvalSkip("not_today", "it is Sunday")
        return {"sums": rollout_id / 100}

    dispatcher = EvalDispatcher.from_args(namespace(tmp_path), shared_eval=score)
    yield dispatcher
    dispatcher.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shared_engines_block_and_report_like_any_other(shared: EvalDispatcher) -> None:
    handle = shared.dispatch(40)
    assert handle.state == "done"
    outcome = handle.result(0)
    assert outcome.metrics["eval/sums"] == 0.4
    assert outcome.stall_s > 0
    assert shared.drain() == [outcome]
    (line,) = lines(shared.run_dir / "metrics.jsonl")
    assert (line["rollout_id"], line["state"]) == (40, "done")
    states = [r["dest"] for r in lines(shared.run_dir / "trace.jsonl")]
    assert states == ["queued", "running", "done"]


def test_a_shared_eval_that_raises_costs_its_point_and_not_the_run(shared: EvalDispatcher) -> None:
    crashed = shared.dispatch(13).result(0)
    assert crashed.reason == "crashed"
    assert "ZeroDivisionError: unlucky" in str(crashed.detail)
    skipped = shared.dispatch(14).result(0)
    assert (skipped.reason, skipped.detail) == ("not_today", "it is Sunday")
    assert shared.dispatch(15).state == "done"


def test_an_interrupted_shared_eval_shows_the_interrupt_and_settles_its_point(
    tmp_path: Path,
) -> None:
    def interrupted(rollout_id: int) -> None:
        raise KeyboardInterrupt

    dispatcher = EvalDispatcher.from_args(namespace(tmp_path), shared_eval=interrupted)
    with pytest.raises(KeyboardInterrupt), dispatcher:
        dispatcher.dispatch(1)
    assert [o.reason for o in dispatcher.outcomes] == ["crashed"]


def test_a_rollout_output_of_a_framework_is_understood(tmp_path: Path) -> None:
    output = RolloutFnEvalOutput({"sums": {"rewards": [0.0, 1.0]}}, {"extra": 3})
    args = namespace(tmp_path)
    with EvalDispatcher.from_args(args, shared_eval=lambda _: output) as dispatcher:
        metrics = dispatcher.dispatch(1).result(0).metrics
    assert metrics["eval/sums"] == 0.5
    assert metrics["eval/extra"] == 3.0


def test_what_vime_says_of_a_point_nobody_replaces(tmp_path: Path) -> None:
    output = EvalOutput({"eval/step": 9.0, "eval/lag_steps": 9.0, "eval/toy": 0.5})
    with EvalDispatcher.from_args(namespace(tmp_path), shared_eval=lambda _: output) as dispatcher:
        metrics = dispatcher.dispatch(3).result(0).metrics
    assert (metrics["eval/step"], metrics["eval/lag_steps"], metrics["eval/toy"]) == (3, 0, 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"rollout_id": "40"}, "rollout_id='40': expected an integer"),
        ({"rollout_id": True}, "rollout_id=True: expected an integer"),
        ({"rollout_id": -1}, "rollout_id=-1: expected an integer from 0"),
        ({"rollout_id": 10**30}, "expected an integer from 0 to"),
        ({"rollout_id": 1, "hf_dir": ""}, "hf_dir='': expected the path"),
        ({"rollout_id": 1, "hf_dir": 5}, "hf_dir=5: expected the path"),
        ({"rollout_id": 1, "hf_dir": "/nowhere"}, "hf_dir='/nowhere': no such directory"),
    ],
)
def test_a_callers_mistake_raises_at_once(
    shared: EvalDispatcher, call: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        shared.dispatch(**call)
    assert message in str(caught.value)
    assert shared.outcomes == []


def test_a_step_is_dispatched_once(shared: EvalDispatcher) -> None:
    shared.dispatch(1)
    with pytest.raises(ValueError, match="dispatched already"):
        shared.dispatch(1)


def test_a_closed_dispatcher_says_so_and_closing_twice_is_fine(shared: EvalDispatcher) -> None:
    shared.close()
    shared.close()
    with pytest.raises(RuntimeError, match="is closed"):
        shared.dispatch(1)


def test_under_ci_test_a_skipped_point_fails_the_next_call_and_the_drain(tmp_path: Path) -> None:
    def fails(rollout_id: int) -> None:
        raise ValueError("no")

    args = namespace(tmp_path, ci_test=True)
    dispatcher = EvalDispatcher.from_args(args, shared_eval=fails)
    assert dispatcher.dispatch(1).state == "skipped"
    for call in (lambda: dispatcher.dispatch(2), dispatcher.drain):
        with pytest.raises(SkippedPointsError, match="step 1: crashed"):
            call()
    dispatcher.close()


CI_PROGRAM = """
import argparse
from vime.eval import EvalDispatcher, add_eval_arguments
from vime.rollout.checkpoint_eval import EvalSkip

def score(step):
    if step % 2:
        raise EvalSkip("not_today", f"step {step} is odd")
    return {"sums": 1.0}

args = add_eval_arguments(argparse.ArgumentParser()).parse_args()
with EvalDispatcher.from_args(args, shared_eval=score) as dispatcher:
    dispatcher.dispatch(0)
    dispatcher.dispatch(1)
    print("trained")
"""


@pytest.mark.parametrize(("words", "status"), [(["--ci-test"], 1), ([], 0)])
def test_under_ci_test_a_program_whose_last_point_was_skipped_ends_with_the_reasons(
    tmp_path: Path, words: list[str], status: int
) -> None:
    program = [sys.executable, "-c", CI_PROGRAM, *words]
    ended = subprocess.run(
        [*program, "--eval-run-dir", str(tmp_path / "run")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == status
    assert ended.stdout == "trained\n"
    last = "\n".join(ended.stderr.splitlines()[-2:])
    if status:
        assert last.endswith(
            "--ci-test: 1 eval point(s) were skipped:\n  step 1: not_today: step 1 is odd"
        )
    else:
        assert ended.stderr == ""


def test_the_lag_counts_the_steps_that_training_was_ahead(shared: EvalDispatcher) -> None:
    shared.at_step(47)
    assert shared.dispatch(40).result(0).lag_steps == 7


def test_what_is_missing_for_the_mode_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shared_eval=None"):
        EvalDispatcher.from_args(namespace(tmp_path))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "0.5"])
def test_a_shared_score_that_is_no_finite_number_is_no_score(tmp_path: Path, score: object) -> None:
    args = namespace(tmp_path)
    with EvalDispatcher.from_args(args, shared_eval=lambda _: {"a": score}) as dispatcher:
        outcome = dispatcher.dispatch(1).result(0)
    assert outcome.reason == "crashed"
    assert "expected a finite number" in str(outcome.detail)


def test_a_full_disk_ends_the_journal_and_neither_the_evals_nor_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EvalDispatcher.from_args(namespace(tmp_path), shared_eval=lambda _: {"a": 1.0}) as d:
        d.dispatch(1)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, d.trace._file.fileno())  # type: ignore[union-attr]
        os.close(full)
        assert d.dispatch(2).result(0).state == "done"
        assert d.dispatch(3).result(0).state == "done"
        lost = d.trace.num_lost
    assert lost == 6
    assert caplog.text.count("the run goes on, with a gap in its trace") == 1


def test_a_run_that_cannot_begin_leaves_no_directory(tmp_path: Path) -> None:
    args = namespace(tmp_path)
    with pytest.raises(ConfigError, match="tracker"):
        EvalDispatcher.from_args(args, shared_eval=lambda _: None, trackers=[5])
    assert not (tmp_path / "run").exists()
    EvalDispatcher.from_args(args, shared_eval=lambda _: None).close()


def test_a_run_directory_that_is_a_file_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="it is a file"):
        EvalDispatcher.from_args(namespace(tmp_path), shared_eval=lambda _: None)


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    EvalDispatcher.from_args(namespace(tmp_path), shared_eval=lambda _: None).close()
    with pytest.raises(ConfigError, match="another run wrote there already"):
        EvalDispatcher.from_args(namespace(tmp_path), shared_eval=lambda _: None)


def test_trackers_get_each_outcome_and_one_that_raises_harms_nobody(tmp_path: Path) -> None:
    seen: list[int] = []

    def broken(outcome: Any) -> None:
        raise OSError("the tracking server is away")

    args = namespace(tmp_path)
    trackers = [broken, lambda outcome: seen.append(outcome.rollout_id)]
    with EvalDispatcher.from_args(args, shared_eval=lambda _: None, trackers=trackers) as d:
        d.dispatch(1)
        d.dispatch(2)
    assert seen == [1, 2]
    assert [o.state for o in d.outcomes] == ["done", "done"]


def test_the_trace_of_a_run_ends_each_point_in_a_terminal_state(shared: EvalDispatcher) -> None:
    for step in (1, 13, 14):
        shared.dispatch(step)
    shared.close()
    last = {r["id"]: r["dest"] for r in lines(shared.run_dir / "trace.jsonl")}
    assert set(last.values()) <= POINT.terminal
