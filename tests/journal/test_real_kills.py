"""The demo with real engines, killed at chosen moments and resumed each time.

Every kill costs a start of the engines. ``make test-real`` kills once, ``make kills`` five times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import arithmetic
import grpo
import psutil
import pytest
import torch

from vime.eval.rerun import rerun
from vime.eval.snapshot.manifest import Manifest
from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.fsm.replay import replay

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL = 60, 10

#: Where the driver is killed, one run after the other, and the points that this costs: those
#: that had no whole snapshot.
MOMENTS: tuple[tuple[str, set[int]], ...] = (
    ("point:10:run", set()),
    ("engine:*:pin", set()),
    ("snapshot:step_30:write", {30}),
    ("point:40:finish", set()),
    ("snapshot:step_50:seal", set()),
)
NUM_KILLS = int(os.environ.get("VIME_REAL_KILLS", "1"))

pytestmark = [pytest.mark.real, pytest.mark.timeout(300 * (1 + NUM_KILLS))]


def undisturbed(root: Path) -> dict[int, tuple[str, float]]:
    """Step → digest of its weights and their accuracy, of training that nothing has killed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = arithmetic.build_tokenizer()
    sums, held_out = arithmetic.training_and_held_out()
    model = arithmetic.build_model(tokenizer, 0)
    trainer = grpo.Trainer(model, tokenizer, sums, grpo.Settings(), 0)
    found = {}
    for step in range(STEPS + 1):
        if step:
            trainer.step()
        if step % INTERVAL == 0:
            model.save_pretrained(root / str(step))
            digest = Manifest.of_directory(root / str(step), "run", step, owned=False).digest
            found[step] = digest[:12], grpo.accuracy(model, tokenizer, held_out)
    torch.set_num_threads(before)
    return found


def drive(moment: str, *flags: str, where: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "tests.programs.dies_at", moment, *flags],
        cwd=where, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
    )  # fmt: skip


def engines_of(run_dir: Path) -> list[psutil.Process]:
    """Whatever is alive and was started for the run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run_dir) in word for word in process.info["cmdline"] or ())
    ]


def test_the_demo_killed_and_resumed_has_the_weights_and_scores_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    run_dir, lost = tmp_path / "run", set[int]()
    flags = ["--demo", "fleet", "--steps", str(STEPS), "--eval-interval", str(INTERVAL)]
    flags += ["--eval-num-gpus", "1", "--eval-max-in-flight", "8", "--eval-run-dir", str(run_dir)]
    before = set(Path("/dev/shm").glob("vime-demo-*"))
    for moment, costs in MOMENTS[:NUM_KILLS]:
        died = drive(moment, *flags, where=tmp_path)
        assert died.returncode == -signal.SIGKILL, died.stderr
        _, alive = psutil.wait_procs(engines_of(run_dir), timeout=30)
        assert not alive, "no engine outlives its driver"
        lost |= costs
        flags = ["--resume", str(run_dir)]
    done = drive("", *flags, where=tmp_path)
    assert done.returncode == 0, done.stderr
    check_run(run_dir, lost, undisturbed(tmp_path / "weights"))
    assert set(Path("/dev/shm").glob("vime-demo-*")) == before


def check_run(run_dir: Path, lost: set[int], expected: dict[int, tuple[str, float]]) -> None:
    trace = read_trace(run_dir)
    records = list(trace)
    assert [r.seq for r in records] == list(range(len(records)))
    assert list(check(records, ended=True)) == []
    assert replay(records)[1] is None
    assert rerun(records).divergence is None
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    outcomes: dict[int, dict[str, Any]] = {o["rollout_id"]: o for o in map(json.loads, lines)}
    assert len(lines) == len(outcomes) == len(expected)
    for step, (digest, accuracy) in expected.items():
        outcome = outcomes[step]
        if step in lost:
            assert outcome["reason"] == "crashed"
            continue
        assert outcome["state"] == "done", outcome
        assert outcome["weight_version"].rpartition(":")[2] == digest, f"the weights of {step}"
        # The engines compute in another order than torch: an answer on the edge may tip over.
        assert outcome["metrics"]["eval/addition"] == pytest.approx(accuracy, abs=0.02)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [point["rollout_id"] for point in summary["points"]] == sorted(expected)
    assert (run_dir / "curve.png").exists()
    names = {path.name for path in (run_dir / "samples").iterdir()}
    assert len(names) == len(expected) - len(lost)
