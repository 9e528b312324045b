"""Finds the processes of a run, and watches whether what should be gone is gone."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from vime.eval.fleet import api_server
from vime.eval.processes import keeper

T = TypeVar("T")

#: An environment variable that every process of a run inherits.
MARK = "VIME_CHAOS_RUN"

#: Seconds within which nothing may be left of what was killed.
GONE_S = 10.0

_SERVER, _CORE, _WORKER = api_server.__name__, "VLLM::EngineCore", "VLLM::Worker"
_ROUTER, _RUNNER = ("vllm::router", "vllm_router.launch_router"), "vime actor"

_TITLES = {
    "server": (_SERVER,),
    "core": (_CORE,),
    "worker": (_WORKER,),
    "router": _ROUTER,
    "runner": (_RUNNER,),
}


def role_of(process: psutil.Process) -> str | None:
    """What a process is in a run, by its title; ``None`` for a helper of one of these."""
    try:
        words = process.cmdline() or [process.name()]
    except psutil.Error:
        return None
    if keeper.__file__ in words:
        return "keeper"
    title = " ".join(words)
    return next((role for role, names in _TITLES.items() if any(n in title for n in names)), None)


def below(pid: int) -> list[psutil.Process]:
    """A process and everything that descends from it; empty when it has gone."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return []


def first(processes: Iterable[psutil.Process], role: str) -> psutil.Process | None:
    """The first one with that role."""
    return next((p for p in processes if role_of(p) == role), None)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Every living process whose environment has the run's mark."""
    entry = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):  # noqa: PTH208 -- a path for each of them takes longer
        if not name.isdecimal():
            continue
        try:
            if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                yield psutil.Process(int(name))
        except (OSError, psutil.Error):
            continue  # gone meanwhile, a zombie, or somebody else's


def still_alive(processes: Mapping[int, T], timeout_s: float) -> dict[int, T]:
    """Wait for the end of all; those that live on. A zombie has ended.

    Args:
        processes: pidfd → what the caller knows it by.
        timeout_s: how long to wait.
    """
    deadline = time.monotonic() + timeout_s
    left = dict(processes)
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            poll.unregister(fd)
            del left[fd]
    return left


class Doomed:
    """Processes that are about to die, held by handles that no reused pid can deceive."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._names: dict[int, str] = {}
        for process in processes:
            try:
                fd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            self._names[fd] = f"{process.pid} {role_of(process) or 'helper'}"

    def survivors(self, timeout_s: float = GONE_S) -> list[str]:
        """Wait for the end of all; the names of those that live on. A zombie has ended."""
        left = still_alive(self._names, timeout_s)
        for fd in self._names:
            os.close(fd)
        return sorted(left.values())
