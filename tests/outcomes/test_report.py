"""The report on a run: its summary, its picture, its table, and the link to the latest run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from tests.fsm.traces import Run, version
from vime.eval.contracts import Outcome
from vime.eval.outcomes.report import link_latest, print_summary, summarize, write_report

pytestmark = pytest.mark.slow

POINT_KEYS = [
    "rollout_id",
    "state",
    "reason",
    "weight_version",
    "metrics",
    "lag_steps",
    "duration_s",
    "stall_s",
    "hf_dir",
    "canary",
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    directory = tmp_path / "runs" / "run-1"
    directory.mkdir(parents=True)
    run = Run(directory / "trace.jsonl")
    yield run
    run.trace.close()


def done(step: int, score: float, stall_s: float = 0.01) -> Outcome:
    metrics = {"eval/addition": score, "eval/addition/stderr": 0.02, "eval/step": float(step)}
    return Outcome(step, "done", None, None, version(step), metrics, 31, 4.2, stall_s)


def skipped(step: int, reason: str = "pin_violation") -> Outcome:
    metrics = {f"eval/skipped_{reason}": 1.0}
    return Outcome(step, "skipped", reason, "why", None, metrics, 5, 1.0, 0.02)


def live_through(run: Run, *outcomes: Outcome) -> None:
    """Write the records of points that came to these outcomes."""
    for outcome in outcomes:
        for trigger in ("dispatch", "export", "pin", "run"):
            run.fire("point", outcome.rollout_id, trigger)
        last = "finish" if outcome.state == "done" else "skip"
        detail = {"stall_s": outcome.stall_s}
        run.fire("point", outcome.rollout_id, last, 4.0, reason=outcome.reason, detail=detail)


def picture(run: Run) -> Image.Image:
    with Image.open(run.path.parent / "curve.png") as image:
        image.load()
        assert image.format == "PNG"
        return image.convert("RGB")


def num_pixels(image: Image.Image, colour: str) -> int:
    wanted = tuple(bytes.fromhex(colour.removeprefix("#")))
    return sum(count for count, pixel in image.getcolors(1 << 24) or [] if pixel == wanted)


# -- summary.json ----------------------------------------------------------------------------


def test_the_summary_has_exactly_the_documented_keys(run: Run) -> None:
    write_report(run.path.parent, "run-1", [done(0, 0.1), skipped(10)], 20, 40.0)
    summary = json.loads((run.path.parent / "summary.json").read_text())
    assert list(summary) == ["run_id", "points", "train_steps", "wall_s", "stall_share"]
    assert [list(point) for point in summary["points"]] == [POINT_KEYS, POINT_KEYS]
    assert summary["run_id"] == "run-1"
    assert summary["train_steps"] == 20
    assert summary["wall_s"] == 40.0


def test_a_point_of_the_summary_says_what_its_outcome_said(run: Run) -> None:
    outcome = done(10, 0.25)
    write_report(run.path.parent, "run-1", [outcome], 20, 40.0)
    (point,) = json.loads((run.path.parent / "summary.json").read_text())["points"]
    assert point == {key: getattr(outcome, key) for key in POINT_KEYS}


def test_what_was_written_is_returned(run: Run) -> None:
    returned = write_report(run.path.parent, "run-1", [done(0, 0.1), skipped(10)], 20, 40.0)
    assert returned == json.loads((run.path.parent / "summary.json").read_text())


def test_points_stand_in_the_order_of_their_steps_however_they_arrived() -> None:
    summary = summarize("run-1", [done(20, 0.3), skipped(0), done(10, 0.2)], 20, 40.0)
    assert [point["rollout_id"] for point in summary["points"]] == [0, 10, 20]


def test_the_stall_share_is_the_waits_of_all_points_over_the_time_of_training() -> None:
    outcomes = [done(0, 0.1, stall_s=1.0), done(10, 0.2, stall_s=2.98), skipped(20)]
    assert summarize("run-1", outcomes, 20, 40.0)["stall_share"] == pytest.approx(0.1)


def test_a_number_that_json_lacks_becomes_null(run: Run) -> None:
    write_report(run.path.parent, "run-1", [done(0, float("nan"))], 20, 40.0)
    (point,) = json.loads((run.path.parent / "summary.json").read_text())["points"]
    assert point["metrics"]["eval/addition"] is None


def test_a_baseline_and_step_0_are_told_apart(run: Run) -> None:
    outcomes = [replace(done(0, 0.1), hf_dir="/models/base"), done(0, 0.2)]
    summary = write_report(run.path.parent, "run-1", outcomes, 20, 40.0)
    assert [point["hf_dir"] for point in summary["points"]] == ["/models/base", None]
    text = io.StringIO()
    print_summary(summary, run.path.parent, Console(file=text, width=100))
    rows = [line.split()[:3] for line in text.getvalue().splitlines()[1:3]]
    assert rows[0] == ["0", "(base)", "0.100"]
    assert rows[1][:2] == ["0", "0.200"]
    write_report(run.path.parent, "run-1", outcomes[:1], 20, 40.0)
    assert picture(run).width > 1000


@pytest.mark.parametrize("wall_s", [0.0, -1.0, float("nan")])
def test_a_training_that_took_no_time_is_refused(wall_s: float) -> None:
    with pytest.raises(ValueError, match="wall_s"):
        summarize("run-1", [], 20, wall_s)


def test_a_report_replaces_the_one_before_and_leaves_nothing_else(run: Run) -> None:
    for score in (0.1, 0.2):
        write_report(run.path.parent, "run-1", [done(0, score)], 20, 40.0)
    names = sorted(path.name for path in run.path.parent.iterdir())
    assert names == ["curve.png", "summary.json", "trace.jsonl"]
    (point,) = json.loads((run.path.parent / "summary.json").read_text())["points"]
    assert point["metrics"]["eval/addition"] == 0.2


# -- curve.png -------------------------------------------------------------------------------


def test_the_picture_shows_the_curve_and_the_phases_of_each_point(run: Run) -> None:
    outcomes = [done(0, 0.1), done(10, 0.5), done(20, 0.9)]
    live_through(run, *outcomes)
    write_report(run.path.parent, "run-1", outcomes, 20, 40.0)
    image = picture(run)
    assert image.width > 1000
    for colour in ("#0072B2", "#56B4E9", "#E69F00", "#009E73"):
        assert num_pixels(image, colour) > 500, colour


def test_the_picture_grows_with_the_points_and_shows_how_long_training_waited(run: Run) -> None:
    outcomes = [done(0, 0.1)]
    live_through(run, *outcomes)
    write_report(run.path.parent, "run-1", outcomes, 20, 40.0)
    one = picture(run)
    more = [done(step, 0.5, stall_s=5.0) for step in range(10, 60, 10)]
    live_through(run, *more)
    write_report(run.path.parent, "run-1", [*outcomes, *more], 60, 40.0)
    six = picture(run)
    assert six.height > one.height
    assert num_pixels(six, "#D55E00") > num_pixels(one, "#D55E00") + 500


def test_a_run_without_a_trace_or_without_a_score_still_gets_its_picture(
    run: Run, tmp_path: Path
) -> None:
    write_report(tmp_path, "run-1", [done(0, 0.1)], 20, 40.0)
    assert (tmp_path / "curve.png").stat().st_size > 5000
    live_through(run, skipped(0))
    write_report(run.path.parent, "run-1", [skipped(0), done(5, float("nan"))], 20, 40.0)
    assert picture(run).width > 1000


# -- runs/latest -----------------------------------------------------------------------------


def test_the_report_is_found_under_runs_latest(run: Run) -> None:
    write_report(run.path.parent, "run-1", [done(0, 0.1)], 20, 40.0)
    latest = run.path.parent.parent / "latest"
    assert json.loads((latest / "summary.json").read_text())["run_id"] == "run-1"


def test_the_link_moves_to_a_later_run_and_needs_no_absolute_path(run: Run) -> None:
    runs = run.path.parent.parent
    later = runs / "run-2"
    later.mkdir()
    link_latest(run.path.parent)
    link_latest(later)
    assert (runs / "latest").readlink() == Path("run-2")
    assert sorted(path.name for path in runs.iterdir()) == ["latest", "run-1", "run-2"]


def test_what_is_called_latest_and_is_no_link_stays(run: Run) -> None:
    latest = run.path.parent.parent / "latest"
    latest.mkdir()
    link_latest(run.path.parent)
    assert not latest.is_symlink()


def test_no_link_is_left_beside_a_run_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    link_latest(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# -- the table -------------------------------------------------------------------------------


def printed(*outcomes: Outcome, width: int = 100) -> str:
    file = io.StringIO()
    summary = summarize("run-1", outcomes, 20, 40.0)
    print_summary(summary, Path("runs/run-1"), Console(file=file, width=width))
    return file.getvalue()


def test_the_table_has_step_score_lag_duration_and_stall_of_each_point() -> None:
    lines = printed(done(0, 0.125), done(10, 0.5)).splitlines()
    assert lines[0].split() == ["step", "score", "lag", "in", "steps", "duration", "stall"]
    assert lines[1].split() == ["0", "0.125", "31", "4.2", "s", "10", "ms"]
    assert lines[2].split() == ["10", "0.500", "31", "4.2", "s", "10", "ms"]


def test_the_table_names_the_reason_of_a_skipped_point_and_shows_no_markup() -> None:
    assert "skipped: pin_violation" in printed(skipped(10))
    assert "skipped: my_[bold]reason" in printed(skipped(10, "my_[bold]reason"))


def test_the_table_ends_with_the_share_of_time_and_where_the_files_are() -> None:
    text = printed(done(0, 0.1, stall_s=1.0))
    assert "held up by evaluation for 2.50% of its wall time" in text
    assert "runs/run-1/summary.json" in text
    assert "runs/run-1/curve.png" in text


def test_a_point_with_several_eval_sets_shows_each_score() -> None:
    outcome = done(0, 0.125)
    outcome.metrics["eval/words"] = 0.75
    assert "addition 0.125  words 0.750" in printed(outcome)
