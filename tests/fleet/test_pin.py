"""A pin: its proof, its turns, and what it says when an engine cannot prove its weights."""

from __future__ import annotations

import re
from dataclasses import replace

import anyio
import httpx
import pytest

from tests.fleet.desk import open_desk
from tests.fleet.world import FakeServer, Fault, Gate, Life, World, answers, fails, hang, takes
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_blocks_the_loop")]


async def test_a_pin_proves_every_engine_and_then_lets_the_router_ask_them() -> None:
    async with open_desk() as desk:
        snapshot = desk.world.snapshot(40)
        assert desk.world.now("router").workers == []
        async with desk.fleet.pin(snapshot) as proof:
            assert proof.weight_version == snapshot.weight_version
            assert [e.engine for e in proof.engines] == ["engine_0", "engine_1"]
            assert {e.weight_version for e in proof.engines} == {snapshot.weight_version}
            assert proof.engines[0].evidence["digest"] == snapshot.digest
            assert proof.base_url == desk.world.now("router").url
            assert proof.cause_seq == max(r.seq for r in desk.records if r.trigger == "serve")
            assert len(desk.world.now("router").workers) == 2
            assert await desk.versions(proof) == {snapshot.weight_version}
        assert desk.states("engine_0") == ["starting", "ready", "pinning", "serving"]


async def test_every_record_of_an_engine_says_its_weights_and_what_made_it_happen() -> None:
    async with open_desk(num_engines=1) as desk:
        snapshot = desk.world.snapshot(40)
        async with desk.fleet.pin(snapshot):
            start, ready, pin, serve = desk.records
        version = snapshot.weight_version
        assert [r.weight_version for r in desk.records] == [None, "default", version, version]
        assert [r.cause_seq for r in desk.records] == [None, start.seq, ready.seq, pin.seq]
        assert serve.detail is not None
        assert serve.detail["digest"] == snapshot.digest


async def test_the_engines_name_the_record_that_asked_for_the_pin_as_its_cause() -> None:
    async with open_desk() as desk:
        asked = desk.records[0].seq  # stands for the point's record
        async with desk.fleet.pin(desk.world.snapshot(40), asked):
            pins = [r for r in desk.records if r.trigger == "pin"]
            assert [r.cause_seq for r in pins] == [asked, asked]
            desk.world.now("engine_1").kill()
            again = await desk.until_fired("engine_1", "pin", 2)
            assert again.cause_seq == asked, "it rejoins for the same point"


async def test_a_pin_that_fails_names_the_doubt_that_decided_it() -> None:
    world = World()
    world.lives["engine_1"] = [Life(report={"digest": "f" * 64})]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        suspect = await desk.until_fired("engine_1", "suspect")
        assert (skip.reason, skip.cause_seq) == ("pin_violation", suspect.seq)


async def test_a_pin_without_a_whole_fleet_names_what_became_of_the_missing_engine() -> None:
    async with open_desk(max_restarts=0) as desk:
        desk.world.now("engine_0").kill()
        lost = await desk.until_fired("engine_0", "abandon")
        skip = await desk.skip(desk.world.snapshot(40))
        assert (skip.reason, skip.cause_seq) == ("unhealthy", lost.seq)


@pytest.mark.parametrize(("reason", "explained"), [("unhealthy", True), ("my_own", False)])
async def test_an_evaluation_without_answers_is_told_which_engine_was_lost(
    reason: str, explained: bool
) -> None:
    skip = EvalSkip(reason)
    async with open_desk() as desk:

        async def evaluate() -> None:
            async with desk.fleet.pin(desk.world.snapshot(40)):
                desk.world.now("engine_0").kill()
                await desk.until_fired("engine_0", "suspect")
                raise skip

        with pytest.raises(EvalSkip):
            await evaluate()
        suspect = await desk.until_fired("engine_0", "suspect")
        assert skip.cause_seq == (suspect.seq if explained else None)


async def test_the_next_pin_loads_every_engine_anew() -> None:
    async with open_desk() as desk:
        for number in (40, 50, 40):
            snapshot = desk.world.snapshot(number)
            async with desk.fleet.pin(snapshot) as proof:
                assert await desk.versions(proof) == {snapshot.weight_version}
        assert len(desk.world.loads) == 6


