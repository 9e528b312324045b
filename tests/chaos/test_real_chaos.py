"""The short form of the chaos run, on two real engines: a bad snapshot, kills, then all at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.chaos", "--short", "--seed", "11"]


def test_a_run_full_of_faults_tells_nothing_wrong_and_leaves_nothing() -> None:
    run = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "chaos passed: seed 11" in run.stdout
    assert "faults injected" in run.stdout
