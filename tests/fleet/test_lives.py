"""The lives of engines and router: starts, deaths, restarts, and the way back behind the router."""

from __future__ import annotations

import re

import anyio
import httpx
import pytest

from tests.fleet.desk import open_desk
from tests.fleet.world import FakeServer, Gate, Life, World, die, fails, hang, takes
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.supervisor import FleetStartError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_blocks_the_loop")]

BACK = ["dead", "restarting", "starting", "ready"]


async def test_an_engine_that_dies_leaves_the_router_is_ended_and_comes_back() -> None:
    async with open_desk() as desk:
        await desk.pinned(desk.world.snapshot(40))
        dead = desk.world.now("engine_0")
        dead.kill(status=-9)
        suspect = await desk.until_fired("engine_0", "suspect")
        assert suspect.reason == "gone"
        assert suspect.detail == {
            "error": "its process ended with status -9; see /run/logs/engine_0.log"
        }
        await desk.until_fired("engine_0", "ready", 2)
        assert dead.url not in desk.world.now("router").workers
        assert desk.states("engine_0")[4:] == ["suspect", *BACK]
        assert [r.attempt for r in desk.records if r.id == "engine_0"] == [0] * 6 + [1] * 3
        assert desk.states("engine_1")[-1] == "serving"


async def test_an_engine_that_comes_back_during_a_pin_loads_the_pinned_weights_before_it_joins() -> (
    None
):
    async with open_desk() as desk:
        async with desk.fleet.pin(desk.world.snapshot(40)) as proof:
            desk.world.now("engine_0").kill()
            await desk.until_fired("engine_0", "suspect")
            await desk.until(lambda: len(desk.world.now("router").workers) == 1)
            assert await desk.versions(proof) == {proof.weight_version}
            await desk.until_fired("engine_0", "serve", 2)
            await desk.until(lambda: not desk.fleet._hold.rejoining)  # type: ignore[union-attr]
            assert len(desk.world.now("router").workers) == 2
            assert await desk.versions(proof) == {proof.weight_version}
        assert desk.world.now("engine_0").num_tokens >= 2


async def test_the_only_engine_of_a_fleet_comes_back_into_the_pin_that_it_left() -> None:
    world = World()
    snapshot = world.snapshot(40)
    async with open_desk(world, num_engines=1) as desk, desk.fleet.pin(snapshot) as proof:
        world.now("engine_0").kill()
        await desk.until_fired("engine_0", "serve", 2)
        await desk.until(lambda: len(world.now("router").workers) == 1)
        assert await desk.versions(proof) == {proof.weight_version}


async def test_a_pin_ends_only_after_an_engine_that_came_back_has_read_the_snapshot() -> None:
    world = World()
    gate = Gate()
    world.lives["engine_0"] = [Life(), Life(faults={"/collective_rpc": gate})]
    ended = anyio.Event()
    leave = anyio.Event()

    async with open_desk(world) as desk:

        async def hold() -> None:
            async with desk.fleet.pin(world.snapshot(40)):
                world.now("engine_0").kill()
                await leave.wait()
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await gate.entered.wait()
            leave.set()
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            gate.release.set()
            await ended.wait()


async def test_an_engine_that_comes_back_after_the_pin_waits_for_the_next_one() -> None:
    world = World()
    world.lives["engine_0"] = [Life(), Life(start_s=0.3)]
    async with open_desk(world) as desk:
        async with desk.fleet.pin(world.snapshot(40)):
            world.now("engine_0").kill()
            await desk.until_fired("engine_0", "start", 2)
        await desk.until_fired("engine_0", "ready", 2)
        await anyio.wait_all_tasks_blocked()
        assert desk.states("engine_0")[-1] == "ready"
        assert len(world.now("router").workers) == 1


async def test_the_end_of_a_pin_waits_a_while_for_an_engine_that_comes_back_to_it_and_no_longer() -> (
    None
):
    world = World()
    world.lives["engine_1"] = [Life(), Life(faults={"/collective_rpc": hang})]
    async with open_desk(world, pin_timeout_s=1000) as desk:
        async with desk.fleet.pin(world.snapshot(40)):
            world.now("engine_1").kill()
            await desk.until_fired("engine_1", "pin", 2)
            began = anyio.current_time()
        assert 20 <= anyio.current_time() - began < 21
        suspect = [r for r in desk.records if (r.id, r.trigger) == ("engine_1", "suspect")][-1]
        assert suspect.reason == "cancelled"
        proof = await desk.pinned(world.snapshot(50))
        assert len(proof.engines) == 2


