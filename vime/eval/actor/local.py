"""An actor in this event loop: a bounded mailbox and a run loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from anyio.abc import TaskStatus

from vime.eval.actor.base import Actor, ActorDied, no_reply
from vime.eval.actor.supervision import Supervisor


class _Request:
    """One message on its way; ``done`` is set when it has a reply, an error, or no hope."""

    def __init__(self, message: Any, *, told: bool) -> None:
        self.message = message
        self.told = told
        self.abandoned = False
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()
        self.reply: Any = None
        self.error: BaseException | None = None

    def settle(self, reply: Any = None, error: BaseException | None = None) -> None:
        self.reply = reply
        self.error = error
        self.done.set()

    def abandon(self) -> None:
        self.abandoned = True
        self.scope.cancel()


class LocalActor(anyio.AsyncContextManagerMixin):
    """Runs an actor in this event loop, and is the :class:`ActorRef` to it.

    Use it as an asynchronous context manager, which stops the actor at its end and cancels it
    when the body raises; or start :meth:`run` in a task group. What the actor dies of is raised
    there. A request whose asker has gone is not begun, and is cancelled if it is in hand.

    With a supervisor, a death is answered by a new actor. The mailbox outlives it: only the
    message that killed it is lost, and those behind wait for the next one.

    Consumes its mailbox; waits for messages and for what its actor waits for. ``stop``, or the
    cancellation of ``run``, unblocks it.

    Args:
        actor: the actor, or a callable that makes one; a supervisor needs the latter.
        name: what people call it.
        mailbox_size: how many messages may wait; a further sender waits itself.
        supervisor: decides on restarts; without one the first death is final.
        stop_timeout_s: seconds that :meth:`stop` leaves to the messages that are there, and
            then to ``stopped``.
    """

    def __init__(
        self,
        actor: Actor | Callable[[], Actor],
        *,
        name: str,
        mailbox_size: int = 64,
        supervisor: Supervisor | None = None,
        stop_timeout_s: float = 10.0,
    ) -> None:
        if supervisor is not None and isinstance(actor, Actor):
            raise ValueError(
                f"LocalActor {name}: a supervisor cannot restart the finished object {actor!r}; "
                "pass a callable that makes the actor"
            )
        self.name = name
        self._actor = actor
        self._supervisor = supervisor
        self._stop_timeout_s = stop_timeout_s
        self._send, self._receive = anyio.create_memory_object_stream[_Request](mailbox_size)
        self._scope = anyio.CancelScope()
        self._task_id: int | None = None
        self._over = anyio.Event()
        self._how = "it was stopped"

    async def ask(self, message: Any, timeout_s: float | None = None) -> Any:
        """See :meth:`ActorRef.ask`.

        Raises:
            RuntimeError: it was asked by itself, which would wait for ever.
        """
        if anyio.get_current_task().id == self._task_id:
            raise RuntimeError(f"actor {self.name} asked itself {type(message).__name__}")
        request = _Request(message, told=False)
        try:
            with anyio.move_on_after(timeout_s):
                await self._put(request)
                await request.done.wait()
        finally:
            request.abandon()
        if not request.done.is_set():
            raise no_reply(self.name, message, timeout_s)
        if request.error is not None:
            raise request.error
        return request.reply

    async def tell(self, message: Any) -> None:
        """See :meth:`ActorRef.tell`."""
        await self._put(_Request(message, told=True))

    async def stop(self) -> None:
        """See :meth:`ActorRef.stop`; an actor that stops itself is stopped after this message."""
        self._send.close()
        if self._task_id is None or anyio.get_current_task().id == self._task_id:
            return
        try:
            with anyio.move_on_after(self._stop_timeout_s):
                await self._over.wait()
        finally:
            self._scope.cancel()
        await self._over.wait()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Live until stopped; ``task_status`` is told when the first messages can be handled.

        Raises:
            Exception: what the actor died of.
        """
        assert self._task_id is None, "it runs once"
        assert not self._over.is_set(), "it runs once"
        self._task_id = anyio.get_current_task().id
        ready: list[TaskStatus[None]] = [task_status]
        try:
            with self._scope:
                if self._supervisor is None:
                    await self._live(ready)
                else:
                    await self._supervisor.run(lambda: self._live(ready))
        except BaseException as error:
            self._how = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._close()

    async def _live(self, ready: list[TaskStatus[None]]) -> None:
        """One life of the actor."""
        actor = self._actor if isinstance(self._actor, Actor) else self._actor()
        await actor.started()
        try:
            if ready:
                ready.pop().started()
            async for request in self._receive:
                if not request.abandoned:
                    await self._serve(actor, request)
        finally:
            with anyio.CancelScope(shield=True), anyio.fail_after(self._stop_timeout_s):
                await actor.stopped()

    async def _serve(self, actor: Actor, request: _Request) -> None:
        with request.scope:
            try:
                request.settle(await actor.handle(request.message))
            except Exception as error:
                if request.told:
                    raise
                request.settle(error=error)
            except BaseException:
                request.settle(error=ActorDied(self.name, "it was cancelled"))
                raise

    async def _put(self, request: _Request) -> None:
        try:
            await self._send.send(request)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            raise ActorDied(self.name, self._how) from None

    def _close(self) -> None:
        """Nobody reads the mailbox any more: settle what is in it, and what would come."""
        self._send.close()
        while True:
            try:
                request = self._receive.receive_nowait()
            except (anyio.EndOfStream, anyio.WouldBlock):
                break
            request.settle(error=ActorDied(self.name, self._how))
        self._receive.close()
        self._task_id = None
        self._over.set()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.run)
            yield self
            await self.stop()
