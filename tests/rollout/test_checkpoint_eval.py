"""The contract of a user's backend: what it may rely on, and that its faults cost one point each."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rollout.backend import BLOCK, CRASH, EXIT, KILLED, RAISE, SKIP, Faulty, Unfinished
from tests.snapshots import checkpoints
from vime.eval import ConfigError, EvalDispatcher, validate_eval_args
from vime.eval.runner import runner
from vime.rollout.checkpoint_eval import (
    CheckpointEvalFn,
    EvalSkip,
    is_checkpoint_eval_fn,
    retarget_args,
)

pytestmark = pytest.mark.slow

__all__ = ["checkpoints"]  # a fixture


@pytest.mark.timeout(180)
def test_whatever_a_backend_does_costs_its_own_point_and_a_dead_process_is_replaced(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ANSWER_GRACE_S", 1.0)
    args = Namespace(
        eval_function_path="tests.rollout.backend.Faulty",
        eval_interval=1,
        eval_hf_dir=str(tmp_path / "staging"),
        eval_run_dir=str(tmp_path / "run"),
        eval_timeout=8.0,
        eval_max_in_flight=1,  # two may overtake each other, and whose process it is depends on it
    )
    with EvalDispatcher.from_args(args, exporter=lambda *_: None) as dispatcher:
        for step in range(13):
            dispatcher.dispatch(step, hf_dir=checkpoints / "whole")
        outcomes = {o.rollout_id: o for o in dispatcher.drain()}
    assert {step: o.reason for step, o in outcomes.items()} == {
        **dict.fromkeys(range(13)),
        **dict.fromkeys((RAISE, EXIT, CRASH, KILLED), "crashed"),
        BLOCK: "timeout_eval",
        SKIP: "judge_away",
    }
    pids = {step: o.metrics["eval/pid"] for step, o in outcomes.items() if o.state == "done"}
    assert pids[0] == pids[2]  # an exception leaves the process
    assert pids[10] == pids[12]  # and so does a skip
    assert len({pids[2], pids[4], pids[6], pids[8], pids[10]}) == 5
    said = {step: record["message"] for step, record in skips(tmp_path / "run").items()}
    assert "ZeroDivisionError: the user's own mistake" in said[RAISE]
    assert "tests/rollout/backend.py" in said[RAISE]
    assert "status 7" in said[EXIT]
    assert "SIGSEGV" in said[CRASH]
    assert "SIGKILL" in said[KILLED]
    assert said[SKIP] == "nobody judges whole"


def test_a_backend_that_never_lets_go_is_ended_by_the_close_which_leaves_nothing(
    checkpoints: Path, tmp_path: Path
) -> None:
    args = Namespace(
        eval_function_path="tests.rollout.backend.NeverLetsGo",
        eval_interval=1,
        eval_hf_dir=str(tmp_path / "staging"),
        eval_run_dir=str(tmp_path / "run"),
        eval_dispose_timeout=10.0,
    )
    with EvalDispatcher.from_args(args, exporter=lambda *_: None) as dispatcher:
        outcome = dispatcher.dispatch(0, hf_dir=checkpoints / "whole").result()
    assert not psutil.pid_exists(int(outcome.metrics["eval/pid"]))
    assert list((tmp_path / "staging").iterdir()) == []


def skips(run_dir: Path) -> dict[int, Any]:
    records = map(json.loads, (run_dir / "trace.jsonl").read_text().splitlines())
    return {
        int(record["id"].removeprefix("hf:")): record["detail"]
        for record in records
        if (record["machine"], record["trigger"]) == ("point", "skip")
    }


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package.Backend", "importing 'no_such_package' failed: ModuleNotFoundError"),
        ("tests.rollout.backend.Nothing", "has no 'Nothing'"),
        ("tests.rollout.backend.Unfinished", "lacks evaluate_checkpoint"),
        ("tests.rollout.backend.RAISE", "expected a subclass of"),
        ("Backend", "expected a dotted path such as package.module.name"),
    ],
)
def test_a_path_that_names_no_backend_is_refused_at_start_as_given(
    path: str, said: str, tmp_path: Path
) -> None:
    args = Namespace(eval_function_path=path, eval_interval=1, eval_hf_dir=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(args)
    assert f"--eval-function-path {path}" in str(caught.value)
    assert said in str(caught.value)


def test_only_a_whole_subclass_is_a_checkpoint_eval_fn() -> None:
    assert is_checkpoint_eval_fn(Faulty)
    for other in (CheckpointEvalFn, Unfinished, Path, print, "Faulty", None):
        assert not is_checkpoint_eval_fn(other)


def test_a_skip_has_a_reason_for_metrics_and_a_sentence_for_people() -> None:
    skip = EvalSkip("judge_away.v2-b", "503 from the judge")
    assert (skip.reason, skip.detail) == ("judge_away.v2-b", "503 from the judge")
    assert str(skip) == "judge_away.v2-b: 503 from the judge"
    assert str(EvalSkip("busy")) == "busy"
    for wrong in ("", "two words", "a/b", "line\nbreak"):
        with pytest.raises(ValueError, match=r"EvalSkip reason .* put sentences into detail="):
            EvalSkip(wrong)


def test_retargeted_arguments_point_at_the_router_and_the_callers_stay_untouched() -> None:
    args = Namespace(
        vllm_router_ip="10.0.0.1", vllm_router_port=1, rollout_num_gpus=8, nested={"a": [1]}
    )
    before = json.dumps(vars(args))
    target = retarget_args(args, "127.0.0.1", 30000, [2, 2, 2])
    target.nested["a"].append(2)
    assert json.dumps(vars(args)) == before
    assert (target.vllm_router_ip, target.vllm_router_port) == ("127.0.0.1", 30000)
    assert (target.rollout_num_gpus, target.rollout_num_engines) == (6, 3)
    assert target.rollout_num_gpus_per_engine == 2
    assert not hasattr(retarget_args(args, "h", 1, [1, 2]), "rollout_num_gpus_per_engine")


@pytest.mark.parametrize(
    ("port", "counts", "said"),
    [
        (0, [1], "router_port=0: expected a port from 1 to 65535"),
        (65536, [1], "router_port=65536"),
        (80, [], r"engine_gpu_counts=\[\]: expected one positive number"),
        (80, [1, 0], r"engine_gpu_counts=\[1, 0\]"),
    ],
)
def test_a_router_that_cannot_be_is_refused(port: int, counts: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        retarget_args(Namespace(), "127.0.0.1", port, counts)
