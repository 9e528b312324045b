"""What the Ray tests run in other processes: an actor that can be watched dying, and a driver."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import IO, Any

import anyio

from vime.eval.actor import Actor
from vime.ray.actors import RayActor


class Watched(Actor):
    """Holds a FIFO open for writing, so that whoever reads it sees this process end."""

    def __init__(self) -> None:
        self._held: IO[str] | None = None

    async def handle(self, message: tuple[str, Any]) -> Any:
        verb, value = message
        if verb == "hold":
            self.hold(Path(value))
            return os.getpid()
        if verb == "hold_and_stay":
            self.hold(Path(value))
            await asyncio.Event().wait()
        return os.environ.get(value)

    def hold(self, fifo: Path) -> None:
        self._held = fifo.open("w")
        self._held.write("x")
        self._held.flush()


async def drive(log: str, fifo: str) -> None:
    """Own an actor, and wait for a reply that never comes."""
    ref = RayActor("tests.ray.programs:Watched", name="watched", log_path=Path(log))
    await ref.ask(("hold_and_stay", fifo))


if __name__ == "__main__":
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False)
    anyio.run(drive, *sys.argv[2:])
