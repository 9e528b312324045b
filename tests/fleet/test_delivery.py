"""A snapshot that has to travel: engines load what reached them, and nothing that did not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tests.fleet.desk import open_desk
from tests.fleet.world import World
from vime.eval.contracts import Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.servers import Delivery

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_blocks_the_loop")]


class Post:
    """Delivers to a directory of each engine's, and knows who holds what."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: list[str] = []
        self.failures: dict[int, list[EngineFailure]] = {}
        self.takes_s = 0.0

    @asynccontextmanager
    async def __call__(self, snapshot: Snapshot, index: int) -> AsyncIterator[Delivery]:
        await anyio.sleep(self.takes_s)
        if self.failures.get(index):
            raise self.failures[index].pop(0)
        path = Path(f"/node_{index}/{snapshot.path.name}")
        self.world.contents[str(path)] = self.world.contents[str(snapshot.path)]
        self.held.append(str(path))
        try:
            yield Delivery(replace(snapshot, path=path), float(index + 1), 100 * index)
        finally:
            self.held.remove(str(path))


async def test_each_engine_loads_what_reached_its_own_node_and_the_proof_says_what_it_took() -> (
    None
):
    world = World()
    post = Post(world)
    async with open_desk(world, localize=post) as desk, desk.fleet.pin(world.snapshot(1)) as proof:
        assert sorted(world.loads) == [
            ("engine_0", "/node_0/step_1"),
            ("engine_1", "/node_1/step_1"),
        ]
        assert (proof.transfer_seconds, proof.transfer_bytes) == (2.0, 100)
        assert post.held == [], "what is loaded need not stay there"


async def test_what_cannot_be_delivered_skips_the_point_and_no_engine_is_doubted() -> None:
    world = World()
    post = Post(world)
    post.failures[1] = [EngineFailure("undelivered", "no room on node 1")]
    async with open_desk(world, localize=post) as desk:
        skip = await desk.skip(world.snapshot(1))
        assert (skip.reason, skip.detail) == ("transfer_failed", "engine_1: no room on node 1")
        await desk.pinned(world.snapshot(2))
        assert not [r for r in desk.records if r.trigger == "suspect"]


async def test_a_delivery_to_a_node_that_is_lost_waits_for_the_engine_to_come_back() -> None:
    world = World()
    post = Post(world)
    post.failures[0] = [EngineFailure("absent", "the node is lost")]
    async with open_desk(world, localize=post) as desk:
        await desk.pinned(world.snapshot(1))


async def test_a_delivery_that_takes_too_long_ends_at_the_deadline_of_the_pin() -> None:
    world = World()
    post = Post(world)
    post.takes_s = 1e9
    async with open_desk(world, localize=post, pin_timeout_s=0.05) as desk:
        assert (await desk.skip(world.snapshot(1))).reason == "timeout_pin"
        assert not [r for r in desk.records if r.trigger == "suspect"]


async def test_an_engine_that_comes_back_is_delivered_to_again() -> None:
    world = World()
    async with (
        open_desk(world, localize=Post(world)) as desk,
        desk.fleet.pin(world.snapshot(1)),
    ):
        world.now("engine_1").kill()
        await desk.until_fired("engine_1", "serve", 2)
        assert world.loads.count(("engine_1", "/node_1/step_1")) == 2
