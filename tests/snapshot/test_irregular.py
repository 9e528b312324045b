"""What is no regular file is refused at once, wherever one is read; none of it is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.irregular import IRREGULAR, replace
from vime.eval.appending import append_regular
from vime.eval.fleet.settings import FleetSettings, preflight
from vime.eval.locks import FileLock
from vime.eval.snapshot.base import BaseSpec
from vime.eval.snapshot.files import open_regular
from vime.eval.snapshot.manifest import FILE, Manifest, ManifestError
from vime.eval.snapshot.side_files import JSON_FILES, MAX_BYTES, irregular_files, unreadable_json
from vime.eval.snapshot.staging import LOCK, Staging, StagingError, remove_tree
from vime.eval.snapshot.verify import SnapshotInvalid, verify
from vime.eval.snapshot.weights import INDEX, SINGLE

KINDS = pytest.mark.parametrize("kind", IRREGULAR)
CHECKED = ("config.json", SINGLE, INDEX, *JSON_FILES)


@KINDS
def test_it_is_opened_neither_for_reading_nor_for_appending(kind: str, tmp_path: Path) -> None:
    replace(tmp_path / "it", kind)
    with pytest.raises(ValueError, match=r"^it: no regular file$"):
        open_regular(tmp_path / "it")
    if kind != "directory":
        with pytest.raises(OSError, match=r"no regular file|No such device"):
            append_regular(tmp_path / "it", 0o600)
    with pytest.raises(IsADirectoryError):
        append_regular(tmp_path, 0o600)


@KINDS
@pytest.mark.parametrize("name", CHECKED)
def test_in_the_place_of_any_file_of_a_checkpoint_it_is_named(
    name: str, kind: str, whole: Path, base: BaseSpec
) -> None:
    replace(whole / name, kind)
    for against in (None, base):
        with pytest.raises(SnapshotInvalid) as caught:
            verify(whole, against, owned=False)
        assert f"{name}: no regular file" in caught.value.problems
        assert len(set(caught.value.problems)) == len(caught.value.problems)


@KINDS
@pytest.mark.parametrize("name", CHECKED)
def test_in_the_place_of_any_file_of_a_snapshot_it_is_named(
    name: str, kind: str, whole: Path
) -> None:
    Manifest.of_directory(whole, "run-1", 3).write(whole)
    replace(whole / name, kind)
    with pytest.raises(SnapshotInvalid) as caught:
        verify(whole, None, digests=True)
    assert f"{name}: no regular file" in caught.value.problems


@KINDS
def test_in_the_place_of_the_manifest_it_is_named(kind: str, whole: Path) -> None:
    replace(whole / FILE, kind)
    with pytest.raises(ManifestError, match=r"no regular file|a link"):
        Manifest.read(whole)


@KINDS
@pytest.mark.parametrize("name", CHECKED)
def test_in_the_base_it_is_refused_before_anything_starts(
    name: str, kind: str, whole: Path
) -> None:
    replace(whole / name, kind)
    with pytest.raises(ValueError, match=rf"--hf-checkpoint .*{name}: no regular file"):
        BaseSpec.read(whole)


@KINDS
@pytest.mark.parametrize("name", ["config.json", SINGLE, "tokenizer.json"])
def test_the_look_before_engines_start_refuses_it_too(name: str, kind: str, whole: Path) -> None:
    replace(whole / name, kind)
    with pytest.raises(ValueError, match=f"{name}: no regular file"):
        preflight(FleetSettings(1, whole, whole.parent))


@KINDS
@pytest.mark.parametrize("name", JSON_FILES)
def test_no_side_file_is_read_that_is_none(name: str, kind: str, whole: Path) -> None:
    replace(whole / name, kind)
    assert unreadable_json(whole) == [f"{name}: no regular file"]


def test_a_side_file_beyond_all_measure_is_refused_unread(whole: Path) -> None:
    os.truncate(whole / "tokenizer.json", MAX_BYTES + 1)
    assert unreadable_json(whole) == [
        f"tokenizer.json: {MAX_BYTES + 1} bytes; at most {MAX_BYTES} were expected"
    ]


def test_what_nobody_reads_may_lie_beside_a_checkpoint(whole: Path) -> None:
    os.mkfifo(whole / "training.pipe")
    for name in ("tokenizer", "checkpoints", "runs.json"):
        (whole / name).mkdir()
    (whole / "vocab.txt").symlink_to("nowhere")
    assert irregular_files(whole) == []
    verify(whole, None, owned=False)


def test_a_cache_of_links_is_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for path in whole.iterdir():
        (tmp_path / "cache" / path.name).symlink_to(path)
    verify(tmp_path / "cache", BaseSpec.read(tmp_path / "cache"), owned=False)


@KINDS
def test_in_the_place_of_a_lock_it_is_refused(kind: str, tmp_path: Path) -> None:
    replace(tmp_path / LOCK, kind)
    with pytest.raises(OSError, match=r"no regular file|directory|levels of symbolic|device"):
        FileLock(tmp_path / LOCK, "run-a")
    with pytest.raises(StagingError, match="cannot be used as a staging directory"):
        Staging(tmp_path, "run-a").open()
    assert os.path.lexists(tmp_path / LOCK)


@KINDS
def test_in_the_place_of_an_owners_marker_it_makes_no_room_of_vimes(
    kind: str, tmp_path: Path
) -> None:
    room = tmp_path / ".vime-dead"
    room.mkdir()
    replace(room / "owner.json", kind)
    staging = Staging(tmp_path, "run-a")
    staging.open()
    staging.close()
    assert os.path.lexists(room / "owner.json"), "it is not vime's to remove"


@KINDS
def test_in_the_place_of_a_snapshot_it_is_none_and_can_be_removed(
    kind: str, tmp_path: Path
) -> None:
    replace(tmp_path / "step_4", kind)
    assert Staging(tmp_path, "run-a").snapshots() == {}
    remove_tree(tmp_path / "step_4")
    assert list(tmp_path.iterdir()) == []
