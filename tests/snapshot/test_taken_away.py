"""The staging directory is removed while a run is under way: that costs the point it hits."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.snapshot.captures import CopiedCapture, Shop
from vime.eval.contracts import Snapshot
from vime.eval.snapshot.staging import LOCK, Staging, StagingError
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio


@pytest.fixture
def shop(tmp_path: Path, checkpoints: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "above" / "staging", checkpoints / "base", keep=1)
    shop.store.open()
    yield shop
    shop.store.close()


@pytest.fixture
def source(checkpoints: Path) -> Path:
    return checkpoints / "whole"


async def make(shop: Shop, step: int, source: Path) -> Snapshot:
    """A snapshot that has been read."""
    draft = shop.store.begin(step)
    snapshot = await shop.store.seal(draft, CopiedCapture(source))
    with shop.store.lease(snapshot):
        assert (snapshot.path / "config.json").exists()
    return snapshot


async def taken_by_another(shop: Shop, source: Path) -> tuple[Shop, Snapshot]:
    """The run's directory is removed, and another run has it, with a snapshot of its own."""
    await make(shop, 1, source)
    shutil.rmtree(shop.staging)
    other = Shop(shop.staging, None, run_id="run-b")
    other.store.open()
    return other, await make(other, 1, source)


def remove_all(staging: Path) -> None:
    shutil.rmtree(staging)


def remove_what_is_above(staging: Path) -> None:
    shutil.rmtree(staging.parent)


def empty(staging: Path) -> None:
    shutil.rmtree(staging)
    staging.mkdir(mode=0o700)


def remove_lock(staging: Path) -> None:
    (staging / LOCK).unlink()


def remove_room(staging: Path) -> None:
    shutil.rmtree(staging / ".vime-run-a")


def remove_marker(staging: Path) -> None:
    (staging / ".vime-run-a" / "owner.json").unlink()


def put_a_file_there(staging: Path) -> None:
    """And away again: as when somebody takes it for rubbish, and looks what happens."""
    shutil.rmtree(staging)
    staging.touch()
    staging.unlink()


TAKEN: set[Callable[[Path], None]] = {
    remove_all,
    remove_what_is_above,
    empty,
    remove_lock,
    remove_room,
    remove_marker,
    put_a_file_there,
}


@pytest.mark.parametrize("take", sorted(TAKEN - {remove_marker}, key=lambda take: take.__name__))
async def test_between_two_points_it_costs_neither(
    take: Callable[[Path], None], shop: Shop, source: Path
) -> None:
    await make(shop, 1, source)
    take(shop.staging)
    await make(shop, 2, source)
    assert shop.visible() == ["step_2"] or take in (remove_lock, remove_room)
    assert stat.S_IMODE(shop.staging.stat().st_mode) == 0o700
    room = shop.staging / ".vime-run-a"
    assert stat.S_IMODE(room.stat().st_mode) == 0o700
    for identity in (shop.staging / LOCK, room / "owner.json"):
        told = json.loads(identity.read_text())
        assert (told["run_id"], told["pid"]) == ("run-a", os.getpid())
    with pytest.raises(StagingError, match="the live run run-a"):
        Staging(shop.staging, "run-b").open()
    for step in range(3, 6):
        await make(shop, step, source)
    await shop.settle()
    assert shop.visible() == ["step_5"], "what was kept meanwhile goes as ever"
    shop.store.close()
    assert sorted(path.name for path in shop.staging.iterdir()) == ["step_5"]


@pytest.mark.parametrize("take", sorted(TAKEN, key=lambda take: take.__name__))
async def test_while_a_point_is_written_it_costs_that_one(
    take: Callable[[Path], None], shop: Shop, source: Path
) -> None:
    draft = shop.store.begin(1)
    capture = CopiedCapture(source, fault=lambda _: take(shop.staging))
    if take is remove_lock:  # nothing of the snapshot was lost: it costs nothing at all
        await shop.store.seal(draft, capture)
        assert json.loads((shop.staging / LOCK).read_text())["run_id"] == "run-a"
        return
    with pytest.raises(EvalSkip) as caught:
        await shop.store.seal(draft, capture)
    assert caught.value.reason == "export_failed"
    assert caught.value.detail == (
        f"--eval-hf-dir {shop.staging}: it was removed while this run was under way, and this "
        "point's snapshot with it; the next one makes it again"
    )
    assert capture.num_released == 1
    await make(shop, 2, source)
    assert shop.visible() == ["step_2"]
    await shop.settle()
    assert shop.drafts() == []