async def test_a_rejoin_that_comes_when_the_pin_has_ended_loads_nothing() -> None:
    async with open_desk() as desk:
        async with desk.fleet.pin(desk.world.snapshot(40)):
            hold = desk.fleet._hold
            assert hold is not None
        loads = len(desk.world.loads)
        await desk.fleet._rejoin(desk.fleet._engines[0], hold)
        assert len(desk.world.loads) == loads


async def test_an_engine_that_is_down_cannot_be_pinned() -> None:
    async with open_desk(backoff_s=1e5, max_backoff_s=1e5) as desk:
        desk.world.now("engine_0").kill()
        await desk.until_fired("engine_0", "restart")
        with pytest.raises(EngineFailure, match="it is restarting: its process ended") as error:
            await desk.fleet._engines[0].pin(desk.world.snapshot(40), 60)
        assert error.value.kind == "absent"
        assert desk.states("engine_0")[-1] == "restarting"


async def test_an_engine_is_killed_only_after_it_has_left_the_router() -> None:
    world = World()
    async with open_desk(world) as desk:
        listed: list[bool] = []
        victim = world.now("engine_0")
        kill = victim.kill

        def note(status: int = -9) -> None:
            listed.append(victim.url in world.now("router").workers)
            kill(status)

        victim.kill = note  # type: ignore[method-assign]
        await desk.pinned(world.snapshot(40))
        assert victim.url in world.now("router").workers
        await desk.skip(world.snapshot(41, nan=True))
        await desk.until_fired("engine_0", "kill")
        assert listed[0] is False


async def test_the_waits_between_restarts_double_up_to_a_limit() -> None:
    world = World()
    world.lives["engine_0"] = [Life(), *[Life(dies_at_once=True)] * 4]
    changes = {"max_restarts": 6, "backoff_s": 0.01, "max_backoff_s": 0.04}
    async with open_desk(world, num_engines=1, **changes) as desk:
        world.now("engine_0").kill()
        await desk.until_fired("engine_0", "ready", 2)
        waits = [r.detail["backoff_seconds"] for r in desk.records if r.trigger == "restart"]  # type: ignore[index]
        assert waits == [0.01, 0.02, 0.04, 0.04, 0.04]
        times = dict(zip(map(id, desk.records), desk.times, strict=True))
        starts = [r for r in desk.records if r.trigger == "start"][1:]
        restarts = [r for r in desk.records if r.trigger == "restart"]
        for wait, restart, start in zip(waits, restarts, starts, strict=True):
            assert times[id(start)] - times[id(restart)] >= wait * 0.99


async def test_an_engine_that_dies_more_often_than_allowed_stays_down_and_the_pins_say_so() -> None:
    world = World()
    world.lives["engine_0"] = [Life(), *[Life(dies_at_once=True)] * 9]
    async with open_desk(world, max_restarts=2) as desk:
        world.now("engine_0").kill()
        lost = await desk.until_fired("engine_0", "abandon")
        assert (lost.dest, lost.reason, lost.detail) == ("lost", "gone", {"strikes": 3})
        assert desk.states("engine_0").count("starting") == 3
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert skip.detail.startswith("engine_0 is lost: its process ended with status 1")


async def test_a_pin_that_waits_hears_at_once_that_an_engine_stays_down() -> None:
    world = World()
    world.lives["engine_0"] = [Life(), Life(dies_at_once=True)]
    async with open_desk(world, max_restarts=1, backoff_s=0.001) as desk:
        world.now("engine_0").kill()
        await desk.until_fired("engine_0", "suspect")
        assert (await desk.skip(world.snapshot(40))).reason == "unhealthy"


async def test_a_successful_pin_forgives_all_deaths_before_it() -> None:
    async with open_desk(max_restarts=1) as desk:
        for number in range(4):
            desk.world.now("engine_0").kill()
            await desk.until_fired("engine_0", "ready", number + 2)
            await desk.pinned(desk.world.snapshot(number))


@pytest.mark.parametrize(
    ("life", "timeout_s", "words"),
    [
        (Life(dies_at_once=True), 60, r"its process ended with status 1; see /run/logs/engine_1"),
        (Life(start_s=1e6), 0.05, r"it took longer than 0\.05 s to start and answer"),
        (Life(spawn_error=OSError(24, "Too many files")), 60, "not be started.*Too many files"),
        (Life(faults={"/inference/v1/generate": die}), 60, "generate: ReadError|status -9"),
        (Life(faults={"/inference/v1/generate": fails(404, "no model")}), 60, "404: no model"),
        (Life(faults={"/inference/v1/generate": hang}), 0.05, "longer than|has not answered"),
    ],
)
async def test_a_first_start_that_fails_is_not_tried_again_and_shows_the_end_of_the_log(
    life: Life, timeout_s: float, words: str
) -> None:
    world = World()
    world.lives["engine_1"] = [life]
    async with open_desk(world, ready=False, start_timeout_s=timeout_s) as desk:
        with pytest.raises(FleetStartError) as error:
            await desk.fleet.wait_ready()
        first, _, rest = str(error.value).partition("\n")
        assert re.match(rf"engine_1 did not start: .*({words})", first)
        if life.spawn_error is None:
            assert rest == "the last words of engine_1"
        assert desk.states("engine_1").count("starting") == 1
        assert (await desk.skip(world.snapshot(40))).reason == "unhealthy"


