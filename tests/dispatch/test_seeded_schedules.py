"""The numbered invariants of the dispatcher, over many seeded schedules and faults."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import anyio
import pytest

from tests.dispatch.desk import Desk, open_desk
from tests.fakes import Fault, Plan, Plans, Stage, raiser
from tests.virtual import run_virtual
from vime.eval.config import EvalConfig
from vime.fsm.tables import POINT
from vime.rollout.checkpoint_eval import EvalSkip

SEEDS = range(int(os.environ.get("VIME_SEED", "0")), int(os.environ.get("VIME_SEED", "0")) + 400)


def fault(rng: random.Random) -> Fault | None:
    """Mostly none; else one of the things that collaborators really raise."""
    if rng.random() < 0.8:
        return None
    errors: list[Exception] = [
        EvalSkip("pin_violation", "x"),
        EvalSkip("user_reason"),
        OSError("disk"),
        RuntimeError("bug"),
        TimeoutError("its own"),
    ]
    return raiser(rng.choice(errors))


def stage(rng: random.Random) -> Stage:
    seconds = rng.choice([0, 0, rng.uniform(0, 20), rng.uniform(0, 200), 1e9])
    return Stage(seconds, fault(rng))


def schedule(rng: random.Random) -> tuple[EvalConfig, Plans]:
    config = EvalConfig(
        uses_snapshots=True,
        max_in_flight=rng.randint(1, 4),
        overflow_policy=rng.choice(["backpressure", "skip", "latest"]),
        export_timeout_s=rng.choice([50, 1000]),
        pin_timeout_s=rng.choice([50, 1000]),
        eval_timeout_s=rng.choice([50, 1000]),
        backpressure_timeout_s=rng.choice([10, 1000]),
    )
    plans = Plans(
        {n: Plan(fault(rng), stage(rng), stage(rng), stage(rng)) for n in range(rng.randint(1, 12))}
    )
    return config, plans


async def drive(rng: random.Random, config: EvalConfig, plans: Plans) -> Desk:
    async with open_desk(config, plans, with_fleet=rng.random() < 0.7) as desk:
        for n in plans:
            hf_dir = Path("given") if rng.random() < 0.1 else None
            with anyio.move_on_after(rng.choice([1e9, 1e9, 1e9, 5])):  # Ctrl-C, now and then
                await desk.dispatch(n, force=rng.random() < 0.2, hf_dir=hf_dir)
            await anyio.sleep(rng.choice([0, rng.uniform(0, 30)]))
        if rng.random() < 0.8:  # else the run is closed without draining
            await desk.drain(rng.choice([1e6, 20]))
    return desk


def pending_never_above(desk: Desk, limit: int) -> bool:
    """Invariant 2, read off the trace: points between admission and their end."""
    pending: set[str] = set()
    for record in desk.records:
        if record.dest in ("exporting", "pinning", "running"):
            pending.add(record.id)
        elif record.dest in POINT.terminal:
            pending.discard(record.id)
        if len(pending) > limit:
            return False
    return True


@pytest.mark.parametrize("block", range(8))
def test_every_seeded_schedule_keeps_the_invariants(block: int) -> None:
    for seed in SEEDS[block::8]:
        rng = random.Random(seed)
        config, plans = schedule(rng)

        async def main(rng: random.Random = rng, config: EvalConfig = config,
                       plans: Plans = plans) -> Desk:  # fmt: skip
            return await drive(rng, config, plans)

        desk = run_virtual(main, seed)
        again = f"repeat with: VIME_SEED={seed} pytest {Path(__file__).name} (seed {seed})"
        dispatched = Counter(r.id for r in desk.records if r.trigger == "dispatch")
        ended = Counter(r.id for r in desk.records if r.dest in POINT.terminal)
        assert dispatched == ended, again
        assert len(desk.outcomes) == len(dispatched), again
        assert pending_never_above(desk, config.max_in_flight), again
        assert not any(r.rejected for r in desk.records), again
        assert not desk.store.drafts, again
        assert all(c.released == 1 for c in desk.captures), again
        assert not any(desk.store.leases.values()), again
        begun = {r.id for r in desk.records if r.dest == "running"}
        forced = {r.id for r in desk.records if r.detail and r.detail.get("force")}
        for record in desk.records:
            if record.reason in ("busy", "superseded"):
                assert record.id not in forced, again
            if record.reason == "superseded":
                assert config.overflow_policy == "latest", again
                assert record.id not in begun, again
        for outcome in desk.outcomes:
            assert outcome.metrics["eval/step"] == outcome.rollout_id, again
            if outcome.state == "done":
                assert outcome.metrics["eval/fake"] == outcome.rollout_id, again
            else:
                assert outcome.metrics[f"eval/skipped_{outcome.reason}"] == 1.0, again
