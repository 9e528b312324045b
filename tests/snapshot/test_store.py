"""The store: whole or absent, lent until the last reader has left, and removed by its owner."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from blockbuster import blockbuster_ctx

from tests.snapshot.captures import CopiedCapture, Shop
from tests.snapshot.mounts import small_file_system
from tests.snapshots import make_model, make_tokenizer, write_checkpoint
from vime.eval.contracts import Snapshot
from vime.eval.snapshot.export import CallableExporter, TransformersExporter, as_exporter
from vime.eval.snapshot.handoff import Handoff
from vime.eval.snapshot.manifest import FILE, Manifest
from vime.eval.snapshot.verify import verify
from vime.eval.snapshot.weights import SINGLE
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio


@pytest.fixture
def shop(checkpoints: Path, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "staging", checkpoints / "base")
    shop.store.open()
    yield shop
    shop.store.close()
    assert not list(shop.staging.glob(".vime*")), "nothing of the run is left but its snapshots"


@pytest.fixture
def capture(checkpoints: Path) -> CopiedCapture:
    return CopiedCapture(checkpoints / "whole")


async def make(shop: Shop, step: int, source: Path) -> Snapshot:
    return await shop.store.seal(shop.store.begin(step), CopiedCapture(source))


async def refused(shop: Shop, step: int, capture: CopiedCapture) -> EvalSkip:
    """Seal a capture that cannot be sealed; nothing of it may be left."""
    before = shop.visible()
    draft = shop.store.begin(step)
    with pytest.raises(EvalSkip) as caught:
        await shop.store.seal(draft, capture)
    await shop.settle()
    assert shop.visible() == before
    assert shop.drafts() == []
    assert capture.num_released == 1
    assert caught.value.cause_seq is not None
    return caught.value


# -- a snapshot's life ---------------------------------------------------------------------------


async def test_a_capture_becomes_a_whole_verified_snapshot(
    shop: Shop, capture: CopiedCapture, checkpoints: Path
) -> None:
    draft = shop.store.begin(40, cause_seq=7)
    assert list(draft.directory.iterdir()) == []
    assert draft.directory.stat().st_mode & 0o777 == 0o700
    snapshot = await shop.store.seal(draft, capture)
    assert snapshot.path == shop.staging / "step_40"
    assert snapshot.owned
    assert snapshot.weight_version == f"run-a:40:{snapshot.digest[:12]}"
    assert snapshot.num_bytes == (checkpoints / "whole" / SINGLE).stat().st_size
    assert Manifest.read(snapshot.path).digest == snapshot.digest
    verify(snapshot.path, shop.store.base, digests=True)
    assert shop.visible() == ["step_40"]
    assert shop.drafts() == []
    assert capture.num_released == 1
    assert shop.life("step_40") == ["write", "seal", "verify"]
    assert shop.records[0].cause_seq == 7
    assert {r.weight_version for r in shop.records[1:]} == {snapshot.weight_version}


async def test_a_real_model_goes_through(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "staging", write_checkpoint(tmp_path / "base", seed=0))
    shop.store.open()
    exporter = TransformersExporter(make_model(3), make_tokenizer())
    digests = set()
    for step in (1, 2):
        draft = shop.store.begin(step)
        snapshot = await shop.store.seal(draft, exporter.capture(step, draft.directory))
        digests.add(snapshot.digest)
    shop.store.close()
    assert len(digests) == 1, "the same weights have the same digest"


async def test_what_a_callers_own_export_wrote_is_sealed(shop: Shop, checkpoints: Path) -> None:
    def save(rollout_id: int, directory: Path) -> None:
        shutil.copytree(checkpoints / "whole", directory, dirs_exist_ok=True)

    draft = shop.store.begin(1)
    snapshot = await shop.store.seal(draft, as_exporter(save).capture(1, draft.directory))
    assert (snapshot.path / FILE).exists()


@pytest.mark.parametrize(
    ("name", "life", "message"),
    [
        ("missing_layer", ["write", "seal", "reject", "delete"], "model.layers.1."),
        ("float32", ["write", "seal", "reject", "delete"], "float32 instead of bfloat16"),
        ("truncated", ["write", "abandon"], "model.safetensors: truncated"),
        ("no_weights", ["write", "abandon"], "model.safetensors: missing"),
    ],
)
async def test_a_broken_snapshot_is_refused_and_removed(
    name: str, life: list[str], message: str, shop: Shop, checkpoints: Path
) -> None:
    skip = await refused(shop, 5, CopiedCapture(checkpoints / name))
    assert skip.reason == "snapshot_invalid"
    assert message in skip.detail
    assert shop.life("step_5") == life
    culprit = next(r for r in shop.records if r.seq == skip.cause_seq)
    assert culprit.trigger in ("reject", "abandon")
    assert culprit.reason == "snapshot_invalid"


async def test_an_export_that_links_its_directory_elsewhere_is_refused(
    shop: Shop, checkpoints: Path
) -> None:
    def link(directory: Path) -> None:
        shutil.rmtree(directory)
        directory.symlink_to(checkpoints / "whole")

    def save(rollout_id: int, directory: Path) -> None:
        link(directory)

    draft = shop.store.begin(1)
    with pytest.raises(EvalSkip, match="a link in the place of its directory"):
        await shop.store.seal(draft, as_exporter(save).capture(1, draft.directory))
    await shop.settle()
    assert shop.visible() == shop.drafts() == []
    assert (checkpoints / "whole" / SINGLE).exists(), "what it led to is somebody else's"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_loop_waits_for_no_disk_but_to_make_a_draft(
    shop: Shop, capture: CopiedCapture, checkpoints: Path
) -> None:
    with blockbuster_ctx() as blockbuster:
        blockbuster.functions["os.mkdir"].can_block_in("snapshot/staging.py", {"new_draft"})
        snapshot = await shop.store.seal(shop.store.begin(1), capture)
        given = await shop.store.adopt(0, checkpoints / "base")
        with shop.store.lease(snapshot), shop.store.lease(given):
            pass
        shop.store.discard(shop.store.begin(2), "cancelled")
        with pytest.raises(EvalSkip):
            await make(shop, 3, checkpoints / "missing_layer")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await make(shop, 4, checkpoints / "whole")
    assert snapshot.path.exists()


# -- faults --------------------------------------------------------------------------------------


async def test_a_capture_that_raises_costs_its_point_and_leaves_nothing(
    shop: Shop, capture: CopiedCapture, checkpoints: Path
) -> None:
    def fault(directory: Path) -> None:
        raise RuntimeError("the model is gone")

    capture.fault = fault
    skip = await refused(shop, 5, capture)
    assert (skip.reason, skip.detail) == ("export_failed", "RuntimeError: the model is gone")
    assert shop.life("step_5") == ["write", "abandon"]
    await make(shop, 6, checkpoints / "whole")
    assert shop.visible() == ["step_6"]


async def test_a_full_disk_costs_its_point_and_leaves_nothing(
    shop: Shop, capture: CopiedCapture, checkpoints: Path
) -> None:
    def fault(directory: Path) -> None:
        fd = os.open("/dev/full", os.O_WRONLY)  # the kernel answers every write with ENOSPC
        try:
            os.write(fd, b"x")
        finally:
            os.close(fd)

    capture.fault = fault
    skip = await refused(shop, 5, capture)
    assert skip.reason == "export_failed"
    assert "staging file system is full" in skip.detail
    assert f"--eval-hf-dir {shop.staging}" in skip.detail
    await make(shop, 6, checkpoints / "whole")


async def test_an_export_that_cannot_fit_is_not_begun(
    shop: Shop, capture: CopiedCapture, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shop.store.base is not None
    needed = shop.store.base.num_bytes
    with monkeypatch.context() as patch:
        for place in ("staging.Staging.free_bytes", "faults.free_bytes"):
            patch.setattr(f"vime.eval.snapshot.{place}", lambda _: needed - 1)
        skip = await refused(shop, 5, capture)
        assert skip.reason == "export_failed"
        assert f"{needed - 1} bytes are free and a snapshot needs {needed}" in skip.detail
        assert not capture.started.is_set(), "nothing was written"
        draft = shop.store.begin(6)  # what the export has written by itself fits, as is seen
        shutil.copytree(checkpoints / "whole", draft.directory, dirs_exist_ok=True)
        await shop.store.seal(draft, CallableExporter(nothing).capture(6, draft.directory))
    await make(shop, 7, checkpoints / "whole")


def nothing(rollout_id: int, directory: Path) -> None:
    """The test has written already."""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 500 kB, in memory: one snapshot fits, a second one does not."""
    with small_file_system(tmp_path / "tiny", "size=500k") as place:  # /dev/full stands in above
        yield place


