"""The demo with a real engine, killed at chosen moments and resumed each time.

Every kill costs a start of the engine: ``make kills`` does it, five times, and no other command.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.journal.killed_demo import check_run, kill_and_resume, undisturbed

#: Where the driver is killed, one run after the other, and the points that this costs: those
#: that had no whole snapshot.
MOMENTS: tuple[tuple[str, set[int]], ...] = (
    ("point:10:run", set()),
    ("engine:*:pin", set()),
    ("snapshot:step_30:write", {30}),
    ("point:40:finish", set()),
    ("snapshot:step_50:seal", set()),
)
NUM_KILLS = int(os.environ.get("VIME_REAL_KILLS", "0"))

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300 * (1 + NUM_KILLS)),
    pytest.mark.skipif(NUM_KILLS == 0, reason="make kills runs it"),
]


def test_the_demo_killed_and_resumed_has_the_weights_and_scores_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    flags = ["--demo", "fleet", "--eval-num-gpus", "1"]
    lost = kill_and_resume(MOMENTS[:NUM_KILLS], flags, tmp_path)
    expected = undisturbed(tmp_path / "weights")
    scored = check_run(tmp_path / "run", lost, expected)
    for step, metrics in scored.items():
        # The engine computes in another order than torch: an answer on the edge may tip over.
        assert metrics["eval/addition"] == pytest.approx(expected[step].accuracy, abs=0.02)
    samples = list((tmp_path / "run" / "samples").iterdir())
    assert len(samples) == len(scored)
    staging = Path(json.loads((tmp_path / "run" / "flags.json").read_text())["eval_hf_dir"])
    assert staging.name.startswith("vime-demo-")
    assert not staging.exists()
