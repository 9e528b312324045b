"""The example that evaluates on a vLLM server of one's own, on a real one."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread
import httpx
import pytest
from eval.external_vllm_eval_fn import ExternalVllmEvalFn
from eval.vllm_server import LOADING, VllmServer

from tests.examples.conftest import NUM_PROMPTS
from vime.eval import EvalDispatcher
from vime.eval.snapshot.manifest import Manifest
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]


@pytest.fixture
async def attached(
    server: VllmServer, backend_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ExternalVllmEvalFn]:
    """A second backend, which knows of the server what its environment says."""
    tell_environment(server, monkeypatch)
    function = ExternalVllmEvalFn(RolloutFnConstructorInput(backend_args))
    yield function
    await function.dispose()


def tell_environment(server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTERNAL_VLLM_URL", server.url)
    monkeypatch.setenv("VLLM_API_KEY", server.tokens.api_key)
    monkeypatch.setenv("VIME_CONTROL_TOKEN", server.tokens.control)


async def set_label(server: VllmServer, label: str) -> None:
    headers = {"Authorization": f"Bearer {server.tokens.control}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers) as client:
        answer = await client.post("/update_weight_version", json={"new_version": label})
        answer.raise_for_status()


async def test_every_answer_of_a_launched_server_carries_the_checkpoints_version(
    first: RolloutFnEvalOutput, checkpoints: Path
) -> None:
    samples = first.data["toy"]["samples"]
    assert len(samples) == NUM_PROMPTS
    digest = Manifest.of_directory(checkpoints / "whole", "any", 1, owned=False).digest
    (version,) = {sample["weight_version"] for sample in samples}
    run, step, short = version.split(":")
    assert run.startswith("external-")
    assert (step, short) == ("1", digest[:12])
    assert first.metrics is not None
    assert first.metrics["eval/toy/failed_ratio"] == 0.0
    assert first.metrics["eval/toy"] == sum(first.data["toy"]["rewards"]) / NUM_PROMPTS


async def test_another_checkpoint_is_answered_by_its_own_weights_and_the_first_again_alike(
    external: ExternalVllmEvalFn, first: RolloutFnEvalOutput, server: VllmServer, checkpoints: Path
) -> None:
    other = await external.evaluate_checkpoint(checkpoints / "base", RolloutFnEvalInput(2))
    again = await external.evaluate_checkpoint(checkpoints / "whole", RolloutFnEvalInput(3))
    assert external.server is server
    assert tokens_of(other) != tokens_of(first)
    assert tokens_of(again) == tokens_of(first)


def tokens_of(output: RolloutFnEvalOutput) -> list[list[int]]:
    return [sample["output_token_ids"] for sample in output.data["toy"]["samples"]]


async def test_a_running_server_is_attached_to_by_url_and_outlives_the_backend(
    attached: ExternalVllmEvalFn,
    first: RolloutFnEvalOutput,
    server: VllmServer,
    checkpoints: Path,
) -> None:
    output = await attached.evaluate_checkpoint(checkpoints / "whole", RolloutFnEvalInput(4))
    assert tokens_of(output) == tokens_of(first)
    assert attached.server is not None
    assert (attached.server.url, attached.server.process) == (server.url, None)
    await attached.dispose()
    assert server.process is not None
    assert not server.process.has_ended()


async def test_a_server_that_was_given_up_half_way_is_not_believed_until_it_is_restarted(
    attached: ExternalVllmEvalFn, server: VllmServer, checkpoints: Path
) -> None:
    await set_label(server, LOADING)
    with pytest.raises(EvalSkip) as caught:
        await attached.evaluate_checkpoint(checkpoints / "whole", RolloutFnEvalInput(5))
    assert caught.value.reason == "unhealthy"
    assert "given up in the middle of a load" in caught.value.detail
    await set_label(server, "default")  # as a server that has been restarted says
    await attached.evaluate_checkpoint(checkpoints / "whole", RolloutFnEvalInput(5))


async def test_wrong_or_missing_keys_are_named(
    server: VllmServer,
    backend_args: Namespace,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell_environment(server, monkeypatch)
    monkeypatch.setenv("VIME_CONTROL_TOKEN", "wrong")
    function = ExternalVllmEvalFn(RolloutFnConstructorInput(backend_args))
    with pytest.raises(EvalSkip, match="answered 401"):
        await function.evaluate_checkpoint(checkpoints / "whole", RolloutFnEvalInput(6))
    assert function.server is None
    monkeypatch.delenv("VIME_CONTROL_TOKEN")
    with pytest.raises(ValueError, match="VIME_CONTROL_TOKEN must be set to what that server"):
        ExternalVllmEvalFn(RolloutFnConstructorInput(backend_args))


async def test_a_whole_run_scores_checkpoints_on_it_and_keeps_the_samples(
    server: VllmServer,
    first: RolloutFnEvalOutput,
    backend_args: Namespace,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell_environment(server, monkeypatch)
    args = Namespace(**vars(backend_args))
    args.eval_run_dir, args.eval_hf_dir = str(tmp_path / "run"), str(tmp_path / "staging")

    def run() -> None:
        with EvalDispatcher.from_args(args, exporter=lambda *_: None) as dispatcher:
            dispatcher.dispatch(0, hf_dir=checkpoints / "whole")
            (outcome,) = dispatcher.drain()
        assert (outcome.state, outcome.detail) == ("done", None)
        assert outcome.metrics["eval/toy/response_len/mean"] > 0

    await anyio.to_thread.run_sync(run)
    (path,) = (tmp_path / "run" / "samples").iterdir()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["output_token_ids"] for row in rows] == tokens_of(first)
