"""Deliveries, depots, sender and stores as they are, without Ray between them.

A "node" is a staging directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.snapshot.captures import CopiedCapture, Shop
from vime.eval.contracts import Snapshot
from vime.eval.fleet.servers import Delivery
from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.ray import delivery, depot
from vime.ray.delivery import Deliveries
from vime.ray.depot import STAGING_VARIABLE, Depot, Taken
from vime.ray.host import Facts
from vime.ray.hosting import HostLost

RUN = "run-a"


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
        self.handed_out: list[bytes] = []
        patch.setattr(depot, "_put", self.put)
        patch.setattr(depot, "_give", self.give)
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

    def put(self, data: Any) -> bytes:
        self.handed_out.append(bytes(bytearray(data)))  # never the same object
        return self.handed_out[-1]

    async def give(
        self, target: Depot, name: str, offset: int, source: bytes, hand_on: bool
    ) -> Taken:
        node = next(node for node, hired in self.hired if hired.actor is target)
        if self.of(node).lost:
            return Taken("the node died")
        self.pieces[node] += len(source)
        return await target.write(name, offset, self.spoil(node, source), hand_on)

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
