"""The overflow policy `latest`: the curve stays current, and training does not wait."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.dispatch.desk import Desk, open_desk
from tests.fakes import Plan, Plans, Stage
from tests.virtual import run_virtual
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint
from vime.eval.dispatch.messages import Admit


def config(max_in_flight: int = 2) -> EvalConfig:
    return EvalConfig(
        uses_snapshots=True, max_in_flight=max_in_flight, overflow_policy="latest"
    )  # fmt: skip


def slow_runs(*steps: int) -> Plans:
    return Plans({n: Plan(run=Stage(10)) for n in steps})


def results(desk: Desk) -> dict[int, str | None]:
    return {o.rollout_id: o.reason for o in desk.outcomes}


def nothing_is_left(desk: Desk) -> bool:
    held = any(desk.store.leases.values()) or bool(desk.store.drafts)
    return not held and all(capture.released == 1 for capture in desk.captures)


@pytest.mark.parametrize("with_fleet", [True, False])
def test_a_newer_point_replaces_the_oldest_that_waits_and_training_never_waits(
    with_fleet: bool,
) -> None:
    async def main() -> None:
        async with open_desk(config(), slow_runs(0, 1, 2, 3), with_fleet=with_fleet) as desk:
            for step in range(4):
                await desk.dispatch(step)
                await anyio.sleep(1)
            assert anyio.current_time() == pytest.approx(4)
            assert results(desk) == {1: "superseded", 2: "superseded"}
            await desk.drain()
            assert results(desk) == {0: None, 1: "superseded", 2: "superseded", 3: None}
            assert all(life.stall_s == 0 for life in desk.lives)
            assert nothing_is_left(desk)

    run_virtual(main)


def test_the_skip_is_attributed_to_the_point_that_took_its_place() -> None:
    async def main() -> None:
        async with open_desk(config(), slow_runs(0, 1, 2)) as desk:
            for step in range(3):
                await desk.dispatch(step)
                await anyio.sleep(1)
            (outcome,) = desk.outcomes
            assert outcome.metrics["eval/skipped_superseded"] == 1.0
            assert outcome.detail == "step 2 took its place before it had begun to run"
            (record,) = [r for r in desk.records if r.reason == "superseded"]
            (cause,) = [r for r in desk.records if r.seq == record.cause_seq]
            assert (cause.id, cause.trigger) == ("2", "dispatch")

    run_virtual(main)


@pytest.mark.parametrize("state", ["exporting", "pinning"])
def test_a_point_may_be_replaced_in_every_state_before_it_has_begun(state: str) -> None:
    async def main() -> None:
        plans = slow_runs(0, 1, 2)
        if state == "exporting":
            plans[1].write.seconds = 5
        async with open_desk(config(), plans) as desk:
            await desk.dispatch(0)
            await anyio.sleep(1)
            waiting = await desk.dispatch(1)
            await anyio.sleep(1)
            assert waiting.state == state
            await desk.dispatch(2)
            assert results(desk) == {1: "superseded"}
            await desk.drain()
            assert nothing_is_left(desk)

    run_virtual(main)


def test_a_given_checkpoint_that_is_still_being_verified_may_be_replaced() -> None:
    async def main() -> None:
        plans = slow_runs(0, 1, 2)
        plans[1].write.seconds = 5
        async with open_desk(config(), plans) as desk:
            await desk.dispatch(0)
            await desk.dispatch(1, hf_dir=Path("given"))
            await desk.dispatch(2)
            assert results(desk) == {1: "superseded"}
            await desk.drain()

    run_virtual(main)


def test_a_point_whose_weights_are_being_loaded_has_begun_and_the_one_behind_it_goes() -> None:
    async def main() -> None:
        plans = Plans({n: Plan(pin=Stage(10)) for n in range(3)})
        async with open_desk(config(), plans) as desk:
            loading = await desk.dispatch(0)
            await anyio.sleep(1)
            await desk.dispatch(1)
            await anyio.sleep(1)
            await desk.dispatch(2)
            assert loading.state == "pinning"
            assert results(desk) == {1: "superseded"}
            await desk.drain()
            assert results(desk) == {0: None, 1: "superseded", 2: None}

    run_virtual(main)


def test_where_all_have_begun_the_new_point_is_busy_and_a_forced_one_waits() -> None:
    async def main() -> None:
        async with open_desk(config(max_in_flight=1), slow_runs(0, 1, 2)) as desk:
            await desk.dispatch(0)
            await anyio.sleep(1)
            await desk.dispatch(1)
            assert results(desk) == {1: "busy"}
            await desk.dispatch(2, force=True)
            assert anyio.current_time() == pytest.approx(10)
            await desk.drain()
            assert results(desk) == {0: None, 1: "busy", 2: None}

    run_virtual(main)


def test_a_forced_point_is_never_replaced_and_replaces_others_itself() -> None:
    async def main() -> None:
        async with open_desk(config(max_in_flight=3), slow_runs(0, 1, 2, 3, 4)) as desk:
            for step in range(4):
                await desk.dispatch(step, force=step == 1)
                await anyio.sleep(1)
            assert results(desk) == {2: "superseded"}
            await desk.dispatch(4, force=True)
            assert results(desk) == {2: "superseded", 3: "superseded"}
            assert anyio.current_time() == pytest.approx(4)
            await desk.drain()
            assert results(desk) == {0: None, 1: None, 2: "superseded", 3: "superseded", 4: None}

    run_virtual(main)


def test_a_point_whose_caller_was_interrupted_before_the_hand_over_makes_room_too() -> None:
    async def main() -> None:
        async with open_desk(config(), slow_runs(0, 2)) as desk:
            await desk.dispatch(0)
            await desk.ref.ask(Admit(EvalPoint(1)))
            await anyio.sleep(1)
            await desk.dispatch(2)
            assert results(desk) == {1: "superseded"}
            await desk.drain()
            assert nothing_is_left(desk)

    run_virtual(main)


@pytest.mark.parametrize("policy", ["backpressure", "skip", "latest"])
def test_the_last_point_of_a_run_is_evaluated_under_each_policy(policy: str) -> None:
    async def main() -> None:
        steps = range(8)
        limits = EvalConfig(uses_snapshots=True, max_in_flight=2, overflow_policy=policy)
        async with open_desk(limits, slow_runs(*steps)) as desk:
            for step in steps:
                await desk.dispatch(step, force=step == steps[-1])
                await anyio.sleep(1)
            await desk.drain()
            assert results(desk)[steps[-1]] is None
            assert len(desk.outcomes) == len(steps)

    run_virtual(main)
