"""Starts every kind of descendant that is hard to end, and prints their pids as one JSON line.

All of them ignore SIGTERM, and sleep until they are killed.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import setproctitle


def fork(prepare: Callable[[], None]) -> None:
    """Start a descendant that prepares itself; its pid goes to ``ready`` when it has."""
    if os.fork() == 0:
        prepare()
        os.write(write_end, f"{prepare.__name__} {os.getpid()}\n".encode())
        while True:
            signal.pause()


def plain() -> None:
    """An ordinary grandchild."""


def stopped() -> None:
    """Stopped by its parent once it has reported itself."""


def own_session() -> None:
    os.setsid()


def renamed_in_own_session() -> None:
    os.setsid()
    setproctitle.setproctitle("VLLM::Worker, say")


def daemon() -> None:
    """A grandchild of nobody: its parent is gone."""
    os.setsid()
    if os.fork():
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    read_end, write_end = os.pipe()
    kinds = (plain, stopped, own_session, renamed_in_own_session, daemon)
    for kind in kinds:
        fork(kind)
    pids = {}
    with os.fdopen(read_end) as ready:
        for _ in kinds:
            name, pid = ready.readline().split()
            pids[name] = int(pid)
    os.kill(pids["stopped"], signal.SIGSTOP)
    os.waitpid(pids["stopped"], os.WUNTRACED)
    print(json.dumps(pids), flush=True)
    while True:
        signal.pause()
