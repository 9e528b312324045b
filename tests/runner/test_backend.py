from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint, Snapshot
from vime.eval.runner.backend import BackendEvaluation, BackendOutputError, backend_metrics
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

pytestmark = pytest.mark.anyio

SNAPSHOT = Snapshot(7, Path("/checkpoints/step_7"), "run:7:abc", "abc" * 9, owned=True)


class Recorder(CheckpointEvalFn):
    """Answers with what `args.returns` says, and remembers what it was asked."""

    made: list[Recorder] = []  # noqa: RUF012 -- one list for the whole test, cleared by a fixture

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        super().__init__(input)
        self.asked: list[tuple[Path, int]] = []
        self.disposed = 0
        Recorder.made.append(self)

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        self.asked.append((checkpoint_dir, input.rollout_id))
        if isinstance(self.args.returns, Exception):
            raise self.args.returns
        returned: RolloutFnEvalOutput = self.args.returns
        return returned

    async def dispose(self) -> None:
        self.disposed += 1


@pytest.fixture(autouse=True)
def nobody_made() -> None:
    Recorder.made.clear()


def backend(run_dir: Path, returns: Any) -> BackendEvaluation:
    config = EvalConfig(function_path=f"{__name__}.Recorder")
    return BackendEvaluation(config, Namespace(returns=returns), run_dir)


async def test_the_function_is_made_once_and_handed_each_checkpoint(tmp_path: Path) -> None:
    evaluation = backend(tmp_path, RolloutFnEvalOutput(metrics={"score": 1}))
    for _ in range(2):
        output = await evaluation.evaluate(EvalPoint(7), SNAPSHOT)
    (function,) = Recorder.made
    assert function.asked == [(Path("/checkpoints/step_7"), 7)] * 2
    assert output.metrics == {"eval/score": 1.0}
    assert output.samples_path is None


async def test_the_function_cannot_change_the_runs_arguments(tmp_path: Path) -> None:
    args = Namespace(returns=RolloutFnEvalOutput(metrics={"a": 1}), nested=[1])
    evaluation = BackendEvaluation(EvalConfig(function_path=f"{__name__}.Recorder"), args, tmp_path)
    await evaluation.evaluate(EvalPoint(7), SNAPSHOT)
    Recorder.made[0].args.nested.append(2)
    assert args.nested == [1]


async def test_rewards_become_metrics_and_samples_a_file(tmp_path: Path) -> None:
    data = {
        "rewards": [1.0, 0.0, 1.0, 0.0],
        "truncated": [True, False, False, False],
        "response_lengths": [10, 20, 30, 40],
        "samples": [{"text": "a"}, {"text": "b"}, "c", ("d", 1)],
    }
    returned = RolloutFnEvalOutput(
        data={"math": data, "code": {"rewards": np.array([0.5])}},
        metrics={"extra": 3, "mine/time": 0.5},
    )
    output = await backend(tmp_path, returned).evaluate(EvalPoint(7), SNAPSHOT)
    assert output.metrics == {
        "eval/math": 0.5,
        "eval/math/stderr": pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2),
        "eval/math/truncated_ratio": 0.25,
        "eval/math/response_len/mean": 25.0,
        "eval/code": 0.5,
        "eval/extra": 3.0,
        "mine/time": 0.5,
    }
    assert output.samples_path == tmp_path / "samples" / "step_7.jsonl"
    lines = output.samples_path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"dataset": "math", "text": "a"},
        {"dataset": "math", "text": "b"},
        {"dataset": "math", "sample": "c"},
        {"dataset": "math", "sample": ["d", 1]},
    ]


async def test_an_eval_skip_and_any_other_exception_pass_through(tmp_path: Path) -> None:
    with pytest.raises(EvalSkip, match="judge_down"):
        await backend(tmp_path, EvalSkip("judge_down")).evaluate(EvalPoint(7), SNAPSHOT)
    with pytest.raises(ZeroDivisionError):
        await backend(tmp_path, ZeroDivisionError("x")).evaluate(EvalPoint(7), SNAPSHOT)


async def test_dispose_is_called_once_and_only_on_a_function_that_was_made(
    tmp_path: Path,
) -> None:
    evaluation = backend(tmp_path, RolloutFnEvalOutput(metrics={"a": 1}))
    await evaluation.dispose()
    assert Recorder.made == []
    await evaluation.evaluate(EvalPoint(7), SNAPSHOT)
    await evaluation.dispose()
    await evaluation.dispose()
    assert Recorder.made[0].disposed == 1


async def test_a_dispose_may_be_a_plain_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(self: Recorder) -> None:
        self.disposed += 1

    monkeypatch.setattr(Recorder, "dispose", plain)
    evaluation = backend(tmp_path, RolloutFnEvalOutput(metrics={"a": 1}))
    await evaluation.evaluate(EvalPoint(7), SNAPSHOT)
    await evaluation.dispose()
    assert Recorder.made[0].disposed == 1


async def test_a_path_that_is_no_checkpoint_function_is_named(tmp_path: Path) -> None:
    config = EvalConfig(function_path="vime.rollout.checkpoint_eval.CheckpointEvalFn")
    with pytest.raises(ValueError, match="is no concrete subclass of"):
        await BackendEvaluation(config, Namespace(), tmp_path).evaluate(EvalPoint(7), SNAPSHOT)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "f returned NoneType: expected a RolloutFnEvalOutput"),
        ({"score": 1}, "f returned dict: expected"),
        (RolloutFnEvalOutput(), "neither data nor metrics"),
        (RolloutFnEvalOutput(data={"a": {}}), r"data\['a'\] has no 'rewards'"),
        (RolloutFnEvalOutput(data={"a": {"rewards": []}}), r"data\['a'\] has no 'rewards'"),
        (RolloutFnEvalOutput(data={"a": [1.0]}), r"data\['a'\] is a list"),  # type: ignore[dict-item]
        (RolloutFnEvalOutput(data={"a": {"rewards": [1, None]}}), r"\['rewards'\]\[1\] is None"),
        (RolloutFnEvalOutput(data={"a": {"rewards": ["1"]}}), r"\['rewards'\]\[0\] is '1'"),
        (RolloutFnEvalOutput(metrics={"a": float("nan")}), r"metrics\['a'\] is nan"),
        (
            RolloutFnEvalOutput(data={"a": {"rewards": 1.0}}),
            r"\['rewards'\] is 1.0: expected a list",
        ),
        (
            RolloutFnEvalOutput(data={"a": {"rewards": [1, 0], "truncated": [True]}}),
            r"data\['a'\]\['truncated'\] has 1 entries: expected one for each of the 2 rewards",
        ),
        (RolloutFnEvalOutput(data=[1]), "f: data is a list: expected a dictionary"),  # type: ignore[arg-type]
        (RolloutFnEvalOutput(metrics=[1]), "f: metrics is a list"),  # type: ignore[arg-type]
        (RolloutFnEvalOutput(metrics={5: 1.0}), "the metric's name 5 is no text"),  # type: ignore[dict-item]
        (RolloutFnEvalOutput(data={" ": {"rewards": [1]}}), "an empty name"),
        (RolloutFnEvalOutput(data={"a\n": {"rewards": [1]}}), "cannot be printed"),
        (RolloutFnEvalOutput(data={"\ud800": {"rewards": [1]}}), "cannot be printed"),
        (RolloutFnEvalOutput(data={"step": {"rewards": [1]}}), "'eval/step' is vime's own"),
        (RolloutFnEvalOutput(metrics={"eval/step": 9}), "'eval/step' is vime's own"),
        (RolloutFnEvalOutput(metrics={"skipped_busy": 1}), "'skipped_busy' is vime's own"),
    ],
)
def test_an_output_that_is_no_score_is_named(returned: Any, said: str) -> None:
    with pytest.raises(BackendOutputError, match=said):
        backend_metrics("f", returned)


async def test_an_evaluation_that_is_no_coroutine_is_told_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(self: Recorder, checkpoint_dir: Path, input: RolloutFnEvalInput) -> Any:
        return RolloutFnEvalOutput(metrics={"a": 1})

    monkeypatch.setattr(Recorder, "evaluate_checkpoint", plain)
    with pytest.raises(BackendOutputError, match="not a coroutine: declare it async def"):
        await backend(tmp_path, None).evaluate(EvalPoint(7), SNAPSHOT)


async def test_a_sample_that_json_can_hardly_hold_costs_no_score(tmp_path: Path) -> None:
    samples = [{"text": "\ud800", "n": 2**70, "who": {1}}, {"text": "fine"}]
    returned = RolloutFnEvalOutput(data={"a": {"rewards": [1, 0], "samples": samples}})
    output = await backend(tmp_path, returned).evaluate(EvalPoint(7), SNAPSHOT)
    assert output.samples_path is not None
    first, second = map(json.loads, output.samples_path.read_text().splitlines())
    assert first == {"dataset": "a", "text": "\ud800", "n": 2**70, "who": "{1}"}
    assert second == {"dataset": "a", "text": "fine"}
