"""A process on a node of the cluster, owned by a Ray actor there, as the fleet sees processes.

Whatever ends the Ray actor (its node, its raylet, the driver) ends the process and everything
below it: there too a keeper stands between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from vime.eval.fleet.launch import ProcessLost
from vime.eval.processes.process import KeptProcess, spawn
from vime.ray.host import Facts, facts_here, log_path_here
from vime.ray.hosting import Host, HostLost, in_thread

#: How long a host may take to answer beside what it was asked to do, in seconds.
_GRACE_S: Final = 10.0
_PLACE_S: Final = 120.0
_TAIL_LINES: Final = 20


@dataclass(frozen=True)
class Started:
    """A process that runs.

    Attributes:
        pid: of itself.
        facts: where its host is.
        log_path: on that node.
    """

    pid: int
    facts: Facts
    log_path: Path


@dataclass(frozen=True)
class Refused:
    """Why a process was not started."""

    how: str


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: as of :meth:`KeptProcess.wait`; ``None`` when something of it lives on.
        tail: the end of its log, or what lives on.
    """

    status: int | None
    tail: str


class ProcessHost:
    """A Ray actor that owns one process, and speaks for it.

    Consumes orders of a :class:`RemoteProcess` on the driver. Waits for the process, which
    unblocks it by its end. Nothing of vLLM runs in the actor itself: it always answers.
    """

    def __init__(self) -> None:
        self._process: KeptProcess | None = None

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this host's death."""
        await asyncio.Event().wait()

    async def where(self) -> Facts:
        """Where it is."""
        return facts_here()

    async def spawn(
        self, argv: Sequence[str], name: str, env: Mapping[str, str], log_path: Path
    ) -> Started | Refused:
        """Start the process, with a private directory for its temporary files."""
        assert self._process is None, "one host owns one process"
        log_path = log_path_here(log_path, name)
        try:
            self._process = await spawn(argv, name=name, env=env, log_path=log_path, scratch=True)
        except (OSError, RuntimeError) as error:
            return Refused(f"{type(error).__name__}: {error}")
        return Started(self._process.pid, facts_here(), log_path)

    async def wait(self) -> Ended:
        """Wait for its end."""
        assert self._process is not None, "it was started"
        try:
            return Ended(await self._process.wait(), self._tail())
        except TimeoutError as error:
            return Ended(None, str(error))

    async def end(self, timeout_s: float) -> Ended:
        """End it, with everything below it."""
        assert self._process is not None, "it was started"
        try:
            await self._process.end(timeout_s)
        except TimeoutError as error:
            return Ended(None, str(error))
        return Ended(self._process.returncode, self._tail())

    def _tail(self) -> str:
        assert self._process is not None
        try:
            return self._process.log_tail(_TAIL_LINES)
        except OSError as error:
            return f"({self._process.log_path} cannot be read: {error})"


class RemoteProcess:
    """The fleet's :class:`~vime.eval.fleet.launch.Process` on another node; needs asyncio.

    Args:
        host: the Ray actor that owns it.
        started: what it said.
    """

    def __init__(self, host: Host, started: Started) -> None:
        self.pid = started.pid
        self.facts = started.facts
        self._host = host
        self._tail = f"(its log is {started.log_path} on node {started.facts.address})"

    async def wait(self) -> int:
        """See :class:`~vime.eval.fleet.launch.Process`."""
        try:
            ended: Ended = await self._host.call("wait")
        except HostLost as lost:
            raise ProcessLost(f"{lost} (on node {self.facts.address})") from lost
        self._tail = ended.tail
        if ended.status is None:
            raise TimeoutError(ended.tail)
        return ended.status

    async def end(self, timeout_s: float = 5.0) -> None:
        """See :class:`~vime.eval.fleet.launch.Process`; a host that is lost has ended it."""
        with anyio.CancelScope(shield=True):
            ended: Ended | None = None
            with anyio.move_on_after(timeout_s + _GRACE_S):
                try:
                    ended = await self._host.call("end", timeout_s, give_up_s=0)
                except HostLost:
                    return
            if ended is not None:
                self._tail = ended.tail
                if ended.status is None:
                    raise TimeoutError(ended.tail)
            await self._host.kill()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End it."""
        await self.end(timeout_s)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """What its end has told of its log; before that, where it is."""
        return "\n".join(self._tail.splitlines()[-lines:])

    def let_go(self) -> None:
        """Its address goes with its host."""


class NodeSpawn:
    """Starts processes on one node of the cluster, each owned by a Ray actor.

    Args:
        node_id: which node, hexadecimal.
        options: Ray's own, for the actors: the resources that their processes need.
    """

    def __init__(self, node_id: str, options: Mapping[str, Any]) -> None:
        self._node_id = node_id
        self._options = options

    async def __call__(
        self, argv: Sequence[str], *, name: str, env: Mapping[str, str], log_path: Path
    ) -> RemoteProcess:
        """See :class:`~vime.eval.fleet.launch.Spawn`."""
        options = {**self._options, "scheduling_strategy": on_node(self._node_id)}
        await in_thread(lambda: log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700))
        host, answer = await start_host(
            ProcessHost, options, _PLACE_S, "spawn", argv, name, env, log_path
        )
        return RemoteProcess(host, answer)


async def start_host(
    actor_class: type, options: Mapping[str, Any], timeout_s: float, method: str, *args: Any
) -> tuple[Host, Started]:
    """Place a host somewhere, and have it start its process.

    Args:
        actor_class: :class:`ProcessHost` or a kind of it.
        options: Ray's own, for the actor.
        timeout_s: until the process runs.
        method, args: what to call on it; it answers :class:`Started` or :class:`Refused`.

    Raises:
        RuntimeError: Ray has no place for it, or it is lost, or it refused; nothing is left.
    """
    host: Host | None = None
    started: Started | None = None
    try:
        with anyio.fail_after(timeout_s):
            host = await Host.start(actor_class, {**options, "max_restarts": 0})
            answer = await host.call(method, *args, give_up_s=0)
        if isinstance(answer, Refused):
            raise RuntimeError(answer.how)
        started = answer
        return host, answer
    except TimeoutError:
        wanted = {name: options[name] for name in ("num_cpus", "num_gpus") if name in options}
        raise RuntimeError(f"Ray gave it no place with {wanted} within {timeout_s:.4g} s") from None
    except HostLost as lost:
        raise RuntimeError(f"it could not start: {lost}") from lost
    finally:
        if host is not None and started is None:
            await host.kill()


def on_node(node_id: str) -> Any:
    """Ray's scheduling strategy for this node, and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)