async def test_on_a_disk_that_is_really_full_the_next_snapshot_works(
    tiny_disk: Path, checkpoints: Path
) -> None:
    shop = Shop(tiny_disk / "staging", checkpoints / "base", keep=0)
    shop.store.open()
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(400_000))
    exporter = TransformersExporter(make_model(3), make_tokenizer())
    draft = shop.store.begin(1)
    with pytest.raises(EvalSkip, match="staging file system is full") as caught:
        await shop.store.seal(draft, exporter.capture(1, draft.directory))
    assert caught.value.reason == "export_failed"
    ballast.unlink()
    for step in range(2, 6):  # two do not fit side by side: the last must be gone first
        draft = shop.store.begin(step)
        snapshot = await shop.store.seal(draft, exporter.capture(step, draft.directory))
        with shop.store.lease(snapshot):
            pass
        assert shop.life(f"step_{step}")[-1] == "delete"
    shop.store.close()
    assert list(shop.staging.iterdir()) == []


async def test_a_rename_that_cannot_be_put_on_the_disk_is_taken_back(
    shop: Shop, capture: CopiedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr("vime.eval.snapshot.writer.flush_directory", fail)
    skip = await refused(shop, 5, capture)
    assert skip.reason == "export_failed"
    assert "the disk is broken" in skip.detail


async def test_a_staging_directory_that_was_taken_away_costs_the_point(
    shop: Shop, capture: CopiedCapture
) -> None:
    draft = shop.store.begin(1)
    shutil.rmtree(shop.staging)
    with pytest.raises(EvalSkip) as caught:
        await shop.store.seal(draft, capture)
    assert caught.value.reason == "export_failed"
    assert "it was removed while this run was under way" in (caught.value.detail or "")
    await make(shop, 2, capture.source)
    assert shop.visible() == ["step_2"]


# -- cancellation --------------------------------------------------------------------------------


async def test_a_write_that_hangs_is_left_behind_and_never_becomes_visible(
    shop: Shop, capture: CopiedCapture, checkpoints: Path
) -> None:
    capture.gated = True
    draft = shop.store.begin(5)
    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shop.store.seal, draft, capture)
            await capture.has_started()
            tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught, "the cancellation did not wait for the write"
    assert shop.life("step_5") == ["write", "abandon"]
    assert shop.last("step_5").reason == "cancelled"
    assert capture.num_released == 0, "the writer still reads the buffer"
    await make(shop, 6, checkpoints / "whole")  # a hanging write hinders no other
    capture.resume.set()
    await capture.has_ended()
    await until_drafts_are_gone(shop)
    assert capture.num_released == 1
    assert shop.visible() == ["step_6"]


