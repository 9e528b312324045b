"""Snapshots that travel: what arrives is proven, once a node, leased, and removed in the end.

Deliveries, depots, sender and stores are the real ones, without Ray between them: a "node" is a
staging directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.snapshot.captures import CopiedCapture, Shop
from tests.snapshots import checkpoints
from vime.eval.contracts import Snapshot
from vime.eval.fleet.control import EngineFailure
from vime.eval.fleet.servers import Delivery
from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.ray import delivery, depot
from vime.ray.delivery import Deliveries
from vime.ray.depot import STAGING_VARIABLE, Depot, Sender
from vime.ray.host import Facts
from vime.ray.hosting import HostLost

__all__ = ["checkpoints"]

pytestmark = pytest.mark.anyio

RUN = "run-a"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as Ray's actors


class Hired:
    """An actor without Ray: a call is a call, and a lost one raises."""

    def __init__(self, actor: Any) -> None:
        self.actor = self.handle = actor
        self.lost = False

    async def call(self, method: str, *args: Any, give_up_s: float | None = None) -> Any:
        await anyio.lowlevel.checkpoint()
        if self.lost:
            raise HostLost("the node died")
        return await getattr(self.actor, method)(*args)

    async def kill(self) -> bool:
        self.lost = True
        return True


class World:
    """The nodes: node → its own staging directory, ``None`` where it sees the driver's."""

    def __init__(self, root: Path, base: Path, patch: pytest.MonkeyPatch, verify: str) -> None:
        self.verify = verify
        self.root = root
        self.patch = patch
        self.roots: dict[str, Path | None] = {"home": None, "b": root / "b", "c": root / "c"}
        self.engines = {0: "b", 1: "b", 2: "c"}
        self.hired: list[tuple[str, Hired]] = []
        self.pieces: Counter[str] = Counter()
        self.spoil: Callable[[str, bytes], bytes] = lambda node, piece: piece
        self.shop = Shop(root / "home", base, run_id=RUN, verify=verify)
        self.run_dir = root / "run"
        self.run_dir.mkdir()
        patch.setattr(depot, "_put", self.put)
        patch.setattr(depot, "CHUNK_BYTES", 100_000)
        patch.setattr(delivery, "_NEWS_S", 0.0)

    async def hire(self, actor_class: type, node_id: str, *args: Any) -> Hired:
        await anyio.lowlevel.checkpoint()
        if node_id not in self.roots:
            raise HostLost("no such node")
        root = self.roots[node_id]
        if root is None:
            self.patch.delenv(STAGING_VARIABLE, raising=False)
        else:
            root.mkdir(exist_ok=True)
            self.patch.setenv(STAGING_VARIABLE, str(root))
        actor = actor_class(*args)
        actor.facts = lambda: Facts(node_id * 8, f"10.0.0.{ord(node_id[0])}", 1)
        self.hired.append((node_id, hired := Hired(actor)))
        return hired

    async def put(
        self,
        path: Path,
        name: str,
        offset: int,
        count: int,
        depots: Mapping[str, Depot],
        problems: dict[str, str],
    ) -> None:
        piece = path.read_bytes()[offset : offset + count]  # noqa: ASYNC240 -- small
        for node, target in depots.items():
            self.pieces[node] += count
            problem = await target.write(name, offset, self.spoil(node, piece))
            if problem is not None:
                problems[node] = problem

    def of(self, node_id: str) -> Hired:
        return [hired for node, hired in self.hired if node == node_id][-1]

    async def snapshot(self, source: Path, step: int) -> Snapshot:
        draft = self.shop.store.begin(step)
        return await self.shop.store.seal(draft, CopiedCapture(source))

    def visible(self, node: str) -> list[str]:
        root = self.roots[node]
        assert root is not None
        return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))

    def trace(self) -> list[Any]:
        return [r for path in sorted(self.run_dir.glob("trace.*")) for r in read_trace(path)]


@pytest.fixture
def verify() -> str:
    return "full"


@pytest.fixture
def world(tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, verify: str) -> Any:
    world = World(tmp_path, checkpoints / "base", monkeypatch, verify)
    world.shop.store.open()
    yield world
    world.shop.store.close()
    assert list(check(world.trace(), ended=True)) == []


@asynccontextmanager
async def running(world: World, keep: int = 2) -> AsyncIterator[Deliveries]:
    deliveries = Deliveries(
        run_id=RUN,
        staging=world.root / "home",
        keep=keep,
        verify=world.verify,
        run_dir=world.run_dir,
        home="home",
        nodes=lambda: world.engines,
        hire=world.hire,
    )
    async with deliveries.running():
        yield deliveries
    assert all(hired.lost for _, hired in world.hired), "every actor was ended"


async def all_engines(
    deliveries: Deliveries, world: World, snapshot: Snapshot
) -> dict[int, Delivery]:
    found = {}

    async def deliver(index: int) -> None:
        async with deliveries(snapshot, index) as found[index]:
            held = {p.name: p.read_bytes() for p in found[index].snapshot.path.iterdir()}
            for path in snapshot.path.iterdir():
                if path.name != ".complete":
                    assert held[path.name] == path.read_bytes()

    async with anyio.create_task_group() as tasks:
        for index in world.engines:
            tasks.start_soon(deliver, index)
    return found


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
    world.spoil = lambda node, piece: piece[:-1] + b"?" if node == "b" else piece
    async with running(world) as deliveries:
        with pytest.raises(EngineFailure) as caught:
            async with deliveries(snapshot, 0):
                pass
        assert caught.value.kind == "undelivered"
        async with deliveries(snapshot, 2) as sound:
            assert sound.num_bytes == 0, "it came along with the other one"
        world.spoil = lambda node, piece: piece
        async with deliveries(snapshot, 0) as repaired:
            assert repaired.num_bytes > 0


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


async def test_a_delivery_that_is_given_up_leaves_the_node_usable(
    world: World, checkpoints: Path
) -> None:
    snapshot = await world.snapshot(checkpoints / "whole", 1)
    entered = anyio.Event()
    put = world.put

    async def hang(*args: Any) -> None:
        entered.set()
        await anyio.sleep_forever()

    async with running(world) as deliveries:
        world.patch.setattr(depot, "_put", hang)
        async with anyio.create_task_group() as tasks:

            async def deliver() -> None:
                async with deliveries(snapshot, 0):
                    pass

            tasks.start_soon(deliver)
            await entered.wait()
            tasks.cancel_scope.cancel()
        world.patch.setattr(depot, "_put", put)
        async with deliveries(snapshot, 0) as found:
            assert found.num_bytes > 0


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


async def test_a_checkpoint_with_other_weights_under_the_same_path_is_not_taken_for_it(
    checkpoints: Path,
) -> None:
    prints = {await Sender().fingerprint(checkpoints / name) for name in ("base", "whole", "none")}
    assert len(prints) == 3
