"""Engines that answer otherwise than their neighbours, or than before, are found out."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.fleet.desk import open_desk
from tests.fleet.world import Life, World
from vime.eval.fleet import agreement
from vime.eval.fleet.agreement import Agreement, outliers
from vime.fsm.canary import Canary, difference

pytestmark = pytest.mark.anyio

A = Canary(((1, 2),), ((-1.0, -2.0),), ((1.0, 1.0),))
B = replace(A, tokens=((3, 4),))
C = replace(A, tokens=((5, 6),))


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([A], []),
        ([A, A, A], []),
        ([A, B, A], [1]),
        ([B, A, A], [0]),
        ([A, B], [0, 1]),
        ([A, A, B, B], [0, 1, 2, 3]),
        ([A, B, C], [0, 1, 2]),
        ([A, A, A, B, C], [3, 4]),
        ([A, A, B, C, C], [0, 1, 2, 3, 4]),
    ],
)
def test_the_majority_is_right_and_without_one_nobody_is(
    answers: list[Canary], wrong: list[int]
) -> None:
    found = outliers({f"engine_{i}": canary for i, canary in enumerate(answers)})
    assert [*found] == [f"engine_{i}" for i in wrong]
    assert all("it answers otherwise than engine_" in told for told in found.values())


def test_engines_that_answer_alike_are_not_compared_each_with_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[Canary, Canary]] = []

    def counted(one: Canary, other: Canary) -> str | None:
        compared.append((one, other))
        return difference(one, other)

    monkeypatch.setattr(agreement, "difference", counted)
    near = [replace(A, logprobs=((-1.0, -2.0 - n / 1e4),)) for n in range(256)]
    assert outliers({f"engine_{n}": A for n in range(255)} | {"engine_255": B}) != {}
    assert outliers({f"engine_{n}": canary for n, canary in enumerate(near)}) == {}
    assert len(compared) < 300


async def test_a_pin_names_the_outlier_of_three_engines_and_replaces_it_alone() -> None:
    world = World()
    world.lives["engine_1"] = [Life(computes="with a stale copy")]
    async with open_desk(world, num_engines=3) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "engine_1: it answers otherwise than engine_0: canary 0" in skip.detail
        suspect = await desk.until_fired("engine_1", "suspect")
        assert (suspect.reason, skip.cause_seq) == ("stale", suspect.seq)
        await desk.until_fired("engine_1", "ready", 2)
        await desk.pinned(world.snapshot(50))
        assert {r.id for r in desk.records if r.trigger == "suspect"} == {"engine_1"}


async def test_a_pin_names_both_of_two_engines() -> None:
    world = World()
    world.lives["engine_1"] = [Life(computes="with a stale copy")]
    async with open_desk(world) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "engine_0: it answers otherwise than engine_1" in skip.detail
        assert "engine_1: it answers otherwise than engine_0" in skip.detail
        await desk.pinned(world.snapshot(50))


async def test_a_pin_finds_an_engine_whose_load_did_nothing() -> None:
    world = World()
    world.lives["engine_1"] = [Life(loads_nothing=True)]
    async with open_desk(world, num_engines=3) as desk:
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "engine_1: it answers otherwise" in skip.detail


async def test_a_pin_finds_an_engine_that_keeps_its_prefix_cache() -> None:
    world = World()
    world.lives["engine_2"] = [Life(keeps_cache=True)]
    async with open_desk(world, num_engines=3) as desk:
        skip = await desk.skip(world.snapshot(40))  # its first token was cached at the start
        assert skip.reason == "pin_violation"
        assert "engine_2: it answers otherwise" in skip.detail


async def test_a_pin_gives_the_digest_of_the_answers_to_the_proof_and_the_trace() -> None:
    async with open_desk() as desk:
        one = await desk.pinned(desk.world.snapshot(40))
        two = await desk.pinned(desk.world.snapshot(50))
        again = await desk.pinned(desk.world.snapshot(40))
    assert one.canary == again.canary != two.canary
    serves = [r.detail or {} for r in desk.records if r.trigger == "serve"]
    told = [detail["canary"]["digest"] for detail in serves]
    assert told == [one.canary] * 2 + [two.canary] * 2 + [one.canary] * 2


async def test_a_pin_says_when_other_weights_are_answered_exactly_alike(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    for engine in ("engine_0", "engine_1"):
        world.lives[engine] = [Life(loads_nothing=True)]
    async with open_desk(world) as desk:
        first = await desk.pinned(world.snapshot(40))
        with caplog.at_level(logging.WARNING, "vime"):
            second = await desk.pinned(world.snapshot(50))
    assert first.unchanged_since is None
    assert second.unchanged_since == first.weight_version
    assert "are answered exactly like run:40:" in caplog.text


async def test_a_pin_refuses_the_same_weights_with_other_answers_and_then_decides_anew() -> None:
    world = World()
    engines = ("engine_0", "engine_1")
    async with open_desk(world) as desk:
        await desk.pinned(world.snapshot(40))
        for engine in engines:
            world.now(engine).life.computes = "otherwise since a driver was replaced"
        skip = await desk.skip(world.snapshot(40))
        assert skip.reason == "pin_violation"
        assert "the same weights answered otherwise as run:40:" in skip.detail
        for engine in engines:
            await desk.until_fired(engine, "ready", 2)
        await desk.pinned(world.snapshot(40))


async def test_a_pin_keeps_an_engine_that_came_back_and_answers_otherwise_out_of_the_router() -> (
    None
):
    world = World()
    world.lives["engine_1"] = [Life(), Life(computes="otherwise")]
    async with open_desk(world) as desk, desk.fleet.pin(world.snapshot(40)) as proof:
        world.now("engine_1").kill()
        suspect = await desk.until_fired("engine_1", "suspect", 2)
        assert suspect.reason == "stale"
        assert "otherwise than the engines that were pinned before it" in str(suspect.detail)
        await desk.until_fired("engine_1", "serve", 3)
        assert await desk.versions(proof) == {proof.weight_version}


def test_what_was_heard_long_ago_is_forgotten() -> None:
    agreement, world = Agreement(), World()
    for number in range(100):
        agreement.judge(world.snapshot(number), {"engine_0": A})
    assert len(agreement._heard) == 64
    assert not agreement.judge(world.snapshot(0), {"engine_0": B}).wrong
