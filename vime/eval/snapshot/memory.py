"""How much memory captures need, and whether this machine has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def available_bytes() -> int:
    """Memory that this process can still have: the machine's, or its control group's if less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        fields = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = next(int(value) for name, value in fields if name == "inactive_file")
    except (OSError, ValueError, StopIteration):  # no such group, or no limit ("max")
        return available
    return min(available, limit - used + cached)


def is_in_memory(directory: Path) -> bool:
    """Whether what is written there stays in memory."""
    path = os.path.realpath(directory)
    mounts = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if os.path.commonpath([path, partition.mountpoint]) == partition.mountpoint
    ]
    inmost = max(mounts, key=lambda partition: len(partition.mountpoint), default=None)
    return inmost is not None and inmost.fstype in _MEMORY_FILE_SYSTEMS


class Captures(Protocol):
    """An exporter that knows what its captures take."""

    max_captures: int

    def capture_bytes(self) -> int:
        """How much memory one takes."""


def check_captures(exporter: Any, *, snapshots_bytes: int = 0, num_ranks: int = 1) -> None:
    """See that captures fit into memory, beside the snapshots that are to be in memory too.

    Args:
        exporter: asked for :class:`Captures`; one that has no such thing is let pass.
        snapshots_bytes: size of all snapshots that are to lie in memory.
        num_ranks: how many processes of this machine have as many captures.

    Raises:
        ValueError: they do not fit; it says how much is needed. Or the exporter's own: weights
            that are not in memory (yet), say.
    """
    if not callable(getattr(exporter, "capture_bytes", None)):
        return
    captures: Captures = exporter
    max_captures, capture_bytes = captures.max_captures, captures.capture_bytes()
    needed = capture_bytes * max_captures * num_ranks + snapshots_bytes
    available = available_bytes()
    if needed <= available:
        return
    ranks = f" in each of {num_ranks} processes" if num_ranks > 1 else ""
    there = (
        f", and {_gib(snapshots_bytes)} for the snapshots, since --eval-hf-dir is in memory"
        if snapshots_bytes
        else ""
    )
    raise ValueError(
        f"--eval-max-captures {max_captures}: {_gib(needed)} of memory are needed and "
        f"{_gib(available)} are available: {max_captures} × {_gib(capture_bytes)} for copies of "
        f"the weights{ranks}{there}. Lower --eval-max-captures (1 does, when a snapshot is written "
        "before the next point is due), --eval-keep-snapshots or --eval-max-in-flight, or name an "
        "--eval-hf-dir on a disk"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
