from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.eval.contracts import Outcome
from vime.eval.outcomes import trackers as tracker_classes
from vime.eval.outcomes import tracking
from vime.eval.outcomes.tracking import (
    CallableTracker,
    JsonLinesTracker,
    MlflowTracker,
    TensorBoardTracker,
    Trackers,
    WandbTracker,
    as_tracker,
)

pytestmark = pytest.mark.slow


def outcome(step: int, **metrics: float) -> Outcome:
    named = {f"eval/{name}": value for name, value in metrics.items()}
    return Outcome(step, "done", None, None, f"run:{step}:abc", named, 2, 1.5, 0.25)


class Recorder:
    """A tracker that remembers; it waits for `gate` where there is one, and fails on demand."""

    def __init__(self, gate: threading.Event | None = None, fails: bool = False) -> None:
        self.gate = gate
        self.fails = fails
        self.entered = threading.Event()
        self.steps: list[int] = []
        self.closed = 0

    def log(self, outcome: Outcome) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        if self.fails:
            raise OSError(28, "No space left on device")
        self.steps.append(outcome.rollout_id)

    def close(self) -> None:
        self.closed += 1


# -- JSON lines --------------------------------------------------------------------------------


def test_a_json_line_holds_every_field_of_its_outcome(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    sent = [outcome(2, toy=0.5), outcome(1, toy=0.25)]
    for one in sent:
        tracker.log(one)
    tracker.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [asdict(o) for o in sent]


def test_a_line_that_an_earlier_run_tore_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rollout_id": 1}\n{"rollout_')
    tracker = JsonLinesTracker(path)
    tracker.log(outcome(2))
    tracker.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"rollout_'
    assert json.loads(lines[2])["rollout_id"] == 2


def test_a_directory_that_cannot_be_written_is_an_error_of_the_first_outcome(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    tracker = JsonLinesTracker(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(OSError, match="file"):
        tracker.log(outcome(1))
    tracker.close()


# -- TensorBoard -------------------------------------------------------------------------------


def test_tensorboard_has_each_scalar_at_its_own_step_whenever_it_came(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path / "tb")
    for step, value in ((20, 0.75), (10, 0.5), (30, 1.0)):
        tracker.log(outcome(step, toy=value))
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["tensors"] == ["eval/toy"]
    points = {e.step: e.tensor_proto.float_val[0] for e in events.Tensors("eval/toy")}
    assert points == {10: 0.5, 20: 0.75, 30: 1.0}


def test_tensorboard_never_mixes_a_baseline_up_with_step_0(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path / "tb")
    for one in (replace(outcome(0, toy=0.25), hf_dir="/models/base"), outcome(0, toy=0.5)):
        tracker.log(one)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = {
        tag: [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert found == {"eval_base/toy": [(0, 0.25)], "eval/toy": [(0, 0.5)]}


def test_tensorboard_that_never_had_an_outcome_writes_nothing(tmp_path: Path) -> None:
    TensorBoardTracker(tmp_path / "tb").close()
    assert not (tmp_path / "tb").exists()


# -- wandb -------------------------------------------------------------------------------------

WANDB_PROGRAM = """
import sys, wandb
from dataclasses import replace
from tests.outcomes.test_tracking import outcome
from vime.eval.outcomes.tracking import WandbTracker
options = dict(project="p", mode="offline", dir=sys.argv[1],
               settings=wandb.Settings(silent=True, console="off"))
training = wandb.init(**options)  # the run of the training loop in the same process
tracker = WandbTracker(**options)
tracker.log(replace(outcome(0, toy=0.25), hf_dir="/models/base"))
tracker.log(outcome(20, toy=0.75))
tracker.log(outcome(10, toy=0.5, rare=0.125))
training.log({"loss": 1.0}, step=7)
assert tracker._run.id != training.id
tracker.close()
training.finish()
"""


def wandb_runs(directory: Path) -> list[list[Any]]:
    """The protobuf records of each offline run below ``directory``."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    return [
        [wandb_internal_pb2.Record.FromString(data) for data in log_records(file.read_bytes())]
        for file in files
    ]


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, which is what wandb writes after a header of 7 bytes.

    Blocks of 32 KiB hold fragments: checksum (4 bytes), length (2), kind (1: whole, 2: first,
    3: middle, 4: last), payload.
    """
    block, header, position, parts = 32768, 7, 7, b""
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        start = position + header
        parts += data[start : start + length]
        position = start + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_plots_against_eval_step_and_its_summary_is_of_the_newest_step(
    tmp_path: Path,
) -> None:
    subprocess.run(
        [sys.executable, "-c", WANDB_PROGRAM, str(tmp_path)],
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    runs = wandb_runs(tmp_path)
    assert len(runs) == 2
    (ours,) = [run for run in runs if "eval/toy" in str(run)]
    (theirs,) = [run for run in runs if run is not ours]
    assert [values(r.history.item)["loss"] for r in theirs if r.HasField("history")] == [1.0]

    base, *history = [values(r.history.item) for r in ours if r.HasField("history")]
    assert (base["eval/step"], base["eval_base/toy"]) == (0, 0.25)
    assert "eval/toy" not in base
    assert [(row["eval/step"], row["eval/toy"]) for row in history] == [(20, 0.75), (10, 0.5)]
    metrics = {
        (r.metric.name or r.metric.glob_name): r.metric for r in ours if r.HasField("metric")
    }
    assert metrics["eval/*"].step_metric == metrics["eval_base/*"].step_metric == "eval/step"
    assert metrics["eval/*"].summary.none  # wandb's own would be the value that came last
    summary: dict[str, Any] = {}
    for record in ours:
        if record.HasField("summary"):
            summary |= values(record.summary.update)
    assert {k: v for k, v in summary.items() if k.startswith("eval")} == {
        "eval_base/toy": 0.25,
        "eval/toy": 0.75,
        "eval/rare": 0.125,
        "eval/step": 20,
    }


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_takes_a_run_or_arguments_for_one() -> None:
    with pytest.raises(ValueError, match=r"both run=.*project"):
        WandbTracker(run=object(), project="p")


# -- MLflow ------------------------------------------------------------------------------------

MLFLOW_PROGRAM = """
import json, sys
from dataclasses import replace
from mlflow.tracking import MlflowClient
from tests.outcomes.test_tracking import outcome
from vime.eval.outcomes.tracking import MlflowTracker

uri = "file://" + sys.argv[1]
tracker = MlflowTracker(tracking_uri=uri, run_name="ours")
tracker.log(replace(outcome(0, toy=0.0), hf_dir="/models/base"))
tracker.log(outcome(20, toy=0.75, **{"a/b@5": 1.0}))
tracker.log(outcome(10, toy=0.5, rare=0.125))
tracker.close()

client = MlflowClient(tracking_uri=uri)
(run,) = client.search_runs([client.get_experiment_by_name("vime").experiment_id])
finished = run.info.status
shared = MlflowTracker(run.info.run_id, tracking_uri=uri)
client.update_run(run.info.run_id, status="RUNNING")
shared.log(outcome(30, toy=0.25))
shared.close()
run = client.get_run(run.info.run_id)
history = client.get_metric_history(run.info.run_id, "eval/toy")
print(json.dumps({
    "name": run.info.run_name,
    "status": [finished, run.info.status],
    "latest": run.data.metrics,
    "history": [[m.step, m.value] for m in history],
}))
"""


def test_mlflow_has_each_metric_at_its_own_step_and_the_newest_as_the_latest(
    tmp_path: Path,
) -> None:
    out = subprocess.run(
        [sys.executable, "-c", MLFLOW_PROGRAM, str(tmp_path / "store")],
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"},
        stdout=subprocess.PIPE,
        timeout=100,
    )
    found = json.loads(out.stdout)
    assert found["history"] == [[20, 0.75], [10, 0.5], [30, 0.25]]
    assert found["latest"] == {
        "eval/toy": 0.25,
        "eval/rare": 0.125,
        "eval/a/b_5": 1.0,
        "eval/step": 30.0,
        "eval_base/toy": 0.0,
    }
    assert found["name"] == "ours"
    # A run of its own is finished; one that it was given is not its to finish.
    assert found["status"] == ["FINISHED", "RUNNING"]


def test_mlflow_begins_nothing_before_the_first_outcome(tmp_path: Path) -> None:
    tracker = MlflowTracker(tracking_uri=f"file://{tmp_path}")
    tracker.close()
    assert list(tmp_path.iterdir()) == []


# -- what users pass ---------------------------------------------------------------------------


def test_a_tracker_a_callable_and_a_name_are_trackers(tmp_path: Path) -> None:
    mine = Recorder()
    assert as_tracker(mine) is mine
    seen: list[Outcome] = []
    as_tracker(SimpleNamespace(log=seen.append)).log(outcome(3))  # it has nothing to close
    assert [o.rollout_id for o in seen] == [3]
    seen.clear()
    called = as_tracker(seen.append)
    assert isinstance(called, CallableTracker)
    called.log(outcome(3))
    called.close()
    assert [o.rollout_id for o in seen] == [3]
    jsonl = as_tracker("jsonl", tmp_path)
    assert isinstance(jsonl, JsonLinesTracker)
    assert jsonl.path == tmp_path / "metrics.jsonl"
    assert isinstance(as_tracker("tensorboard", tmp_path), TensorBoardTracker)
    assert isinstance(as_tracker("wandb", tmp_path), WandbTracker)
    assert isinstance(as_tracker("mlflow", tmp_path), MlflowTracker)


@pytest.mark.parametrize("wrong", ["neptune", 3, None, Recorder, {"log": 1}])
def test_anything_else_is_refused_with_what_was_expected(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .*jsonl, tensorboard, wandb, mlflow"):
        as_tracker(wrong)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_named_tracker_without_its_package_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_classes.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"pip install 'vime\[{name}\]'"):
        as_tracker(name)


# -- several at once ---------------------------------------------------------------------------


def test_every_tracker_gets_every_outcome_in_order_and_is_closed_once() -> None:
    recorders = [Recorder(), Recorder()]
    trackers = Trackers(recorders)
    for step in (3, 1, 2):
        trackers.log(outcome(step))
    trackers.close(10)
    trackers.close(10)
    assert [r.steps for r in recorders] == [[3, 1, 2]] * 2
    assert [r.closed for r in recorders] == [1, 1]
    with pytest.raises(RuntimeError, match="outcome of step 4 came after"):
        trackers.log(outcome(4))


def test_a_tracker_is_called_on_a_thread_of_its_own() -> None:
    threads: list[threading.Thread] = []
    trackers = Trackers([CallableTracker(lambda _: threads.append(threading.current_thread()))])
    trackers.log(outcome(1))
    trackers.log(outcome(2))
    trackers.close(10)
    assert threading.main_thread() not in threads
    assert threads[0] is threads[1]


def test_a_tracker_that_fails_is_logged_once_and_slows_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, good = Recorder(fails=True), Recorder()
    trackers = Trackers([failing, good])
    for step in range(5):
        trackers.log(outcome(step))
    assert trackers.flush(10)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "tracker Recorder[0] failed at step 0: OSError: [Errno 28] No space" in warnings[0]
    trackers.close(10)
    assert good.steps == [0, 1, 2, 3, 4]
    assert caplog.records[-1].getMessage() == "tracker Recorder[0] failed 5 times"


def test_a_tracker_that_raises_system_exit_still_gets_the_next_outcome() -> None:
    seen: list[int] = []

    def exits(outcome: Outcome) -> None:
        seen.append(outcome.rollout_id)
        raise SystemExit(1)

    trackers = Trackers([CallableTracker(exits)])
    trackers.log(outcome(1))
    trackers.log(outcome(2))
    trackers.close(10)
    assert seen == [1, 2]


def test_a_tracker_that_blocks_holds_neither_the_others_nor_the_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    blocked, good = Recorder(gate), Recorder()
    trackers = Trackers([blocked, good])
    try:
        trackers.log(outcome(1))
        trackers.log(outcome(2))
        assert blocked.entered.wait(10)
        assert not trackers.flush(0.01)
        assert "tracker Recorder[0] is not done after 0.01 s: 2 outcomes wait" in caplog.text
        trackers.close(0.01)
        assert "Recorder[0] did not close within 0.01 s: 2 outcomes were not rec" in caplog.text
        assert "Recorder[1]" not in caplog.text
    finally:
        gate.set()
    for lane in trackers._lanes:
        lane.thread.join(10)
    assert good.steps == blocked.steps == [1, 2]


def test_a_tracker_that_was_waited_for_in_vain_does_not_hold_up_the_close_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "LATE_TRACKER_S", 0.0)
    gate = threading.Event()
    trackers = Trackers([Recorder(gate)])
    trackers.log(outcome(1))
    assert not trackers.flush(0.01)
    trackers.close(1e6)  # it returns
    gate.set()


def test_a_tracker_that_is_slow_is_reported_once_while_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "SLOW_TRACKER_S", 0.0)
    gate = threading.Event()
    blocked = Recorder(gate)
    trackers = Trackers([blocked])
    try:
        trackers.log(outcome(1))
        assert blocked.entered.wait(10)
        trackers.log(outcome(2))
        trackers.log(outcome(3))
    finally:
        gate.set()
    trackers.close(10)
    assert caplog.text.count("has worked on one outcome for more than") == 1
    assert blocked.steps == [1, 2, 3]


def test_no_trackers_are_fine() -> None:
    trackers = Trackers()
    trackers.log(outcome(1))
    assert trackers.flush(1)
    trackers.close(1)
