"""Looks for what a run has left behind: processes, temporary files, shared memory, ports."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos.private import SHARED_MEMORY
from bench.chaos.victims import GONE_S, marked, role_of
from vime.eval.snapshot.staging import LOCK, Staging

_POLL_S = 0.1


@dataclass
class Leftovers:
    """What was found, by name.

    Attributes:
        processes: alive 10 s after the end.
        directories: temporary directories and files, and what does not belong into staging.
        shared_memory: names below ``/dev/shm``.
        ports: of engines, that cannot be bound.
    """

    processes: list[str] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)

    def add(self, other: Leftovers) -> None:
        """Take over what another look has found."""
        self.processes += other.processes
        self.directories += other.directories
        self.shared_memory += other.shared_memory
        self.ports += other.ports


def living(mark: str, timeout_s: float = GONE_S) -> list[str]:
    """Wait until no process has the mark; the names of those that live on, and are ended then."""
    deadline = time.monotonic() + timeout_s
    while left := list(marked(mark)):
        if time.monotonic() > deadline:
            names = [f"{process.pid} {role_of(process) or 'helper'}" for process in left]
            for process in left:
                process.kill()
            return names
        time.sleep(_POLL_S)
    return []


def names_in(directory: Path) -> set[str]:
    """What lies there."""
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def shared_memory_since(before: set[str]) -> list[str]:
    """What has come to lie in ``/dev/shm``."""
    return sorted(names_in(SHARED_MEMORY) - before)


def taken_ports(urls: Iterable[str]) -> list[str]:
    """Those of the addresses at which nobody else can listen."""
    taken = []
    for url in sorted(set(urls)):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind((host, int(port)))
                free.listen()
            except OSError:
                taken.append(url)
    return taken


def strangers_in_staging(staging: Path, keep: int) -> list[str]:
    """What an orderly end should have removed: the lock, the room, snapshots beyond ``keep``."""
    names = names_in(staging)
    steps = sorted(name for name in names if name.startswith("step_"))
    return sorted(names - set(steps)) + steps[keep:]


def strangers_after_sweep(staging: Path) -> list[str]:
    """The same after a kill, once the next run has taken the directory over.

    Snapshots beyond those to keep are its store's to remove.
    """
    if not staging.is_dir():
        return []
    logging.getLogger("vime").setLevel(logging.WARNING)
    heir = Staging(staging, "chaos-heir")
    heir.open()
    try:
        mine = {LOCK, heir.room.name}
        return sorted(n for n in names_in(staging) - mine if not n.startswith("step_"))
    finally:
        heir.close()
