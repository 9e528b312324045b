"""Real vLLM engines for the benchmarks: started by vime's supervisor, and asked beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from bench.cli import UsageError
from bench.models import FromShelf
from vime.eval.config import ConfigError
from vime.eval.contracts import PinProof, Snapshot
from vime.eval.fleet.agreement import NUM_TOKENS, PROMPTS
from vime.eval.fleet.launch import Tokens, loopback_client
from vime.eval.fleet.settings import FleetSettings, preflight
from vime.eval.fleet.supervisor import FleetStartError, FleetSupervisor
from vime.eval.snapshot.store import SnapshotStore
from vime.fsm.trace import Record, Trace

_NEVER_S = 86_400.0
_GENERATE = "/inference/v1/generate"


def fleet_settings(num_engines: int, base: Path, run_dir: Path) -> FleetSettings:
    """Settings of a fleet whose supervisor does not look at it while it is measured.

    Raises:
        UsageError: this machine cannot run it.
    """
    settings = FleetSettings(num_engines, base=base, run_dir=run_dir, probe_interval_s=_NEVER_S)
    try:
        preflight(settings)
    except ConfigError as error:
        raise UsageError(f"real engines cannot run here: {error}") from error
    return settings


class Engines:
    """The engines of a running fleet, to be asked without vime's pin between.

    Args:
        tokens: of the fleet.
        trace: of the fleet; says where each engine listens.

    Attributes:
        urls: engine → where its server listens.
    """

    def __init__(self, tokens: Tokens, trace: Trace) -> None:
        self._tokens = tokens
        self.urls: dict[str, str] = {}
        self._clients: dict[str, httpx.AsyncClient] = {}
        trace.subscribe(self._note)

    def _note(self, record: Record) -> None:
        if record.machine == "engine" and record.trigger == "ready":
            assert record.detail is not None
            self.urls[record.id] = record.detail["url"]

    async def reload(self, directory: Path) -> None:
        """Raw ``reload_weights`` on all engines at once: nothing is checked."""
        order = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._all("/collective_rpc", order, self._tokens.control)

    async def probe(self) -> None:
        """The answers that a pin asks for: of every engine, all at once, and a token of one."""
        for prompt in PROMPTS:
            await self._all(_GENERATE, _question(prompt, NUM_TOKENS), self._tokens.api_key)
        # A pin asks the router for that one, which asks an engine.
        some_url = next(iter(self.urls.values()))
        await self._post(some_url, _GENERATE, _question(PROMPTS[0], 1), self._tokens.api_key)

    async def _all(self, path: str, body: dict[str, Any], token: str) -> None:
        async with anyio.create_task_group() as tasks:
            for url in self.urls.values():
                tasks.start_soon(self._post, url, path, body, token)

    async def _post(self, url: str, path: str, body: dict[str, Any], token: str) -> None:
        if url not in self._clients:
            self._clients[url] = loopback_client(url)
        headers = {"Authorization": f"Bearer {token}"}
        response = await self._clients[url].post(path, json=body, headers=headers)
        response.raise_for_status()

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()


def _question(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    return {"model": "eval", "token_ids": list(prompt), "sampling_params": sampling}


@asynccontextmanager
async def running_fleet(
    settings: FleetSettings, trace: Trace
) -> AsyncIterator[tuple[FleetSupervisor, Engines]]:
    """Start the fleet, wait until it serves, and end it afterwards.

    Raises:
        UsageError: it does not start; with the end of the log of what failed.
    """
    fleet = FleetSupervisor(settings, trace)
    engines = Engines(fleet.tokens, trace)
    async with anyio.create_task_group() as tasks:
        await tasks.start(fleet.run)
        try:
            await fleet.wait_ready()
        except FleetStartError as error:
            raise UsageError(f"real engines do not start here: {error}") from error
        yield fleet, engines
        await engines.close()
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def staged(
    checkpoint: Path, staging: Path, trace: Trace, rollout_ids: tuple[int, ...]
) -> AsyncIterator[list[Snapshot]]:
    """Verified snapshots of one checkpoint under different weight versions, kept on disk."""
    store = SnapshotStore(
        staging, run_id=trace.run_id, trace=trace, base=checkpoint, keep=len(rollout_ids)
    )
    store.open()
    try:
        exporter = FromShelf(checkpoint)
        yield [await store.seal(store.begin(number), exporter) for number in rollout_ids]
    finally:
        store.close()


async def pinned(fleet: FleetSupervisor, snapshot: Snapshot) -> PinProof:
    """Pin, and let go at once; the engines go on serving."""
    async with fleet.pin(snapshot) as proof:
        return proof
