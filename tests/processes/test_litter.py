"""Whoever of a kept tree is killed, its temporary files and its shared memory go with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from tests.watch import watching
from vime.eval.processes.process import KeptProcess, spawn

PROGRAM = [sys.executable, str(Path(__file__).parents[1] / "programs" / "litter.py")]

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def littering(log: Path) -> AsyncIterator[tuple[KeptProcess, list[Path]]]:
    async with await spawn(PROGRAM, name="l", log_path=log, piped=True, scratch=True) as process:
        assert process.stdout is not None
        line = b""
        with anyio.fail_after(20):
            while not line.endswith(b"\n"):
                line += await process.stdout.receive()
        paths = [Path(name) for name in json.loads(line)]
        assert len(paths) == 5
        assert all(path.exists() for path in paths)
        assert paths[0].stat().st_mode & 0o777 == 0o700
        yield process, paths


def left(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.exists()]


async def test_nothing_is_left_when_the_tree_is_ended(tmp_path: Path) -> None:
    async with littering(tmp_path / "log") as (process, paths):
        await process.end()
        assert left(paths) == []


@pytest.mark.parametrize("victim", ["child", "keeper"])
async def test_nothing_is_left_when_one_of_them_is_killed(victim: str, tmp_path: Path) -> None:
    async with littering(tmp_path / "log") as (process, paths):
        os.kill(process.pid if victim == "child" else process.keeper_pid, signal.SIGKILL)
        with anyio.fail_after(10):
            await process.wait()
        assert left(paths) == []


async def test_nothing_is_left_when_the_whole_tree_was_stopped(tmp_path: Path) -> None:
    async with littering(tmp_path / "log") as (process, paths):
        for each in psutil.Process(process.keeper_pid).children(recursive=True):
            each.suspend()  # the tracker of shared memory too, which is to clean up
        await process.end(grace_s=0)
        assert left(paths) == []


async def test_nothing_is_left_of_a_command_that_cannot_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        await spawn(["/no/such"], name="n", log_path=tmp_path / "logs" / "log", scratch=True)
    assert os.listdir(tmp_path) == ["logs"]  # noqa: PTH208 -- a look, not a walk


OWNER = """
import anyio, sys
from pathlib import Path
from vime.eval.processes.process import spawn

async def main():
    log = Path(sys.argv[1])
    process = await spawn(sys.argv[2:], name="l", log_path=log, piped=True, scratch=True)
    line = b""
    while not line.endswith(b"\\n"):
        line += await process.stdout.receive()
    sys.stdout.write(line.decode() + f"{process.keeper_pid}\\n")
    sys.stdout.flush()
    await anyio.sleep_forever()

anyio.run(main)
"""


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log"), *PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        paths = [Path(name) for name in json.loads(owner.stdout.readline())]
        assert len(left(paths)) == 5
        with watching([int(owner.stdout.readline())]) as keeper:
            owner.kill()
            keeper.assert_gone()
    assert left(paths) == []
