"""The driver's hold on a Ray actor: calls that can be given up, and the news of its death.

asyncio only: Ray knows no other event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")

#: How long a call that was given up may take to say so, in seconds; then its actor is killed.
GIVING_UP_S: Final = 15.0
#: How long Ray may take to confirm a killing, in seconds.
_KILLING_S: Final = 10.0


class HostLost(Exception):
    """The Ray actor is gone, or cannot be reached; the message says how."""


class Host:
    """One living Ray actor; made by :meth:`start`.

    Attributes:
        handle: Ray's own.
    """

    def __init__(self, handle: Any, life: Any) -> None:
        self.handle = handle
        self._life = life

    @classmethod
    async def start(cls, actor_class: type, options: Mapping[str, Any], *args: Any) -> Host:
        """Ask Ray for an actor; returns before it has been placed.

        Args:
            actor_class: has an ``async def live(self)`` that never returns.
            options: as for Ray's ``ActorClass.options``: resources, scheduling strategy …
            args: of its constructor.

        Raises:
            HostLost: Ray is not there.
        """
        import ray

        def ask_for_it() -> Host:
            if not ray.is_initialized():
                raise HostLost("this process is not connected to a Ray cluster")
            try:
                handle = ray.remote(actor_class).options(**options).remote(*args)
                return cls(handle, handle.live.remote())
            except (ray.exceptions.RayError, ValueError) as error:  # a name that is taken
                raise HostLost(described(error)) from error

        return await in_thread(ask_for_it)

    @classmethod
    async def named(cls, name: str, namespace: str) -> Host | None:
        """Take hold of a named actor that is there; ``None`` when there is none."""
        import ray

        def look_for_it() -> Host | None:
            try:
                handle = ray.get_actor(name, namespace)
            except ValueError:
                return None
            return cls(handle, handle.live.remote())

        return await in_thread(look_for_it)

    def is_lost(self) -> bool:
        """Whether the news of its death has come; waits for nothing."""
        import ray

        if not ray.is_initialized():
            return True
        done, _ = ray.wait([self._life], timeout=0)
        return bool(done)

    async def how_lost(self) -> str:
        """Wait for its death; returns how it died."""
        import ray

        if not ray.is_initialized():
            return "the connection to the Ray cluster was closed"
        try:
            await result(self._life)
        except ray.exceptions.RayError as error:
            return described(error)
        raise AssertionError("live() never returns")

    async def call(self, method: str, *args: Any, give_up_s: float | None = None) -> Any:
        """Call one of its methods and wait for the result.

        Cancelled, the call is cancelled in the actor as well, and that is waited for: what the
        method held it has let go of when this raises. An actor that does not obey is killed.

        Args:
            method: its name.
            args: its arguments.
            give_up_s: seconds that the actor has to obey a cancellation, :data:`GIVING_UP_S` if
                absent; with 0 it is killed.

        Raises:
            HostLost: it died, or cannot be reached; the method may have run or not.
        """
        import ray

        reference = getattr(self.handle, method).remote(*args)
        try:
            return await result(reference)
        except ray.exceptions.RayError as error:
            raise HostLost(described(error)) from error
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                patience_s = GIVING_UP_S if give_up_s is None else give_up_s
                if not await self._give_up(reference, patience_s):
                    await self.kill()
            raise

    async def _give_up(self, reference: Any, timeout_s: float) -> bool:
        """Cancel a call; returns whether it has ended."""
        import ray

        if not ray.is_initialized() or timeout_s <= 0:
            return False
        await in_thread(lambda: ray.cancel(reference))
        with anyio.move_on_after(timeout_s):
            try:
                await result(reference)
            except ray.exceptions.RayError:
                return True  # cancelled, or the actor has died
            return True  # it was done just before
        return False

    async def kill(self) -> bool:
        """End the actor, whatever it does; shielded. Returns whether Ray has confirmed it."""
        import ray

        with anyio.CancelScope(shield=True):
            if not ray.is_initialized():
                return True
            await in_thread(lambda: ray.kill(self.handle))
            with anyio.move_on_after(_KILLING_S):
                await self.how_lost()
                return True
        return False


async def result(reference: Any) -> Any:
    """Wait for an object; being cancelled harms neither the object nor its task."""
    future: concurrent.futures.Future[Any] = reference.future()
    return await asyncio.wrap_future(future)


async def in_thread(work: Callable[[], T]) -> T:
    """Do what blocks, such as a question to Ray's head node, on a thread of its own."""
    return await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))


def described(error: Exception) -> str:
    """What a Ray error says, without its lists of identifiers and of common causes."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    text = " ".join(lines)
    for boilerplate in (
        "The actor died unexpectedly before finishing this task. ",
        "The actor is dead because ",
        "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: ",
    ):
        text = text.replace(boilerplate, "")
    text, _, _ = text.partition(" Some common causes include")
    return text.strip() or type(error).__name__
