"""The demo's staging directory: private, in memory, and gone when its run has ended."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vime.eval import ConfigError


@contextmanager
def staging(args: argparse.Namespace) -> Iterator[None]:
    """Give the demo's fleet a private staging directory in memory, and remove it afterwards.

    A demo that is resumed has the one that it had. What other killed demos have left is removed
    as well, so that memory does not fill up: they lose the snapshots that were still pending.

    Raises:
        ConfigError: the run that is to be resumed is alive.
    """
    if args.demo != "fleet" or (args.eval_hf_dir and not args.staging_is_ours):
        yield
        return
    memory = Path("/dev/shm")  # noqa: S108 -- a file system, in which we make our own directory
    root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    prefix = f"vime-demo-{os.getuid()}-"
    if args.eval_hf_dir:
        Path(args.eval_hf_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        args.eval_hf_dir, args.staging_is_ours = tempfile.mkdtemp(prefix=prefix, dir=root), True
    directory = Path(args.eval_hf_dir)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory))
        except BlockingIOError:
            message = f"--resume {args.resume}: that run is alive; wait for it, or end it first"
            raise ConfigError([message]) from None
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for path in root.glob(f"{prefix}*"):
            if path != directory:
                remove_if_dead(path)
        yield


def remove_if_dead(path: Path) -> None:
    """Remove what a killed demo has left: nobody holds its lock any more."""
    with suppress(OSError), locked(path):
        if time.time() - path.stat().st_mtime > 60:  # a younger one's lock may be to come
            shutil.rmtree(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock; raises ``BlockingIOError`` when a live process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