async def test_pins_get_the_fleet_in_the_order_in_which_they_asked_for_it() -> None:
    async with open_desk() as desk:
        order: list[int] = []

        async def pin(number: int) -> None:
            async with desk.fleet.pin(desk.world.snapshot(number)) as proof:
                order.append(number)
                await anyio.sleep(0.001)
                assert await desk.versions(proof) == {proof.weight_version}

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(pin, number)
                await anyio.wait_all_tasks_blocked()
        assert order == [0, 1, 2, 3, 4]


async def test_a_pin_that_is_given_up_while_it_waits_for_its_turn_leaves_the_others_theirs() -> (
    None
):
    async with open_desk() as desk:
        async with desk.fleet.pin(desk.world.snapshot(1)), anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pinned, desk.world.snapshot(2))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await desk.pinned(desk.world.snapshot(3))
        assert [directory for _, directory in desk.world.loads] == [
            *["/staging/step_1"] * 2,
            *["/staging/step_3"] * 2,
        ]


async def pause_unanswered(server: FakeServer) -> None:
    server.paused = True
    await anyio.sleep_forever()


VERSION = "run:40:000000000028"

LIES: dict[str, tuple[Life, str]] = {
    "reads back an old version": (
        Life(faults={"/weight_info": answers({"weight_version": "default"})}),
        f"its weight version is default, expected {VERSION}",
    ),
    "read other bytes": (
        Life(report={"digest": "f" * 64}),
        f"with the digest {'f' * 64}, expected {40:064x} of {VERSION}",
    ),
    "kept old weights": (
        Life(report={"unloaded": ["model.layers.1.mlp.down_proj.weight"]}),
        "kept old weights in 1 parameters: model.layers.1.mlp.down_proj.weight",
    ),
    "has a rank too many": (Life(ranks=2), "2 ranks have loaded, expected 1"),
    "could not load": (
        Life(faults={"/collective_rpc": fails(500, "shape mismatch")}),
        "/collective_rpc answered 500: shape mismatch",
    ),
    "answers nonsense": (
        Life(faults={"/collective_rpc": answers({"results": [{"digest": 1}]})}),
        "vime_load: no account of it",
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_engine_without_proof_skips_the_point_by_its_name_and_is_replaced(
    lie: str,
) -> None:
    world = World()
    life, words = LIES[lie]
    world.lives["engine_1"] = [life]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert skip.detail.startswith("engine_1: ")
        assert words in skip.detail
        assert desk.states("engine_0")[-1] == "serving"
        proof = await desk.pinned(world.snapshot(50))
        assert len(proof.engines) == 2
        assert desk.states("engine_1")[2:] == [
            "pinning", "suspect", "dead", "restarting", "starting", "ready", "pinning", "serving",
        ]  # fmt: skip


async def test_a_token_of_other_weights_than_were_loaded_is_a_violation() -> None:
    world = World()
    seen = 0

    async def later_other_weights(server: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:  # the first token is that of the start
            world.now("engine_0").life.labels = "somebody-else:1:0123456789ab"

    world.lives["engine_0"] = [Life(faults={"/inference/v1/generate": later_other_weights})]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "a token came from somebody-else:1:0123456789ab, expected run:40:" in skip.detail


async def test_weights_that_generate_no_numbers_are_unhealthy_and_name_their_tensors() -> None:
    async with open_desk() as desk:
        skip = await desk.skip(desk.world.snapshot(40, nan=True))
        assert skip.reason == "unhealthy"
        assert re.search(r"engine_0: the probability of the token \d+ is no number", skip.detail)
        assert "NaN in 1 tensors of the snapshot: model.norm.weight" in skip.detail
        await desk.pinned(desk.world.snapshot(50))


async def test_a_nan_that_the_probe_did_not_touch_is_unhealthy_too() -> None:
    world = World()
    report = {"with_nan": ["model.layers.7.mlp.experts.90.up_proj.weight"]}
    world.lives["engine_0"] = [Life(report=report)]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert "the tokens are numbers; NaN in 1 tensors" in skip.detail


async def test_a_nan_that_was_seen_when_the_snapshot_was_digested_costs_no_engine() -> None:
    async with open_desk() as desk:
        skip = await desk.skip(replace(desk.world.snapshot(40, nan=True), with_nan=("a", "b")))
        assert skip.reason == "unhealthy"
        assert skip.detail == "NaN in 2 tensors of the snapshot: a, b; no engine was given it"
        assert desk.world.loads == []
        assert desk.states("engine_0") == desk.states("engine_1") == ["starting", "ready"]


async def test_nans_are_looked_for_by_the_engines_only_where_nobody_did_before() -> None:
    async with open_desk() as desk:
        await desk.pinned(replace(desk.world.snapshot(50), with_nan=()))
        await desk.pinned(desk.world.snapshot(60))
        assert [looked for _, looked in desk.world.looks] == [False] * 2 + [True] * 2


async def test_bad_snapshots_never_use_up_the_restarts_of_an_engine() -> None:
    async with open_desk(max_restarts=1) as desk:
        for number in range(4):
            skip = await desk.skip(desk.world.snapshot(number, nan=True))
            assert skip.reason == "unhealthy"
        await desk.pinned(desk.world.snapshot(9))


async def test_the_gravest_of_several_reasons_is_reported_with_all_of_them_in_words() -> None:
    world = World()
    world.lives["engine_0"] = [Life(report={"with_nan": ["a"]})]
    world.lives["engine_1"] = [Life(report={"digest": "f" * 64})]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "engine_0: " in skip.detail
        assert "engine_1: " in skip.detail


@pytest.mark.parametrize("path", ["/collective_rpc", "/resume", "/inference/v1/generate"])
async def test_an_engine_that_does_not_answer_ends_the_pin_at_its_deadline(path: str) -> None:
    world = World()
    first = True

    async def hang_later(server: object) -> None:
        nonlocal first
        if path == "/inference/v1/generate" and first:
            first = False  # the token of the start
            return
        await anyio.sleep_forever()

    fault: Fault = hang_later  # type: ignore[assignment]
    world.lives["engine_0"] = [Life(faults={path: fault})]
    async with open_desk(world, pin_timeout_s=0.5) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "timeout_pin"
        assert re.match(r"engine_0: it took longer than 0\.\d+ s to pin run:40:", skip.detail)
        assert (await desk.until_fired("engine_0", "suspect")).reason == "overdue"
        await desk.until_fired("engine_0", "ready", 2)
        await desk.pinned(world.snapshot(50))


async def test_a_control_call_has_a_shorter_deadline_than_the_pin() -> None:
    world = World()
    world.lives["engine_0"] = [Life(faults={"/update_weight_version": hang})]
    async with open_desk(world, call_timeout_s=0.02) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "timeout_pin"
        assert "/update_weight_version has not answered after 0.02 s" in skip.detail


async def test_a_fleet_that_does_not_become_whole_is_unhealthy_at_the_deadline() -> None:
    world = World()
    world.lives["engine_1"] = [Life(), Life(start_s=1000)]
    async with open_desk(world, pin_timeout_s=0.05) as desk:
        world.now("engine_1").kill()
        await desk.until_fired("engine_1", "suspect")
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert "not whole after 0.05 s, less 0.0025 s to load: engine_1 is starting" in skip.detail
        assert world.loads == []


@pytest.mark.parametrize("anyio_backend", ["trio"], indirect=True)  # on virtual time alone
@pytest.mark.parametrize("left_s", [0.5, 3.0, 9.5])
async def test_engines_are_not_given_a_load_that_the_deadline_would_interrupt(
    left_s: float,
) -> None:
    """Else a fleet whose engines start slowly would lose them all again, at every point."""
    world = World()
    slow = {"/collective_rpc": takes(10.0)}
    world.lives["engine_0"] = [Life(faults=slow)]
    world.lives["engine_1"] = [Life(faults=slow), Life(start_s=100 - left_s, faults=slow)]
    async with open_desk(world, pin_timeout_s=100) as desk:
        await desk.pinned(world.snapshot(40))
        world.now("engine_1").kill()
        await desk.until_fired("engine_1", "suspect")
        assert (await desk.skip(world.snapshot(50))).reason == "unhealthy"
        assert len((await desk.pinned(world.snapshot(60))).engines) == 2
        deaths = [desk.states(engine).count("dead") for engine in ("engine_0", "engine_1")]
        assert deaths == [0, 1]


async def test_a_pin_waits_for_an_engine_that_had_died_before_and_does_not_skip_for_it() -> None:
    async with open_desk() as desk:
        await desk.pinned(desk.world.snapshot(40))
        desk.world.now("engine_0").kill()  # nobody has seen it yet
        async with desk.fleet.pin(desk.world.snapshot(50)) as proof:
            assert len(proof.engines) == 2
            assert await desk.versions(proof) == {proof.weight_version}
        assert desk.states("engine_0").count("dead") == 1


async def test_an_engine_that_dies_of_a_load_skips_the_point_as_unhealthy() -> None:
    world = World()
    gate = Gate()
    world.lives["engine_0"] = [Life(faults={"/collective_rpc": gate})]
    async with open_desk(world) as desk:
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await gate.entered.wait()
                world.now("engine_0").kill()

            tasks.start_soon(kill)
            skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "unhealthy"
        assert "engine_0: " in skip.detail
        await desk.pinned(world.snapshot(50))


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/is_paused",
        "/collective_rpc",
        "/update_weight_version",
        "/weight_info",
        "/reset_prefix_cache",
        "/resume",
    ],
)
async def test_an_engine_whose_pin_is_given_up_in_any_call_is_replaced_before_it_is_asked_again(
    path: str,
) -> None:
    world = World()
    gate = Gate()
    faults: dict[str, Fault] = {path: gate}
    if path == "/is_paused":  # asked of an engine whose answer to /pause is still to come
        faults["/pause"] = pause_unanswered
    world.lives["engine_0"] = [Life(faults=faults)]
    async with open_desk(world) as desk:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pinned, world.snapshot(40))
            await gate.entered.wait()
            tasks.cancel_scope.cancel()
        assert (await desk.until_fired("engine_0", "suspect")).reason == "cancelled"
        proof = await desk.pinned(world.snapshot(50))
        assert len(proof.engines) == 2
        assert desk.states("engine_0").count("dead") == 1


