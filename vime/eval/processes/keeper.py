"""Runs one child process, and ends everything below it when its owner or the child is gone.

A script of its own, started by its path with ``python -I -S`` so that it is up in some tens of
milliseconds: it imports the standard library only. :mod:`vime.eval.processes.process` starts it::

    keeper.py CONTROL_FD OWNER_PID SCRATCH COMMAND [ARGUMENT ...]

``CONTROL_FD`` is one end of a socket pair whose other end the owner alone holds. The keeper
writes ``pid N`` (the child runs) or ``error ERRNO`` (it could not be started), and, when nothing
of the tree is left, ``exit CODE`` (negative: the signal that ended the child). It reads
``end SECONDS``: send SIGTERM to the child, and kill the tree so many seconds later.

It ends the tree when the child exits, when the socket closes, when its owner dies (watched
through a pidfd, because a forked relative of the owner may hold a copy of the socket), or when
it is signalled itself. As the *subreaper* of its tree it inherits every orphan below it,
daemons with a session of their own included, so that the tree has ended exactly when the keeper
has no child left. See prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG.

What a process leaves behind beside itself goes too. ``SCRATCH``, unless it is ``-``, is made with
mode 0700 for the tree's temporary files, and removed after its end. Shared memory and semaphores
are removed by Python's own resource trackers, processes of the tree that notice the death of all
the others and then end by themselves: they are killed last.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import time
from typing import NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

#: How long a resource tracker may clean up once all others are gone. It takes milliseconds, on a
#: busy machine longer; one that is killed before leaves shared memory behind for good.
TRACKER_GRACE_S = 4.0

#: Whatever else would end the keeper at once and leave its tree to nobody.
END_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)


class Process(NamedTuple):
    """One line of ``/proc/PID/stat``; ``start`` (in clock ticks) tells a reused pid apart."""

    pid: int
    state: str
    parent: int
    session: int
    start: int


def read_process(pid: int) -> Process | None:
    """What ``/proc`` says of one process; ``None`` when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 -- pathlib is slow to import
            stat = file.read()
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold spaces and parentheses itself.
    fields = stat.rpartition(b")")[2].split()
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def processes() -> dict[int, Process]:
    """Every process that can be seen, by pid; zombies included."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def with_descendants(roots: set[int], table: dict[int, Process]) -> set[int]:
    """``roots`` and every process below them, as pids."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    ahead = list(roots)
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, [])
    return found


