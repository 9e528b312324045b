"""What refs to an actor in another process have in common, wherever that process is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import anyio

from vime.eval.actor.base import ActorDied, no_reply
from vime.eval.actor.channel import Kind, Raised, dumps, loads

LifeT = TypeVar("LifeT")


@dataclass(frozen=True)
class ActorEvent:
    """Something that happened to an actor's process.

    Attributes:
        actor: its name.
        kind: ``started``, ``died`` (by itself), ``ended`` (by us, because a reply was overdue
            or no longer wanted) or ``stopped``.
        detail: ``pid``, ``how``, ``log_tail``; JSON values only.
    """

    actor: str
    kind: str
    detail: dict[str, Any] = field(default_factory=dict)


class AwayActor(ABC, Generic[LifeT]):
    """An :class:`ActorRef` whose actor has a life elsewhere, reached by pickled messages.

    One message is handled at a time, the others wait here for their turn; a death fails all that
    waited for theirs when it came. How a life begins, answers and ends is the subclass's.

    Args:
        factory_path: ``package.module:callable`` that makes the :class:`Actor`, there.
        name: what people call it.
        stop_timeout_s: seconds that :meth:`stop` leaves to the messages that are there, to
            ``stopped`` and to the exit.
        on_event: told of each :class:`ActorEvent`, in the event loop; must not block.

    Raises:
        ValueError: the ``factory_path`` has no colon.
    """

    def __init__(
        self,
        factory_path: str,
        *,
        name: str,
        stop_timeout_s: float,
        on_event: Callable[[ActorEvent], None] | None,
    ) -> None:
        if not all(factory_path.partition(":")):
            raise ValueError(f"factory_path={factory_path!r}: expected package.module:callable")
        self.name = name
        self._stop_timeout_s = stop_timeout_s
        self._on_event = on_event
        self._turn = anyio.Lock()
        self._life: LifeT | None = None
        self._deaths = 0
        self._how = self._tail = ""
        self._stopping = False
        self._stopped = False

    async def ask(self, message: Any, timeout_s: float | None = None) -> Any:
        """See :meth:`ActorRef.ask`.

        What the remote ``handle`` raised carries its traceback as a note; where its class
        cannot be had here it arrives as :class:`RemoteError`.

        Raises:
            TypeError: the message, or the reply, cannot be pickled or rebuilt.
            ActorDied: also: the actor could not be started, or where it is was lost.
        """
        payload = dumps(message, f"a message to actor {self.name}")
        with anyio.move_on_after(timeout_s):
            kind, payload = await self._send(Kind.ASK, payload)
            if kind is Kind.RAISED:
                raised: Raised = loads(payload, "an exception")
                raise raised.rebuild(self.name)
            return loads(payload, f"the reply of actor {self.name}")
        raise no_reply(self.name, message, timeout_s)

    async def tell(self, message: Any) -> None:
        """See :meth:`ActorRef.tell`; waits for the actor's earlier messages."""
        await self._send(Kind.TELL, dumps(message, f"a message to actor {self.name}"))

    async def stop(self) -> None:
        """See :meth:`ActorRef.stop`; shielded from cancellation."""
        self._stopping = True
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._stop_timeout_s):
                async with self._turn:
                    await self._stop_in_turn()
            self._stopped = True
            life, self._life = self._life, None
            if life is not None:
                await self._end(life)  # a message that is still in hand sees its death

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _send(self, kind: Kind, payload: bytes) -> tuple[Kind, bytes]:
        """Send one message when it is its turn, and receive the reply if it has one."""
        if self._stopping:
            raise ActorDied(self.name, "it was stopped")
        deaths = self._deaths
        async with self._turn:
            if self._stopped:
                raise ActorDied(self.name, "it was stopped")
            if self._deaths != deaths:
                raise ActorDied(self.name, f"{self._how} (at an earlier message)", self._tail)
            return await self._send_in_turn(kind, payload)

    @abstractmethod
    async def _send_in_turn(self, kind: Kind, payload: bytes) -> tuple[Kind, bytes]:
        """Send a message to the life that there is, or to a new one; counts a death it meets.

        Raises:
            ActorDied: it died before it answered, or could not be started.
        """

    @abstractmethod
    async def _stop_in_turn(self) -> None:
        """Have the actor stop by itself, if there is one."""

    @abstractmethod
    async def _end(self, life: LifeT) -> None:
        """End a life that was stopped, or that had no time to stop; tells its last event."""
