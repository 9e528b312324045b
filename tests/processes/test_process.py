"""Kept processes: whoever dies, and however, nothing of the tree is left."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from tests.irregular import IRREGULAR, replace
from tests.watch import Watch, watching
from vime.eval.processes import process as process_module
from vime.eval.processes.process import KeptProcess, spawn

PROGRAMS = Path(__file__).parents[1] / "programs"
TREE = [sys.executable, str(PROGRAMS / "tree.py")]
KINDS = {"plain", "stopped", "own_session", "renamed_in_own_session", "daemon"}

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "child.log"


def open_fds() -> int:
    return psutil.Process().num_fds()


@asynccontextmanager
async def kept_tree(log: Path) -> AsyncIterator[tuple[KeptProcess, Watch]]:
    """A tree with every kind of descendant, standing; the watch includes child and keeper."""
    async with await spawn(TREE, name="tree", log_path=log, piped=True) as process:
        pids = json.loads(await read_line(process))
        assert set(pids) == KINDS
        with watching([*pids.values(), process.pid, process.keeper_pid]) as watch:
            yield process, watch


async def read_line(process: KeptProcess) -> bytes:
    assert process.stdout is not None
    line = b""
    with anyio.fail_after(20):
        while not line.endswith(b"\n"):
            line += await process.stdout.receive()
    return line


async def read_all(process: KeptProcess) -> bytes:
    assert process.stdout is not None
    with anyio.fail_after(20):
        return b"".join([part async for part in process.stdout])


@contextmanager
def owner(mode: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """A process that owns a kept tree, and the pids of all."""
    command = [sys.executable, str(PROGRAMS / "owner.py"), mode, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


# --- whoever is killed -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["idle", "blocked"])
def test_nothing_is_left_when_the_owner_is_killed(mode: str, log: Path) -> None:
    with owner(mode, log) as (process, pids), watching(pids.values()) as watch:
        process.kill()
        watch.assert_gone()


def test_nothing_is_left_when_the_owner_is_killed_while_stopped(log: Path) -> None:
    with owner("idle", log) as (process, pids), watching(pids.values()) as watch:
        process.send_signal(signal.SIGSTOP)
        process.kill()
        watch.assert_gone()


def test_nothing_is_left_when_a_forked_relative_of_the_killed_owner_lives_on(log: Path) -> None:
    with owner("cousin", log) as (process, pids):
        cousin = pids.pop("cousin")
        with watching([cousin]), watching(pids.values()) as watch:
            process.kill()
            watch.assert_gone()
            assert psutil.Process(cousin).status() == psutil.STATUS_SLEEPING


async def test_the_child_dies_with_its_keeper_before_the_owner_looks(log: Path) -> None:
    async with await spawn(["cat"], name="cat", log_path=log, piped=True) as process:
        with watching([process.pid]) as watch:
            os.kill(process.keeper_pid, signal.SIGKILL)
            watch.assert_gone()


async def test_nothing_is_left_when_the_child_is_killed(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        os.kill(process.pid, signal.SIGKILL)
        with anyio.fail_after(10):
            assert await process.wait() == -signal.SIGKILL
        watch.assert_gone(0.1)


async def test_wait_ends_the_tree_when_the_keeper_is_killed(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        os.kill(process.keeper_pid, signal.SIGKILL)
        with anyio.fail_after(10):
            assert await process.wait() == -signal.SIGKILL
        watch.assert_gone(0.1)


async def test_end_ends_the_tree_when_the_keeper_is_killed(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        os.kill(process.keeper_pid, signal.SIGKILL)
        await process.end()
        watch.assert_gone(0.1)


async def test_end_ends_the_tree_when_the_keeper_is_stopped(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        os.kill(process.keeper_pid, signal.SIGSTOP)
        await process.end(timeout_s=1.0)
        watch.assert_gone(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_nothing_is_left_when_the_keeper_is_told_to_end(number: int, log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        os.kill(process.keeper_pid, number)
        with anyio.fail_after(10):
            assert await process.wait() == -signal.SIGKILL
        watch.assert_gone(0.1)


async def test_end_ends_the_whole_tree_at_once(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        await process.end()
        watch.assert_gone(0.1)
        assert process.returncode == -signal.SIGKILL


async def test_nothing_is_left_of_a_kept_process_that_keeps_another(log: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "owner.py"), "blocked", str(log)]
    async with await spawn(command, name="owner", log_path=log, piped=True) as process:
        pids = json.loads(await read_line(process))
        with watching([*pids.values(), process.pid]) as watch:
            os.kill(process.keeper_pid, signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            watch.assert_gone()


async def test_killing_one_tree_leaves_another_alone(log: Path) -> None:
    async with (
        kept_tree(log) as (first, watch),
        await spawn(["cat"], name="cat", log_path=log, piped=True) as second,
    ):
        os.kill(first.keeper_pid, signal.SIGKILL)
        await first.end()
        watch.assert_gone(0.1)
        assert second.stdin is not None
        await second.stdin.send(b"still here\n")
        assert await read_line(second) == b"still here\n"


# --- ends that are asked for -----------------------------------------------------------------


async def test_a_child_may_exit_by_itself_within_its_grace(log: Path) -> None:
    script = "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done"
    async with await spawn(["sh", "-c", script], name="sh", log_path=log, piped=True) as process:
        await read_line(process)
        await process.end(grace_s=60)
        assert process.returncode == 7


async def test_a_child_that_ignores_its_grace_is_killed_after_it(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        started = time.monotonic()
        await process.end(grace_s=0.2)
        assert 0.2 <= time.monotonic() - started < 5
        watch.assert_gone(0.1)


async def test_an_end_without_grace_cuts_a_running_grace_short(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(functools.partial(process.end, grace_s=1000))
                await anyio.wait_all_tasks_blocked()
                await process.end()
        watch.assert_gone(0.1)


async def test_end_may_be_called_again_and_by_many(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(process.end)
        await process.end()
        watch.assert_gone(0.1)


async def test_end_ends_the_tree_in_a_cancelled_scope(log: Path) -> None:
    async with kept_tree(log) as (process, watch):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await process.end()
        watch.assert_gone(0.1)


async def test_a_cancelled_wait_leaves_the_child_and_the_other_waiters_alone(log: Path) -> None:
    async with await spawn(["cat"], name="cat", log_path=log, piped=True) as process:
        seen: list[int] = []

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                seen.append(await process.wait())

        scopes = [anyio.CancelScope() for _ in range(3)]
        async with anyio.create_task_group() as group:
            for scope in scopes:
                group.start_soon(wait, scope)
            await anyio.wait_all_tasks_blocked()
            scopes[0].cancel()  # the one that listens to the keeper
            await anyio.wait_all_tasks_blocked()
            assert process.returncode is None
            assert process.stdin is not None
            await process.stdin.aclose()
        assert seen == [0, 0]


async def test_a_spawn_that_is_cancelled_leaves_nothing(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anyio.CancelScope() as scope:
        keepers: list[Watch] = []
        processes: list[KeptProcess] = []
        begin = KeptProcess._begin

        async def cancelled_begin(process: KeptProcess, command: str) -> None:
            keepers.append(Watch([process.keeper_pid]))
            processes.append(process)
            scope.cancel()
            await begin(process, command)

        monkeypatch.setattr(KeptProcess, "_begin", cancelled_begin)
        await spawn(TREE, name="tree", log_path=log)
    assert scope.cancelled_caught
    assert processes[0].returncode == -signal.SIGKILL
    keepers[0].assert_gone(0.1)
    keepers[0].close()


# --- what the child is given -----------------------------------------------------------------


async def test_wait_returns_the_exit_status(log: Path) -> None:
    async with await spawn(["sh", "-c", "exit 3"], name="sh", log_path=log) as process:
        assert await process.wait() == 3
        assert process.returncode == 3


async def test_wait_returns_the_negative_signal(log: Path) -> None:
    async with await spawn(["sh", "-c", "kill -SEGV $$"], name="sh", log_path=log) as process:
        assert await process.wait() == -signal.SIGSEGV


async def test_a_command_that_is_not_there_is_named_and_leaves_nothing(log: Path) -> None:
    before = open_fds()
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        await spawn(["no-such-command"], name="nothing", log_path=log)
    assert open_fds() == before
    assert not psutil.Process().children()


async def test_a_command_that_is_no_program_is_named(log: Path) -> None:
    with pytest.raises(PermissionError, match="/dev/null"):
        await spawn(["/dev/null"], name="nothing", log_path=log)


@pytest.mark.parametrize("kind", IRREGULAR)
async def test_a_log_that_is_no_file_is_refused_and_not_waited_for(kind: str, log: Path) -> None:
    log.parent.mkdir()
    replace(log, kind)
    before = open_fds()
    with anyio.fail_after(60), pytest.raises(OSError, match=r"no regular file|device|directory"):
        await spawn(["true"], name="nothing", log_path=log)
    assert open_fds() == before


async def test_output_can_still_be_read_when_the_child_has_exited(log: Path) -> None:
    async with await spawn(["echo", "hello"], name="echo", log_path=log, piped=True) as process:
        await process.wait()
        assert await read_all(process) == b"hello\n"


async def test_large_messages_pass_in_both_directions(log: Path) -> None:
    message = os.urandom(3_000_000)
    async with await spawn(["cat"], name="cat", log_path=log, piped=True) as process:

        async def send() -> None:
            assert process.stdin is not None
            await process.stdin.send(message)
            await process.stdin.aclose()

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            assert await read_all(process) == message


async def test_sending_to_a_child_that_has_gone_raises(log: Path) -> None:
    async with await spawn(["true"], name="true", log_path=log, piped=True) as process:
        await process.wait()
        assert process.stdin is not None
        with pytest.raises(anyio.BrokenResourceError):
            await process.stdin.send(b"x" * 1_000_000)


async def test_end_wakes_whoever_reads_or_writes(log: Path) -> None:
    async with await spawn(["sleep", "1000"], name="sleep", log_path=log, piped=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        async def read() -> None:
            assert process.stdout is not None
            with pytest.raises((anyio.EndOfStream, anyio.ClosedResourceError)):
                await process.stdout.receive()

        async def write() -> None:
            assert process.stdin is not None
            with pytest.raises((anyio.BrokenResourceError, anyio.ClosedResourceError)):
                await process.stdin.send(b"x" * 1_000_000)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(read)
                group.start_soon(write)
                await anyio.wait_all_tasks_blocked()
                await process.end()
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdout.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdin.send(b"x")


async def test_the_log_is_private_even_if_it_existed(log: Path) -> None:
    make_public(log, "from an earlier life\n")
    script = "echo out; echo err >&2"
    async with await spawn(["sh", "-c", script], name="sh", log_path=log) as process:
        await process.wait()
        assert process.log_tail() == "out\nerr"
        assert process.log_tail(1) == "err"
    assert_private(log, "from an earlier life\nout\nerr\n")


def make_public(log: Path, text: str) -> None:
    log.parent.mkdir()
    log.write_text(text)
    log.chmod(0o644)


def assert_private(log: Path, text: str) -> None:
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text() == text


async def test_standard_error_goes_to_the_log_of_a_piped_child(log: Path) -> None:
    script = "echo out; echo err >&2"
    async with await spawn(["sh", "-c", script], name="sh", log_path=log, piped=True) as process:
        assert await read_all(process) == b"out\n"
        await process.wait()
        assert process.log_tail() == "err"


async def test_the_child_has_the_given_environment_and_directory(log: Path, tmp_path: Path) -> None:
    script = 'echo "$SECRET" "$HOME" "$PWD"'
    env = {"SECRET": "s3cret", "PATH": os.environ["PATH"]}
    async with await spawn(
        ["sh", "-c", script], name="sh", log_path=log, env=env, piped=True, cwd=tmp_path
    ) as process:
        assert await read_all(process) == f"s3cret  {tmp_path}\n".encode()


async def test_the_child_inherits_no_signal_setting(log: Path) -> None:
    command = ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        async with await spawn(command, name="grep", log_path=log, piped=True) as process:
            lines = (await read_all(process)).split(b"\n")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # Signals 32 and 33 are the C library's own; Python can neither see nor set them.
    ours = ~(0b11 << 31)
    assert [int(line.split()[1], 16) & ours for line in lines[:2]] == [0, 0]


async def test_the_child_inherits_no_file_descriptor(log: Path) -> None:
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        command = ["ls", "/proc/self/fd"]
        async with await spawn(command, name="ls", log_path=log, piped=True) as process:
            assert (await read_all(process)).split() == [b"0", b"1", b"2", b"3"]  # 3: the listing
    finally:
        os.close(held)


async def test_a_ctrl_c_reaches_no_kept_child(log: Path) -> None:
    async with await spawn(["cat"], name="cat", log_path=log, piped=True) as process:
        assert os.getsid(process.pid) != os.getsid(0)
        assert os.getpgid(process.pid) not in (os.getpgid(0), os.getpgid(process.keeper_pid))
        # A terminal signals its foreground process group, and a process group cannot span
        # sessions; the child has no controlling terminal either.
        assert psutil.Process(process.pid).terminal() is None


async def test_many_lives_leave_no_file_descriptor_and_no_process(log: Path) -> None:
    async def live() -> None:
        async with await spawn(["cat"], name="cat", log_path=log, piped=True):
            pass

    await live()
    before = open_fds()
    for _ in range(3):
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(live)
    assert open_fds() == before
    assert not psutil.Process().children()


async def test_what_cannot_be_killed_is_reported(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await spawn(["sleep", "1000"], name="sleep", log_path=log) as process:
        monkeypatch.setattr(process_module, "_SWEEP_TIMEOUT_S", 0.05)
        with monkeypatch.context() as patch:
            patch.setattr(process_module.KeptProcess, "_sweep", lambda _: [4711])
            os.kill(process.keeper_pid, signal.SIGKILL)
            with pytest.raises(TimeoutError, match="4711"):
                await process.wait()
        assert await process.wait() == -signal.SIGKILL
