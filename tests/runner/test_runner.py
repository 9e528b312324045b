from __future__ import annotations

import os
import pickle
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.virtual import run_virtual
from vime.eval.actor import LocalActor, ProcessActor
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.runner import generate
from vime.eval.runner import runner as runner_module
from vime.eval.runner.runner import EvalRunner, Evaluate, Refusal, RunnerEvaluator
from vime.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

SNAPSHOT = Snapshot(7, Path("/checkpoints/step_7"), "run:7:abc", "abc" * 9, owned=True)
POINT = EvalPoint(7)


class Scripted(CheckpointEvalFn):
    """Does what `args.script` says for the rollout id, and leaves files as evidence."""

    async def evaluate_checkpoint(
        self, checkpoint_dir: Path, input: RolloutFnEvalInput
    ) -> RolloutFnEvalOutput:
        action = self.args.script[input.rollout_id]
        await getattr(self, action)()
        return RolloutFnEvalOutput(metrics={"pid": os.getpid()})

    async def score(self) -> None:
        print("scoring")

    async def skip(self) -> None:
        raise EvalSkip("judge_down", "no judge today")

    async def skip_in_group(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.skip)

    async def fail(self) -> None:
        raise Unpicklable(lambda: None)

    async def time_out_itself(self) -> None:
        raise TimeoutError("my backend's own")

    async def hang(self) -> None:
        await anyio.sleep_forever()

    async def block_the_loop(self) -> None:
        time.sleep(600)  # noqa: ASYNC251 -- what user code should not do; the process is ended

    async def kill_itself(self) -> None:
        print("last words", flush=True)
        os._exit(3)

    async def dispose(self) -> None:
        await anyio.Path(self.args.evidence).write_text("disposed")


class Unpicklable(Exception):
    pass


@asynccontextmanager
async def evaluator(tmp_path: Path, script: list[str]) -> AsyncIterator[Callable[..., Any]]:
    """Asks a runner in a process of its own to evaluate rollout ids."""
    config = EvalConfig(function_path=f"{__name__}.Scripted")
    args = Namespace(script=dict(enumerate(script)), evidence=str(tmp_path / "disposed"))
    actor = ProcessActor(
        "vime.eval.runner.runner:make_runner",
        (config, args, tmp_path),
        name="eval_runner",
        log_path=tmp_path / "runner.log",
    )

    async def evaluate(rollout_id: int, timeout_s: float = 60.0) -> EvalOutput:
        ask = RunnerEvaluator(actor, timeout_s)
        return await ask.evaluate(EvalPoint(rollout_id), SNAPSHOT, None)

    async with actor:
        yield evaluate


async def refused(evaluate: Callable[..., Any], rollout_id: int, **limit: float) -> EvalSkip:
    with pytest.raises(EvalSkip) as caught:
        await evaluate(rollout_id, **limit)
    return caught.value


async def test_what_user_code_does_wrong_skips_the_point_and_the_same_process_goes_on(
    tmp_path: Path,
) -> None:
    script = ["score", "skip", "skip_in_group", "fail", "time_out_itself", "score"]
    async with evaluator(tmp_path, script) as evaluate:
        first = await evaluate(0)
        for rollout_id in (1, 2):
            skip = await refused(evaluate, rollout_id)
            assert (skip.reason, skip.detail) == ("judge_down", "no judge today")
        skip = await refused(evaluate, 3)
        assert skip.reason == "crashed"
        assert "Traceback" in skip.detail
        assert "raise Unpicklable(lambda: None)" in skip.detail
        skip = await refused(evaluate, 4)
        assert skip.reason == "crashed"
        assert "TimeoutError: my backend's own" in skip.detail
        assert (await evaluate(5)).metrics == first.metrics
        assert first.metrics["eval/pid"] != os.getpid()
    assert (tmp_path / "disposed").read_text() == "disposed"
    assert "scoring" in (tmp_path / "runner.log").read_text()


async def test_a_runner_that_dies_skips_the_point_with_its_status_and_last_words(
    tmp_path: Path,
) -> None:
    async with evaluator(tmp_path, ["kill_itself", "score"]) as evaluate:
        skip = await refused(evaluate, 0)
        assert skip.reason == "crashed"
        assert "exit status 3" in skip.detail
        assert "last words" in skip.detail
        assert (await evaluate(1)).metrics["eval/pid"] > 0


