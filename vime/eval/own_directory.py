"""A private directory that is removed with its owner, or by the next one when that was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def own_directory(kind: str, root: Path | None = None) -> Iterator[Path]:
    """A new directory of mode 0700, for as long as the context lasts.

    What owners of this kind and user have left who were killed is removed as well, so that disk
    or memory does not fill up.

    Args:
        kind: what it is for; the beginning of its name.
        root: where to make it; the system's place for temporary files when ``None``.

    Raises:
        OSError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if root is None else root
    prefix = f"{kind}-{os.getuid()}-"
    directory, descriptor = _make(parent, prefix)
    try:
        for path in parent.glob(f"{prefix}*"):
            if path != directory:
                _remove_if_dead(path)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            descriptor = _hold(directory)
        except (BlockingIOError, FileNotFoundError):
            continue  # whoever swept in this moment took it for a dead one's
        if directory.exists():
            return directory, descriptor
        os.close(descriptor)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a directory, which is then a live owner's.

    Raises:
        BlockingIOError: a live process holds it.
        OSError: it is no directory, or gone.
    """
    descriptor = _hold(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def _hold(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_dead(path: Path) -> None:
    with suppress(OSError), held(path):
        shutil.rmtree(path)
