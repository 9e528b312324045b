"""The example goes on after a crash: training exactly, and its evaluations with it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import arithmetic
import demo_staging
import grpo
import pytest
import torch
import train
from training_state import Progress, load_state, save_state

from vime.eval import ConfigError

pytestmark = pytest.mark.slow

EXAMPLES = Path(train.__file__).parent

#: Runs train.py, but is killed where it would save the state of a step.
DIES = """
import os, signal, sys
import test_example_resume as here
save = here.train.save_state
def dies(run_dir, trainer, progress):
    if progress.step == here.KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    save(run_dir, trainer, progress)
here.train.save_state = dies
here.grpo.accuracy = here.size
sys.exit(here.train.main(sys.argv[1:]))
"""
KILLED_AT = 6


def size(model: Any, tokenizer: Any, sums: Any) -> float:
    """A score that tells any two weights apart, which the accuracy of a beginner does not."""
    return sum(tensor.double().abs().sum().item() for tensor in model.state_dict().values())


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quiet_signals() -> Any:
    """The signal handlers as they were, afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def new_trainer() -> tuple[grpo.Trainer, Any]:
    tokenizer = arithmetic.build_tokenizer()
    model = arithmetic.build_model(tokenizer, 0)
    sums, _ = arithmetic.training_and_held_out()
    return grpo.Trainer(model, tokenizer, sums, grpo.Settings(), seed=0), model


def test_training_that_goes_on_from_its_state_is_that_which_was_never_interrupted(
    tmp_path: Path,
) -> None:
    torch.manual_seed(5)
    trainer, undisturbed = new_trainer()
    rewards = [trainer.step() for _ in range(2)]
    save_state(tmp_path, trainer, Progress(2, 1.5))
    rewards += [trainer.step() for _ in range(3)]
    torch.manual_seed(99)
    again, resumed = new_trainer()
    assert load_state(tmp_path, again) == Progress(2, 1.5)
    assert [again.step() for _ in range(3)] == rewards[2:]
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_what_was_never_saved_is_begun_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    trainer, _ = new_trainer()
    assert load_state(tmp_path, trainer) == Progress(0, 0.0)
    (tmp_path / "training_state.pt").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"training_state.pt cannot be gone on from"):
        load_state(tmp_path, trainer)


def scores(run_dir: Path) -> dict[tuple[int, bool], float]:
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        (point["rollout_id"], point["hf_dir"] is not None): point["metrics"]["eval/addition"]
        for point in summary["points"]
    }


def test_a_resumed_run_has_the_learning_curve_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_signals: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "accuracy", size)
    flags = ["--demo", "shared", "--steps", "10", "--eval-interval", "2"]
    assert train.main([*flags, "--eval-run-dir", "whole"]) == 0
    paths = [str(Path(__file__).parent), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    died = subprocess.run(
        [sys.executable, "-c", DIES, *flags, "--eval-run-dir", "died"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert train.main(["--resume", str(tmp_path / "died")]) == 0
    curve = scores(tmp_path / "whole")
    assert len(set(curve.values())) == len(curve) == 6
    assert scores(tmp_path / "died") == curve
    lines = (tmp_path / "died" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(curve), "each is reported once"
    summary = json.loads((tmp_path / "died" / "summary.json").read_text())
    assert (summary["train_steps"], summary["wall_s"] > 0) == (10, True)


def test_a_directory_without_a_run_cannot_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_signals: None
) -> None:
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert "no run to go on with" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_demo_has_the_staging_directory_that_it_had(tmp_path: Path) -> None:
    directory = tmp_path / "vime-demo-0-x"
    args = argparse.Namespace(
        demo="fleet", eval_hf_dir=str(directory), staging_is_ours=True, resume="RUN"
    )
    directory.mkdir()
    (directory / "step_1").mkdir()
    with demo_staging.staging(args):
        assert (directory / "step_1").exists()
        with (
            pytest.raises(ConfigError, match="--resume RUN: that run is alive"),
            demo_staging.staging(args),
        ):
            raise AssertionError("it is held")
        assert (directory / "step_1").exists()
    assert not directory.exists()