def test_an_evaluation_that_hangs_ends_at_its_deadline_and_the_runner_goes_on(
    tmp_path: Path,
) -> None:
    config = EvalConfig(function_path=f"{__name__}.Scripted", eval_timeout_s=3600.0)
    runner = EvalRunner(config, Namespace(script={0: "hang", 1: "score"}), tmp_path)

    async def main() -> tuple[Any, float, Any]:
        began = anyio.current_time()
        hung = await runner.handle(Evaluate(EvalPoint(0), SNAPSHOT, None))
        took_s = anyio.current_time() - began
        return hung, took_s, await runner.handle(Evaluate(EvalPoint(1), SNAPSHOT, None))

    hung, took_s, scored = run_virtual(main)
    assert hung == Refusal("timeout_eval", "the evaluation took longer than --eval-timeout 3600 s")
    assert took_s == pytest.approx(3600.0)
    assert isinstance(scored, EvalOutput)


async def test_code_that_blocks_the_runners_loop_costs_its_process_and_no_later_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "ANSWER_GRACE_S", 0.0)
    async with evaluator(tmp_path, ["score", "block_the_loop", "score"]) as evaluate:
        first = await evaluate(0)
        skip = await refused(evaluate, 1, timeout_s=0.5)
        assert skip.reason == "timeout_eval"
        assert (
            "gave no answer within 0.5 s (--eval-timeout 0.5 and some grace), and was"
            in skip.detail
        )
        assert (await evaluate(2)).metrics != first.metrics


async def test_a_function_that_cannot_be_loaded_skips_the_point_with_its_path(
    tmp_path: Path,
) -> None:
    config = EvalConfig(function_path="no.such.Function")
    runner = EvalRunner(config, Namespace(), tmp_path)
    refusal = await runner.handle(Evaluate(POINT, SNAPSHOT, None))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "crashed"
    assert "--eval-function-path no.such.Function: importing 'no.such' failed" in refusal.detail


async def test_without_a_fleet_and_without_a_function_there_is_nothing_to_evaluate_with(
    tmp_path: Path,
) -> None:
    refusal = await EvalRunner(EvalConfig(), Namespace(), tmp_path).handle(
        Evaluate(POINT, SNAPSHOT, None)
    )
    assert isinstance(refusal, Refusal)
    assert "--eval-function-path is not set" in refusal.detail
    with pytest.raises(TypeError, match="expected Evaluate"):
        await EvalRunner(EvalConfig(), Namespace(), tmp_path).handle("evaluate")


async def test_evaluations_take_turns_and_the_time_of_each_begins_with_its_turn() -> None:
    asked: list[int] = []
    release = [anyio.Event(), anyio.Event()]

    class Slow:
        async def ask(self, message: Evaluate, timeout_s: float | None = None) -> Any:
            asked.append(message.point.rollout_id)
            await release[message.point.rollout_id].wait()
            return Refusal("busy", "")

        async def tell(self, message: Any) -> None: ...

        async def stop(self) -> None: ...

    async def one(rollout_id: int) -> None:
        with pytest.raises(EvalSkip, match="busy"):
            await asker.evaluate(EvalPoint(rollout_id), SNAPSHOT, None)

    asker = RunnerEvaluator(Slow(), 10.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, 0)
        tasks.start_soon(one, 1)
        await anyio.wait_all_tasks_blocked()
        assert asked == [0]
        release[0].set()
        await anyio.wait_all_tasks_blocked()
        assert asked == [0, 1]
        release[1].set()


async def test_a_fleet_where_nobody_listens_is_unhealthy(
    make_config: Callable[..., EvalConfig],
    tmp_path: Path,
    snapshot: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(generate, "FIRST_BACKOFF_S", 0.01)
    config = make_config([{"input": "q0", "label": ""}])
    actor = LocalActor(EvalRunner(config, Namespace(), tmp_path), name="runner")
    with socket.socket() as bound_and_not_listening:
        bound_and_not_listening.bind(("127.0.0.1", 0))
        port = bound_and_not_listening.getsockname()[1]
        proof = PinProof(f"http://127.0.0.1:{port}", "m", "run:1:abc")
        async with actor as ref:
            with pytest.raises(EvalSkip) as caught:
                await RunnerEvaluator(ref, 60.0).evaluate(POINT, snapshot, proof)
    assert caught.value.reason == "unhealthy"
    assert "2 attempts failed, the last one with: ConnectError" in caught.value.detail


def test_messages_and_answers_travel_between_processes_without_the_key_in_sight() -> None:
    proof = PinProof("http://engine.test", "m", "v", api_key="s3cret")
    message = Evaluate(POINT, SNAPSHOT, proof)
    assert pickle.loads(pickle.dumps(message)) == message
    assert "s3cret" not in repr(message)
    assert pickle.loads(pickle.dumps(Refusal("a", "b"))) == Refusal("a", "b")
