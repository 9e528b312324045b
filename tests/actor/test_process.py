"""Actors in processes of their own: errors, deaths, deadlines, cancellation and stops."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from blockbuster import blockbuster_ctx

from tests.actor import contract
from tests.actor.contract import (  # noqa: F401 -- tests of every ref to another process
    held,
    test_a_cancelled_ask_ends_the_process_and_those_that_wait_get_a_new_one,
    test_a_death_fails_the_ask_and_the_next_one_gets_a_new_process,
    test_a_message_that_is_cancelled_before_its_turn_is_not_sent_and_harms_nobody,
    test_an_overdue_ask_ends_the_process_and_the_next_one_gets_a_new_one,
    test_stop_ends_what_is_not_done_in_time,
    test_stop_lets_waiting_messages_be_handled_and_refuses_new_ones,
    test_the_wait_for_ones_turn_counts_for_the_deadline_and_harms_nobody,
)
from tests.programs.actors import Poison
from vime.eval.actor import ActorDied, ActorEvent, ProcessActor, RemoteError
from vime.rollout.checkpoint_eval import EvalSkip

MODULE = "tests.programs.actors"

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx("vime"):
        yield


def kept_children() -> list[psutil.Process]:
    """The keepers below this process; other tests may have left helpers of their libraries."""
    return [c for c in psutil.Process().children() if any("keeper.py" in w for w in c.cmdline())]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not kept_children()


class World(contract.World):
    """Its actors run in processes of this one's."""

    def actor(self, factory: str = "Probe", *more: Any, **settings: Any) -> ProcessActor:
        return ProcessActor(
            f"{MODULE}:{factory}",
            (self.path / "journal", *more),
            name=self.name,
            log_path=self.path / "probe.log",
            on_event=self.events.append,
            **settings,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def open_fds() -> int:
    return psutil.Process().num_fds()


# --- messages ----------------------------------------------------------------------------------


async def test_the_actor_lives_in_another_process_and_starts_when_first_asked(
    world: World,
) -> None:
    async with world.actor() as ref:
        assert world.events == []
        pid = await ref.ask(("pid",))
        assert pid != os.getpid()
        assert world.events == [ActorEvent("probe", "started", {"pid": pid})]
        assert await ref.ask(("pid",)) == pid
    assert world.kinds == ["started", "stopped"]
    assert world.journal == ["started", "stopped"]


async def test_an_actor_that_was_never_asked_starts_no_process(world: World) -> None:
    async with world.actor():
        pass
    assert world.events == []
    assert not (world.path / "probe.log").exists()


async def test_large_messages_and_replies_arrive_whole(world: World) -> None:
    value = os.urandom(5_000_000)
    async with world.actor() as ref:
        assert await ref.ask(("echo", value)) == value


async def test_messages_are_handled_one_after_the_other_in_their_order(world: World) -> None:
    ref = world.actor()
    async with ref, held(world, ref) as hold, anyio.create_task_group() as tasks:
        for n in range(4):
            tasks.start_soon(ref.tell, ("note", f"{n}"))
            await anyio.wait_all_tasks_blocked()
        assert world.journal == ["started"]
        hold.let_go()
    assert world.journal == ["started", "0", "1", "2", "3", "stopped"]


async def test_an_actor_that_blocks_its_loop_holds_up_nobody_else(world: World) -> None:
    async with world.actor() as ref, world.actor() as other:
        with world.fifo() as fifo:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.ask, ("say_and_block", fifo.path))
                await fifo.heard()
                with anyio.fail_after(20):
                    assert await other.ask(("echo", 1)) == 1
                tasks.cancel_scope.cancel()


async def test_what_the_actor_prints_goes_to_the_log_and_it_reads_nothing(world: World) -> None:
    async with world.actor() as ref:
        assert await ref.ask(("use_standard_streams",)) == ""
        assert await ref.ask(("echo", 1)) == 1
        log = world.path / "probe.log"
        assert sorted(log.read_text().splitlines()) == ["by a child", "printed", "raw", "written"]


async def test_hundreds_of_messages_and_several_lives_leave_no_file_descriptor(
    world: World,
) -> None:
    async with world.actor() as ref:
        await ref.ask(("echo", 0))
        before = open_fds()
        for n in range(200):
            assert await ref.ask(("echo", n)) == n
        assert open_fds() == before
        for _ in range(3):
            with pytest.raises(ActorDied):
                await ref.ask(("die_by_kill",))
            await ref.ask(("echo", 0))
        assert open_fds() == before


async def test_it_works_on_trio_too(world: World) -> None:
    async def main() -> None:
        async with world.actor() as ref:
            assert await ref.ask(("echo", 1)) == 1
            with world.fifo() as fifo, pytest.raises(TimeoutError):
                await ref.ask(("say_and_block", fifo.path), timeout_s=0.2)
            assert await ref.ask(("echo", 2)) == 2

    await anyio.to_thread.run_sync(functools.partial(anyio.run, main, backend="trio"))


