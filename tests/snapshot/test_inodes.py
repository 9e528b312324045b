"""A file system that holds no more files is told apart from one that holds no more bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.snapshot.captures import Shop
from tests.snapshot.mounts import small_file_system
from tests.snapshots import make_model, make_tokenizer
from vime.eval.snapshot import faults
from vime.eval.snapshot.export import TransformersExporter
from vime.eval.snapshot.files import list_files
from vime.rollout.checkpoint_eval import EvalSkip

pytestmark = pytest.mark.anyio


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for much, in a handful of files."""
    with small_file_system(tmp_path / "few", "size=40m,nr_inodes=14") as place:
        yield place


async def test_a_file_system_without_inodes_is_said_to_have_none(
    few_inodes: Path, checkpoints: Path
) -> None:
    shop = Shop(few_inodes / "staging", checkpoints / "base", keep=0)
    shop.store.open()
    message = (
        r"the staging file system has no inodes left for more files \(0 of them and [0-9]{8} bytes "
        r"are free\) in --eval-hf-dir .*nr_inodes.*lower --eval-keep-snapshots"
    )
    ballast = [few_inodes / str(number) for number in range(6)]
    for path in ballast:
        path.touch()
    exporter = TransformersExporter(make_model(3), make_tokenizer())
    draft = shop.store.begin(1)
    with pytest.raises(EvalSkip, match=message) as caught:
        await shop.store.seal(draft, exporter.capture(1, draft.directory))
    assert caught.value.reason == "export_failed"
    await shop.settle()
    with contextlib.suppress(OSError):
        for number in range(20):
            (few_inodes / f"more-{number}").touch()
    with pytest.raises(OSError, match=f"^{message}"):
        shop.store.begin(2)
    other = Shop(few_inodes / "other", None, run_id="run-b")
    with pytest.raises(ValueError, match=message):
        other.store.open()
    for path in [path for path in list_files(few_inodes)[0] if "/" not in path]:
        (few_inodes / path).unlink()
    draft = shop.store.begin(3)
    await shop.store.seal(draft, exporter.capture(3, draft.directory))
    shop.store.close()


def test_what_is_lacking_on_a_full_file_system_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(num_bytes: int, inodes: int | None, expected: int) -> str:
        monkeypatch.setattr(faults, "free_bytes", lambda _: num_bytes)
        monkeypatch.setattr(faults, "free_inodes", lambda _: inodes)
        return str(faults.full(tmp_path / "gone", expected))

    assert "no inodes left" in said(1000, 0, 10)
    assert "no inodes left" in said(1000, 0, 0)
    assert "is full: 5 bytes are free and a snapshot needs 10 in" in said(5, 0, 10)
    assert "is full: 5 bytes are free in" in said(5, None, 0)
    assert "(a quota may be used up)" in said(1000, None, 10)
    assert "(a quota may be used up)" in said(1000, 10**6, 10)
