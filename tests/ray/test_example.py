"""``make demo-ray``, shortened: its evidence is whole, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray_train
import train

from tests.ray.clusters import problems

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Everything that has this in its environment: the demo, and whatever it started."""
    found = []
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(variable) == value:
            found.append(process)
    return found


def test_the_demo_trains_and_evaluates_in_three_regions_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    words = ["--demo", "fleet", "--eval-num-gpus", "1", "--eval-run-dir", str(tmp_path / "run")]
    words += ["--steps", "20", "--eval-interval", "10"]
    done = subprocess.run(
        [sys.executable, ray_train.__file__, *words],
        cwd=tmp_path,
        env=os.environ | {"VIME_THIS_DEMO": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    points = {point["rollout_id"]: point for point in summary["points"]}
    assert {step: point["state"] for step, point in points.items()} == dict.fromkeys(
        (0, 10, 20), "done"
    )
    assert len({point["weight_version"] for point in points.values()}) == 3
    assert all("eval/addition" in point["metrics"] for point in points.values())
    assert summary["train_steps"] == 20
    assert (tmp_path / "run" / "curve.png").stat().st_size > 0
    assert problems(tmp_path / "run") == []
    _, alive = psutil.wait_procs(processes_with("VIME_THIS_DEMO", str(tmp_path)), timeout=20)
    assert not alive
    flags = json.loads((tmp_path / "run" / "flags.json").read_text())
    assert flags["eval_hf_dir"].startswith("/dev/shm/vime-demo-")
    assert not Path(flags["eval_hf_dir"]).exists()


def test_a_demo_that_is_ended_with_its_whole_group_leaves_nothing(tmp_path: Path) -> None:
    words = ["--demo", "fleet", "--eval-num-gpus", "1", "--eval-run-dir", str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, ray_train.__file__, *words],
        cwd=tmp_path,
        env=os.environ | {"VIME_THIS_DEMO": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        assert any("on Ray" in line for line in demo.stdout)  # its engine is being started
        started = processes_with("VIME_THIS_DEMO", str(tmp_path))
        flags = json.loads((tmp_path / "run" / "flags.json").read_text())
        directories = {process.environ().get("TMPDIR") for process in started} - {
            None,
            os.environ.get("TMPDIR"),
        }
        assert any(Path(str(directory), "ray").is_dir() for directory in directories)
        os.killpg(demo.pid, signal.SIGTERM)
        _, error = demo.communicate(timeout=120)
    assert demo.returncode == train.TERMINATED, error
    assert "Traceback" not in error
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    for directory in (flags["eval_hf_dir"], *directories):
        assert not Path(str(directory)).exists()
