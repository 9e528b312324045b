"""Actors of this event loop: order, deadlines, cancellation, stops and deaths."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio.testing
from blockbuster import blockbuster_ctx

from tests.virtual import run_virtual
from vime.eval.actor import Actor, ActorDied, LocalActor, Supervisor

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "asyncio":
        return "asyncio"
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx("vime"):
        yield


@dataclass
class Gate:
    """A message that says when it is in hand, and is held there until it is let go."""

    entered: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event = field(default_factory=anyio.Event)
    left: str = ""


class Scribe(Actor):
    """Writes down what happens to it.

    Consumes anything, produces what it was sent; a :class:`Gate` is waited for, and whoever
    holds the gate unblocks it; an exception is raised.
    """

    def __init__(self) -> None:
        self.notes: list[Any] = []

    async def started(self) -> None:
        self.notes.append("started")

    async def handle(self, message: Any) -> Any:
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Gate):
            message.entered.set()
            message.left = "cancelled"
            await message.release.wait()
            message.left = "released"
        self.notes.append(message)
        return message

    async def stopped(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.notes.append("stopped")


@asynccontextmanager
async def busy(ref: LocalActor) -> AsyncIterator[Gate]:
    """The actor has a message in hand, and is let go at the end."""
    gate = Gate()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, gate)
        await gate.entered.wait()
        try:
            yield gate
        finally:
            gate.release.set()


# --- messages --------------------------------------------------------------------------------


async def test_ask_returns_the_reply() -> None:
    async with LocalActor(Scribe(), name="scribe") as ref:
        assert await ref.ask("hello") == "hello"


async def test_messages_are_handled_one_after_the_other_in_their_order() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe") as ref, busy(ref) as gate:
        for n in range(5):
            await ref.tell(n)
        await anyio.wait_all_tasks_blocked()
        assert scribe.notes == ["started"]
    assert scribe.notes == ["started", gate, 0, 1, 2, 3, 4, "stopped"]


async def test_ask_raises_what_handle_raised_and_the_actor_lives_on() -> None:
    async with LocalActor(Scribe(), name="scribe") as ref:
        with pytest.raises(ZeroDivisionError, match="by zero"):
            await ref.ask(ZeroDivisionError("by zero"))
        assert await ref.ask(1) == 1


async def test_an_actor_that_asks_itself_is_told_so() -> None:
    class Narcissus(Actor):
        async def handle(self, message: Any) -> Any:
            return await ref.ask(message)

    async with LocalActor(Narcissus(), name="narcissus") as ref:
        with pytest.raises(RuntimeError, match="narcissus asked itself str"):
            await ref.ask("who?")


# --- deadlines and cancellation ----------------------------------------------------------------


async def test_an_overdue_ask_raises_and_its_handling_is_cancelled() -> None:
    async with LocalActor(Scribe(), name="scribe") as ref:
        gate = Gate()
        with pytest.raises(TimeoutError, match=r"actor scribe: no reply to Gate within 0\.05 s"):
            await ref.ask(gate, timeout_s=0.05)
        assert await ref.ask(1) == 1
        assert gate.left == "cancelled"


async def test_a_message_that_nobody_waits_for_any_more_is_not_begun() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe") as ref, busy(ref) as gate:
        with pytest.raises(TimeoutError):
            await ref.ask("late", timeout_s=0.05)
    assert scribe.notes == ["started", gate, "stopped"]


async def test_the_wait_for_a_place_in_a_full_mailbox_counts_for_the_deadline() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe", mailbox_size=0) as ref, busy(ref) as gate:
        with pytest.raises(TimeoutError):
            await ref.ask("late", timeout_s=0.05)
    assert scribe.notes == ["started", gate, "stopped"]


@pytest.mark.parametrize("mailbox_size", [0, 1])
async def test_a_cancelled_ask_that_waits_is_not_begun(mailbox_size: int) -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe", mailbox_size=mailbox_size) as ref:
        async with busy(ref) as gate, anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, "late")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert await ref.ask(1) == 1
    assert scribe.notes == ["started", gate, 1, "stopped"]


async def test_a_cancelled_ask_in_hand_cancels_its_handling() -> None:
    async with LocalActor(Scribe(), name="scribe") as ref:
        gate = Gate()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, gate)
            await gate.entered.wait()
            tasks.cancel_scope.cancel()
        assert await ref.ask(1) == 1
        assert gate.left == "cancelled"


async def test_a_cancelled_tell_at_a_full_mailbox_sends_nothing() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe", mailbox_size=0) as ref, busy(ref) as gate:
        with anyio.move_on_after(0.05) as scope:
            await ref.tell("late")
        assert scope.cancelled_caught
    assert scribe.notes == ["started", gate, "stopped"]


async def test_a_cancelled_actor_fails_every_ask_and_stops() -> None:
    scribe = Scribe()
    ref = LocalActor(scribe, name="scribe")
    errors: list[ActorDied] = []

    async def ask(message: Any) -> None:
        with pytest.raises(ActorDied) as caught:
            await ref.ask(message)
        errors.append(caught.value)

    async with anyio.create_task_group() as askers, anyio.create_task_group() as actors:
        await actors.start(ref.run)
        gate = Gate()
        askers.start_soon(ask, gate)
        await gate.entered.wait()
        for n in range(3):
            askers.start_soon(ask, n)
        await anyio.wait_all_tasks_blocked()
        actors.cancel_scope.cancel()
    assert len(errors) == 4
    assert scribe.notes == ["started", "stopped"]
    with pytest.raises(ActorDied):
        await ref.ask("later")
    with pytest.raises(ActorDied):
        await ref.tell("later")


def test_a_cancellation_at_any_step_leaves_a_stopped_actor_and_no_waiting_asker() -> None:
    lives = [life_cancelled_after(steps) for steps in range(1, 80)]
    for notes in lives:
        assert notes.count("stopped") == notes.count("started") <= 1
        assert notes[-1:] in ([], ["stopped"])
    assert lives[0] == ["started", "stopped"]
    assert "last" in lives[-1]


def life_cancelled_after(steps: int) -> list[Any]:
    """What an actor notes whose whole world is cancelled after so many checkpoints."""
    scribe = Scribe()

    async def converse() -> None:
        async with LocalActor(scribe, name="scribe", mailbox_size=1) as ref:
            async with anyio.create_task_group() as tasks:
                for n in range(3):
                    tasks.start_soon(ref.tell, n)
                    tasks.start_soon(ref.ask, n)
            await ref.ask("last")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(converse)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    run_virtual(main, seed=steps)
    return scribe.notes


# --- stops -------------------------------------------------------------------------------------


async def test_stop_lets_waiting_messages_be_handled_and_refuses_new_ones() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe") as ref:
        async with busy(ref) as gate, anyio.create_task_group() as tasks:
            await ref.tell("before")
            tasks.start_soon(ref.stop)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ActorDied, match="it was stopped"):
                await ref.ask("after")
            with pytest.raises(ActorDied, match="it was stopped"):
                await ref.tell("after")
            gate.release.set()
        await ref.stop()
        assert scribe.notes == ["started", gate, "before", "stopped"]


async def test_stop_cancels_what_is_not_done_in_time() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe", stop_timeout_s=0.05) as ref:
        gate = Gate()
        await ref.tell(gate)
        await ref.tell("never")
        await gate.entered.wait()
        await ref.stop()
        assert gate.left == "cancelled"
        assert scribe.notes == ["started", "stopped"]


async def test_a_cancelled_stop_cancels_the_actor() -> None:
    scribe = Scribe()
    async with LocalActor(scribe, name="scribe") as ref:
        gate = Gate()
        await ref.tell(gate)
        await gate.entered.wait()
        with anyio.move_on_after(0.05) as scope:
            await ref.stop()
        assert scope.cancelled_caught
        with pytest.raises(ActorDied):
            await ref.ask(1)
    assert gate.left == "cancelled"
    assert scribe.notes == ["started", "stopped"]


async def test_an_actor_may_stop_itself() -> None:
    class Quitter(Actor):
        async def handle(self, message: Any) -> Any:
            await ref.stop()
            return "bye"

    async with LocalActor(Quitter(), name="quitter") as ref:
        assert await ref.ask("go") == "bye"
        with pytest.raises(ActorDied):
            await ref.ask("again")


async def test_an_actor_that_was_stopped_before_it_ran_handles_nothing() -> None:
    ref = LocalActor(Scribe(), name="scribe")
    await ref.stop()
    await ref.run()
    with pytest.raises(ActorDied):
        await ref.tell(1)


async def test_a_body_that_raises_cancels_the_actor_at_once() -> None:
    scribe, gate = Scribe(), Gate()
    with pytest.RaisesGroup(OSError):
        async with LocalActor(scribe, name="scribe") as ref:
            await ref.tell(gate)
            await gate.entered.wait()
            raise OSError
    assert gate.left == "cancelled"
    assert scribe.notes == ["started", "stopped"]


async def test_an_actor_that_does_not_end_its_stop_is_reported() -> None:
    class Clinger(Scribe):
        async def stopped(self) -> None:
            await anyio.sleep_forever()

    with pytest.RaisesGroup(TimeoutError):
        async with LocalActor(Clinger(), name="clinger", stop_timeout_s=0.05):
            pass


# --- deaths ------------------------------------------------------------------------------------


async def test_an_error_that_nobody_asked_for_ends_the_actor_and_fails_the_waiting() -> None:
    scribe = Scribe()
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="told")):
        async with LocalActor(scribe, name="scribe") as ref:
            await ref.tell(OSError("told"))
            with pytest.raises(ActorDied, match="actor scribe died: OSError: told"):
                await ref.ask("behind it")
            await anyio.sleep_forever()
    assert scribe.notes == ["started", "stopped"]


async def test_a_start_that_fails_is_raised_where_the_actor_was_opened() -> None:
    class Stillborn(Scribe):
        async def started(self) -> None:
            raise OSError("no")

    scribe = Stillborn()
    ref = LocalActor(scribe, name="scribe")
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="no")):
        async with ref:
            pytest.fail("the body must not run")
    with pytest.raises(ActorDied, match="OSError: no"):
        await ref.ask(1)
    assert scribe.notes == []


async def test_a_supervisor_answers_a_death_with_a_new_actor_that_inherits_the_mailbox() -> None:
    scribes: list[Scribe] = []

    def make() -> Scribe:
        scribes.append(Scribe())
        return scribes[-1]

    supervisor = Supervisor(backoff_s=0.01)
    async with LocalActor(make, name="scribe", supervisor=supervisor) as ref:
        await ref.tell(OSError("told"))
        assert await ref.ask("behind it") == "behind it"
    assert [s.notes for s in scribes] == [
        ["started", "stopped"],
        ["started", "behind it", "stopped"],
    ]


async def test_a_supervisor_escalates_and_then_the_waiting_fail() -> None:
    supervisor = Supervisor(max_restarts=1, backoff_s=0.01)
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="second")):
        async with LocalActor(Scribe, name="scribe", supervisor=supervisor) as ref:
            await ref.tell(OSError("first"))
            await ref.tell(OSError("second"))
            with pytest.raises(ActorDied, match="second"):
                await ref.ask("behind them")
            await anyio.sleep_forever()


def test_a_supervisor_needs_to_be_able_to_make_the_actor() -> None:
    with pytest.raises(ValueError, match="pass a callable"):
        LocalActor(Scribe(), name="scribe", supervisor=Supervisor())