async def test_a_load_begins_when_the_engine_says_that_it_is_paused_and_waits_for_no_more() -> None:
    world = World()
    gate = Gate()
    world.lives["engine_0"] = [Life(faults={"/pause": pause_unanswered, "/collective_rpc": gate})]
    async with open_desk(world) as desk, anyio.create_task_group() as tasks:
        tasks.start_soon(desk.skip, world.snapshot(40))
        await gate.entered.wait()
        tasks.cancel_scope.cancel()


async def test_of_calls_at_the_same_time_the_one_that_fails_ends_the_others() -> None:
    world = World()
    faults = {"/pause": pause_unanswered, "/collective_rpc": fails(500, "shape mismatch")}
    world.lives["engine_0"] = [Life(faults=faults)]
    async with open_desk(world, pin_timeout_s=1000, call_timeout_s=1000) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "/collective_rpc answered 500: shape mismatch" in skip.detail


async def test_a_cache_that_is_in_use_while_requests_are_aborted_is_cleared_after_them() -> None:
    world = World()
    used = 0

    async def pause_slowly(server: FakeServer) -> None:
        server.paused = True
        await anyio.sleep(0.02)

    async def in_use_at_first(server: FakeServer) -> httpx.Response | None:
        nonlocal used
        used += 1
        return httpx.Response(200, json={"success": False}) if used == 1 else None

    faults: dict[str, Fault] = {"/pause": pause_slowly, "/reset_prefix_cache": in_use_at_first}
    world.lives["engine_0"] = [Life(faults=faults)]
    async with open_desk(world) as desk:
        await desk.pinned(world.snapshot(40))
        assert used == 2
        assert desk.states("engine_0")[-1] == "serving"


async def test_an_engine_whose_cache_cannot_be_cleared_is_replaced_and_the_point_waits() -> None:
    world = World()
    kept = Life(faults={"/reset_prefix_cache": answers({"success": False})})
    world.lives["engine_0"] = [kept]
    async with open_desk(world) as desk:
        await desk.pinned(world.snapshot(40))
        suspected = await desk.until_fired("engine_0", "suspect")
        assert suspected.detail == {
            "error": "it is paused, and its prefix cache is still in use",
        }
        assert [directory for _, directory in world.loads].count("/staging/step_40") == 3


async def test_a_pin_of_a_fleet_that_was_shut_down_says_so_at_once() -> None:
    async with open_desk() as desk:
        pass
    skip = await desk.skip(desk.world.snapshot(40))
    assert skip.reason == "unhealthy"
    assert "engine_0 is stopped" in skip.detail
