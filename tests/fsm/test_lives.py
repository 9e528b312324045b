"""Lives, times and bars: what a trace says each machine went through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fsm.traces import SECOND, START_WALL_NS, Run, healthy_run
from vime.fsm.filters import Moment
from vime.fsm.lives import Life, Lives, Span, TraceClock, lives_of, scores_of
from vime.fsm.read import read_trace
from vime.fsm.render import bar
from vime.fsm.text import clean, duration


def read(path: Path) -> Lives:
    return lives_of(read_trace(path))


def test_a_life_holds_every_stay_with_its_times(tmp_path: Path) -> None:
    lives = read(healthy_run(tmp_path / "t", num_points=1))
    (point,) = lives.of("point")
    assert [(span.state, span.dwell_ns // SECOND) for span in point.spans] == [
        ("queued", 1),
        ("exporting", 5),
        ("pinning", 3),
        ("running", 5),
    ]
    assert (point.state, point.finished, point.attempt) == ("done", True, 0)
    assert scores_of(point) == {"sums": 0.1}
    assert lives.now_ns == (30 + 18) * SECOND
    (snapshot,) = lives.of("snapshot")
    assert [span.state for span in snapshot.spans] == ["writing", "whole", "verified"]


def test_the_present_state_lasts_until_the_end_of_the_trace_unless_it_is_terminal(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    run.fire("point", 2, "dispatch")
    run.fire("point", 1, "skip", 4, reason="busy")
    run.trace.close()
    lives = read(run.path)
    first, second = lives.of("point")
    assert first.dwell_ns("queued", lives.now_ns) == 5 * SECOND
    assert first.dwell_ns("skipped", lives.now_ns) is None
    assert second.dwell_ns("queued", lives.now_ns) == 4 * SECOND
    assert second.dwell_ns("running", lives.now_ns) is None


def test_a_rejected_trigger_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    with pytest.raises(Exception, match="illegal"):
        run.fire("point", 1, "finish", reason="no", weight_version="w")
    run.trace.close()
    (point,) = read(run.path).of("point")
    assert (point.state, point.num_rejected, point.reason) == ("queued", 1, None)
    assert point.weight_version is None


def test_a_point_that_a_later_run_takes_up_again_has_a_second_life(tmp_path: Path) -> None:
    run = Run(tmp_path / "t")
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "export")
    del run._machines["point", "1"]
    run.machine("point", 1).attempt = 1
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "skip", reason="cancelled")
    run.trace.close()
    first, second = read(run.path).of("point")
    assert (first.state, first.attempt) == ("exporting", 0)
    assert (second.state, second.attempt) == ("skipped", 1)


def test_the_clocks_of_several_nodes_are_laid_side_by_side(tmp_path: Path) -> None:
    a, b = Run(tmp_path / "a"), Run(tmp_path / "b", node="b")
    b.clock.mono = lambda: 999 * SECOND + int(b.clock.now_s * SECOND)  # type: ignore[method-assign]
    b.trace._mono_ns = b.clock.mono
    a.fire("point", 1, "dispatch", 1)
    b.fire("engine", "e", "start", 3)
    b.fire("engine", "e", "ready", 4)
    for run in (a, b):
        run.trace.close()
    clock = TraceClock()
    records = [*read_trace(a.path), *read_trace(b.path)]
    assert [clock.at(record) // SECOND for record in records] == [0, 2, 6]
    assert clock.origin_wall_ns == START_WALL_NS + SECOND


def life(*spans: Span, state: str = "done") -> Life:
    return Life(("r", "n", "point", "1"), 0, state, spans[-1].end_ns, 0, 0, list(spans))


def test_a_column_shows_the_state_that_filled_most_of_it() -> None:
    spans = Span("queued", 0, 12), Span("exporting", 12, 14), Span("running", 14, 40)
    assert bar(life(*spans), 0, 40, 4) == ["queued", "running", "running", "running"]
    assert bar(life(*spans), 0, 80, 4) == ["queued", "running", None, None]
    assert bar(life(*spans), 12, 14, 2) == ["exporting", "exporting"]


@given(
    stays=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    window=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    width=st.integers(1, 40),
)
def test_a_bar_has_the_asked_width_whatever_the_times(
    stays: list[int], window: tuple[int, int], width: int
) -> None:
    spans, now = [], 0
    for stay in stays:
        spans.append(Span("queued", now, now + stay))
        now += stay
    cells = bar(life(*spans), min(window), max(window), width)
    assert len(cells) == width
    if min(window) == 0 and max(window) == now > 0:
        assert set(cells) == {"queued"}


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0"),
        (1_000, "1 µs"),
        (350_400, "350 µs"),
        (999_600, "1 ms"),
        (12_300_000, "12 ms"),
        (999_600_000, "1.0 s"),
        (9_940_000_000, "9.9 s"),
        (9_960_000_000, "10 s"),
        (59_600_000_000, "1m00s"),
        (125 * SECOND, "2m05s"),
        (3600 * SECOND, "1h00m"),
        (-2 * SECOND, "-2.0 s"),
    ],
)
def test_durations_read_as_people_say_them(ns: int, text: str) -> None:
    assert duration(ns) == text


@given(st.text())
def test_cleaned_text_is_one_line_without_controls(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned.splitlines()) <= 1
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in cleaned)
    assert len(clean(text, 5)) <= 5 or not text.isprintable()


@pytest.mark.parametrize(
    ("text", "ns"),
    [("12.5", 12_500_000_000), ("12.5s", 12_500_000_000), ("250ms", 250_000_000), ("1h2m3s", 3_723 * SECOND)],
)  # fmt: skip
def test_a_moment_is_seconds_or_units_since_the_start(text: str, ns: int) -> None:
    assert Moment.parse(text) == Moment(ns)


@given(st.text(max_size=12) | st.text("0123456789.smh-:T", max_size=30))
def test_a_moment_is_read_or_refused_with_a_reason(text: str) -> None:
    try:
        Moment.parse(text)
    except ValueError as error:
        refusal = str(error)
    else:
        return
    assert "is no moment: expected" in refusal


def test_metrics_that_are_no_numbers_are_no_scores(tmp_path: Path) -> None:
    path = healthy_run(tmp_path / "t", num_points=1)
    for metrics in ([], "x", {"eval/sums": None, "eval/a": "b", "eval/b": True, "eval/c/d": 1}):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        for fields in lines:
            if fields["trigger"] == "finish":
                fields["detail"] = {"metrics": metrics}
        path.write_text("".join(json.dumps(fields) + "\n" for fields in lines))
        (point,) = read(path).of("point")
        assert scores_of(point) == {}
