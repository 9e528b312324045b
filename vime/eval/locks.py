"""Lock files: whether a live run has a directory, and which run that is."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Any

import orjson
import psutil

from vime.eval.snapshot.files import json_object

#: Of an identity's file, in bytes; whoever reads one believes no more of it.
MAX_BYTES = 1 << 16

_SCHEMA = 1


class LockedError(Exception):
    """Somebody else has the lock; the message says who."""


class FileLock:
    """An exclusive lock by a file of its own; it falls when its process dies.

    Args:
        path: the file; made, and removed when the lock is released.
        run_id: who takes it, for those who come meanwhile.

    Raises:
        LockedError: another has it.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._descriptor: int | None = _take(self._path, run_id)

    @property
    def is_in_place(self) -> bool:
        """Whether whoever comes finds it held: somebody may have removed its file."""
        return self._descriptor is not None and _is_file(self._descriptor, self._path)

    def release(self) -> None:
        """Let the next one have it; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if _is_file(descriptor, self._path):  # it may be another's by now
            self._path.unlink(missing_ok=True)  # while it is held: nobody waits on it
        # Unlocked by name: a child process may have inherited the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def identity(run_id: str) -> dict[str, Any]:
    """Who this process is, as lock files and rooms say it."""
    return {
        "schema": _SCHEMA,
        "run_id": run_id,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


def run_of(fields: dict[str, Any]) -> str | None:
    """The run that an :func:`identity` names."""
    run_id = fields.get("run_id")
    schema = fields.get("schema")
    return run_id if type(schema) is int and schema == _SCHEMA and type(run_id) is str else None


def _take(path: Path, run_id: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{path.name}: no regular file", str(path))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, orjson.dumps(identity(run_id)), 0)
                return descriptor
        except BlockingIOError:
            holder = _holder(os.pread(descriptor, MAX_BYTES, 0))
            os.close(descriptor)
            raise LockedError(holder) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the one before has just closed, and taken its lock's file away


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _holder(content: bytes) -> str:
    """Who a lock's file says has it."""
    try:
        fields = json_object(content, "the lock")
    except ValueError:
        return "another live run"
    pid, host = fields.get("pid"), fields.get("host")
    holder = f"the live run {fields.get('run_id')} (pid {pid} on {host})"
    if type(pid) is int and host == socket.gethostname() and not psutil.pid_exists(pid):
        return f"a process that outlives {holder.replace('live ', '')}"
    return holder
