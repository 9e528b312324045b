"""Actors on a Ray cluster behave as those in a process of this machine, and outlive nobody."""

from __future__ import annotations

import os
import signal
import subprocess
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
    Fifo,
    held,
    test_a_cancelled_ask_ends_the_process_and_those_that_wait_get_a_new_one,
    test_a_death_fails_the_ask_and_the_next_one_gets_a_new_process,
    test_a_message_that_is_cancelled_before_its_turn_is_not_sent_and_harms_nobody,
    test_an_overdue_ask_ends_the_process_and_the_next_one_gets_a_new_one,
    test_stop_ends_what_is_not_done_in_time,
    test_stop_lets_waiting_messages_be_handled_and_refuses_new_ones,
    test_the_wait_for_ones_turn_counts_for_the_deadline_and_harms_nobody,
)
from tests.watch import watching
from vime.eval.actor import ActorDied, ActorEvent, RemoteError
from vime.ray import hosting
from vime.ray.actors import RayActor
from vime.rollout.checkpoint_eval import EvalSkip

#: Of this test process alone: others may run actors on this machine as well.
NAME = f"probe_{os.getpid()}"

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.usefixtures("machine")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_of_vime_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx("vime"):
        yield


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(of_actors(), timeout=10)
    assert not alive


def of_actors() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(f"vime actor {NAME}" in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


class World(contract.World):
    """Its actors run in processes that a Ray actor owns."""

    name = NAME
    patience_s = 30.0

    def actor(self, factory: str = "tests.programs.actors:Probe", **settings: Any) -> RayActor:
        args = (self.path / "journal",) if "Probe" in factory else ()
        return RayActor(
            factory,
            args,
            name=NAME,
            log_path=self.path / "logs" / "probe.log",
            on_event=self.events.append,
            **settings,
        )

    def watched(self, **settings: Any) -> RayActor:
        return self.actor("tests.ray.programs:Watched", **settings)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def ends(fifo: Fifo) -> None:
    """Wait until whoever holds the FIFO's other end has died."""
    with anyio.fail_after(30):
        while True:
            await anyio.wait_readable(fifo.fd)
            if os.read(fifo.fd, 64) == b"":
                return


# --- messages ----------------------------------------------------------------------------------


async def test_the_actor_runs_in_a_process_of_its_own_that_starts_when_it_is_first_asked(
    world: World,
) -> None:
    import ray

    async with world.actor() as ref:
        assert world.events == []
        pid = await ref.ask(("pid",))
        assert psutil.Process(pid) in of_actors()
        detail = {"pid": pid, "node": ray.util.get_node_ip_address()}
        assert world.events == [ActorEvent(NAME, "started", detail)]
        assert await ref.ask(("pid",)) == pid
    assert world.kinds == ["started", "stopped"]
    assert world.journal == ["started", "stopped"]


async def test_an_actor_that_was_never_asked_starts_nothing(world: World) -> None:
    async with world.actor():
        pass
    assert world.events == []
    assert not (world.path / "logs").exists()


async def test_messages_of_any_size_are_handled_one_after_the_other_in_their_order(
    world: World,
) -> None:
    large = os.urandom(5_000_000)
    ref = world.actor()
    async with ref:
        assert await ref.ask(("echo", large)) == large
        async with held(world, ref) as hold, anyio.create_task_group() as tasks:
            for n, padding in enumerate((" " * 5_000_000, "", " " * 300_000, "")):
                tasks.start_soon(ref.tell, ("note", f"{n}{padding}"))
                await anyio.wait_all_tasks_blocked()
            hold.let_go()
    assert world.journal == ["started", "0", "1", "2", "3", "stopped"]


async def test_what_handle_raises_arrives_as_from_any_other_actor(world: World) -> None:
    async with world.actor() as ref:
        with pytest.raises(ValueError, match="the effect") as caught:
            await ref.ask(("raise_chained",))
        assert "OSError: the cause" in caught.value.__notes__[0]
        with pytest.raises(EvalSkip) as skipped:
            await ref.ask(("raise_skip",))
        assert skipped.value.reason == "my_backend_is_away"
        with pytest.raises(RemoteError, match="NoSuchMailboxError: letters"):
            await ref.ask(("raise_from_a_module_that_only_the_child_knows",))
        with pytest.raises(TypeError, match=rf"a message to actor {NAME} .* cannot be pickled"):
            await ref.ask(("echo", lambda: None))
        assert await ref.ask(("echo", 1)) == 1
    assert world.kinds == ["started", "stopped"]


async def test_the_process_has_the_gpus_and_the_environment_that_its_actor_was_given(
    world: World,
) -> None:
    ref = world.watched(options={"num_cpus": 1, "num_gpus": 2}, env={"SECRET": "s"})
    async with ref:
        found = await ref.ask(("environment", "CUDA_VISIBLE_DEVICES"))
        assert len(set(found.split(","))) == 2
        assert await ref.ask(("environment", "SECRET")) == "s"
    async with world.watched() as ref:
        assert await ref.ask(("environment", "CUDA_VISIBLE_DEVICES")) == ""


# --- deaths ------------------------------------------------------------------------------------


async def test_the_death_of_the_ray_actor_ends_the_process_and_fails_every_waiting_ask(
    world: World,
) -> None:
    async with world.watched() as ref:
        refused = contract.Refusals(ref)
        with world.fifo() as fifo:
            await ref.ask(("hold", fifo.path))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(refused.ask, ("hold_and_stay", fifo.path))
                await fifo.heard()
                tasks.start_soon(refused.ask, ("environment", "HOME"))
                await anyio.wait_all_tasks_blocked()
                kill_ray_actor(ref)
            await ends(fifo)
        first, second = refused.how
        assert first.startswith("Worker unexpectedly exits")
        assert "(on node " in first
        assert second == f"{first} (at an earlier message)"
        assert await ref.ask(("environment", "HOME")) == os.environ["HOME"]
    assert world.kinds == ["started", "died", "started", "stopped"]


def kill_ray_actor(ref: RayActor) -> None:
    assert ref._life is not None
    os.kill(ref._life.facts.pid, signal.SIGKILL)


async def test_a_death_of_the_ray_actor_between_two_messages_costs_none(world: World) -> None:
    async with world.actor() as ref:
        pid = await ref.ask(("pid",))
        assert ref._life is not None
        host = ref._life.host
        kill_ray_actor(ref)
        with anyio.fail_after(30):
            await host.how_lost()
        assert await ref.ask(("pid",)) != pid
    assert world.kinds == ["started", "died", "started", "stopped"]


async def test_an_actor_that_ray_has_no_place_for_says_so(world: World) -> None:
    ref = world.actor(options={"num_gpus": 100}, start_timeout_s=1)
    async with ref:
        with pytest.raises(ActorDied, match=r"no place with {'num_gpus': 100} within 1 s"):
            await ref.ask(("pid",))
    assert world.events == []


async def test_a_start_that_cannot_succeed_says_why(world: World) -> None:
    async with world.actor("tests.programs.actors:no_such_name") as ref:
        with pytest.raises(ActorDied, match="no attribute 'no_such_name'"):
            await ref.ask(("pid",))


async def test_the_actor_ends_with_its_driver(world: World) -> None:
    import ray

    with world.fifo() as fifo:
        address = ray.get_runtime_context().gcs_address
        driver = start_driver(address, str(world.path / "log"), str(fifo.path))
        try:
            with anyio.fail_after(60):
                await anyio.wait_readable(fifo.fd)
        finally:
            driver.kill()
            driver.wait()
        await ends(fifo)


def start_driver(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.ray.programs", *words])


# --- deadlines, cancellation, stops --------------------------------------------------------------


async def test_a_ray_actor_that_does_not_obey_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "GIVING_UP_S", 0.5)
    async with world.watched() as ref:
        with world.fifo() as fifo:
            await ref.ask(("hold", fifo.path))
            assert ref._life is not None
            pid = ref._life.facts.pid
            with watching([pid]) as watch:
                os.kill(pid, signal.SIGSTOP)
                with anyio.fail_after(40), pytest.raises(TimeoutError):
                    await ref.ask(("environment", "HOME"), timeout_s=0.5)
                await ends(fifo)
                await anyio.to_thread.run_sync(watch.assert_gone)
        assert await ref.ask(("environment", "HOME")) == os.environ["HOME"]
    assert world.kinds == ["started", "ended", "started", "stopped"]
