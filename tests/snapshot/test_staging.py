"""The staging directory: one live run at a time, and nothing removed that vime did not make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vime.eval.snapshot.janitor import Janitor
from vime.eval.snapshot.staging import LOCK, Staging, StagingError

HOLDER = """
import sys
from pathlib import Path
from vime.eval.snapshot.staging import Staging
staging = Staging(Path(sys.argv[1]), "run-other")
staging.open()
(staging.new_draft(7) / "half").write_text("x")
print("open", flush=True)
sys.stdin.read()
staging.close()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another run, in a process of its own, that has the directory and is writing."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "staging")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "open\n"
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging(tmp_path / "staging", "run-a")
    yield staging
    staging.close()


def test_it_is_made_for_its_owner_alone(staging: Staging) -> None:
    staging.open()
    assert staging.directory.stat().st_mode & 0o777 == 0o700
    assert staging.room.stat().st_mode & 0o777 == 0o700


def test_an_existing_directory_keeps_its_mode(staging: Staging) -> None:
    staging.directory.mkdir(mode=0o755)
    staging.directory.chmod(0o755)
    staging.open()
    assert staging.directory.stat().st_mode & 0o777 == 0o755


def test_a_second_run_is_refused_and_told_who_has_it(
    staging: Staging, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(StagingError, match=r"--eval-hf-dir .*run-other \(pid") as caught:
        staging.open()
    assert f"pid {holder.pid}" in str(caught.value)
    staging.close()
    assert (staging.directory / ".vime-run-other" / "step_7.0" / "half").exists()


def test_a_second_run_in_one_process_is_refused_too(staging: Staging) -> None:
    staging.open()
    with pytest.raises(StagingError, match=f"pid {os.getpid()}"):
        Staging(staging.directory, "run-b").open()


def test_when_a_run_has_closed_the_next_may_have_it(staging: Staging) -> None:
    for run_id in ("run-1", "run-2"):
        other = Staging(staging.directory, run_id)
        other.open()
        other.close()
        other.close()
    staging.open()
    staging.close()
    assert list(staging.directory.iterdir()) == []


def test_what_a_killed_run_left_unfinished_is_removed_by_the_next(
    staging: Staging, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert {p.name for p in staging.directory.iterdir()} == {LOCK, ".vime-run-other"}
    staging.open()
    assert {p.name for p in staging.directory.iterdir()} == {LOCK, ".vime-run-a"}


def test_a_child_that_outlives_its_run_is_said_to_have_the_lock(
    staging: Staging, holder: subprocess.Popen[str]
) -> None:
    (staging.directory / LOCK).write_text(
        json.dumps({"pid": 2**22 + 1, "run_id": "run-dead", "host": os.uname().nodename})
    )
    with pytest.raises(StagingError, match="a process that outlives the run run-dead"):
        staging.open()


@pytest.mark.parametrize("content", ["", "not JSON", "[]", '{"pid": "x"}'])
def test_a_lock_with_no_readable_owner_is_still_a_lock(
    content: str, staging: Staging, holder: subprocess.Popen[str]
) -> None:
    (staging.directory / LOCK).write_text(content)
    with pytest.raises(StagingError, match="run"):
        staging.open()


def test_a_stale_lock_file_is_no_lock(staging: Staging) -> None:
    staging.directory.mkdir()
    (staging.directory / LOCK).write_text(json.dumps({"pid": 1, "run_id": "run-dead"}))
    staging.open()
    assert json.loads((staging.directory / LOCK).read_text())["pid"] == os.getpid()


def test_only_rooms_of_vime_are_swept(staging: Staging, tmp_path: Path) -> None:
    root = staging.directory
    root.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "owner.json").write_text('{"schema": 1, "run_id": "x"}')
    (root / ".vime-x").symlink_to(outside)
    for name, owner in {
        ".vime-dead": '{"schema": 1, "run_id": "dead"}',
        ".vime-copied": '{"schema": 1, "run_id": "other"}',
        ".vime-torn": '{"schema": 1, "ru',
        ".vime-old": '{"schema": 0, "run_id": "old"}',
        "vime-mine": '{"schema": 1, "run_id": "mine"}',
    }.items():
        (root / name).mkdir()
        (root / name / "owner.json").write_text(owner)
    (root / ".vime-empty").mkdir()
    (root / ".vime-unmarked").mkdir()  # its run was killed before the marker was written
    (root / ".vime-unmarked" / "owner.json").touch()
    (root / ".vime-file").touch()
    staging.open()
    staging.close()
    assert {p.name for p in root.iterdir()} == {
        ".vime-copied",
        ".vime-file",
        ".vime-old",
        ".vime-torn",
        ".vime-x",
        "vime-mine",
    }
    assert (outside / "owner.json").exists()


def test_what_cannot_be_a_staging_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StagingError, match=r"--eval-hf-dir .*file: cannot be used"):
        Staging(tmp_path / "file", "run-a").open()
    with pytest.raises(StagingError, match="cannot be used"):
        Staging(tmp_path / "file" / "below", "run-a").open()


def test_a_link_in_the_place_of_the_lock_is_not_followed(staging: Staging) -> None:
    staging.directory.mkdir()
    victim = staging.directory / "victim"
    victim.write_text("precious")
    (staging.directory / LOCK).symlink_to(victim)
    with pytest.raises(StagingError, match="cannot be used"):
        staging.open()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "a b", ".x", "a" * 129, 7, None])
def test_a_run_that_could_not_be_part_of_a_name_is_refused(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_id"):
        Staging(tmp_path, run_id)


def test_removing_frees_the_name_first_and_minds_no_missing_path(staging: Staging) -> None:
    staging.open()
    target = staging.final(1)
    draft = staging.new_draft(1)
    (draft / "below").mkdir()
    (draft / "below" / "file").touch()
    staging.place(draft, target)
    staging.remove(target)
    staging.remove(target)
    assert not target.exists()
    assert [p.name for p in staging.room.iterdir()] == ["owner.json"]


def test_a_removal_that_fails_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    removed = []

    def remove(path: Path) -> None:
        if path.name == "bad":
            raise PermissionError(13, "not yours", str(path))
        removed.append(path.name)

    janitor = Janitor(remove)
    for name in ("a", "bad", "b"):
        janitor.remove(tmp_path / name)
    assert janitor.stop(60)
    janitor.remove(tmp_path / "late")
    assert removed == ["a", "b", "late"]
    assert "bad could not be removed" in caplog.text
