"""Child processes which never outlive their owner, with everything that they start themselves.

:func:`spawn` puts a keeper (:mod:`vime.eval.processes.keeper`, one small process) between the
owner and the child. Whichever of the three dies, by ``kill -9`` too, nothing of the child's tree
is left:

- the owner dies: the keeper notices, kills the tree, and exits;
- the child dies: the keeper kills what the child has started, and exits with its status;
- the keeper dies: the child dies with it (PR_SET_PDEATHSIG), and the owner, in
  :meth:`KeptProcess.wait` or :meth:`KeptProcess.end`, kills the rest. It knows them by their
  session, by a marker in their environment, and by their parents.

Nor is anything left of its temporary files, shared memory and semaphores.

Linux only.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import anyio
import anyio.to_thread

from vime.eval.appending import append_regular
from vime.eval.processes import keeper
from vime.eval.processes.pipes import PipeReader, PipeWriter

#: The environment variable that marks a kept tree: one identifier for each keeper above it.
MARKER: Final = "VIME_KEEPER"

_START_TIMEOUT_S: Final = 30.0
_SWEEP_TIMEOUT_S: Final = keeper.TRACKER_GRACE_S + 2.0
_REAP_TIMEOUT_S: Final = 2.0
_TAIL_BYTES: Final = 64 * 1024

T = TypeVar("T")


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread of its own, however busy the shared ones are."""
    return await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))


@dataclass
class _Launched:
    """What :func:`_launch` made; ``stdin`` and ``stdout`` are this side's ends of the pipes."""

    keeper: subprocess.Popen[bytes]
    control: socket.socket
    marker: str
    log_start: int
    scratch: Path | None
    stdin: int | None
    stdout: int | None


