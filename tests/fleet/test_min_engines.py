"""With fewer engines than all being enough, a point runs on those that proved themselves."""

from __future__ import annotations

import anyio
import pytest

from tests.fleet.desk import open_desk
from tests.fleet.world import Gate, Life, World, fails, hang
from vime.eval.fleet.supervisor import FleetStartError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_blocks_the_loop")]


async def test_a_point_runs_on_the_engines_that_are_there_and_the_other_joins_it() -> None:
    async with open_desk(min_engines=1) as desk:
        desk.world.now("engine_0").kill()
        await desk.until_fired("engine_0", "suspect")
        async with desk.fleet.pin(desk.world.snapshot(40)) as proof:
            assert [e.engine for e in proof.engines] == ["engine_1"]
            assert desk.world.now("router").workers == [desk.world.now("engine_1").url]
            again = await desk.until_fired("engine_0", "serve")
            assert again.weight_version == proof.weight_version
            with anyio.fail_after(30):
                while len(desk.world.now("router").workers) < 2:
                    await anyio.lowlevel.checkpoint()
            assert await desk.versions(proof) == {proof.weight_version}


async def test_an_engine_that_dies_after_its_proof_is_no_part_of_the_pins_and_joins_it_later() -> (
    None
):
    world, gate = World(), Gate()
    world.lives["engine_1"] = [Life(faults={"/collective_rpc": gate})]
    async with open_desk(world, min_engines=1) as desk:

        async def lose_the_first() -> None:
            await desk.until_fired("engine_0", "serve")
            world.now("engine_0").kill()
            await desk.until_fired("engine_0", "ready", 2)
            gate.release.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lose_the_first)
            async with desk.fleet.pin(world.snapshot(40)) as proof:
                assert [e.engine for e in proof.engines] == ["engine_1"]
                assert (await desk.until_fired("engine_0", "serve", 2)).attempt == 1


async def test_an_engine_without_proof_is_left_out_and_replaced() -> None:
    world = World()
    world.lives["engine_1"] = [Life(report={"digest": "f" * 64})]
    async with open_desk(world, num_engines=3, min_engines=2) as desk:
        async with desk.fleet.pin(world.snapshot(40)) as proof:
            assert [e.engine for e in proof.engines] == ["engine_0", "engine_2"]
        assert (await desk.until_fired("engine_1", "suspect")).reason == "stale"
        await desk.until_fired("engine_1", "ready", 2)
        assert len((await desk.pinned(world.snapshot(50))).engines) == 3


async def test_the_outlier_of_three_costs_nothing_where_two_are_enough() -> None:
    world = World()
    world.lives["engine_0"] = [Life(computes="otherwise")]
    async with open_desk(world, num_engines=3, min_engines=2) as desk:
        proof = await desk.pinned(world.snapshot(40))
        assert [e.engine for e in proof.engines] == ["engine_1", "engine_2"]
        assert proof.canary is not None


async def test_an_engine_that_hangs_in_its_load_leaves_time_for_the_others() -> None:
    world = World()
    world.lives["engine_0"] = [Life(faults={"/collective_rpc": hang})]
    async with open_desk(world, min_engines=1, pin_timeout_s=1) as desk:
        proof = await desk.pinned(world.snapshot(40))
        assert [e.engine for e in proof.engines] == ["engine_1"]


async def test_fewer_than_asked_for_are_not_enough() -> None:
    world = World()
    for engine in ("engine_0", "engine_1"):
        world.lives[engine] = [Life(faults={"/collective_rpc": fails(500, "broken")})]
    async with open_desk(world, num_engines=3, min_engines=2) as desk:
        assert (await desk.skip(world.snapshot(40))).reason == "pin_violation"


async def test_weights_that_are_no_numbers_are_the_snapshots_fault_on_any_engine() -> None:
    world = World()
    world.lives["engine_1"] = [Life(report={"with_nan": ["a"]})]
    async with open_desk(world, min_engines=1) as desk:
        assert (await desk.skip(world.snapshot(40))).reason == "unhealthy"


async def test_engines_that_stay_down_are_done_without_as_long_as_enough_are_left() -> None:
    async with open_desk(num_engines=3, min_engines=2, max_restarts=0) as desk:
        for engine in ("engine_0", "engine_1"):
            desk.world.now(engine).kill()
            await desk.until_fired(engine, "abandon")
            if engine == "engine_0":
                assert len((await desk.pinned(desk.world.snapshot(40))).engines) == 2
        skip = await desk.skip(desk.world.snapshot(50))
        assert skip.reason == "unhealthy"
        assert "engine_0 is lost" in skip.detail
        assert "engine_1 is lost" in skip.detail


async def test_a_fleet_starts_without_an_engine_that_it_can_do_without() -> None:
    world = World()
    world.lives["engine_1"] = [Life(dies_at_once=True)]
    async with open_desk(world, min_engines=1) as desk:
        assert desk.states("engine_1")[-1] == "lost"
        assert len((await desk.pinned(world.snapshot(40))).engines) == 1


async def test_a_fleet_with_too_few_engines_does_not_start() -> None:
    world = World()
    for engine in ("engine_1", "engine_2"):
        world.lives[engine] = [Life(dies_at_once=True)]
    async with open_desk(world, num_engines=3, min_engines=2, ready=False) as desk:
        with pytest.raises(FleetStartError, match=r"engine_[12] did not start"):
            await desk.fleet.wait_ready()
