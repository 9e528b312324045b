"""What runs on a node of the cluster: one Ray actor, which owns ordinary processes there.

The processes are kept ones (:mod:`vime.eval.processes.process`): whatever ends the Ray actor, the
death of its node, its driver or its raylet included, ends them as well. User code never runs in the
Ray actor itself, so that it always answers.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vime.eval.actor import ActorDied, ActorEvent, ProcessActor
from vime.eval.actor.channel import Kind

if TYPE_CHECKING:
    from vime.eval.actor import Actor


@dataclass(frozen=True)
class Facts:
    """Where a host is.

    Attributes:
        node_id: hexadecimal.
        address: of the node.
        pid: of the Ray actor's process there.
    """

    node_id: str
    address: str
    pid: int


@dataclass(frozen=True)
class Opening:
    """The actor that a host is to own; see ``ProcessActor`` for each field.

    Attributes:
        args: pickled; only the actor's own process unpickles them.
        env: what its process has beside the environment of the Ray actor.
    """

    name: str
    factory_path: str
    args: bytes = field(repr=False)
    log_path: Path
    env: Mapping[str, str] | None = field(repr=False)
    start_timeout_s: float
    stop_timeout_s: float


@dataclass(frozen=True)
class Answer:
    """What came of one message.

    Attributes:
        kind, payload: the reply; ``None`` when the actor died.
        death: how it died, and the end of its log.
        events: what has happened to its process since the last answer.
    """

    kind: Kind | None = None
    payload: bytes = b""
    death: tuple[str, str] | None = None
    events: tuple[ActorEvent, ...] = field(default=())


class ActorHost:
    """A Ray actor that owns one :class:`~vime.eval.actor.ProcessActor` and speaks for it.

    Consumes: pickled messages of the :class:`~vime.ray.actors.RayActor` on the driver; produces
    their pickled replies. Waits for the process, which unblocks it by a reply or its death. A
    call that Ray cancels is given up here too, as ``ProcessActor`` gives it up.
    """

    def __init__(self) -> None:
        self._actor: ProcessActor | None = None
        self._events: list[ActorEvent] = []

    async def open(self, opening: Opening) -> Facts:
        """Get ready; the process starts with its first message."""
        env = {**os.environ, **_hidden_gpus(), **(opening.env or {})}
        self._actor = ProcessActor(
            "vime.ray.host:make",
            (opening.factory_path, opening.args),
            name=opening.name,
            log_path=log_path_here(opening.log_path, opening.name),
            env=env,
            start_timeout_s=opening.start_timeout_s,
            stop_timeout_s=opening.stop_timeout_s,
            on_event=self._events.append,
        )
        return facts_here()

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this host's death."""
        await asyncio.Event().wait()

    async def relay(self, kind: bytes, payload: bytes) -> Answer:
        """Hand one message to the process, and return what came of it."""
        assert self._actor is not None, "it was opened"
        try:
            answer = Answer(*await self._actor.relay(Kind(kind), payload))
        except ActorDied as died:
            answer = Answer(death=(died.how, died.log_tail))
        return self._with_events(answer)

    async def events(self) -> Answer:
        """What has happened to the process, without a message to it."""
        return self._with_events(Answer())

    async def stop(self) -> Answer:
        """Stop the process in an orderly way, or end it."""
        if self._actor is not None:
            await self._actor.stop()
        return self._with_events(Answer())

    def _with_events(self, answer: Answer) -> Answer:
        events, self._events[:] = tuple(self._events), []
        return Answer(answer.kind, answer.payload, answer.death, events)


def make(factory_path: str, args: bytes) -> Actor:
    """In the actor's own process: call its factory."""
    from vime.eval.actor.child import make_actor

    return make_actor(factory_path, args)


def facts_here() -> Facts:
    """Where this process is."""
    import ray

    context = ray.get_runtime_context()
    return Facts(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())


def _hidden_gpus() -> dict[str, str]:
    """Without a GPU of its own the process must see none; Ray hides them in some releases only."""
    import ray

    gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}


def log_path_here(wanted: Path, name: str) -> Path:
    """The file of a log: where the driver wants it, if that directory is on this node."""
    if wanted.parent.is_dir():
        return wanted
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return session / "logs" / f"vime-{name}-{uuid.uuid4().hex[:8]}.log"
