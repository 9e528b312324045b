"""Engines in the eval region of a placement group: each a vLLM process that a Ray actor owns."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio

from vime.eval.fleet.control import FIRST_VERSION, Control, EngineFailure
from vime.eval.fleet.devices import visible_gpus
from vime.eval.fleet.launch import Tokens, engine_argv, engine_environment, loopback_client
from vime.eval.fleet.pin import prove_token
from vime.eval.fleet.ports import PortReservation
from vime.eval.fleet.settings import FleetSettings, node_problems
from vime.ray.detached import NAMESPACE, Ownership, detached
from vime.ray.group import Bundle, look_into, strategy
from vime.ray.host import facts_here
from vime.ray.hosting import Host, HostLost, described, in_thread, result
from vime.ray.processes import ProcessHost, Refused, RemoteProcess, Started, start_host

#: Of one engine's actor: the GPU of its first bundle, and the CPU beside it.
_OPTIONS: Final[Mapping[str, Any]] = {"num_cpus": 1, "num_gpus": 1}

log = logging.getLogger("vime")

#: How long an engine that is taken over may take to prove itself, in seconds.
_TAKE_OVER_S: Final = 60.0
_POLL_S: Final = 0.2

#: Ray sets this to the CPUs of an actor; vLLM divides the cores by itself.
_SET_BY_RAY: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class EngineOrder:
    """What one engine is to be.

    Attributes:
        settings: of the fleet.
        tokens: of the run.
        further: node id, address and GPU of each of its bundles but the first.
        name, log_path: its log.
    """

    settings: FleetSettings
    tokens: Tokens = field(repr=False)
    further: tuple[tuple[str, str, str], ...]
    name: str
    log_path: Path


@dataclass(frozen=True)
class Serving(Started):
    """An engine's process that runs.

    Attributes:
        url: where it will listen: the node's own address, as others must reach it.
    """

    url: str


class EngineHost(ProcessHost):
    """Owns one engine's process on its node, its port and its keeper."""

    def __init__(self) -> None:
        super().__init__()
        self._port: PortReservation | None = None
        self._serving: Serving | None = None

    async def serving(self) -> Serving | None:
        """What it has started, if that still lives."""
        alive = self._process is not None and not self._process.has_ended()
        return self._serving if alive else None

    async def start_engine(self, order: EngineOrder) -> Serving | Refused:
        """Start vLLM on the node's address, with the GPUs of its bundles."""
        import ray

        address = ray.util.get_node_ip_address()
        settings = dataclasses.replace(order.settings, num_engines=1, host=address)
        if problems := node_problems(settings):
            return Refused(f"node {address}: " + "; ".join(problems))
        try:
            gpus = _own_gpus(order.further)
        except ValueError as error:
            return Refused(str(error))
        environ = {name: value for name, value in os.environ.items() if name != _SET_BY_RAY}
        try:
            self._port = PortReservation(address)
        except OSError as error:
            return Refused(f"node {address}: {error}")
        started = await self.spawn(
            engine_argv(settings, self._port.number, gpus),
            order.name,
            engine_environment(settings, 0, order.tokens, gpus, environ),
            order.log_path,
        )
        if isinstance(started, Refused):
            return started
        url = f"http://{_in_url(address)}:{self._port.number}"
        self._serving = Serving(started.pid, started.facts, started.log_path, url)
        return self._serving


