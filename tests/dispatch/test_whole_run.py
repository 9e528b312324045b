"""Whole runs with the real store, the real runner process and a user's backend; no engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.programs.driver import namespace
from vime.eval import ConfigError, EvalDispatcher
from vime.eval.contracts import Outcome
from vime.eval.snapshot.staging import Staging

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model_and_tokenizer(checkpoints: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = checkpoints / "base"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(base)


def set_norm(model: Any, value: float) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(value)


def test_each_score_is_that_of_the_weights_at_dispatch_and_training_goes_on(
    tmp_path: Path, checkpoints: Path, model_and_tokenizer: tuple[Any, Any]
) -> None:
    args = namespace(str(tmp_path / "run"), str(tmp_path / "staging"), str(checkpoints / "base"))
    model, _ = model_and_tokenizer
    with EvalDispatcher.from_args(args, exporter=model_and_tokenizer) as dispatcher:
        dispatcher.dispatch(0, hf_dir=checkpoints / "base")
        for step in range(1, 5):
            set_norm(model, step)
            dispatcher.dispatch(step, force=step == 4)
            set_norm(model, -1)  # training overwrites the weights at once
        outcomes = dispatcher.drain()
        scores = {o.rollout_id: o.metrics["eval/norm"] for o in outcomes}
    assert scores == {0: 1.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert len({o.weight_version for o in outcomes}) == 5
    assert sorted(p.name for p in (tmp_path / "staging").glob("step_*")) == ["step_3", "step_4"]
    assert (checkpoints / "base").is_dir()


def test_what_a_backend_does_wrong_costs_its_point_only(
    tmp_path: Path, checkpoints: Path, model_and_tokenizer: tuple[Any, Any]
) -> None:
    args = namespace(
        str(tmp_path / "run"), str(tmp_path / "staging"), str(checkpoints / "base"),
        die_at=1, hang_at=2, skip_at=3, eval_timeout=10.0, eval_max_in_flight=4,
    )  # fmt: skip
    model, _ = model_and_tokenizer
    set_norm(model, 4)
    with EvalDispatcher.from_args(args, exporter=model_and_tokenizer) as dispatcher:
        for step in range(1, 5):
            dispatcher.dispatch(step)
        outcomes = {o.rollout_id: o for o in dispatcher.drain()}
    assert [outcomes[n].reason for n in range(1, 5)] == [
        "crashed", "timeout_eval", "service_away", None,
    ]  # fmt: skip
    assert outcomes[4].metrics["eval/norm"] == 4.0


def test_a_users_export_function_makes_snapshots_too(tmp_path: Path, checkpoints: Path) -> None:
    def export(rollout_id: int, directory: Path) -> None:
        if rollout_id == 2:
            raise OSError("rank 3 is gone")
        shutil.copytree(checkpoints / "whole", directory, dirs_exist_ok=True)

    args = namespace(str(tmp_path / "run"), str(tmp_path / "staging"), str(checkpoints / "base"))
    with EvalDispatcher.from_args(args, exporter=export) as dispatcher:
        dispatcher.dispatch(1)
        dispatcher.dispatch(2)
        outcomes = {o.rollout_id: o for o in dispatcher.drain()}
    assert outcomes[1].metrics["eval/norm"] == 1.0
    assert outcomes[2].reason == "export_failed"
    assert "rank 3 is gone" in str(outcomes[2].detail)


def test_a_staging_directory_in_use_is_refused_by_name(
    tmp_path: Path, checkpoints: Path, model_and_tokenizer: tuple[Any, Any]
) -> None:
    words = (str(tmp_path / "staging"), str(checkpoints / "base"))
    first = namespace(str(tmp_path / "a"), *words)
    second = namespace(str(tmp_path / "b"), *words)
    with (
        EvalDispatcher.from_args(first, exporter=model_and_tokenizer),
        pytest.raises(ConfigError, match="staging"),
    ):
        EvalDispatcher.from_args(second, exporter=model_and_tokenizer)


def test_a_staging_directory_that_can_never_hold_the_snapshots_is_refused_at_start(
    tmp_path: Path, checkpoints: Path, model_and_tokenizer: tuple[Any, Any]
) -> None:
    args = namespace(
        str(tmp_path / "run"), str(tmp_path / "staging"), str(checkpoints / "base"),
        eval_keep_snapshots=2**31 - 1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"--eval-hf-dir .* are needed"):
        EvalDispatcher.from_args(args, exporter=model_and_tokenizer)


def test_a_staging_directory_that_is_removed_under_a_run_costs_no_later_point(
    tmp_path: Path, checkpoints: Path, model_and_tokenizer: tuple[Any, Any]
) -> None:
    staging, base = tmp_path / "staging", str(checkpoints / "base")
    args = namespace(str(tmp_path / "run"), str(staging), base)
    model, _ = model_and_tokenizer
    with EvalDispatcher.from_args(args, exporter=model_and_tokenizer) as dispatcher:

        def outcome(step: int) -> Outcome:
            set_norm(model, step)
            return dispatcher.dispatch(step).result(60)

        assert outcome(1).metrics["eval/norm"] == 1.0
        shutil.rmtree(staging)
        assert outcome(2).metrics["eval/norm"] == 2.0
        shutil.rmtree(staging)
        other = Staging(staging, "run-other")
        other.open()
        for step in (3, 4):
            lost = outcome(step)
            assert lost.reason == "export_failed"
            assert f"--eval-hf-dir {staging}: it was removed" in str(lost.detail)
            assert "the live run run-other (pid" in str(lost.detail)
        other.close()
        assert outcome(5).metrics["eval/norm"] == 5.0
        dispatcher.drain()
    assert [path.name for path in staging.iterdir()] == ["step_5"]


@pytest.fixture
def driver(tmp_path: Path, checkpoints: Path) -> Iterator[subprocess.Popen[str]]:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    words = [str(tmp_path / "run"), str(tmp_path / "staging"), str(checkpoints / "base"), str(fifo)]
    program = [sys.executable, "-m", "tests.programs.driver", *words]
    with subprocess.Popen(program, cwd=ROOT, text=True,
                          stderr=subprocess.PIPE, start_new_session=True) as process:  # fmt: skip
        assert fifo.read_text() == "hanging"
        yield process
        process.kill()


def last_states(run_dir: Path) -> dict[str, str]:
    records = map(json.loads, (run_dir / "trace.jsonl").read_text().splitlines())
    return {r["id"]: r["dest"] for r in records if r["machine"] == "point"}


def test_nothing_of_a_run_is_alive_after_its_driver_was_killed(
    driver: subprocess.Popen[str],
) -> None:
    below = psutil.Process(driver.pid).children(recursive=True)
    assert below, "the runner's process is there"
    os.kill(driver.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive


def test_ctrl_c_shows_the_interrupt_and_leaves_nothing(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    below = psutil.Process(driver.pid).children(recursive=True)
    os.kill(driver.pid, signal.SIGINT)
    _, errors = driver.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    assert last_states(tmp_path / "run") == {"1": "skipped"}
    assert not list((tmp_path / "staging").glob(".*tmp*"))