# --- errors ------------------------------------------------------------------------------------


async def test_ask_raises_what_handle_raised_with_its_remote_traceback(world: World) -> None:
    async with world.actor() as ref:
        with pytest.raises(ValueError, match="the effect") as caught:
            await ref.ask(("raise_chained",))
        (note,) = caught.value.__notes__
        assert "Raised in the process of actor probe" in note
        assert "OSError: the cause" in note
        assert "in raise_chained" in note
        assert await ref.ask(("echo", 1)) == 1


async def test_a_skip_arrives_as_it_was_raised(world: World) -> None:
    async with world.actor() as ref:
        with pytest.raises(EvalSkip) as caught:
            await ref.ask(("raise_skip",))
        assert (caught.value.reason, caught.value.detail) == (
            "my_backend_is_away",
            "until tomorrow",
        )


@pytest.mark.parametrize(
    ("method", "type_name"),
    [
        ("raise_two_arguments", f"{MODULE}.TwoArguments: this and that"),
        ("raise_local", "LocalError: nobody can import me"),
        ("raise_from_a_module_that_only_the_child_knows", "mailbox.NoSuchMailboxError: letters"),
        ("raise_cancelled", "asyncio.exceptions.CancelledError: "),
    ],
)
async def test_an_exception_that_cannot_be_had_here_arrives_as_a_description(
    method: str, type_name: str, world: World
) -> None:
    async with world.actor() as ref:
        with pytest.raises(RemoteError) as caught:
            await ref.ask((method,))
        assert str(caught.value).endswith(type_name)
        assert f"in {method}" in caught.value.traceback
        assert await ref.ask(("echo", 1)) == 1
    assert "mailbox" not in sys.modules


async def test_a_message_that_cannot_be_pickled_is_refused_before_it_is_sent(world: World) -> None:
    async with world.actor() as ref:
        for send in (ref.ask, ref.tell):
            with pytest.raises(TypeError, match=r"a message to actor probe .* cannot be pickled"):
                await send(("echo", lambda: None))
    assert world.events == []


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (("echo", Poison()), "the message cannot be rebuilt .*ValueError"),
        (("reply_with_a_lambda",), "the reply of type function cannot be pickled"),
        (("reply_with_poison",), "the reply of actor probe cannot be rebuilt"),
    ],
)
async def test_what_one_side_cannot_pickle_or_rebuild_costs_that_message_alone(
    message: Any, match: str, world: World
) -> None:
    async with world.actor() as ref:
        pid = await ref.ask(("pid",))
        with pytest.raises(TypeError, match=match):
            await ref.ask(message)
        assert await ref.ask(("pid",)) == pid


def test_an_actor_cannot_be_made_of_what_cannot_be_pickled_or_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(TypeError, match="the arguments of actor a"):
        ProcessActor("a:b", (lambda: None,), name="a", log_path=log)
    with pytest.raises(ValueError, match=r"expected package\.module:callable"):
        ProcessActor("a.b", name="a", log_path=log)


def test_the_errors_of_an_actor_survive_pickling() -> None:
    died = pickle.loads(pickle.dumps(ActorDied("probe", "signal SIGKILL", "last words")))
    assert str(died) == "actor probe died: signal SIGKILL; its log ends with:\nlast words"
    remote = pickle.loads(pickle.dumps(RemoteError("a.B", "text", "traceback")))
    assert (str(remote), remote.traceback) == ("a.B: text", "traceback")


# --- deaths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "how", "tail"),
    [
        ("die_by_sys_exit", "exit status 4", ""),
        ("die_while_a_fork_holds_the_pipes", "exit status 5", ""),
        ("close_everything", "it closed its channel", ""),
    ],
)
async def test_whatever_ends_the_process_or_its_channel_fails_the_ask(
    method: str, how: str, tail: str, world: World
) -> None:
    await contract.assert_a_death_is_told(method, how, tail, world)


async def test_a_death_fails_every_waiting_ask_at_once(world: World) -> None:
    async with world.actor() as ref:
        refused = contract.Refusals(ref)
        with world.fifo() as fifo, anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(refused.ask, ("say_and_block", fifo.path))
                await fifo.heard()
                for n in range(3):
                    tasks.start_soon(refused.ask, ("echo", n))
                await anyio.wait_all_tasks_blocked()
                os.kill(world.events[0].detail["pid"], signal.SIGKILL)
        assert refused.how == [
            "signal SIGKILL",
            *["signal SIGKILL (at an earlier message)"] * 3,
        ]
        assert await ref.ask(("echo", 1)) == 1


