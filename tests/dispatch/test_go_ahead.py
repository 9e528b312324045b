"""While a slot is free, dispatch waits for nothing but the capture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeCapture, FakeDraft, FakeEvaluator, FakeStore, Plans
from vime.eval.assembly import Parts
from vime.eval.config import EvalConfig
from vime.eval.dispatcher import EvalDispatcher
from vime.eval.outcomes.tracking import Trackers
from vime.fsm.trace import Record, Trace

PATIENCE_S = 20.0


class Exporter:
    """Captures nothing, and remembers what it handed out."""

    needs_directory = False

    def __init__(self) -> None:
        self.captures: list[FakeCapture] = []
        self.fault: BaseException | None = None

    def capture(self, rollout_id: int, directory: Path) -> FakeCapture:
        if self.fault is not None:
            raise self.fault
        self.captures.append(FakeCapture(rollout_id))
        return self.captures[-1]


class Bench:
    """A dispatcher with fakes around it, whose thread can be held up."""

    def __init__(self, tmp_path: Path, store: FakeStore, exporter: Exporter, **flags: Any) -> None:
        self.exporter = exporter
        self.records: list[Record] = []
        trace = Trace(None, "run")
        trace.subscribe(self.records.append)
        config = EvalConfig(uses_snapshots=True, hf_dir=tmp_path / "staging", **flags)
        parts: Any = Parts(config, tmp_path, trace, Trackers(), exporter)  # type: ignore[arg-type]
        parts.store, store.close = store, lambda: None  # type: ignore[attr-defined]
        parts.evaluator = FakeEvaluator(store.plans, None)
        self.dispatcher = EvalDispatcher(config, parts, None)

    @contextmanager
    def thread_held_up(self) -> Iterator[None]:
        """The dispatcher's thread stands still."""
        release = threading.Event()
        loop = self.dispatcher._loop
        assert loop is not None
        loop.call_soon_threadsafe(release.wait, PATIENCE_S)
        try:
            yield
        finally:
            release.set()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, FakeStore(Plans()), Exporter())
    yield bench
    bench.dispatcher.close()


def test_dispatch_returns_although_the_dispatchers_thread_stands_still(bench: Bench) -> None:
    with bench.thread_held_up():
        handles = [bench.dispatcher.dispatch(step) for step in (1, 2)]
        assert [handle.state for handle in handles] == ["queued", "queued"]
        assert [capture.rollout_id for capture in bench.exporter.captures] == [1, 2]
    assert [handle.result(PATIENCE_S).state for handle in handles] == ["done", "done"]
    assert [handle.state for handle in handles] == ["done", "done"]
    points = [r for r in bench.records if r.machine == "point"]
    assert [r.dest for r in points if r.id == "1"] == ["queued", "exporting", "running", "done"]
    assert [r.id for r in points if r.trigger == "dispatch"] == ["1", "2"]


def test_a_handle_whose_point_is_not_admitted_yet_waits_no_longer_than_it_is_told(
    bench: Bench,
) -> None:
    with bench.thread_held_up():
        handle = bench.dispatcher.dispatch(1)
        with pytest.raises(TimeoutError):
            handle.result(0)
    assert handle.result(PATIENCE_S).state == "done"


def test_a_capture_that_fails_is_export_failed_and_the_next_point_goes_on(bench: Bench) -> None:
    bench.exporter.fault = MemoryError("12 GB")
    outcome = bench.dispatcher.dispatch(1).result(PATIENCE_S)
    assert (outcome.reason, "12 GB" in str(outcome.detail)) == ("export_failed", True)
    bench.exporter.fault = None
    assert bench.dispatcher.dispatch(2).result(PATIENCE_S).state == "done"


def test_an_interrupted_capture_shows_the_interrupt_and_settles_its_point(bench: Bench) -> None:
    bench.exporter.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.dispatcher.dispatch(1)
    assert [o.reason for o in bench.dispatcher.drain()] == ["export_failed"]


def test_a_capture_for_which_there_is_no_directory_is_released(tmp_path: Path) -> None:
    class FullDisk(FakeStore):
        def begin(self, rollout_id: int, cause_seq: int | None = None) -> FakeDraft:
            raise OSError("no space left")

    bench = Bench(tmp_path, FullDisk(Plans()), Exporter())
    outcome = bench.dispatcher.dispatch(1).result(PATIENCE_S)
    bench.dispatcher.drain()
    bench.dispatcher.close()
    assert (outcome.reason, "no space left" in str(outcome.detail)) == ("export_failed", True)
    assert [capture.released for capture in bench.exporter.captures] == [1]


def test_a_step_is_dispatched_once_also_while_the_first_is_on_its_way(bench: Bench) -> None:
    handle = bench.dispatcher.dispatch(1)
    with pytest.raises(ValueError, match="dispatched already"):
        bench.dispatcher.dispatch(1)
    assert handle.result(PATIENCE_S).state == "done"
    assert len(bench.dispatcher.drain()) == 1


def test_the_window_is_never_exceeded_and_every_capture_is_released_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeStore(Plans()), Exporter(), max_in_flight=3)
    for step in range(50):
        bench.dispatcher.dispatch(step)
    outcomes = bench.dispatcher.drain()
    bench.dispatcher.close()
    assert sorted(o.rollout_id for o in outcomes) == list(range(50))
    assert {o.state for o in outcomes} == {"done"}
    assert all(capture.released == 1 for capture in bench.exporter.captures)
    pending = most = 0
    for record in bench.records:
        if record.machine == "point":
            pending += (record.trigger == "export") - (record.trigger == "finish")
            most = max(most, pending)
    assert most <= 3


def test_a_full_window_drops_the_point_under_skip_without_a_capture(tmp_path: Path) -> None:
    plans = Plans()
    bench = Bench(tmp_path, FakeStore(plans), Exporter(), max_in_flight=1, overflow_policy="skip")
    plans[1].run.seconds = PATIENCE_S
    assert bench.dispatcher.dispatch(1).rollout_id == 1
    assert bench.dispatcher.dispatch(2).result(PATIENCE_S).reason == "busy"
    bench.dispatcher.close()
    assert [capture.rollout_id for capture in bench.exporter.captures] == [1]


def test_an_exporter_that_needs_its_directory_is_given_the_draft(tmp_path: Path) -> None:
    class Writer(Exporter):
        needs_directory = True

        def capture(self, rollout_id: int, directory: Path) -> FakeCapture:
            assert directory == FakeDraft(rollout_id).directory
            return super().capture(rollout_id, directory)

    bench = Bench(tmp_path, FakeStore(Plans()), Writer())
    assert bench.dispatcher.dispatch(1).result(PATIENCE_S).state == "done"
    bench.dispatcher.close()


def test_a_dispatcher_that_is_closed_right_after_a_dispatch_reports_the_point(
    tmp_path: Path,
) -> None:
    for attempt in range(20):
        bench = Bench(tmp_path / str(attempt), FakeStore(Plans()), Exporter())
        handle = bench.dispatcher.dispatch(1)
        bench.dispatcher.close()
        assert [handle.result(0)] == bench.dispatcher.outcomes
        assert [capture.released for capture in bench.exporter.captures] == [1]
