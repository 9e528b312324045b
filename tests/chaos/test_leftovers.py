"""What a run may leave behind is found: a process, a file, a port, a room in staging."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos import leftovers, victims
from vime.eval.snapshot.staging import Staging


@pytest.mark.slow
def test_a_process_that_inherited_the_mark_is_found_and_ended() -> None:
    env = os.environ | {victims.MARK: "it"}
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, env=env, stdin=subprocess.PIPE) as process:
        assert leftovers.living("another", 0) == []
        (name,) = leftovers.living("it", 0)
        assert name == f"{process.pid} helper"
        assert process.wait(10) == -9
    assert leftovers.living("it", 0) == []


@pytest.mark.slow
def test_a_process_that_survives_its_doom_is_named_and_one_that_has_ended_is_not() -> None:
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as process:
        first, second = (victims.Doomed(victims.below(process.pid)) for _ in range(2))
        assert first.survivors(0.01) == [f"{process.pid} helper"]
        process.kill()
        assert second.survivors(10) == []
    assert victims.below(process.pid) == []


def test_a_port_at_which_somebody_listens_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert leftovers.taken_ports([url, url]) == [url]
    assert leftovers.taken_ports([url]) == []


def test_a_room_and_a_lock_are_strangers_after_an_orderly_end_and_swept_after_a_kill(
    tmp_path: Path,
) -> None:
    staging = tmp_path / "staging"
    run = Staging(staging, "run")
    run.open()
    for step in range(1, 4):
        (staging / f"step_{step}").mkdir()
    found = leftovers.strangers_in_staging(staging, keep=2)
    assert found == [".vime-run", ".vime.lock", "step_3"]
    (run.room / "step_4.0").mkdir()
    (staging / "notes").write_text("somebody else's")
    assert run._lock is not None
    assert run._lock._descriptor is not None
    os.close(run._lock._descriptor)  # as the kernel does for a process that was killed
    assert leftovers.strangers_after_sweep(staging) == ["notes"]
    assert leftovers.strangers_in_staging(staging, keep=3) == ["notes"]
