"""Snapshots that travel: what arrives is proven, once a node, leased, and removed in the end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.irregular import IRREGULAR
from tests.irregular import replace as put
from tests.ray.no_ray import World, all_engines, running, verify, world
from tests.snapshots import checkpoints
from vime.eval.fleet.control import EngineFailure
from vime.fsm.read import read_trace
from vime.ray import depot
from vime.ray.depot import Depot, Sender, Taken

__all__ = ["checkpoints", "verify", "world"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as Ray's actors


@pytest.mark.parametrize("verify", ["full", "headers"])
async def test_a_snapshot_travels_once_to_each_node_that_does_not_see_it(
    world: World, checkpoints: Path
) -> None:
    world.engines |= {3: "home"}
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    async with running(world) as deliveries:
        found = await all_engines(deliveries, world, snapshot)
        assert {i: d.snapshot.path.parent.name for i, d in found.items()} == {
            0: "b", 1: "b", 2: "c", 3: "home",
        }  # fmt: skip
        size = sum(p.stat().st_size for p in snapshot.path.iterdir() if p.name != ".complete")
        assert world.pieces == {"b": size, "c": size}
        assert sum(d.num_bytes for d in found.values()) == 2 * size
        assert (found[3].seconds, found[3].num_bytes) == (0.0, 0)
        again = await all_engines(deliveries, world, snapshot)
        assert sum(d.num_bytes for d in again.values()) == 0
    assert world.visible("b") == world.visible("c") == [], "copies go with the run"
    assert snapshot.path.exists()


async def test_a_node_keeps_as_many_as_the_driver_and_says_so_in_a_trace_of_its_own(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "b"}
    async with running(world, keep=1) as deliveries:
        for step in (1, 2, 3):
            snapshot = await world.snapshot(checkpoints / "whole", step)
            with world.shop.store.lease(snapshot):
                await all_engines(deliveries, world, snapshot)
        assert world.of("b").actor._store._store._janitor.settle(60)
        assert world.visible("b") == ["step_3"]
    (path,) = world.run_dir.glob("trace.*")
    assert path.name == "trace.10.0.0.98-bbbbbbbb.jsonl"
    records = list(read_trace(path))
    assert {r.node for r in records} == {"10.0.0.98-bbbbbbbb"}
    assert [r.seq for r in records] == list(range(len(records)))
    life = [r.trigger for r in records if r.id == "step_1"]
    assert life == ["write", "seal", "verify", "lease", "leave", "delete"]


async def test_a_run_that_is_resumed_writes_traces_of_its_own_beside_the_earlier_ones(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "b"}
    for step in (1, 2):
        async with running(world) as deliveries:
            await all_engines(deliveries, world, await world.snapshot(checkpoints / "whole", step))
    names = sorted(path.name for path in world.run_dir.iterdir())
    assert names == ["trace.10.0.0.98-bbbbbbbb.1.jsonl", "trace.10.0.0.98-bbbbbbbb.jsonl"]


async def test_what_changed_on_the_way_is_given_to_no_engine(
    world: World, checkpoints: Path
) -> None:
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    world.spoil = lambda node, piece: piece[:-1] + b"?" if node == "c" else piece
    async with running(world) as deliveries:
        async with deliveries(snapshot, 0) as sound:
            assert sound.num_bytes > 0
        with pytest.raises(EngineFailure) as caught:
            async with deliveries(snapshot, 2):
                pass
        assert caught.value.kind == "undelivered"
        world.spoil = lambda node, piece: piece
        async with deliveries(snapshot, 2) as repaired:
            assert repaired.num_bytes > 0


async def test_the_drivers_node_sends_a_snapshot_once_and_every_node_hands_it_on(
    world: World, checkpoints: Path
) -> None:
    world.roots["d"] = world.root / "d"
    world.engines = {0: "b", 1: "c", 2: "d"}
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    sources: dict[str, set[int]] = {}
    give = world.give

    async def noted(target: Depot, name: str, offset: int, source: Any, hand_on: bool) -> Taken:
        node = next(node for node, hired in world.hired if hired.actor is target)
        sources.setdefault(node, set()).add(id(source))
        return await give(target, name, offset, source, hand_on)

    async with running(world) as deliveries:
        world.patch.setattr(depot, "_give", noted)
        await all_engines(deliveries, world, snapshot)
    assert not set.intersection(*sources.values())
    assert len(world.handed_out) == 3 * len(sources["b"]), "by the driver's node, and by two others"


async def test_a_node_without_room_says_how_much_is_missing(
    world: World, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    monkeypatch.setattr("vime.ray.node_store._MARGIN_BYTES", 1 << 60)
    async with running(world) as deliveries:
        with pytest.raises(EngineFailure, match=r"b: \d+ bytes are free there"):
            async with deliveries(snapshot, 0):
                pass
        assert world.pieces == {}


async def test_a_checkpoint_of_the_users_travels_only_where_it_is_not_visible(
    world: World, checkpoints: Path
) -> None:
    adopted = await world.shop.store.adopt(0, checkpoints / "base")
    with world.shop.store.lease(adopted):
        async with running(world) as deliveries:
            async with deliveries(adopted, 0) as seen:
                assert (seen.snapshot.path, seen.num_bytes) == (adopted.path, 0)

            async def blind(self: Depot, path: Path, print_: str) -> bool:
                return False

            world.patch.setattr(Depot, "sees", blind)
            async with deliveries(adopted, 2) as brought:
                assert brought.snapshot.path == world.root / "c" / "step_0"
                assert brought.num_bytes > 0
                assert replace(brought.snapshot, path=adopted.path) == adopted


async def test_a_staging_directory_that_was_made_again_is_still_seen_by_its_node(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "home"}
    async with running(world) as deliveries:
        shutil.rmtree(world.root / "home")
        snapshot = await world.snapshot(checkpoints / "whole", 1)
        async with deliveries(snapshot, 0) as found:
            assert found.snapshot.path == snapshot.path
            assert found.num_bytes == 0


async def test_a_nodes_own_staging_directory_is_made_again_too(
    world: World, checkpoints: Path
) -> None:
    world.engines = {0: "b"}
    async with running(world) as deliveries:
        async with deliveries(await world.snapshot(checkpoints / "whole", 1), 0):
            pass
        shutil.rmtree(world.root / "b")
        async with deliveries(await world.snapshot(checkpoints / "whole", 2), 0) as found:
            assert found.num_bytes > 0
        assert world.visible("b") == ["step_2"]


async def test_a_checkpoint_with_other_weights_under_the_same_path_is_not_taken_for_it(
    checkpoints: Path,
) -> None:
    prints = {await Sender().fingerprint(checkpoints / name) for name in ("base", "whole", "none")}
    assert len(prints) == 3


@pytest.mark.parametrize("kind", IRREGULAR)
async def test_what_is_no_weight_file_is_neither_taken_for_one_nor_waited_for(
    kind: str, checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints / "whole", tmp_path / "whole")
    put(tmp_path / "whole" / "model.safetensors", kind)
    with anyio.fail_after(60):
        print_ = await Sender().fingerprint(tmp_path / "whole")
    assert print_ != await Sender().fingerprint(checkpoints / "whole")
