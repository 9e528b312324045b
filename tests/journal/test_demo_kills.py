"""The demo with a backend of a user's own, killed and resumed: real training, exports and runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journal.killed_demo import check_run, kill_and_resume, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOMENTS = (("snapshot:step_20:write", {20}), ("point:40:run", set[int]()))


def test_training_and_evaluation_go_on_after_two_kills_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    flags = ["--eval-function-path", "tests.programs.backend.PlainNormBackend"]
    flags += ["--eval-hf-dir", str(tmp_path / "staging"), "--eval-keep-snapshots", "1"]
    lost = kill_and_resume(MOMENTS, flags, tmp_path)
    expected = undisturbed(tmp_path / "weights")
    scored = check_run(tmp_path / "run", lost, expected)
    assert len(scored) == len(expected) - 1
    for step, metrics in scored.items():
        assert metrics["eval/norm"] == pytest.approx(expected[step].norm, abs=1e-12)
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["step_60"]
