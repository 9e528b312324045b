"""The layout of a placement group: every combination of flags, computed, never tried out."""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.eval import ConfigError
from vime.ray.placement import REGIONS, PlacementLayout, eval_layout, placement_layout

sizes = st.integers(0, 12)


@st.composite
def flags(draw: st.DrawFn) -> dict[str, Any]:
    """Any flags that give a layout; some of them missing."""
    chosen: dict[str, Any] = {
        name: draw(st.booleans()) for name in ("use_critic", "colocate", "rollout_external")
    }
    chosen |= draw(st.sampled_from([{}, {"debug_train_only": True}, {"debug_rollout_only": True}]))
    for name in ("actor", "critic"):
        for part in ("num_nodes", "num_gpus_per_node"):
            if draw(st.booleans()):
                chosen[f"{name}_{part}"] = draw(sizes)
    if not chosen["colocate"] or draw(st.booleans()):
        chosen["rollout_num_gpus"] = draw(sizes)
    return chosen


def layout(**flags: Any) -> PlacementLayout:
    return placement_layout(Namespace(**flags))


def spans(found: PlacementLayout) -> dict[str, tuple[int, int]]:
    """The regions that have a bundle: first and one past the last."""
    return {name: (r.start, r.stop) for name, r in found.regions.items() if r}


@given(flags(), sizes)
def test_the_fleet_is_the_last_bundles_and_shifts_no_other_offset(
    chosen: dict[str, Any], num: int
) -> None:
    without, with_fleet = layout(**chosen), layout(**chosen, eval_num_gpus=num)
    for name in ("actor", "critic", "rollout"):
        mine, theirs = with_fleet.regions[name], without.regions[name]
        assert (mine.start, mine.stop) == (theirs.start, theirs.stop)
    assert with_fleet.num_bundles == without.num_bundles + num
    fleet = with_fleet.regions["eval"]
    assert (fleet.start, fleet.stop) == (without.num_bundles, with_fleet.num_bundles)


@given(flags(), sizes)
def test_every_bundle_has_an_owner_and_only_colocation_gives_one_two(
    chosen: dict[str, Any], num: int
) -> None:
    found = layout(**chosen, eval_num_gpus=num)
    assert tuple(found.regions) == REGIONS
    owned = [bundle for region in found.regions.values() for bundle in region]
    assert set(owned) == set(range(found.num_bundles))
    if not chosen["colocate"]:
        assert len(owned) == found.num_bundles
    trainers = [*found.regions["actor"], *found.regions["critic"], *found.regions["eval"]]
    assert len(set(trainers)) == len(trainers)
    assert not set(found.regions["rollout"]) & set(found.regions["eval"])


@given(flags(), sizes)
def test_each_role_has_as_many_bundles_as_its_flags_say(chosen: dict[str, Any], num: int) -> None:
    found = layout(**chosen, eval_num_gpus=num)
    actor = chosen.get("actor_num_nodes", 1) * chosen.get("actor_num_gpus_per_node", 8)
    critic = chosen.get("critic_num_nodes", chosen.get("actor_num_nodes", 1)) * chosen.get(
        "critic_num_gpus_per_node", chosen.get("actor_num_gpus_per_node", 8)
    )
    critic *= chosen["use_critic"]
    rollout = chosen.get("rollout_num_gpus", actor + critic)
    trains, rolls = not chosen.get("debug_rollout_only"), not chosen.get("debug_train_only")
    assert {name: len(region) for name, region in found.regions.items()} == {
        "actor": actor * trains,
        "critic": critic * trains,
        "rollout": rollout * (rolls and not chosen["rollout_external"]),
        "eval": num,
    }


