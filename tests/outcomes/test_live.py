"""The live view: what it knows of a run, what it draws, and the lines it prints elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fsm.traces import Run, version
from vime.eval.outcomes.live import (
    MAX_POINTS_SHOWN,
    LiveState,
    LiveView,
    Training,
    draw,
    make_console,
)
from vime.fsm.read import TraceUnreadableError, read_trace

METRICS = {
    "eval/addition": 0.415,
    "eval/lag_steps": 31.0,
    "eval/duration_seconds": 4.2,
    "eval/stall_seconds": 0.008,
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "trace.jsonl")
    yield run
    run.trace.close()


def finish(run: Run, step: int) -> None:
    for trigger in ("dispatch", "export", "pin", "run"):
        run.fire("point", step, trigger, weight_version=version(step))
    run.fire("point", step, "finish", detail={"metrics": METRICS}, weight_version=version(step))


def state_of(run: Run) -> LiveState:
    state = LiveState()
    for record in read_trace(run.path):
        state.apply(record)
    return state


def drawn(state: LiveState, now_ns: int) -> str:
    console = make_console(file=io.StringIO(), width=120)
    console.print(draw(state, now_ns, "a title"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [name])


class Output:
    """A view of a run on a console that is a terminal or not, pumped by hand."""

    def __init__(self, run: Run, *, terminal: bool = False, progress_s: float = 10.0) -> None:
        self.file = io.StringIO()
        self.console = make_console(file=self.file, width=120, height=40, force_terminal=terminal)
        self.view = LiveView(
            run.path, "a title", console=self.console, progress_s=progress_s, mono_ns=run.clock.mono
        )

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exc: object) -> None:
        self.view.close()

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


# -- the state -------------------------------------------------------------------------------


def test_the_state_holds_points_in_dispatch_order_and_engines_by_name(run: Run) -> None:
    for engine in ("engine_1", "engine_0"):
        run.fire("engine", engine, "start")
    for step in (20, 10):
        run.fire("point", step, "dispatch")
    run.fire("point", 10, "skip", reason="busy")
    state = state_of(run)
    assert [point.id for point in state.points] == ["20", "10"]
    assert [point.state for point in state.points] == ["queued", "skipped"]
    assert [engine.id for engine in state.engines] == ["engine_0", "engine_1"]


def test_time_goes_on_between_records_and_never_back(run: Run) -> None:
    run.fire("point", 10, "dispatch")
    state = state_of(run)
    written_ns = run.clock.mono()
    assert state.now_ns(written_ns + 3_000_000_000) - state.now_ns(written_ns) == 3_000_000_000
    assert state.now_ns(written_ns - 3_000_000_000) == state.lives.now_ns


# -- the drawing -----------------------------------------------------------------------------


def test_a_finished_point_shows_score_lag_duration_and_stall(run: Run) -> None:
    finish(run, 40)
    state = state_of(run)
    shown = row(drawn(state, state.lives.now_ns + 60_000_000_000), "40")
    for fact in ("done", "0.415", "31", "4.0 s", "8 ms"):
        assert fact in shown


def test_a_point_in_flight_shows_its_state_and_how_long_it_is_under_way(run: Run) -> None:
    run.fire("point", 40, "dispatch")
    run.fire("point", 40, "export", after_s=2)
    state = state_of(run)
    shown = row(drawn(state, state.lives.now_ns + 5_000_000_000), "40")
    assert "exporting" in shown
    assert "7.0 s" in shown


def test_a_skipped_point_shows_its_reason(run: Run) -> None:
    run.fire("point", 40, "dispatch")
    run.fire("point", 40, "skip", reason="pin_violation")
    state = state_of(run)
    assert "pin_violation" in row(drawn(state, state.lives.now_ns), "40")


def test_an_engine_shows_state_and_the_weights_that_it_serves(run: Run) -> None:
    for trigger in ("start", "ready", "pin", "serve"):
        run.fire("engine", "engine_0", trigger, weight_version=version(40))
    state = state_of(run)
    shown = row(drawn(state, state.lives.now_ns), "engine_0")
    assert "serving" in shown
    assert "40:000000000028" in shown


def test_training_shows_step_speed_and_facts(run: Run) -> None:
    state = state_of_nothing()
    state.training = Training(30, 120, elapsed_s=10.0, facts={"reward": 0.25})
    text = drawn(state, 0)
    for fact in ("step 30/120", "3.0 steps/s", "reward 0.250"):
        assert fact in text


def state_of_nothing() -> LiveState:
    return LiveState()


def test_only_the_latest_points_are_drawn_and_the_others_counted(run: Run) -> None:
    for step in range(MAX_POINTS_SHOWN + 3):
        run.fire("point", step, "dispatch")
    state = state_of(run)
    text = drawn(state, state.lives.now_ns)
    assert "3 earlier" in text
    assert row(text, str(MAX_POINTS_SHOWN + 2))
    with pytest.raises(StopIteration):
        row(text, "2")


def test_what_a_trace_says_cannot_steer_the_terminal(run: Run) -> None:
    run.fire("point", 40, "dispatch")
    run.fire("point", 40, "skip", reason="\x1b[2Jgone[bold]")
    state = state_of(run)
    text = drawn(state, state.lives.now_ns)
    assert "\x1b" not in text
    assert "gone[bold]" in text


# -- plain lines -----------------------------------------------------------------------------


def test_plain_output_has_one_line_for_each_change_of_a_point(run: Run) -> None:
    with Output(run) as output:
        finish(run, 40)
        output.view.pump()
        first, *lines = output.lines
        assert first == "a title"
        assert [line.split("  ")[-1].strip() for line in lines] == [
            "point 40 was dispatched",
            "the export of point 40 began",
            f"point 40 asked the fleet for {version(40)}",
            f"point 40 began to run on {version(40)}",
            "point 40 done: 0.415, 4.2 s in flight, 31 steps behind training, 8 ms of training's time",
        ]


def test_plain_output_tells_of_an_engine_only_what_is_out_of_the_ordinary(run: Run) -> None:
    with Output(run) as output:
        for trigger in ("start", "ready", "pin", "serve", "suspect", "kill", "restart"):
            run.fire("engine", "engine_0", trigger)
        output.view.pump()
        told = "\n".join(output.lines[1:])
        for words in ("was started", "was ready", "became suspect", "was killed", "its restart"):
            assert words in told
        assert "load" not in told
        assert "proved" not in told


def test_plain_output_reports_progress_at_intervals_and_at_the_end(run: Run) -> None:
    run.fire("point", 0, "dispatch")
    with Output(run, progress_s=10.0) as output:
        for step in range(25):
            run.clock.now_s += 1.0
            output.view.training(step, 100, reward=step / 100)
            output.view.pump()
        output.view.pump(final=True)
        progress = [line.split("  ")[-1] for line in output.lines if "training step" in line]
        assert progress == [
            "training step 9 of 100, reward 0.090",
            "training step 19 of 100, reward 0.190",
            "training step 24 of 100, reward 0.240",
        ]


def test_plain_output_has_no_escape_sequences(run: Run) -> None:
    with Output(run) as output:
        finish(run, 40)
        output.view.pump(final=True)
        assert "\x1b" not in output.file.getvalue()


# -- the view --------------------------------------------------------------------------------


def test_what_happened_before_the_view_began_is_shown_too(run: Run) -> None:
    run.fire("engine", "engine_0", "start")
    with Output(run) as output:
        output.view.pump()
        assert "engine_0 was started" in output.lines[1]


def test_a_terminal_gets_the_whole_view_drawn(run: Run) -> None:
    with Output(run, terminal=True) as output:
        finish(run, 40)
        output.view.training(41, 100, reward=0.5)
        output.view.pump(final=True)
        text = output.file.getvalue()
        for fact in ("a title", "step 41/100", "done", "0.415"):
            assert fact in text


def test_leaving_the_view_shows_the_last_record_and_ends_its_thread(run: Run) -> None:
    with Output(run) as output:
        with output.view:
            thread = output.view._thread
            finish(run, 40)
        assert "point 40 done" in output.lines[-1]
        assert not thread.is_alive()


class BrokenPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_leaves_ends_the_view_and_not_the_run(run: Run) -> None:
    with Output(run) as output:
        output.console.file = BrokenPipe()
        with output.view:
            finish(run, 40)
            output.view.training(1, 2)
            output.view.pump()
        assert output.lines == ["a title"]


def test_a_view_of_no_trace_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TraceUnreadableError, match="nothing_here"):
        LiveView(tmp_path / "nothing_here", console=make_console(file=io.StringIO()))
