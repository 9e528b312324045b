"""The demo's driver, killed at chosen moments: how it is run, and what must come of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arithmetic
import grpo
import psutil
import torch

from vime.eval.rerun import rerun
from vime.eval.snapshot.manifest import Manifest
from vime.fsm.check import check
from vime.fsm.read import read_trace
from vime.fsm.replay import replay

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL = 60, 10


@dataclass(frozen=True)
class Weights:
    """What training has made of the weights at a step.

    Attributes:
        digest: its first twelve digits.
        accuracy: on the held-out sums.
        norm: the first weight of the last norm.
    """

    digest: str
    accuracy: float
    norm: float


def undisturbed(root: Path) -> dict[int, Weights]:
    """Step → weights, of training that nothing has killed."""
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
            accuracy = grpo.accuracy(model, tokenizer, held_out)
            found[step] = Weights(digest[:12], accuracy, model.model.norm.weight[0].item())
    torch.set_num_threads(before)
    return found


def drive(moment: str, *flags: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Run train.py until it ends, or is killed at ``moment``."""
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "tests.programs.dies_at", moment, *flags],
        cwd=where, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
    )  # fmt: skip


def alive_for(run_dir: Path) -> list[psutil.Process]:
    """Whatever is alive and was started for the run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run_dir) in word for word in process.info["cmdline"] or ())
    ]


def kill_and_resume(
    moments: tuple[tuple[str, set[int]], ...], flags: list[str], where: Path
) -> set[int]:
    """Kill the driver at each moment, resume it each time, and let the last one end.

    Returns:
        The points that had no whole snapshot when they were left.
    """
    run_dir, lost = where / "run", set[int]()
    words = [*flags, "--steps", str(STEPS), "--eval-interval", str(INTERVAL)]
    words += ["--eval-max-in-flight", "8", "--eval-run-dir", str(run_dir)]
    for moment, costs in moments:
        died = drive(moment, *words, where=where)
        assert died.returncode == -9, died.stderr
        _, alive = psutil.wait_procs(alive_for(run_dir), timeout=30)
        assert not alive, "nothing outlives its driver"
        lost |= costs
        words = ["--resume", str(run_dir)]
    done = drive("", *words, where=where)
    assert done.returncode == 0, done.stderr
    return lost


def check_run(run_dir: Path, lost: set[int], expected: dict[int, Weights]) -> dict[int, Any]:
    """The trace is sound, and each point has one outcome, of its own weights or ``crashed``.

    Returns:
        Step → metrics, of the points that were scored.
    """
    trace = read_trace(run_dir)
    records = list(trace)
    assert [r.seq for r in records] == list(range(len(records)))
    assert list(check(records, ended=True)) == []
    assert replay(records)[1] is None
    assert rerun(records).divergence is None
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    outcomes: dict[int, dict[str, Any]] = {o["rollout_id"]: o for o in map(json.loads, lines)}
    assert len(lines) == len(outcomes) == len(expected)
    for step, weights in expected.items():
        outcome = outcomes[step]
        if step in lost:
            assert outcome["reason"] == "crashed"
            continue
        assert outcome["state"] == "done", outcome
        version = outcome["weight_version"].rpartition(":")[2]
        assert version == weights.digest, f"the weights of step {step}"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [point["rollout_id"] for point in summary["points"]] == sorted(expected)
    assert (run_dir / "curve.png").exists()
    return {step: outcomes[step]["metrics"] for step in expected if step not in lost}
