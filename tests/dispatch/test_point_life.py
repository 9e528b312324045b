"""The life of a point, on virtual time, with fakes that wait at gates."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.dispatch.desk import open_desk
from tests.fakes import FakeCapture, Plan, Plans, Stage, raiser
from tests.virtual import run_virtual
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint
from vime.eval.dispatch.messages import Admit, Launch
from vime.rollout.checkpoint_eval import EvalSkip


def config(**changes: object) -> EvalConfig:
    return EvalConfig(uses_snapshots=True, **changes)  # type: ignore[arg-type]


def test_a_point_goes_through_all_states_and_reports_its_score_and_times() -> None:
    async def main() -> None:
        plans = Plans({40: Plan(write=Stage(2), pin=Stage(3), run=Stage(5))})
        async with open_desk(plans=plans) as desk:
            await desk.dispatch(40)
            desk.actor.training_step = 47
            (outcome,) = await desk.drain()
            assert desk.states(40) == ["queued", "exporting", "pinning", "running", "done"]
            assert (outcome.state, outcome.reason, outcome.rollout_id) == ("done", None, 40)
            assert outcome.weight_version == "run:40:0123456789ab"
            assert outcome.lag_steps == 7
            assert outcome.metrics == {
                "eval/fake": 40.0,
                "eval/step": 40.0,
                "eval/lag_steps": 7.0,
                "eval/duration_seconds": pytest.approx(10),
                "eval/stall_seconds": 0.0,
                "eval/export_time_seconds": pytest.approx(2),
                "eval/pin_seconds": pytest.approx(3),
            }

    run_virtual(main)


def test_a_given_checkpoint_is_pinned_without_an_export_and_is_another_point_than_its_step() -> (
    None
):
    async def main() -> None:
        async with open_desk() as desk:
            await desk.dispatch(0, hf_dir=Path("base"))
            await desk.dispatch(0)
            outcomes = await desk.drain()
            assert [o.state for o in outcomes] == ["done", "done"]
            assert [(o.rollout_id, o.hf_dir) for o in outcomes] == [(0, "base"), (0, None)]
            ids = [r.id for r in desk.records if r.trigger == "dispatch"]
            assert ids == ["hf:0", "0"]
            states = [r.dest for r in desk.records if r.id == "hf:0"]
            assert states == ["queued", "pinning", "running", "done"]

    run_virtual(main)


def test_dispatching_a_step_twice_is_the_callers_mistake() -> None:
    async def main() -> None:
        async with open_desk() as desk:
            await desk.dispatch(1)
            with pytest.raises(ValueError, match="rollout_id 1 was dispatched already"):
                await desk.dispatch(1)
            await desk.drain()
            assert len(desk.outcomes) == 1

    run_virtual(main)


def test_backpressure_holds_the_caller_until_a_pending_eval_has_ended() -> None:
    async def main() -> None:
        plans = Plans({n: Plan(run=Stage(10)) for n in range(3)})
        async with open_desk(config(max_in_flight=2), plans) as desk:
            await desk.dispatch(0)
            await desk.dispatch(1)
            assert anyio.current_time() == 0
            life = await desk.dispatch(2)
            assert anyio.current_time() == pytest.approx(10)
            await desk.drain()
            assert life.stall_s == pytest.approx(10)
            assert [o.rollout_id for o in desk.outcomes] == [0, 1, 2]

    run_virtual(main)


def test_skip_drops_the_new_point_as_busy_and_a_forced_one_waits() -> None:
    async def main() -> None:
        plans = Plans({n: Plan(run=Stage(10)) for n in range(4)})
        one = config(max_in_flight=1, overflow_policy="skip")
        async with open_desk(one, plans) as desk:
            await desk.dispatch(0)
            dropped = await desk.dispatch(1)
            assert dropped.state == "skipped"
            assert anyio.current_time() == 0
            await desk.dispatch(2, force=True)
            outcomes = {o.rollout_id: o for o in await desk.drain()}
            assert outcomes[1].reason == "busy"
            assert outcomes[1].metrics["eval/skipped_busy"] == 1.0
            assert [outcomes[n].state for n in (0, 2)] == ["done", "done"]

    run_virtual(main)


def test_backpressure_ends_at_its_deadline_and_the_new_point_is_busy() -> None:
    async def main() -> None:
        plans = Plans({0: Plan(run=Stage(100))})
        async with open_desk(config(max_in_flight=1, backpressure_timeout_s=7), plans) as desk:
            await desk.dispatch(0)
            late = await desk.dispatch(1)
            assert anyio.current_time() == pytest.approx(7)
            assert late.outcome.result(0).reason == "busy"
            await desk.drain()
            assert len(desk.outcomes) == 2

    run_virtual(main)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(write=Stage(1e9)), "timeout_export"),
        (Plan(pin=Stage(1e9)), "timeout_pin"),
        (Plan(run=Stage(1e9)), "timeout_eval"),
        (Plan(capture=raiser(OSError("no memory"))), "export_failed"),
        (Plan(write=Stage(1, raiser(EvalSkip("snapshot_invalid", "x")))), "snapshot_invalid"),
        (Plan(pin=Stage(1, raiser(EvalSkip("pin_violation", "x")))), "pin_violation"),
        (Plan(pin=Stage(1, raiser(RuntimeError("a bug")))), "crashed"),
        (Plan(run=Stage(1, raiser(EvalSkip("my_backend_is_away", "x")))), "my_backend_is_away"),
        (Plan(run=Stage(1, raiser(ZeroDivisionError()))), "crashed"),
    ],
)
def test_whatever_fails_or_is_overdue_skips_its_own_point_with_its_reason(
    plan: Plan, reason: str
) -> None:
    async def main() -> None:
        async with open_desk(plans=Plans({1: plan})) as desk:
            await desk.dispatch(1)
            await desk.dispatch(2)
            outcomes = {o.rollout_id: o for o in await desk.drain()}
            assert outcomes[1].reason == reason
            assert outcomes[1].metrics[f"eval/skipped_{reason}"] == 1.0
            assert outcomes[1].metrics["eval/step"] == 1.0
            assert outcomes[2].state == "done"
            assert not desk.store.drafts
            assert all(c.released == 1 for c in desk.captures)
            assert not any(desk.store.leases.values())

    run_virtual(main)


def test_a_capture_that_outlives_its_deadline_is_told_and_its_point_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with open_desk(config(export_timeout_s=10)) as desk:
            admitted = await desk.ref.ask(Admit(EvalPoint(1)))
            await anyio.sleep(11)  # the caller is in its exporter
            assert "its capture has held training for 10 s" in caplog.text
            await desk.ref.tell(Launch(admitted, FakeCapture(1), 11.0))
            (outcome,) = await desk.drain()
            assert outcome.reason == "timeout_export"

    run_virtual(main)


def test_drain_cancels_what_is_pending_at_its_deadline() -> None:
    async def main() -> None:
        plans = Plans({1: Plan(run=Stage(100)), 2: Plan(write=Stage(100))})
        async with open_desk(plans=plans) as desk:
            await desk.dispatch(1)
            await desk.dispatch(2)
            outcomes = await desk.drain(timeout_s=5)
            assert anyio.current_time() == pytest.approx(5)
            assert sorted(o.rollout_id for o in outcomes) == [1, 2]
            assert {o.reason for o in outcomes} == {"cancelled"}

    run_virtual(main)


@pytest.mark.parametrize("stage", ["write", "pin", "run"])
def test_closing_in_any_stage_settles_the_point_as_cancelled(stage: str) -> None:
    async def main() -> None:
        gate = Stage(release=anyio.Event())
        plans = Plans({1: Plan(**{stage: gate})})
        async with open_desk(plans=plans) as desk:
            await desk.dispatch(1)
            await gate.started.wait()
        assert [o.reason for o in desk.outcomes] == ["cancelled"]
        assert desk.lives[0].outcome.result(0).reason == "cancelled"
        assert not desk.store.drafts
        assert desk.captures[0].released == 1

    run_virtual(main)


def test_a_caller_interrupted_while_it_waits_for_a_slot_leaves_no_point_without_an_outcome() -> (
    None
):
    async def main() -> None:
        plans = Plans({0: Plan(run=Stage(100))})
        async with open_desk(config(max_in_flight=1), plans) as desk:
            await desk.dispatch(0)
            with anyio.move_on_after(5):
                await desk.dispatch(1)
        dispatched = {r.id for r in desk.records if r.trigger == "dispatch"}
        assert dispatched == {str(o.rollout_id) for o in desk.outcomes} == {"0", "1"}

    run_virtual(main)


def test_results_that_arrive_out_of_order_land_at_their_own_step() -> None:
    async def main() -> None:
        plans = Plans({0: Plan(write=Stage(50)), 1: Plan(write=Stage(1))})
        async with open_desk(plans=plans) as desk:
            await desk.dispatch(0)
            await desk.dispatch(1)
            await desk.drain()
            assert [o.rollout_id for o in desk.outcomes] == [1, 0]
            assert [o.metrics["eval/fake"] for o in desk.outcomes] == [1.0, 0.0]
            assert [o.metrics["eval/step"] for o in desk.outcomes] == [1.0, 0.0]

    run_virtual(main)


def test_waiting_for_a_slot_does_not_count_as_export_of_a_given_checkpoint() -> None:
    async def main() -> None:
        plans = Plans({0: Plan(run=Stage(100))})
        limits = config(max_in_flight=1, export_timeout_s=50.0)
        async with open_desk(limits, plans) as desk:
            await desk.dispatch(0)
            await desk.dispatch(1, hf_dir=Path("given"))
            assert [o.state for o in await desk.drain()] == ["done", "done"]

    run_virtual(main)
