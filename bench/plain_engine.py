"""A vLLM server without anything of vime's in it: what it answers is vLLM's own."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx

from vime.eval.fleet.launch import loopback_client
from vime.eval.fleet.ports import PortReservation
from vime.eval.processes.process import KeptProcess, spawn

_START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class PlainEngine:
    """One that answers.

    Attributes:
        process: its server, which ends with this one.
        url: where it listens.
    """

    process: KeptProcess
    url: str


@asynccontextmanager
async def plain_engine(
    model: Path, log_path: Path, *words: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[PlainEngine]:
    """Start one, wait until it answers, and end it on leaving.

    Args:
        model: a checkpoint.
        log_path: appended to.
        words: further words of vLLM's command line.
        env: further variables of its environment.

    Raises:
        RuntimeError: it does not come up; with the end of its log.
    """
    with PortReservation("127.0.0.1") as port:
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port.number)]
        argv += ["--enforce-eager", "--enable-scale-out", "--generation-config", "vllm", *words]
        whole_env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # into temporary files of its own
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(env or {}),
        }
        process = await spawn(
            argv, name="plain_engine", env=whole_env, log_path=log_path, scratch=True
        )
        engine = PlainEngine(process, f"http://127.0.0.1:{port.number}")
        async with process:
            await _wait_until_healthy(engine)
            yield engine


async def _wait_until_healthy(engine: PlainEngine) -> None:
    with anyio.move_on_after(_START_TIMEOUT_S):
        async with loopback_client(engine.url) as client:
            while not engine.process.has_ended():
                if await _is_healthy(client):
                    return
                await anyio.sleep(0.25)
    raise RuntimeError(f"the engine does not start:\n{engine.process.log_tail()}")


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # it does not listen yet