async def until_drafts_are_gone(shop: Shop) -> None:
    """The writer removes its remains after its release."""
    with anyio.fail_after(60):
        while shop.drafts():
            await anyio.lowlevel.checkpoint()
    await shop.settle()


async def test_a_seal_cancelled_before_its_writer_began_is_taken_back(
    shop: Shop, capture: CopiedCapture
) -> None:
    draft = shop.store.begin(5)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await shop.store.seal(draft, capture)
    assert scope.cancelled_caught
    assert capture.num_released == 1
    assert not capture.started.is_set()
    assert shop.life("step_5") == ["write", "abandon"]
    await shop.settle()
    assert shop.drafts() == []


@pytest.mark.parametrize(
    ("step", "is_visible", "life"),
    [
        ("writer.flush", False, ["write", "abandon"]),
        ("writer.flush_directory", True, ["write", "abandon"]),
        ("store.verify", True, ["write", "seal", "delete"]),
    ],
)
async def test_a_seal_cancelled_around_its_rename_leaves_nothing_visible(
    step: str,
    is_visible: bool,
    life: list[str],
    shop: Shop,
    capture: CopiedCapture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, resume, ended = threading.Event(), threading.Event(), threading.Event()
    module, name = step.split(".")
    original = getattr(import_module(f"vime.eval.snapshot.{module}"), name)

    def gated(*args: object, **kwargs: object) -> object:
        reached.set()
        assert resume.wait(60)
        try:
            return original(*args, **kwargs)
        finally:
            ended.set()

    monkeypatch.setattr(f"vime.eval.snapshot.{module}.{name}", gated)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.store.seal, shop.store.begin(5), capture)
        await anyio.to_thread.run_sync(reached.wait, 60)
        assert shop.visible() == (["step_5"] if is_visible else [])
        tasks.cancel_scope.cancel()
    assert shop.life("step_5") == life
    await shop.settle()
    assert shop.visible() == [], "the worker hangs, and nothing waits for it"
    resume.set()
    await anyio.to_thread.run_sync(ended.wait, 60)
    await until_drafts_are_gone(shop)
    assert shop.visible() == []
    assert capture.num_released == 1


