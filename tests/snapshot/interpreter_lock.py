"""Counts how often another thread got to run while some work was being done."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable


def turns_of_another_thread(work: Callable[[], object]) -> int:
    """Run ``work`` with forced switches off: another thread runs only when it gives the lock up."""
    turns = 0
    begun, ended = threading.Event(), threading.Event()

    def train() -> None:
        nonlocal turns
        begun.set()
        while not ended.is_set():
            turns += 1
            time.sleep(0)  # gives the lock back, which nobody can take from it

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        before = turns
        while turns == before:  # from here on the thread waits under the new interval
            time.sleep(0)
        before = turns
        work()
        return turns - before
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()


def leaves_the_lock(work: Callable[[], object]) -> bool:
    """Whether another thread ever gets to run; a busy machine may need some tries to show it."""
    return any(turns_of_another_thread(work) for _ in itertools.repeat(None, 100))
