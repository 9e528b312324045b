"""Opens what a run appends to: logs, metrics and scores, at places that people name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def append_regular(path: Path, mode: int) -> int:
    """Open a regular file for reading, and for writing at its end; it is made when missing.

    Args:
        path: a pipe or a device in its place is refused, not waited for.
        mode: of a new file.

    Returns:
        A file descriptor.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return fd
