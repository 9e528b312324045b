"""Directories for the time of a benchmark, on disk and in memory; nothing of them is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cli import UsageError

_MEMORY = Path("/dev/shm")  # noqa: S108 -- a file system, not a temporary file


@dataclass(frozen=True)
class Scratch:
    """Two directories of a benchmark's own.

    Attributes:
        disk: on the file system of temporary files.
        memory: on a file system in memory, as staging directories should be; on disk where
            there is none.
    """

    disk: Path
    memory: Path

    def subject(self, name: str) -> tuple[Path, Path]:
        """A directory of either kind for one subject."""
        pair = self.disk / name, self.memory / name
        for directory in pair:
            directory.mkdir(parents=True, exist_ok=True)
        return pair


@contextmanager
def scratch(needed_bytes: int = 0) -> Iterator[Scratch]:
    """Make both directories, and remove them at the end.

    Args:
        needed_bytes: room that is needed in memory.

    Raises:
        UsageError: there is no such room.
    """
    root = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise UsageError(
            f"{root}: {free / 1e9:.1f} GB are free, and {needed_bytes / 1e9:.1f} GB are needed; "
            "ask for a smaller model"
        )
    with (
        tempfile.TemporaryDirectory(prefix="vime-bench-") as disk,
        tempfile.TemporaryDirectory(prefix="vime-bench-", dir=root) as memory,
    ):
        yield Scratch(Path(disk), Path(memory))
