"""Plain eval functions on a pinned fleet, here an engine's double on a real port."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio.lowlevel
import httpx
import pytest

from vime.eval.actor import LocalActor
from vime.eval.config import ConfigError, EvalConfig, validate_eval_args
from vime.eval.contracts import EngineProof, EvalPoint, PinProof, Snapshot
from vime.eval.runner.function import FunctionEvaluation
from vime.eval.runner.runner import EvalRunner, RunnerEvaluator
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

pytestmark = pytest.mark.anyio

VERSION = "run:7:abc"
SNAPSHOT = Snapshot(7, Path("/checkpoints/step_7"), VERSION, "abc" * 9, owned=True)
POINT = EvalPoint(7)


class _Answers(BaseHTTPRequestHandler):
    """Says what it was asked for, and with which key."""

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "key": self.headers.get("Authorization")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def proof() -> Iterator[PinProof]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        engines = (EngineProof("engine_0", VERSION), EngineProof("engine_1", VERSION))
        url = f"http://127.0.0.1:{server.server_port}"
        yield PinProof(url, "m", VERSION, engines, num_gpus_per_engine=2, api_key="secret")
        server.shutdown()
        thread.join()


def ask(args: Namespace) -> dict[str, Any]:
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/{args.eval_model_name}"
    with httpx.Client(trust_env=False) as client:
        headers = {"Authorization": f"Bearer {args.eval_api_key}"}
        said: dict[str, Any] = client.get(url, headers=headers).json()
    assert said == {"path": "/m", "key": "Bearer secret"}
    return said


def output(args: Namespace, rollout_id: int, **more: Any) -> RolloutFnEvalOutput:
    ask(args)
    sample = {"text": args.mine, "weight_version": args.eval_weight_version}
    sets = {"sums": {"rewards": [1.0, 0.0], "samples": [sample]}}
    metrics = {"rollout": rollout_id, "gpus": args.rollout_num_gpus, **more}
    return RolloutFnEvalOutput(sets, metrics)


def as_frameworks_do(args: Any, rollout_id: Any, data_source: Any, evaluation: Any = False) -> Any:
    assert data_source is None
    assert evaluation is True
    return output(args, rollout_id)


def two_arguments(args: Any, rollout_id: int) -> Any:
    return output(args, rollout_id)


async def coroutine(args: Any, rollout_id: int) -> Any:
    await anyio.lowlevel.checkpoint()
    return output(args, rollout_id)


class _Instance:
    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.calls = 0


class Sync(_Instance):
    def __call__(self, input: RolloutFnEvalInput) -> Any:
        assert input.evaluation
        self.calls += 1
        return output(self.args, input.rollout_id, calls=self.calls)


class Async(_Instance):
    async def __call__(self, input: RolloutFnEvalInput) -> Any:
        await anyio.lowlevel.checkpoint()
        self.calls += 1
        return output(self.args, input.rollout_id, calls=self.calls)


def only_the_sets(args: Any, rollout_id: int) -> Any:
    return output(args, rollout_id).data


def of_other_weights(args: Any, rollout_id: int) -> Any:
    args.eval_weight_version = "run:6:old"
    return output(args, rollout_id)


def skips(args: Any, rollout_id: int) -> Any:
    raise EvalSkip("judge_down")


def no_score(args: Any, rollout_id: int) -> Any:
    return 0.5


class Uncallable:
    pass


class Unfinished(CheckpointEvalFn):
    pass


nothing = 3


def evaluation(name: str, run_dir: Path) -> FunctionEvaluation:
    config = EvalConfig(function_path=f"{__name__}.{name}")
    return FunctionEvaluation(config, Namespace(mine="own", nested=[1]), run_dir)


@pytest.mark.parametrize(
    "name", ["as_frameworks_do", "two_arguments", "coroutine", "Sync", "Async"]
)
async def test_each_kind_of_function_generates_on_the_fleet_and_its_rewards_are_reported(
    name: str, tmp_path: Path, proof: PinProof
) -> None:
    result = await evaluation(name, tmp_path).evaluate(POINT, SNAPSHOT, proof)
    assert result.metrics["eval/sums"] == 0.5
    assert (result.metrics["eval/rollout"], result.metrics["eval/gpus"]) == (7, 4)
    assert result.samples_path is not None
    (row,) = map(json.loads, result.samples_path.read_text().splitlines())
    assert row == {"dataset": "sums", "text": "own", "weight_version": VERSION}


async def test_an_instance_is_kept_as_long_as_the_fleet_is_the_same(
    tmp_path: Path, proof: PinProof
) -> None:
    function = evaluation("Sync", tmp_path)
    calls = [(await function.evaluate(POINT, SNAPSHOT, proof)).metrics["eval/calls"]]
    calls.append((await function.evaluate(POINT, SNAPSHOT, proof)).metrics["eval/calls"])
    moved = PinProof(proof.base_url, "m", VERSION, proof.engines[:1], 2, api_key="secret")
    calls.append((await function.evaluate(POINT, SNAPSHOT, moved)).metrics["eval/calls"])
    assert calls == [1, 2, 1]


async def test_older_functions_may_return_the_sets_alone(tmp_path: Path, proof: PinProof) -> None:
    result = await evaluation("only_the_sets", tmp_path).evaluate(POINT, SNAPSHOT, proof)
    assert result.metrics["eval/sums"] == 0.5


async def test_a_sample_that_names_other_weights_voids_the_point(
    tmp_path: Path, proof: PinProof
) -> None:
    with pytest.raises(EvalSkip) as caught:
        await evaluation("of_other_weights", tmp_path).evaluate(POINT, SNAPSHOT, proof)
    assert caught.value.reason == "version_mixed"
    assert "sample 0 of sums was generated by weights 'run:6:old'" in caught.value.detail


async def test_the_runner_calls_the_function_and_reports_its_skip_and_its_mistakes(
    tmp_path: Path, proof: PinProof
) -> None:
    for name, reason, said in (
        ("skips", "judge_down", ""),
        ("no_score", "crashed", "returned float: expected a RolloutFnEvalOutput"),
        ("nothing", "crashed", "a int; expected a subclass of"),
    ):
        config = EvalConfig(function_path=f"{__name__}.{name}")
        async with LocalActor(EvalRunner(config, Namespace(), tmp_path), name="runner") as ref:
            with pytest.raises(EvalSkip) as caught:
                await RunnerEvaluator(ref, 60.0).evaluate(POINT, SNAPSHOT, proof)
        assert caught.value.reason == reason
        assert said in caught.value.detail
    config = EvalConfig(function_path=f"{__name__}.Sync")
    runner = EvalRunner(config, Namespace(mine="x"), tmp_path)
    async with LocalActor(runner, name="runner") as ref:
        result = await RunnerEvaluator(ref, 60.0).evaluate(POINT, SNAPSHOT, proof)
    assert result.metrics["eval/sums"] == 0.5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Uncallable", "the class Uncallable has no __call__; expected a subclass of"),
        ("Unfinished", "it lacks evaluate_checkpoint"),
        ("nothing", "a int; expected a subclass of"),
    ],
)
def test_what_cannot_evaluate_is_refused_at_start_with_the_path_as_given(
    name: str, said: str
) -> None:
    path = f"{__name__}.{name}"
    with pytest.raises(ConfigError) as caught:
        validate_eval_args(Namespace(eval_function_path=path))
    assert f"--eval-function-path {path}: " in str(caught.value)
    assert said in str(caught.value)
