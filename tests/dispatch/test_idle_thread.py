"""The dispatcher's thread leaves the interpreter lock to training, whatever a point goes through.

What is measured is the processor time of that thread alone, so that a busy machine changes little;
and what a point's worst moment is, over several points: what happens at every point is seen in
each of them, and what the machine does is not.
"""

from __future__ import annotations

import gc
import statistics
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.lock_holds import LockHolds
from tests.programs.driver import namespace
from tests.snapshots import make_model, make_tokenizer, write_checkpoint
from vime.eval import EvalDispatcher

pytestmark = pytest.mark.slow

LIMIT_MS = 1.0
NUM_POINTS = 15


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[EvalDispatcher]:
    """One that has evaluated a point before; what that has loaded is not looked through again."""
    base = str(write_checkpoint(tmp_path / "base"))
    args = namespace(str(tmp_path / "run"), str(tmp_path / "staging"), base)
    exporter = make_model(), make_tokenizer()
    with EvalDispatcher.from_args(args, exporter=exporter) as dispatcher:
        dispatcher.dispatch(0).result(60)
        gc.collect()
        gc.freeze()
        try:
            yield dispatcher
        finally:
            gc.unfreeze()


def test_no_step_of_the_dispatchers_loop_computes_for_a_millisecond(
    dispatcher: EvalDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_ms: list[float] = []
    run: Any = events.Handle._run

    def measured_run(self: events.Handle) -> None:
        begun = time.thread_time_ns()
        try:
            run(self)
        finally:
            taken_ms.append((time.thread_time_ns() - begun) / 1e6)

    monkeypatch.setattr(events.Handle, "_run", measured_run)
    longest_ms = []
    for step in range(1, NUM_POINTS + 1):
        taken_ms.clear()
        dispatcher.dispatch(step).result(60)
        longest_ms.append(max(taken_ms))
    assert statistics.median(longest_ms) <= LIMIT_MS


def test_training_that_always_wants_the_lock_waits_less_than_a_millisecond_for_it(
    dispatcher: EvalDispatcher,
) -> None:
    longest_ms = []
    for step in range(1, NUM_POINTS + 1):
        holds = LockHolds(dispatcher._thread)
        with holds.watching():
            dispatcher.dispatch(step).result(60)
        longest_ms.append(holds.longest_ms)
    assert min(longest_ms) <= LIMIT_MS


def test_many_short_steps_in_a_row_are_no_long_hold(dispatcher: EvalDispatcher) -> None:
    async def take_steps() -> None:
        for _ in range(100):
            compute_for(0.0002)  # twenty milliseconds in all
            await anyio.lowlevel.checkpoint()

    while True:
        holds = holds_during(dispatcher, take_steps)
        # Half of them; else the victim was given no processor, and could not see how long they are.
        if sum(holds.holds_ms) > 10 and holds.longest_ms <= LIMIT_MS:
            break


def test_a_hold_of_several_milliseconds_is_seen(dispatcher: EvalDispatcher) -> None:
    async def compute() -> None:
        compute_for(0.01)

    # A victim that is given no processor meanwhile sees nothing, now and then.
    while holds_during(dispatcher, compute).longest_ms <= LIMIT_MS:
        pass


def holds_during(
    dispatcher: EvalDispatcher, work: Callable[[], Coroutine[Any, Any, None]]
) -> LockHolds:
    """The holds that are seen while the dispatcher's thread works."""
    holds = LockHolds(dispatcher._thread)
    with holds.watching():
        dispatcher._call(work())
    return holds


def compute_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