class KeptProcess:
    """A child and everything below it, which never outlives its owner; made by :func:`spawn`.

    Its owner calls :meth:`end` when it is done with it, also after the child has exited.

    Attributes:
        name: what people call it.
        pid: of the child itself.
        stdin, stdout: the child's, where it was spawned with ``piped=True``; else ``None``.
        log_path: where its output goes.
        returncode: the exit status, or the negative signal that ended the child; ``None`` as
            long as :meth:`wait` and :meth:`end` have not seen the end of the whole tree.
    """

    def __init__(self, name: str, log_path: Path, launched: _Launched) -> None:
        self.name = name
        self.pid = 0
        self.log_path = log_path
        self.returncode: int | None = None
        self.stdin = None if launched.stdin is None else PipeWriter(launched.stdin)
        self.stdout = None if launched.stdout is None else PipeReader(launched.stdout)
        self._keeper = launched.keeper
        self._control = launched.control
        self._marker = launched.marker
        self._log_start = launched.log_start
        self._scratch = launched.scratch
        self._ending = keeper.Ending()
        self._reported: int | None = None
        self._heard = b""
        self._hearing = anyio.Lock()

    @property
    def keeper_pid(self) -> int:
        """The pid of the keeper, which is also the id of the tree's session."""
        return self._keeper.pid

    def has_ended(self) -> bool:
        """Whether the end has come, so that :meth:`wait` returns soon; it waits for nothing."""
        if self.returncode is not None or self._reported is not None:
            return True
        try:
            data = self._control.recv(4096, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return data == b"" or b"exit" in data

    async def wait(self) -> int:
        """Wait until the child has exited and nothing of its tree is left.

        Any number of tasks may wait. Cancelling it leaves the child alone.

        Returns:
            The exit status, or the negative number of the signal that ended the child.

        Raises:
            TimeoutError: the keeper was killed, and some of the tree cannot be (a process in
                an uninterruptible wait). Waiting again tries again.
        """
        async with self._hearing:
            while self.returncode is None:
                line = None if self._reported is not None else await self._hear()
                if line is not None:
                    self._reported = int(line[1]) if line[0] == "exit" else None
                    continue
                with anyio.CancelScope(shield=True):
                    self.returncode = await _in_thread(self._bury)
        return self.returncode

    async def end(self, timeout_s: float = 5.0, *, grace_s: float = 0.0) -> None:
        """End the whole tree; returns when nothing of it is left, and it may be called again.

        Shielded from cancellation, and bounded by ``grace_s + timeout_s``.

        Args:
            timeout_s: seconds for the killing.
            grace_s: seconds between a SIGTERM to the child and the killing; 0 kills at once.

        Raises:
            TimeoutError: some of it cannot be killed (a process in an uninterruptible wait).
        """
        with anyio.CancelScope(shield=True):
            try:
                await self._end(timeout_s, grace_s)
            finally:
                for stream in (self.stdin, self.stdout):
                    if stream is not None:
                        await stream.aclose()

    async def _end(self, timeout_s: float, grace_s: float) -> None:
        if self.returncode is None:
            self._ask_to_end(grace_s)
            with anyio.move_on_after(grace_s + timeout_s / 2):
                await self.wait()
        if self.returncode is None:  # the keeper is stopped, or the kernel is slow
            await _in_thread(self._sweep)
            with anyio.move_on_after(timeout_s / 2):
                await self.wait()
        if self.returncode is None:
            raise TimeoutError(f"{self.name}: not all of process {self.pid}'s tree could be killed")

    def log_tail(self, lines: int = 20) -> str:
        """The last ``lines`` lines that this child has written to its log; reads the file."""
        with self.log_path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def _hear(self) -> list[str] | None:
        """The keeper's next line, as words; ``None`` when it has gone."""
        while b"\n" not in self._heard:
            try:
                data = self._control.recv(4096)
            except BlockingIOError:
                await anyio.wait_readable(self._control)
                continue
            except ConnectionError:  # it died with an order of ours unread
                data = b""
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().split()

    async def _begin(self, command: str) -> None:
        """Wait until the child has been executed."""
        line = await self._hear()
        if line is None:
            tail = await _in_thread(self.log_tail)
            raise RuntimeError(f"{self.name}: the keeper of {command} died at its start\n{tail}")
        if line[0] == "error":
            number = int(line[1])
            raise OSError(number, os.strerror(number), command)
        self.pid = int(line[1])

    def _ask_to_end(self, grace_s: float) -> None:
        try:
            self._control.send(f"end {grace_s}\n".encode())
        except OSError:
            return  # the keeper has gone: wait() sees it, and sweeps

    def _sweep(self) -> list[int]:
        """Kill whatever is marked as of this tree; returns the pids that were still alive.

        Resource trackers are spared for a while: they clean up behind the others.
        """
        table = keeper.processes()
        # The keeper is not reaped yet, so nobody else can have its pid as a session's id.
        ours = {
            process.pid
            for process in table.values()
            if process.session == self._keeper.pid or _is_marked(process.pid, self._marker)
        }
        alive = [
            pid
            for pid in keeper.with_descendants(ours, table) - {os.getpid()}
            if table[pid].state != "Z"
        ]
        self._ending.kill([table[pid] for pid in alive])
        return alive

    def _bury(self) -> int:
        """The keeper has reported the end, or has gone: sweep then, reap it, say how it ended."""
        deadline = time.monotonic() + _SWEEP_TIMEOUT_S
        while self._reported is None and (left := self._sweep()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: processes {left} cannot be killed")
            time.sleep(0.01)
        try:
            self._keeper.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.name}: its keeper does not exit") from error
        self._control.close()
        if self._reported is None and self._scratch is not None:
            keeper.remove_tree(str(self._scratch))
        # Without a report the keeper was killed, and the child was killed with it.
        return -9 if self._reported is None else self._reported


async def spawn(
    argv: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    log_path: Path,
    piped: bool = False,
    cwd: Path | None = None,
    scratch: bool = False,
) -> KeptProcess:
    """Start a child which never outlives this process; a Ctrl-C in the terminal misses it.

    Args:
        argv: the command, looked up on the ``PATH``, and its arguments. Everyone on the
            machine can read them: secrets belong into ``env``.
        name: what people call it.
        env: its whole environment; this process's when ``None``. ``VIME_KEEPER`` is added, and
            ``SPT_NOENV``, which keeps a child that renames itself from overwriting the former.
        log_path: appended to, with mode 0600; its directory is made if need be. Receives
            standard output and error; with ``piped`` standard error only.
        piped: make ``stdin`` and ``stdout`` byte streams; else they are ``/dev/null`` and the log.
        cwd: its working directory.
        scratch: its ``TMPDIR`` is a new private directory, which is removed after its end. Its
            name is short: sockets in it may have names of up to 60 characters.

    Raises:
        OSError: the command cannot be executed (``FileNotFoundError``, ``PermissionError`` …),
            or the log cannot be opened.
        TimeoutError: the child was not there after 30 s.
    """
    process = KeptProcess(
        name, log_path, await _in_thread(lambda: _launch(argv, env, log_path, piped, cwd, scratch))
    )
    try:
        with anyio.fail_after(_START_TIMEOUT_S):
            await process._begin(argv[0])
    except BaseException:
        await process.end()
        raise
    return process


def _launch(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    log_path: Path,
    piped: bool,
    cwd: Path | None,
    scratch: bool,
) -> _Launched:
    """Start the keeper; every file descriptor is closed again when that fails."""
    marker = uuid.uuid4().hex
    environment = _marked(os.environ if env is None else env, marker)
    directory = Path(tempfile.gettempdir(), f"vime-{marker[:12]}") if scratch else None
    if directory is not None:
        environment["TMPDIR"] = str(directory)
    log, log_start = _open_log(log_path)
    mine, its = socket.socketpair()
    mine.setblocking(False)
    stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if piped else (subprocess.DEVNULL, log)
    command = [sys.executable, "-I", "-S", keeper.__file__, str(its.fileno()), str(os.getpid())]
    command += [str(directory or "-")]
    try:
        process = subprocess.Popen(
            [*command, *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=log,
            env=environment,
            cwd=cwd,
            pass_fds=(its.fileno(),),
            start_new_session=True,
            bufsize=0,
        )
    except BaseException:
        mine.close()
        raise
    finally:
        its.close()
        os.close(log)
    ends = [_detach(stream) for stream in (process.stdin, process.stdout)]
    process.stdin = process.stdout = None
    return _Launched(process, mine, marker, log_start, directory, *ends)


def _detach(stream: object) -> int | None:
    """The file descriptor of a pipe that ``subprocess`` made, taken out of its hands."""
    if stream is None:
        return None
    fd = os.dup(stream.fileno())  # type: ignore[attr-defined]
    stream.close()  # type: ignore[attr-defined]
    return fd


def _open_log(path: Path) -> tuple[int, int]:
    """The log, opened for appending, and its present size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = append_regular(path, 0o600)
    os.fchmod(fd, 0o600)
    return fd, os.fstat(fd).st_size


def _marked(env: Mapping[str, str], marker: str) -> dict[str, str]:
    above = env.get(MARKER)
    return {**env, MARKER: f"{above},{marker}" if above else marker, "SPT_NOENV": "1"}


def _is_marked(pid: int, marker: str) -> bool:
    """Whether the process was started with the marker in its environment."""
    try:
        environment = Path("/proc", str(pid), "environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    mark = f"{MARKER}=".encode()
    return any(
        entry.startswith(mark) and marker.encode() in entry for entry in environment.split(b"\0")
    )
