"""The trees of real vLLM engines end as the ones of `test_process.py` do."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import anyio
import httpx
import psutil
import pytest

from tests.runner.conftest import write_tokenizer
from tests.watch import watching
from vime.eval.processes.process import KeptProcess, spawn

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_nothing_of_a_tensor_parallel_engine_is_left_whoever_is_killed(
    tmp_path: Path,
) -> None:
    async with anyio.create_task_group() as tasks:  # the two start side by side
        for victim in ("api_server", "keeper"):
            (tmp_path / victim).mkdir()
            tasks.start_soon(kill_one_of_an_engine, victim, tmp_path / victim)


async def kill_one_of_an_engine(victim: str, directory: Path) -> None:
    async with await start_engine(directory) as engine:
        pids = [p.pid for p in psutil.Process(engine.keeper_pid).children(recursive=True)]
        titles = {psutil.Process(pid).cmdline()[0].split("_")[0] for pid in pids}
        assert titles >= {"VLLM::EngineCore", "VLLM::Worker"}
        with watching([engine.keeper_pid, *pids]) as watch:
            os.kill(engine.pid if victim == "api_server" else engine.keeper_pid, signal.SIGKILL)
            with anyio.fail_after(20):
                assert await engine.wait() == -signal.SIGKILL
            watch.assert_gone(0.1)


async def start_engine(directory: Path) -> KeptProcess:
    """An engine with two ranks that answers; its weights are random."""
    write_model(directory / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(directory / "model"), "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256"]
    command += ["--enforce-eager", "--tensor-parallel-size", "2"]
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    engine = await spawn(command, name="engine", env=env, log_path=directory / "engine.log")
    try:
        await healthy(engine, f"http://127.0.0.1:{port}/health")
    except BaseException:
        await engine.end()
        raise
    return engine


async def healthy(engine: KeptProcess, url: str) -> None:
    with anyio.fail_after(200):
        async with httpx.AsyncClient() as client:
            while not engine.has_ended():
                try:
                    if (await client.get(url)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # it does not listen yet
                await anyio.sleep(0.2)
    pytest.fail(f"the engine did not start:\n{engine.log_tail()}")


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
