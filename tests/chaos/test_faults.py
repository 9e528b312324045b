"""The schedule of a chaos run: seeded, complete, and spread so that a skip tells its fault."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.chaos.faults import (
    KINDS,
    NEED_ROOM,
    NUM_ENGINES,
    NUM_PROMPTS,
    NUM_SHORT_POINTS,
    as_json,
    draw_schedule,
    draw_short_schedule,
    from_json,
)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_drawn_at_points_of_its_own_with_one_between(seed: int) -> None:
    faults = draw_schedule(seed, 40)
    assert {fault.kind for fault in faults} == set(KINDS)
    points = [fault.point for fault in faults]
    assert points == sorted(set(points))
    assert points[0] > 1
    assert points[-1] < 40
    assert all(after - before >= 2 for before, after in pairwise(points))
    for fault in faults:
        assert fault.moment in KINDS[fault.kind].moments
        assert 0 <= fault.engine < NUM_ENGINES
        assert 1 <= fault.answer < NUM_PROMPTS


def test_a_seed_draws_its_schedule_again_and_another_seed_another() -> None:
    assert draw_schedule(7, 32) == draw_schedule(7, 32)
    assert draw_schedule(7, 32) != draw_schedule(8, 32)
    assert from_json(as_json(draw_schedule(7, 32))) == draw_schedule(7, 32)


def test_too_few_points_for_all_the_kinds_are_refused_with_the_number_that_is_enough() -> None:
    enough = 2 * len(KINDS) + 1
    with pytest.raises(ValueError, match=f"at least {enough} points"):
        draw_schedule(0, enough - 1)
    assert len(draw_schedule(0, enough)) == len(KINDS)


def test_what_needs_a_full_disk_is_left_out_where_there_is_none() -> None:
    assert not {f.kind for f in draw_schedule(3, 40, NEED_ROOM)} & NEED_ROOM


def test_only_the_kinds_that_are_asked_for_are_drawn() -> None:
    some = ["kill_core", "rotten"]
    assert sorted(f.kind for f in draw_schedule(1, 5, only=some)) == some
    assert {f.kind for f in draw_schedule(1, 30, only=["kill_core", "foreign"])} == {
        "kill_core", "foreign",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_the_short_form_ends_with_an_engine_that_dies_under_the_last_point(seed: int) -> None:
    bad, runner, engine = draw_short_schedule(seed)
    assert not KINDS[bad.kind].may_finish
    assert runner.kind == "kill_runner"
    assert (engine.point, engine.moment, KINDS[engine.kind].engines) == (
        NUM_SHORT_POINTS, "answer", 1,
    )  # fmt: skip
