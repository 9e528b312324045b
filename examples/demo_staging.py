"""The demo's staging directory: private, in memory, and gone when its run has ended."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vime.eval import ConfigError
from vime.eval.own_directory import held, own_directory

KIND = "vime-demo"


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
    elif args.eval_hf_dir:
        with _again(Path(args.eval_hf_dir), args.resume):
            yield
    else:
        memory = Path("/dev/shm")  # noqa: S108 -- a file system, not a file
        with own_directory(KIND, memory if os.access(memory, os.W_OK) else None) as directory:
            args.eval_hf_dir, args.staging_is_ours = str(directory), True
            yield


@contextmanager
def _again(directory: Path, run: str) -> Iterator[None]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(held(directory))
        except BlockingIOError:
            message = f"--resume {run}: that run is alive; wait for it, or end it first"
            raise ConfigError([message]) from None
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield
