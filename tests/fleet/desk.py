"""Sets a supervisor up in a fake world, and looks at what it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from tests.fleet.world import World
from vime.eval.contracts import PinProof, Snapshot
from vime.eval.fleet.servers import Localize, at_home
from vime.eval.fleet.settings import FleetSettings
from vime.eval.fleet.supervisor import FleetSupervisor
from vime.fsm.trace import Record, Trace
from vime.rollout.checkpoint_eval import EvalSkip

# Short where a test on real time waits for it, long where none does.
TIMES: dict[str, float] = {
    "backoff_s": 0.01,
    "max_backoff_s": 0.04,
    "probe_interval_s": 1000.0,
    "end_timeout_s": 0.01,
}


@dataclass
class Desk:
    """A running supervisor and its world."""

    fleet: FleetSupervisor
    world: World
    records: list[Record]
    times: list[float] = field(default_factory=list)

    def states(self, engine: str) -> list[str]:
        return [r.dest for r in self.records if r.id == engine]

    async def pinned(self, snapshot: Snapshot) -> PinProof:
        async with self.fleet.pin(snapshot) as proof:
            return proof

    async def skip(self, snapshot: Snapshot) -> EvalSkip:
        """The reason why a pin does not come to pass."""
        try:
            await self.pinned(snapshot)
        except EvalSkip as skip:
            return skip
        raise AssertionError("it was pinned")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so; looked at after each change of the fleet."""
        with anyio.fail_after(60):
            while not condition():
                await self.fleet._change.wait()

    async def until_fired(self, engine: str, trigger: str, count: int = 1) -> Record:
        def found() -> list[Record]:
            return [r for r in self.records if (r.id, r.trigger) == (engine, trigger)]

        await self.until(lambda: len(found()) >= count)
        return found()[count - 1]

    async def versions(self, proof: PinProof, count: int = 4) -> set[str]:
        """The weight versions of tokens that come through the router."""
        found = set()
        headers = {"Authorization": f"Bearer {proof.api_key}"}
        async with self.world.make_client(proof.base_url) as client:
            for _ in range(count):
                response = await client.post(
                    "/inference/v1/generate", json={"token_ids": [1]}, headers=headers
                )
                assert response.status_code == httpx.codes.OK, response.text
                (span,) = response.json()["choices"][0]["weight_versions"]
                found.add(span["version"])
        return found


@asynccontextmanager
async def open_desk(
    world: World | None = None,
    *,
    num_engines: int = 2,
    ready: bool = True,
    localize: Localize = at_home,
    short: bool = False,
    **changes: Any,
) -> AsyncIterator[Desk]:
    """A supervisor that runs; afterwards nothing of it is left, and nobody wronged a suspect.

    With ``short`` its requests do not pass httpx: see :class:`tests.fleet.world.ShortClient`.
    """
    world = world or World()
    records: list[Record] = []
    desk = Desk(None, world, records)  # type: ignore[arg-type]

    def note(record: Record) -> None:
        records.append(record)
        desk.times.append(anyio.current_time())
        world.listen(record)

    trace = Trace(None, "run")
    trace.subscribe(note)
    settings = FleetSettings(
        num_engines=num_engines,
        base=Path("/base"),
        run_dir=Path("/run"),
        **TIMES | changes,
    )
    desk.fleet = FleetSupervisor(
        settings,
        trace,
        localize=localize,
        spawn=world.spawn,
        make_client=world.make_short_client if short else world.make_client,
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(desk.fleet.run)
        if ready:
            await desk.fleet.wait_ready()
        yield desk
        tasks.cancel_scope.cancel()
    assert world.leftovers() == []
    assert world.wrongs == []
    assert not any(record.rejected for record in records)