async def test_a_seal_cancelled_just_when_its_writer_has_finished_leaves_nothing(
    shop: Shop, capture: CopiedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Handoff.commit
    with anyio.CancelScope() as scope:

        def commit_and_cancel(handoff: Handoff, action: Callable[[], object]) -> None:
            commit(handoff, action)
            anyio.from_thread.run_sync(scope.cancel)

        monkeypatch.setattr(Handoff, "commit", commit_and_cancel)
        await shop.store.seal(shop.store.begin(5), capture)
    assert scope.cancelled_caught
    await shop.settle()
    assert shop.visible() == shop.drafts() == []
    assert capture.num_released == 1
    assert shop.life("step_5") == ["write", "abandon"]


async def test_a_write_waits_until_the_room_that_is_being_freed_is_free(
    shop: Shop, capture: CopiedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    janitor = shop.store._janitor
    assert janitor is not None
    remove, settle = janitor._remove, janitor.settle
    may_remove, waiting = threading.Event(), threading.Event()

    def gated_remove(path: Path) -> None:
        assert may_remove.wait(60)
        remove(path)

    def noticed_settle(timeout_s: float) -> bool:
        waiting.set()
        return settle(timeout_s)

    monkeypatch.setattr(janitor, "_remove", gated_remove)
    monkeypatch.setattr(janitor, "settle", noticed_settle)
    shop.store.discard(shop.store.begin(1), "export_failed")
    draft = shop.store.begin(2)
    capture.gated = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.store.seal, draft, capture)
        await anyio.to_thread.run_sync(waiting.wait, 60)
        assert not capture.started.is_set()
        may_remove.set()
        await capture.has_started()
        assert shop.drafts() == [draft.directory.name]
        capture.resume.set()
    assert shop.visible() == ["step_2"]


async def test_closing_while_a_write_hangs_leaves_nothing(
    checkpoints: Path, capture: CopiedCapture, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "staging", checkpoints / "base")
    shop.store.open()
    capture.gated = True
    draft = shop.store.begin(5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.store.seal, draft, capture)
        await capture.has_started()
        tasks.cancel_scope.cancel()
    shop.store.close()
    assert list(shop.staging.iterdir()) == []
    capture.resume.set()
    await capture.has_ended()
    assert list(shop.staging.iterdir()) == []
    assert capture.num_released == 1


async def test_a_discarded_draft_is_removed_and_says_why(shop: Shop) -> None:
    draft = shop.store.begin(5)
    (draft.directory / "half").write_text("x")
    shop.store.discard(draft, "export_failed: no memory: 3 GB")
    shop.store.discard(draft, "export_failed: again")
    await shop.settle()
    assert shop.drafts() == []
    assert shop.life("step_5") == ["write", "abandon"]
    last = shop.last("step_5")
    assert (last.reason, last.detail) == ("export_failed", {"message": "no memory: 3 GB"})


async def test_drafts_of_which_nobody_thought_end_with_the_store(
    checkpoints: Path, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "staging", checkpoints / "base")
    shop.store.open()
    shop.store.begin(5)
    shop.store.close()
    shop.store.close()
    assert shop.last("step_5").trigger == "abandon"
    assert list(shop.staging.iterdir()) == []


# -- readers and removal -------------------------------------------------------------------------


async def test_the_newest_finished_snapshots_stay_and_older_ones_go(
    shop: Shop, checkpoints: Path
) -> None:
    for step in (10, 20, 30, 40):
        with shop.store.lease(await make(shop, step, checkpoints / "whole")):
            pass
        await shop.settle()
        assert len(shop.visible()) <= 2
    assert shop.visible() == ["step_30", "step_40"]
    assert shop.life("step_10") == ["write", "seal", "verify", "lease", "leave", "delete"]


async def test_a_snapshot_stays_while_anybody_reads_it(shop: Shop, checkpoints: Path) -> None:
    old = await make(shop, 1, checkpoints / "whole")
    with shop.store.lease(old), shop.store.lease(old):
        for step in (2, 3, 4):
            with shop.store.lease(await make(shop, step, checkpoints / "whole")):
                pass
        await shop.settle()
        assert shop.visible() == ["step_1", "step_3", "step_4"]
    await shop.settle()
    assert shop.visible() == ["step_3", "step_4"]
    assert shop.life("step_1")[3:] == ["lease", "lease", "leave", "leave", "delete"]


async def test_results_out_of_order_keep_the_newest_steps(shop: Shop, checkpoints: Path) -> None:
    snapshots = [await make(shop, step, checkpoints / "whole") for step in (1, 2, 3)]
    leases = [shop.store.lease(snapshot) for snapshot in snapshots]
    for lease in leases:
        lease.__enter__()
    for lease in reversed(leases):
        lease.__exit__(None, None, None)
    await shop.settle()
    assert shop.visible() == ["step_2", "step_3"]


async def test_a_snapshot_that_waits_for_its_reader_is_not_removed(
    shop: Shop, checkpoints: Path
) -> None:
    waiting = await make(shop, 1, checkpoints / "whole")
    for step in (2, 3, 4):
        with shop.store.lease(await make(shop, step, checkpoints / "whole")):
            pass
    with shop.store.lease(waiting):
        assert waiting.path.exists()


async def test_keeping_none_removes_each_after_its_last_reader(
    checkpoints: Path, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "staging", checkpoints / "base", keep=0)
    shop.store.open()
    snapshot = await make(shop, 1, checkpoints / "whole")
    with shop.store.lease(snapshot):
        assert snapshot.path.exists()
    await shop.settle()
    assert shop.visible() == []
    with pytest.raises(ValueError, match="no snapshot that this store has"):
        shop.store.lease(snapshot).__enter__()
    shop.store.close()


async def test_an_error_inside_a_lease_ends_it(shop: Shop, checkpoints: Path) -> None:
    snapshot = await make(shop, 1, checkpoints / "whole")
    with pytest.raises(RuntimeError, match="eval"), shop.store.lease(snapshot):
        raise RuntimeError("eval")
    assert shop.life("step_1")[-1] == "leave"


async def test_closing_keeps_the_newest_and_removes_the_rest(
    checkpoints: Path, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "staging", checkpoints / "base", keep=1)
    shop.store.open()
    for step in (1, 2, 3):
        await make(shop, step, checkpoints / "whole")
    shop.store.close()
    assert [p.name for p in shop.staging.iterdir()] == ["step_3"]
    verify(shop.staging / "step_3", None, digests=True)


# -- the final name ------------------------------------------------------------------------------


async def test_a_strangers_directory_is_neither_written_into_nor_removed(
    shop: Shop, capture: CopiedCapture
) -> None:
    mine = shop.staging / "step_5"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    skip = await refused(shop, 5, capture)
    assert skip.reason == "export_failed"
    assert f"{mine} exists and is no older snapshot of vime's" in skip.detail
    assert not capture.started.is_set(), "told before the long write"
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("kind", ["empty directory", "file", "link", "link to nowhere"])
async def test_whatever_has_the_final_name_is_left_alone(
    kind: str, shop: Shop, capture: CopiedCapture, checkpoints: Path
) -> None:
    mine = shop.staging / "step_5"
    match kind:
        case "empty directory":
            mine.mkdir()
        case "file":
            mine.touch()
        case "link":
            mine.symlink_to(checkpoints / "whole")
        case "link to nowhere":
            mine.symlink_to("nothing")
    before = mine.lstat()
    skip = await refused(shop, 5, capture)
    assert skip.reason == "export_failed"
    assert os.path.samestat(before, mine.lstat())


async def dead_run(staging: Path, checkpoints: Path, steps: list[int], keep: int = 9) -> None:
    """A run that has left snapshots."""
    shop = Shop(staging, checkpoints / "base", keep=keep, run_id="run-dead")
    shop.store.open()
    for step in steps:
        await make(shop, step, checkpoints / "base")
    shop.store.close()


async def test_a_dead_runs_snapshot_of_the_same_step_is_replaced_as_a_whole(
    checkpoints: Path, tmp_path: Path
) -> None:
    await dead_run(tmp_path / "staging", checkpoints, [5])
    shop = Shop(tmp_path / "staging", checkpoints / "base")
    shop.store.open()
    old = shop.staging / "step_5" / SINGLE
    with old.open("rb") as reader:
        snapshot = await make(shop, 5, checkpoints / "whole")
        assert reader.read() == (checkpoints / "base" / SINGLE).read_bytes()
    assert Manifest.read(snapshot.path).run_id == "run-a"
    verify(snapshot.path, shop.store.base, digests=True)
    await shop.settle()
    assert shop.drafts() == []
    shop.store.close()


async def test_dead_runs_snapshots_count_and_go_first(checkpoints: Path, tmp_path: Path) -> None:
    await dead_run(tmp_path / "staging", checkpoints, [100, 200, 300])
    (tmp_path / "staging" / "step_7").mkdir()  # a stranger's
    shop = Shop(tmp_path / "staging", checkpoints / "base", keep=2)
    shop.store.open()
    assert len(shop.visible()) == 4, "opening removes no finished snapshot"
    for step, left in ((1, ["step_300"]), (2, [])):
        with shop.store.lease(await make(shop, step, checkpoints / "whole")):
            pass
        await shop.settle()
        ours = [f"step_{n}" for n in range(1, step + 1)]
        assert shop.visible() == sorted([*ours, *left, "step_7"])
    shop.store.close()


async def test_a_step_that_is_being_written_or_read_is_not_begun_again(
    shop: Shop, checkpoints: Path
) -> None:
    draft = shop.store.begin(5)
    with pytest.raises(FileExistsError, match="step_5 is being written already"):
        shop.store.begin(5)
    snapshot = await shop.store.seal(draft, CopiedCapture(checkpoints / "whole"))
    with shop.store.lease(snapshot), pytest.raises(FileExistsError, match="being evaluated"):
        shop.store.begin(5)


async def test_a_step_exported_again_is_another_life(shop: Shop, checkpoints: Path) -> None:
    with shop.store.lease(await make(shop, 5, checkpoints / "base")):
        pass
    snapshot = await make(shop, 5, checkpoints / "whole")
    assert shop.life("step_5")[-1] == "delete"
    assert shop.life("step_5", attempt=1) == ["write", "seal", "verify"]
    await shop.settle()
    verify(snapshot.path, shop.store.base, digests=True)


# -- somebody else's checkpoints -----------------------------------------------------------------


def fingerprint(directory: Path) -> dict[str, tuple[int, int]]:
    paths = [directory, *directory.rglob("*")]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in paths}


