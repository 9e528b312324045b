"""The example that asks a scoring service, against the service's real process."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest
from eval import http_scoring_eval_fn
from eval.http_scoring_eval_fn import HttpScoringEvalFn

from vime.eval import EvalDispatcher
from vime.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(180)]

SERVICE = Path(http_scoring_eval_fn.__file__).with_name("scoring_service.py")
TEXTS = ["one and one are two", "the quick brown fox", "0123456789"]
STEP = RolloutFnEvalInput(3)


@dataclass
class Service:
    process: subprocess.Popen[str]
    url: str

    def post(self, path: str) -> None:
        httpx.post(f"{self.url}{path}", trust_env=False).raise_for_status()


def start(texts: Path, port: int = 0) -> Service:
    process = subprocess.Popen(
        [sys.executable, str(SERVICE), "--port", str(port), "--texts", str(texts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on ")
    return Service(process, line.split()[-1])


def stop(service: Service) -> None:
    service.process.kill()
    service.process.wait()
    assert service.process.stdout is not None
    service.process.stdout.close()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("service") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def service(texts: Path) -> Iterator[Service]:
    service = start(texts)
    yield service
    stop(service)


@pytest.fixture
async def function(service: Service) -> AsyncIterator[HttpScoringEvalFn]:
    made = make(service.url)
    yield made
    await made.dispose()


def make(url: str, **settings: float) -> HttpScoringEvalFn:
    return HttpScoringEvalFn(RolloutFnConstructorInput(Namespace(scoring_url=url, **settings)))


async def test_the_rewards_are_the_likelihoods_that_the_model_itself_computes(
    function: HttpScoringEvalFn, checkpoints: Path
) -> None:
    output = await function.evaluate_checkpoint(checkpoints / "whole", STEP)
    rewards = output.data["texts"]["rewards"]
    assert rewards == pytest.approx([likelihood(checkpoints / "whole", t) for t in TEXTS], abs=1e-4)
    assert output.data["texts"]["response_lengths"] == [len(text) for text in TEXTS]
    other = await function.evaluate_checkpoint(checkpoints / "base", STEP)
    assert other.data["texts"]["rewards"] != rewards


def likelihood(checkpoint: Path, text: str) -> float:
    """By hand: the mean log-probability of each byte after the first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(checkpoint)(text, add_special_tokens=False).input_ids
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    terms = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
    return math.fsum(terms) / len(terms)


async def test_a_503_skips_the_point_at_once_with_what_the_service_said(
    function: HttpScoringEvalFn, service: Service, checkpoints: Path
) -> None:
    service.post("/drain")
    try:
        with pytest.raises(EvalSkip) as caught:
            await function.evaluate_checkpoint(checkpoints / "whole", STEP)
    finally:
        service.post("/resume")
    assert caught.value.reason == "service_unavailable"
    assert caught.value.detail == "the service answered 503: draining"


async def test_a_service_that_comes_up_late_is_asked_again(
    texts: Path, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    function = make(f"http://127.0.0.1:{port}")
    started: list[Service] = []
    original = function._attempt

    async def attempt(directory: Path) -> dict[str, object]:
        try:
            return await original(directory)
        except http_scoring_eval_fn.TransientError:
            if not started:  # the first attempt has failed: now it comes up
                started.append(await anyio.to_thread.run_sync(start, texts, port))
            raise

    function._attempt = attempt  # type: ignore[method-assign]
    try:
        output = await function.evaluate_checkpoint(checkpoints / "whole", STEP)
    finally:
        await function.dispose()
        for service in started:
            stop(service)
    assert len(output.data["texts"]["rewards"]) == len(TEXTS)
    assert "attempt 1 of 5: ConnectError" in caplog.text


async def test_a_service_that_is_gone_is_given_up_after_so_many_attempts(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_scoring_eval_fn, "FIRST_PAUSE_S", 0.001)
    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        function = make(f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(EvalSkip) as caught:
            await function.evaluate_checkpoint(checkpoints / "whole", STEP)
        await function.dispose()
    assert caught.value.reason == "service_unreachable"
    assert caught.value.detail.startswith("5 attempts failed; ConnectError")


async def test_a_service_that_hangs_ends_at_the_deadline(texts: Path, checkpoints: Path) -> None:
    service = start(texts)
    os.kill(service.process.pid, signal.SIGSTOP)
    function = make(service.url, scoring_timeout=0.5, scoring_attempt_timeout=0.2)
    try:
        with pytest.raises(EvalSkip) as caught:
            await function.evaluate_checkpoint(checkpoints / "whole", STEP)
    finally:
        await function.dispose()
        stop(service)
    assert caught.value.reason == "service_timeout"
    assert "no score after 0.5 s; no answer within 0.2 s" in caught.value.detail


async def test_a_refusal_is_an_error_with_the_services_words(
    function: HttpScoringEvalFn, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"HTTP 400: .*no config.json there"):
        await function.evaluate_checkpoint(tmp_path, STEP)


async def test_scores_of_other_weights_are_not_believed(
    function: HttpScoringEvalFn, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_scoring_eval_fn, "sha256_of_weights", lambda _: "0" * 64)
    with pytest.raises(EvalSkip) as caught:
        await function.evaluate_checkpoint(checkpoints / "whole", STEP)
    assert caught.value.reason == "wrong_weights"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "SCORING_URL=None: expected the service's http:// address"),
        ({"scoring_url": "ftp://x"}, "SCORING_URL='ftp://x'"),
        ({"scoring_url": "http://x", "scoring_timeout": -1}, "args.scoring_timeout=-1"),
    ],
)
def test_wrong_settings_are_named(
    args: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCORING_URL", raising=False)
    with pytest.raises(ValueError, match=message):
        HttpScoringEvalFn(RolloutFnConstructorInput(Namespace(**args)))


def test_a_whole_run_reports_its_score_and_its_refusal_at_their_steps(
    service: Service, checkpoints: Path, tmp_path: Path
) -> None:
    args = Namespace(
        eval_function_path="eval.http_scoring_eval_fn.HttpScoringEvalFn",
        scoring_url=service.url,
        eval_interval=1,
        eval_hf_dir=str(tmp_path / "staging"),
        eval_run_dir=str(tmp_path / "run"),
        hf_checkpoint=str(checkpoints / "base"),
    )
    with EvalDispatcher.from_args(args, exporter=lambda *_: None) as dispatcher:
        done = dispatcher.dispatch(0, hf_dir=checkpoints / "whole").result(120)
        service.post("/drain")
        try:
            skipped = dispatcher.dispatch(5, hf_dir=checkpoints / "whole").result(60)
        finally:
            service.post("/resume")
    assert (done.state, done.detail) == ("done", None)
    assert done.metrics["eval/texts"] < 0
    assert done.metrics["eval/texts/stderr"] > 0
    assert (skipped.rollout_id, skipped.reason) == (5, "service_unavailable")
    assert skipped.metrics["eval/skipped_service_unavailable"] == 1.0
    (path,) = (tmp_path / "run" / "samples").iterdir()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["num_tokens"] for row in rows] == [len(text) for text in TEXTS]