async def test_an_export_that_makes_its_own_directory_makes_no_open_one(
    shop: Shop, source: Path
) -> None:
    draft = shop.store.begin(1)
    shutil.rmtree(shop.staging)
    shutil.copytree(source, draft.directory)  # as save_pretrained does, with the modes of umask
    shop.staging.chmod(0o755)
    with pytest.raises(EvalSkip, match="removed while this run was under way"):
        await shop.store.seal(draft, CopiedCapture(source))
    await shop.settle()
    await make(shop, 2, source)
    assert shop.visible() == ["step_2"]
    assert stat.S_IMODE(shop.staging.stat().st_mode) == 0o700


async def test_a_snapshot_that_vanishes_as_it_is_put_in_place_is_said_to(
    shop: Shop, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime.eval.snapshot import writer

    flush = writer.flush_directory

    def vanish(directory: Path) -> None:
        shutil.rmtree(shop.staging)
        flush(directory)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "flush_directory", vanish)
        with pytest.raises(EvalSkip, match="removed while this run was under way"):
            await make(shop, 1, source)
    await make(shop, 2, source)


async def test_while_another_run_has_it_every_point_names_that_run(
    shop: Shop, source: Path
) -> None:
    other, theirs = await taken_by_another(shop, source)
    for step in (2, 3):
        with pytest.raises(OSError, match="it was removed while this run was under way") as caught:
            shop.store.begin(step)
        assert f"the live run run-b (pid {os.getpid()}" in str(caught.value)
        assert "end that run, or wait for its end" in str(caught.value)
        assert shop.life(f"step_{step}") == ["write", "abandon"]
    await shop.settle()
    with other.store.lease(theirs):
        assert (theirs.path / "config.json").exists(), "only its owner removes it"
    assert json.loads((shop.staging / LOCK).read_text())["run_id"] == "run-b"
    other.store.close()
    await make(shop, 4, source)
    await shop.settle()
    assert "step_4" in shop.visible()
    assert json.loads((shop.staging / LOCK).read_text())["run_id"] == "run-a"


async def test_a_run_that_ends_meanwhile_takes_nothing_from_the_other(
    shop: Shop, source: Path
) -> None:
    other, theirs = await taken_by_another(shop, source)
    shop.store.close()
    assert (theirs.path / "config.json").exists()
    with pytest.raises(StagingError, match="the live run run-b"):
        Staging(shop.staging, "run-c").open()
    other.store.close()


async def test_a_draft_is_not_put_into_the_directory_of_another_run(
    shop: Shop, source: Path
) -> None:
    draft = shop.store.begin(1)
    others = []

    def take(_: Path) -> None:
        (shop.staging / LOCK).unlink()
        others.append(Staging(shop.staging, "run-b"))
        (shop.staging / ".vime-run-a").rename(shop.staging / "kept")
        others[0].open()
        (shop.staging / "kept").rename(shop.staging / ".vime-run-a")

    with pytest.raises(EvalSkip, match="removed while this run was under way"):
        await shop.store.seal(draft, CopiedCapture(source, fault=take))
    assert shop.visible() == []
    others[0].close()


async def test_what_another_run_has_left_there_is_not_taken_for_this_ones(
    shop: Shop, source: Path
) -> None:
    other, _ = await taken_by_another(shop, source)
    other.store.close()
    await make(shop, 2, source)
    await shop.settle()
    assert shop.visible() == ["step_2"], "the other's was the older one"
    await make(shop, 1, source)


async def test_a_link_in_its_place_is_not_followed(
    shop: Shop, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(shop.staging)
    shop.staging.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"cannot be made again: a link is in its place, to .*where"):
        shop.store.begin(1)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    shop.staging.unlink()
    await make(shop, 2, source)


async def test_a_directory_that_was_moved_and_linked_to_is_the_same_one(
    shop: Shop, source: Path, tmp_path: Path
) -> None:
    await make(shop, 1, source)
    shop.staging.rename(tmp_path / "larger")
    shop.staging.symlink_to(tmp_path / "larger")
    await make(shop, 2, source)
    await shop.settle()
    assert shop.visible() == ["step_2"]


async def test_a_file_in_its_place_is_told_with_what_to_do(shop: Shop, source: Path) -> None:
    shutil.rmtree(shop.staging)
    shop.staging.touch()
    with pytest.raises(OSError, match=r"cannot be made again: .*make it a directory that this"):
        shop.store.begin(1)
    shop.staging.unlink()
    await make(shop, 2, source)


async def test_a_run_that_has_ended_makes_nothing_again(shop: Shop) -> None:
    shop.store.close()
    shutil.rmtree(shop.staging)
    with pytest.raises(FileNotFoundError):
        shop.store.begin(1)
    assert not shop.staging.exists()
