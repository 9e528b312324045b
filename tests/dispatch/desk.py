"""Sets a dispatcher's actor up with fakes, and drives it as the synchronous face does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from tests.fakes import FakeCapture, FakeEvaluator, FakeFleet, FakeStore, Plans
from vime.eval.actor import ActorRef, LocalActor
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint, Outcome
from vime.eval.dispatch.actor import DispatchActor
from vime.eval.dispatch.messages import Admit, Admitted, Drain, Launch, Settle
from vime.eval.dispatch.point_life import PointLife
from vime.fsm.trace import Record, Trace
from vime.rollout.checkpoint_eval import EvalSkip


@dataclass
class Desk:
    """A running dispatcher's actor, and all that came out of it."""

    actor: DispatchActor
    ref: ActorRef
    plans: Plans
    store: FakeStore
    fleet: FakeFleet | None
    records: list[Record]
    outcomes: list[Outcome]
    lives: list[PointLife] = field(default_factory=list)
    captures: list[FakeCapture] = field(default_factory=list)

    async def dispatch(
        self, rollout_id: int, *, force: bool = False, hf_dir: Path | None = None
    ) -> PointLife:
        """What ``EvalDispatcher.dispatch`` does, on the loop."""
        began = anyio.current_time()
        admitted: Admitted = await self.ref.ask(Admit(EvalPoint(rollout_id, hf_dir, force)))
        self.lives.append(admitted.life)
        if admitted.life.outcome.done():
            return admitted.life
        if hf_dir is not None:
            await self.ref.tell(Launch(admitted, None, anyio.current_time() - began))
            return admitted.life
        fault = self.plans[rollout_id].capture
        capture = FakeCapture(rollout_id)
        self.captures.append(capture)
        try:
            if fault is not None:
                fault()
        except Exception as error:
            capture.release()
            skip = EvalSkip("export_failed", str(error))
            await self.ref.tell(Settle(admitted, skip, anyio.current_time() - began))
        else:
            await self.ref.tell(Launch(admitted, capture, anyio.current_time() - began))
        return admitted.life

    async def drain(self, timeout_s: float = 1e6) -> list[Outcome]:
        await self.ref.ask(Drain(timeout_s))
        return self.outcomes

    def states(self, rollout_id: int) -> list[str]:
        """The states that a point went through."""
        return [r.dest for r in self.records if r.machine == "point" and r.id == str(rollout_id)]


@asynccontextmanager
async def open_desk(
    config: EvalConfig | None = None, plans: Plans | None = None, *, with_fleet: bool = True
) -> AsyncIterator[Desk]:
    """A desk on the running loop; leaving it cancels what is pending."""
    plans = Plans() if plans is None else plans
    records: list[Record] = []
    outcomes: list[Outcome] = []
    trace = Trace(None, "run", mono_ns=lambda: int(anyio.current_time() * 1e9))
    trace.subscribe(records.append)
    store = FakeStore(plans)
    fleet = FakeFleet(plans) if with_fleet else None
    async with anyio.create_task_group() as points:
        actor = DispatchActor(
            config or EvalConfig(uses_snapshots=True),
            points,
            trace,
            store=store,
            fleet=fleet,
            evaluator=FakeEvaluator(plans, fleet),
            report=outcomes.append,
        )
        async with LocalActor(actor, name="dispatcher") as ref:
            yield Desk(actor, ref, plans, store, fleet, records, outcomes)
        points.cancel_scope.cancel()
