"""The same requests as in `test_generate.py` and `test_stock.py`, to a real vLLM engine."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import psutil
import pytest

from tests.runner.engine_double import answer
from tests.standing import API_KEY, MODEL, StandingEngine
from tests.watch import watching
from vime.eval.actor import ProcessActor
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, PinProof, Snapshot
from vime.eval.runner import generate
from vime.eval.runner.runner import RunnerEvaluator
from vime.eval.runner.stock import StockEvaluation
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]

VERSION = "run:1:aaaaaaaaaaaa"
POINT = EvalPoint(1)


@dataclass
class Engine:
    standing: StandingEngine
    base_url: str

    @property
    def proof(self) -> PinProof:
        return PinProof(self.base_url, MODEL, VERSION, api_key=API_KEY)

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(1, self.standing.checkpoint, VERSION, "a" * 64, owned=True)

    async def label(self, version: str) -> None:
        async with httpx.AsyncClient(base_url=self.base_url) as client:
            body = {"new_version": version}
            (await client.post("/update_weight_version", json=body)).raise_for_status()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(anyio_backend: str, standing_engine: StandingEngine) -> Engine:
    engine = Engine(standing_engine, standing_engine.running().url)
    await engine.label(VERSION)
    return engine


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    path = tmp_path / "toy.jsonl"
    rows: list[dict[str, Any]] = [{"input": f"{i} + {i} =", "label": 2 * i} for i in range(8)]
    rows.append({"input": [{"role": "user", "content": "hello"}], "label": "hello"})
    path.write_text("\n".join(map(json.dumps, rows)))
    return EvalConfig(prompt_data=(("toy", path),), max_response_len=16, concurrency=4)


def runner_of(config: EvalConfig, run_dir: Path, **args: Any) -> ProcessActor:
    return ProcessActor(
        "vime.eval.runner.runner:make_runner",
        (config, Namespace(**args), run_dir),
        name="eval_runner",
        log_path=run_dir / "runner.log",
    )


def rows_of(output: EvalOutput) -> list[dict[str, Any]]:
    assert output.samples_path is not None
    return [json.loads(line) for line in output.samples_path.read_bytes().splitlines()]


async def test_greedy_samples_are_the_same_twice_and_carry_the_version_of_their_weights(
    engine: Engine, config: EvalConfig, tmp_path: Path
) -> None:
    async with runner_of(config, tmp_path) as actor:
        evaluator = RunnerEvaluator(actor, 120.0)
        outputs = [
            await evaluator.evaluate(EvalPoint(step), engine.snapshot, engine.proof)
            for step in (1, 2)
        ]
    first, second = map(rows_of, outputs)
    assert first == second
    assert {row["weight_version"] for row in first} == {VERSION}
    assert all(1 <= len(row["output_token_ids"]) <= 16 for row in first)
    assert {row["finish_reason"] for row in first} <= {"stop", "length"}
    assert len({tuple(row["output_token_ids"]) for row in first}) > 1
    metrics = outputs[0].metrics
    assert metrics["eval/toy/failed_ratio"] == 0.0
    assert metrics["eval/toy/weight_version/mixed_ratio"] == 0.0
    assert 0 < metrics["eval/toy/response_len/mean"] <= 16
    assert metrics["eval/toy/tokens_per_second"] > 0


async def test_sampled_answers_differ_by_their_seed_and_repeat_with_it(
    engine: Engine, config: EvalConfig, tmp_path: Path
) -> None:
    # One at a time: in another batch the rounding is another, and a draw may fall elsewhere.
    sampled = replace(config, temperature=1.0, n_samples_per_prompt=3, concurrency=1)
    rows = []
    for run in ("a", "b"):
        stock = StockEvaluation(sampled, tmp_path / run)
        rows.append(rows_of(await stock.evaluate(POINT, engine.snapshot, engine.proof)))
    assert rows[0] == rows[1]
    one_prompt = [tuple(r["output_token_ids"]) for r in rows[0] if r["prompt_index"] == 0]
    assert len(set(one_prompt)) == 3


def ask_as_frameworks_do(args: Namespace, rollout_id: int) -> dict[str, Any]:
    """A framework's own eval function: it finds the fleet in its arguments."""
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/v1/completions"
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(
            url,
            headers={"Authorization": f"Bearer {args.eval_api_key}"},
            json={
                "model": args.eval_model_name,
                "prompt": args.question,
                "max_tokens": 8,
                "temperature": 0,
            },
        )
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    sample = {"text": choice["text"], "weight_version": args.eval_weight_version}
    return {"theirs": {"rewards": [float(rollout_id)], "samples": [sample]}}


async def test_a_frameworks_eval_function_generates_on_the_engine(
    engine: Engine, config: EvalConfig, tmp_path: Path
) -> None:
    theirs = replace(config, function_path=f"{__name__}.ask_as_frameworks_do")
    async with runner_of(theirs, tmp_path, question="1 + 1 =") as actor:
        evaluator = RunnerEvaluator(actor, 120.0)
        outputs = [
            await evaluator.evaluate(EvalPoint(3), engine.snapshot, engine.proof) for _ in range(2)
        ]
    assert outputs[0].metrics == {"eval/theirs": 3.0}
    ((first,), (second,)) = map(rows_of, outputs)
    assert first == second
    assert "text" in first