def send(number: signal.Signals, process: Process) -> None:
    """Signal exactly this process, never another one that was given its pid since."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:  # Linux before 5.3
            os.kill(process.pid, number)
        return
    try:
        now = read_process(process.pid)
        if now is not None and now.start == process.start:
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass  # it has gone just now, or belongs to another user: the caller looks again
    finally:
        os.close(pidfd)


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of Python's multiprocessing, or of its kin loky."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 -- as above
            return b"resource_tracker" in file.read()
    except OSError:
        return False


class Ending:
    """Kills processes; resource trackers, which clean up behind the others, only after them."""

    def __init__(self) -> None:
        self._spare_until: float | None = None

    def kill(self, alive: list[Process]) -> None:
        """Kill all that may be killed by now; to be called again until nobody is alive."""
        trackers = [process for process in alive if is_tracker(process.pid)]
        others = [process for process in alive if process not in trackers]
        for process in others:
            send(signal.SIGKILL, process)
        now = time.monotonic()
        if not others and self._spare_until is None:
            self._spare_until = now + TRACKER_GRACE_S
        spared = self._spare_until is None or now < self._spare_until
        for process in trackers:  # one that was stopped cannot clean up
            send(signal.SIGCONT if spared else signal.SIGKILL, process)


def remove_tree(directory: str) -> None:
    """Remove a directory with everything in it; what cannot be removed stays."""
    import shutil  # slow to import, and needed once, at the end

    shutil.rmtree(directory, ignore_errors=True)


class Keeper:
    """Keeps one child. Nothing unblocks it but its owner, the child, and signals."""

    def __init__(self, control: socket.socket, owner: int, scratch: str | None) -> None:
        self.control = control
        self.owner = owner
        self.scratch = scratch
        self.child = 0
        self.status: int | None = None
        self.deadline: float | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self, argv: list[str]) -> int:
        """Start ``argv``, keep it, end its tree; returns the exit status for a shell."""
        wake = self._listen_to_signals()
        self._prctl(PR_SET_NAME, ctypes.c_char_p(b"vime-keeper"))
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        watched = self._watched(wake)
        if os.getppid() != self.owner:
            return 1  # the owner died before it could be watched
        error = self._start(argv)
        if error:
            os.waitpid(self.child, 0)
            self._remove_scratch()
            self._report(f"error {error}\n")
            return 127
        self._report(f"pid {self.child}\n")
        self._let_go_of_stdio()
        self._keep(watched, wake)
        self._end_tree(wake)
        self._remove_scratch()
        assert self.status is not None, "the child was among those that were reaped"
        self._report(f"exit {self.status}\n")
        return self.status if self.status >= 0 else 128 - self.status

    def _prctl(self, option: int, value: object) -> None:
        if self._libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

    def _listen_to_signals(self) -> int:
        """A file descriptor that becomes readable at a signal."""
        wake, wakeup = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in END_SIGNALS:
            signal.signal(number, self._end_now)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return wake

    def _end_now(self, *_: object) -> None:
        self.deadline = 0.0

    def _watched(self, wake: int) -> select.poll:
        self.control.setblocking(False)
        watched = select.poll()
        watched.register(wake, select.POLLIN)
        watched.register(self.control, select.POLLIN)
        # It fails on Linux before 5.3, and when the owner is gone: the socket says so as well.
        with contextlib.suppress(OSError):
            watched.register(os.pidfd_open(self.owner), select.POLLIN)
        return watched

    def _start(self, argv: list[str]) -> int:
        """Fork and execute; returns 0, or the errno of what failed."""
        if self.scratch is not None:
            os.mkdir(self.scratch, 0o700)  # noqa: PTH102 -- pathlib is slow to import
        failed, failing = os.pipe()  # closed by a successful exec, and not inherited
        keeper = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            try:
                self._become(argv, keeper)
            except OSError as error:
                os.write(failing, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(failing)
        with os.fdopen(failed, "rb") as file:
            return int(file.read() or 0)

    def _become(self, argv: list[str], keeper: int) -> NoReturn:
        """In the child: a process group of its own, death with the keeper, then the command."""
        os.setpgid(0, 0)
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores these, and exec would keep it
        os.execvp(argv[0], argv)  # noqa: S606 -- its argv is what the owner asked for

    def _let_go_of_stdio(self) -> None:
        """Leave both pipes to the child, so that each end sees the other one close."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)

    def _keep(self, watched: select.poll, wake: int) -> None:
        """Wait until the child has exited, or the tree has to be ended."""
        while True:
            self._reap()
            left_s = None if self.deadline is None else self.deadline - time.monotonic()
            if self.status is not None or (left_s is not None and left_s <= 0):
                return
            ready = watched.poll(None if left_s is None else left_s * 1000)
            drain(wake)
            for fd, _ in ready:
                if fd == self.control.fileno():
                    self._obey()
                elif fd != wake:
                    return  # the owner has died

    def _obey(self) -> None:
        try:
            data = self.control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end_now()
        for line in data.decode().splitlines():
            _, grace = line.split()
            deadline = time.monotonic() + float(grace)
            if float(grace) > 0 and self.status is None:
                os.kill(self.child, signal.SIGTERM)  # not reaped yet: the pid is still its own
            self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)

    def _reap(self) -> bool:
        """Bury whoever has died; returns whether nobody is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.child:
                self.status = os.waitstatus_to_exitcode(status)

    def _end_tree(self, wake: int) -> None:
        """Kill until no child is left; a process in an uninterruptible wait is waited for."""
        pause_ms = 2.0
        ending = Ending()
        waiting = select.poll()
        waiting.register(wake, select.POLLIN)
        while True:
            table = processes()
            below = with_descendants({os.getpid()}, table) - {os.getpid()}
            ending.kill([table[pid] for pid in below if table[pid].state != "Z"])
            if self._reap():
                return
            waiting.poll(pause_ms)
            drain(wake)
            pause_ms = min(pause_ms * 1.5, 1000.0)

    def _remove_scratch(self) -> None:
        if self.scratch is not None:
            remove_tree(self.scratch)

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the owner is gone, and its wish to know with it
            self.control.send(line.encode())


def drain(fd: int) -> None:
    """Empty a non-blocking pipe."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def main(argv: list[str]) -> int:
    """Run as a script; see the module's docstring."""
    control = socket.socket(fileno=int(argv[1]))
    control.set_inheritable(False)
    scratch = None if argv[3] == "-" else argv[3]
    return Keeper(control, int(argv[2]), scratch).run(argv[4:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