async def test_a_death_between_two_messages_costs_none(world: World) -> None:
    async with world.actor() as ref:
        process = psutil.Process(await ref.ask(("pid",)))
        keeper = process.parent()
        assert keeper is not None
        process.kill()
        keeper.wait(20)
        async with anyio.create_task_group() as tasks:
            for n in range(3):
                tasks.start_soon(ref.ask, ("echo", n))
    assert world.kinds == ["started", "died", "started", "stopped"]


async def test_a_killed_keeper_is_a_death_too(world: World) -> None:
    async with world.actor() as ref:
        with world.fifo() as fifo, anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill_keeper, world, fifo)
                with pytest.raises(ActorDied, match="signal SIGKILL"):
                    await ref.ask(("say_and_block", fifo.path))


async def kill_keeper(world: World, fifo: contract.Fifo) -> None:
    await fifo.heard()
    keeper = psutil.Process(world.events[0].detail["pid"]).parent()
    assert keeper is not None
    keeper.kill()


async def test_an_error_at_a_told_message_ends_the_process(world: World) -> None:
    async with world.actor() as ref:
        await ref.tell(("raise_chained",))
        with anyio.fail_after(20), pytest.raises(ActorDied) as caught:
            await ref.ask(("echo", 1))
        assert caught.value.how == "exit status 1"
        assert "ValueError: the effect" in caught.value.log_tail
        assert await ref.ask(("echo", 1)) == 1
    assert world.journal == ["started", "stopped", "started", "stopped"]


# --- starts ------------------------------------------------------------------------------------


async def test_a_failed_start_says_why_and_is_tried_again(world: World) -> None:
    async with world.actor("failing_once") as ref:
        with pytest.raises(ActorDied, match="it could not start: OSError: not yet") as caught:
            await ref.ask(("echo", 1))
        assert isinstance(caught.value.__cause__, OSError)
        assert "in failing_once" in caught.value.log_tail
        assert await ref.ask(("echo", 1)) == 1


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        ("not_an_actor", "made {}: expected an Actor"),
        ("no_such_name", "no attribute 'no_such_name'"),
        ("dying", "died: exit status 9; its log ends with:\nborn to die"),
    ],
)
async def test_a_start_that_cannot_succeed_says_why(factory: str, match: str, world: World) -> None:
    async with world.actor(factory) as ref:
        with anyio.fail_after(20), pytest.raises(ActorDied, match=match):
            await ref.ask(("echo", 1))


async def test_an_overdue_start_ends_the_process(world: World) -> None:
    with world.fifo() as fifo:
        async with world.actor("blocking_once", fifo.path, start_timeout_s=0.5) as ref:
            with pytest.raises(ActorDied, match=r"it did not start within 0\.5 s"):
                await ref.ask(("echo", 1))
            assert not kept_children()


async def test_a_cancelled_start_ends_the_process(world: World) -> None:
    with world.fifo() as fifo:
        async with world.actor("blocking_once", fifo.path) as ref:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.ask, ("echo", 1))
                await fifo.heard()
                tasks.cancel_scope.cancel()
            assert not kept_children()
            assert await ref.ask(("echo", 1)) == 1


# --- deadlines and cancellation ------------------------------------------------------------------


async def test_a_tell_that_is_cancelled_half_way_ends_the_process(world: World) -> None:
    async with world.actor() as ref:
        with world.fifo() as fifo:
            await ref.tell(("say_and_block", fifo.path))
            await fifo.heard()
            with anyio.move_on_after(0.2) as scope:
                await ref.tell(("echo", b"x" * 10_000_000))
            assert scope.cancelled_caught
        assert await ref.ask(("echo", 1)) == 1
    assert world.kinds == ["started", "ended", "started", "stopped"]


# --- stops -------------------------------------------------------------------------------------


async def test_a_thread_that_never_ends_does_not_hold_up_a_stopped_actors_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.eval.actor.remote._EXIT_S", 0.1)
    async with world.actor(stop_timeout_s=1e6) as ref:
        await ref.ask(("leave_a_thread",))
    assert world.journal == ["started", "stopped"]
    assert world.kinds == ["started", "stopped"]


async def test_stop_stops_in_a_cancelled_scope(world: World) -> None:
    with anyio.CancelScope() as scope:
        async with world.actor() as ref:
            await ref.ask(("echo", 1))
            scope.cancel()
    assert world.journal == ["started", "stopped"]


async def test_stopping_a_dead_actor_is_no_error(world: World) -> None:
    async with world.actor() as ref:
        os.kill(await ref.ask(("pid",)), signal.SIGKILL)


async def test_an_actor_whose_owner_has_gone_is_stopped(world: World) -> None:
    """What the process does when its standard input ends, without a word from its owner."""
    async with world.actor() as ref:
        await ref.ask(("echo", 1))
        life = ref._life
        assert life is not None
        assert life.process.stdin is not None
        await life.process.stdin.aclose()
        with anyio.fail_after(20):
            assert await life.process.wait() == 0
    assert world.journal == ["started", "stopped"]
