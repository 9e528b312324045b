"""What a ref to an actor in another process promises, wherever that process is.

A module of tests for one kind of ref defines the fixture ``world``, a :class:`World` that makes
such refs, and imports the tests from here.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import anyio
import psutil
import pytest

from vime.eval.actor import ActorDied, ActorEvent
from vime.eval.actor.away import AwayActor


class Fifo:
    """Where a process says that it has got somewhere."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    async def heard(self) -> None:
        with anyio.fail_after(20):
            await anyio.wait_readable(self.fd)


class Hold:
    """Holds a message in the actor's hand until :meth:`let_go`."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd: int | None = os.open(path, os.O_RDWR)

    def let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass
class World:
    """Makes actors, and remembers what their processes and their owner noted."""

    #: What the actors are called, and how many seconds a death may take to be told.
    name: ClassVar[str] = "probe"
    patience_s: ClassVar[float] = 20.0

    path: Path
    events: list[ActorEvent] = field(default_factory=list)

    @abstractmethod
    def actor(self, factory: str = "Probe", **settings: Any) -> AwayActor[Any]:
        """A ref to an actor of ``tests.programs.actors`` that writes a journal."""

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def journal(self) -> list[str]:
        return [line.split()[0] for line in (self.path / "journal").read_text().splitlines()]

    @contextmanager
    def fifo(self) -> Iterator[Fifo]:
        fifo = Fifo(self.path / f"fifo-{len(list(self.path.iterdir()))}")
        try:
            yield fifo
        finally:
            os.close(fifo.fd)


@asynccontextmanager
async def held(world: World, ref: AwayActor[Any]) -> AsyncIterator[Hold]:
    """The actor has a message in hand; leaving lets it go."""
    hold = Hold(world.path / "hold")
    with world.fifo() as fifo:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, ("say_and_wait", fifo.path, hold.path))
            await fifo.heard()
            try:
                yield hold
            finally:
                hold.let_go()


async def within(scope: anyio.CancelScope, ask: Callable[[Any], Any], message: Any) -> None:
    with scope:
        await ask(message)


@dataclass
class Refusals:
    """Asks what will be refused, and keeps why."""

    ref: AwayActor[Any]
    how: list[str] = field(default_factory=list)

    async def ask(self, message: Any) -> None:
        with pytest.raises(ActorDied) as caught:
            await self.ref.ask(message)
        self.how.append(caught.value.how)


async def assert_a_death_is_told(method: str, how: str, tail: str, world: World) -> None:
    """The ask that it met fails with what is known of it; the next one gets a new process."""
    async with world.actor() as ref:
        pid = await ref.ask(("pid",))
        with anyio.fail_after(world.patience_s), pytest.raises(ActorDied) as caught:
            await ref.ask((method,))
        assert caught.value.how == how
        assert tail in caught.value.log_tail
        assert await ref.ask(("pid",)) != pid
        died = world.events[1]
        assert (died.kind, died.detail["pid"], died.detail["how"]) == ("died", pid, how)
    assert world.kinds == ["started", "died", "started", "stopped"]


@pytest.mark.parametrize(
    ("method", "how", "tail"),
    [
        ("die_by_exit", "exit status 3", "last words"),
        ("die_by_segfault", "signal SIGSEGV", "Segmentation fault"),
        ("die_by_kill", "signal SIGKILL", ""),
    ],
)
async def test_a_death_fails_the_ask_and_the_next_one_gets_a_new_process(
    method: str, how: str, tail: str, world: World
) -> None:
    await assert_a_death_is_told(method, how, tail, world)


async def test_an_overdue_ask_ends_the_process_and_the_next_one_gets_a_new_one(
    world: World,
) -> None:
    no_reply = f"{world.name}: no reply to tuple"
    async with world.actor() as ref:
        pid = await ref.ask(("pid",))
        with world.fifo() as fifo, pytest.raises(TimeoutError, match=no_reply):
            await ref.ask(("say_and_block", fifo.path), timeout_s=0.5)
        assert not psutil.pid_exists(pid)
        assert await ref.ask(("pid",)) != pid
    assert world.kinds == ["started", "ended", "started", "stopped"]


async def test_a_cancelled_ask_ends_the_process_and_those_that_wait_get_a_new_one(
    world: World,
) -> None:
    async with world.actor() as ref:
        with world.fifo() as fifo:
            async with anyio.create_task_group() as tasks:
                scope = anyio.CancelScope()
                tasks.start_soon(within, scope, ref.ask, ("say_and_block", fifo.path))
                await fifo.heard()
                tasks.start_soon(ref.ask, ("echo", 1))
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
    assert world.kinds == ["started", "ended", "started", "stopped"]


@pytest.mark.parametrize("verb", ["ask", "tell"])
async def test_a_message_that_is_cancelled_before_its_turn_is_not_sent_and_harms_nobody(
    verb: str, world: World
) -> None:
    async with world.actor() as ref, held(world, ref):
        with anyio.move_on_after(0.05) as scope:
            await getattr(ref, verb)(("note", "late"))
        assert scope.cancelled_caught
    assert world.kinds == ["started", "stopped"]
    assert world.journal == ["started", "stopped"]


async def test_the_wait_for_ones_turn_counts_for_the_deadline_and_harms_nobody(
    world: World,
) -> None:
    async with world.actor() as ref, held(world, ref):
        with pytest.raises(TimeoutError):
            await ref.ask(("note", "late"), timeout_s=0.05)
    assert world.kinds == ["started", "stopped"]
    assert world.journal == ["started", "stopped"]


async def test_stop_lets_waiting_messages_be_handled_and_refuses_new_ones(world: World) -> None:
    async with world.actor() as ref:
        async with held(world, ref) as hold, anyio.create_task_group() as tasks:
            tasks.start_soon(ref.tell, ("note", "before"))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(ref.stop)
            await anyio.wait_all_tasks_blocked()
            for send in (ref.ask, ref.tell):
                with pytest.raises(ActorDied, match="it was stopped"):
                    await send(("note", "after"))
            hold.let_go()
        await ref.stop()
    assert world.journal == ["started", "before", "stopped"]
    assert world.kinds == ["started", "stopped"]


async def test_stop_ends_what_is_not_done_in_time(world: World) -> None:
    refused = Refusals(world.actor(stop_timeout_s=0.5))
    with world.fifo() as fifo:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused.ask, ("say_and_block", fifo.path))
            await fifo.heard()
            tasks.start_soon(refused.ask, ("echo", 1))
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(20):
                await refused.ref.stop()
    assert refused.how == ["it was stopped"] * 2
    assert world.kinds == ["started", "stopped"]