async def test_the_engines_start_at_the_same_time() -> None:
    world = World()
    for name in ("engine_0", "engine_1", "engine_2"):
        world.lives[name] = [Life(start_s=0.3)]
    began = anyio.current_time()
    async with open_desk(world, num_engines=3):
        assert anyio.current_time() - began < 0.9


async def test_an_engine_that_hangs_is_replaced() -> None:
    world = World()
    gate = Gate()  # never opened, like a stopped process

    async def hang_after_the_start(server: FakeServer) -> httpx.Response | None:
        return await gate(server) if server.num_tokens else None

    world.lives["engine_0"] = [Life(faults={"/inference/v1/generate": hang_after_the_start})]
    times = {"probe_interval_s": 0.02, "probe_timeout_s": 0.02}
    async with open_desk(world, num_engines=1, **times) as desk:
        suspect = await desk.until_fired("engine_0", "suspect")
        assert suspect.reason == "overdue"
        assert "/inference/v1/generate has not answered after 0.02 s" in str(suspect.detail)
        await desk.until_fired("engine_0", "ready", 2)


async def test_a_busy_engine_whose_tokens_flow_is_left_in_peace() -> None:
    world = World()
    looks = 0
    enough = anyio.Event()

    async def busy_with_others(server: FakeServer) -> httpx.Response | None:
        nonlocal looks
        if not server.num_tokens:
            return None
        looks += 1
        if looks == 3:
            enough.set()
        server.num_tokens += 1  # another request's
        return await hang(server)

    world.lives["engine_0"] = [Life(faults={"/inference/v1/generate": busy_with_others})]
    times = {"probe_interval_s": 0.01, "probe_timeout_s": 0.02}
    async with open_desk(world, num_engines=1, **times) as desk:
        with anyio.fail_after(30):
            await enough.wait()
        assert desk.states("engine_0") == ["starting", "ready"]


async def test_an_engine_that_answers_with_other_weights_than_it_was_left_with_is_replaced() -> (
    None
):
    async with open_desk(num_engines=1, probe_interval_s=0.02) as desk:
        await desk.pinned(desk.world.snapshot(40))
        desk.world.now("engine_0").version = "somebody-else"
        suspect = await desk.until_fired("engine_0", "suspect")
        assert suspect.reason == "stale"
        assert "a token came from somebody-else, expected run:40:" in str(suspect.detail)


async def test_a_pin_does_not_abort_the_probe_that_is_under_way() -> None:
    world = World()
    gate = Gate()

    async def gated_after_the_start(server: FakeServer) -> httpx.Response | None:
        return await gate(server) if server.num_tokens == 1 else None

    world.lives["engine_0"] = [Life(faults={"/inference/v1/generate": gated_after_the_start})]
    async with open_desk(world, num_engines=1, probe_interval_s=0.02) as desk:
        await gate.entered.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pinned, world.snapshot(40))
            await anyio.wait_all_tasks_blocked()
            assert not world.now("engine_0").paused
            gate.release.set()
        assert desk.states("engine_0") == ["starting", "ready", "pinning", "serving"]


async def test_nothing_takes_the_place_of_a_process_that_cannot_be_killed_until_it_can() -> None:
    world = World()
    world.lives["engine_0"] = [Life(unkillable=2)]
    async with open_desk(world) as desk:
        await desk.skip(world.snapshot(40, nan=True))
        await desk.until_fired("engine_0", "kill")
        assert world.lives["engine_0"][0].unkillable == 0
        await desk.pinned(world.snapshot(50))


async def test_a_process_that_cannot_be_killed_at_the_end_is_traced_and_ends_the_run_anyway() -> (
    None
):
    world = World()
    world.lives["engine_0"] = [Life(unkillable=1)]
    async with open_desk(world) as desk:
        pass
    stop = next(r for r in desk.records if (r.id, r.trigger) == ("engine_0", "stop"))
    assert stop.reason == "unkillable"
    assert stop.detail == {"error": "engine_0 lives on"}


