"""Brings snapshots to the nodes that cannot see them: once a node, whatever engines are there.

Consumes: the pins of the supervisor, one entry an engine. Produces: the path on the engine's node,
leased there for as long as the entry is open. Waits for depots and for the transfer before it;
unblocked by their answers and by Ray, which reports a lost node; deadlines are the pins'.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from vime.eval.contracts import Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.servers import Delivery
from vime.eval.paths import real_path
from vime.eval.snapshot.staging import room_of
from vime.eval.snapshot.stamps import FULL
from vime.fsm.read import TraceUnreadableError
from vime.ray.depot import Depot, DepotOrder, Nonce, Reply, Sender, node_name
from vime.ray.host import Facts
from vime.ray.hosting import Host, HostLost
from vime.ray.lost_nodes import end_trace
from vime.ray.processes import on_node

log = logging.getLogger("vime")

#: Depots and senders only wait and copy.
_RESOURCES: Mapping[str, Any] = {"num_cpus": 0, "num_gpus": 0}
_CLOSE_S = 15.0
#: How long the news of a node's death may be behind that of its depot's, in seconds.
_NEWS_S = 1.0


class Asked(Protocol):
    """A Ray actor that can be asked: :class:`~vime.ray.hosting.Host`, or a fake."""

    handle: Any

    async def call(self, method: str, *args: Any, give_up_s: float | None = None) -> Any:
        """Raises :class:`HostLost`."""

    async def kill(self) -> bool:
        """End it."""


class Hire(Protocol):
    """Starts an actor on a node: :func:`hire`, or a fake."""

    async def __call__(self, actor_class: type, node_id: str, *args: Any) -> Asked:
        """Raises :class:`HostLost`."""


async def hire(actor_class: type, node_id: str, *args: Any) -> Asked:
    """Start a driver-owned actor on a node; returns before it has been placed."""
    options = {**_RESOURCES, "scheduling_strategy": on_node(node_id), "max_restarts": 0}
    return await Host.start(actor_class, options, *args)


@dataclass
class _Branch:
    """The depot of one node.

    Attributes:
        name: of the node, in traces.
        root: the driver's staging directory as this node sees it; ``None``: it does not.
        foreign: checkpoint of somebody else's → whether this node sees it.
        journal: who holds it may write the node's trace.
        num_records: how many of its records are in its file here.
    """

    host: Asked
    name: str
    root: Path | None
    foreign: dict[Path, bool] = field(default_factory=dict)
    journal: anyio.Lock = field(default_factory=anyio.Lock)
    num_records: int = 0


class Deliveries:
    """See :class:`vime.eval.fleet.servers.Localize`.

    Args:
        run_id, staging, keep, verify: of the run's own store.
        run_dir: each node's trace is written there, as ``trace.NODE.jsonl``.
        home: the driver's node.
        nodes: engine → the node where it is now.
        hire: starts actors; fakes may replace it.
    """

    def __init__(
        self,
        *,
        run_id: str,
        staging: Path,
        keep: int,
        verify: str = FULL,
        run_dir: Path,
        home: str,
        nodes: Callable[[], Mapping[int, str]],
        hire: Hire = hire,
    ) -> None:
        self._run_id = run_id
        self._staging = real_path(staging)
        self._keep = keep
        self._verify = verify
        self._run_dir = run_dir
        self._home = home
        self._nodes = nodes
        self._hire = hire
        self._nonce: Nonce | None = None
        self._sender: Asked | None = None
        self._branches: dict[str, _Branch] = {}
        self._opening: dict[str, anyio.Lock] = {}
        self._turn = anyio.Lock()
        self._names: set[str] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leave the nonce; afterwards, remove what has travelled and end every depot."""
        room = room_of(self._staging, self._run_id)
        self._nonce = Nonce(f"{room.name}/nonce", secrets.token_hex(16))
        await anyio.to_thread.run_sync(self._leave, self._nonce)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for node_id in list(self._branches):
                        tasks.start_soon(self._close, node_id)
                if self._sender is not None:
                    await self._sender.kill()

    @asynccontextmanager
    async def __call__(self, snapshot: Snapshot, index: int) -> AsyncIterator[Delivery]:
        """Have ``snapshot`` on the node of engine ``index``."""
        node_id = self._nodes()[index]
        began = time.monotonic()
        try:
            branch = await self._branch(node_id)
            path = await self._visible(branch, snapshot)
            travelled = path is None
            took_s, num_bytes = 0.0, 0
            if path is None:
                path, num_bytes = await self._fetch(node_id, snapshot)
                took_s = time.monotonic() - began
        except HostLost as lost:
            await anyio.sleep(_NEWS_S)  # the engine's own news are on their way
            raise EngineFailure("absent", f"its node's depot is lost: {lost}") from lost
        try:
            yield Delivery(replace(snapshot, path=path), took_s, num_bytes)
        finally:
            if travelled:
                with anyio.CancelScope(shield=True), suppress(HostLost):
                    await self._ask(node_id, "leave", snapshot.weight_version)

    async def open_depot(self, node_id: str) -> None:
        """Have a node's depot started, and know what it sees, before anything has to travel.

        Raises:
            HostLost: the node is lost.
        """
        await self._branch(node_id)

    # -- one node ----------------------------------------------------------------------------

    async def _branch(self, node_id: str) -> _Branch:
        async with self._opening.setdefault(node_id, anyio.Lock()):
            branch = self._branches.get(node_id)
            if branch is None:
                branch = self._branches[node_id] = await self._open(node_id)
            return branch

    async def _open(self, node_id: str) -> _Branch:
        assert self._nonce is not None, "it runs"
        order = DepotOrder(
            self._run_id,
            self._staging,
            self._keep,
            self._verify,
            self._nonce,
        )
        with suppress(OSError):  # it is gone when the staging directory has been made again
            await anyio.to_thread.run_sync(self._leave, self._nonce)
        host = await self._hire(Depot, node_id, order)
        facts: Facts | None = None
        try:
            facts, root = await host.call("where", give_up_s=0)
        finally:
            if facts is None:
                await host.kill()
        if root is None:
            log.info("node %s does not see %s: snapshots travel", facts.address, self._staging)
        return _Branch(host, await self._new_name(facts), root)

    def _leave(self, nonce: Nonce) -> None:
        path = self._staging / nonce.name
        if not path.exists():
            path.write_text(nonce.value)

    async def _new_name(self, facts: Facts) -> str:
        """Of a depot in traces: the node's, with a number where that has had one before."""

        def is_taken(name: str) -> bool:
            return name in self._names or self._trace_of(name).exists()

        first = name = node_name(facts)
        for number in itertools.count(1):
            if not await anyio.to_thread.run_sync(is_taken, name):
                break
            name = f"{first}.{number}"
        self._names.add(name)
        return name

    def _trace_of(self, name: str) -> Path:
        return self._run_dir / f"trace.{name}.jsonl"

    async def _visible(self, branch: _Branch, snapshot: Snapshot) -> Path | None:
        """The snapshot's path on the node, where the node sees it without our help."""
        if snapshot.owned:
            if branch.root is None:
                return None
            return branch.root / snapshot.path.relative_to(self._staging)
        seen = branch.foreign.get(snapshot.path)
        if seen is None:
            sender = await self._own_sender()
            print_ = await sender.call("fingerprint", snapshot.path)
            seen = await branch.host.call("sees", snapshot.path, print_)
            branch.foreign[snapshot.path] = seen
        return snapshot.path if seen else None

    async def _ask(self, node_id: str, method: str, *args: Any) -> Reply:
        """Ask a depot, and keep what it tells of its trace.

        Raises:
            HostLost: it is gone; the next question starts another one.
        """
        branch = self._branches[node_id]
        try:
            reply: Reply = await branch.host.call(method, *args)
            await self._keep_records(branch)
        except HostLost as lost:
            await self._lose(node_id, branch, str(lost))
            raise
        return reply

    async def _keep_records(self, branch: _Branch) -> None:
        """Append what the node's trace has more than its file here.

        What a call has done that was given up comes with the next one.
        """
        async with branch.journal:
            lines = await branch.host.call("records", branch.num_records)
            if lines:
                branch.num_records += len(lines)
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(_append, self._trace_of(branch.name), lines)

    async def _lose(self, node_id: str, branch: _Branch, how: str) -> None:
        """A depot is gone: the next question starts another one."""
        if self._branches.get(node_id) is not branch:
            return
        del self._branches[node_id]
        with anyio.CancelScope(shield=True):
            async with branch.journal:
                await anyio.to_thread.run_sync(_end_trace, self._trace_of(branch.name), how)

    async def _close(self, node_id: str) -> None:
        branch = self._branches[node_id]
        with suppress(HostLost), anyio.move_on_after(_CLOSE_S) as scope:
            await self._ask(node_id, "close")
        await branch.host.kill()
        if scope.cancelled_caught:
            await self._lose(node_id, branch, f"it did not answer for {_CLOSE_S:g} s in the end")

    # -- a transfer ----------------------------------------------------------------------------

    async def _fetch(self, node_id: str, snapshot: Snapshot) -> tuple[Path, int]:
        """Lease a snapshot on a node, after bringing it to every node that lacks it.

        Returns:
            Its path there, and the bytes that travelled now, to all nodes together.

        Raises:
            EngineFailure: ``undelivered``.
            HostLost: the node is lost.
        """
        async with self._turn:
            path = (await self._ask(node_id, "lease", snapshot.weight_version)).value
            if path is not None:
                return path, 0
            targets = await self._lacking(node_id, snapshot)
            problems, num_bytes = await self._transfer(snapshot, targets)
            if node_id in problems:
                if node_id not in self._branches:
                    raise HostLost(problems[node_id])
                await self._branches[node_id].host.call("where")  # or it is lost
                raise EngineFailure("undelivered", problems[node_id])
            path = (await self._ask(node_id, "lease", snapshot.weight_version)).value
            assert path is not None, "it has just been sealed"
            return path, num_bytes

    async def _lacking(self, node_id: str, snapshot: Snapshot) -> list[str]:
        """The nodes of engines that neither see a snapshot nor have it; ``node_id`` is one."""
        lacking = [node_id]
        for other in dict.fromkeys(self._nodes().values()):
            if other == node_id:
                continue
            with suppress(HostLost):  # its own engines will say so
                branch = await self._branch(other)
                if await self._visible(branch, snapshot) is not None:
                    continue
                if (await self._ask(other, "lease", snapshot.weight_version)).value is None:
                    lacking.append(other)
                else:
                    await self._ask(other, "leave", snapshot.weight_version)
        return lacking

    async def _transfer(
        self, snapshot: Snapshot, targets: Iterable[str]
    ) -> tuple[dict[str, str], int]:
        """Send a snapshot to nodes; returns node → problem, and the bytes that travelled."""
        sender = await self._own_sender()
        try:
            files = await sender.call("files", snapshot.path, snapshot.owned)
            names = {node_id: self._branches[node_id].name for node_id in targets}
            problems = await self._to_each(
                targets, "begin", snapshot, files, first=lambda node_id: (names[node_id],)
            )
            depots = {
                node_id: self._branches[node_id].host.handle
                for node_id in targets
                if node_id not in problems
            }
            if depots:
                problems |= await sender.call("send", snapshot.path, files, depots)
        except HostLost as lost:
            self._sender = None
            raise EngineFailure("undelivered", f"the sender is lost: {lost}") from lost
        arrived = [node_id for node_id in depots if node_id not in problems]
        problems |= await self._to_each(arrived, "seal")
        return problems, sum(file.size for file in files.values()) * len(depots)

    async def _to_each(
        self,
        targets: Iterable[str],
        method: str,
        *args: Any,
        first: Callable[[str], tuple[Any, ...]] = lambda node_id: (),  # noqa: ARG005
    ) -> dict[str, str]:
        """Ask several depots at once, ``first`` with what is each one's own; node → problem."""
        problems: dict[str, str] = {}

        async def ask(node_id: str) -> None:
            try:
                problem = (await self._ask(node_id, method, *first(node_id), *args)).problem
            except HostLost as lost:
                problem = f"the node's depot is lost: {lost}"
            if problem is not None:
                problems[node_id] = problem

        async with anyio.create_task_group() as tasks:
            for node_id in targets:
                tasks.start_soon(ask, node_id)
        return problems

    async def _own_sender(self) -> Asked:
        if self._sender is None:
            self._sender = await self._hire(Sender, self._home)
        return self._sender


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines)


def _end_trace(path: Path, how: str) -> None:
    try:
        end_trace(path, how)
    except (OSError, TraceUnreadableError) as error:
        log.warning("%s does not tell of its node's loss: %s", path, error)
