"""A run goes on in the directory of one that was cut off, with what that one has left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.fsm.traces import Run
from tests.irregular import IRREGULAR, replace
from tests.programs.mortal import QuickFleet, opened, weight_of, write_checkpoint
from vime.eval import ConfigError
from vime.eval.contracts import Outcome
from vime.eval.snapshot.manifest import Manifest
from vime.fsm.check import check
from vime.fsm.lives import lives_of
from vime.fsm.read import next_seq, read_trace
from vime.fsm.why import stories

DEAD = "run-1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("run", "staging", "base"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "base", 0.75)
    return tmp_path


def left_snapshot(root: Path, step: int, run_id: str = DEAD) -> Manifest:
    directory = root / "staging" / f"step_{step}"
    directory.mkdir()
    write_checkpoint(directory, weight_of(step))
    manifest = Manifest.of_directory(directory, run_id, step)
    manifest.write(directory)
    return manifest


@pytest.fixture
def run(root: Path) -> Iterator[Run]:
    """The run that will have been cut off."""
    left = Run(root / "run" / "trace.jsonl", run_id=DEAD)
    yield left
    left.trace.close()


def metrics(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]


def resumed(root: Path, **flags: object) -> dict[int, Outcome]:
    with opened(root, 0, **flags) as dispatcher:
        return {outcome.rollout_id: outcome for outcome in dispatcher.drain()}


def test_a_point_with_a_whole_snapshot_is_evaluated_under_the_version_of_its_writer(
    root: Path,
    run: Run,
) -> None:
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "export")
    manifest = left_snapshot(root, 1)
    outcome = resumed(root)[1]
    assert (outcome.state, outcome.metrics["eval/sums"]) == ("done", weight_of(1))
    assert outcome.weight_version == manifest.weight_version
    assert [told["rollout_id"] for told in metrics(root)] == [1]


def test_a_point_without_one_is_skipped_as_crashed_with_its_cause(root: Path, run: Run) -> None:
    run.fire("point", 1, "dispatch")
    cause = run.fire("point", 1, "export")
    outcome = resumed(root)[1]
    assert (outcome.state, outcome.reason) == ("skipped", "crashed")
    assert f"run {DEAD} was cut off while it was exporting, and there is no whole" in str(
        outcome.detail
    )
    (story,) = stories(read_trace(root / "run"), ["point"], ["1"])
    said = [str(link) for link in story.chain]
    assert story.chain[2].record.seq == cause
    assert said[0].startswith("point 1 was skipped: crashed: run run-1 was cut off")
    assert said[1] == "point 1 was taken up again, which run run-1 had left"


@pytest.mark.parametrize("damage", ["foreign", "torn", "changed"])
def test_what_is_not_that_runs_whole_snapshot_is_not_evaluated(
    root: Path, run: Run, damage: str
) -> None:
    run.fire("point", 1, "dispatch")
    left_snapshot(root, 1, run_id="another" if damage == "foreign" else DEAD)
    directory = root / "staging" / "step_1"
    if damage == "torn":
        (directory / ".complete").unlink()
    if damage == "changed":
        write_checkpoint(directory, 0.0)
    outcome = resumed(root)[1]
    assert outcome.reason == ("snapshot_invalid" if damage == "changed" else "crashed")
    assert directory.exists() == (damage != "changed")


def test_an_end_that_was_not_reported_is_reported_now_and_one_that_was_is_not(
    root: Path, run: Run
) -> None:
    for step in (1, 2):
        run.fire("point", step, "dispatch")
        run.fire("point", step, "run")
        told = {
            "metrics": {"eval/sums": step / 10, "eval/none": None},
            "lag_steps": 3,
            "stall_s": 0.5,
        }
        run.fire("point", step, "finish", weight_version=f"v{step}", detail=told)
    assert set(resumed(root)) == {1, 2}
    first = metrics(root)
    assert [(t["rollout_id"], t["metrics"]["eval/sums"]) for t in first] == [(1, 0.1), (2, 0.2)]
    assert (first[0]["weight_version"], first[0]["lag_steps"], first[0]["stall_s"]) == (
        "v1",
        3,
        0.5,
    )
    lines = (root / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (root / "run" / "metrics.jsonl").write_bytes(lines[0] + lines[1][:20])
    heard: list[int] = []
    with opened(root, 0) as dispatcher:
        dispatcher.drain()
        heard += [outcome.rollout_id for outcome in dispatcher.outcomes]
    assert heard == [1, 2]
    assert metrics(root) == first


def test_dispatching_a_point_of_the_earlier_run_gives_its_outcome_and_evaluates_nothing(
    root: Path,
    run: Run,
) -> None:
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "run")
    run.fire("point", 1, "finish", detail={"metrics": {"eval/sums": 0.25}})
    run.fire("point", 2, "dispatch")
    left_snapshot(root, 2)
    with opened(root, 0) as dispatcher:
        first, second = dispatcher.dispatch(1), dispatcher.dispatch(2)
        assert first.state == "done"
        assert first.result().metrics["eval/sums"] == 0.25
        assert second.result(30).metrics["eval/sums"] == weight_of(2)
        dispatcher.dispatch(3)
        with pytest.raises(ValueError, match="dispatched already"):
            dispatcher.dispatch(1)
        assert [o.rollout_id for o in dispatcher.drain()] == [1, 2, 3]
    assert [told["rollout_id"] for told in metrics(root)] == [1, 2, 3]
    records = list(read_trace(root / "run"))
    assert list(check(records, ended=True)) == []
    assert sum(r.id == "1" and r.machine == "point" for r in records) == 3


def test_a_given_checkpoint_is_evaluated_again_or_missed(root: Path, run: Run) -> None:
    run.fire("point", "hf:0", "dispatch", detail={"hf_dir": str(root / "base")})
    run.fire("point", "hf:7", "dispatch", detail={"hf_dir": str(root / "gone")})
    outcomes = resumed(root)
    assert outcomes[0].metrics["eval/sums"] == 0.75
    assert outcomes[7].reason == "crashed"
    assert str(outcomes[7].detail).endswith(f"{root / 'gone'} is not there any more")
    assert (root / "base").is_dir()


def test_more_points_than_the_window_now_allows_are_taken_up_one_after_the_other(
    root: Path,
    run: Run,
) -> None:
    for step in (1, 2, 4):
        run.fire("point", step, "dispatch")
        left_snapshot(root, step)
    outcomes = resumed(root, eval_max_in_flight=1)
    assert {step: o.state for step, o in outcomes.items()} == dict.fromkeys((1, 2, 4), "done")
    assert list(check(read_trace(root / "run"), ended=True)) == []


def test_the_numbers_go_on_without_a_gap_after_a_torn_line_and_the_first_record_names_the_run(
    root: Path,
    run: Run,
) -> None:
    run.fire("point", 1, "dispatch")
    run.trace.close()
    path = root / "run" / "trace.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema":1,"table_ha')
    resumed(root)
    trace = read_trace(path)
    records = list(trace)
    assert trace.problems == []
    assert [r.seq for r in records] == list(range(next_seq(path)))
    assert (records[1].detail or {})["continues"] == DEAD
    assert all("continues" not in (r.detail or {}) for r in records[2:])


def test_what_a_dead_run_has_half_written_is_swept_and_what_nobody_needs_is_kept_within_the_limit(
    root: Path,
    run: Run,
) -> None:
    run.fire("point", 9, "dispatch")
    for step in (1, 2, 9):
        left_snapshot(root, step)
    room = root / "staging" / f".vime-{DEAD}"
    (room / "step_10.0").mkdir(parents=True)
    owner = {"schema": 1, "run_id": DEAD, "pid": 1, "host": "h"}
    (room / "owner.json").write_text(json.dumps(owner))
    assert resumed(root)[9].state == "done"
    assert [path.name for path in (root / "staging").iterdir()] == ["step_9"]


def test_what_was_taken_up_is_shown_as_one_life_with_what_it_was_before(
    root: Path, run: Run
) -> None:
    run.fire("point", 1, "dispatch")
    run.fire("point", 1, "export", 1)
    left_snapshot(root, 1)
    run.fire("engine", "eval-0", "start", 5)
    resumed(root)
    lives = lives_of(read_trace(root / "run"))
    (point,) = lives.of("point")
    assert [span.state for span in point.spans] == [
        "queued", "exporting", "queued", "pinning", "running",
    ]  # fmt: skip
    assert [span.dwell_ns / 1e9 for span in point.spans[:2]] == [1, 5]
    assert (point.state, point.attempt) == ("done", 1)
    (engine,) = lives.of("engine")
    assert (engine.state, engine.spans[0].state) == ("stopped", "starting")


def test_what_was_left_waits_for_the_engines_and_its_deadlines_begin_then(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.fire("point", 1, "dispatch")
    left_snapshot(root, 1)
    seen: list[str] = []

    async def late(fleet: QuickFleet) -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        seen.extend(record.trigger for record in read_trace(root / "run"))

    monkeypatch.setattr(QuickFleet, "wait_ready", late)
    with opened(root, 0) as dispatcher:
        dispatcher._parts.prepared.set()  # there is no runner that would
        assert dispatcher.dispatch(1).result(30).state == "done"
    assert "inherit" not in seen
    assert seen.count("dispatch") == 2


def test_a_fleet_that_never_comes_costs_what_was_left_no_more_than_its_pin(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.fire("point", 1, "dispatch")
    left_snapshot(root, 1)

    async def never(fleet: QuickFleet) -> None:
        raise RuntimeError("no engine could start")

    monkeypatch.setattr(QuickFleet, "wait_ready", never)
    assert resumed(root)[1].state == "done", "its pin decides"


# -- what is refused -----------------------------------------------------------------------------


def test_a_directory_with_a_run_in_it_is_refused_unless_one_asks_to_go_on(
    root: Path, run: Run
) -> None:
    run.fire("point", 1, "dispatch")
    with pytest.raises(ConfigError, match=r"another run wrote there already; .*--eval-resume"):
        resumed(root, eval_resume=False)


def test_with_no_run_there_it_begins_one(root: Path) -> None:
    with opened(root, 0) as dispatcher:
        dispatcher.dispatch(1)
    assert metrics(root)[0]["metrics"]["eval/sums"] == weight_of(1)
    assert "continues" not in (next(iter(read_trace(root / "run"))).detail or {})


def test_a_live_run_keeps_its_directory_and_is_named(root: Path) -> None:
    with opened(root, 0) as dispatcher:
        dispatcher.dispatch(1)
        with pytest.raises(ConfigError, match=rf"the live run {dispatcher.run_id} \(pid \d+ on"):
            resumed(root, eval_hf_dir=str(root / "elsewhere"))
    assert resumed(root)[1].state == "done"


@pytest.mark.parametrize("content", [b"precious", b'{"a": 1}\n', b"\x00" * 100])
def test_what_is_no_trace_is_refused_and_not_touched(root: Path, content: bytes) -> None:
    path = root / "run" / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not empty and no trace"):
        resumed(root)
    assert path.read_bytes() == content
    assert [p.name for p in (root / "run").iterdir()] == ["trace.jsonl"]


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["trace.jsonl", "metrics.jsonl"])
def test_what_is_no_file_in_the_place_of_one_is_refused_and_not_waited_for(
    root: Path, run: Run, name: str, resume: bool, kind: str
) -> None:
    run.fire("point", 1, "dispatch")
    if not resume:
        (root / "run" / "trace.jsonl").unlink()
    replace(root / "run" / name, kind)
    is_there = name == "trace.jsonl" and not resume  # whatever it is, a run may be in it
    with pytest.raises(ConfigError) as caught:
        resumed(root, eval_resume=resume)
    expected = "another run wrote there already" if is_there else f"{name}: no regular file"
    assert expected in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"sch', b'{"schema":1,"table_hash":"a0'])
def test_a_run_that_was_killed_in_its_first_write_is_begun_again(
    root: Path, content: bytes
) -> None:
    (root / "run" / "trace.jsonl").write_bytes(content)
    with opened(root, 0) as dispatcher:
        dispatcher.dispatch(1)
    trace = read_trace(root / "run")
    assert next(iter(trace)).seq == 0
    assert trace.problems == []


def test_a_resume_needs_to_know_of_which_directory(root: Path) -> None:
    with pytest.raises(ConfigError, match="--eval-resume: --eval-run-dir is missing"):
        resumed(root, eval_run_dir=None)
