"""Watches processes, so that a test can say that none of them is left."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil

from bench.chaos.victims import still_alive


class Watch:
    """Handles on processes, taken while they live: a pid that is reused cannot deceive."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.fds = {os.pidfd_open(pid): pid for pid in pids}

    def assert_gone(self, timeout_s: float = 10.0) -> None:
        """Wait for the end of each; a zombie has ended."""
        left = still_alive(self.fds, timeout_s)
        assert not left, f"still alive: {[describe(pid) for pid in left.values()]}"

    def close(self) -> None:
        for fd, pid in self.fds.items():
            if not select.select([fd], [], [], 0)[0]:
                os.kill(pid, signal.SIGKILL)
            os.close(fd)


def describe(pid: int) -> str:
    try:
        return f"{pid} {psutil.Process(pid).cmdline()} {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return f"{pid}"


@contextmanager
def watching(pids: Iterable[int]) -> Iterator[Watch]:
    watch = Watch(pids)
    try:
        yield watch
    finally:
        watch.close()
