"""An event loop that lets other threads have the interpreter lock every half a millisecond.

A thread that asks for the lock gets it when its holder waits for something, or after five
milliseconds. A loop that has many short steps to take waits for nothing between them: it only
looks for events, and has the lock back before anybody else has woken up.
"""

from __future__ import annotations

import asyncio
import selectors
import time

HOLD_NS = 500_000
"""Processor time of the loop's thread after which it waits a moment; one step may take longer."""

PAUSE_S = 50e-6
"""Long enough for another thread to wake up and take the lock."""


class _Selector(selectors.DefaultSelector):
    """Looks for events, as the loop does between any two rounds of steps."""

    def __init__(self) -> None:
        super().__init__()
        self._rested_ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raises as :meth:`selectors.BaseSelector.select` does."""
        worked_ns = time.thread_time_ns() - self._rested_ns
        if timeout is not None and timeout <= 0 and worked_ns > HOLD_NS:
            time.sleep(PAUSE_S)
            self._rested_ns = time.thread_time_ns()
        began = time.perf_counter()
        events = super().select(timeout)
        if time.perf_counter() - began > PAUSE_S:
            self._rested_ns = time.thread_time_ns()
        return events


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop for a thread beside others."""
    return asyncio.SelectorEventLoop(_Selector())