async def test_the_router_comes_back_at_its_address_with_the_pinned_engines() -> None:
    async with open_desk() as desk, desk.fleet.pin(desk.world.snapshot(40)) as proof:
        first = desk.world.now("router")
        first.kill()
        await desk.until(lambda: desk.world.now("router") is not first)
        await desk.until(lambda: desk.fleet._router.up)
        with anyio.fail_after(30):
            while len(desk.world.now("router").workers) < 2:
                await anyio.lowlevel.checkpoint()
        assert desk.world.now("router").url == proof.base_url
        assert await desk.versions(proof) == {proof.weight_version}


async def test_a_pin_waits_for_the_router_to_come_back() -> None:
    async with open_desk() as desk:
        desk.world.now("router").kill()
        await desk.until(lambda: not desk.fleet._router.up)
        proof = await desk.pinned(desk.world.snapshot(40))
        assert proof.base_url == desk.world.now("router").url


async def test_a_router_that_cannot_be_kept_up_fails_the_start_and_the_pins() -> None:
    world = World()
    world.lives["router"] = [Life(dies_at_once=True)] * 9
    async with open_desk(world, ready=False, max_restarts=2) as desk:
        with pytest.raises(FleetStartError, match=r"(?s)it ended at once.*last words of router"):
            await desk.fleet.wait_ready()
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert "the router could not be started" in skip.detail
        assert len([s for s in world.servers if s.name == "router"]) == 3


async def test_a_router_that_hangs_skips_the_point_and_is_replaced() -> None:
    world = World()
    world.lives["router"] = [Life(faults={"/inference/v1/generate": fails(503, "all down")})]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert "no token comes through the router" in skip.detail
        proof = await desk.pinned(world.snapshot(50))
        assert await desk.versions(proof) == {proof.weight_version}


async def test_a_foreign_engine_behind_the_router_is_thrown_out_by_the_next_pin() -> None:
    async with open_desk() as desk:
        router = desk.world.now("router")
        router.workers.append("http://127.0.0.1:1")
        async with desk.fleet.pin(desk.world.snapshot(40)):
            assert len(router.workers) == 2
            assert "http://127.0.0.1:1" not in router.workers


async def test_a_router_that_keeps_a_foreign_engine_fails_the_pin() -> None:
    world = World()
    async with open_desk(world) as desk:
        router = world.now("router")
        router.workers.append("http://127.0.0.1:1")
        router.life.faults["/workers/http://127.0.0.1:1"] = fails(200, "{}")
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert "the router asks ['http://127.0.0.1:1', " in skip.detail


@pytest.mark.parametrize("phase", ["starting", "loading", "serving", "backoff", "probing"])
async def test_whatever_it_is_doing_a_fleet_that_is_shut_down_leaves_nothing(phase: str) -> None:
    world = World()
    gate = Gate()
    first = Life(start_s=1e6 if phase == "starting" else 0)
    if phase == "loading":
        first.faults["/collective_rpc"] = gate
    if phase == "probing":
        first.faults["/metrics"] = gate
    world.lives["engine_0"] = [first]
    changes = {"backoff_s": 1e5, "max_backoff_s": 1e5} if phase == "backoff" else {}
    interval = 0.01 if phase == "probing" else 1000.0
    async with (
        open_desk(world, ready=phase != "starting", probe_interval_s=interval, **changes) as desk,
        anyio.create_task_group() as tasks,
    ):
        if phase == "loading":
            tasks.start_soon(desk.pinned, world.snapshot(40))
        if phase == "serving":
            await desk.pinned(world.snapshot(40))
        if phase == "backoff":
            world.now("engine_0").kill()
            await desk.until_fired("engine_0", "restart")
        if phase in ("loading", "probing"):
            await gate.entered.wait()
        tasks.cancel_scope.cancel()
    assert desk.states("engine_0")[-1] == "stopped"
    assert desk.states("engine_1")[-1] == "stopped"


async def test_no_token_of_the_run_is_in_a_command_line_or_in_the_trace() -> None:
    async with open_desk() as desk:
        await desk.pinned(desk.world.snapshot(40))
        await desk.skip(desk.world.snapshot(41, nan=True))
        tokens = desk.fleet.tokens
        for secret in (tokens.api_key, tokens.control):
            assert len(secret) >= 32
            assert secret not in repr(tokens)
            assert secret not in repr(desk.world.argvs)
            assert secret not in repr(desk.records)
        assert tokens.api_key != tokens.control


async def test_slow_servers_are_waited_for() -> None:
    world = World()
    slow = {path: takes(0.005) for path in ("/pause", "/collective_rpc", "/resume", "/workers")}
    world.lives["engine_0"] = [Life(faults=dict(slow))]
    world.lives["router"] = [Life(faults=dict(slow))]
    async with open_desk(world) as desk:
        await desk.pinned(world.snapshot(40))
