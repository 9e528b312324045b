"""Captures that obey the test, and a store with a record of all that happened to its snapshots."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from vime.eval.snapshot.store import SnapshotStore
from vime.fsm.record import Record
from vime.fsm.trace import Trace


@dataclass
class CopiedCapture:
    """Writes a copy of a checkpoint; stands for a model's capture, which test_export proves.

    Attributes:
        source: the checkpoint.
        fault: called after the first file; raises what the write is to raise.
        gated: the write waits, after the first file, until ``resume`` is set.
        num_released: how often it was released.
    """

    source: Path
    fault: Callable[[Path], None] | None = None
    gated: bool = False
    num_released: int = 0
    started: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def write(self, directory: Path) -> None:
        assert not self.num_released, "released before it was written"
        for number, file in enumerate(sorted(self.source.iterdir())):
            shutil.copy(file, directory / file.name)
            if number:
                continue
            self.started.set()
            if self.gated:
                assert self.resume.wait(60)
            if self.fault is not None:
                self.fault(directory)

    def release(self) -> None:
        self.num_released += 1
        self.ended.set()

    async def has_started(self) -> None:
        await _wait(self.started)

    async def has_ended(self) -> None:
        await _wait(self.ended)


async def _wait(event: threading.Event) -> None:
    with anyio.fail_after(60):
        assert await to_thread.run_sync(event.wait, 60, abandon_on_cancel=True)


class Shop:
    """A store on a staging directory of its own, and what it wrote into its trace."""

    def __init__(
        self,
        staging: Path,
        base: Path | None,
        keep: int = 2,
        run_id: str = "run-a",
        verify: str = "full",
    ):
        self.staging = staging
        self.run_id = run_id
        self.records: list[Record] = []
        trace = Trace(None, run_id)
        trace.subscribe(self.records.append)
        self.store = SnapshotStore(
            staging, run_id=run_id, trace=trace, base=base, keep=keep, verify=verify
        )

    def life(self, machine_id: str, attempt: int = 0) -> list[str]:
        """The triggers of one snapshot's life."""
        return [r.trigger for r in self.records if (r.id, r.attempt) == (machine_id, attempt)]

    def last(self, machine_id: str) -> Record:
        return [r for r in self.records if r.id == machine_id][-1]

    def visible(self) -> list[str]:
        """What is in the staging directory, but for the run's own hidden things."""
        return sorted(p.name for p in self.staging.iterdir() if not p.name.startswith(".vime"))

    def drafts(self) -> list[str]:
        """What is in the run's hidden room, but for its marker."""
        room = self.staging / f".vime-{self.run_id}"
        return sorted(p.name for p in room.iterdir() if p.name != "owner.json")

    async def settle(self) -> None:
        """Wait until everything that is to be removed is gone."""
        janitor = self.store._janitor
        assert janitor is not None
        assert await to_thread.run_sync(janitor.settle, 60)