async def test_a_given_checkpoint_is_verified_and_never_touched(
    shop: Shop, checkpoints: Path
) -> None:
    before = fingerprint(checkpoints / "base")
    snapshot = await shop.store.adopt(0, checkpoints / "base")
    assert not snapshot.owned
    assert snapshot.path == checkpoints / "base"
    assert snapshot.weight_version == f"run-a:0:{snapshot.digest[:12]}"
    with shop.store.lease(snapshot):
        pass
    await shop.settle()
    assert shop.life("hf:0") == ["adopt", "verify", "lease", "leave", "release"]
    assert fingerprint(checkpoints / "base") == before


async def test_a_given_checkpoint_is_let_go_by_its_last_reader(
    shop: Shop, checkpoints: Path
) -> None:
    snapshot = await shop.store.adopt(0, checkpoints / "base")
    with shop.store.lease(snapshot):
        with shop.store.lease(snapshot):
            pass
        assert shop.life("hf:0")[-1] == "leave"
    assert shop.life("hf:0")[-1] == "release"


async def test_a_given_checkpoint_and_an_export_of_one_step_never_look_alike(
    shop: Shop, checkpoints: Path
) -> None:
    given = await shop.store.adopt(0, checkpoints / "base")
    exported = await make(shop, 0, checkpoints / "whole")
    again = Shop(shop.staging.parent / "other", checkpoints / "base", run_id="run-b")
    again.store.open()
    elsewhere = await again.store.adopt(0, checkpoints / "base")
    again.store.close()
    assert len({s.weight_version for s in (given, exported, elsewhere)}) == 3
    assert given.digest == elsewhere.digest