async def test_each_set_has_its_sampling_its_reward_and_its_share_of_long_prompts(
    engine: Engine, config: EvalConfig, tmp_path: Path
) -> None:
    ((_, path),) = config.prompt_data
    long = tmp_path / "long.jsonl"
    long.write_text("\n".join(json.dumps({"input": "7" * n, "label": "7"}) for n in (20, 600)))
    own = replace(
        config,
        prompt_data=(("toy", path), ("cut", long), ("skip", long)),
        reward="numeric",
        dataset_overrides={
            "toy": {"take": 8, "n_samples_per_prompt": 2, "temperature": 1.0, "reward": "math"},
            "cut": {"max_prompt_len": 100, "overlong_prompt": "cut", "max_response_len": 3},
            "skip": {"max_prompt_len": 100, "overlong_prompt": "skip", "max_response_len": 3},
        },
    )
    async with runner_of(own, tmp_path) as actor:
        output = await RunnerEvaluator(actor, 120.0).evaluate(POINT, engine.snapshot, engine.proof)
    rows = rows_of(output)
    assert Counter(row["dataset"] for row in rows) == {"toy": 16, "cut": 2, "skip": 1}
    assert all(len(r["output_token_ids"]) <= 3 for r in rows if r["dataset"] != "toy")
    assert output.metrics["eval/cut/prompts_cut"] == 1
    assert output.metrics["eval/skip/prompts_skipped"] == 1
    for name in ("toy", "cut", "skip"):
        assert output.metrics[f"eval/{name}/failed_ratio"] == 0.0


async def test_an_engine_with_another_version_gives_no_score(
    engine: Engine, config: EvalConfig, tmp_path: Path
) -> None:
    await engine.label("default")
    try:
        with pytest.raises(EvalSkip) as caught:
            await StockEvaluation(config, tmp_path).evaluate(POINT, engine.snapshot, engine.proof)
    finally:
        await engine.label(VERSION)
    assert caught.value.reason == "version_mixed"
    assert "generated by weights 'default'" in caught.value.detail


async def test_a_prompt_that_is_too_long_fails_alone_and_is_named(
    engine: Engine, config: EvalConfig, tmp_path: Path
) -> None:
    (_, path), *_ = config.prompt_data
    with path.open("a") as file:
        file.write("\n" + json.dumps({"input": "x" * 300, "label": ""}))
    output = await StockEvaluation(config, tmp_path).evaluate(POINT, engine.snapshot, engine.proof)
    assert output.metrics["eval/toy/failed_ratio"] == pytest.approx(0.1)
    (failure,) = output.detail["failures"]
    assert failure.startswith("toy prompt 9 sample 0: HTTP 400: The decoder prompt (length 300)")


async def test_a_wrong_key_is_named(engine: Engine, config: EvalConfig, tmp_path: Path) -> None:
    with pytest.raises(EvalSkip, match=r"unhealthy: .*HTTP 401: Unauthorized"):
        await StockEvaluation(config, tmp_path).evaluate(
            POINT, engine.snapshot, replace(engine.proof, api_key="wrong")
        )


async def test_the_double_answers_in_the_form_of_the_engine(engine: Engine) -> None:
    body = {
        "model": MODEL,
        "token_ids": [1, 2, 3],
        "sampling_params": {"n": 1, "temperature": 0.0, "top_p": 1.0, "max_tokens": 4, "seed": 1},
    }
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(base_url=engine.base_url, headers=headers) as client:
        real = (await client.post(generate.GENERATE_PATH, json=body)).json()
        refused = (await client.post(generate.GENERATE_PATH, json={**body, "token_ids": []})).json()
    double = answer(real["choices"][0]["token_ids"], VERSION, "length")
    assert double.keys() <= real.keys()
    assert double["choices"][0].items() <= real["choices"][0].items()
    assert isinstance(refused["error"]["message"], str)


async def test_an_engine_that_dies_under_an_evaluation_makes_it_unhealthy_and_leaves_nothing(
    engine: Engine,
    config: EvalConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last one: the engine does not come back. It is its keeper that is killed."""
    monkeypatch.setattr(generate, "MAX_ATTEMPTS", 3)
    caught: list[EvalSkip] = []
    endless = replace(config, max_response_len=200, n_samples_per_prompt=500)

    async def evaluate() -> None:
        with pytest.raises(EvalSkip) as skip:
            await StockEvaluation(endless, tmp_path).evaluate(POINT, engine.snapshot, engine.proof)
        caught.append(skip.value)

    keeper = psutil.Process(engine.standing.running().process.keeper_pid)
    tree = [keeper.pid, *(child.pid for child in keeper.children(recursive=True))]
    assert len(tree) >= 4  # keeper, server, core, worker
    with watching(tree) as watch, anyio.fail_after(100):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluate)
            await answering(engine)
            keeper.kill()
            status = await anyio.to_thread.run_sync(engine.standing.wait)
            watch.assert_gone(0.1)
    assert status == -signal.SIGKILL
    assert caught[0].reason == "unhealthy"
    assert "3 attempts failed, the last one with: Connect" in caught[0].detail


async def answering(engine: Engine) -> None:
    """Wait until the engine has requests in hand."""
    async with httpx.AsyncClient(base_url=engine.base_url) as client:
        while True:
            text = (await client.get("/metrics")).text
            running = [
                float(line.rsplit(" ", 1)[1])
                for line in text.splitlines()
                if line.startswith("vllm:num_requests_running")
            ]
            if sum(running) > 0:
                return
            await anyio.sleep(0.02)
