"""The tree of a real vLLM engine of two ranks ends as the ones of `test_process.py` do.

That of an engine whose keeper is killed does in `tests/runner/test_real_engine.py`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import psutil
import pytest

from bench.plain_engine import plain_engine
from tests.runner.conftest import write_tokenizer
from tests.watch import watching

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]

RANKS = ("--load-format", "dummy", "--max-model-len", "256", "--tensor-parallel-size", "2")
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_nothing_of_a_tensor_parallel_engine_is_left_whose_server_is_killed(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model")
    async with plain_engine(
        tmp_path / "model", tmp_path / "engine.log", *RANKS, env=CORES
    ) as engine:
        process = engine.process
        pids = [p.pid for p in psutil.Process(process.keeper_pid).children(recursive=True)]
        titles = [psutil.Process(pid).cmdline()[0].split("_")[0] for pid in pids]
        assert titles.count("VLLM::EngineCore") == 1
        assert titles.count("VLLM::Worker") == 2
        with watching([process.keeper_pid, *pids]) as watch:
            os.kill(process.pid, signal.SIGKILL)
            with anyio.fail_after(20):
                assert await process.wait() == -signal.SIGKILL
            watch.assert_gone(0.1)


def write_model(directory: Path) -> None:
    """The configuration of a 2-layer Llama, and a tokenizer; no weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(directory)
    write_tokenizer(directory)
