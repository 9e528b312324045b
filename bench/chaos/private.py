"""File systems of a chaos run's own, which vanish with its last process, however that ends.

A mount namespace (mount_namespaces(7)) is entered before anything else: ``/dev/shm`` is empty at
first and nobody else's, and staging is a small file system that can really be full.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- a file system, not a temporary file
STAGING_BYTES = 64 << 20

# From <linux/sched.h> and <sys/mount.h>.
_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_MNT_DETACH = 2


def enter() -> str | None:
    """Enter a mount namespace of this process's own; call it before any thread is started.

    Returns:
        Why that cannot be here, as a sentence; ``None`` when it was done.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            _unshare(_CLONE_NEWNS)
        else:
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _mount(b"none", Path("/"), None, _MS_REC | _MS_PRIVATE, None)
        _mount(b"tmpfs", SHARED_MEMORY, b"tmpfs", 0, b"mode=1777")
    except OSError as error:
        return f"no mount namespace: {error.strerror}"
    return None


def mount_staging(directory: Path) -> None:
    """Put a small file system in memory at ``directory``, which is made.

    Raises:
        OSError: :func:`enter` was not done.
    """
    directory.mkdir(parents=True)
    _mount(b"tmpfs", directory, b"tmpfs", 0, f"mode=0700,size={STAGING_BYTES}".encode())


def unmount(directory: Path) -> None:
    """Take away what :func:`mount_staging` has put there."""
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(directory), _MNT_DETACH)


class Ballast:
    """Fills a file system to the last byte, and empties it again.

    Args:
        path: a file on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Leave no room; whatever is written next is ``ENOSPC``."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = 1 << 20
            while size:
                try:
                    os.write(fd, bytes(size))
                except OSError:
                    size //= 2
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Give the room back."""
        self._path.unlink(missing_ok=True)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(
    source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), options):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