@pytest.mark.parametrize("name", ["missing_layer", "truncated", "no_weights", "nothing at all"])
async def test_a_given_checkpoint_must_be_whole_too(
    name: str, shop: Shop, checkpoints: Path
) -> None:
    with pytest.raises(EvalSkip) as caught:
        await shop.store.adopt(0, checkpoints / name)
    assert caught.value.reason == "snapshot_invalid"
    assert shop.life("hf:0") == ["adopt", "reject", "release"]
    assert (checkpoints / name).exists() == (name != "nothing at all")


async def test_an_adoption_that_is_cancelled_lets_go(shop: Shop, checkpoints: Path) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await shop.store.adopt(0, checkpoints / "base")
    assert scope.cancelled_caught
    assert shop.life("hf:0") == ["adopt", "release"]
    assert shop.last("hf:0").reason == "cancelled"


async def test_a_given_checkpoint_within_the_staging_directory_is_never_removed(
    checkpoints: Path, tmp_path: Path
) -> None:
    await dead_run(tmp_path / "staging", checkpoints, [5])
    given = tmp_path / "staging" / "step_5"
    shop = Shop(tmp_path / "staging", checkpoints / "base", keep=0)
    shop.store.open()
    link = tmp_path / "link"
    link.symlink_to(given)
    with shop.store.lease(await shop.store.adopt(0, link)):
        pass
    before = fingerprint(given)
    with shop.store.lease(await make(shop, 1, checkpoints / "whole")):
        pass
    await shop.settle()
    skip = await refused(shop, 5, CopiedCapture(checkpoints / "whole"))
    assert "given as a checkpoint to evaluate" in skip.detail
    shop.store.close()
    assert fingerprint(given) == before
    assert [p.name for p in shop.staging.iterdir()] == ["step_5"]


