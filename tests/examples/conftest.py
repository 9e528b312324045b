"""One real vLLM server, started by the example itself, that all its tests share.

It ends with them, and so does the event loop that its fixtures keep: other tests of the same worker
start their own.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from eval.external_vllm_eval_fn import ExternalVllmEvalFn
from eval.vllm_server import VllmServer

from tests.snapshots import checkpoints
from vime.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
)

__all__ = ["checkpoints"]  # a fixture

NUM_PROMPTS = 6


@pytest.fixture(scope="package")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="package")
def backend_args(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """The arguments of a run that evaluates on a server of its own."""
    run_dir = tmp_path_factory.mktemp("external")
    eval_set = run_dir / "toy.jsonl"
    rows = [{"input": f"{i} + {i} =", "label": str(2 * i)} for i in range(NUM_PROMPTS)]
    eval_set.write_text("\n".join(map(json.dumps, rows)))
    return Namespace(
        eval_function_path="eval.external_vllm_eval_fn.ExternalVllmEvalFn",
        eval_interval=1,
        eval_hf_dir=str(run_dir / "staging"),
        eval_run_dir=str(run_dir / "run"),
        eval_prompt_data=["toy", str(eval_set)],
        eval_max_response_len=8,
        eval_vllm_max_model_len=256,
        eval_vllm_dtype="bfloat16",
        hf_checkpoint=str(checkpoints / "base"),
    )


@pytest.fixture(scope="package")
async def external(
    anyio_backend: str, backend_args: Namespace
) -> AsyncIterator[ExternalVllmEvalFn]:
    """The example's backend; its server starts at the first evaluation."""
    function = ExternalVllmEvalFn(RolloutFnConstructorInput(backend_args))
    yield function
    await function.dispose()
    assert function.server is None


@pytest.fixture(scope="package")
async def first(external: ExternalVllmEvalFn, checkpoints: Path) -> RolloutFnEvalOutput:
    """The first evaluation, which starts the server."""
    return await external.evaluate_checkpoint(checkpoints / "whole", RolloutFnEvalInput(1))


@pytest.fixture
def server(external: ExternalVllmEvalFn, first: RolloutFnEvalOutput) -> VllmServer:
    assert external.server is not None
    return external.server
