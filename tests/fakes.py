"""Collaborators of the dispatcher that obey the test: their durations, gates and faults are given.

Each stands beside a test that runs the real one: the store in ``tests/snapshot``, the fleet in
``tests/fleet``, the evaluator in ``tests/runner``, and all of them together in the demo's test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from vime.eval.contracts import (
    EngineProof,
    EvalOutput,
    EvalPoint,
    PinProof,
    Snapshot,
)

Fault = Callable[[], None]
"""Called in the middle of a stage; raises what the stage is to raise."""


@dataclass
class Stage:
    """How one stage of one point behaves: it takes ``seconds``, then ``fault`` may raise."""

    seconds: float = 0.0
    fault: Fault | None = None
    started: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event | None = None

    async def run(self) -> None:
        self.started.set()
        if self.release is not None:
            await self.release.wait()
        await anyio.sleep(self.seconds)
        if self.fault is not None:
            self.fault()


@dataclass
class Plan:
    """The behaviour of one point's collaborators."""

    capture: Fault | None = None
    write: Stage = field(default_factory=Stage)
    pin: Stage = field(default_factory=Stage)
    run: Stage = field(default_factory=Stage)


class Plans(dict[int, Plan]):
    """rollout id → plan; an instant one where none was given."""

    def __missing__(self, rollout_id: int) -> Plan:
        self[rollout_id] = Plan()
        return self[rollout_id]


@dataclass
class FakeCapture:
    """Weights as a number; counts that it was released exactly once."""

    rollout_id: int
    released: int = 0

    def write(self, directory: Path) -> None:
        raise AssertionError("the fake store writes nothing")

    def release(self) -> None:
        self.released += 1


@dataclass
class FakeDraft:
    rollout_id: int

    @property
    def directory(self) -> Path:
        return Path(f"draft/{self.rollout_id}")


class FakeStore:
    """Snapshots as numbers; what is on disk is counted."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.drafts: set[int] = set()
        self.leases: Counter[int] = Counter()
        self.sealed: set[int] = set()

    def begin(self, rollout_id: int, cause_seq: int | None = None) -> FakeDraft:
        self.drafts.add(rollout_id)
        return FakeDraft(rollout_id)

    async def seal(self, draft: FakeDraft, capture: FakeCapture) -> Snapshot:
        try:
            await self.plans[draft.rollout_id].write.run()
        finally:
            self.drafts.remove(draft.rollout_id)
            capture.release()
        self.sealed.add(draft.rollout_id)
        return self.snapshot(draft.rollout_id, owned=True)

    def discard(self, draft: FakeDraft, reason: str) -> None:
        self.drafts.remove(draft.rollout_id)

    async def adopt(self, rollout_id: int, hf_dir: Path) -> Snapshot:
        await self.plans[rollout_id].write.run()
        return self.snapshot(rollout_id, owned=False)

    @contextmanager
    def lease(self, snapshot: Snapshot) -> Iterator[None]:
        self.leases[snapshot.rollout_id] += 1
        try:
            yield
        finally:
            self.leases[snapshot.rollout_id] -= 1

    def snapshot(self, rollout_id: int, owned: bool) -> Snapshot:
        path = Path(f"staging/step_{rollout_id}")
        return Snapshot(rollout_id, path, f"run:{rollout_id}:0123456789ab", "0" * 64, owned)


class FakeFleet:
    """A fleet that pins by waiting; at most one point holds it."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.turn = anyio.Lock()
        self.serving: str | None = None

    @asynccontextmanager
    async def pin(
        self, snapshot: Snapshot, cause_seq: int | None = None
    ) -> AsyncIterator[PinProof]:
        async with self.turn:
            began = anyio.current_time()
            await self.plans[snapshot.rollout_id].pin.run()
            self.serving = version = snapshot.weight_version
            proof = EngineProof("engine_0", version)
            took = anyio.current_time() - began
            yield PinProof("http://fake", "m", version, (proof,), pin_seconds=took)
            self.serving = None


class FakeEvaluator:
    """Scores a point by its number, and sees to it that the fleet serves the right weights."""

    def __init__(self, plans: Plans, fleet: FakeFleet | None) -> None:
        self.plans = plans
        self.fleet = fleet
        self.running: set[int] = set()

    async def evaluate(
        self, point: EvalPoint, snapshot: Snapshot, proof: PinProof | None
    ) -> EvalOutput:
        assert not self.running, "one evaluation at a time"
        self.running.add(point.rollout_id)
        try:
            await self.plans[point.rollout_id].run.run()
            if self.fleet is not None:
                assert proof is not None
                assert self.fleet.serving == snapshot.weight_version
        finally:
            self.running.remove(point.rollout_id)
        return EvalOutput({"eval/fake": float(point.rollout_id)})


def raiser(error: BaseException) -> Fault:
    """A fault that raises ``error``."""

    def fault() -> None:
        raise error

    return fault


def nothing(_: Any) -> None:
    """Take an outcome and do nothing with it."""