BASE = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 3, "rollout_num_gpus": 4}
CRITIC = {"use_critic": True, "critic_num_nodes": 1, "critic_num_gpus_per_node": 2}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"actor": (0, 6), "rollout": (6, 10), "eval": (10, 12)}),
        (CRITIC, {"actor": (0, 6), "critic": (6, 8), "rollout": (8, 12), "eval": (12, 14)}),
        ({"colocate": True}, {"actor": (0, 6), "rollout": (0, 4), "eval": (6, 8)}),
        ({"colocate": True, "rollout_num_gpus": 9}, {"actor": (0, 6), "rollout": (0, 9), "eval": (9, 11)}),
        ({"colocate": True, "rollout_num_gpus": None}, {"actor": (0, 6), "rollout": (0, 6), "eval": (6, 8)}),
        ({"colocate": True, **CRITIC}, {"actor": (0, 6), "critic": (6, 8), "rollout": (0, 4), "eval": (8, 10)}),
        ({"debug_train_only": True}, {"actor": (0, 6), "eval": (6, 8)}),
        ({"debug_train_only": True, **CRITIC}, {"actor": (0, 6), "critic": (6, 8), "eval": (8, 10)}),
        ({"debug_rollout_only": True, **CRITIC}, {"rollout": (0, 4), "eval": (4, 6)}),
        ({"rollout_external": True}, {"actor": (0, 6), "eval": (6, 8)}),
        ({"rollout_external_engine_addrs": ["10.0.0.1:80"]}, {"actor": (0, 6), "eval": (6, 8)}),
        ({"eval_num_gpus": 0}, {"actor": (0, 6), "rollout": (6, 10)}),
        ({"eval_num_gpus": None}, {"actor": (0, 6), "rollout": (6, 10)}),
    ],
)  # fmt: skip
def test_the_layouts_of_the_documentation(
    chosen: dict[str, Any], expected: dict[str, tuple[int, int]]
) -> None:
    assert spans(layout(**{**BASE, "eval_num_gpus": 2, **chosen})) == expected


def test_missing_flags_have_the_defaults_of_the_frameworks() -> None:
    assert spans(layout(rollout_num_gpus=2, use_critic=True)) == {
        "actor": (0, 8), "critic": (8, 16), "rollout": (16, 18)
    }  # fmt: skip


@pytest.mark.parametrize("debug", [{}, {"debug_rollout_only": True}])
def test_rollout_engines_of_their_own_need_a_number(debug: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--rollout-num-gpus is missing"):
        layout(**debug)


def test_the_two_debug_modes_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--debug-train-only together with --debug-rollout-only"):
        layout(rollout_num_gpus=1, debug_train_only=True, debug_rollout_only=True)


def test_every_wrong_number_is_named() -> None:
    wrong = {"actor_num_nodes": -1, "rollout_num_gpus": "4", "eval_num_gpus": True}
    with pytest.raises(ConfigError) as caught:
        layout(**wrong, eval_num_gpus_per_engine=0)
    assert caught.value.problems == [
        "--actor-num-nodes -1: expected a whole number of at least 0",
        "--rollout-num-gpus '4': expected a whole number of at least 0",
        "--eval-num-gpus True: expected a whole number of at least 0",
        "--eval-num-gpus-per-engine 0: expected a whole number of at least 1",
    ]


def test_a_layout_of_any_size_is_a_few_numbers() -> None:
    large = layout(actor_num_nodes=10**6, rollout_num_gpus=10**9, eval_num_gpus=10**9)
    assert large.num_bundles == 8 * 10**6 + 2 * 10**9
    assert all(isinstance(region, range) for region in large.regions.values())


def test_a_layout_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        layout(colocate=True).regions["eval"] = range(1)  # type: ignore[index]


def test_every_combination_of_modes_keeps_the_offsets() -> None:
    """The same as above, exhaustively, on small numbers."""
    switches = ("use_critic", "colocate", "rollout_external", "debug_train_only")
    for values in itertools.product((False, True), repeat=len(switches)):
        for rollout, num in itertools.product(range(1, 5), range(4)):
            chosen = dict(zip(switches, values, strict=True))
            chosen |= {"actor_num_gpus_per_node": 2, "rollout_num_gpus": rollout}
            without, found = layout(**chosen), layout(**chosen, eval_num_gpus=num)
            assert {**spans(found), "eval": None} == {**spans(without), "eval": None}
            assert found.regions["eval"] == range(without.num_bundles, found.num_bundles)


@given(flags(), sizes)
def test_a_fleet_that_outlives_the_driver_is_in_no_group_of_the_drivers(
    chosen: dict[str, Any], num: int
) -> None:
    assert layout(**chosen, eval_num_gpus=num, eval_detached=True) == layout(**chosen)
    assert spans(eval_layout(num)) == ({"eval": (0, num)} if num else {})
