"""The vllm-router in front of the fleet: its process, and which engines it may ask.

Control calls never pass through it: a path that it does not know goes to any one engine. Its own
management routes ask for no key, so that its list of engines is compared with ours at each pin.
"""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import quote

import anyio
import httpx

from vime.eval.fleet.control import Control, EngineFailure
from vime.eval.fleet.launch import (
    MakeClient,
    Process,
    ProcessLost,
    Spawn,
    Tokens,
    router_argv,
    router_environment,
)
from vime.eval.fleet.ports import PortReservation
from vime.eval.fleet.settings import FleetSettings

_POLL_S = 0.1
_START_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 15.0


class RouterFailure(Exception):
    """The router did not start, or does not do what it is told."""


class Router:
    """One vllm-router; its address stays the same when its process is started again.

    Args:
        settings: the fleet.
        tokens: of the run.
        spawn: starts its process.
        make_client: makes the HTTP client of its server.

    Attributes:
        up: its process serves.
    """

    def __init__(
        self, settings: FleetSettings, tokens: Tokens, *, spawn: Spawn, make_client: MakeClient
    ) -> None:
        self.up = False
        self.log_path = settings.run_dir / "logs" / "router.log"
        self._settings = settings
        self._tokens = tokens
        self._spawn = spawn
        self._make_client = make_client
        self._process: Process | None = None
        self._client: httpx.AsyncClient | None = None
        self._port: PortReservation | None = None
        self._turn = anyio.Lock()  # two changes of the list at once would undo each other

    @property
    def url(self) -> str:
        """Where the evaluation sends its requests."""
        assert self._port is not None, "it has been started"
        return f"http://{self._settings.host}:{self._port.number}"

    async def start(self) -> None:
        """Start its process, with no engine behind it; returns when it serves.

        Raises:
            RouterFailure: with the end of its log.
        """
        try:
            if self._port is None:  # kept until the end: a running eval knows the address
                self._port = PortReservation(self._settings.host)
            with PortReservation(self._settings.host) as metrics:
                self._process = await self._spawn(
                    router_argv(self._settings, self._port.number, metrics.number),
                    name="router",
                    env=router_environment(),
                    log_path=self.log_path,
                )
                self._client = self._make_client(self.url)
                await self._wait_until_serving(self._process)
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            raise RouterFailure(f"the router could not be started: {error}") from error
        self.up = True

    async def wait(self) -> RouterFailure:
        """Wait until its process has ended; returns how."""
        assert self._process is not None, "it has been started"
        try:
            status = await self._process.wait()
        except TimeoutError as error:
            return RouterFailure(f"the router was killed, and lives on: {error}")
        except ProcessLost as lost:
            return RouterFailure(f"the router is lost: {lost}")
        return RouterFailure(f"the router ended with status {status}; see {self.log_path}")

    async def serve(self, urls: set[str]) -> None:
        """Let exactly the engines at ``urls`` be asked.

        Raises:
            RouterFailure: it did not come to that.
        """
        async with self._turn:
            found = await self._workers()
            for url in sorted(found - urls):
                await self._call("DELETE", f"/workers/{quote(url, safe='')}")
            for url in sorted(urls - found):
                await self._call("POST", "/workers", json={"url": url})
            if found != urls and (found := await self._workers()) != urls:
                raise RouterFailure(f"the router asks {sorted(found)}, expected {sorted(urls)}")

    async def drop(self, url: str) -> None:
        """Ask the engine at ``url`` no more.

        Raises:
            RouterFailure: it did not come to that; its own health check must see to it.
        """
        async with self._turn:
            if url in await self._workers():
                await self._call("DELETE", f"/workers/{quote(url, safe='')}")

    async def prove(self, weight_version: str, timeout_s: float) -> None:
        """Generate one token through it, as the evaluation will.

        Raises:
            RouterFailure: no token came through, or one of other weights.
        """
        assert self._client is not None, "it has been started"
        control = Control(self._client, self._tokens, self._settings.model, timeout_s)
        try:
            token = await control.token(timeout_s)
        except EngineFailure as failure:
            raise RouterFailure(f"no token comes through the router: {failure}") from failure
        if token.weight_version != weight_version:
            raise RouterFailure(
                f"through the router came a token of {token.weight_version}, expected "
                f"{weight_version}"
            )

    async def end_process(self) -> None:
        """End its process; :meth:`start` may follow, at the same address.

        Raises:
            TimeoutError: it cannot be ended.
        """
        self.up = False
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.end(self._settings.end_timeout_s)
            except TimeoutError:
                self._process = process
                raise

    async def stop(self) -> None:
        """End its process and let its address go.

        Raises:
            TimeoutError: it cannot be ended.
        """
        try:
            await self.end_process()
        finally:
            if self._port is not None:
                self._port.close()
                self._port = None

    async def _wait_until_serving(self, process: Process) -> None:
        """Raises ``TimeoutError`` or ``RuntimeError``."""
        ended = False

        async def watch() -> None:
            nonlocal ended
            with contextlib.suppress(TimeoutError, ProcessLost):  # or something of it lives on
                await process.wait()
            ended = True
            tasks.cancel_scope.cancel()

        with anyio.fail_after(_START_TIMEOUT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                while not await self._answers():  # noqa: ASYNC110 -- another process's state
                    await anyio.sleep(_POLL_S)
                tasks.cancel_scope.cancel()
        if ended:
            raise RuntimeError(f"it ended at once\n{process.log_tail(10)}")

    async def _answers(self) -> bool:
        try:
            await self._workers()
        except RouterFailure:
            return False
        return True

    async def _workers(self) -> set[str]:
        answer = await self._call("GET", "/workers")
        try:
            return {worker["url"] for worker in answer["workers"]}
        except (LookupError, TypeError) as error:
            raise RouterFailure(f"the router's list of engines: {error!r}") from error

    async def _call(self, method: str, path: str, **content: Any) -> Any:
        if self._client is None:
            raise RouterFailure("the router is down")
        try:
            with anyio.fail_after(_CALL_TIMEOUT_S):
                response = await self._client.request(method, path, **content)
        except TimeoutError:
            raise RouterFailure(f"{path}: no answer after {_CALL_TIMEOUT_S:.4g} s") from None
        except httpx.HTTPError as error:
            raise RouterFailure(f"{path}: {type(error).__name__}: {error}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != httpx.codes.OK:
            said = f"{path} answered {response.status_code}: {response.text[:200]}"
            raise RouterFailure(f"the router: {said}")
        return answer
