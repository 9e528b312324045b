"""Nodes that are lost, and deliveries that are given up: no other one suffers, and traces are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.ray.no_ray import World, running, verify, world
from tests.snapshots import checkpoints
from vime.eval.contracts import Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.ray import delivery, depot
from vime.ray.delivery import Deliveries
from vime.ray.depot import Depot, Taken
from vime.ray.node_store import FileFacts

__all__ = ["checkpoints", "verify", "world"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as Ray's actors


async def give_up_when(reached: anyio.Event, deliveries: Deliveries, snapshot: Snapshot) -> None:
    """Have a snapshot brought to the first engine's node, and cancel it at some event."""

    async def deliver() -> None:
        async with deliveries(snapshot, 0):
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deliver)
        await reached.wait()
        tasks.cancel_scope.cancel()


async def test_a_node_behind_a_lost_one_gets_its_pieces_nevertheless(
    world: World, checkpoints: Path
) -> None:
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    world.engines = {0: "b", 1: "c"}
    given: list[bytes] = []
    give = world.give

    async def give_until_it_dies(
        target: Depot, name: str, offset: int, source: Any, hand_on: bool
    ) -> Taken:
        """The first node dies with a piece that it was to hand on."""
        if target is world.of("b").actor:
            given.append(source)
            if len(given) == 2:
                world.of("b").lost = True
                return Taken(None, "lost")
            return await give(target, name, offset, source, hand_on)
        if source == "lost":
            return Taken("the object is lost")
        return await give(target, name, offset, source, hand_on)

    async with running(world) as deliveries:
        world.patch.setattr(depot, "_give", give_until_it_dies)
        with pytest.raises(EngineFailure) as caught:
            async with deliveries(snapshot, 0):
                pass
        assert caught.value.kind == "absent"
        async with deliveries(snapshot, 1) as found:
            assert found.num_bytes == 0, "it has come along"


async def test_a_lost_depot_is_news_of_a_lost_node_and_the_next_one_starts_afresh(
    world: World, checkpoints: Path
) -> None:
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    async with running(world) as deliveries:
        async with deliveries(snapshot, 0):
            pass
        world.of("b").lost = True
        world.of("b").actor._store._store._staging._lock.release()  # as its death does
        with pytest.raises(EngineFailure) as caught:
            async with deliveries(snapshot, 0):
                pass
        assert caught.value.kind == "absent"
        async with deliveries(snapshot, 0) as again:
            assert again.num_bytes > 0
        world.engines[0] = "gone"
        with pytest.raises(EngineFailure) as caught:
            async with deliveries(snapshot, 0):
                pass
        assert caught.value.kind == "absent"


async def test_a_node_that_cannot_be_reached_in_the_end_has_a_whole_trace(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "b"}
    world.patch.setattr(delivery, "_CLOSE_S", 0.01)
    async with running(world) as deliveries:
        async with deliveries(await world.snapshot(checkpoints / "whole", 1), 0):
            pass
        hired = world.of("b")
        second = await world.snapshot(checkpoints / "whole", 2)
        await deliveries._ask("b", "begin", "b", second, {"a": FileFacts(1, 0)})

        async def hang(method: str, *args: Any, **settings: Any) -> Any:
            await anyio.sleep_forever()

        world.patch.setattr(hired, "call", hang)
    last = world.trace()[-1]
    assert (last.id, last.trigger, last.reason) == ("step_2", "abandon", "node_lost")


async def test_a_node_that_is_lost_while_an_engine_reads_there_has_a_whole_trace(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "b"}
    async with running(world) as deliveries:
        for step in (1, 2):
            async with deliveries(await world.snapshot(checkpoints / "whole", step), 0):
                pass
        async with deliveries(await world.snapshot(checkpoints / "whole", 3), 0):
            world.of("b").lost = True
    last = world.trace()[-1]
    assert (last.id, last.trigger, last.reason) == ("step_3", "leave", "node_lost")
    assert [r.seq for r in world.trace()] == list(range(len(world.trace())))
    # that nothing is read there any more is checked after each test


async def test_what_a_call_has_done_that_was_given_up_is_told_by_the_next_one(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "b"}
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    async with running(world) as deliveries:
        async with deliveries(snapshot, 0):
            pass
        hired, done = world.of("b"), anyio.Event()
        call = hired.call

        async def never_answers(method: str, *args: Any, **settings: Any) -> Any:
            answer = await call(method, *args, **settings)
            if method == "lease":
                done.set()
                await anyio.sleep_forever()
            return answer

        world.patch.setattr(hired, "call", never_answers)
        await give_up_when(done, deliveries, snapshot)
        world.patch.setattr(hired, "call", call)
        await deliveries._ask("b", "leave", snapshot.weight_version)
    life = [r.trigger for r in world.trace() if r.id == "step_1"]
    assert life[3:7] == ["lease", "leave"] * 2


async def test_a_delivery_that_is_given_up_leaves_the_node_usable(
    world: World, checkpoints: Path
) -> None:
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    entered = anyio.Event()

    async def hang(*args: Any) -> None:
        entered.set()
        await anyio.sleep_forever()

    async with running(world) as deliveries:
        world.patch.setattr(depot, "_give", hang)
        await give_up_when(entered, deliveries, snapshot)
        world.patch.setattr(depot, "_give", world.give)
        async with deliveries(snapshot, 0) as found:
            assert found.num_bytes > 0
