"""What is told of a skip: whose deadline it was, and never more than a reader wants."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import anyio
import pytest

from tests.dispatch.desk import open_desk
from tests.fakes import FakeCapture, Plan, Plans, Stage, raiser
from tests.virtual import run_virtual
from vime.eval.config import EvalConfig
from vime.eval.contracts import EvalPoint, Outcome
from vime.eval.dispatch.handle import EvalHandle
from vime.eval.dispatch.messages import Admit, Admitted, Launch
from vime.eval.dispatch.point_life import MAX_MESSAGE, shortened
from vime.fsm.record import Record
from vime.rollout.checkpoint_eval import EvalSkip


def skipped(plan: Plan, *, with_fleet: bool = True, num: int = 1, **limits: float) -> list[Outcome]:
    """The outcomes of points that have the same plan, in the order of their steps."""
    return run(plan, with_fleet=with_fleet, num=num, **limits)[0]


def run(
    plan: Plan, *, with_fleet: bool = True, num: int = 1, **limits: float
) -> tuple[list[Outcome], list[Record]]:
    config = EvalConfig(uses_snapshots=True, **limits)  # type: ignore[arg-type]

    async def main() -> tuple[list[Outcome], list[Record]]:
        plans = Plans(dict.fromkeys(range(num), plan))
        async with open_desk(config, plans, with_fleet=with_fleet) as desk:
            for step in range(num):
                await desk.dispatch(step)
            outcomes = await desk.drain()
            return sorted(outcomes, key=lambda outcome: outcome.rollout_id), desk.records

    return run_virtual(main)


def test_an_overdue_export_is_told_with_the_deadline_that_was_set_and_its_flag() -> None:
    (late,) = skipped(Plan(write=Stage(10)), export_timeout_s=0.001)
    assert late.reason == "timeout_export"
    assert late.detail == (
        "writing and verifying the snapshot took longer than 0.001 s (--eval-export-timeout)"
    )


def test_a_capture_that_has_used_the_deadline_up_leaves_no_negative_one() -> None:
    config = EvalConfig(uses_snapshots=True, export_timeout_s=3)

    async def main() -> Outcome:
        async with open_desk(config, Plans({1: Plan(write=Stage(10))})) as desk:
            admitted: Admitted = await desk.ref.ask(Admit(EvalPoint(1)))
            await anyio.sleep(5)  # the capture holds the caller
            await desk.ref.tell(Launch(admitted, FakeCapture(1), 5.0))
            (outcome,) = await desk.drain()
            return outcome

    assert str(run_virtual(main).detail).endswith("took longer than 3 s (--eval-export-timeout)")


def test_an_overdue_pin_and_turn_are_told_with_what_their_deadlines_are_made_of() -> None:
    (late,) = skipped(Plan(pin=Stage(1e6)), pin_timeout_s=600, eval_timeout_s=2592000)
    assert late.detail == (
        "its turn at the fleet and its pin took longer than 630 s (--eval-pin-timeout 600 and "
        "--eval-timeout 2592000, with 0 points ahead of it)"
    )


def test_an_overdue_evaluation_is_told_with_its_flag() -> None:
    (late,) = skipped(Plan(run=Stage(1e6)), eval_timeout_s=5)
    assert late.detail == (
        "the evaluation's last word took longer than 35 s (--eval-timeout 5, and some grace)"
    )


@pytest.mark.parametrize("end", [".", "The end."])
def test_a_long_message_keeps_its_beginning_and_its_end_and_says_how_much_is_gone(end: str) -> None:
    message = "The beginning. " + "D" * 50_000_000 + end
    short = shortened(message)
    assert len(short) <= MAX_MESSAGE == 10_000
    assert short.startswith("The beginning. D")
    assert short.endswith(f"D{end}")
    head, middle, tail = short.split("\n")
    num_cut = len(message) - len(head) - len(tail)
    assert middle == f"[... {num_cut} of {len(message)} characters are left out ...]"


@pytest.mark.parametrize("length", [0, 1, MAX_MESSAGE])
def test_a_message_that_is_short_enough_stays_as_it_is(length: int) -> None:
    assert shortened("x" * length) == "x" * length


@pytest.mark.parametrize(
    "error", [EvalSkip("away", "D" * 1_000_000), RuntimeError("D" * 1_000_000)]
)
def test_neither_outcome_nor_trace_holds_more(error: Exception) -> None:
    (outcome,), records = run(Plan(run=Stage(1, raiser(error))))
    assert outcome.detail is not None
    assert len(outcome.detail) <= MAX_MESSAGE
    (record,) = [r for r in records if r.trigger == "skip"]
    assert record.detail is not None
    assert record.detail["message"] == outcome.detail


def test_a_reason_is_a_short_name_and_a_detail_is_text() -> None:
    with pytest.raises(ValueError, match=r"^EvalSkip reason 'aaa.{190,200}: expected at most 100"):
        EvalSkip("a" * 50_000_000)
    assert EvalSkip("a" * 100, ValueError("why")).detail == "why"  # type: ignore[arg-type]


class Waited(Future[Admitted]):
    """A future that notes how long somebody would wait for it."""

    limit_s: float | None = None

    def result(self, timeout: float | None = None) -> Admitted:
        self.limit_s = timeout
        raise TimeoutError


@pytest.mark.parametrize("timeout", [1e20, float("inf")])
def test_a_result_is_waited_for_no_longer_than_threads_can(timeout: float) -> None:
    admission = Waited()
    with pytest.raises(TimeoutError):
        EvalHandle(EvalPoint(1), admission).result(timeout)
    assert admission.limit_s is not None
    assert admission.limit_s <= threading.TIMEOUT_MAX