# -- space ---------------------------------------------------------------------------------------


async def test_a_staging_directory_that_is_too_small_is_named_with_both_numbers(
    shop: Shop, checkpoints: Path
) -> None:
    await make(shop, 1, checkpoints / "whole")
    shop.store.check_space(shop.store.base.num_bytes)  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=r"--eval-hf-dir .* bytes are free .* are needed"
    ) as caught:
        shop.store.check_space(10**18)
    assert str(shop.staging) in str(caught.value)
    assert str(10**18) in str(caught.value)


def test_a_base_that_is_not_whole_stops_the_store_before_it_takes_anything(
    checkpoints: Path, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "staging", checkpoints / "truncated")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*truncated"):
        shop.store.open()
    assert not shop.staging.exists()
    shop.store.close()


async def test_with_headers_alone_no_weight_is_read_and_two_steps_still_never_look_alike(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: object) -> None:
        raise AssertionError("the weights are not to be read")

    monkeypatch.setattr("vime.eval.snapshot.manifest.digest_tensors", unread)
    shop = Shop(tmp_path / "staging", checkpoints / "base", verify="headers")
    shop.store.open()
    try:
        made = await make(shop, 1, checkpoints / "whole")
        given = await shop.store.adopt(1, checkpoints / "whole")
        assert (made.verify, given.verify) == ("headers", "headers")
        assert Manifest.read(made.path).verify == "headers"
        assert made.weight_version != given.weight_version
    finally:
        shop.store.close()


async def test_a_given_checkpoint_behind_a_link_loop_is_skipped_as_any_that_is_not_whole(
    shop: Shop, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(EvalSkip, match="loop: no such directory") as caught:
        await shop.store.adopt(0, tmp_path / "loop")
    assert caught.value.reason == "snapshot_invalid"
    assert shop.life("hf:0") == ["adopt", "reject", "release"]


async def test_a_link_loop_in_the_place_of_a_snapshot_is_left_alone(
    shop: Shop, checkpoints: Path
) -> None:
    (shop.staging / "step_1").symlink_to("step_1")
    skip = await refused(shop, 1, CopiedCapture(checkpoints / "whole"))
    assert skip.reason == "export_failed"
    assert "it is a link" in skip.detail
    assert (shop.staging / "step_1").is_symlink()


def test_a_staging_directory_that_is_a_link_loop_is_refused(
    tmp_path: Path, checkpoints: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"loop: cannot be used as a staging directory"):
        Shop(tmp_path / "loop", checkpoints / "base").store.open()
