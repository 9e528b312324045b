"""The ways from the supervisor to its engines: how one is started, and how it gets a snapshot.

On one machine an engine is a child process here, and a snapshot lies where it was written:
:class:`LocalLaunch` and :func:`at_home`. A cluster brings its own two, and nothing else of the
fleet knows where its engines are.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vime.eval.contracts import Snapshot
from vime.eval.fleet.control import FIRST_VERSION
from vime.eval.fleet.devices import visible_gpus
from vime.eval.fleet.launch import Process, Spawn, Tokens, engine_argv, engine_environment
from vime.eval.fleet.ports import PortReservation
from vime.eval.fleet.settings import FleetSettings


class Server(Process, Protocol):
    """One engine's process, and the address that it was given."""

    @property
    def url(self) -> str:
        """Where it listens, without a path or a trailing slash."""

    @property
    def first_version(self) -> str:
        """The weight version that it serves at first."""

    async def stop(self, timeout_s: float = ...) -> None:
        """At the end of the run: end it as ``end`` does, or leave it to the next run."""

    def let_go(self) -> None:
        """Let its address go, whatever has become of it."""


class Launch(Protocol):
    """Starts an engine's process: :class:`LocalLaunch`, a cluster's, or a fake."""

    async def __call__(self, index: int, tokens: Tokens, log_path: Path) -> Server:
        """Start engine ``index``; returns before it serves.

        Raises:
            OSError, RuntimeError: it cannot be started.
        """


@dataclass(frozen=True)
class Delivery:
    """A snapshot, as one engine sees it.

    Attributes:
        snapshot: with the path on the engine's node.
        seconds: how long it was under way; 0 where nothing had to travel.
        num_bytes: what travelled for this engine; 0 when it came for another one's sake.
    """

    snapshot: Snapshot
    seconds: float = 0.0
    num_bytes: int = 0


class Localize(Protocol):
    """Brings a snapshot to an engine's node, and keeps it there while the context is open."""

    def __call__(self, snapshot: Snapshot, index: int) -> AbstractAsyncContextManager[Delivery]:
        """Entering raises ``EngineFailure`` when it cannot be brought there."""


def at_home(snapshot: Snapshot, index: int) -> AbstractAsyncContextManager[Delivery]:  # noqa: ARG001
    """Engines of this machine see what lies on it."""
    return nullcontext(Delivery(snapshot))


class LocalLaunch:
    """Starts engines on this machine.

    Args:
        settings: the fleet.
        spawn: starts a process.
    """

    def __init__(self, settings: FleetSettings, spawn: Spawn) -> None:
        self._settings = settings
        self._spawn = spawn
        self._gpus = visible_gpus()

    async def __call__(self, index: int, tokens: Tokens, log_path: Path) -> LocalServer:
        """See :class:`Launch`."""
        settings, gpus = self._settings, self._gpus
        port = PortReservation(settings.host)
        try:
            process = await self._spawn(
                engine_argv(settings, port.number, gpus),
                name=log_path.stem,
                env=engine_environment(settings, index, tokens, gpus),
                log_path=log_path,
            )
        except BaseException:
            port.close()
            raise
        return LocalServer(process, port, settings.host)


class LocalServer:
    """A process of this machine that holds its port until it has ended.

    Args:
        process: of the server.
        port: reserved for it.
        host: where it listens.
    """

    first_version = FIRST_VERSION

    def __init__(self, process: Process, port: PortReservation, host: str) -> None:
        self._process = process
        self._port = port
        self.url = f"http://{host}:{port.number}"

    @property
    def pid(self) -> int:
        """See :class:`~vime.eval.fleet.launch.Process`."""
        return self._process.pid

    async def wait(self) -> int:
        """See :class:`~vime.eval.fleet.launch.Process`."""
        return await self._process.wait()

    async def end(self, timeout_s: float = 5.0) -> None:
        """See :class:`~vime.eval.fleet.launch.Process`."""
        await self._process.end(timeout_s)
        self._port.close()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End it."""
        await self.end(timeout_s)

    def log_tail(self, lines: int = 20) -> str:
        """See :class:`~vime.eval.fleet.launch.Process`."""
        return self._process.log_tail(lines)

    def let_go(self) -> None:
        """See :class:`Server`."""
        self._port.close()
