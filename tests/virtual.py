"""Runs a coroutine on virtual time, with a schedule that a seed decides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import trio
import trio.testing

T = TypeVar("T")
_ROOT = Path(__file__).parents[1]


def run_virtual(main: Callable[[], Awaitable[T]], seed: int = 0) -> T:
    """Run ``main`` on trio; the clock jumps whenever every task is blocked.

    The order in which runnable tasks are taken comes from ``seed``, so that each ordering bug
    has a number that repeats it.
    """
    core = trio._core._run
    core._ALLOW_DETERMINISTIC_SCHEDULING = True
    core._r.seed(seed)
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(main, clock=clock, strict_exception_groups=True)


@contextmanager
def repeatable(seed: int, test_file: str) -> Iterator[None]:
    """Have whatever goes wrong with a seed say which command, at the root, repeats it."""
    try:
        yield
    except BaseException as error:
        path = Path(test_file).relative_to(_ROOT)
        error.add_note(f"repeat with: VIME_SEED={seed} VIME_SEEDS=1 .venv/bin/pytest {path}")
        raise
