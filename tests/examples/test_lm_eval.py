"""The example that runs lm-evaluation-harness on pinned weights: on a server of one's own, on a fleet."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from eval.lm_eval_fn import TASK_DIR, as_output, task_names
from eval.lm_eval_model import _cut, _kept, _loglikelihood, _sampling, open_asker
from eval.vllm_server import VllmServer

from tests.examples.test_external_vllm import tell_environment
from vime.cli import main
from vime.eval import EvalDispatcher
from vime.eval.contracts import Outcome, PinProof
from vime.rollout.base_types import RolloutFnEvalOutput
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio

DOCS = [json.loads(line) for line in (TASK_DIR / "sums.jsonl").read_text().splitlines()]


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_the_harness_scores_a_checkpoint_as_the_model_itself_does_by_hand(
    server: VllmServer,
    backend_args: Namespace,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell_environment(server, monkeypatch)
    args = Namespace(**vars(backend_args))
    args.eval_function_path = "eval.lm_eval_fn.LmEvalFn"
    args.lm_eval_tasks = "sums_choice, sums_generate"
    args.eval_run_dir, args.eval_hf_dir = str(tmp_path / "run"), str(tmp_path / "staging")
    logged: list[Outcome] = []

    def run() -> Outcome:
        with EvalDispatcher.from_args(
            args, exporter=lambda *_: None, trackers=[logged.append]
        ) as dispatcher:
            return dispatcher.dispatch(30, hf_dir=checkpoints / "whole").result(200)

    outcome = await anyio.to_thread.run_sync(run)
    assert (outcome.state, outcome.detail) == ("done", None)
    assert logged == [outcome]
    (path,) = (tmp_path / "run" / "samples").iterdir()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    chosen = sorted((r for r in rows if r["dataset"] == "sums_choice"), key=lambda r: r["doc_id"])
    assert [row["doc"] for row in chosen] == DOCS
    found = [[float(resp[0][0]) for resp in row["resps"]] for row in chosen]
    for likelihoods, by_hand in zip(found, likelihoods_by_hand(checkpoints / "whole"), strict=True):
        assert likelihoods == pytest.approx(by_hand, abs=0.1)  # the engine computes in bfloat16
    right = [max(range(4), key=row.__getitem__) for row in found]
    accuracy = sum(a == doc["answer"] for a, doc in zip(right, DOCS, strict=True)) / len(DOCS)
    metrics = outcome.metrics
    assert metrics["eval/sums_choice/acc"] == metrics["eval/sums_choice"] == accuracy
    error = math.sqrt(accuracy * (1 - accuracy) / (len(DOCS) - 1))
    assert metrics["eval/sums_choice/acc/stderr"] == pytest.approx(error)
    assert metrics["eval/sums_generate/exact_match"] == 0.0  # its weights are random


def likelihoods_by_hand(checkpoint: Path) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def likelihood(question: str, choice: str) -> float:
        before, ids = tokenizer.encode(question), tokenizer.encode(question + choice)
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        return sum(float(rows[i - 1, ids[i]]) for i in range(len(before), len(ids)))

    return [[likelihood(doc["question"], choice) for choice in doc["choices"]] for doc in DOCS]


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_an_answer_of_other_weights_ends_the_tasks(server: VllmServer) -> None:
    proof = PinProof(server.url, "eval", "other:1:abc", api_key=server.tokens.api_key)
    body = {"model": "eval", "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    async with open_asker(proof, 2) as asker:
        with pytest.raises(EvalSkip) as caught:
            await asker.ask_all([body, body])
    assert caught.value.reason == "version_mixed"
    async with open_asker(proof, 2) as asker:
        with pytest.raises(ValueError, match="the engine refuses a request of the task: HTTP 400"):
            await asker.ask_all([{**body, "token_ids": [1] * 300}])


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_harness_runs_on_a_pinned_fleet_from_the_command_line(
    backend_args: Namespace,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LM_EVAL_TASKS", "sums_choice")
    words = ["eval", *(str(checkpoints / name) for name in ("whole", "base"))]
    words += ["--eval-num-gpus", "1", "--json"]
    words += ["--hf-checkpoint", str(checkpoints / "base")]
    words += ["--eval-function-path", "eval.lm_eval_fn.evaluate"]
    words += ["--eval-vllm-max-model-len", "256", "--eval-vllm-dtype", "bfloat16"]
    words += ["--scores", str(tmp_path / "scores"), "--eval-run-dir", str(tmp_path / "run")]
    words += ["--eval-prompt-data", *backend_args.eval_prompt_data]
    assert main(words) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(result["path"]).name for result in results] == ["whole", "base"]
    assert len({result["weight_version"] for result in results}) == 2
    for result in results:
        assert result["state"] == "done"
        metrics = result["metrics"]
        assert 0 < metrics["eval/sums_choice/acc/stderr"] < 0.2
        assert metrics["eval/sums_choice/acc"] == metrics["eval/sums_choice"]
    assert main(["trace", "check", str(tmp_path / "run"), "--ended"]) == 0


def test_metrics_keep_their_standard_errors_and_samples_their_scores() -> None:
    results: dict[str, Any] = {
        "results": {
            "sums": {
                "alias": "sums",
                "acc,none": 0.5,
                "acc_stderr,none": 0.25,
                "exact_match,strict": 1,
                "exact_match_stderr,strict": "N/A",
            }
        },
        "samples": {"sums": [{"doc_id": 0, "acc": 1.0, "metrics": ["acc"], "arguments": "long"}]},
    }
    output = as_output(results)
    assert output == RolloutFnEvalOutput(
        {"sums": {"rewards": [1.0], "samples": [{"doc_id": 0, "acc": 1.0}]}},
        {
            "eval/sums/acc": 0.5,
            "eval/sums/acc/stderr": 0.25,
            "eval/sums/exact_match/strict": 1.0,
        },
    )


def test_a_missing_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EVAL_TASKS", " , ")
    with pytest.raises(ValueError, match="LM_EVAL_TASKS=' , ': expected names of tasks"):
        task_names(Namespace())
    assert task_names(Namespace(lm_eval_tasks="a, b")) == ["a", "b"]


def test_likelihoods_contexts_and_ends_are_taken_as_the_harness_means_them() -> None:
    logprobs = [
        None,
        {"5": {"logprob": -1.0, "rank": 1}},
        {"7": {"logprob": -0.5, "rank": 1}, "6": {"logprob": -2.0, "rank": 2}},
    ]
    assert _loglikelihood(logprobs, 1, [5, 6]) == (-3.0, False)
    assert _loglikelihood(logprobs, 1, [5, 7]) == (-1.5, True)
    assert _kept([1, 2, 3, 4], 2, 6) == [2, 3, 4]
    assert _kept([1, 2, 3, 4], 2, None) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="--eval-vllm-max-model-len"):
        _kept([1], 9, 10)
    assert _cut("12\n13;", ["\n", ";"]) == "12"
    until, sampling = _sampling({"until": "\n", "max_gen_toks": 3, "do_sample": False})
    assert (until, sampling) == (["\n"], {"max_tokens": 3, "temperature": 0.0, "top_p": 1.0})
    assert _sampling({"temperature": 0.7})[1]["temperature"] == 0.7
