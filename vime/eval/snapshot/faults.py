"""What is wrong with a staging directory while a run is under way, in words for people."""

from __future__ import annotations

import errno
from pathlib import Path

from vime.eval.snapshot.files import free_bytes, free_inodes

_FEW_INODES = 16
"""A snapshot has about as many files: with fewer left, it is for them that none can be made."""


class StagingFault(OSError):
    """An error of the staging directory; ``str()`` says all there is to say, and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


def lost(directory: Path, what: str) -> StagingFault:
    """The directory was taken from under the run.

    Args:
        directory: ``--eval-hf-dir``.
        what: how it is now, and what to do.
    """
    return StagingFault(
        errno.ESTALE,
        f"--eval-hf-dir {directory}: it was removed while this run was under way, {what}",
    )


def full(directory: Path, expected_bytes: int = 0) -> StagingFault:
    """Its file system takes no more: for lack of room, or of inodes.

    Args:
        directory: ``--eval-hf-dir``.
        expected_bytes: the size of a snapshot, if it is known.
    """
    place = next(path for path in (directory, *directory.parents) if path.exists())
    free, inodes = free_bytes(place), free_inodes(place)
    where = f"in --eval-hf-dir {directory}"
    fewer = "lower --eval-keep-snapshots or --eval-max-in-flight"
    if inodes is not None and inodes < _FEW_INODES and free >= expected_bytes:
        return StagingFault(
            errno.ENOSPC,
            f"the staging file system has no inodes left for more files ({inodes} of them and "
            f"{free} bytes are free) {where}; remove files there, name another file system (a "
            f"tmpfs has as many as its option nr_inodes says), or {fewer}",
        )
    needs = f" and a snapshot needs {expected_bytes}" if expected_bytes else ""
    quota = " (a quota may be used up)" if free >= expected_bytes > 0 else ""
    return StagingFault(
        errno.ENOSPC,
        f"the staging file system is full: {free} bytes are free{needs} {where}{quota}; name a "
        f"larger one, or {fewer}",
    )


def gib(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 2**30:.1f} GiB"
