"""The policy `latest` on the real snapshot store: what a replaced point leaves on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from tests.snapshot.captures import CopiedCapture, Shop
from vime.eval.actor import ActorRef, LocalActor
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalOutput, EvalPoint, Outcome, PinProof, Snapshot
from vime.eval.dispatch.actor import DispatchActor
from vime.eval.dispatch.messages import Admit, Admitted, Drain, Launch
from vime.fsm.record import Record
from vime.fsm.trace import Trace

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class HeldEvaluator:
    """Scores whatever is still on disk, once it is let go."""

    started: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event = field(default_factory=anyio.Event)

    async def evaluate(
        self, point: EvalPoint, snapshot: Snapshot, proof: PinProof | None
    ) -> EvalOutput:
        self.started.set()
        await self.release.wait()
        assert (snapshot.path / "model.safetensors").is_file()
        return EvalOutput({"eval/step_of_weights": float(snapshot.rollout_id)})


@dataclass
class Run:
    ref: ActorRef
    shop: Shop
    source: Path
    evaluator: HeldEvaluator
    outcomes: list[Outcome]
    captures: list[CopiedCapture] = field(default_factory=list)
    changed: anyio.Event = field(default_factory=anyio.Event)

    async def dispatch(self, step: int, gated: bool = False) -> CopiedCapture:
        admitted: Admitted = await self.ref.ask(Admit(EvalPoint(step)))
        capture = CopiedCapture(self.source, gated=gated)
        self.captures.append(capture)
        await self.ref.tell(Launch(admitted, capture, 0.0))
        return capture

    async def is_waiting(self, step: int) -> None:
        """Its snapshot is written and verified, and lent to it while it waits for its turn."""
        with anyio.fail_after(60):
            while "lease" not in self.shop.life(f"step_{step}"):
                self.changed = anyio.Event()
                await self.changed.wait()

    def on_record(self, record: Record) -> None:
        self.changed.set()

    @property
    def reasons(self) -> dict[int, str | None]:
        return {outcome.rollout_id: outcome.reason for outcome in self.outcomes}


@asynccontextmanager
async def running(tmp_path: Path, checkpoints: Path, keep: int) -> AsyncIterator[Run]:
    shop = Shop(tmp_path / "staging", checkpoints / "base", keep=keep)
    shop.store.open()
    outcomes: list[Outcome] = []
    evaluator = HeldEvaluator()
    config = EvalConfig(uses_snapshots=True, overflow_policy="latest", max_in_flight=2)
    async with anyio.create_task_group() as points:
        actor = DispatchActor(
            config,
            points,
            Trace(None, shop.run_id),
            store=shop.store,
            fleet=None,
            evaluator=evaluator,
            report=outcomes.append,
        )
        async with LocalActor(actor, name="dispatcher") as ref:
            run = Run(ref, shop, checkpoints / "whole", evaluator, outcomes)
            shop.store._trace.subscribe(run.on_record)
            yield run
        points.cancel_scope.cancel()
    shop.store.close()


async def test_a_point_replaced_after_its_export_leaves_its_snapshot_to_the_stores_limit(
    tmp_path: Path, checkpoints: Path
) -> None:
    async with running(tmp_path, checkpoints, keep=1) as run:
        await run.dispatch(1)
        await run.evaluator.started.wait()
        for step in (2, 3, 4):
            await run.dispatch(step)
            await run.is_waiting(step)
        assert run.reasons == {2: "superseded", 3: "superseded"}
        assert "step_1" in run.shop.visible(), "it is being read"
        run.evaluator.release.set()
        await run.ref.ask(Drain(60.0))
        assert run.reasons == {1: None, 2: "superseded", 3: "superseded", 4: None}
        await run.shop.settle()
        assert run.shop.visible() == ["step_4"]
        assert all(capture.num_released == 1 for capture in run.captures)


async def test_a_point_replaced_in_the_middle_of_its_export_leaves_nothing(
    tmp_path: Path, checkpoints: Path
) -> None:
    async with running(tmp_path, checkpoints, keep=5) as run:
        await run.dispatch(1)
        await run.evaluator.started.wait()
        writing = await run.dispatch(2, gated=True)
        await writing.has_started()
        await run.dispatch(3)  # returns although the writer of step 2 is still held
        assert run.reasons == {2: "superseded"}
        writing.resume.set()
        await writing.has_ended()
        run.evaluator.release.set()
        await run.ref.ask(Drain(60.0))
        await run.shop.settle()
        assert run.shop.visible() == ["step_1", "step_3"]
        assert run.shop.drafts() == []
        assert all(capture.num_released == 1 for capture in run.captures)
