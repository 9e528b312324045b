"""A directory of one's own: private, gone with its owner, and swept when that was killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vime.eval.own_directory import held, own_directory

_OWNER = """
import sys
from pathlib import Path
from vime.eval.own_directory import own_directory
with own_directory("probe", Path(sys.argv[1])) as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_owner(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_it_is_private_and_goes_with_its_owner_whatever_happens(tmp_path: Path) -> None:
    def use_it_and_fail() -> None:
        with own_directory("probe", tmp_path) as directory:
            assert directory.parent == tmp_path
            assert directory.stat().st_mode & 0o777 == 0o700
            (directory / "missing").read_text()

    with pytest.raises(FileNotFoundError, match="missing"):
        use_it_and_fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_owner_has_left_goes_and_a_live_ones_stays(tmp_path: Path) -> None:
    stranger = tmp_path / "probe-of-somebody"
    stranger.mkdir()
    with another_owner(tmp_path) as (_alive, kept), another_owner(tmp_path) as (killed, left):
        killed.kill()
        killed.wait()
        assert (left / "file").exists()
        with own_directory("probe", tmp_path) as mine:
            assert {*tmp_path.iterdir()} == {stranger, kept, mine}
            with pytest.raises(BlockingIOError), held(kept):
                raise AssertionError("its owner is alive")
    assert list(tmp_path.iterdir()) == [stranger]


def test_one_that_is_swept_in_the_moment_of_its_making_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    made: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_lose_the_first(**where: str) -> str:
        path = Path(make(**where))
        if not made:
            path.rmdir()
        made.append(path)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    with own_directory("probe", tmp_path) as directory:
        assert directory == made[1]