def _own_gpus(further: Sequence[tuple[str, str, str]]) -> list[str] | None:
    """Every GPU of this engine; ``None`` on a node that has none but Ray's logical ones.

    Raises:
        ValueError: they are on several nodes.
    """
    import ray

    here = facts_here()
    addresses = {address for node_id, address, _ in further if node_id != here.node_id}
    if addresses:
        nodes = ", ".join(sorted({here.address, *addresses}))
        raise ValueError(f"its {len(further) + 1} GPUs are on several nodes now: {nodes}")
    if visible_gpus() is None:
        return None
    (own,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return [str(own), *(gpu_id for _, _, gpu_id in further)]


class RemoteServer(RemoteProcess):
    """The fleet's :class:`~vime.eval.fleet.servers.Server` on another node.

    Args:
        host: the Ray actor that owns it.
        serving: what it said.
        first_version: the weights that it was left with, where an earlier run had it.
        outlives: it is left to the next run in the end.
    """

    def __init__(
        self,
        host: Host,
        serving: Serving,
        *,
        first_version: str = FIRST_VERSION,
        outlives: bool = False,
    ) -> None:
        super().__init__(host, serving)
        self.url = serving.url
        self.first_version = first_version
        self._outlives = outlives

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End it, or leave it to the next run."""
        if not self._outlives:
            await self.end(timeout_s)


class RayLaunch:
    """Starts engines in their bundles; see :class:`vime.eval.fleet.servers.Launch`.

    When a node is lost, Ray moves its bundles to another one that has room; an engine that is
    started again follows its own.

    Args:
        settings: the fleet.
        group: the placement group.
        engines: the bundles of each engine, in order.
        ownership: of a fleet that outlives its driver: engines of an earlier one are taken over
            if they are sound, and replaced if not.

    Attributes:
        nodes: engine → the node on which it was started last.
    """

    def __init__(
        self,
        settings: FleetSettings,
        group: Any,
        engines: Sequence[tuple[Bundle, ...]],
        ownership: Ownership | None = None,
    ) -> None:
        self._settings = settings
        self._group = group
        self._engines = engines
        self._ownership = ownership
        self.nodes: dict[int, str] = {index: e[0].node_id for index, e in enumerate(engines)}

    async def __call__(self, index: int, tokens: Tokens, log_path: Path) -> RemoteServer:
        """See :class:`~vime.eval.fleet.servers.Launch`."""
        options: dict[str, Any] = dict(_OPTIONS)
        if self._ownership is not None:
            name = self._ownership.engine_name(index)
            server = await take_over(name, self._settings, tokens)
            if server is not None:
                self.nodes[index] = server.facts.node_id
                return server
            options |= detached(name)
        first, *others = self._engines[index]
        timeout_s = self._settings.start_timeout_s
        further = await self._locate(others, timeout_s)
        order = EngineOrder(self._settings, tokens, further, log_path.stem, log_path)
        options["scheduling_strategy"] = strategy(self._group, first.index)
        await in_thread(lambda: log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700))
        host, serving = await start_host(EngineHost, options, timeout_s, "start_engine", order)
        assert isinstance(serving, Serving), "an engine's host answers with its address"
        self.nodes[index] = serving.facts.node_id
        return RemoteServer(host, serving, outlives=self._ownership is not None)

    async def _locate(
        self, bundles: Sequence[Bundle], timeout_s: float
    ) -> tuple[tuple[str, str, str], ...]:
        """Where bundles are now, which may have moved.

        Raises:
            RuntimeError: Ray has no place for them.
        """
        import ray

        refs = [look_into(self._group, bundle.index) for bundle in bundles]
        try:
            with anyio.fail_after(timeout_s):
                return tuple([await result(ref) for ref in refs])
        except TimeoutError:
            raise RuntimeError(
                f"Ray has had no place for its {len(bundles)} further GPUs for {timeout_s:.4g} s"
            ) from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"its GPUs cannot be found: {described(error)}") from error
        finally:
            for ref in refs:
                ray.cancel(ref)


async def take_over(name: str, settings: FleetSettings, tokens: Tokens) -> RemoteServer | None:
    """Take over an engine that an earlier driver has left; what is not sound is ended.

    Args:
        name: of its actor.
        settings: the fleet.
        tokens: that it was started with.

    Returns:
        The engine; ``None`` where there is none now, and its name is free.
    """
    host = await Host.named(name, NAMESPACE)
    if host is None:
        return None
    try:
        with anyio.fail_after(_TAKE_OVER_S):
            serving: Serving | None = await host.call("serving", give_up_s=0)
            if serving is not None:
                version = await _version_served(serving.url, settings, tokens)
                return RemoteServer(host, serving, first_version=version, outlives=True)
            log.info("%s: its engine has ended, and is started again", name)
    except (HostLost, TimeoutError, EngineFailure) as error:
        log.warning("%s cannot be taken over, and is started again: %s", name, error)
    await host.kill()
    with anyio.move_on_after(_TAKE_OVER_S):
        while await Host.named(name, NAMESPACE) is not None:  # noqa: ASYNC110 -- Ray's state
            await anyio.sleep(_POLL_S)
    return None


async def _version_served(url: str, settings: FleetSettings, tokens: Tokens) -> str:
    """The weight version of an engine that nobody has looked after for a while.

    Raises:
        EngineFailure: it does not serve. A driver that died while it loaded a snapshot has left
            it paused, with who knows what in it.
    """
    client = loopback_client(url)
    async with client:
        control = Control(client, tokens, settings.model, settings.call_timeout_s)
        if await control.is_paused():
            raise EngineFailure("stale", "its driver died while a snapshot was being loaded")
        version = await control.version()
        await prove_token(control, settings.probe_timeout_s, version)
        return version


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
